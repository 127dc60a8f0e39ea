"""Test AFT-forget on the C kernels: sums of decays that fade for long, and heads that do not divide a strip."""

from __future__ import annotations

import torch

from kernel_checks import both, worst
from tokenmix import functional


def test_a_large_key_fades_for_as_long_as_others_join():
    """What rounds in the sum of decays would show in its weight."""
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 400, 4, generator=draw) for _ in range(2))
    k[:, 0] = 100.0

    def run(k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, backend: str) -> torch.Tensor:
        return functional.aft_forget(v, k, v, decay, causal=True, gate=None, backend=backend)

    assert worst(both(run, (k, v, torch.full_like(k, -0.37)), {})) < 1e-5


def test_heads_need_not_divide_the_width_of_a_strip():
    args = tuple(torch.randn(1, 9, 1110, generator=torch.Generator().manual_seed(i)) for i in range(4))

    def run(*args: torch.Tensor, backend: str) -> torch.Tensor:
        return functional.aft_forget(*args[:3], -args[3].exp(), causal=True, heads=30, backend=backend)

    assert worst(both(run, args, {})) < 1e-5
