# `make tables` writes this file from table.py and the constructors of its classes; change those instead.

from collections.abc import Sequence
from typing import (
    Any,
    Literal,
    overload,
)

from ..contrib.axial import Axial
from ..contrib.compressive import Compressive
from ..contrib.external import SimplifiedAttention
from ..contrib.fourier import Fourier
from ..contrib.gmlp import GMLP
from ..contrib.hydra import PolyNL
from ..contrib.image_local import ImageLocal
from ..contrib.lambda_layer import Lambda
from ..contrib.lightconv import (
    DynamicConv,
    LightConv,
)
from ..contrib.linformer import Linformer
from ..contrib.memory_compressed import MemoryCompressed
from ..contrib.mlp_mixer import MLPMixer
from ..contrib.nystrom import Nystrom
from ..contrib.patterns import (
    Fixed,
    Strided,
)
from ..contrib.patterns_bigbird import BigBird
from ..contrib.patterns_longformer import (
    ETC,
    Longformer,
)
from ..contrib.pct_attention import PCTAttention
from ..contrib.pooling import Pooling
from ..contrib.reformer import Reformer
from ..contrib.routing import Routing
from ..contrib.set import InducedSet
from ..contrib.sinkhorn import Sinkhorn
from ..contrib.spatial_reduction import SpatialReduction
from ..contrib.transformer_xl import TransformerXL
from ..functional.sums.gates import Gate
from ..functional.sums.outside import (
    Filters,
    LocalOutside,
    Outside,
)
from .aft import (
    AFTFull,
    AFTLocal,
    AFTSimple,
)
from .aft_conv import AFTConv
from .aft_forget import (
    AFTForget,
    Decay,
)
from .aft_pairs import AFTPairs
from .aft_reach import AFTReach
from .attention import Attention
from .base import Mixer
from .external import (
    External,
    ExternalMultihead,
)
from .hydra import (
    Hydra,
    MultiheadLinear,
)
from .linear import LinearAttention
from .local import Local
from .performer import Performer
from .rfa import RFA
from .synthesizer import (
    SynthesizerDense,
    SynthesizerFactorizedDense,
    SynthesizerFactorizedRandom,
    SynthesizerRandom,
)
from .synthesizer_mixture import SynthesizerMixture

MixerName = Literal[
    "attention",
    "aft_full",
    "aft_local",
    "aft_simple",
    "aft_conv",
    "aft_forget",
    "aft_reach",
    "aft_pairs",
    "hydra",
    "multihead_linear",
    "external",
    "external_multihead",
    "synthesizer_dense",
    "synthesizer_random",
    "synthesizer_factorized_dense",
    "synthesizer_factorized_random",
    "synthesizer_mixture",
    "linear",
    "performer",
    "rfa",
    "local",
    "polynl",
    "simplified_attention",
    "strided",
    "fixed",
    "longformer",
    "etc",
    "bigbird",
    "linformer",
    "nystrom",
    "memory_compressed",
    "spatial_reduction",
    "set",
    "lightconv",
    "dynamicconv",
    "lambda",
    "mlp_mixer",
    "gmlp",
    "pooling",
    "fourier",
    "reformer",
    "routing",
    "sinkhorn",
    "transformer_xl",
    "compressive",
    "axial",
    "image_local",
    "pct_attention",
]

@overload
def build_mixer(
    name: Literal["attention"],
    dim: int,
    *,
    causal: bool = False,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    positions: dict[str, Any] | None = None,
    bias: dict[str, Any] | None = None,
    max_len: int | None = None,
    scale: float | None = None,
    qk_norm: str | None = None,
    norm_eps: float = 1e-06,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> Attention: ...
@overload
def build_mixer(
    name: Literal["aft_full"],
    dim: int,
    *,
    max_len: int | None = None,
    causal: bool = False,
    max_context_len: int | None = None,
    bias: dict[str, Any] | None = None,
    rank: int | None = 64,
    init_std: float = 0.01,
    gate: Gate | None = "sigmoid",
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> AFTFull: ...
@overload
def build_mixer(
    name: Literal["aft_local"],
    dim: int,
    *,
    window: int,
    max_len: int | None = None,
    causal: bool = False,
    max_context_len: int | None = None,
    bias: dict[str, Any] | None = None,
    rank: int | None = 64,
    init_std: float = 0.01,
    outside: Outside = "zero",
    gate: Gate | None = "sigmoid",
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> AFTLocal: ...
@overload
def build_mixer(
    name: Literal["aft_simple"],
    dim: int,
    *,
    causal: bool = False,
    gate: Gate | None = "sigmoid",
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> AFTSimple: ...
@overload
def build_mixer(
    name: Literal["aft_conv"],
    dim: int,
    *,
    heads: int,
    kernel_size: int,
    causal: bool = False,
    ndim: int = 1,
    bias: dict[str, Any] | None = None,
    reparam: bool = True,
    init_std: float = 0.02,
    outside: Outside = "zero",
    filters: Filters = "exp",
    divide: bool = True,
    gate: Gate | None = "sigmoid",
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> AFTConv: ...
@overload
def build_mixer(
    name: Literal["aft_forget"],
    dim: int,
    *,
    causal: bool = False,
    norm_heads: int | None = None,
    kernel_size: int | None = None,
    key_norm: bool = True,
    decay: Decay | None = "learned",
    half_lives: tuple[float, float] = ...,
    gate: Gate | None = "sigmoid",
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> AFTForget: ...
@overload
def build_mixer(
    name: Literal["aft_reach"],
    dim: int,
    *,
    causal: bool = False,
    reaches: int = 8,
    half_lives: tuple[float, float] = ...,
    heads: int = 8,
    norm: bool = True,
    kernel_size: int | None = None,
    key_norm: bool = True,
    gate: Gate | None = "sigmoid",
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> AFTReach: ...
@overload
def build_mixer(
    name: Literal["aft_pairs"],
    dim: int,
    *,
    causal: bool = False,
    rank: int = 4,
    heads: int = 8,
    norm: bool = True,
    kernel_size: int | None = None,
    key_norm: bool = True,
    decay: bool = True,
    half_lives: tuple[float, float] = ...,
    gate: Gate | None = "sigmoid",
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> AFTPairs: ...
@overload
def build_mixer(
    name: Literal["hydra"],
    dim: int,
    *,
    causal: bool = False,
    feature: str = "cosine",
    normalise: bool = False,
    eps: float = 1e-06,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> Hydra: ...
@overload
def build_mixer(
    name: Literal["multihead_linear"],
    dim: int,
    *,
    causal: bool = False,
    heads: int = 8,
    feature: str = "cosine",
    normalise: bool = False,
    eps: float = 1e-06,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> MultiheadLinear: ...
@overload
def build_mixer(
    name: Literal["external"],
    dim: int,
    *,
    causal: bool = False,
    slots: int = 64,
    tied: bool = False,
    norm: str = "double",
    eps: float = 1e-09,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> External: ...
@overload
def build_mixer(
    name: Literal["external_multihead"],
    dim: int,
    *,
    causal: bool = False,
    heads: int = 8,
    coef: int = 4,
    slots: int = 64,
    norm: str = "double",
    eps: float = 1e-09,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> ExternalMultihead: ...
@overload
def build_mixer(
    name: Literal["synthesizer_dense"],
    dim: int,
    *,
    max_len: int,
    causal: bool = False,
    heads: int = 8,
    head_dim: int | None = None,
    hidden: int | None = None,
    share_heads: bool = False,
    bias: bool = True,
    pair_bias: dict[str, Any] | None = None,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> SynthesizerDense: ...
@overload
def build_mixer(
    name: Literal["synthesizer_random"],
    dim: int,
    *,
    max_len: int,
    causal: bool = False,
    heads: int = 8,
    head_dim: int | None = None,
    trainable: bool = True,
    init_std: float | None = None,
    share_heads: bool = False,
    pair_bias: dict[str, Any] | None = None,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> SynthesizerRandom: ...
@overload
def build_mixer(
    name: Literal["synthesizer_factorized_dense"],
    dim: int,
    *,
    max_len: int,
    causal: bool = False,
    heads: int = 8,
    head_dim: int | None = None,
    hidden: int | None = None,
    factor: int | None = None,
    share_heads: bool = False,
    bias: bool = True,
    pair_bias: dict[str, Any] | None = None,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> SynthesizerFactorizedDense: ...
@overload
def build_mixer(
    name: Literal["synthesizer_factorized_random"],
    dim: int,
    *,
    max_len: int,
    causal: bool = False,
    heads: int = 8,
    head_dim: int | None = None,
    rank: int = 8,
    init_std: float = 0.02,
    share_heads: bool = False,
    pair_bias: dict[str, Any] | None = None,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> SynthesizerFactorizedRandom: ...
@overload
def build_mixer(
    name: Literal["synthesizer_mixture"],
    dim: int,
    *,
    max_len: int,
    causal: bool = False,
    parts: Sequence[str] = ...,
    join: str = "softmax",
    alpha_per_head: bool = False,
    heads: int = 8,
    head_dim: int | None = None,
    scale: float | None = None,
    rank: int = 8,
    factor: int | None = None,
    init_std: float = 0.02,
    share_heads: bool = False,
    bias: bool = True,
    pair_bias: dict[str, Any] | None = None,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> SynthesizerMixture: ...
@overload
def build_mixer(
    name: Literal["linear"],
    dim: int,
    *,
    causal: bool = False,
    heads: int = 8,
    feature: str = "elu",
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> LinearAttention: ...
@overload
def build_mixer(
    name: Literal["performer"],
    dim: int,
    *,
    causal: bool = False,
    heads: int = 8,
    num_features: int | None = None,
    feature: str = "softmax",
    eps: float = 0.001,
    orthogonal: bool = True,
    redraw_interval: int | None = None,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> Performer: ...
@overload
def build_mixer(
    name: Literal["rfa"],
    dim: int,
    *,
    causal: bool = False,
    heads: int = 8,
    num_features: int | None = None,
    feature: str = "gaussian",
    gate: bool = False,
    eps: float = 0.01,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> RFA: ...
@overload
def build_mixer(
    name: Literal["local"],
    dim: int,
    *,
    causal: bool = False,
    window: int = 128,
    heads: int = 8,
    outside: LocalOutside = "none",
    bias: dict[str, Any] | None = None,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> Local: ...
@overload
def build_mixer(
    name: Literal["polynl"],
    dim: int,
    *,
    causal: bool = False,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> PolyNL: ...
@overload
def build_mixer(
    name: Literal["simplified_attention"],
    dim: int,
    *,
    causal: bool = False,
    scale: float = 1.0,
    out_bias: bool = True,
) -> SimplifiedAttention: ...
@overload
def build_mixer(
    name: Literal["strided"],
    dim: int,
    *,
    causal: bool = False,
    stride: int = 32,
    heads: int = 8,
    merged: bool = False,
    bias: dict[str, Any] | None = None,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> Strided: ...
@overload
def build_mixer(
    name: Literal["fixed"],
    dim: int,
    *,
    causal: bool = False,
    stride: int = 32,
    columns: int = 4,
    heads: int = 8,
    merged: bool = False,
    bias: dict[str, Any] | None = None,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> Fixed: ...
@overload
def build_mixer(
    name: Literal["longformer"],
    dim: int,
    *,
    causal: bool = False,
    window: int = 128,
    dilation: int | list[int] = 1,
    global_tokens: int = 1,
    heads: int = 8,
    bias: dict[str, Any] | None = None,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> Longformer: ...
@overload
def build_mixer(
    name: Literal["etc"],
    dim: int,
    *,
    causal: bool = False,
    radius: int = 64,
    global_tokens: int = 16,
    heads: int = 8,
    bias: dict[str, Any] | None = None,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> ETC: ...
@overload
def build_mixer(
    name: Literal["bigbird"],
    dim: int,
    *,
    causal: bool = False,
    block: int = 64,
    window_blocks: int = 3,
    random_blocks: int = 3,
    global_blocks: int = 2,
    seed: int = 0,
    heads: int = 8,
    bias: dict[str, Any] | None = None,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> BigBird: ...
@overload
def build_mixer(
    name: Literal["linformer"],
    dim: int,
    *,
    max_len: int,
    causal: bool = False,
    rank: int = 64,
    heads: int = 8,
    sharing: str = "headwise",
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> Linformer: ...
@overload
def build_mixer(
    name: Literal["nystrom"],
    dim: int,
    *,
    causal: bool = False,
    landmarks: int = 64,
    heads: int = 8,
    iterations: int = 6,
    conv_kernel: int | None = None,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> Nystrom: ...
@overload
def build_mixer(
    name: Literal["memory_compressed"],
    dim: int,
    *,
    causal: bool = False,
    mode: str = "compressed",
    block: int | None = None,
    heads: int = 8,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> MemoryCompressed: ...
@overload
def build_mixer(
    name: Literal["spatial_reduction"],
    dim: int,
    *,
    causal: bool = False,
    ratio: int = 2,
    ndim: int = 1,
    heads: int = 8,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> SpatialReduction: ...
@overload
def build_mixer(
    name: Literal["set"],
    dim: int,
    *,
    causal: bool = False,
    points: int = 32,
    heads: int = 8,
    inner: str = "attention",
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> InducedSet: ...
@overload
def build_mixer(
    name: Literal["lightconv"],
    dim: int,
    *,
    causal: bool = False,
    heads: int = 8,
    kernel_size: int = 31,
    glu: bool = True,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> LightConv: ...
@overload
def build_mixer(
    name: Literal["dynamicconv"],
    dim: int,
    *,
    causal: bool = False,
    heads: int = 8,
    kernel_size: int = 31,
    glu: bool = True,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> DynamicConv: ...
@overload
def build_mixer(
    name: Literal["lambda"],
    dim: int,
    *,
    max_len: int | None,
    causal: bool = False,
    heads: int = 4,
    key_width: int = 16,
    window: int | None = None,
    grid_size: list[int] | None = None,
    norm: str | None = "qk",
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> Lambda: ...
@overload
def build_mixer(
    name: Literal["mlp_mixer"],
    dim: int,
    *,
    max_len: int,
    causal: bool = False,
    hidden: int = 256,
) -> MLPMixer: ...
@overload
def build_mixer(
    name: Literal["gmlp"],
    dim: int,
    *,
    max_len: int,
    causal: bool = False,
    hidden: int | None = None,
    toeplitz: bool = False,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> GMLP: ...
@overload
def build_mixer(
    name: Literal["pooling"],
    dim: int,
    *,
    causal: bool = False,
    window: int = 3,
    subtract: bool = True,
    ndim: int = 1,
) -> Pooling: ...
@overload
def build_mixer(
    name: Literal["fourier"],
    dim: int,
    *,
    causal: bool = False,
) -> Fourier: ...
@overload
def build_mixer(
    name: Literal["reformer"],
    dim: int,
    *,
    causal: bool = False,
    heads: int = 8,
    buckets: int = 8,
    chunk: int = 16,
    rounds: int = 2,
    seed: int | None = None,
    paper_form: bool = False,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> Reformer: ...
@overload
def build_mixer(
    name: Literal["routing"],
    dim: int,
    *,
    causal: bool = False,
    heads: int = 8,
    clusters: int = 8,
    window: int = 16,
    decay: float = 0.999,
    seed: int | None = None,
    paper_form: bool = False,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> Routing: ...
@overload
def build_mixer(
    name: Literal["sinkhorn"],
    dim: int,
    *,
    causal: bool = False,
    heads: int = 8,
    block: int = 16,
    iterations: int = 5,
    temperature: float = 0.75,
    gumbel: bool = False,
    sortcut: int | None = None,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> Sinkhorn: ...
@overload
def build_mixer(
    name: Literal["transformer_xl"],
    dim: int,
    *,
    causal: bool = False,
    heads: int = 8,
    memory: int | None = None,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> TransformerXL: ...
@overload
def build_mixer(
    name: Literal["compressive"],
    dim: int,
    *,
    causal: bool = False,
    heads: int = 8,
    memory: int = 32,
    compressed: int = 32,
    rate: int = 4,
    pool: str = "mean",
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> Compressive: ...
@overload
def build_mixer(
    name: Literal["axial"],
    dim: int,
    *,
    causal: bool = False,
    heads: int = 8,
    ndim: int = 2,
    width: int | None = 16,
    order: list[int] | None = None,
    combine: str = "sequence",
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> Axial: ...
@overload
def build_mixer(
    name: Literal["image_local"],
    dim: int,
    *,
    causal: bool = False,
    heads: int = 8,
    ndim: int = 1,
    block: int | list[int] = 16,
    memory: int | list[int] = 16,
    width: int | None = None,
    qkv_bias: bool = True,
    out_bias: bool = True,
) -> ImageLocal: ...
@overload
def build_mixer(
    name: Literal["pct_attention"],
    dim: int,
    *,
    causal: bool = False,
    key_width: int | None = None,
    tied: bool = False,
    norm: str | None = "batch",
    scale: float = 1.0,
    qk_bias: bool = False,
    v_bias: bool = True,
    out_bias: bool = True,
) -> PCTAttention: ...
@overload
def build_mixer(name: str, dim: int, **options: Any) -> Mixer: ...
