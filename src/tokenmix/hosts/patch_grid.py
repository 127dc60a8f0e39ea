"""Carry the grid of patches from a host's patch embedding to the layers behind it, anew in each forward pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..errors import MixerError

Grid = tuple[int, int]
FORWARD = -1


class _Pass:
    """A forward pass that may be recomputed, and the grid of its patches."""

    def __init__(self, grid: Grid):
        self.grid = grid


class _Local(threading.local):
    """The part of a ``PatchGrid`` that each thread has for itself: the grid, since when, and those of outer passes."""

    def __init__(self) -> None:
        self.grid: Grid | None = None
        self.backward = FORWARD
        self.outer: Any = None
        self.begun: _Pass | None = None


class PatchGrid:
    """Hold the rows and columns of the patches that a model's patch embedding made last.

    Its methods ``enter``, ``note`` and ``leave`` are hooks of the model and of its patch embedding. Each thread has a
    grid of its own, and a forward pass within another one leaves the outer grid as it was. A layer that is recomputed
    for the backward pass (gradient checkpointing), perhaps in another thread, gets the grid with its number of patches
    that belongs to a graph still in memory.
    """

    def __init__(self) -> None:
        self.local = _Local()
        self.seen: WeakSet[_Pass] = WeakSet()
        self.kept: dict[Grid, _Pass] = {}  # the last of each grid whose graph is not known

    def __getstate__(self) -> dict[str, object]:
        return {}

    def __setstate__(self, state: dict[str, object]) -> None:
        PatchGrid.__init__(self)

    def enter(self, model: nn.Module, args: object) -> None:
        """Begin a forward pass: its patches are not known yet."""
        if not torch.compiler.is_compiling():
            self.local.outer = self.local.grid, self.local.outer
            self.local.grid = None

    def note(self, embedding: Any, args: Any, patches: Tensor) -> None:
        """Note the grid that an embedding of patches made: a convolution, or a module of timm's that computes it."""
        known = hasattr(embedding, "dynamic_feat_size") and args
        rows, columns = embedding.dynamic_feat_size(args[0].shape[-2:]) if known else patches.shape[-2:]
        self.set_grid((int(rows), int(columns)) if torch.jit.is_tracing() else (rows, columns), patches)

    def set_grid(self, grid: Grid, patches: Tensor | None = None) -> None:
        """Set the grid of the current thread."""
        self.local.grid = grid
        if torch.compiler.is_compiling():
            return
        self.local.backward = _backward()
        if not torch.is_grad_enabled() or self.local.backward != FORWARD:
            return
        begun = self.local.begun = self.kept[grid] = _Pass(grid)
        self.seen.add(begun)
        if patches is not None and patches.grad_fn is not None:
            self._keep_with(patches, begun)

    def _keep_with(self, tensor: Tensor, begun: _Pass) -> None:
        """Remember a pass as long as the graph of a tensor is in memory, and no longer."""
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata[id(self)] = begun
        if self.kept.get(begun.grid) is begun:
            del self.kept[begun.grid]

    def leave(self, model: nn.Module, args: object, outputs: object) -> None:
        """End a forward pass; the last grid stays for layers that are called by hand afterwards."""
        if torch.compiler.is_compiling():
            return
        if self.local.begun is not None:
            for tensor in tensors_of(outputs):
                self._keep_with(tensor, self.local.begun)
            self.local.begun = None
        grid, self.local.outer = self.local.outer or (None, None)
        if self.local.outer is not None:
            self.local.grid = grid

    def find(self, patches: int) -> Grid | None:
        """Return the grid of the current pass; None: it is unknown.

        Args:
            patches: number of patches that the layer got; it chooses among the grids of passes that are recomputed.

        Raises:
            MixerError: for a recomputed layer, where passes with as many patches in other grids came before it.
        """
        if torch.compiler.is_compiling() or self.local.backward == _backward():
            return self.local.grid
        fitting = {each.grid for each in self.seen if prod(each.grid) == patches}
        if len(fitting) > 1:
            grids = " and ".join(f"{rows} x {columns}" for rows, columns in sorted(fitting))
            raise MixerError(
                f"{patches} patches were {grids} in the forward passes before this backward pass, and gradient "
                "checkpointing cannot tell which to recompute; call backward after each forward pass"
            )
        return next(iter(fitting), None)

    def watch(self, embedding: nn.Module, owner: nn.Module) -> None:
        """Register the hooks."""
        embedding.register_forward_hook(self.note)
        owner.register_forward_pre_hook(self.enter)
        owner.register_forward_hook(self.leave, always_call=True)


def tensors_of(outputs: object) -> Iterator[Tensor]:
    """Yield the tensors among a model's outputs."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, (list, tuple, Mapping)):
        for each in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from tensors_of(each)


def _backward() -> int:
    """Return the number of the backward pass that is under way in this thread, or ``FORWARD``."""
    return torch._C._current_graph_task_id()


def unwatch(model: nn.Module) -> dict[nn.Module, PatchGrid]:
    """Remove the hooks of every ``PatchGrid`` from a model; return the grid that each patch embedding had."""
    found = {}
    for module in model.modules():
        for table in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(table.items()):
                holder = getattr(hook, "__self__", None)
                if isinstance(holder, PatchGrid):
                    del table[key]
                    module._forward_hooks_always_called.pop(key, None)
                    if hook.__name__ == "note":
                        found[module] = holder
    return found


def find_patch_embedding(model: nn.Module, name: str, patch: Grid | None = None) -> tuple[nn.Module, nn.Module] | None:
    """Return the patch embedding before a layer, and the smallest module that holds both; None: it is not clear.

    Args:
        name: of the layer, dotted.
        patch: the size of a patch; None: only a module of timm's that can tell its grid is taken.
    """
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        owner = model.get_submodule(".".join(parts[:depth]))
        embedding = getattr(owner, "patch_embed", None)
        if isinstance(embedding, nn.Module) and hasattr(embedding, "dynamic_feat_size"):
            return embedding, owner
        others = [m for n, child in owner.named_children() if n != parts[depth] for m in child.modules()]
        found = [m for m in others if isinstance(m, nn.Conv2d) and m.kernel_size == m.stride == patch]
        if found:
            return (found[0], owner) if len(found) == 1 else None
    return None


@contextmanager
def given_grid(model: nn.Module, *, grid: Grid) -> Iterator[None]:
    """Give the grid of patches to a host's layers that are called by hand inside the context, without the host.

    Example:
        with given_grid(model, grid=(9, 16)): y = model.encoder(tokens)

    Raises:
        MixerError: for a model without replaced layers that read patches, or a grid that is no two numbers.
    """
    holders = {id(each): each for m in model.modules() if isinstance(each := getattr(m, "patches", None), PatchGrid)}
    sides = tuple(grid) if isinstance(grid, (list, tuple)) else ()
    if not holders or len(sides) != 2 or not all(isinstance(n, int) and n > 0 for n in sides):
        wanted = "expects a model with mixers that read patches, and grid=(rows, columns)"
        raise MixerError(f"given_grid: {wanted}, got a {type(model).__name__} and grid={grid!r}.")
    before = [(holder.local, holder.local.grid) for holder in holders.values()]
    for holder in holders.values():
        holder.set_grid((sides[0], sides[1]))
    try:
        yield
    finally:
        for local, held in before:
            local.grid = held
