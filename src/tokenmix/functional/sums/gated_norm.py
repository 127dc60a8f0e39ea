"""The norm and the gate of what a recurrence reads, in the three orders of public models.

Mamba-2 (arXiv 2405.21060) gates first and normalises groups of heads: norm(y * silu(z)). Gated DeltaNet (arXiv
2412.06464) normalises each head first: norm(y) * silu(z). Kimi Delta Attention (arXiv 2510.26692) does the same with a
sigmoid: norm(y) * sigmoid(z).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.precision import at_least_float32
from ...kernels.tokenwise import rms_norm
from .nonfinite import add_nan_mask, clean, marks, nothing_to_hide

Rest = TypeVar("Rest")
Read = tuple[Tensor, tuple[Tensor]]
"""The outputs of tokens, and the memory after them."""

OutputGate = Literal["silu", "sigmoid"]
OUTPUT_GATES: tuple[OutputGate | None, ...] = ("silu", "sigmoid", None)


def gated_norm(
    y: Tensor,
    z: Tensor | None,
    weight: Tensor | None,
    *,
    groups: int,
    gate: OutputGate | None = "silu",
    gate_first: bool = False,
    eps: float = 1e-5,
) -> Tensor:
    """Compute norm(y) * gate(z), or norm(y * gate(z)), where norm divides each group by its root mean square.

    Args:
        y: (..., groups c).
        z: (..., groups c), what opens the gate; None: there is no gate.
        weight: (c,), shared by the groups, or (groups c,); None: there is no norm.
        groups: number of groups, such as heads.
        gate: function of the gate.
        gate_first: multiply by the gate before the norm.
        eps: added to the mean square.

    Returns:
        The shape of y in its dtype, or float32 if that is wider.
    """
    y = at_least_float32(y)
    opened = None if z is None or gate is None else getattr(F, gate)(at_least_float32(z))
    if opened is not None and gate_first:
        y = y * opened
    if weight is not None:
        y = normalise_groups(y, weight, groups, eps)
    return y if opened is None or gate_first else y * opened


def normalise_groups(y: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Divide each group of the last dimension by its root mean square and multiply by the weight."""
    apart, weight = y.unflatten(-1, (groups, -1)), weight.to(y.dtype)
    if weight.shape[0] == apart.shape[-1]:
        return rms_norm(apart, weight, eps=eps).flatten(-2)
    return rms_norm(apart, torch.ones_like(weight[: apart.shape[-1]]), eps=eps).flatten(-2) * weight


def hide_gate(form: Callable[[Tensor | None], tuple[Tensor, Rest]], z: Tensor | None) -> tuple[Tensor, Rest]:
    """Call ``form(z)``, hiding what is not finite in a gate from it; the rows (B, T, .) of such gates become NaN.

    A gate multiplies what the sums gave, so without this the gradient of a row without loss, 0, would reach the sums as
    0 times NaN.
    """
    if z is None or nothing_to_hide(z):
        return form(z)
    y, rest = form(clean(z))
    return add_nan_mask(y, marks(z)), rest
