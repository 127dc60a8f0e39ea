"""Values that count: parameters, multiply-accumulates, and how costs grow. Nothing is trained or even allocated."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt, prod
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from .claim import mark_stated

if TYPE_CHECKING:
    from ...mixers import Mixer

Built = TypeVar("Built")

GROWTH = ((1.0, " log {0}"), (2**0.5, " sqrt {0}"), (2.0, "^2"), (2.2, "^2 log {0}"), (4.0, "^3"))
"""Growth by doubling the length: ratio of two steps of the cost per token, and what it adds to the formula."""
WORDS: dict[str, Callable[[int], int | None]] = {"T": int, "sqrt T": isqrt, "none": lambda T: None}
"""Words for options of a mixer in data files, as functions of the number of tokens T."""


def parameter_count(model: nn.Module) -> int:
    """Count the parameters of a model."""
    return sum(p.numel() for p in model.parameters())


def on_meta(build: Callable[..., Built], *args: object, **options: object) -> Built:
    """Build a module without memory for its tensors."""
    with torch.device("meta"):
        return build(*args, **options)


def build_named(model: str, **options: object) -> Any:
    """Build a named model without memory for its tensors."""
    from ...models import build_model

    return on_meta(build_model, model, **options)


def build_layer(mixer: str, dim: int, T: int = 256, **options: object) -> Mixer:
    """Build a mixer without memory for its tensors; an option may be one of ``WORDS``."""
    from ...mixers import build_mixer

    given = {name: WORDS[v](T) if isinstance(v, str) and v in WORDS else v for name, v in options.items()}
    return on_meta(build_mixer, mixer, dim, **given)


def parameters(model: str, per: float = 1, less: str = "") -> float:
    """Count the parameters of a named model; the fixed positions of an EAMLP count, as in its official code.

    Args:
        per: unit of the count, such as 1e6 for millions.
        less: named model whose parameters are subtracted.
    """
    built = build_named(model)
    table = int(built.positions.numel()) if built.config.kind == "eamlp" else 0
    count = parameter_count(built) + table - (parameter_count(build_named(less)) if less else 0)
    return count if per == 1 else count / per


def layer_parameters(mixer: str, dim: int, per: float = 1, less: int = 0, **options: Any) -> float:
    """Count the parameters of one mixer.

    Args:
        per: unit of the count, such as 1e6 for millions.
        less: number of projections, matrices of dim x dim, that do not count.
    """
    count = parameter_count(build_layer(mixer, dim, **options)) - less * dim * dim
    return count if per == 1 else count / per


def head_width(mixer: str, dim: int, heads: int) -> int:
    """Return the width of one head's queries."""
    built: Any = build_layer(mixer, dim, heads=heads)
    return int(built.q_proj.out_features // built.heads)


def in_t5(mixer: str, **options: object) -> float:
    """Count T5-base with a mixer in its 24 self-attention layers, in millions, by building it.

    Tied embeddings, 12 encoder and 12 decoder layers, RMS norms, no biases; attention over the source has 12 heads of
    64. Relative biases, 32 for each head, are those of the mixer, in each layer and not in the first of a stack only.
    """
    from ...models import Seq2Seq, Seq2SeqConfig

    config = Seq2SeqConfig(
        dim=768,
        max_len=512,
        layers=12,
        vocab=32_128,
        mixers=({"name": mixer, **options},),
        cross_mixers=({"name": "attention", "heads": 12, "qkv_bias": False, "out_bias": False},),
        norm_type="rms",
        mlp_bias=False,
        positions=None,
    )
    return parameter_count(on_meta(Seq2Seq, config)) / 1e6


def in_wmt(mixer: str, beside: str = "", **options: Any) -> float:
    """Count the base Transformer of 67M with a mixer in its 12 self-attention layers, in millions.

    Args:
        beside: mixer whose logits are held too; it reads the same values and outputs.
    """
    shared = {"max_len": 256, "heads": 8, "qkv_bias": False, "out_bias": False}
    count = layer_parameters(mixer, 512, **shared, **options)
    count += layer_parameters(beside, 512, less=2, **shared) if beside else 0
    return 67.0 + 12 * (count - layer_parameters("attention", 512, qkv_bias=False, out_bias=False)) / 1e6


def _macs(model: str, size: int | list[int] | None) -> Any:
    from ...models import macs

    return macs(build_named(model), tuple(size) if isinstance(size, list) else size)


def giga_macs(model: str, size: int | list[int] | None = None) -> float:
    """Count the multiply-accumulates of a named model on one image, in billions."""
    return float(_macs(model, size).total / 1e9)


def mixing_share(model: str, size: int | list[int] | None = None) -> float:
    """Compute the share of token mixing in the multiply-accumulates of a named model, in percent."""
    return float(100 * _macs(model, size).share)


def mixing_ratio(model: str, other: str, size: int | list[int] | None = None) -> float:
    """Compute how many times the multiply-accumulates of mixing of one model are those of another."""
    return float(_macs(model, size).mixing / _macs(other, size).mixing)


def macs_saved(model: str, other: str, size: int | list[int] | None = None) -> float:
    """Compute the multiply-accumulates that ``other`` saves over ``model`` on one image, in percent."""
    return float(100 * (1 - _macs(other, size).total / _macs(model, size).total))


def tokens(model: str, size: int, **options: object) -> int:
    """Count the tokens that a ViT mixes on a square image: its prefix and its patches."""
    config = build_named(model, **options).config
    return int(config.prefix + prod(-(-n // config.patch) for n in (size, size)))


@mark_stated
def side(model: str, stage: int, size: int = 224) -> int:
    """Return the patches along one side in a stage of a pyramid, the first being 1."""
    return int(size // build_named(model).config.strides[stage - 1])


@mark_stated
def last_tokens(model: str, size: int = 224) -> int:
    """Count the tokens of a pyramid's last stage."""
    built = build_named(model)
    return int(built.stages[-1].prefix + (size // built.config.strides[-1]) ** 2)


@mark_stated
def reduced_pairs(dim: int, ratio: int, side: int) -> int:
    """Count the multiply-accumulates between queries and spatially reduced keys, and with values."""
    mixer = build_layer("spatial_reduction", dim, heads=1, ratio=ratio, ndim=2)
    convolution = side**2 * dim * dim  # it reads each cell once for each pair of features
    return int(mixer.cost(side**2).mixing // 2 - convolution)


@mark_stated
def grows(mixer: str, by: str = "N", of: str = "mixing", **options: Any) -> str:
    """Classify how a mixer's cost grows with the number of tokens, by its own formula.

    The cost per token is compared at 4,096, 4 and 16 times as many tokens. It stays (N), or it rises by steps that are
    equal (N log N), or twice (N sqrt N) or four times (N^2) the one before.

    Args:
        by: name of the number of tokens in the result.
        of: "mixing" for FLOPs, "activations" for what is kept for the backward pass.
        options: the mixer's; "T" and "sqrt T" stand for the number of tokens and its whole root, "none" for None.
    """
    sizes = [4096 * 4**i for i in range(3)]
    return by + classify_growth([getattr(build_layer(mixer, 64, T, **options).cost(T), of) / T for T in sizes], by)


def classify_kept_memory(mixer: str, by: str = "T", plain: bool = False, **options: Any) -> str:
    """Classify how the memory that a layer keeps for its backward pass grows, by running it.

    Counted are the bytes of the tensors that autograd saves, without the parameters.

    Args:
        by: "T" for 256, 1,024 and 4,096 tokens of 64 features, "d" for 64, 256 and 1,024 features of 256 tokens.
        plain: run plain products of torch instead of fused kernels.
        options: the mixer's; words as for ``grows``.
    """
    shapes = [(256 * 4**i, 64) if by == "T" else (256, 64 * 4**i) for i in range(3)]
    costs = [_kept_bytes(mixer, T, d, plain, options) / (T if by == "T" else d) for T, d in shapes]
    return by + classify_growth(costs, by)


def _kept_bytes(mixer: str, T: int, dim: int, plain: bool, options: dict[str, Any]) -> int:
    """Count the bytes that a layer saves of one pass over T tokens."""
    from ...kernels.backend import use_backend
    from ...mixers import build_mixer

    given = {name: WORDS[v](T) if isinstance(v, str) and v in WORDS else v for name, v in options.items()}
    layer = build_mixer(mixer, dim, **given)
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        found[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), use_backend("eager" if plain else "auto"):
        layer(torch.randn(1, T, dim))
    return sum(storage.nbytes() for at, storage in found.items() if at not in own)


def classify_growth(costs: list[float], by: str) -> str:
    """Name the growth of a cost per unit at n, 4 n and 16 n units: "" if it stays, " log N", " sqrt N", "^2"."""
    first, second = costs[1] - costs[0], costs[2] - costs[1]
    if second <= 1e-6 * costs[2]:
        return ""
    steps = (second / first) ** 0.5 if first > 0 else float("inf")
    return min(GROWTH, key=lambda known: abs(known[0] - steps))[1].format(by)


@mark_stated
def complexity(mixer: str, **options: Any) -> str:
    """Classify the growth of a mixer's cost in the tokens T and, at 256 tokens, in the width d, such as "T^2 d"."""
    costs = [build_layer(mixer, d, **options).cost(256).mixing / d for d in (64, 256, 1024)]
    return f"{grows(mixer, by='T', **options)} d{classify_growth(costs, 'd')}"


def decodes(mixer: str) -> str:
    """Say "yes" if a causal mixer gives the same token by token as for the whole sequence, else "no"."""
    from ...errors import MixerError
    from ...mixers.examples import example_mixer

    try:
        built: Any = example_mixer(mixer, 16, T=12, causal=True).double().eval()
        x, state, outputs = torch.randn(1, 12, 16, dtype=torch.float64), built.init_state(1), []
        for token in x.split(1, 1):
            y, state = built.extend(token, state)
            outputs.append(y)
    except MixerError:
        return "no"
    return "yes" if torch.allclose(torch.cat(outputs, 1), built(x), atol=1e-6) else "no"


@mark_stated
def option(mixer: str, of: str) -> object:
    """Return the default of a mixer's option."""
    from ...mixers import MIXERS
    from ...mixers.facts import mixer_options

    return mixer_options(MIXERS[mixer])[of]
