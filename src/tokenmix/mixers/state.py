"""Streaming states as values, and the positions of their tokens."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import MixerError
from ..functional.layout.positions import default_positions

State = Any  # a NamedTuple of tensors, batch first


@runtime_checkable
class Segment(Protocol):
    """What a stretch of tokens does to whatever came before it. ``Mixer.segment`` computes it."""

    def then(self, later: Self) -> Self:
        """Return the segment of both stretches, this one first. Associative, and not commutative."""

    def after(self, state: State) -> State:
        """Return the state after the stretch, given the state before it."""


class Halo(NamedTuple):
    """The last tokens before a stretch, as many as ``mixer.halo``.

    x (B, R, D), before any projection; valid (B, R) bool, False = no token, or a masked one; positions (B, R): as
    given, or else the index of each token counted from the first of the stretch, so below 0.
    """

    x: Tensor
    valid: Tensor
    positions: Tensor


def token_positions(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return the default positions (B, T): each index minus the index of the first True of the row's key mask.

    Without a mask they are the indices. Padding before the first True gets 0.
    """
    return default_positions(x.shape[0], x.shape[1], key_mask, x.device)


def chunk_positions(
    start: Tensor, x: Tensor, positions: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the positions (B, L) of a chunk and the next position (B,) of each row.

    Args:
        start: (B,), the position of the first token of the chunk.
        positions: (B, L), explicit positions; they take precedence over ``start``.
        key_mask: (B, L) bool. Rows that have had no True so far stay at 0.
    """
    if positions is not None:
        return positions, positions[:, -1] + 1
    L = x.shape[1]
    if key_mask is None:
        return (start[:, None] + torch.arange(L, device=x.device)).clamp_min(0), start.long() + L
    seen = (key_mask.cumsum(1) > 0) | (start > 0)[:, None]
    counted = seen.cumsum(1)
    return (start[:, None] + counted - 1).clamp_min(0), start + counted[:, L - 1]


def register_state(cls: type) -> type:
    """Register a state NamedTuple as a pytree node that ``torch.export`` can serialise, and that ``torch.load`` trusts.

    A class decorator.
    """
    torch.serialization.add_safe_globals([cls])
    pytree._register_namedtuple(cls, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")
    return cls


def reorder(state: State, index: Tensor) -> State:
    """Select rows of the batch from a streaming state, with repetition.

    Beam search reorders rows with it, and finished rows can be dropped.
    """
    return pytree.tree_map(lambda a: a.index_select(0, index), state)


def state_bytes(state: State) -> int:
    """Return the memory that the tensors of a state take, in bytes."""
    return sum(a.numel() * a.element_size() for a in pytree.tree_leaves(state))


def merge(earlier: State, later: State) -> State:
    """Combine the states of two adjacent stretches of tokens into the state after both.

    Only states that are sums can be merged, such as those of aft_simple, hydra and linear.

    Raises:
        MixerError: if the states cannot be merged, or differ in type or shape.
    """
    combine = getattr(earlier, "merge_with", None)
    if combine is None or type(earlier) is not type(later):
        names = f"{type(earlier).__name__} and {type(later).__name__}"
        raise MixerError(
            f"merge: {names} cannot be merged; only states that are sums can, such as those of aft_simple and hydra."
        )
    if any(a.shape != b.shape for a, b in zip(earlier, later, strict=True)):
        shapes = " and ".join(str([tuple(a.shape) for a in state]) for state in (earlier, later))
        raise MixerError(
            f"merge: expects two states of one mixer and as many rows each, got tensors of shapes {shapes}."
        )
    return combine(later)
