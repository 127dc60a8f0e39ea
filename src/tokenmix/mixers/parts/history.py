"""Streaming states that hold tokens as they were projected: all of them, or a ring of the last."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...functional.layout.positions import last_live, taken
from ..base import register_state


@register_state
class HistoryState(NamedTuple):
    """Keys and values (B, S, D) of all tokens so far or of the last R, which may be attended, where each stands (B, S), and the next position (B,)."""

    keys: Tensor
    values: Tensor
    valid: Tensor
    positions: Tensor
    position: Tensor


@register_state
class RingState(NamedTuple):
    """The last R values (B, R, c), which of them are tokens (B, R), where they stand (B, R), and the next position (B,). Constant size."""

    values: Tensor
    valid: Tensor
    positions: Tensor
    position: Tensor


def empty_history(batch: int, dim: int, length: int = 0, *, device: Any, dtype: torch.dtype) -> HistoryState:
    """Room for ``length`` tokens, none of them there."""
    ring = empty_window(batch, dim, length, device=device, dtype=dtype)
    return HistoryState(ring.values.clone(), *ring)


def empty_window(batch: int, width: int, length: int, *, device: Any, dtype: torch.dtype) -> RingState:
    """The same for values of ``width`` alone."""
    positions = torch.zeros(batch, length, dtype=torch.long, device=device)
    return RingState(torch.zeros(batch, length, width, device=device, dtype=dtype), positions.bool(), positions, positions.new_zeros(batch))


def joined(state: Any, valid: Tensor, positions: Tensor, **tokens: Tensor) -> Any:
    """The state with new tokens behind those it holds: ``values``, and ``keys`` where it has any, in its own dtype."""
    wide = {name: torch.cat([getattr(state, name), a.to(getattr(state, name).dtype)], 1) for name, a in tokens.items()}
    return state._replace(**wide, valid=torch.cat([state.valid, valid], 1), positions=torch.cat([state.positions, positions], 1))


def without_first(state: Any, n: int) -> Any:
    """The state without its n oldest tokens."""
    return state._replace(**{name: getattr(state, name)[:, n:] for name in ("keys", "values", "valid", "positions") if name in state._fields})


def newest(state: Any, length: int, *, holes: bool = False) -> Any:
    """The last ``length`` tokens of a state; with ``holes`` masked tokens may stand behind live ones, and take up no room."""
    if not holes:
        return without_first(state, state.valid.shape[1] - length)
    index, there, _ = last_live(state.valid, length)
    return state._replace(valid=there, **{name: taken(getattr(state, name), index) for name in ("keys", "values", "positions") if name in state._fields})


def ring_bytes(ring: int, width: int) -> int:
    """Bytes of a ``RingState`` of one row in float32."""
    return ring * (4 * width + 1 + 8) + 8
