"""The delta rule with decays: DeltaNet, Gated DeltaNet and Kimi Delta Attention in one layer."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.recurrence import recurrence
from ..functional.sums.nonfinite import propagate_nonfinite, propagate_nonfinite_chunk
from ..kernels.backend import Backend
from ..kernels.precision import at_least_float32, exact
from ..mixers.base import QKVO, About, Facts
from ..mixers.cost import MixingCost
from ..mixers.parts.options import at_least, check_numbers, check_positive, one_of
from .parts.gated_norm import OUTPUT_GATES, OutputGate, gated_norm
from .parts.recurrent import LowRank, Recurrent, hide_gate, log_decay, start_steps

Decay = Literal["head", "feature"]


@exact
def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor,
    z: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    heads: int,
    value_heads: int | None = None,
    causal: bool = True,
    key_mask: Tensor | None = None,
    norm: bool = True,
    gate: OutputGate | None = "silu",
    eps: float = 1e-5,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = norm(S_t^T q_t / sqrt(K)) * gate(z_t) in each head, with S_t = e^{g_t} S_{t-1} + beta_t k_t d_t^T.

    d_t = v_t - (e^{g_t} S_{t-1})^T k_t is what the decayed state answers to the key short of the value. Queries and keys
    are multiplied by rsqrt(sum of squares + 1e-6) first. Yang et al. 2024, arXiv 2412.06464, Eq. 10; with a decay per
    feature, Kimi Team 2025, arXiv 2510.26692, Eq. 1. See ``functional.recurrence``.

    Args:
        q, k: (B, T, heads K).
        v: (B, T, value_heads V); head h of the values belongs to head h // (value_heads / heads) of the keys.
        decay: the log-decay g <= 0, (B, T, value_heads), or (B, T, value_heads K), one per feature; None: none.
        beta: (B, T, value_heads), usually between 0 and 2.
        z: (B, T, value_heads V), the input of the gate; None: no gate.
        weight: (V,), the gain of the norm of each head; None: no norm.
        heads: number of heads of queries and keys.
        value_heads: number of heads of values, a multiple of ``heads``; None: as many.
        causal: True; there is no other form.
        key_mask: bool (B, T), True = this token is written. A masked token leaves the state as it is, undecayed.
        norm: whether to normalise at all.
        gate: "silu", "sigmoid", or None.
        eps: added to the mean square in the norm.
        backend: how to run; see ``choose``.

    Returns:
        (B, T, value_heads V) in q's dtype; exactly 0 where nothing was written yet.

    Raises:
        MixerError: shapes, dtypes or options do not fit, or the requested backend cannot run this call.
    """
    if causal is not True:
        raise MixerError(f"gated_delta: a delta rule has only a causal form, got causal={causal!r}.")
    keys = (k, v, beta) if decay is None else (k, v, beta, decay)

    def form(z: Tensor | None) -> tuple[Tensor, None]:
        def read(q: Tensor, *keys: Tensor) -> Tensor:
            return _read(q, keys, z, weight, None, heads, value_heads, key_mask, norm, gate, eps, backend)[0]

        return propagate_nonfinite(read, q, *keys, causal=True, key_mask=key_mask), None

    return hide_gate(form, z)[0]


@exact
def gated_delta_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor,
    z: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    past: Tensor,
    heads: int,
    value_heads: int | None = None,
    key_mask: Tensor | None = None,
    norm: bool = True,
    gate: OutputGate | None = "silu",
    eps: float = 1e-5,
) -> tuple[Tensor, tuple[Tensor]]:
    """Compute the same for the next tokens of a stream after ``past``, S (B, value_heads, K, V), and S after them."""
    keys = (k, v, beta) if decay is None else (k, v, beta, decay)

    def form(z: Tensor | None) -> tuple[Tensor, tuple[Tensor]]:
        def read(q: Tensor, *keys: Tensor) -> tuple[Tensor, tuple[Tensor]]:
            y, after = _read(q, keys, z, weight, past, heads, value_heads, key_mask, norm, gate, eps, "auto")
            return y, (after,)

        return propagate_nonfinite_chunk(read, q, *keys, key_mask=key_mask)

    return hide_gate(form, z)


def _read(
    q: Tensor,
    keys: tuple[Tensor, ...],
    z: Tensor | None,
    weight: Tensor | None,
    past: Tensor | None,
    heads: int,
    value_heads: int | None,
    key_mask: Tensor | None,
    norm: bool,
    gate: OutputGate | None,
    eps: float,
    backend: Backend,
) -> tuple[Tensor, Tensor]:
    """Return the outputs (B, T, value_heads V) in q's dtype and the state after the last token."""
    k, v, beta, *decays = keys
    H = value_heads or heads
    decay = decays[0] if decays else None
    by_feature = decay is not None and decay.shape[-1] != H
    o, after = recurrence(
        q.unflatten(-1, (heads, -1)),
        k.unflatten(-1, (heads, -1)),
        v.unflatten(-1, (H, -1)),
        decay=decay.unflatten(-1, (H, -1)) if by_feature else decay,  # type: ignore[union-attr]  # not None, as just asked
        beta=beta,
        rule="delta" if decay is None else "gated_delta",
        past=past,
        key_mask=key_mask,
        l2norm=True,
        backend=backend,
    )
    gain = weight if norm else None
    y = gated_norm(o.flatten(2), z, gain, groups=H, gate=gate, eps=eps)
    return y.to(q.dtype), after
