"""Trace programs with torch.export for free sizes, and determine which sizes each program accepts.

Every size that torch fixes or bounds is reported; none is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import MixerError
from ..functional import use_backend
from ..types import Options
from .inputs import OwnCall, Port, silence_exporters

BATCH, LONG, SHORT = 3, 256, 7
VIEWS = (torch.ops.aten.slice.Tensor, torch.ops.aten.alias.default)
"""A slice of everything is an alias, or nothing at all: a table of positions at its full length."""


@dataclass(frozen=True)
class Sizes:
    """Hold the sizes that a program accepts.

    Args:
        batch: the only batch size it accepts; None: any.
        length: the shortest and the longest length; None as the second: unlimited.
        padded: the program pads every input to the longest length, because its steps depend on the length.
    """

    batch: int | None
    length: tuple[int, int | None]
    padded: bool = False


def programs(port: Port, length: int | None, fixed: bool) -> Iterator[tuple[torch.export.ExportedProgram, Sizes]]:
    """Yield programs for a port with their sizes, the best first.

    The order is: any length up to ``length``, the same by padding, ``length`` alone.
    """
    if length is not None and (port.size is not None or length < 1 or length > (port.longest or length)):
        takes = "one size" if port.size is not None else f"lengths 1 to {port.longest}"
        raise MixerError(f"export: {port.who} takes {takes}, got length={length}.")
    most = length or port.longest or LONG
    if port.size is None and (port.decodes or not fixed and _same_steps(port, most)):
        yield from _of_any_length(port, most)
    if port.decodes:
        why = f"a step of {port.who} depends on how many tokens came before it"
        raise MixerError(f"export: {why}, so no single program can be its decode step.")
    if port.size is None and not fixed and most > 2 and port.paddable:
        program = _export(replace(port, module=Padded(port.module, most, port.tokenwise)), most - 1, free=True)
        yield program, replace(_sizes(program, port, most - 1), length=(1, most), padded=True)
    only = most if port.size is None else port.size
    program = _export(port, only, free=False)
    yield program, Sizes(_sizes(program, port, only).batch, (only, only))


class _Operators(TorchDispatchMode):
    """Record which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: Options | None = None
    ) -> object:
        if func not in VIEWS:
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


def _same_steps(port: Port, most: int) -> bool:
    """Return whether other lengths run the same operators in the same order.

    Where they do not, a program traced at one length is wrong at another, and tracing it takes minutes.
    """
    seen = []
    for length in (most, most // 2 + 1):
        with torch.no_grad(), use_backend("eager"), _Operators() as mode:
            port.module(*port.example(1, length))
        seen.append(mode.seen)
    return seen[0] == seen[1]


def _of_any_length(port: Port, most: int) -> Iterator[tuple[torch.export.ExportedProgram, Sizes]]:
    """Yield a program with a free length from 1 to ``most``, or after any number of earlier tokens up to ``most``.

    Tracing is repeated at another length where torch specialises on the first.
    """
    for at in dict.fromkeys(n for n in (SHORT if port.decodes else most, most - 1, most) if 1 < n <= most):
        program = _export(port, at, free=True)
        sizes = _sizes(program, port, at)
        low, high = sizes.length
        if low == 1 and (high is None or high >= most) and _runs(program, port, sizes, most):
            yield program, replace(sizes, length=(1, port.longest if high is None else min(high, port.longest or most)))
            return
        if low < at and not port.decodes:
            return


def _runs(program: torch.export.ExportedProgram, port: Port, sizes: Sizes, most: int) -> bool:
    """Return whether the program accepts a short, a middle and a long input.

    At run time torch checks conditions that its ranges do not show.
    """
    low, run = sizes.length[0], program.module()
    try:
        for length in dict.fromkeys((low, (low + most) // 2, most)):
            run(*port.example(BATCH if sizes.batch is None else sizes.batch, length))
    except Exception:  # torch raises errors of many types here
        return False
    return True


class Padded(nn.Module):
    """Pad whole inputs at the end to ``most`` tokens, mask the padding and drop its outputs.

    Args:
        tokenwise: for each output, whether it has an axis of tokens; others stay as they are.
    """

    def __init__(self, call: nn.Module, most: int, tokenwise: tuple[bool, ...] = (True,)):
        super().__init__()
        self.call, self.most, self.tokenwise = call, most, tokenwise

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        """Return the outputs of the tokens given."""
        B, T = x.shape[:2]
        torch._check(self.most >= T)
        real = torch.ones(B, T, dtype=torch.bool, device=x.device) if key_mask is None else key_mask
        found = self.call(self._pad_tokens(x), self._pad_tokens(real))
        at = torch.arange(T, device=x.device)  # a slice would constrain T
        outputs = found if isinstance(found, tuple) else (found,)
        cut = tuple(y.index_select(1, at) if own else y for y, own in zip(outputs, self.tokenwise, strict=True))
        return cut if isinstance(found, tuple) else cut[0]

    def _pad_tokens(self, a: Tensor) -> Tensor:
        """Append ``most`` zeros and cut to ``most`` tokens, which puts no constraint on T."""
        return torch.cat([a, a.new_zeros(a.shape[0], self.most, *a.shape[2:])], 1)[:, : self.most]


def short_length(port: Port) -> int:
    """Return a length that the port accepts."""
    return port.size if port.size is not None else min(SHORT, SHORT if port.longest is None else port.longest)


def varying_axes(port: Port, length: int) -> tuple[tuple[object, ...], list[tuple[set[int], set[int]]]]:
    """Return the example and, for each tensor in it, the axes that vary with the batch and with the length."""
    one, wide, long = (
        [tuple(a.shape) for a in pytree.tree_leaves(port.example(*at))]
        for at in ((BATCH, length), (BATCH + 1, length), (BATCH, length - 1))
    )
    axes = [
        tuple({i for i, (n, m) in enumerate(zip(a, b, strict=True)) if n != m} for b in others)
        for a, *others in zip(one, wide, long, strict=True)
    ]
    return port.example(BATCH, length), axes  # type: ignore[return-value]  # each is a pair of sets


def _export(port: Port, length: int, *, free: bool) -> torch.export.ExportedProgram:
    args, axes = varying_axes(port, length)
    shapes = [dict.fromkeys(batch | (along if free else set()), torch.export.Dim.AUTO) for batch, along in axes]
    leaves, tree = pytree.tree_flatten(args)
    assert len(leaves) == len(shapes)
    free_axes = pytree.tree_unflatten(shapes, tree)
    try:
        with silence_exporters():
            return torch.export.export(
                port.module,
                args,
                # torch sees the arguments of *values as one
                dynamic_shapes=(free_axes,) if isinstance(port.module, OwnCall) else free_axes,
            )
    except MixerError:
        raise
    except Exception as why:
        reason = " ".join(str(why).split())[:200]
        raise MixerError(f"export: torch.export cannot trace {port.who} ({type(why).__name__}: {reason}).") from why


def input_shapes(program: torch.export.ExportedProgram) -> list[list[int | torch.SymInt]]:
    """Return the shapes of the program's inputs, of integers and symbols."""
    users = set(program.graph_signature.user_inputs)
    return [
        list(node.meta["val"].shape) for node in program.graph.nodes if node.op == "placeholder" and node.name in users
    ]


def _sizes(program: torch.export.ExportedProgram, port: Port, length: int) -> Sizes:
    """Return the sizes that torch.export determined: those it fixed, and the bounds of the others."""
    _, axes = varying_axes(port, length)
    bounds: dict[bool, list[tuple[int, int | None]]] = {True: [], False: []}
    for shape, (batch, along) in zip(input_shapes(program), axes, strict=True):
        for axis in batch | along:
            bounds[axis in batch].append(_bounds(program, shape[axis]))
    rows, steps = bounds[True], bounds[False]
    fixed = [low for low, high in rows if high is not None]
    low = max((low for low, _ in steps), default=1)
    high = min((high for _, high in steps if high is not None), default=None)
    return Sizes(fixed[0] if fixed else None, (1 if low <= 2 else low, high))


def _bounds(program: torch.export.ExportedProgram, size: int | torch.SymInt) -> tuple[int, int | None]:
    """Return the smallest and the largest value of a dimension; None: unbounded.

    torch never reports a minimum below 2; that minimum means any size.
    """
    if isinstance(size, int):
        return size, size
    bound = program.range_constraints.get(size.node.expr)
    if bound is None:  # an expression of other sizes: treated as fixed
        return int(size.node.hint), int(size.node.hint)
    return int(bound.lower), int(bound.upper) if bool(bound.upper < 2**62) else None
