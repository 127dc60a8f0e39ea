"""The streaming state of mixers that see a window of values and no keys: the last R values, and where they stand."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .base import register_state


@register_state
class RingState(NamedTuple):
    """The last R values (B, R, c), which of them are tokens (B, R), where they stand (B, R), and the next position (B,). Constant size."""

    values: Tensor
    live: Tensor
    places: Tensor
    position: Tensor


def empty_window(batch: int, ring: int, width: int, *, device: Any, dtype: torch.dtype) -> RingState:
    """A ring that has seen nothing."""
    places = torch.zeros(batch, ring, dtype=torch.long, device=device)
    return RingState(torch.zeros(batch, ring, width, device=device, dtype=dtype), places.bool(), places, places.new_zeros(batch))


def joined(state: Any, values: Tensor, live: Tensor, places: Tensor) -> Any:
    """The state with new tokens behind those it holds."""
    values = torch.cat([state.values, values.to(state.values.dtype)], 1)
    return state._replace(values=values, live=torch.cat([state.live, live], 1), places=torch.cat([state.places, places], 1))


def without_first(state: Any, n: int) -> Any:
    """The state without its n oldest tokens."""
    return state._replace(values=state.values[:, n:], live=state.live[:, n:], places=state.places[:, n:])


def ring_bytes(ring: int, width: int) -> int:
    """Bytes of a ``RingState`` of one row in float32."""
    return ring * (4 * width + 1 + 8) + 8
