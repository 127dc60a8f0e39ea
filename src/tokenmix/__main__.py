"""`python -m tokenmix VERB`: the command line where its script is not on the path."""

from .cli import main

raise SystemExit(main())
