"""Model surgery: find a model's attention, replace it by mixers, restore it, distil it into the mixers."""

from .distill import DistillConfig as DistillConfig
from .distill import distill as distill
from .replace import replace_mixers as replace_mixers
from .restore import restore as restore
from .save_load import convert_host as convert_host
from .save_load import load_converted as load_converted
from .save_load import open_host as open_host
from .save_load import save_replaced as save_replaced
from .sites import FAMILIES as FAMILIES
from .sites import Site as Site
from .sites import find_attention as find_attention
