"""Programs of torch.export with free sizes, and how far these reach: torch finds out, and what it fixes or bounds is never passed over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import MixerError
from ._ports import Port, quietly

BATCH, LONG, SHORT = 3, 256, 7


@dataclass(frozen=True)
class Sizes:
    """Which sizes a program takes: ``batch`` any, or the one it was traced with; ``length`` from the first to the second (None: without end)."""

    batch: int | None
    length: tuple[int, int | None]


def traced(port: Port, length: int | None, fixed: bool) -> tuple[Any, Sizes]:
    """The program and its sizes: with a free length that reaches ``length`` if there is one, else with that length alone."""
    if length is not None and (port.size is not None or length < 1 or length > (port.longest or length)):
        raise MixerError(f"export: {port.who} takes {'one size' if port.size is not None else f'lengths 1 to {port.longest}'}, got length={length}.")
    if port.size is not None:
        program = _export(port, port.size, free=False)
        return program, Sizes(_sizes(program, port, port.size).batch, (port.size, port.size))
    most = length or port.longest or LONG
    for traced in dict.fromkeys(n for n in (SHORT if port.decodes else most, most - 1, most) if 1 < n <= most and (port.decodes or not fixed)):
        program = _export(port, traced, free=True)
        sizes = _sizes(program, port, traced)
        if sizes.length[1] is None or sizes.length[1] >= most and sizes.length[0] < most:
            return program, Sizes(sizes.batch, (sizes.length[0], port.longest if sizes.length[1] is None else min(sizes.length[1], port.longest or most)))
    if port.decodes:
        raise MixerError(f"export: the state of {port.who} has sizes that torch.export fixes at what it was traced with; its decode step has no program.")
    program = _export(port, most, free=False)
    return program, Sizes(_sizes(program, port, most).batch, (most, most))


def short(port: Port) -> int:
    """A length that every port takes."""
    return port.size if port.size is not None else min(SHORT, SHORT if port.longest is None else port.longest)


def varying(port: Port, length: int) -> tuple[tuple[Any, ...], list[tuple[set[int], set[int]]]]:
    """The example, and of each tensor in it the axes that change with the batch and with the length."""
    one, wide, long = ([tuple(a.shape) for a in pytree.tree_leaves(port.example(*at))] for at in ((BATCH, length), (BATCH + 1, length), (BATCH, length - 1)))
    axes = [tuple({i for i, (n, m) in enumerate(zip(a, b, strict=True)) if n != m} for b in others) for a, *others in zip(one, wide, long, strict=True)]
    return port.example(BATCH, length), axes  # type: ignore[return-value]  # two sets each


def _export(port: Port, length: int, *, free: bool) -> Any:
    args, axes = varying(port, length)
    shapes = [dict.fromkeys(batch | (along if free else set()), torch.export.Dim.AUTO) for batch, along in axes]
    leaves, tree = pytree.tree_flatten(args)
    assert len(leaves) == len(shapes)
    try:
        with quietly():
            return torch.export.export(port.module, args, dynamic_shapes=pytree.tree_unflatten(shapes, tree))
    except MixerError:
        raise
    except Exception as why:
        raise MixerError(f"export: torch.export cannot trace {port.who} ({type(why).__name__}: {' '.join(str(why).split())[:200]}).") from why


def input_shapes(program: Any) -> list[Any]:
    """The shapes of the program's inputs, of integers and symbols."""
    users = set(program.graph_signature.user_inputs)
    return [list(node.meta["val"].shape) for node in program.graph.nodes if node.op == "placeholder" and node.name in users]


def _sizes(program: Any, port: Port, length: int) -> Sizes:
    """What torch.export found out about the axes that vary: those it had to fix, and the bounds of the others."""
    _, axes = varying(port, length)
    bounds: dict[bool, list[tuple[int, int | None]]] = {True: [], False: []}
    for shape, (batch, along) in zip(input_shapes(program), axes, strict=True):
        for axis in batch | along:
            bounds[axis in batch].append(_bounds(program, shape[axis]))
    rows, steps = bounds[True], bounds[False]
    fixed = [low for low, high in rows if high is not None]
    low = max((low for low, _ in steps), default=1)
    high = min((high for _, high in steps if high is not None), default=None)
    return Sizes(fixed[0] if fixed else None, (1 if low <= 2 else low, high))


def _bounds(program: Any, size: Any) -> tuple[int, int | None]:
    """The smallest and the largest value of a dimension; None without end. torch never says less than 2, which means any."""
    if isinstance(size, int):
        return size, size
    bound = program.range_constraints.get(size.node.expr)
    if bound is None:  # an expression of other sizes: taken as fixed
        return int(size.node.hint), int(size.node.hint)
    return int(bound.lower), int(bound.upper) if bool(bound.upper < 2**62) else None
