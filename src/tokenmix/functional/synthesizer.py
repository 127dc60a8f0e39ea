"""The Synthesizer (Tay et al. 2020, ICML 2021): softmax over logits made without queries and keys, alone or mixed.

Layout (B, T, D). H heads; a table with 1 in place of H is shared by all heads. N is the number of positions a table
covers: a row of the logits belongs to the query's position and a column to the key's. Logits, softmax and sums run in
float32 or better. Synthetic logits are not scaled by 1 / sqrt(d).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend, choose
from ..kernels.precision import at_least_float32, exact
from .layout.checks import check_key_mask
from .layout.heads import by_head
from .layout.masks import allowed
from .sums.nonfinite import guard_nonfinite

Tables = tuple[Tensor, ...]
Positions = Any  # an int n, meaning positions 0..n-1 in every row, or a Tensor (B, n) of positions
JOINS = ("softmax", "gated", "plus")


@exact
@guard_nonfinite("v")
def synthesize(
    logits: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute Y = softmax(B) G(X) in each head: the last step of every Synthesizer, for logits from any source.

    Args:
        logits: B of the paper, (B, H, T, S); or (H, T, S) if all rows of the batch share them: then, without masks of
            single rows, the softmax is computed once for the whole batch.
        v: G(X), (B, S, H * e).

    Returns:
        (B, T, H * e) in v's dtype; exactly 0 for a query with nothing to attend. ``causal`` with T < S lets the last
        query see every key.
    """
    choose("synthesize", backend, v)
    T, S, H = logits.shape[-2], logits.shape[-1], logits.shape[-3]
    if v.ndim != 3 or logits.ndim not in (3, 4) or v.shape[1] != S or v.shape[2] % H or (causal and T > S):
        shapes = f"{tuple(logits.shape)} and {tuple(v.shape)}"
        raise MixerError(f"synthesize: expects logits (B, H, T, S) or (H, T, S) and v (B, S, H * e), got {shapes}.")
    values = at_least_float32(v)
    logits = logits.to(values.dtype)
    some = None
    if causal or key_mask is not None or attn_mask is not None:
        each = key_mask is not None or (attn_mask is not None and attn_mask.ndim == 3)
        ok = allowed(
            v.shape[0] if each else 1, T, S, causal=causal, key_mask=key_mask, attn_mask=attn_mask, device=v.device
        )
        some = ok.any(-1, keepdim=True)
        safe = ok | ~some
        logits = torch.where(safe[:, None] if each else safe, logits, float("-inf"))
    if key_mask is not None:
        values = torch.where(key_mask[..., None], values, 0.0)
    weights = logits.softmax(-1)
    sums = torch.einsum(
        "hts,bshe->bthe" if weights.ndim == 3 else "bhts,bshe->bthe", weights, values.unflatten(-1, (H, -1))
    )
    y = sums.flatten(2)
    return (y if some is None else torch.where(some, y, 0.0)).to(v.dtype)


@exact
def dense_logits(q: Tensor, dense: Tables, rows: Positions, cols: Positions, *, rectify: bool = True) -> Tensor:
    """Compute B_i = W2 relu(q_i) + b2, (B, H, T, S), q = W1 x + b1; dense is (W2,) or (W2, b2): (H, e, N), (H, N)."""
    hidden = _hidden(q, dense[0].shape[-2], rectify)
    keep = slice(None) if _are_given(cols) else slice(0, cols)
    return _columns(_apply_second_layer(hidden, *(a[..., keep] for a in dense)), cols)


@exact
def random_logits(q: Tensor, random: Tables, rows: Positions, cols: Positions) -> Tensor:
    """Return B = R; random is (R,), (H, N, N). q is not read. (H, T, S) for positions from 0, else (B, H, T, S)."""
    (table,) = random
    if _are_given(rows):
        return table[:, rows[:, :, None], cols[:, None, :]].transpose(0, 1)
    return table[:, :rows, :cols]


@exact
def factorized_dense_logits(
    q: Tensor, factorized_dense: Tables, rows: Positions, cols: Positions, *, rectify: bool = True
) -> Tensor:
    """Compute C_i[j] = A_i[j mod a] B_i[j div a] with A = W_A relu(q) + b_A and B = W_B relu(q) + b_B.

    factorized_dense is (W_A, W_B) or (W_A, W_B, b_A, b_B): (H, e, a), (H, e, b), (H, a), (H, b) with a b >= N. One
    factor is tiled and the other repeated, so that all N logits differ. Returns (B, H, T, S).
    """
    hidden = _hidden(q, factorized_dense[0].shape[-2], rectify)
    of_a, of_b = factorized_dense[::2], factorized_dense[1::2]
    a = of_a[0].shape[-1]
    keep = slice(None) if _are_given(cols) else slice(0, -(-cols // a))  # no more repeats than there are keys
    tiled, repeated = _apply_second_layer(hidden, *of_a), _apply_second_layer(hidden, *(m[..., keep] for m in of_b))
    return _columns((repeated[..., :, None] * tiled[..., None, :]).flatten(-2), cols)


@exact
def factorized_random_logits(q: Tensor, factorized_random: Tables, rows: Positions, cols: Positions) -> Tensor:
    """Compute B = R1 R2^T; factorized_random is (R1, R2), each (H, N, k). Shapes as in ``random_logits``."""
    pairs = zip(map(at_least_float32, factorized_random), (rows, cols), strict=True)
    r1, r2 = (r[:, at].transpose(0, 1) if _are_given(at) else r[:, :at] for r, at in pairs)
    return r1 @ r2.transpose(-1, -2)


LOGITS: dict[str, Callable[..., Tensor]] = {
    "dense": dense_logits,
    "random": random_logits,
    "factorized_dense": factorized_dense_logits,
    "factorized_random": factorized_random_logits,
}
"""Each way to make logits from tables: f(q, tables, rows, cols)."""


@exact
def mixture_logits(
    q: Tensor,
    k: Tensor,
    alpha: Tensor,
    tables: dict[str, Tables],
    rows: Positions,
    cols: Positions,
    *,
    parts: Sequence[str],
    join: str,
    heads: int,
    scale: float | None,
) -> Tensor:
    """Compute the joined logits of ``parts``: see ``synthesizer_mixture``."""
    each = [
        _dot_logits(q, k, heads, scale)
        if part == "attention"
        else at_least_float32(LOGITS[part](q, tables[part], rows, cols))
        for part in parts
    ]
    if join == "plus":
        return sum(each[1:], each[0])
    weights = part_weights(alpha, parts, join)
    return sum((w[..., None, None] * logits for w, logits in zip(weights, each, strict=True)), each[0].new_zeros(()))


def alphas(parts: Sequence[str], join: str) -> int:
    """Return how many numbers the alpha of ``synthesizer_mixture`` has, in each head if heads have their own."""
    return {"softmax": len(parts), "gated": 1, "plus": 0}[join]


@exact
def part_weights(alpha: Tensor, parts: Sequence[str], join: str) -> tuple[Tensor, ...]:
    """Compute the a_i of ``synthesizer_mixture`` for each part, () or (H,); those of ``join="plus"`` are 1."""
    alpha = at_least_float32(alpha)
    if join == "softmax":
        return alpha.softmax(-1).unbind(-1)
    if join == "plus":
        return (alpha.new_ones(()),) * len(parts)
    a = alpha[..., 0].sigmoid()
    return tuple(1 - a if part == "attention" else a for part in parts)


@exact
@guard_nonfinite(asks="q")
def synthesizer_dense(
    q: Tensor,
    v: Tensor,
    dense: Tables,
    *,
    rectify: bool = True,
    positions: Tensor | None = None,
    added: Tensor | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute the Dense Synthesizer: y_t = sum_s softmax_s(W2 relu(q_t) + b2)_s v_s in each head.

    Args:
        q: W1 x + b1, (B, T, H * e).
        v: (B, T, D), D divisible by H.
        dense: (W2,) or (W2, b2), (H, e, N) and (H, N), or with 1 in place of H.
        rectify: False leaves the relu out.
        positions: (B, T), where the tokens stand; default: 0..T-1.
        added: a position bias, added to the logits, (1 or B, H, T, T).

    Returns (B, T, D). Time O(T N e H + T^2 D).
    """
    rows, cols = _positions("synthesizer_dense", v, dense[0].shape[-1], positions)
    _check_tables("synthesizer_dense", q, v, dense[:1], dense[1:])
    return synthesize(
        with_added(dense_logits(q, dense, rows, cols, rectify=rectify), added),
        v,
        causal=causal,
        key_mask=key_mask,
        attn_mask=attn_mask,
        backend=backend,
    )


@exact
def synthesizer_random(
    v: Tensor,
    w: Tensor,
    *,
    positions: Tensor | None = None,
    added: Tensor | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute the Random Synthesizer: y_t = sum_s softmax_s(R_ts) v_s in each head; w is R, (H, N, N) or (1, N, N).
    Other arguments as in ``synthesizer_dense``."""
    rows, cols = _positions("synthesizer_random", v, w.shape[-1], positions)
    return synthesize(
        with_added(random_logits(v, (w,), rows, cols), added),
        v,
        causal=causal,
        key_mask=key_mask,
        attn_mask=attn_mask,
        backend=backend,
    )


@exact
@guard_nonfinite(asks="q")
def synthesizer_factorized_dense(
    q: Tensor,
    v: Tensor,
    factorized_dense: Tables,
    *,
    rectify: bool = True,
    positions: Tensor | None = None,
    added: Tensor | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute the Factorised Dense Synthesizer: the dense one with the logits of ``factorized_dense_logits``.
    Other arguments as in ``synthesizer_dense``."""
    of_a, of_b = factorized_dense[:2]
    rows, cols = _positions("synthesizer_factorized_dense", v, of_a.shape[-1] * of_b.shape[-1], positions)
    _check_tables("synthesizer_factorized_dense", q, v, factorized_dense[:2], factorized_dense[2:])
    logits = with_added(factorized_dense_logits(q, factorized_dense, rows, cols, rectify=rectify), added)
    return synthesize(logits, v, causal=causal, key_mask=key_mask, attn_mask=attn_mask, backend=backend)


@exact
def synthesizer_factorized_random(
    v: Tensor,
    w: Tables,
    *,
    positions: Tensor | None = None,
    added: Tensor | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute the Factorised Random Synthesizer: R = R1 R2^T. w is (R1, R2), each (H, N, k).
    Other arguments as in ``synthesizer_random``."""
    rows, cols = _positions("synthesizer_factorized_random", v, w[1].shape[-2], positions)
    return synthesize(
        with_added(factorized_random_logits(v, w, rows, cols), added),
        v,
        causal=causal,
        key_mask=key_mask,
        attn_mask=attn_mask,
        backend=backend,
    )


@exact
@guard_nonfinite("k", asks="q")
def synthesizer_mixture(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    dense: Tables,
    random: Tables,
    factorized_dense: Tables,
    factorized_random: Tables,
    *,
    parts: Sequence[str],
    heads: int,
    join: str = "softmax",
    scale: float | None = None,
    positions: Tensor | None = None,
    added: Tensor | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute a mixture of Synthesizers: y_t = sum_s softmax_s(sum_i a_i S_i)_s v_s.

    The logits are mixed, before the softmax.

    Args:
        q: (B, T, heads * e), read by "attention", "dense" (as its hidden layer before the relu) and "factorized_dense";
            otherwise only its shape counts.
        k: (B, T, heads * e), read by "attention": S = scale q . k, default scale 1 / sqrt(e).
        alpha: (parts,) for ``join="softmax"``: a = softmax(alpha); (1,) for "gated": 1 - a for "attention", a for every
            other, a = sigmoid(alpha); "plus" reads none: a = 1. With a dimension of heads before it, (heads, parts) or
            (heads, 1), each head has its own.
        dense, random, factorized_dense, factorized_random: tables as in the forms of these names, () for those not in
            ``parts``.
    """
    tables = {
        "dense": dense,
        "random": random,
        "factorized_dense": factorized_dense,
        "factorized_random": factorized_random,
    }
    if join not in JOINS or not parts or any(part != "attention" and len(tables.get(part, ())) == 0 for part in parts):
        given = f"parts={tuple(parts)}, join={join!r}"
        raise MixerError(
            f"synthesizer_mixture: parts are 'attention' or have tables, join is one of {JOINS}; got {given}."
        )
    covered = [_table_length(part, tables[part]) for part in parts if part != "attention"]
    rows, cols = _positions("synthesizer_mixture", v, min([v.shape[1], *covered]), positions)
    check_key_mask("synthesizer_mixture", key_mask, v)
    _check_mixture(q, k, v, tables, parts, heads)
    _check_alpha(alpha, parts, join, heads)
    keys = k if key_mask is None else torch.where(key_mask[..., None], k, 0.0)
    logits = mixture_logits(q, keys, alpha, tables, rows, cols, parts=parts, join=join, heads=heads, scale=scale)
    logits = with_added(logits, added)
    return synthesize(logits, v, causal=causal, key_mask=key_mask, attn_mask=attn_mask, backend=backend)


def with_added(logits: Tensor, added: Tensor | None) -> Tensor:
    """Return logits (B, H, T, S), or (H, T, S) for all rows, with a bias (1 or B, H, T, S) added."""
    if added is None:
        return logits
    return at_least_float32(logits) + (added[0] if logits.ndim == 3 and added.shape[0] == 1 else added)


def _table_length(name: str, tables: Tables) -> int:
    """Return how many positions the columns of these tables cover."""
    if name == "factorized_dense":
        return tables[0].shape[-1] * tables[1].shape[-1]
    return tables[1].shape[-2] if name == "factorized_random" else tables[0].shape[-1]


def _hidden(q: Tensor, width: int, rectify: bool) -> Tensor:
    """Return (B, T, H, e), after the relu."""
    hidden = at_least_float32(q).unflatten(-1, (-1, width))
    return F.relu(hidden) if rectify else hidden


def _apply_second_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply the second layer in each head: (B, T, H, e) by (H, e, n) -> (B, H, T, n)."""
    equation = "bthe,hen->bhtn"
    if weight.shape[0] == 1:
        equation, weight = "bthe,en->bhtn", weight[0]
    y = torch.einsum(equation, hidden, weight.to(hidden.dtype))
    return y if bias is None else y + bias[:, None].to(y.dtype)


def _are_given(positions: Positions) -> bool:
    """Return whether positions are given one by one; torch.jit.trace makes a length a tensor without dimensions."""
    return isinstance(positions, Tensor) and positions.ndim > 0


def _columns(logits: Tensor, cols: Positions) -> Tensor:
    """Return the columns (B, H, T, S) of the keys' positions."""
    if not _are_given(cols):
        return logits[..., :cols]
    return logits.gather(-1, cols[:, None, None].expand(*logits.shape[:3], cols.shape[1]).long())


def _dot_logits(q: Tensor, k: Tensor, heads: int, scale: float | None) -> Tensor:
    qh, kh = (by_head(at_least_float32(a), heads) for a in (q, k))
    return (qh * (qh.shape[-1] ** -0.5 if scale is None else scale)) @ kh.transpose(-1, -2)


def _positions(who: str, v: Tensor, covered: int, positions: Tensor | None) -> tuple[Positions, Positions]:
    """Return positions of queries and keys: the length if the position of each token is its index."""
    if v.ndim != 3 or v.shape[1] > covered:
        raise MixerError(
            f"{who}: the tables cover {covered} positions; expects v (B, T, D) with T up to that, got {tuple(v.shape)}."
        )
    if positions is not None and (positions.dtype not in (torch.int64, torch.int32) or positions.shape != v.shape[:2]):
        given = f"{positions.dtype} {tuple(positions.shape)}"
        raise MixerError(f"{who}: expects integer positions of shape {tuple(v.shape[:2])}, got {given}.")
    return (v.shape[1], v.shape[1]) if positions is None else (positions, positions)


def _check_tables(who: str, q: Tensor, v: Tensor, weights: Tables, biases: Tables) -> None:
    """Refuse mismatches of q (B, T, H e), v, weights (G, e, n) with G = H or 1, and a bias (G, n) for each or none."""
    G, width = weights[0].shape[0], weights[0].shape[-2]
    fits = q.ndim == 3 and q.shape[:2] == v.shape[:2] and q.shape[-1] % width == 0 and G in (1, q.shape[-1] // width)
    wanted = [(G, w.shape[-1]) for w in weights]
    if not fits or any(w.ndim != 3 or w.shape[:2] != (G, width) for w in weights):
        shapes = ", ".join(str(tuple(w.shape)) for w in weights)
        given = f"{tuple(q.shape)} and {shapes}"
        raise MixerError(f"{who}: expects q (B, T, H * e) for v {tuple(v.shape)} and tables of (H, e, .), got {given}.")
    if biases and [tuple(b.shape) for b in biases] != wanted:
        found = [tuple(b.shape) for b in biases]
        raise MixerError(f"{who}: expects a bias of shape (H, n) for each table, {wanted}, got {found}.")


def _check_alpha(alpha: Tensor, parts: Sequence[str], join: str, heads: int) -> None:
    count = alphas(parts, join)
    if count and tuple(alpha.shape) not in ((count,), (heads, count)):
        wanted, given = f"({count},) or ({heads}, {count})", f"{tuple(alpha.shape)} for parts={tuple(parts)}"
        raise MixerError(f"synthesizer_mixture: join={join!r} expects alpha {wanted}, got {given}.")


def _check_mixture(
    q: Tensor, k: Tensor, v: Tensor, tables: dict[str, Tables], parts: Sequence[str], heads: int
) -> None:
    who = "synthesizer_mixture"
    if "attention" in parts and (
        q.ndim != 3 or q.shape != k.shape or q.shape[:2] != v.shape[:2] or heads < 1 or q.shape[-1] % heads
    ):
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)}"
        raise MixerError(
            f"{who}: expects q, k (B, T, heads * e) for v {tuple(v.shape)} with heads={heads}, got {shapes}."
        )
    for part, weights in (("dense", 1), ("factorized_dense", 2)):
        if part in parts:
            _check_tables(who, q, v, tables[part][:weights], tables[part][weights:])
