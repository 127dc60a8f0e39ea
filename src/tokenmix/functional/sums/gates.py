"""Query nonlinearities of the AFT family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import MixerError
from ...kernels.precision import at_least_float32, sum_dtype

Gate = Literal["sigmoid", "tanh", "relu", "silu", "gelu", "softplus", "identity"]
"""The names of ``GATES``, in its order."""

GATES: dict[Gate, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "softplus": F.softplus,
    "identity": lambda q: q,
}


def check_gate(gate: Gate | None, who: str) -> None:
    """Refuse a gate that does not exist."""
    if gate is not None and (not isinstance(gate, str) or gate not in GATES):
        raise MixerError(f"{who}: gate={gate!r} is unknown; choose one of {', '.join(GATES)}, or None for no gate.")


def apply_gate(q: Tensor, y: Tensor, gate: Gate | None) -> Tensor:
    """Compute gate(q) * y in float32 or better, in q's dtype; y itself when there is no gate.

    y may have one row for all queries.
    """
    if gate is None:
        return y.to(q.dtype).expand_as(q)
    return (GATES[gate](at_least_float32(q)) * y.to(sum_dtype(q))).to(q.dtype)
