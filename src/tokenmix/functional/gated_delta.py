"""The delta rule with decays and an output gate: DeltaNet, Gated DeltaNet and Kimi Delta Attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend
from ..kernels.precision import at_least_float32, exact
from ..types import Options
from .recurrence import Rule, recurrence
from .sums.gated_norm import OutputGate, Read, gated_norm, hide_gate
from .sums.nonfinite import propagate_nonfinite, propagate_nonfinite_chunk


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
    """Compute norm(S_t^T q_t / sqrt(K)) * gate(z_t) in each head, with S_t = e^{g_t} S_{t-1} + beta_t k_t d_t^T.

    d_t = v_t - (e^{g_t} S_{t-1})^T k_t is what the answer of the decayed state to the key lacks. Queries and keys are
    multiplied by rsqrt(sum of squares + 1e-6) first. Yang et al. 2024, arXiv 2412.06464, Eq. 10; with a decay per
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
    options: Options = {
        "weight": weight if norm else None,
        "gate": gate,
        "eps": eps,
        "key_mask": key_mask,
        "backend": backend,
    }
    read: Callable[..., Read] = partial(_read, heads=heads, value_heads=value_heads or heads, **options)
    keys = (k, v, beta) if decay is None else (k, v, beta, decay)

    def form(z: Tensor | None) -> tuple[Tensor, None]:
        return propagate_nonfinite(
            lambda q, *keys: read(q, *keys, z=z)[0], q, *keys, causal=True, key_mask=key_mask
        ), None

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
    options: Options = {
        "weight": weight if norm else None,
        "gate": gate,
        "eps": eps,
        "key_mask": key_mask,
        "past": past,
    }
    read: Callable[..., Read] = partial(_read, heads=heads, value_heads=value_heads or heads, **options)
    keys = (k, v, beta) if decay is None else (k, v, beta, decay)
    return hide_gate(lambda z: propagate_nonfinite_chunk(partial(read, z=z), q, *keys, key_mask=key_mask), z)


def _read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor | None = None,
    *,
    z: Tensor | None,
    weight: Tensor | None,
    heads: int,
    value_heads: int,
    gate: OutputGate | None,
    eps: float,
    key_mask: Tensor | None,
    past: Tensor | None = None,
    backend: Backend = "auto",
) -> Read:
    """Return the outputs (B, T, value_heads V) in q's dtype, and the state after the last token."""
    options: Options = {"heads": heads, "past": past, "key_mask": key_mask, "backend": backend}
    o, after = read_heads(q, k, v.unflatten(-1, (value_heads, -1)), decay, beta, **options)
    y = gated_norm(o.flatten(2), z, weight, groups=value_heads, gate=gate, eps=eps)
    return y.to(q.dtype), (after,)


@exact
def read_heads(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor, *, heads: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """Call ``recurrence`` with queries and keys (B, T, heads K) and values (B, T, value_heads, V)."""
    if decay is not None and decay.shape[-1] != v.shape[2]:
        decay = decay.unflatten(-1, (v.shape[2], -1))
    q, k = (at_least_float32(a).unflatten(-1, (heads, -1)) for a in (q, k))  # outputs in the precision of the norm
    rule: Rule = "delta" if decay is None else "gated_delta"
    return recurrence(q, k, v, decay=decay, beta=beta, rule=rule, l2norm=True, **options)
