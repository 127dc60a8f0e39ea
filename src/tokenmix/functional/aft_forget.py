"""AFT-forget: AFT-simple whose sums decay, feature by feature, as tokens pass. A form of this library.

Relatives: RWKV-4 (Peng et al. 2023, arXiv 2305.13048) decays by a constant per feature, FoX (Lin et al. 2025, arXiv
2503.02130) by a learned forget gate per head of softmax attention, GLA (Yang et al. 2024, arXiv 2312.06635) by one per
feature of linear attention.

Sums over a stretch of tokens are an accumulator in units of exp(m + lift), as in ``sums/softmax``; passing a token of
log-decay g multiplies them by exp(g). Log-decays are only ever added over tokens between a key and its reader, never
subtracted from each other, so a token that forgets everything costs its successors no digits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend, choose, masks, steps
from ..kernels.cpu import aft_forget as kernel
from ..kernels.cpu import decode
from ..kernels.extended import extend_on_kernel, has_gradient
from ..kernels.operator import Operator
from ..kernels.precision import cast_alike, exact, sum_dtype
from ..kernels.tokenwise import rms_norm
from ..types import Options
from .layout.checks import check_eps, check_flags, check_key_mask
from .sums.gates import Gate, apply_gate, check_gate
from .sums.nonfinite import nothing_to_hide, over_keys, propagate_nonfinite, propagate_nonfinite_chunk
from .sums.softmax import (
    FLOOR,
    MASKED_KEY,
    Sums,
    decay_sums,
    delay,
    finite_low,
    gated_after,
    join_blocks,
    merge,
    merge_heads,
    ratio_of,
    scan,
    split_blocks,
    split_heads64,
)

BLOCK = 16  # tokens whose pairs are weighed one by one
Past = tuple[Tensor, Tensor, Tensor]


@exact
def aft_forget(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    heads: int | None = None,
    eps: float = 1e-6,
    gate: Gate | None = "sigmoid",
    backend: Backend = "auto",
) -> Tensor:
    """Compute AFT-simple with a log-decay g_t per token and feature.

    y_t = gate(q_t) * norm(n_t / z_t), where n_t = sum_s exp(k_s + d_ts) v_s and z_t = sum_s exp(k_s + d_ts). The decay
    between two tokens, d_ts = d_st, is the sum of the log-decays of the tokens after the earlier one, up to the later
    one. So n_t = exp(g_t) n_{t-1} + exp(k_t) v_t when causal. With g = 0 and ``heads=None`` it is AFT-simple; with
    g = -m it is AFT-full with the bias -m |t - s| (ALiBi's). Masked tokens decay nothing. Takes time and memory O(T D).

    Args:
        q: (B, T, D). With ``gate=None`` only its shape and dtype are used.
        k, v: (B, T, D).
        g: (B, T, D) log-decays, usually <= 0; -inf forgets all tokens before.
        causal: keep only keys s <= t.
        key_mask: bool (B, T), True = may be attended.
        heads: norm divides each of this many groups of features by its root mean square, with ``eps`` added to the mean
            square; None: no norm.
        gate: function applied to q; None for no gate.
        backend: how to run; see ``choose``.

    Returns:
        (B, T, D) in q's dtype; exactly 0 where a query has nothing to attend to.

    Raises:
        MixerError: shapes, dtypes or options do not fit, or the requested backend cannot run this call.
    """
    check_eps("aft_forget", eps, zero=False)
    _check(q, k, v, g, causal, key_mask, heads, gate)
    if 0 in q.shape:
        return torch.zeros_like(q)
    k, v, g = cast_alike(k, v, g)
    asked = q if gate == "sigmoid" and q.dtype is k.dtype else None
    lacks = None if _fits(heads, k) else f"its kernel normalises at most {kernel.WIDEST} features together"
    lacks = lacks if causal else "its kernel is causal"
    chosen = choose("aft_forget", backend, k, v, g, asked, on=forget_kernel.on, lacks=lacks)
    if chosen == "triton" and heads is not None:  # the norm is torch's there
        return normalise_and_gate(q, forget_kernel(None, k, v, g, key_mask, 0, eps), heads, eps, gate)
    if chosen != "eager":
        y = forget_kernel(asked, k, v, g, key_mask, heads or 0, eps)
        return gated_after(q, y, gate) if asked is None else y

    def form(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return normalise_and_gate(q, _ratio(k, v, g, key_mask, causal), heads, eps, gate)

    if nothing_to_hide(k, v, g) and (gate is None or nothing_to_hide(q)):
        return form(q, k, v, g)

    def mark_keys(mark: Tensor) -> Tensor:
        return _by_head(over_keys(mark, mark.shape[1], causal=causal), heads)

    keys = clamp_finite(k), v, clamp_finite(g)
    options: Options = {"causal": causal, "key_mask": key_mask, "each": True, "reach": mark_keys}
    if gate is None:
        return propagate_nonfinite(lambda *keys: form(q, *keys), None, *keys, **options)
    return propagate_nonfinite(form, q, *keys, **options)


def _fits(heads: int | None, k: Tensor) -> bool:
    return heads is None or k.is_cuda or k.shape[-1] // heads <= kernel.WIDEST


def aft_forget_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    past: Past,
    *,
    key_mask: Tensor | None = None,
    heads: int | None = None,
    eps: float = 1e-6,
    gate: Gate | None = "sigmoid",
) -> tuple[Tensor, Past]:
    """Compute the causal form over L new tokens after ``past``: outputs (B, L, D) and the sums after them.

    Args:
        past: m, num, den (B, D) in float64: the sums so far, in units of exp(m).
    """
    if not k.dtype is v.dtype is g.dtype:
        k, v, g = cast_alike(k, v, g)
    k, v, g, graph = k.contiguous(), v.contiguous(), g.contiguous(), has_gradient(q, k, v, g, *past)
    asked = q.contiguous() if gate == "sigmoid" and q.dtype is k.dtype else None
    new = (k, v, g) if asked is None else (k, v, g, asked)
    wanted, (m, num, den) = (k.shape[0], k.shape[2]), past
    sizes = m.dtype is num.dtype is den.dtype is torch.float64 and m.shape == num.shape == den.shape == wanted
    sizes = sizes and k.shape == v.shape == g.shape and (asked is None or asked.shape == k.shape)
    if sizes and _fits(heads, k) and steps(new, past, derives=graph) and masks(k, key_mask):
        if not graph:
            live = None if key_mask is None else key_mask.contiguous()
            y, after = decode.forget(asked, k, v, g, live, past, heads=heads or 0, eps=eps)
            return gated_after(q, y, gate) if asked is None else y, after

        def call_eager(q: Tensor | None, k: Tensor, v: Tensor, g: Tensor, past: Past) -> tuple[Tensor, Past]:
            if q is None:
                return _eager_chunk(k, k, v, g, past, key_mask, heads, eps, None)
            return _eager_chunk(q, k, v, g, past, key_mask, heads, eps, "sigmoid")

        y, after = extend_on_kernel(kernel, call_eager, (asked, k, v, g), key_mask, past, heads=heads or 0, eps=eps)
        return gated_after(q, y, gate) if asked is None else y, after
    return _eager_chunk(q, k, v, g, past, key_mask, heads, eps, gate)


def _eager_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    past: Past,
    key_mask: Tensor | None,
    heads: int | None,
    eps: float,
    gate: Gate | None,
) -> tuple[Tensor, Past]:
    """Compute ``aft_forget_chunk`` in plain torch."""

    def form(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Past]:
        kd, vd, gd = _mask_inputs(finite_low(k), v, g, key_mask)
        m, num, den = (a.double()[:, None, None] for a in past)
        before = Sums(m, torch.zeros_like(m), torch.stack([num, den], -2))
        total = merge(decayed_sums(kd, vd, gd), decay_sums(before, gd.cumsum(2)))
        acc = (total.acc[:, 0, -1] * torch.exp(total.lift[:, 0, -1])[:, None]).unbind(1)
        after = total.m[:, 0, -1].contiguous(), acc[0].contiguous(), acc[1].contiguous()
        return normalise_and_gate(q, merge_heads(ratio_of(total)), heads, eps, gate), after

    keys = clamp_finite(k), v, clamp_finite(g)
    options: Options = {
        "key_mask": key_mask,
        "each": True,
        "reach": lambda mark: _by_head(mark.cumsum(1), heads),
    }
    if gate is None:
        return propagate_nonfinite_chunk(lambda *keys: form(q, *keys), None, *keys, **options)
    return propagate_nonfinite_chunk(form, q, *keys, **options)


def _run_eager(
    q: Tensor | None, k: Tensor, v: Tensor, g: Tensor, key_mask: Tensor | None, heads: int, eps: float
) -> Tensor:
    options: Options = {"gate": None if q is None else "sigmoid", "heads": heads or None, "eps": eps}
    return aft_forget(k if q is None else q, k, v, g, causal=True, key_mask=key_mask, **options, backend="eager")


forget_kernel = Operator(
    "aft_forget",
    "q?(B,T,D) k(B,T,D) v(B,T,D) decay(B,T,D) key_mask?!(B,T):bool",
    "int heads, float eps",
    saves=("saved",),
    eager=_run_eager,
    fits=lambda at, given: (
        given["heads"] == 0
        or given["heads"] > 0
        and at["D"] % given["heads"] == 0
        and (at["cuda"] or at["D"] // given["heads"] <= kernel.WIDEST)
    ),
    on=("cpu", "triton", "onnx"),
)
"""Compute the causal form, (B, T, D), with the sigmoid of q as its gate (None: no gate); heads=0: no norm."""


def decayed_sums(k: Tensor, v: Tensor, g: Tensor) -> Sums:
    """Sum over keys 0..t for each row t, each key decayed by the log-decays of the tokens after it up to t.

    k, g (B, 1, T, D), v (B, 1, T, 1, D), in float64.
    """
    T = k.shape[2]
    kb, vb = split_blocks(k, v, min(BLOCK, T))
    gb = F.pad(g, (0, 0, 0, kb.shape[2] * kb.shape[3] - T)).unflatten(2, kb.shape[2:4])
    near = _pairs(kb, vb, gb)
    through = gb.sum(-2, keepdim=True)  # of a whole block
    blocks = Sums(near.m[..., -1:, :], near.lift[..., -1:, :], near.acc[..., -1:, :, :])
    far = decay_sums(delay(scan(blocks, through), 1), gb.cumsum(-2))
    return join_blocks(merge(near, far), T)


def _pairs(k: Tensor, v: Tensor, g: Tensor) -> Sums:
    """Return the same inside blocks (..., C, D), pair by pair."""
    C = k.shape[-2]
    later = torch.ones(C, C, dtype=torch.bool, device=k.device).tril(-1)[..., None]
    between = torch.where(later, g[..., :, None, :], 0.0).cumsum(-3)  # at [t, s]: g of the tokens s + 1 .. t
    seen = torch.ones(C, C, dtype=torch.bool, device=k.device).tril()[..., None]
    logits = (k[..., None, :, :] + between).masked_fill(~seen, float("-inf"))
    top = logits.detach().amax(-2).clamp_min(FLOOR)
    weights = torch.exp(logits - top[..., None, :])
    acc = torch.stack([(weights * v[..., None, :, 0, :]).sum(-2), weights.sum(-2)], -2)
    return Sums(top, torch.zeros_like(top), acc)


def later_sums(k: Tensor, v: Tensor, g: Tensor) -> Sums:
    """Sum over the keys after each row, each decayed by the log-decays of the tokens after the row up to the key."""
    k, v, g = k.flip(2), v.flip(2), F.pad(g.flip(2)[:, :, :-1], (0, 0, 1, 0))
    s = decayed_sums(k, v, g)
    m, lift = (F.pad(a[:, :, :-1], (0, 0, 1, 0), value=value) for a, value in ((s.m, FLOOR), (s.lift, 0.0)))
    before = decay_sums(Sums(m, lift, F.pad(s.acc[:, :, :-1], (0, 0, 0, 0, 1, 0))), g)
    return Sums(*(a.flip(2) for a in before))


def clamp_finite(a: Tensor) -> Tensor:
    """Return finite numbers for -inf, in float64: a key that weighs nothing, a decay that forgets all.

    One number for every dtype: half precision's least is that of a key, and the sum of two of float64's is -inf.
    """
    return a.double().clamp_min(MASKED_KEY)


def _mask_inputs(k: Tensor, v: Tensor, g: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return float64 keys and log-decays (B, 1, T, D) and values (B, 1, T, 1, D); masked tokens have no weight."""
    kd, vd = split_heads64(k, v, key_mask, 1)
    gd = g.double() if key_mask is None else torch.where(key_mask[..., None], g.double(), 0.0)
    return kd, vd, gd[:, None]


def _ratio(k: Tensor, v: Tensor, g: Tensor, key_mask: Tensor | None, causal: bool) -> Tensor:
    """Return the ratio of sums (B, T, D), in float64."""
    kd, vd, gd = _mask_inputs(finite_low(k), v, g, key_mask)
    total = decayed_sums(kd, vd, gd)
    return merge_heads(ratio_of(total if causal else merge(total, later_sums(kd, vd, gd))))


def normalise_and_gate(q: Tensor, ratio: Tensor, heads: int | None, eps: float, gate: Gate | None) -> Tensor:
    """Normalise the ratio (B, T, D) per head, and gate it."""
    ratio = ratio.to(sum_dtype(q))
    if heads is not None:
        ratio = rms_norm(ratio.unflatten(-1, (heads, -1)), eps=eps).flatten(2)
    return apply_gate(q, ratio, gate)


def _by_head(mark: Tensor, heads: int | None) -> Tensor:
    """Propagate marks (B, T, D) to all features of a head, which a norm ties together."""
    if heads is None:
        return mark
    return mark.unflatten(-1, (heads, -1)).sum(-1, keepdim=True).expand(-1, -1, -1, mark.shape[2] // heads).flatten(2)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    causal: bool,
    key_mask: Tensor | None,
    heads: int | None,
    gate: Gate | None,
) -> None:
    check_gate(gate, "aft_forget")
    check_flags("aft_forget", causal=causal)
    if q.ndim != 3 or any(a.shape != q.shape for a in (k, v, g)):
        got = ", ".join(f"{name} {tuple(a.shape)}" for name, a in (("q", q), ("k", k), ("v", v), ("g", g)))
        raise MixerError(f"aft_forget: expects q, k, v and g of one shape (B, T, D), got {got}.")
    if heads is not None and (not isinstance(heads, int) or isinstance(heads, bool) or heads < 1 or q.shape[2] % heads):
        raise MixerError(f"aft_forget: heads={heads!r} must divide the {q.shape[2]} features, or be None for no norm.")
    check_key_mask("aft_forget", key_mask, q)
