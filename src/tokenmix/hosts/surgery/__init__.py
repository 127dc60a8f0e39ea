"""Model surgery: find a model's attention, put mixers in its place, take them out again, let them learn what it did."""

from .distil import DistillConfig as DistillConfig
from .distil import distill as distill
from .folder import convert_host as convert_host
from .folder import load_converted as load_converted
from .folder import open_host as open_host
from .folder import save_replaced as save_replaced
from .replace import replace_mixers as replace_mixers
from .restore import restore as restore
from .sites import FAMILIES as FAMILIES
from .sites import Site as Site
from .sites import find_attention as find_attention
