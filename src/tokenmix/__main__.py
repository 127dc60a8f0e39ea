"""Run the command line as ``python -m tokenmix VERB``, for when its script is not on the path."""

from .lab.cli import main

raise SystemExit(main())
