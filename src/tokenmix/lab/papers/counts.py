"""Measures that count: parameters, multiply-accumulates, and how costs grow. Nothing is trained or even allocated."""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt, prod
from typing import Any

import torch
from torch import nn

from .claim import Measure, stated

Options = Callable[[int], dict[str, Any]]
GROWTH = ((1.0, " log {0}"), (2**0.5, " sqrt {0}"), (2.0, "^2"), (2.2, "^2 log {0}"), (4.0, "^3"))
"""Growth by doubling the length: ratio of two steps of the cost per token, and what it adds to the formula."""


def held(model: nn.Module) -> int:
    """Count the parameters of a model."""
    return sum(p.numel() for p in model.parameters())


def on_meta(build: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Build a module without memory for its tensors."""
    with torch.device("meta"):
        return build(*args, **options)


def named(name: str) -> Any:
    """Build a named model without memory for its tensors."""
    from ...models import build_model

    return on_meta(build_model, name)


def parameters(name: str) -> Measure:
    """Count the parameters of a named model; the fixed positions of an EAMLP count, as in its official code."""

    def count() -> int:
        model = named(name)
        table = model.positions.numel() if model.config.kind == "eamlp" else 0
        return held(model) + int(table)

    return count


def millions(name: str) -> Measure:
    """Count the parameters of a named model in millions."""
    count = parameters(name)
    return lambda: float(count()) / 1e6


def giga_macs(name: str, size: Any = None) -> Measure:
    """Count the multiply-accumulates of a named model on one image, in billions."""
    from ...models import macs

    return lambda: macs(named(name), size).total / 1e9


def mixing_share(name: str, size: Any = None) -> Measure:
    """Compute the share of token mixing in the multiply-accumulates of a named model, in percent."""
    from ...models import macs

    return lambda: 100 * macs(named(name), size).share


def mixing_ratio(name: str, other: str, size: Any) -> Measure:
    """Compute how many times the multiply-accumulates of mixing of one model are those of another."""
    from ...models import macs

    return lambda: macs(named(name), size).mixing / macs(named(other), size).mixing


def saved(name: str, other: str, size: Any) -> Measure:
    """Compute the multiply-accumulates that ``other`` saves over ``name`` on one image, in percent."""
    from ...models import macs

    return lambda: 100 * (1 - macs(named(other), size).total / macs(named(name), size).total)


def tokens(name: str, size: int, **options: Any) -> Measure:
    """Count the tokens that a ViT mixes on a square image: its prefix and its patches."""

    def count() -> int:
        from ...models import build_model

        config = on_meta(build_model, name, **options).config
        return config.prefix + prod(-(-n // config.patch) for n in (size, size))

    return count


def layer(name: str, dim: int, **options: Any) -> int:
    """Count the parameters of one mixer."""
    from ...mixers import build_mixer

    return held(on_meta(build_mixer, name, dim, **options))


def grows(name: str, options: Options, *, by: str = "N", of: str = "mixing", start: int = 4096, **fixed: Any) -> str:
    """Classify how a mixer's cost grows with the number of tokens, by its own formula.

    The cost per token is compared at ``start``, 4 and 16 times as many tokens. It stays (N), or it rises by steps
    that are equal (N log N), or twice (N sqrt N) or four times (N^2) the one before.

    Args:
        options: function of the number of tokens that returns the mixer's options.
        by: name of the number of tokens in the result.
        of: "mixing" for FLOPs, "activations" for what is kept for the backward pass.
    """
    from ...mixers import build_mixer

    dim = fixed.pop("dim", 64)
    sizes = [start * 4**i for i in range(3)]
    costs = [getattr(on_meta(build_mixer, name, dim, **options(T), **fixed).cost(T), of) / T for T in sizes]
    return by + classified(costs, by)


def classified(costs: list[float], by: str) -> str:
    """Name the growth of a cost per unit at n, 4 n and 16 n units: "" if it stays, " log N", " sqrt N", "^2"."""
    first, second = costs[1] - costs[0], costs[2] - costs[1]
    if second <= 1e-6 * costs[2]:
        return ""
    steps = (second / first) ** 0.5 if first > 0 else float("inf")
    return min(GROWTH, key=lambda known: abs(known[0] - steps))[1].format(by)


def growth(name: str, options: Options | None = None, **more: Any) -> Measure:
    """Return the measure of ``grows``; without options those that the class gives as an example for any length."""
    return stated(lambda: grows(name, options or (lambda T: {}), **more))


def of_width(name: str, **options: Any) -> str:
    """Classify how a mixer's cost grows with its width d, at 256 tokens."""
    from ...mixers import build_mixer

    sizes = [64, 256, 1024]
    costs = [on_meta(build_mixer, name, d, **options).cost(256).mixing / d for d in sizes]
    return "d" + classified(costs, "d")


def complexity(name: str, options: Options | None = None, width: dict[str, Any] | None = None) -> Measure:
    """Return the measure of growth in the tokens T and in the width d, such as "T^2 d"."""
    given = options or (lambda T: {})
    return stated(lambda: f"{grows(name, given, by='T')} {of_width(name, **(given(256) if width is None else width))}")


def root(T: int) -> int:
    """Return the whole root of a number of tokens, for options that grow with it."""
    return isqrt(T)


def decodes(name: str) -> Measure:
    """Say "yes" if a causal mixer gives the same token by token as for the whole sequence, else "no"."""

    def measure() -> str:
        from ...errors import MixerError
        from ...mixers.examples import example_mixer

        try:
            mixer: Any = example_mixer(name, 16, T=12, causal=True).double().eval()
            x, state, said = torch.randn(1, 12, 16, dtype=torch.float64), mixer.init_state(1), []
            for token in x.split(1, 1):
                y, state = mixer.extend(token, state)
                said.append(y)
        except MixerError:
            return "no"
        return "yes" if torch.allclose(torch.cat(said, 1), mixer(x), atol=1e-6) else "no"

    return measure


def option(name: str, of: str) -> Measure:
    """Return the default of a mixer's option."""
    from ...mixers import MIXERS
    from ...mixers.facts import mixer_options

    return stated(lambda: mixer_options(MIXERS[name])[of])
