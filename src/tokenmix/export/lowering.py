"""Write the operators of the library in operators of ONNX: a node of its own for each call, then its form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import version_converter

from ..kernels.operator import OPERATORS
from ..types import Record
from .lowered_aft import write_aft_band, write_aft_full, write_aft_simple
from .lowered_features import write_hydra, write_linear
from .lowered_forget import write_aft_forget
from .lowered_recurrence import write_recurrence
from .writer import Writer

DOMAIN, STANDARD_OPSET = "tokenmix", 27
WRITERS = (
    write_aft_simple,
    write_aft_full,
    write_aft_band,
    write_aft_forget,
    write_hydra,
    write_linear,
    write_recurrence,
)
FORMS: dict[str, Callable[..., ir.Value]] = {form.__name__.removeprefix("write_"): form for form in WRITERS}
"""What writes each operator, by its name: f(writer, inputs, options)."""


def whole_operators() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Return a decomposition of each operator that this file writes: a node of ONNX that ``lower_model`` replaces."""
    return {one.whole: _symbol_of(one) for one in OPERATORS.values() if {"onnx", "standard"} & {*one.on}}


def _symbol_of(operator: Any) -> Callable[..., Any]:
    def write_symbol(*args: Any) -> torch.Tensor:
        inputs, like = args[: operator.count], args[operator.main]
        options = dict(zip(operator.options, args[operator.count :], strict=True))
        shape = like.shape if operator.shape is None else operator.shape(*inputs, **options)
        fixed: Record = {
            name: float(a) if isinstance(a, float) else int(a) for name, a in options.items() if name != "T"
        }
        return torch.onnx.ops.symbolic(
            f"{DOMAIN}::{operator.name}", inputs, fixed, dtype=like.dtype, shape=shape, version=1
        )

    return write_symbol


def raise_opset(model: ir.Model) -> None:
    """Convert a model to the version of ONNX's operators in which LinearAttention exists, before it is lowered.

    The converter ends at 25; 26 and 27 change no operator of 25 but the types that Range takes.
    """
    version_converter.convert_version(model, 25)
    model.opset_imports[""] = STANDARD_OPSET


def lower_model(model: ir.Model) -> None:
    """Replace the nodes of ``whole_operators`` in a model."""
    for node in [node for node in model.graph if node.domain == DOMAIN]:
        writer, operator = Writer(), OPERATORS[node.op_type]
        inputs = [*node.inputs, *[None] * (operator.count - len(node.inputs))]
        options = {name: attribute.value for name, attribute in node.attributes.items()}
        old = node.outputs[0]
        new = FORMS[node.op_type](writer, *inputs, **options)
        new.shape, new.type = old.shape, old.type
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], writer.nodes, [old], [new])
    model.opset_imports.pop(DOMAIN, None)


def drop_nan_tests(model: ir.Model) -> None:
    """Take the rows of a softmax as they are, where the exporter replaces NaN in them by 0.

    It does so after the softmax of torch's attention with a mask, for rows without a valid key. It fills masks with the
    lowest finite number, so such rows are not NaN; NaN comes from NaN in queries and keys, and torch does not hide it.
    Both nodes pass over all pairs of tokens, about a quarter of the time of such a layer.
    """
    for node in [node for node in model.graph if node.op_type == "Where"]:
        test, weights = (value.producer() if value is not None else None for value in (node.inputs[0], node.inputs[2]))
        if test is None or weights is None or (test.op_type, weights.op_type) != ("IsNaN", "Softmax"):
            continue
        if test.inputs[0] is node.inputs[2]:
            ir.convenience.replace_nodes_and_values(
                model.graph, node, [node], [], list(node.outputs), [weights.outputs[0]]
            )
            if not test.outputs[0].uses():
                model.graph.remove(test, safe=True)
