"""Other libraries: their weights into our models and back, and our models as programs they can run."""

from ._report import Report as Report
from .convert import RULES as RULES
from .convert import convert_command as convert_command
from .convert import convert_vit as convert_vit
from .convert import save_converted as save_converted
from .files import read_weights as read_weights
from .onnx import OnnxReport as OnnxReport
from .onnx import export_onnx as export_onnx
from .onnx import export_program as export_program
from .onnx_model import OnnxModel as OnnxModel
from .rotary import rotary_spec as rotary_spec
from .weights import Weights as Weights
from .weights import from_hf as from_hf
from .weights import from_timm as from_timm
from .weights_back import hf_options as hf_options
from .weights_back import timm_options as timm_options
from .weights_back import to_hf as to_hf
from .weights_back import to_timm as to_timm
