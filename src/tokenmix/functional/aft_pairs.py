"""AFT-pairs: AFT whose weights exp(w_ts) are sums of R products of a query's part, a key's part and a decay between.

A form of this library. AFT-full factorises w; this factorises exp(w), so that sums over keys stay R scans. R is a dial
from AFT (R = 1) to linear attention, whose kernel is also a sum of products of positive features (Katharopoulos et al.
2020, arXiv 2006.16236), but with keys per feature. The scans are those of ``aft_forget``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend, choose, masks, steps
from ..kernels.cpu import aft_pairs as kernel
from ..kernels.operator import Operator
from ..kernels.precision import exact
from ..types import Options
from .aft_forget import Past, clamp_finite, decayed_sums, later_sums, normalise_and_gate
from .layout.checks import check_eps, check_flags, check_key_mask
from .layout.masks import zero_masked
from .sums.gates import Gate, apply_gate, check_gate
from .sums.nonfinite import propagate_nonfinite, propagate_nonfinite_chunk
from .sums.softmax import Sums, decay_sums, finite_low, gated_after, merge, merge_heads, ratio_of, split_heads64


@exact
def aft_pairs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None = None,
    g: Tensor | None = None,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    norm: bool = False,
    eps: float = 1e-6,
    gate: Gate | None = "sigmoid",
    backend: Backend = "auto",
) -> Tensor:
    """Compute AFT-full with weights exp(w_ts) = sum_r exp(a_tr + b_sr + d_tsr), per head.

    y_t = gate(q_t) * sum_s exp(k_s + w_ts) v_s / sum_s exp(k_s + w_ts). d_tsr = d_str is the sum of the log-decays g of
    the tokens after the earlier of the two, up to the later one. With R = 1, a and b cancel and add to the keys: it is
    ``aft_forget``. Takes time and memory O(T D R).

    Args:
        q: (B, T, D). With ``gate=None`` only its shape and dtype are used.
        k, v: (B, T, D).
        a: (B, T, H, R), the queries' logits; H divides D.
        b: (B, T, H, R), the keys' logits; None: 0.
        g: (B, T, H, R) log-decays, usually <= 0; -inf forgets all tokens before. None: no decay.
        causal: keep only keys s <= t.
        key_mask: bool (B, T), True = may be attended. Masked tokens decay nothing.
        norm: divide each head's features by their root mean square, with ``eps`` added to the mean square.
        gate: function applied to q; None for no gate.
        backend: how to run; see ``choose``.

    Returns:
        (B, T, D) in q's dtype; exactly 0 where a query has nothing to attend to.

    Raises:
        MixerError: shapes, dtypes or options do not fit, or the requested backend cannot run this call.
    """
    check_eps("aft_pairs", eps, zero=False)
    _check(q, k, v, a, b, g, causal, norm, key_mask, gate)
    if 0 in q.shape:
        return torch.zeros_like(q)
    asked = q if gate == "sigmoid" and q.dtype is k.dtype else None
    lacks = None if _fits(a, k) else f"its kernel takes at most {kernel.WIDEST} features per head"
    lacks = lacks if causal else "its kernel is causal"
    if choose("aft_pairs", backend, k, v, asked, on=pairs_kernel.on, lacks=lacks) != "eager":
        y = pairs_kernel(asked, k, v, *_single(a, b, g), key_mask, norm, float(eps))
        return gated_after(q, y, gate) if asked is None else y

    def form(asked: Tensor, *keys: Tensor) -> Tensor:
        terms = _terms(*_unpack_keys(keys, b is not None, g is not None, a.shape[2:]), key_mask)
        total = decayed_sums(*terms)
        total = total if causal else merge(total, later_sums(*terms))
        return _answer(asked, total, q, a, norm, eps, gate)

    return propagate_nonfinite(form, _pack_queries(q, a, gate), *_keys(k, v, b, g), causal=causal, key_mask=key_mask)


def aft_pairs_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    g: Tensor | None,
    past: Past,
    *,
    key_mask: Tensor | None = None,
    norm: bool = False,
    eps: float = 1e-6,
    gate: Gate | None = "sigmoid",
) -> tuple[Tensor, Past]:
    """Compute the causal form over L new tokens after ``past``: outputs (B, L, D) and the sums after them.

    Args:
        past: m, num, den (B, R, D) in float64: the sums so far, in units of exp(m).
    """
    k, v = k.contiguous(), v.contiguous()
    logits = [each for each in (a, b, g) if each is not None]
    sizes = all(each.dtype is torch.float64 and each.shape == (k.shape[0], a.shape[3], k.shape[2]) for each in past)
    graph = torch.is_grad_enabled() and any(each.requires_grad for each in logits)
    opened = q.contiguous() if gate == "sigmoid" and q.dtype is k.dtype else None
    new = (k, v) if opened is None else (k, v, opened)
    sizes = sizes and all(each.shape == k.shape for each in new)
    if sizes and not graph and _fits(a, k) and steps(new, past) and masks(k, key_mask):
        y, after = kernel.extend(opened, k, v, *_single(a, b, g), key_mask, past, norm=norm, eps=eps)
        return apply_gate(q, y, gate) if opened is None else y, after

    def form(asked: Tensor, *keys: Tensor) -> tuple[Tensor, Past]:
        kd, vd, gd = _terms(*_unpack_keys(keys, b is not None, g is not None, a.shape[2:]), key_mask)
        m, num, den = (each.double()[:, :, None] for each in past)
        before = Sums(m, torch.zeros_like(m), torch.stack([num, den], -2))
        total = merge(decayed_sums(kd, vd, gd), decay_sums(before, gd.cumsum(2)))
        acc = (total.acc[:, :, -1] * torch.exp(total.lift[:, :, -1])[..., None, :]).unbind(2)
        after = total.m[:, :, -1].contiguous(), acc[0].contiguous(), acc[1].contiguous()
        return _answer(asked, total, q, a, norm, eps, gate), after

    return propagate_nonfinite_chunk(form, _pack_queries(q, a, gate), *_keys(k, v, b, g), key_mask=key_mask)


def _run_eager(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    g: Tensor | None,
    key_mask: Tensor | None,
    norm: bool,
    eps: float,
) -> Tensor:
    options: Options = {"gate": None if q is None else "sigmoid", "norm": norm, "eps": eps, "backend": "eager"}
    return aft_pairs(k if q is None else q, k, v, a, b, g, causal=True, key_mask=key_mask, **options)


pairs_kernel = Operator(
    "aft_pairs",
    "q?(B,T,D) k(B,T,D) v(B,T,D) a(B,T,H,R):float32 b?(B,T,H,R):float32 decay?(B,T,H,R):float32 key_mask?!(B,T):bool",
    "bool norm, float eps",
    saves=("saved",),
    eager=_run_eager,
    fits=lambda at, _: at["H"] > 0 and at["D"] % at["H"] == 0 and at["D"] // at["H"] <= kernel.WIDEST,
    on=("cpu",),
)
"""Compute the causal form with the sigmoid of q as its gate (None: no gate); a, b and decay in float32."""


def _single(a: Tensor, b: Tensor | None, g: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return logits and log-decays in float32, as the kernel takes them."""
    return a.float(), None if b is None else b.float(), None if g is None else g.float()


def _fits(a: Tensor, k: Tensor) -> bool:
    return k.shape[-1] // a.shape[2] <= kernel.WIDEST


def _pack_queries(q: Tensor, a: Tensor, gate: Gate | None) -> Tensor:
    """Return the inputs of the queries, concatenated (B, T, .): their logits, and q if there is a gate."""
    return a.flatten(2) if gate is None else torch.cat([a.flatten(2), q], -1)


def _keys(k: Tensor, v: Tensor, b: Tensor | None, g: Tensor | None) -> list[Tensor]:
    """Return the inputs of the keys, each (B, T, .), with -inf replaced by a finite number of the same effect."""
    return [clamp_finite(k), v, *(clamp_finite(each).flatten(2) for each in (b, g) if each is not None)]


def _unpack_keys(
    keys: tuple[Tensor, ...], b: bool, g: bool, sizes: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return k, v, b and g from the output of ``_keys``; the flags ``b`` and ``g`` tell whether they are present."""
    more = iter([each.unflatten(-1, sizes) for each in keys[2:]])
    return keys[0], keys[1], next(more) if b else None, next(more) if g else None


def _unpack_queries(asked: Tensor, q: Tensor, a: Tensor, gate: Gate | None) -> tuple[Tensor, Tensor]:
    """Return the queries' logits (B, T, H, R) and q from the output of ``_pack_queries``."""
    width = a.shape[2] * a.shape[3]
    logits = asked[..., :width].unflatten(-1, a.shape[2:])
    return logits, q if gate is None else asked[..., width:].to(q.dtype)


def _terms(
    k: Tensor, v: Tensor, b: Tensor | None, g: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys (B, R or 1, T, D), values (B, 1, T, 1, D) and log-decays (B, R or 1, T, D), in float64."""
    kd, vd = split_heads64(finite_low(k), v, key_mask, 1)
    wide = [None if each is None else _expand_logits(_zero_masked_logits(each, key_mask), k) for each in (b, g)]
    kd = kd if wide[0] is None else kd + wide[0]
    return kd, vd, torch.zeros_like(kd) if wide[1] is None else wide[1]


def _zero_masked_logits(logits: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return logits (B, T, H, R) with 0 at masked tokens."""
    return zero_masked(logits.flatten(2), key_mask).unflatten(-1, logits.shape[2:])


def _answer(asked: Tensor, total: Sums, q: Tensor, a: Tensor, norm: bool, eps: float, gate: Gate | None) -> Tensor:
    """Return the outputs from the R sums and the inputs of the queries."""
    logits, q = _unpack_queries(asked, q, a, gate)
    ratio = merge_heads(ratio_of(_over_groups(decay_sums(total, _expand_logits(logits, q)))))
    return normalise_and_gate(q, ratio, a.shape[2] if norm else None, eps, gate)


def _over_groups(s: Sums) -> Sums:
    """Add the R sums (B, R, T, .): (B, 1, T, .)."""
    unit = s.m + s.lift
    top = unit.amax(1, keepdim=True)
    acc = (s.acc * torch.exp(unit - top)[..., None, :]).sum(1, keepdim=True)
    return Sums(top, torch.zeros_like(top), acc)


def _expand_logits(logits: Tensor, like: Tensor) -> Tensor:
    """Return logits (B, T, H, R) for every feature of a head: (B, R, T, D), in float64."""
    each = logits.double().movedim(-1, 1)
    return each.repeat_interleave(like.shape[-1] // each.shape[-1], -1)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    g: Tensor | None,
    causal: bool,
    norm: bool,
    key_mask: Tensor | None,
    gate: Gate | None,
) -> None:
    check_gate(gate, "aft_pairs")
    check_flags("aft_pairs", causal=causal, norm=norm)
    if q.ndim != 3 or any(each.shape != q.shape for each in (k, v)):
        got = ", ".join(f"{name} {tuple(each.shape)}" for name, each in (("q", q), ("k", k), ("v", v)))
        raise MixerError(f"aft_pairs: expects q, k and v of one shape (B, T, D), got {got}.")
    logits = {name: each for name, each in (("a", a), ("b", b), ("g", g)) if each is not None}
    fits = (
        a.ndim == 4
        and a.shape[:2] == q.shape[:2]
        and a.shape[3] > 0
        and a.shape[2] > 0
        and q.shape[2] % a.shape[2] == 0
    )
    if not fits or any(each.shape != a.shape for each in logits.values()):
        got = ", ".join(f"{name} {tuple(each.shape)}" for name, each in logits.items())
        raise MixerError(
            f"aft_pairs: expects a, b and g of one shape (B, T, H, R) with R > 0 and H a divisor of {q.shape[2]} "
            f"features, got {got} beside q {tuple(q.shape)}."
        )
    check_key_mask("aft_pairs", key_mask, q)
