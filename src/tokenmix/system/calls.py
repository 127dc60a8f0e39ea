"""Calls of models whose inputs and outputs others chose: a tensor, a tuple or a dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MixerError


def split_arguments(given: Any, who: str | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and named arguments of a tensor, a tuple, a dict, or a pair of a tuple and a dict.

    Args:
        given: what a model is called with.
        who: what returned it, for the error about anything else; None: anything else is the only argument.
    """
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], Mapping):
        return given[0], dict(given[1])
    if isinstance(given, tuple):
        return given, {}
    if who is not None and not isinstance(given, Tensor):
        raise MixerError(f"{who} must return a tensor, a tuple or a dict, got {type(given).__name__}.")
    return (given,), {}


def call_model(model: nn.Module, batch: object) -> Any:
    """Call a model with a batch: a dict of keyword arguments, a tuple of arguments or a tensor."""
    args, named = split_arguments(batch)
    return model(*args, **named)


def name_tensors(outputs: object) -> dict[str, Tensor]:
    """Return the tensors among a model's outputs by name, in their order; those of a tuple are y_0, y_1, ..."""
    if isinstance(outputs, Tensor):
        return {"y": outputs}
    parts = outputs if isinstance(outputs, (tuple, list)) else ()
    named = outputs.items() if isinstance(outputs, Mapping) else ((f"y_{i}", y) for i, y in enumerate(parts))
    return {name: y for name, y in named if isinstance(y, Tensor)}


def try_model(model: nn.Module, batch: object) -> dict[str, Tensor]:
    """Return the tensors of one call in evaluation, without gradients; the model's mode is as before."""
    mode = model.training
    try:
        with torch.no_grad():
            return name_tensors(call_model(model.eval(), batch))
    finally:
        model.train(mode)
