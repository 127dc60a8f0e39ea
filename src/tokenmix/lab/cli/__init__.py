"""The command line, ``tokenmix VERB``.

Every verb is a frozen dataclass: its fields are the options, its method ``run`` does the work.
"""

from .entry import main

__all__ = ["main"]
