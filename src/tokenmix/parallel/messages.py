"""Trees of tensors as messages of bytes between the ranks of a group, with gradients that travel the other way.

Each exchange takes and returns a ``chain``, a zero through which every exchange depends on the one before. The backward
pass of each rank then runs all exchanges in one order, also where a rank uses nothing of what it received.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

Tree = TypeVar("Tree")
Group = Any  # a torch.distributed.ProcessGroup or, where a caller gives one, a DeviceMesh; None for all processes


class _Like(NamedTuple):
    """What a tensor looks like."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def _pack_message(leaves: Sequence[Tensor]) -> Tensor:
    """Return the bytes of all tensors as one message."""
    flat = [a.detach().reshape(-1).clone(memory_format=torch.contiguous_format) for a in leaves]
    return torch.cat([a.view(torch.uint8) for a in flat])


def _unpack_message(message: Tensor, like: Sequence[_Like]) -> list[Tensor]:
    """Return the tensors of a message; copies, since bytes inside a message may be out of line for their type."""
    parts = message.split([each.bytes for each in like])
    return [part.clone().view(each.dtype).view(each.shape) for part, each in zip(parts, like, strict=True)]


def _send_message(group: Group, message: Tensor, by: int) -> Tensor | None:
    """Send a message ``by`` ranks to the right, to the left if below 0; return that received, None if there is none."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(message) if 0 <= rank - by < ranks else None
    asked = [dist.P2POp(dist.isend, message, group=group, group_peer=rank + by)] if 0 <= rank + by < ranks else []
    if received is not None:
        asked.append(dist.P2POp(dist.irecv, received, group=group, group_peer=rank - by))
    for work in dist.batch_isend_irecv(asked) if asked else ():
        work.wait()
    return received


def _remember(ctx: Any, group: Group, leaves: Sequence[Tensor]) -> list[_Like]:
    ctx.group, ctx.floating = group, [a.is_floating_point() for a in leaves]
    like = [_Like(a.shape, a.dtype) for a in leaves]
    ctx.like = [each for each, floating in zip(like, ctx.floating, strict=True) if floating]
    return like


def _input_gradients(ctx: Any, chain: Tensor, found: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments, of which integers have none."""
    rest = iter(found)
    return None, None, chain, *(next(rest) if floating else None for floating in ctx.floating)


class _Gathered(torch.autograd.Function):
    """All-gather. In the backward pass each rank receives and sums the gradients of its own tensors."""

    @staticmethod
    def forward(ctx: Any, group: Group, _: int, chain: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        like, message = _remember(ctx, group, leaves), _pack_message(leaves)
        every = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, message, group=group)
        out = [a for each in every for a in _unpack_message(each, like)]
        ctx.mark_non_differentiable(*(a for a in out if not a.is_floating_point()))
        return chain.clone(), *out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, chain: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        n = len(ctx.floating)
        sent = [g for i, g in enumerate(gradients) if ctx.floating[i % n]]
        if not sent:
            return _input_gradients(ctx, chain, [])
        message = _pack_message(sent)
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message, group=ctx.group)
        every = [_unpack_message(each, ctx.like) for each in received.chunk(len(gradients) // n)]
        return _input_gradients(ctx, chain, [torch.stack(parts).sum(0) for parts in zip(*every, strict=True)])


class _Shifted(torch.autograd.Function):
    """Shift to the right. Backward the gradients go to the left."""

    @staticmethod
    def forward(ctx: Any, group: Group, by: int, chain: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.by, like, message = by, _remember(ctx, group, leaves), _pack_message(leaves)
        received = _send_message(group, message, by)
        out = _unpack_message(torch.zeros_like(message) if received is None else received, like)
        ctx.mark_non_differentiable(*(a for a in out if not a.is_floating_point()))
        return chain.clone(), *out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, chain: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sent = [g for g, floating in zip(gradients, ctx.floating, strict=True) if floating]
        if not sent:
            return _input_gradients(ctx, chain, [])
        message = _pack_message(sent)
        received = _send_message(ctx.group, message, -ctx.by)
        found = [None] * len(sent) if received is None else _unpack_message(received, ctx.like)
        return _input_gradients(ctx, chain, found)


def _split_tensors(tree: object) -> tuple[list[object], list[int], pytree.TreeSpec]:
    """Return the leaves of a tree, the places of its tensors, and its structure."""
    leaves, spec = pytree.tree_flatten(tree)
    return leaves, [i for i, a in enumerate(leaves) if isinstance(a, Tensor)], spec


def _as_tree(leaves: list[object], places: list[int], spec: pytree.TreeSpec, tensors: Sequence[Tensor]) -> Any:
    """Return a tree like one's own with other tensors."""
    filled = list(leaves)
    for i, a in zip(places, tensors, strict=True):
        filled[i] = a
    return pytree.tree_unflatten(filled, spec)


def gather_trees(group: Group, tree: Tree, chain: Tensor) -> tuple[list[Tree], Tensor]:
    """Return the trees of all ranks, which have one structure, and the chain."""
    leaves, places, spec = _split_tensors(tree)
    chain, *found = _Gathered.apply(group, 0, chain, *(leaves[i] for i in places))  # type: ignore[no-untyped-call]
    n = len(places)
    return [_as_tree(leaves, places, spec, found[i : i + n]) for i in range(0, len(found), n)], chain


def shift_tree(group: Group, tree: Tree, by: int, chain: Tensor) -> tuple[Tree | None, Tensor]:
    """Return the tree of the rank ``by`` to the left, None if there is none, and the chain."""
    leaves, places, spec = _split_tensors(tree)
    chain, *found = _Shifted.apply(group, by, chain, *(leaves[i] for i in places))  # type: ignore[no-untyped-call]
    return None if dist.get_rank(group) < by else _as_tree(leaves, places, spec, found), chain
