"""NaN and infinity through the C kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import tokenmix
from tokenmix import functional

from . import attempt

T, D = 70, 16


def _calls() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    draw = torch.Generator().manual_seed(1)
    w, taps = torch.randn(T, T, generator=draw), torch.randn(4, 5, generator=draw)
    return {
        "aft_simple": lambda q, k, v: functional.aft_simple(q, k, v, causal=True, backend="cpu"),
        "aft_full": lambda q, k, v: functional.aft_full(q, k, v, w, causal=True, backend="cpu"),
        "aft_local": lambda q, k, v: functional.aft_local(q, k, v, w, window=9, causal=True, backend="cpu"),
        "aft_conv": lambda q, k, v: functional.aft_conv(
            q, k[..., :4].contiguous(), v, taps, causal=True, backend="cpu"
        ),
        "linear": lambda q, k, v: functional.linear_attention(q, k, v, heads=4, causal=True, backend="cpu"),
        "hydra": lambda q, k, v: functional.hydra(q, k, v, feature="sigmoid/softmax", causal=True, backend="cpu"),
    }


def _qkv() -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, T, D, generator=draw) for _ in range(3))


def _one_key(value: float) -> str:
    """What a key of token 33 does to the rows before it, and how many of those after it are finite."""
    (q, k, v), said = _qkv(), []
    bad = k.clone()
    bad[0, 33] = value
    for name, call in _calls().items():
        y, y0 = call(q, bad, v), call(q, k, v)
        off = float((y - y0)[0, :33].abs().max())
        past = f"past off by {off:.0e}, " if not off < 1e-5 else ""
        said.append(f"{name} {past}{int(y[0, 33:].isfinite().any(-1).sum())}")
    return f"finite rows of the {T - 33} after it: " + "; ".join(said)


@attempt("2", "A NaN key in the middle, causal, on the C kernels")
def nan_key() -> str:
    return _one_key(float("nan"))


@attempt("2", "An infinite key in the middle, causal, on the C kernels")
def infinite_key() -> str:
    return _one_key(float("inf"))


@attempt("2", "Keys that are all NaN, as of a layer that diverged: what is finite")
def all_keys() -> str:
    (q, k, v), said = _qkv(), []
    for name, call in _calls().items():
        leaf = (k * float("nan")).requires_grad_()
        y = call(q, leaf, v)
        y.sum().backward()
        assert leaf.grad is not None
        finite = [what for what, a in (("outputs", y), ("gradients", leaf.grad[..., :4])) if bool(a.isfinite().any())]
        said.append(f"{name}: {' and '.join(finite) or 'nothing'}")
    return "; ".join(said)


@attempt("2", "A NaN token in a stream on the C kernels: how many of the 20 rows after it are finite")
def stream() -> str:
    said = []
    for name, options in {
        "aft_simple": {},
        "aft_full": {"max_len": 40},
        "aft_local": {"window": 5, "max_len": 40},
        "hydra": {},
        "linear": {"heads": 4},
    }.items():
        torch.manual_seed(0)
        mixer, x = tokenmix.build_mixer(name, D, causal=True, **options).requires_grad_(False), torch.randn(1, 40, D)
        x[0, 19], state, rows = float("nan"), mixer.init_state(1), 0
        for t in range(40):
            y, state = mixer.extend(x[:, t : t + 1], state)
            rows += t > 19 and bool(y.isfinite().any())
        said.append(f"{name} {rows}")
    return ", ".join(said)
