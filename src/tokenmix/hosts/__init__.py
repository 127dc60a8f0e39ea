"""Other libraries: their weights into our models, and back."""

from ._report import Report as Report
from .convert import RULES as RULES
from .convert import convert_command as convert_command
from .convert import convert_vit as convert_vit
from .convert import save_converted as save_converted
from .export import hf_options as hf_options
from .export import timm_options as timm_options
from .export import to_hf as to_hf
from .export import to_timm as to_timm
from .files import read_weights as read_weights
from .surgery import DistillConfig as DistillConfig
from .surgery import Site as Site
from .surgery import distill as distill
from .surgery import find_attention as find_attention
from .surgery import load_converted as load_converted
from .surgery import replace_mixers as replace_mixers
from .surgery import restore as restore
from .surgery import save_replaced as save_replaced
from .torch import MultiheadMixer as MultiheadMixer
from .weights import Weights as Weights
from .weights import from_hf as from_hf
from .weights import from_timm as from_timm
