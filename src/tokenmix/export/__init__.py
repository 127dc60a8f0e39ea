"""Export models to ONNX, torch.export and CUDA graphs."""

from .graphed import GraphedDecoder
from .onnx import OnnxReport, export_onnx, export_program
from .onnx_model import OnnxModel

__all__ = [
    "GraphedDecoder",
    "OnnxModel",
    "OnnxReport",
    "export_onnx",
    "export_program",
]
