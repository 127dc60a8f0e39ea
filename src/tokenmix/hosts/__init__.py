"""Connect other libraries: read and write their weights, and put our mixers inside their models."""

from .conversion_report import Report, read_report
from .cpu_kernels import CpuKernels, cpu_kernels
from .kernel_folder import write_kernel_folder
from .patch_grid import given_grid
from .recurrent_layers import convert_layer
from .rotary import rotary_spec
from .surgery import (
    AttentionAdapter,
    Site,
    find_attention,
    load_converted,
    replace_mixers,
    restore,
    save_replaced,
)
from .torch import MultiheadMixer
from .vit.checkpoints import read_weights
from .vit.convert import convert_command, convert_vit, save_converted
from .vit.read import Weights, from_hf, from_timm
from .vit.write import hf_options, timm_options, to_hf, to_timm

__all__ = [
    "AttentionAdapter",
    "CpuKernels",
    "MultiheadMixer",
    "Report",
    "Site",
    "Weights",
    "convert_command",
    "convert_layer",
    "convert_vit",
    "cpu_kernels",
    "find_attention",
    "from_hf",
    "from_timm",
    "given_grid",
    "hf_options",
    "load_converted",
    "read_report",
    "read_weights",
    "replace_mixers",
    "restore",
    "rotary_spec",
    "save_converted",
    "save_replaced",
    "timm_options",
    "to_hf",
    "to_timm",
    "write_kernel_folder",
]
