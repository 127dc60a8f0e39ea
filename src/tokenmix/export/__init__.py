"""Export models to ONNX, torch.export and CUDA graphs."""

from .graphed import GraphedDecoder as GraphedDecoder
from .onnx import OnnxReport as OnnxReport
from .onnx import export_onnx as export_onnx
from .onnx import export_program as export_program
from .onnx_model import OnnxModel as OnnxModel
