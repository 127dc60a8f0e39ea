"""Sampling of the next token from logits: temperature, top-k, top-p."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MixerError


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuse settings out of range."""
    if not temperature >= 0:
        raise MixerError(f"temperature must be >= 0 (0 is greedy), got {temperature}.")
    if top_k is not None and top_k < 1:
        raise MixerError(f"top_k must be at least 1, got {top_k}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise MixerError(f"top_p must be in (0, 1], got {top_p}.")


def pick_token(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Sample tokens (B, 1) from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    probs = keep_top(logits.float() / temperature, top_k, top_p).softmax(-1)
    return torch.multinomial(probs, 1, generator=generator)


def keep_top(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Set logits (B, V) to -inf outside the k most likely tokens, then outside the fewest whose probability reaches p.

    None leaves the respective limit out.
    """
    if top_k is not None and top_k < logits.shape[-1]:
        order = logits.argsort(dim=-1, descending=True, stable=True)  # no threshold, as ties would keep more than k
        logits = logits.scatter(-1, order[:, top_k:], float("-inf"))
    if top_p is not None and top_p < 1:
        probs, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
        drop = probs.cumsum(-1) - probs >= top_p
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), float("-inf"))
    return logits
