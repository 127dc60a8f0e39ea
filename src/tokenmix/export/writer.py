"""Write nodes of ONNX by name, with Python numbers as constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import onnx_ir as ir

Build = Callable[["Writer"], ir.Value]
_NUMBERS = count()


class Writer:
    """Collect nodes: ``writer.Add(a, b)`` adds one of that type and returns its output.

    A list of integers among the inputs becomes a constant of int64, a number one of the writer's float type, and an
    array one of its own type.

    Args:
        double: whether numbers, and what ``cast`` returns, are float64 instead of float32.
    """

    def __init__(self, *, double: bool = False):
        self.nodes: list[ir.Node] = []
        self.double = double

    def __getattr__(self, name: str) -> Callable[..., ir.Value]:
        if name.startswith("_"):
            raise AttributeError(name)

        def add_node(*inputs: Any, **attributes: Any) -> ir.Value:
            return self._add(ir.node(name, [self._value(a) for a in inputs], attributes))

        return add_node

    def two_of(self, name: str, *inputs: Any, **attributes: Any) -> tuple[ir.Value, ir.Value]:
        """Add a node with two outputs."""
        node = ir.node(name, [self._value(a) for a in inputs], attributes, num_outputs=2)
        first, second = self._add(node), node.outputs[1]
        second.name = f"{first.name}_second"
        return first, second

    def _add(self, node: ir.Node) -> ir.Value:
        output = node.outputs[0]
        output.name = node.name = f"tokenmix_{next(_NUMBERS)}"  # branches share names with the graph around them
        self.nodes.append(node)
        return output

    def _value(self, a: Any) -> ir.Value | None:
        if a is None or isinstance(a, ir.Value):
            return a
        if isinstance(a, list):
            return self._constant(np.array(a, np.int64))
        return self._constant(a if isinstance(a, np.ndarray) else np.array(a, self.numbers))

    def _constant(self, a: np.ndarray) -> ir.Value:
        return self._add(ir.node("Constant", [], {"value": ir.tensor(a)}))

    @property
    def numbers(self) -> type[np.floating[Any]]:
        """The float type of numpy."""
        return np.float64 if self.double else np.float32

    def cast(self, a: ir.Value) -> ir.Value:
        """Convert from float32 to the writer's float type."""
        return self.Cast(a, to=int(ir.DataType.DOUBLE)) if self.double else a

    def size(self, a: ir.Value, axis: int) -> ir.Value:
        """Return one size of a tensor, (1,)."""
        return self.Shape(a, start=axis, end=axis + 1) if axis != -1 else self.Shape(a, start=-1)

    def count(self, n: ir.Value) -> ir.Value:
        """Return 0, 1, .., n - 1 for n (1,)."""
        return self.Range(np.array(0), self.Squeeze(n), np.array(1))

    def cut(self, a: ir.Value, axis: int, start: int, stop: Any) -> ir.Value:
        """Return a slice along one axis; ``stop`` is an integer or a value (1,)."""
        return self.Slice(a, [start], stop if isinstance(stop, ir.Value) else [stop], [axis])

    def shapes(self, *parts: Any) -> ir.Value:
        """Join sizes, integers or values (1,), to a shape."""
        return self.Concat(*([part] if isinstance(part, int) else part for part in parts), axis=0)

    def either(self, condition: ir.Value, then: Build, otherwise: Build) -> ir.Value:
        """Run one of two branches; the second in float64, and back."""
        fast, safe = Writer(), Writer(double=True)
        outputs = fast.Identity(then(fast)), safe.Cast(otherwise(safe), to=int(ir.DataType.FLOAT))
        graphs = [
            ir.Graph([], [output], nodes=one.nodes, name=name)
            for output, one, name in zip(outputs, (fast, safe), ("then", "otherwise"), strict=True)
        ]
        return self.If(condition, then_branch=graphs[0], else_branch=graphs[1])


def pad_shape(rank: int, axis: int, before: Sequence[int] | ir.Value, after: Any, writer: Writer) -> ir.Value:
    """Return the input ``pads`` of Pad that lengthens one axis."""
    front, back = [0] * axis, [0] * (rank - 1 - axis)
    parts = [front, before, back, front, after, back]
    return writer.Concat(*(part for part in parts if isinstance(part, ir.Value) or len(part)), axis=0)
