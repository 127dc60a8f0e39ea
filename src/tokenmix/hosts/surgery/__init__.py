"""Model surgery: find a model's attention, replace it by mixers, restore it."""

from ...export.inputs import PORT_FINDERS
from .attention_adapter import AttentionAdapter
from .families import FAMILIES
from .ports import host_port
from .replace import replace_mixers
from .restore import restore
from .save_load import convert_host, load_converted, open_host, save_replaced
from .sites import Site, find_attention

__all__ = [
    "AttentionAdapter",
    "FAMILIES",
    "Site",
    "convert_host",
    "find_attention",
    "load_converted",
    "open_host",
    "replace_mixers",
    "restore",
    "save_replaced",
]

PORT_FINDERS.append(host_port)  # so that export_onnx takes a host whose attention was replaced
