"""Masked tokens inside of a sequence that is streamed."""

from __future__ import annotations

import torch

import tokenmix

from . import attempt


def _with_a_hole(name: str, **options: object) -> str:
    torch.manual_seed(0)
    mixer, x = tokenmix.build_mixer(name, 16, causal=True, **options).eval(), torch.randn(1, 10, 16)
    live = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 1, 1, 1]], dtype=torch.bool)
    at = live.cumsum(1) - 1
    with torch.no_grad():
        want, got, state = mixer(x, positions=at, key_mask=live), [], mixer.init_state(1)
        try:
            for i in range(10):
                y, state = mixer.extend(x[:, i : i + 1], state, positions=at[:, i : i + 1], key_mask=live[:, i : i + 1])
                got.append(y)
        except ValueError as error:
            return f"refused: {error}"
    return f"off by {float((torch.cat(got, 1) - want)[live].abs().max()):.0e}"


@attempt("h4", "AFT-local streams a prompt with padding inside")
def aft_local() -> str:
    """Positions are counted without the padding, as transformers does."""
    return _with_a_hole("aft_local", window=3, max_len=16)


@attempt("h4", "AFT-conv streams a prompt with padding inside")
def aft_conv() -> str:
    """The same."""
    return _with_a_hole("aft_conv", heads=2, kernel_size=3)


@attempt("h4", "Memory-compressed attention streams a prompt with padding inside")
def memory_compressed() -> str:
    """The same."""
    return _with_a_hole("memory_compressed", heads=2)
