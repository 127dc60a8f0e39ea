"""The weights with which a mixer sums values, where its output is such a sum."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ..mixers import Inputs, Mixer
from ..types import Options

EXACT = 1e-4
"""Allowed error of the output that the weights give, relative to its largest element."""


def values_attention(mixer: Mixer, x: Tensor, context: Tensor | None = None, **given: Any) -> Tensor | None:
    """Compute the weights (G, T, S) with which a mixer sums its values, or None where its output is no such sum.

    A group g is a head, or one channel. It takes S calls of the functional form, in one batch.
    """
    with torch.no_grad():
        found = _by_values(mixer, x, context, given)
    return None if found is None else _group_by_head(found, getattr(mixer, "heads", None))


def _by_values(mixer: Mixer, x: Tensor, context: Tensor | None, given: Options) -> Tensor | None:
    """Compute (D, T, S) from unit values at each source in turn, in one batch; None where these do not sum to the
    output.
    """
    form = mixer.facts.functional_form()
    names = [] if form is None else list(inspect.signature(form).parameters)
    if form is None or "v" not in names:
        return None
    full = {"positions": None, "key_mask": None, "attn_mask": None, "grid": None, "prefix": 0, **given}
    args, options = mixer.functional_args(Inputs(x, context, **full))  # type: ignore[operator]  # every mixer with a form has it
    at = names.index("v")
    v = args[at]
    want, S = form(*args, **options), v.shape[1]
    if want.shape[-1] != v.shape[-1]:
        return None
    each = {name: repeat_batch(value, S) for name, value in full.items()}
    many, options = mixer.functional_args(Inputs(repeat_batch(x, S), repeat_batch(context, S), **each))  # type: ignore[operator]  # as above
    unit = torch.eye(S, dtype=v.dtype, device=v.device)[..., None].expand(S, S, v.shape[-1])
    rows = form(*many[:at], unit, *many[at + 1 :], **options)
    weights = rows.permute(2, 1, 0)
    gap = (torch.einsum("dts,sd->td", weights, v[0]) - want[0]).abs().max()
    return weights if bool(gap <= EXACT * want.abs().max().clamp_min(1e-30)) else None


def repeat_batch(value: Any, n: int) -> Any:
    """Repeat the one batch row of an argument of ``forward``; arguments without one stay."""
    batched = isinstance(value, Tensor) and value.shape[0] == 1
    return value.expand(n, *value.shape[1:]) if batched else value


def _group_by_head(weights: Tensor, heads: int | None) -> Tensor:
    """Reduce to one map per head where all channels of each head share it."""
    if not heads or weights.shape[0] % heads:
        return weights
    by_head = weights.unflatten(0, (heads, -1))
    return by_head[:, 0] if torch.allclose(by_head, by_head[:, :1].expand_as(by_head), atol=1e-6) else weights
