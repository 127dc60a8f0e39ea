"""Connect other libraries: read and write their weights, and put our mixers inside their models."""

from .conversion_report import Report as Report
from .rotary import rotary_spec as rotary_spec
from .surgery import DistillConfig as DistillConfig
from .surgery import Site as Site
from .surgery import distill as distill
from .surgery import find_attention as find_attention
from .surgery import load_converted as load_converted
from .surgery import replace_mixers as replace_mixers
from .surgery import restore as restore
from .surgery import save_replaced as save_replaced
from .torch import MultiheadMixer as MultiheadMixer
from .vit.checkpoints import read_weights as read_weights
from .vit.convert import convert_command as convert_command
from .vit.convert import convert_vit as convert_vit
from .vit.convert import save_converted as save_converted
from .vit.read import Weights as Weights
from .vit.read import from_hf as from_hf
from .vit.read import from_timm as from_timm
from .vit.write import hf_options as hf_options
from .vit.write import timm_options as timm_options
from .vit.write import to_hf as to_hf
from .vit.write import to_timm as to_timm
