"""Run the command line as ``python -m tokenmix VERB``, for when its script is not on the path."""

from .cli import main

raise SystemExit(main())
