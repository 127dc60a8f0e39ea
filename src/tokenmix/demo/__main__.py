"""`python -m tokenmix.demo --out DIR`."""

import sys

from . import main

sys.exit(main())
