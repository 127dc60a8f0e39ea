"""Positions of tokens: defaults, and rows shifted so that index = position."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.backend import is_exporting

Positions = Tensor | tuple[Tensor, Tensor]
"""Integer positions (B, T) of queries and keys alike, or a pair: (B, T) of the queries and (B, S) of the keys."""


def first_true(key_mask: Tensor) -> Tensor:
    """Return the index (B, 1) of the first True of each row; the length if there is none."""
    return (key_mask.cumsum(1) == 0).sum(1, keepdim=True)


def default_positions(rows: int, length: int, key_mask: Tensor | None, device: torch.device) -> Tensor:
    """Return (B, S): index minus the index of the row's first True key; padding in front gets 0."""
    index = torch.arange(length, device=device).expand(rows, length)
    return index if key_mask is None else (index - first_true(key_mask)).clamp_min(0)


def fill_from_last_valid(positions: Tensor, valid: Tensor) -> Tensor:
    """Replace the positions of masked tokens by that of the last valid token before them.

    Arbitrary values there then cannot separate tokens that belong together.
    """
    return _carry_forward(positions, valid, 0)


def position_gaps(positions: Tensor, valid: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far each token is from the valid token before it (B, T), at least 0, and the last valid position.

    Args:
        last: (B,), the position of the last valid token before these.
    """
    if positions.shape[1] == 1 and not is_exporting() and not torch.compiler.is_compiling():  # one decoded token
        at = positions[:, 0].to(last.dtype)
        return (positions - last[:, None]).clamp_min(0), torch.where(valid[:, 0], at, last)
    at = torch.cat([last[:, None].to(positions.dtype), positions], 1)
    carried = fill_from_last_valid(at, torch.cat([torch.ones_like(valid[:, :1]), valid], 1))
    return (positions - carried[:, :-1]).clamp_min(0), carried[:, -1].to(last.dtype)


def _carry_forward(values: Tensor, valid: Tensor, nothing: int) -> Tensor:
    """Replace values (B, T) of masked tokens by the last valid token's; ``nothing`` before the first.

    Written without cummax, which ONNX lacks.
    """
    rank = valid.cumsum(1)  # valid tokens lie in slots 1, 2, ..; slot 0 holds nothing
    slots = values.new_full((values.shape[0], values.shape[1] + 1), nothing)
    return slots.scatter(1, torch.where(valid, rank, 0), torch.where(valid, values, nothing)).gather(1, rank)


def last_valid(valid: Tensor, keep: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the last ``keep`` valid tokens of each row (B, S), in order and right-aligned.

    Returns their indices and which slots hold one (B, keep), and the valid tokens (B, S) that came before those.
    """
    behind = valid.flip(1).cumsum(1).flip(1)  # valid tokens from here on
    slot = torch.where(valid & (behind <= keep), keep - behind, keep)  # the slot after the last collects all others
    index = torch.arange(valid.shape[1], device=valid.device).expand(valid.shape)
    found = index.new_zeros(valid.shape[0], keep + 1).scatter(1, slot, index)[:, :keep]
    there = torch.arange(keep, device=valid.device) >= keep - behind[:, :1]
    return found, there, valid & (behind > keep)


def gather_tokens(a: Tensor, index: Tensor) -> Tensor:
    """Gather the tokens of a (B, S, ..) at indices (B, n)."""
    return a.gather(1, index.view(*index.shape, *[1] * (a.ndim - 2)).expand(*index.shape, *a.shape[2:]))


def from_start(a: Tensor, starts: Tensor) -> Tensor:
    """Shift a (B, T, ...) left by ``starts`` (B,), so that each row's position 0 comes first.

    What follows the end repeats the last token.
    """
    T = a.shape[1]
    index = (torch.arange(T, device=a.device) + starts[:, None]).clamp_max(T - 1)
    return a.gather(1, index.view(*index.shape, *[1] * (a.ndim - 2)).expand(a.shape))


def back_to_place(a: Tensor, starts: Tensor) -> Tensor:
    """Undo ``from_start`` for outputs (B, T, C); tokens before a row's start get exactly 0."""
    index = torch.arange(a.shape[1], device=a.device) - starts[:, None]
    moved = a.gather(1, index.clamp_min(0)[..., None].expand(a.shape))
    return torch.where((index >= 0)[..., None], moved, 0.0)


def align_to_start(starts: Tensor, key_mask: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply ``from_start`` to tensors (B, T, ..).

    Returns which slots (B, T) then hold a valid token of the row, followed by the tensors.
    """
    T = tensors[0].shape[1]
    within = torch.arange(T, device=starts.device) + starts[:, None] < T
    valid = within if key_mask is None else within & from_start(key_mask, starts)
    return valid, *(from_start(a, starts) for a in tensors)


def drop_padding(key_mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply ``align_to_start`` by the padding in front of each row, so that the index is the default position."""
    return align_to_start(first_true(key_mask)[:, 0], key_mask, *tensors)


def in_order(form: Callable[..., Tensor], tensors: tuple[Tensor, ...], key_mask: Tensor | None) -> Tensor:
    """Call ``form(*tensors, key_mask)`` on rows shifted so that index = position.

    Tokens before a row's first key get 0.
    """
    if key_mask is None:
        return form(*tensors, None)
    valid, *moved = drop_padding(key_mask, *tensors)
    return back_to_place(form(*moved, valid), first_true(key_mask)[:, 0])
