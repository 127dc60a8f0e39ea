"""The second tier of mixers: one file for each family, which holds its functional form and its layer."""

from __future__ import annotations

from ..mixers import Mixer, register_mixer
from .axial import Axial, axial
from .compressive import Compressive
from .compressive_forms import compressive
from .external import SimplifiedAttention, simplified_attention
from .fourier import Fourier, fourier
from .gated_conv import GatedConv, gated_conv
from .gmlp import GMLP, gmlp
from .hydra import PolyNL
from .image_local import ImageLocal, image_local
from .lambda_layer import Lambda, lambda_layer
from .lightconv import DynamicConv, LightConv, lightconv
from .linformer import Linformer, linformer
from .mamba2 import Mamba2, mamba2
from .memory_compressed import MemoryCompressed
from .memory_compressed_forms import memory_compressed
from .mlp_mixer import MLPMixer, mlp_mixer
from .nystrom import Nystrom, nystrom
from .patterns import Fixed, Strided, fixed, strided
from .patterns_bigbird import BigBird, bigbird
from .patterns_longformer import ETC, Longformer
from .patterns_longformer_forms import longformer
from .pct_attention import PCTAttention, pct_attention
from .performer import Performer
from .pooling import Pooling, pooling
from .reformer import Reformer, reformer
from .routing import Routing, routing
from .set import InducedSet, induced_set
from .sinkhorn import Sinkhorn
from .sinkhorn_forms import sinkhorn
from .spatial_reduction import SpatialReduction, spatial_reduction
from .synthesizer_mixture import SynthesizerMixture
from .transformer_xl import TransformerXL, transformer_xl

__all__ = [
    "Axial",
    "BigBird",
    "Compressive",
    "DynamicConv",
    "ETC",
    "Fixed",
    "Fourier",
    "GMLP",
    "GatedConv",
    "ImageLocal",
    "InducedSet",
    "Lambda",
    "LightConv",
    "Linformer",
    "Longformer",
    "MLPMixer",
    "Mamba2",
    "MemoryCompressed",
    "Nystrom",
    "PCTAttention",
    "Performer",
    "PolyNL",
    "Pooling",
    "Reformer",
    "Routing",
    "SimplifiedAttention",
    "Sinkhorn",
    "SpatialReduction",
    "Strided",
    "SynthesizerMixture",
    "TransformerXL",
    "axial",
    "bigbird",
    "compressive",
    "fixed",
    "fourier",
    "gated_conv",
    "gmlp",
    "image_local",
    "induced_set",
    "lambda_layer",
    "lightconv",
    "linformer",
    "longformer",
    "mamba2",
    "memory_compressed",
    "mlp_mixer",
    "nystrom",
    "pct_attention",
    "pooling",
    "reformer",
    "routing",
    "simplified_attention",
    "sinkhorn",
    "spatial_reduction",
    "strided",
    "transformer_xl",
]

ROWS: dict[str, type[Mixer]] = {
    # hydra and external
    "polynl": PolyNL,
    "simplified_attention": SimplifiedAttention,
    # synthesizer and linear
    "synthesizer_mixture": SynthesizerMixture,
    "performer": Performer,
    # patterns
    "strided": Strided,
    "fixed": Fixed,
    "longformer": Longformer,
    "etc": ETC,
    "bigbird": BigBird,
    # low rank
    "linformer": Linformer,
    "nystrom": Nystrom,
    "memory_compressed": MemoryCompressed,
    "spatial_reduction": SpatialReduction,
    "set": InducedSet,
    # gated, convolutional and MLP
    "lightconv": LightConv,
    "dynamicconv": DynamicConv,
    "lambda": Lambda,
    "mlp_mixer": MLPMixer,
    "gmlp": GMLP,
    "pooling": Pooling,
    "fourier": Fourier,
    # recurrences
    "mamba2": Mamba2,
    "short_conv": GatedConv,
    # content-sorted
    "reformer": Reformer,
    "routing": Routing,
    "sinkhorn": Sinkhorn,
    # memory
    "transformer_xl": TransformerXL,
    "compressive": Compressive,
    # images
    "axial": Axial,
    "image_local": ImageLocal,
    # points
    "pct_attention": PCTAttention,
}
"""Every mixer of this tier by name; they follow those of the core in ``MIXERS``."""

for _name, _cls in ROWS.items():
    register_mixer(_name, _cls)
