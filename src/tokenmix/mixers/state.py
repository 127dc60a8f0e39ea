"""Streaming states as values, and where their tokens stand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import MixerError
from ..functional.layout.positions import default_places

State = Any  # a NamedTuple of tensors, batch first


def token_positions(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Default positions (B, T): index minus the index of the row's first True key; without a mask, the index. Padding before it gets 0."""
    return default_places(x.shape[0], x.shape[1], key_mask, x.device)


def chunk_positions(start: Tensor, x: Tensor, positions: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Positions (B, L) of a chunk whose rows stand at ``start`` (B,), and the counter after it. Rows that have seen no True key yet stay at 0."""
    if positions is not None:
        return positions, positions[:, -1] + 1
    L = x.shape[1]
    if key_mask is None:
        return (start[:, None] + torch.arange(L, device=x.device)).clamp_min(0), start.long() + L
    seen = (key_mask.cumsum(1) > 0) | (start > 0)[:, None]
    counted = seen.cumsum(1)
    return (start[:, None] + counted - 1).clamp_min(0), start + counted[:, L - 1]


def register_state(cls: type) -> type:
    """Class decorator: make a state NamedTuple a pytree node that ``torch.export`` can serialise."""
    pytree._register_namedtuple(cls, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")
    return cls


def reorder(state: State, index: Tensor) -> State:
    """Pick batch rows of a streaming state, with repetition: beam search, or dropping finished rows."""
    return pytree.tree_map(lambda a: a.index_select(0, index), state)


def state_bytes(state: State) -> int:
    """Memory the state's tensors take, in bytes."""
    return sum(a.numel() * a.element_size() for a in pytree.tree_leaves(state))


def merge(earlier: State, later: State) -> State:
    """The state after two adjacent stretches of tokens, from the states after each alone. Only for scan-type states, which are sums."""
    combine = getattr(earlier, "merge_with", None)
    if combine is None or type(earlier) is not type(later):
        names = f"{type(earlier).__name__} and {type(later).__name__}"
        raise MixerError(f"merge: {names} cannot be merged; only two states of one mixer whose state is a sum can, such as aft_simple, hydra and linear.")
    if any(a.shape != b.shape for a, b in zip(earlier, later, strict=True)):
        shapes = " and ".join(str([tuple(a.shape) for a in state]) for state in (earlier, later))
        raise MixerError(f"merge: expects two states of one mixer and as many rows each, got tensors of shapes {shapes}.")
    return combine(later)
