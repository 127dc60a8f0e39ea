"""Model surgery: find a model's attention, put mixers in its place, take them out again, let them learn what it did."""

from .replace import replace_mixers as replace_mixers
from .restore import restore as restore
from .sites import FAMILIES as FAMILIES
from .sites import Site as Site
from .sites import find_attention as find_attention
