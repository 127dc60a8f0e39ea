"""The Attention Free Transformer (Zhai et al. 2021): AFT-full, AFT-local and AFT-simple as functions of tensors.

Tensors have layout (B, T, D); q is passed before its nonlinearity. Sums run in float64 under running maxima
(``functional/sums``), so that results are exact for any finite keys and log-weights that span up to 120 (|w| <= 60)
within a row. Log-weights above 300 count as 300. w is (T, S), (B, T, S), or a pair of factors (u, v) with w = u v^T,
where u is (T, r) and v is (S, r), both optionally batched.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend, choose, is_exporting, lowers
from ..kernels.operator import Operator
from ..kernels.precision import exact
from .layout.checks import check_flags
from .layout.masks import allowed, zero_masked
from .sums.band import aft_band, band_of, band_sums, causal_sums, window_ratio
from .sums.gates import Gate, apply_gate, check_gate
from .sums.nonfinite import over_window
from .sums.softmax import (
    MASKED_KEY,
    WEIGHT_CAP,
    hidden_sums,
    kernel_sums,
    literal,
    merge_heads,
    over_all,
    over_visible,
    prefix_sums,
    ratio_of,
    single_key_ratio,
    split_heads64,
    valid_weight,
)
from .sums.weights import Dense, Factors, Toeplitz, Weights, Windowed
from .sums.window import OUTSIDES, Outside

Bias = Tensor | tuple[Tensor, Tensor]


@exact
def aft_full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Bias,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    gate: Gate | None = "sigmoid",
    backend: Backend = "auto",
) -> Tensor:
    """Compute AFT-full (AFT, Eq. 2).

    y_t = gate(q_t) * sum_s exp(k_s + w_ts) v_s / sum_s exp(k_s + w_ts), elementwise over features. Takes time O(T S D).

    Args:
        q: (B, T, D). With ``gate=None`` only its shape and dtype are used.
        k, v: (B, S, D).
        w: log-weights (T, S) or (B, T, S), or a pair of factors (T, r) and (S, r), optionally batched.
        causal: keep only keys s <= t; needs S == T.
        key_mask: bool (B, S), True = may be attended.
        attn_mask: bool (T, S) or (B, T, S), True = may be attended. Only the eager form supports it.
        gate: function applied to q; None for no gate.
        backend: how to run; see ``choose``.

    Returns:
        (B, T, D) in q's dtype; exactly 0 where a query has nothing to attend to.

    Raises:
        MixerError: shapes, dtypes or options do not fit, or the requested backend cannot run this call.
    """
    _check("aft_full", q, k, v, causal, key_mask, attn_mask, gate)
    if 0 in (*q.shape, k.shape[1]):
        return torch.zeros_like(q)
    source = _source("aft_full", w, q.shape[1], k.shape[1])
    w = _of_keys_met(w, key_mask)
    lacks, asked = None if attn_mask is None else "its kernels take no attn_mask", q if gate == "sigmoid" else None
    plain = not is_exporting() and attn_mask is None
    one = plain and k.shape[1] == 1
    # With at most two queries and keys the kernel's blocks would be empty.
    two = plain and not causal and not q.is_cuda and q.shape[1] <= 2 and k.shape[1] <= 2
    where = choose("aft_full", backend, k, v, asked, on=full_kernel.on, lacks=lacks, slower=one or two)
    if where != "eager":

        def run(q: Tensor | None, k: Tensor, v: Tensor) -> Tensor:
            return _on_kernel(q, k, v, w, key_mask, causal)

        return kernel_sums(where, run, q, k, v, gate, causal=causal, key_mask=key_mask)
    if one:
        return apply_gate(q, _one_key(k, v, source, key_mask, q.shape[1]), gate)

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kd, vd = split_heads64(k, v, key_mask, 1)
        if attn_mask is not None:
            mask = _visible(q, k, causal, key_mask, attn_mask)
            whole = source.slab(slice(0, q.shape[1]), slice(0, k.shape[1]))
            return apply_gate(q, merge_heads(literal(kd, vd, whole, mask)), gate)
        if causal:
            sums = causal_sums(kd, vd, source)
        else:
            sums = over_visible(kd, vd, source.slab(slice(0, q.shape[1]), slice(0, k.shape[1])))
        return apply_gate(q, merge_heads(ratio_of(sums)), gate)

    return hidden_sums(form, q, k, v, gate, causal=causal, key_mask=key_mask, attn_mask=attn_mask)


def _visible(q: Tensor, k: Tensor, causal: bool, key_mask: Tensor | None, attn_mask: Tensor) -> Tensor:
    """Return which keys each query may attend to: bool, (B, 1, T, S) or broadcastable to it."""
    B, T, S = q.shape[0], q.shape[1], k.shape[1]
    return allowed(B, T, S, causal=causal, key_mask=key_mask, attn_mask=attn_mask, device=q.device)[:, None]


def _of_keys_met(w: Bias, key_mask: Tensor | None) -> Bias:
    """Zero the factors of keys that every row masks; leave a dense w as it is.

    Their values, possibly infinite, would otherwise enter the gradient of the other factor as 0 * value.
    """
    if key_mask is None or not isinstance(w, tuple):
        return w
    return w[0], zero_masked(w[1], key_mask if w[1].ndim == 3 else key_mask.any(0))


def _one_key(k: Tensor, v: Tensor, source: Weights, key_mask: Tensor | None, T: int) -> Tensor:
    """Compute AFT-full over a single key: its value, (B, T, D), or 0 where it is masked or its weight is zero."""
    if key_mask is not None:
        k, v = torch.where(key_mask[..., None], k, MASKED_KEY), torch.where(key_mask[..., None], v, 0.0)
    w = source.slab(slice(0, T), slice(0, 1))
    w = w[:, 0] if w.ndim == 4 else w  # (T, 1) or (B, T, 1)
    seen = torch.exp(w.detach().double().clamp_max(WEIGHT_CAP))
    share = (seen / torch.where(seen > 0, seen, 1.0)).to(k.dtype) + 0.0 * w.clamp(-WEIGHT_CAP, WEIGHT_CAP)
    return single_key_ratio(v, valid_weight(k) * share)


@exact
def aft_local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Bias,
    *,
    window: int,
    outside: Outside = "zero",
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    positions: Tensor | tuple[Tensor, Tensor] | None = None,
    gate: Gate | None = "sigmoid",
    backend: Backend = "auto",
) -> Tensor:
    """Compute AFT-local (AFT, Eq. 4): AFT-full with w_ts where |t - s| < window and 0 elsewhere.

    Keys outside the window still count, with log-weight 0. Takes time O(T window D) if S == T, and O(T S D) with
    ``positions``, ``attn_mask`` or S != T. Arguments not listed here are those of ``aft_full``.

    Args:
        w: as for ``aft_full``; or taps, log-weights by distance (n,): tap j is that of t - s = window - 1 - j, with n =
            window when causal and 2 window - 1 otherwise.
        window: s of the paper, in tokens; the band holds 2 window - 1 keys, or window keys when causal. 0 gives
            AFT-simple.
        outside: "zero" as in the paper, or "none": keys outside the window are not attended (the paper's ablation).
        positions: token positions (B, T), if they are not the indices, or a pair of them: (B, T) for the queries and
            (B, S) for the keys. The distance |t - s| is then measured between positions.

    Returns:
        (B, T, D) in q's dtype; exactly 0 where a query has nothing to attend to.

    Raises:
        MixerError: as for ``aft_full``; also if ``window`` is not an integer >= 0, ``outside`` is unknown, or
            ``window`` is 0 with ``outside="none"``.
    """
    _check("aft_local", q, k, v, causal, key_mask, attn_mask, gate)
    T, S = q.shape[1], k.shape[1]
    if 0 in (*q.shape, S):
        return torch.zeros_like(q)
    _check_window(w, window, outside, causal)
    if window == 0:
        return aft_simple(q, k, v, causal=causal, key_mask=key_mask, attn_mask=attn_mask, gate=gate, backend=backend)
    drop = outside == "none"
    if positions is not None or attn_mask is not None or S != T:
        cut, near = _in_window(w, positions, T, S, window, q.device)
        mask = attn_mask if not drop else near if attn_mask is None else near & attn_mask
        return aft_full(q, k, v, cut, causal=causal, key_mask=key_mask, attn_mask=mask, gate=gate, backend=backend)
    most = window if lowers() else min(window, T)  # no two tokens are further apart
    if isinstance(w, Tensor) and w.ndim == 1:
        w = w[window - most : len(w) if causal else window - 1 + most]
    window, reach = most, (1 - most, most - 1)
    source = _source("aft_local", w, T, S, causal)
    w = _of_keys_met(w, key_mask)
    asked, lacks = q if gate == "sigmoid" else None, "its kernels take outside='zero' only" if drop else None
    where = choose("aft_local", backend, k, v, asked, on=aft_band.on, lacks=lacks)
    if where != "eager":
        run = _band_kernel(band_of(w, window, causal), key_mask, causal)
        return kernel_sums(where, run, q, k, v, gate, causal=causal, key_mask=key_mask)
    cut_off, within = Windowed(source, *reach), (reach[0], 0) if causal else reach

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kd, vd = split_heads64(k, v, key_mask, 1)
        if drop:
            return apply_gate(q, merge_heads(window_ratio(kd, vd, cut_off, reach=within)), gate)
        sums = causal_sums(kd, vd, cut_off, reach=reach) if causal else band_sums(kd, vd, cut_off, reach=reach)
        return apply_gate(q, merge_heads(ratio_of(sums)), gate)

    met = (lambda mark: over_window(mark, *within)) if drop else None
    return hidden_sums(form, q, k, v, gate, causal=causal, key_mask=key_mask, reach=met)


@exact
def aft_simple(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    gate: Gate | None = "sigmoid",
    backend: Backend = "auto",
) -> Tensor:
    """Compute AFT-simple (AFT, Eq. 5).

    y_t = gate(q_t) * sum_s softmax_s(k)_s v_s, with the softmax over time in each feature. Takes time and memory
    O(T D). The arguments, the result and the errors are those of ``aft_full`` without ``w``.
    """
    _check("aft_simple", q, k, v, causal, key_mask, attn_mask, gate)
    if 0 in (*q.shape, k.shape[1]):
        return torch.zeros_like(q)
    asked = q if gate == "sigmoid" else None
    lacks = None if attn_mask is None else "its kernels take no attn_mask"
    if choose("aft_simple", backend, k, v, asked, on=simple_kernel.on, lacks=lacks) != "eager":
        # "cpu" with Triton as well: its kernel of AFT-simple, too, handles non-finite numbers itself.
        return kernel_sums("cpu", lambda q_, k, v: simple_kernel(q_, k, v, key_mask, q.shape[1], causal), q, k, v, gate)

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kd, vd = split_heads64(k, v, key_mask, 1)
        if attn_mask is not None:
            mask = _visible(q, k, causal, key_mask, attn_mask)
            return apply_gate(q, merge_heads(literal(kd, vd, kd.new_zeros(q.shape[1], k.shape[1]), mask)), gate)
        return apply_gate(q, merge_heads(ratio_of(prefix_sums(kd, vd) if causal else over_all(kd, vd))), gate)

    return hidden_sums(form, q, k, v, gate, causal=causal, key_mask=key_mask, attn_mask=attn_mask)


def _simple_eager(q: Tensor | None, k: Tensor, v: Tensor, key_mask: Tensor | None, T: int, causal: bool) -> Tensor:
    like = k.new_zeros(()).expand(k.shape[0], T, k.shape[2]) if q is None else q
    return aft_simple(
        like, k, v, causal=causal, key_mask=key_mask, gate=None if q is None else "sigmoid", backend="eager"
    )


simple_kernel = Operator(
    "aft_simple",
    "q?(B,T,D) k(B,S,D) v(B,S,D) key_mask?!(B,S):bool",
    "SymInt T, bool causal",
    saves=("saved",),
    shape=lambda q, k, v, key_mask, *, T, causal: (k.shape[0], T, k.shape[2]),
    eager=_simple_eager,
    fits=lambda at, given: not given["causal"] or at["T"] == at["S"],
    on=("cpu", "triton", "onnx"),
)
"""Compute AFT-simple for T queries, (B, T, D): sigmoid(q) times the ratio of sums, or the ratio alone if q is None."""


def _full_eager(
    q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, w2: Tensor | None, key_mask: Tensor | None, causal: bool
) -> Tensor:
    like = k.new_zeros(()).expand(k.shape[0], w.shape[1], k.shape[2]) if q is None else q
    gate: Gate | None = None if q is None else "sigmoid"
    return aft_full(
        like, k, v, w if w2 is None else (w, w2), causal=causal, key_mask=key_mask, gate=gate, backend="eager"
    )


full_kernel = Operator(
    "aft_full",
    "q?(B,T,D) k(B,S,D) v(B,S,D) w(W,T,R):float w2?(W,S,R):float key_mask?!(B,S):bool",
    "bool causal",
    saves=("y0", "den"),
    shape=lambda q, k, v, w, w2, key_mask, *, causal: (k.shape[0], w.shape[1], k.shape[2]),
    eager=_full_eager,
    fits=lambda at, _: at["W"] in (1, at["B"]) and ("w2" not in at or at["R"] == at["S"]),
    on=("cpu", "triton", "onnx"),
)
"""Compute AFT-full, (B, T, D): sigmoid(q) times the ratio of sums, or the ratio alone if q is None.

Log-weights w are (1 or B, T, S); with w2, w and w2 are the factors (1 or B, T, r) and (1 or B, S, r).
"""


def _on_kernel(q: Tensor | None, k: Tensor, v: Tensor, w: Bias, key_mask: Tensor | None, causal: bool) -> Tensor:
    """Call the kernel of AFT-full with w in any form that ``aft_full`` accepts."""
    first, second = w if isinstance(w, tuple) else (w, None)
    first = first if first.ndim == 3 else first[None]
    if second is not None:
        second = second if second.ndim == 3 else second[None]
        both = max(first.shape[0], second.shape[0])
        first, second = first.expand(both, -1, -1), second.expand(both, -1, -1)
    return full_kernel(q, k, v, first, second, key_mask, causal)


def _band_kernel(
    weights: Tensor, key_mask: Tensor | None, causal: bool
) -> Callable[[Tensor | None, Tensor, Tensor], Tensor]:
    """Return the kernel of the band as a function of q, k and v."""
    return lambda q, k, v: aft_band(q, k, v, weights, key_mask, causal)


def _check_window(w: Bias, window: int, outside: str, causal: bool) -> None:
    whole = isinstance(window, int) and not isinstance(window, bool)
    if outside not in OUTSIDES or not whole or window < 0 or (window == 0 and outside == "none"):
        raise MixerError(
            f"aft_local: window={window!r}, outside={outside!r}; window must be an integer >= 0, "
            "and outside 'zero', or 'none' with window >= 1."
        )
    many = window if causal else 2 * window - 1
    if window and isinstance(w, Tensor) and w.ndim == 1 and len(w) != many:
        raise MixerError(f"aft_local: with window={window} and causal={causal}, w needs {many} taps, got {len(w)}.")


def _in_window(
    w: Bias,
    positions: Tensor | tuple[Tensor, Tensor] | None,
    T: int,
    S: int,
    window: int,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return w of all pairs, 0 outside of the window, and |t - s| < window: (T, S) or (B, T, S) each.

    Distances are measured in positions where they are given.
    """
    if positions is None:
        far = torch.arange(T, device=device)[:, None] - torch.arange(S, device=device)
    else:
        rows, cols = positions if isinstance(positions, tuple) else (positions, positions)
        far = rows[:, :, None] - cols[:, None, :]
    near = far.abs() < window
    if isinstance(w, Tensor) and w.ndim == 1:
        inside = w[(window - 1 - far).clamp(0, len(w) - 1)]
    else:
        inside = _source("aft_local", w, T, S).slab(slice(0, T), slice(0, S)).squeeze(1)
    return torch.where(near, inside, 0.0), near


def _source(who: str, w: Bias, T: int, S: int, causal: bool | None = None) -> Weights:
    """Wrap w so that its leading dimensions broadcast against (B, 1, T, S).

    Args:
        causal: which side taps cover; None: taps are refused.
    """
    if causal is not None and isinstance(w, Tensor) and w.ndim == 1:
        return Toeplitz(w[None], len(w) - 1 if causal else len(w) // 2)
    pair = w if isinstance(w, tuple) else None
    shapes = [a.shape for a in pair] if pair else [w.shape]  # type: ignore[union-attr]  # a tensor when not a pair
    fits = (
        (shapes[0][-2] == T and shapes[1][-2] == S and shapes[0][-1] == shapes[1][-1])
        if pair
        else tuple(shapes[0][-2:]) == (T, S)
    )
    if not fits or any(len(s) not in (2, 3) for s in shapes):
        got = " and ".join(str(tuple(s)) for s in shapes)
        raise MixerError(f"{who}: w must be ({T}, {S}), (B, {T}, {S}), or factors ({T}, r) and ({S}, r), got {got}.")
    if pair:
        u, v = (a if a.ndim == 2 else a[:, None] for a in pair)
        return Factors(u, v)
    assert isinstance(w, Tensor)
    return Dense(w if w.ndim == 2 else w[:, None])


def _check(
    who: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    key_mask: Tensor | None,
    attn_mask: Tensor | None,
    gate: Gate | None,
) -> None:
    check_gate(gate, who)
    check_flags(who, causal=causal)
    if q.ndim != 3 or k.shape != v.shape or k.ndim != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise MixerError(
            f"{who}: expects q (B, T, D) and k, v (B, S, D), got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}."
        )
    if causal and q.shape[1] != k.shape[1]:
        raise MixerError(f"{who}: causal=True needs as many queries as keys, got {q.shape[1]} and {k.shape[1]}.")
    for label, mask, shapes in (
        ("key_mask", key_mask, [k.shape[:2]]),
        ("attn_mask", attn_mask, [(q.shape[1], k.shape[1]), (*q.shape[:2], k.shape[1])]),
    ):
        if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) not in [tuple(s) for s in shapes]):
            fit = " or ".join(str(tuple(s)) for s in shapes)
            raise MixerError(f"{who}: expects a bool {label} of shape {fit}, got {mask.dtype} {tuple(mask.shape)}.")
