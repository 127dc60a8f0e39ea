"""Options that make no sense, given to constructors and to functional forms."""

from __future__ import annotations

import collections
import inspect
from typing import Any

import torch

import tokenmix

from . import attempt

WRONG: tuple[Any, ...] = (None, -1, 0, 1.5, "x", True, float("nan"), [], {}, 10**30)
GIVEN = {"max_len": 8, "window": 3, "heads": 2, "kernel_size": 3}


def _outcomes(call: Any, *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except tokenmix.MixerError:
        return "MixerError"
    except Exception as error:
        return type(error).__name__
    return "accepted"


def _count(names: list[str]) -> str:
    found: collections.Counter[str] = collections.Counter()
    for name in names:
        options = inspect.signature(tokenmix.MIXERS[name].__init__).parameters
        usual = {k: v for k, v in GIVEN.items() if k in options and options[k].default is inspect.Parameter.empty}
        for option in list(options)[2:]:
            for value in WRONG:
                found[_outcomes(tokenmix.MIXERS[name], 8, **{**usual, option: value})] += 1
    total = sum(found.values())
    leaks = {kind: n for kind, n in sorted(found.items()) if kind not in ("MixerError", "accepted")}
    return (
        f"of {total} wrong values {found['MixerError']} are refused in a line, {found['accepted']} accepted; "
        f"torch's and Python's own errors: {leaks or 'none'}"
    )


@attempt("m", "Wrong options of the AFT layers")
def options_of_aft() -> str:
    """They fell between two tables of tests."""
    return _count([name for name in tokenmix.MIXERS if name.startswith("aft_")])


@attempt("m", "Wrong options of every other mixer")
def options_of_others() -> str:
    """A bool for a number, a number too large for torch."""
    return _count([name for name in tokenmix.MIXERS if not name.startswith("aft_")])


@attempt("2", "Causal attention with a factor of 0 or below on its logits")
def attention_scale() -> str:
    """Torch's causal attention multiplies its -inf by the factor: 0 * inf, or +inf."""
    x = torch.randn(1, 6, 8)
    said = [_outcomes(tokenmix.build_mixer, "attention", 8, heads=2, causal=True, scale=scale) for scale in (0.0, -0.5)]
    if said != ["accepted"] * 2:
        return f"refused: {', '.join(said)}"
    outputs = [tokenmix.build_mixer("attention", 8, heads=2, causal=True, scale=scale)(x) for scale in (0.0, -0.5)]
    return (
        f"accepted; {sum(int(y.isnan().sum()) for y in outputs)} of {sum(y.numel() for y in outputs)} outputs are NaN"
    )


@attempt("1", "AFT-conv on a grid of more cells than there are tokens")
def conv_beside() -> str:
    """The C kernel wrote beside its tensors."""
    q, k, v = torch.randn(2, 12, 8), torch.randn(2, 12, 2), torch.randn(2, 12, 8)
    said = [
        _outcomes(tokenmix.functional.aft_conv, q, k, v, torch.randn(2, 3, 3), grid=(3, 4), prefix=prefix)
        for prefix in (1, 5, -1)
    ]
    return f"prefix 1, 5, -1: {', '.join(said)}"


@attempt("m", "AFT-local with a window of 2^31 - 1 over 10 tokens")
def wide_window() -> str:
    """The eager form made room for the window, not for the sequence."""
    q, k, v = torch.randn(3, 2, 10, 8).unbind(0)
    return _outcomes(tokenmix.functional.aft_local, q, k, v, torch.randn(10, 10), window=2**31 - 1, backend="eager")
