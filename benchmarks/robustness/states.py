"""Streaming states that are not what the mixer wrote."""

from __future__ import annotations

import torch

import tokenmix

from . import attempt


def _narrowed(name: str, dtype: torch.dtype, **options: object) -> str:
    torch.manual_seed(0)
    mixer, x = tokenmix.build_mixer(name, 16, causal=True, **options).eval(), torch.randn(2, 20, 16)
    with torch.no_grad():
        y, state = mixer(x), mixer.extend(x[:, :10], mixer.init_state(2))[1]
        state = type(state)(*(a.to(dtype) if a.is_floating_point() else a for a in state))
        off = (mixer.extend(x[:, 10:11], state)[0] - y[:, 10:11]).abs().max()
    return f"off by {float(off):.1e}"


@attempt("1", "Hydra streams on from a state kept in float32")
def hydra_float32() -> str:
    """Its C kernel took every buffer for float64."""
    return _narrowed("hydra", torch.float32)


@attempt("1", "Linear attention streams on from a state kept in float32")
def linear_float32() -> str:
    """The same."""
    return _narrowed("linear", torch.float32, heads=2)
