"""The streaming state of mixers whose pattern may look back anywhere: every key and value so far."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .base import Mixer, register_state
from .options import at_least as at_least
from .options import check_heads


@register_state
class HistoryState(NamedTuple):
    """Keys and values so far (B, S, D), which may be attended, where each stands (B, S), and the next position (B,)."""

    keys: Tensor
    values: Tensor
    live: Tensor
    places: Tensor
    position: Tensor


def add_projections(mixer: Mixer, *, heads: int, qkv_bias: bool, out_bias: bool) -> None:
    """q_proj, k_proj, v_proj and out_proj, all dim x dim, for heads of equal width."""
    check_heads(mixer, heads)
    for name in ("q_proj", "k_proj", "v_proj"):
        mixer.register_module(name, nn.Linear(mixer.dim, mixer.dim, bias=qkv_bias))
    mixer.register_module("out_proj", nn.Linear(mixer.dim, mixer.dim, bias=out_bias))


def empty_history(batch: int, dim: int, *, device: Any, dtype: torch.dtype) -> HistoryState:
    """Nothing seen."""
    keys = torch.zeros(batch, 0, dim, device=device, dtype=dtype)
    places = torch.zeros(batch, 0, dtype=torch.long, device=device)
    return HistoryState(keys, keys.clone(), places.bool(), places, torch.zeros(batch, dtype=torch.long, device=device))


def longer(state: HistoryState, k: Tensor, v: Tensor, live: Tensor, at: Tensor, after: Tensor) -> HistoryState:
    """The history with the tokens of a chunk, which stand ``at`` these positions, behind it."""
    new = k.to(state.keys.dtype), v.to(state.values.dtype), live, at
    keys, values, lives, places = (torch.cat(pair, 1) for pair in zip(state[:4], new, strict=True))
    return HistoryState(keys, values, lives, places, after)
