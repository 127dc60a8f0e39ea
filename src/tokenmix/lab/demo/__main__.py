"""`python -m tokenmix.lab.demo --out DIR`."""

import sys

from . import main

sys.exit(main())
