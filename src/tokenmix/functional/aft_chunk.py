"""Chunks of a causal AFT sequence: the new tokens over the past (sums, a ring, a history) and over each other.

The past is carried as flat tensors (m (B, h), num (B, D), den (B, h)) in units of exp(m), with h = D, or the number of
heads where a head has one key for all its features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.backend import masks, steps
from ..kernels.cpu import aft_full as full
from ..kernels.cpu import aft_simple as scan
from ..kernels.cpu import decode as step
from ..kernels.extended import LONG, extend_on_kernel, has_gradient
from ..kernels.recording import recorder
from .layout.growth import append_tokens, join_tokens
from .layout.positions import gather_tokens, last_valid
from .sums.band import causal_sums
from .sums.filtered import cap_keys, factors_of, finish_sums, literal_factors
from .sums.gates import Gate, apply_gate
from .sums.nonfinite import over_pairs, propagate_nonfinite_chunk
from .sums.softmax import (
    FLOOR,
    Sums,
    decay_sums,
    finite_low,
    gated_after,
    hidden_sums,
    literal,
    merge,
    merge_heads,
    over_all,
    over_visible,
    prefix_sums,
    ratio_of,
    split_heads64,
)
from .sums.weights import Dense
from .sums.window import Filters

PIECE = 512  # tokens mixed at once: bounds the (L, keys) weights of a long chunk
ROWS = 8  # new tokens up to which the C kernel weighs a history row by row
Past = tuple[Tensor, Tensor, Tensor]


def empty_past(batch: int, keys: int, features: int, *, device: torch.device | str | None = None) -> Past:
    """Return the sums over no keys, in float64 whatever the model's dtype."""
    none = torch.zeros(batch, keys, device=device, dtype=torch.float64)
    return none + FLOOR, torch.zeros(batch, features, device=device, dtype=torch.float64), none


def merge_past(earlier: Past, later: Past, *, heads: int = 1) -> Past:
    """Return the sums over two adjacent stretches of tokens."""
    return _flatten_sums(merge(_unflatten_sums(earlier, heads), _unflatten_sums(later, heads)))


def merge_faded(earlier: Past, later: Past, fade: Tensor) -> Past:
    """Return the sums over two adjacent stretches, the later of which multiplies the earlier by exp(fade).

    m, num, den and fade have one shape (B, .., D).
    """
    first, second = (
        Sums(
            m.double()[..., None, :],
            torch.zeros_like(m.double())[..., None, :],
            torch.stack([num, den], -2)[..., None, :, :],
        )
        for m, num, den in (earlier, later)
    )
    total = merge(decay_sums(first, fade.double()[..., None, :]), second)
    num, den = (total.acc * torch.exp(total.lift)[..., None, :])[..., 0, :, :].unbind(-2)
    return total.m[..., 0, :], num, den


def absorb(past: Past, k: Tensor, v: Tensor, valid: Tensor | None, *, heads: int = 1) -> Past:
    """Return the sums after keys (B, n, h) and values (B, n, D) have been added with weight 0."""
    if k.shape[1] == 0:
        return past
    alike = heads == 1 and k.shape == v.shape and k.shape[1] >= LONG
    if alike and has_gradient(k, v, *past) and steps((k, v), past, derives=True):  # keeps less for the backward pass
        return aft_simple_chunk(v, k, v, past, key_mask=valid, gate=None)[1]
    return _flatten_sums(merge(_unflatten_sums(past, heads), over_all(*split_heads64(k, v, valid, heads))))


def aft_simple_chunk(
    q: Tensor, k: Tensor, v: Tensor, past: Past, *, key_mask: Tensor | None = None, gate: Gate | None = "sigmoid"
) -> tuple[Tensor, Past]:
    """Compute AFT-simple over L new tokens after ``past``: outputs (B, L, D) and the sums after them."""
    fused, graph = gate == "sigmoid", has_gradient(q, k, v, *past)
    if (
        steps((q, k, v) if fused else (k, v), past, derives=graph)
        and k.nbytes == v.nbytes
        and (not fused or q.nbytes == v.nbytes)
        and _fits(past, k, v)
        and masks(k, key_mask)
    ):
        valid = None if key_mask is None else key_mask.contiguous()
        asked = q if fused else None
        if not graph and k.shape[1] < LONG:
            y, after = step.simple(asked, k, v, valid, past)
            return y if fused else apply_gate(q, y, gate), after

        def call_eager(q: Tensor | None, k: Tensor, v: Tensor, past: Past) -> tuple[Tensor, Past]:
            return _eager_simple(k if q is None else q, k, v, past, key_mask, None if q is None else gate)

        y, after = extend_on_kernel(scan, call_eager, (asked, k, v), valid, past)
        return y if fused else gated_after(q, y, gate), after
    return _eager_simple(q, k, v, past, key_mask, gate)


def _eager_simple(
    q: Tensor, k: Tensor, v: Tensor, past: Past, key_mask: Tensor | None, gate: Gate | None
) -> tuple[Tensor, Past]:
    """Compute ``aft_simple_chunk`` in plain torch."""
    each, k = k.shape == v.shape, finite_low(k)

    def mix(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Past]:
        return simple_prefixes(q, k, v, past, key_mask=key_mask, gate=gate)

    if gate is None:
        return propagate_nonfinite_chunk(lambda *keys: mix(q, *keys), None, k, v, key_mask=key_mask, each=each)
    return propagate_nonfinite_chunk(mix, q, k, v, key_mask=key_mask, each=each)


def simple_prefixes(
    q: Tensor, k: Tensor, v: Tensor, past: Past, *, key_mask: Tensor | None, gate: Gate | None
) -> tuple[Tensor, Past]:
    """Compute ``aft_simple_chunk`` in plain torch."""
    total = merge(prefix_sums(*split_heads64(k, v, key_mask, 1)), _unflatten_sums(past, 1))
    last = Sums(total.m[..., -1:, :], total.lift[..., -1:, :], total.acc[..., -1:, :, :])
    return apply_gate(q, merge_heads(ratio_of(total)), gate), _flatten_sums(last)


def read_past(q: Tensor, past: Past, *, gate: Gate | None) -> Tensor:
    """Read finished sums with queries: the streaming form over a context."""
    return apply_gate(q, merge_heads(ratio_of(_unflatten_sums(past, 1))), gate)


def pair_weights(
    u: Tensor, v: Tensor | None, at: Tensor, positions: Tensor, *, window: int | None = None, keep: int
) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """Call ``step.pairs`` of the C kernels for a bias whose factors or table are u and v.

    Returns None where the bias has to be weighed in torch.

    Args:
        window: pairs this far apart or further have weight 0; None: all pairs have a weight.
        keep: how many of the last positions are returned.
    """
    if (
        not steps((u,) if v is None else (u, v), (at, positions))
        or at.dtype is not torch.int64
        or positions.dtype is not torch.int64
    ):
        return None
    if at.shape[0] != positions.shape[0]:
        return None
    w, near, after, outside = step.pairs(u, v, at, positions, window=window, keep=keep)
    if (plan := recorder()) is not None:
        plan.check_zero(outside)
    elif outside.item():
        return None
    return w, near, after


def tap_weights(kernel: Tensor, at: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the result of ``step.taps`` for a filter (h, s).

    Log-weights (B, h, L, R + L), which pairs the filter reaches, and the last R positions.
    """
    if (
        steps((kernel,), (at, positions))
        and at.dtype is torch.int64
        and positions.dtype is torch.int64
        and at.shape[0] == positions.shape[0]
    ):
        return step.taps(kernel, at, positions)
    every, size = torch.cat([positions, at], 1), kernel.shape[1]
    back = at[:, :, None] - every[:, None]
    near = ((back >= 0) & (back < size))[:, None]
    w = torch.where(near, kernel[:, size - 1 - back.clamp(0, size - 1)].transpose(0, 1), 0.0)
    return w, near, every[:, at.shape[1] :]


def aft_chunk(
    q: Tensor,
    new: Past,
    kept: Past,
    w: Tensor,
    *,
    heads: int = 1,
    far: Past | None = None,
    inside: Tensor | None = None,
    gate: Gate | None,
) -> tuple[Tensor, Past]:
    """Mix L new tokens over R kept keys, each other (causally), and the sums of all older keys, whose weight is exp(0).

    Returns the outputs, and the kept and new keys joined.

    Args:
        q: (B, L, D). new, kept: keys (B, L or R, h), values (B, L or R, D), valid (B, L or R) bool.
        w: log-weights (B or 1, heads or 1, L, R + L).
        inside: (B or 1, 1, L, R + L), the only pairs that count; there is then no far past.
    """
    R, L, every = kept[1].shape[1], new[1].shape[1], _pair_up(append_tokens, kept, new)
    if far is None and inside is None and new[0].shape == new[1].shape and w.shape[1] == 1:
        fused, ours = q if gate == "sigmoid" else None, (*new[:2], new[2].contiguous())
        if _kernel_accepts(fused, ours, kept, w):
            y = step.full(fused, ours, kept, w) if L <= ROWS else full.extend(fused, *every[:2], w[:, 0], every[2])
            return y if gate == "sigmoid" else apply_gate(q, y, gate), every
    valid = every[2]
    seen = (
        None
        if inside is None
        else inside & valid[:, None, None] & torch.ones(L, R + L, dtype=torch.bool, device=q.device).tril(R)
    )

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kd, vd = split_heads64(k, v, valid, heads)
        if seen is not None:
            return apply_gate(q, merge_heads(literal(kd, vd, w, seen)), gate)
        if L == 1:
            total = over_visible(kd, vd, w)
        else:
            total = causal_sums(kd[..., R:, :], vd[..., R:, :, :], Dense(w[..., R:]))
            if R:
                total = merge(total, over_visible(kd[..., :R, :], vd[..., :R, :, :], w[..., :R]))
        if far is not None:
            total = merge(total, _unflatten_sums(far, heads))
        return apply_gate(q, merge_heads(ratio_of(total)), gate)

    met = None if seen is None else lambda mark: over_pairs(seen[:, 0], mark)
    return hidden_sums(form, q, every[0], every[1], gate, causal=True, key_mask=valid, reach=met), every


def _pair_up(join: Callable[[Tensor, Tensor], Tensor], kept: Past, new: Past) -> Past:
    """Join a past and the tokens after it: keys, values and which are valid (B, R + L, ..)."""
    keys, values, valid = (join(a, b) for a, b in zip(kept, new, strict=True))
    return keys, values, valid


def ring_chunk(
    q: Tensor,
    new: Past,
    kept: Past,
    far: Past,
    w: Tensor,
    near: Tensor | None,
    *,
    only_near: bool,
    heads: int = 1,
    gate: Gate | None,
    holes: bool = False,
    filters: Filters = "exp",
    divide: bool = True,
) -> tuple[Tensor, Past, Past]:
    """Mix L new tokens over a ring of R kept keys, each other, and the sums ``far`` of all older keys.

    Returns the outputs, the ring after them and the sums after them. Other arguments as in ``aft_chunk``.

    Args:
        w: log-weights (B or 1, heads or 1, L, R + L), 0 for keys more than R before the token.
        near: (B or 1, 1, L, R + L), which pairs lie inside the window. With ``only_near`` no others count, and the sums
            stay as they are; otherwise it is not read.
        holes: masked tokens may come after valid ones; they take no room in the ring.
        filters, divide: as in ``aft_conv``; with "signed" w holds the taps, and ``near`` is read.
    """
    plain = filters == "exp" and divide
    if w.dtype is not torch.float64 or not w.is_contiguous():
        w = w.double().contiguous()
    if not (
        new[2].is_contiguous() and kept[1].is_contiguous()
    ):  # a slice of a chunk's mask, a ring from the eager form
        new, kept = (
            (new[0], new[1], new[2].contiguous()),
            (kept[0].contiguous(), kept[1].contiguous(), kept[2].contiguous()),
        )
    per_head = heads > 1 or new[0].shape[-1] == 1 < new[1].shape[-1]
    fused = q if gate == "sigmoid" else None
    if (
        plain
        and not holes
        and _kernel_accepts(fused, new, kept, w, far)
        and new[0].shape[2] == (heads if per_head else new[1].shape[2])
        and _fits(far, new[0], new[1])
    ):
        y, ring, sums = step.ring(
            fused, new, kept, far, w, near.contiguous() if only_near and near is not None else None, heads=per_head
        )
        return (y if gate == "sigmoid" else apply_gate(q, y, gate)), ring, sums
    past, inside = (None, near) if only_near else (far, None)
    if plain:
        y, (keys, values, all_valid) = aft_chunk(q, new, kept, w, heads=heads, far=past, inside=inside, gate=gate)
    else:
        y, (keys, values, all_valid) = _mix_filtered(
            q, new, kept, w, near, past, heads=heads, signed=filters == "signed", divide=divide, gate=gate
        )
    if holes:
        index, there, left = last_valid(all_valid, kept[1].shape[1])
        return (
            y,
            (gather_tokens(keys, index), gather_tokens(values, index), there),
            far if only_near else absorb(far, cap_keys(keys, divide), values, left, heads=heads),
        )
    n = q.shape[1]
    sums = (
        far if only_near else absorb(far, cap_keys(keys[:, :n], divide), values[:, :n], all_valid[:, :n], heads=heads)
    )
    return y, (keys[:, n:], values[:, n:], all_valid[:, n:]), sums


def _mix_filtered(
    q: Tensor,
    new: Past,
    kept: Past,
    w: Tensor,
    near: Tensor | None,
    far: Past | None,
    *,
    heads: int,
    signed: bool,
    divide: bool,
    gate: Gate | None,
) -> tuple[Tensor, Past]:
    """Mix as ``aft_chunk`` with signed filters or without a denominator; without ``far`` only pairs ``near`` count."""
    R, L, every = kept[1].shape[1], new[1].shape[1], _pair_up(join_tokens, kept, new)
    assert near is not None
    c = factors_of(w, signed)
    if signed and far is not None:
        c = c + 1.0
    seen = every[2][:, None, None] & torch.ones(L, R + L, dtype=torch.bool, device=q.device).tril(R)
    seen = seen if far is not None else seen & near

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kd, vd = split_heads64(k, v, every[2], heads)
        total = literal_factors(cap_keys(kd, divide), vd, c, seen)
        total = total if far is None else merge(total, _unflatten_sums(far, heads))
        return apply_gate(q, merge_heads(finish_sums(total, divide)), gate)

    def mark_pairs(mark: Tensor) -> Tensor:
        return over_pairs(seen[:, 0], mark)

    return hidden_sums(form, q, every[0], every[1], gate, causal=True, key_mask=every[2], reach=mark_pairs), every


def _kernel_accepts(q: Tensor | None, new: Past, kept: Past, w: Tensor, far: tuple[Tensor, ...] = ()) -> bool:
    """Return whether the C kernels can run: everything on the CPU, no gradient needed, and matching shapes."""
    (k, v, valid), (keys, values, valid_kept) = new, kept
    floats = (k, v, keys, values) if q is None else (k, v, keys, values, q)
    if not steps(floats, (valid, valid_kept, w, *far)) or q is not None and q.shape != v.shape:
        return False
    (B, L, D), (R, h) = v.shape, keys.shape[1:]
    fits = (
        valid.shape == (B, L)
        and valid_kept.shape == (B, R)
        and k.shape == (B, L, h)
        and keys.shape == (B, R, h)
        and values.shape == (B, R, D)
    )
    fits = fits and valid.dtype is valid_kept.dtype is torch.bool
    return (
        fits
        and w.dtype is torch.float64
        and w.shape[-2:] == (L, R + L)
        and w.shape[0] in (1, B)
        and w.shape[1] in (1, h)
    )


def _fits(past: Past, k: Tensor, v: Tensor) -> bool:
    """Return whether the sums are those of keys (B, L, h) and values (B, L, D)."""
    B, h = k.shape[0], k.shape[2]
    doubles = past[0].dtype is past[1].dtype is past[2].dtype is torch.float64
    return doubles and past[0].nbytes == past[2].nbytes == 8 * B * h and past[1].nbytes == 8 * B * v.shape[2]


def _unflatten_sums(past: Past, heads: int) -> Sums:
    """View flat sums as one row (B, heads, 1, g + 1, c')."""
    m, num, den = (a.double() for a in past)
    m = m.unflatten(-1, (heads, -1))[:, :, None]
    num = num.unflatten(-1, (heads, -1, m.shape[-1]))
    return Sums(m, torch.zeros_like(m), torch.cat([num, den.unflatten(-1, (heads, 1, -1))], 2)[:, :, None])


def _flatten_sums(s: Sums) -> Past:
    """Flatten one row of sums to tensors in units of exp(m).

    They are copies, because a view would keep all rows in memory.
    """
    acc = s.acc * torch.exp(s.lift)[..., None, :]
    return (
        s.m.flatten(1).contiguous(),
        acc[..., :-1, :].flatten(1).contiguous(),
        acc[..., -1, :].flatten(1).contiguous(),
    )
