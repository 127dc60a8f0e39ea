"""Streaming states that hold projected tokens: all of them, or a ring of the last ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...functional.layout.positions import gather_tokens, last_valid
from ..base import register_state


@register_state
class HistoryState(NamedTuple):
    """Projected tokens: all of them so far, or a ring of the last R.

    keys, values (B, S, D); valid (B, S) bool, True = may be attended; positions (B, S); position (B,), the next one.
    """

    keys: Tensor
    values: Tensor
    valid: Tensor
    positions: Tensor
    position: Tensor


@register_state
class RingState(NamedTuple):
    """The last R values. Its size is constant.

    values (B, R, c); valid (B, R) bool, True = there is a token that counts; positions (B, R); position (B,), the next
    one.
    """

    values: Tensor
    valid: Tensor
    positions: Tensor
    position: Tensor


def empty_history(batch: int, dim: int, length: int = 0, *, device: Any, dtype: torch.dtype) -> HistoryState:
    """Return a state with room for ``length`` tokens, all of them missing."""
    ring = empty_window(batch, dim, length, device=device, dtype=dtype)
    return HistoryState(ring.values.clone(), *ring)


def empty_window(batch: int, width: int, length: int, *, device: Any, dtype: torch.dtype) -> RingState:
    """Return such a state for values of ``width`` features, without keys."""
    positions = torch.zeros(batch, length, dtype=torch.long, device=device)
    return RingState(
        torch.zeros(batch, length, width, device=device, dtype=dtype),
        positions.bool(),
        positions,
        positions.new_zeros(batch),
    )


def append_tokens(state: Any, valid: Tensor, positions: Tensor, **tokens: Tensor) -> Any:
    """Append new tokens to a state, in its own dtype.

    Args:
        tokens: ``values``, and ``keys`` where the state has keys.
    """
    wide = {name: torch.cat([getattr(state, name), a.to(getattr(state, name).dtype)], 1) for name, a in tokens.items()}
    return state._replace(
        **wide, valid=torch.cat([state.valid, valid], 1), positions=torch.cat([state.positions, positions], 1)
    )


def without_first(state: Any, n: int) -> Any:
    """Return the state without its n oldest tokens."""
    return state._replace(
        **{
            name: getattr(state, name)[:, n:]
            for name in ("keys", "values", "valid", "positions")
            if name in state._fields
        }
    )


def keep_newest(state: Any, length: int, *, holes: bool = False) -> Any:
    """Return the state with its last ``length`` tokens.

    Args:
        holes: whether masked tokens may follow valid ones; masked tokens then take up no room.
    """
    if not holes:
        return without_first(state, state.valid.shape[1] - length)
    index, there, _ = last_valid(state.valid, length)
    return state._replace(
        valid=there,
        **{
            name: gather_tokens(getattr(state, name), index)
            for name in ("keys", "values", "positions")
            if name in state._fields
        },
    )


def join_rings(earlier: Any, later: Any) -> tuple[Any, Any, Tensor]:
    """Join two rings of the same size: the last valid tokens of both.

    Returns:
        The joined ring, in the fields of ``later``; all tokens of both; and which of those are valid and left.
    """
    size = later.valid.shape[1]
    all_tokens = append_tokens(
        earlier,
        later.valid,
        later.positions,
        **{name: getattr(later, name) for name in ("keys", "values") if name in later._fields},
    )
    ring = keep_newest(all_tokens, size, holes=True)
    kept = {name: getattr(ring, name) for name in ("keys", "values", "valid", "positions") if name in ring._fields}
    return later._replace(**kept), all_tokens, last_valid(all_tokens.valid, size)[2]


def ring_bytes(ring: int, width: int) -> int:
    """Compute the bytes of one row of a ``RingState`` in float32."""
    return ring * (4 * width + 1 + 8) + 8
