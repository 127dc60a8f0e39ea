"""The command line, ``tokenmix VERB``."""

from .main import main as main
