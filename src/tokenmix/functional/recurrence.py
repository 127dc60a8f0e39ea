"""Gated linear recurrences: linear attention whose state decays and, under the delta rules, corrects what it holds.

One form for the layers of many models: Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), Kimi Delta Attention (Kimi
Team 2025, arXiv 2510.26692), DeltaNet (Yang et al. 2024, arXiv 2406.06484), Mamba-2 (Dao and Gu 2024, arXiv
2405.21060), GLA (Yang et al. 2023, arXiv 2312.06635), retention (Sun et al. 2023, arXiv 2307.08621). The names of the
rules are those of ONNX's operator LinearAttention.

In chunks of ``CHUNK`` tokens, with L_i the log-decays of a chunk summed up to token i, the state S before the chunk:

    d = (I + A)^-1 beta (v - (k e^L) S),    A_ij = beta_i (k_i e^{L_i - L_j}) . k_j for j < i
    o = (q e^L) S + M d,                    M_ij = (q_i e^{L_i - L_j}) . k_j for j <= i
    S' = e^{L_C} S + (k e^{L_C - L})^T d

No exponent is ever a difference of sums, nor above 0: A and M are put together from blocks by halving, where the decay
between a token of the second half and one of the first is the product of their decays to the border between them. So no
decay overflows, and one that forgets everything (-1e4) costs its successors no digits and no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend, choose, is_exporting, lowers
from ..kernels.cpu import recurrence as kernel
from ..kernels.extended import has_gradient
from ..kernels.operator import Operator
from ..kernels.precision import exact
from .layout.checks import check_flags, check_key_mask, check_name, check_scale
from .layout.masks import zero_masked
from .sums.nonfinite import add_nan_mask, clean, marks, nothing_to_hide

Rule = Literal["linear", "gated", "delta", "gated_delta"]
RULES: tuple[Rule, ...] = ("linear", "gated", "delta", "gated_delta")
LAYOUTS = ("bthd", "bhtd")
KEEP = ("last", "every")
CHUNK = 64
FORGET = -1e4
"""The log-decay at which nothing is left in any dtype; less, and -inf, count as this."""
WHO = "recurrence"


@exact
def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    rule: Rule = "gated_delta",
    past: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    positions: Tensor | None = None,
    key_mask: Tensor | None = None,
    l2norm: bool = False,
    keep: Literal["last", "every"] = "last",
    layout: Literal["bthd", "bhtd"] = "bthd",
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute a gated linear recurrence: each token decays, writes and reads a state per head, a matrix S (dk, dv).

    S_t = e^{g_t} S_{t-1} + k_t d_t^T and o_t = scale S_t^T q_t, where d_t = v_t for the rules "linear" and "gated", and
    d_t = beta_t (v_t - (e^{g_t} S_{t-1})^T k_t) for "delta" and "gated_delta": the state decays first, and what it
    would answer to the key is then corrected. "linear" and "delta" have no decay. A masked token leaves the state as it
    is. Takes time O(T dk dv) and, for a backward pass, O(T (dk + dv)) numbers and a state per 64 tokens and head.

    Args:
        q, k: (B, T, heads, dk). Each state has one or several heads of queries, so a multiple of its heads, or the
            heads of q and k are shared by several states.
        v: (B, T, heads, dv); a multiple of the heads of k (grouped values: head h reads key head h // group).
        decay: log-decay g <= 0 per head (B, T, H) or per feature of the key (B, T, H, dk), H the heads of v; -inf
            forgets everything. None: no decay.
        beta: (B, T, H), how far a delta rule corrects, usually in (0, 1) or (0, 2). None: 1.
        rule: "linear", "gated", "delta" or "gated_delta".
        past: the state (B, H, dk, dv) before the first token; (documents, H, dk, dv) with ``cu_seqlens``. None: zero.
        scale: factor of the outputs; None: dk ** -0.5.
        cu_seqlens: the ends of documents packed into one row (B = 1), integers from 0 to T, as (documents + 1,). Each
            document has a state of its own.
        positions: (B, T) integers; a valid token at position 0 starts a document, with an empty state.
        key_mask: bool (B, T), False: the token leaves the state as it is, and its output is 0.
        l2norm: whether q and k are multiplied by rsqrt(sum of squares + 1e-6), head by head, as public models do.
        keep: "last": return the state after the last token; "every": the state after each token, so that the stream
            can go on from any of them, as speculative decoding does after a wrong guess. Takes 4 B T H dk dv bytes in
            float32 (twice that on the way where plain torch runs), and the time of T calls of one token.
        layout: "bthd", or "bhtd" for tensors with heads before tokens (beta then is (B, H, T)).
        backend: how to run; see ``choose``.

    Returns:
        The outputs, with the heads of q or v, whichever are more, in q's dtype; and the state (B, H, dk, dv), with
        keep="every" (B, T, H, dk, dv), in float32, or in float64 if an argument is float64 (``past`` alone suffices).

    Raises:
        MixerError: shapes, dtypes or options do not fit, or the requested backend cannot run this call.

    With unit keys and beta in (0, 2) the state cannot grow. Keys of other lengths make a delta rule diverge where
    beta |k|^2 > 2; the results then overflow as the equation does.
    """
    _check_options(rule, layout, keep, scale, l2norm)
    if layout == "bhtd":
        q, k, v = _swap(q), _swap(k), _swap(v)
        decay, beta = (None if a is None else _swap(a) for a in (decay, beta))
    _check_tensors(q, k, v, rule, decay, beta)
    _check_rows(q, k, v, past, cu_seqlens, positions, key_mask)
    given, states = q.dtype, v.shape[2]
    call = _align(q, k, v, decay, beta, past, l2norm=l2norm)._replace(
        live=key_mask,
        starts=None if positions is None else (positions == 0) & (True if key_mask is None else key_mask),
        ends=None if cu_seqlens is None else cu_seqlens.long(),
    )
    how = _How("delta" in rule, q.shape[3] ** -0.5 if scale is None else float(scale), keep == "every")
    lacks = _lacks(call, how)
    where = choose(WHO, backend, call.q, call.k, call.v, on=recurrence_kernel.on, lacks=lacks)
    y, state = _hide_nonfinite(_run_eager if where == "eager" else _run_kernel, call, how)
    y, state = y.to(given), state[..., :: y.shape[2] // states, :, :]
    return y if layout == "bthd" else y.transpose(1, 2), state


class _How(NamedTuple):
    """The options of a call: whether a delta rule corrects the state, the factor of outputs, which states to return."""

    delta: bool
    scale: float
    every: bool


class _Call(NamedTuple):
    """The tensors of a call: q, k (B, T, heads, dk), v (B, T, H, dv), decay (B, T, H, 1 or dk), beta, past.

    live (B, T), False: masked; starts (B, T), True: the token starts a document; ends of documents in one row.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    beta: Tensor | None
    past: Tensor | None
    live: Tensor | None = None
    starts: Tensor | None = None
    ends: Tensor | None = None

    def change(self, change: Callable[[Tensor], Tensor]) -> _Call:
        """Change the tensors of tokens."""
        decay, beta = (None if a is None else change(a) for a in (self.decay, self.beta))
        return self._replace(q=change(self.q), k=change(self.k), v=change(self.v), decay=decay, beta=beta)

    def cut(self, tokens: slice) -> _Call:
        """Keep some of the tokens."""
        live, starts = (None if a is None else a[:, tokens] for a in (self.live, self.starts))
        return self.change(lambda a: a[:, tokens])._replace(live=live, starts=starts)


def _swap(a: Tensor) -> Tensor:
    return a if a.ndim < 3 else a.transpose(1, 2)


def _align(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, past: Tensor | None, *, l2norm: bool
) -> _Call:
    """Cast to the widest dtype, float32 at least; give q and k one number of heads, the rest those of the outputs."""
    wide = torch.float32
    for a in (q, k, v, decay, beta, past):
        wide = wide if a is None else torch.promote_types(wide, a.dtype)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    decay, beta, past = (None if a is None else a.to(wide) for a in (decay, beta, past))
    if l2norm:
        q, k = (a * (a.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for a in (q, k))
    if decay is not None:
        decay = decay if decay.ndim == 4 else decay[..., None]
    heads = max(q.shape[2], v.shape[2])
    if q.shape[2] != k.shape[2]:
        q, k = _repeat(q, heads), _repeat(k, heads)
    decay, beta = (None if a is None else _repeat(a, heads) for a in (decay, beta))
    return _Call(q, k, _repeat(v, heads), decay, beta, None if past is None else _repeat(past, heads, 1))


def _repeat(a: Tensor, heads: int, dim: int = 2) -> Tensor:
    """Repeat each head so that there are ``heads``."""
    return a if a.shape[dim] == heads else a.repeat_interleave(heads // a.shape[dim], dim)


def _lacks(call: _Call, how: _How) -> str | None:
    """Return what this call needs and the kernel does not have, as a phrase."""
    if max(call.q.shape[3], call.v.shape[3]) > kernel.WIDEST:
        return f"its kernel takes heads of at most {kernel.WIDEST} features"
    if lowers() and (how.every or call.ends is not None):
        return "ONNX's operator has neither keep='every' nor cu_seqlens"
    if how.every and (call.ends is not None or has_gradient(*call[:6])):
        return "its kernel has no keep='every' with gradients or cu_seqlens"
    return None


def _hide_nonfinite(
    run: Callable[[_Call, _How], tuple[Tensor, Tensor]], call: _Call, how: _How
) -> tuple[Tensor, Tensor]:
    """Hide numbers of tokens that are not finite from a way to run, and put NaN where they reach."""
    tokens = [a for a in call[:5] if a is not None]
    if nothing_to_hide(*tokens):  # the kernel takes any decay that is finite, so none is copied
        return run(call, how)
    call = _bound_decay(call)
    tokens = [a for a in call[:5] if a is not None]
    if nothing_to_hide(*tokens):
        return run(call, how)
    y, state = run(call.change(clean), how)
    q, *keys = (marks(zero_masked(a.flatten(2), call.live)) for a in tokens)
    starts, ends = call.starts, call.ends
    if ends is not None:
        first = torch.zeros(1, y.shape[1] + 1, dtype=torch.bool, device=y.device)
        first[0, ends[:-1]] = True
        starts = first[:, :-1] if starts is None else first[:, :-1] | starts
    met = _reach(sum(keys[1:], keys[0]), starts)
    y = add_nan_mask(y.flatten(2), met + q).unflatten(2, y.shape[2:])
    met = met.to(state.dtype)
    if how.every:
        return y, state + met[..., None, None]
    if ends is None:
        return y, state + met[:, -1, :, None, None]
    spoiled = torch.where(ends.diff() > 0, met[0, (ends[1:] - 1).clamp_min(0), 0], 0.0)
    return y, state + spoiled[:, None, None, None]


def _bound_decay(call: _Call) -> _Call:
    """Replace decays that forget everything, and -inf, by ``FORGET``."""
    return call if call.decay is None else call._replace(decay=call.decay.clamp_min(FORGET))


def _reach(mark: Tensor, starts: Tensor | None) -> Tensor:
    """Propagate marks (B, T, 1) of tokens to those after them in their document."""
    if starts is None:
        return mark.cumsum(1)
    count = mark.isnan().cumsum(1)
    before = torch.where(starts[..., None], count - mark.isnan().to(count.dtype), 0).cummax(1).values
    return torch.where(count > before, float("nan"), 0.0)


def _run_kernel(call: _Call, how: _How) -> tuple[Tensor, Tensor]:
    """Run on the C kernel; the state after every token is that of calls of one token each."""
    if how.every and call.v.shape[1] > 0:
        outputs: list[Tensor] = []
        states = call.v.new_empty(*call.v.shape[:3], call.q.shape[3], call.v.shape[3])  # filled, to have it once
        for t in range(call.v.shape[1]):
            one = call.cut(slice(t, t + 1))._replace(past=states[:, t - 1] if t else call.past)
            y, states[:, t] = _run_kernel(one, how._replace(every=False))
            outputs.append(y)
        return torch.cat(outputs, 1), states
    flags = None if call.live is None else call.live.to(torch.uint8)
    if call.starts is not None:
        flags = call.starts * kernel.START + (kernel.LIVE if flags is None else flags)
        flags = flags.to(torch.uint8)
    result = recurrence_kernel(*call[:6], flags, call.ends, how.delta, how.scale)
    rows = call.v.shape[0] if call.ends is None else call.ends.shape[0] - 1
    y, state = result.split([call.v.numel(), result.numel() - call.v.numel()])
    state = state.view(rows, call.v.shape[2], call.q.shape[3], call.v.shape[3])
    return y.view(call.v.shape), state[:, None][:, :0] if how.every else state


def _run_eager(call: _Call, how: _How) -> tuple[Tensor, Tensor]:
    """Run in plain torch."""
    if call.ends is not None:
        return _run_documents(call, call.ends, how)
    call = _bound_decay(call)
    heads = call.v.shape[2]
    q, k, v, decay, beta = call.change(
        lambda a: (
            zero_masked(a.flatten(2), call.live).unflatten(2, a.shape[2:])  # of beta the heads
            if a.ndim == 4
            else zero_masked(a, call.live)
        )
    )[:5]
    q, k = _repeat(q * how.scale, heads), _repeat(k, heads)
    if call.starts is not None:
        decay = torch.where(call.starts[..., None, None], FORGET, q.new_zeros(()) if decay is None else decay)
        decay = decay.expand(-1, -1, heads, -1)
    if how.delta and beta is None:
        beta = torch.ones_like(v[..., 0])
    one = isinstance(k.shape[1], int) and k.shape[1] == 1  # a length that a trace leaves free is no int
    if not how.every and not one:
        return _chunks(q, k, v, decay, beta, call.past)
    y, states = _every_state(q, k, v, decay, beta, call.past)
    return y, states if how.every else states[:, 0]


def _run_documents(call: _Call, ends: Tensor, how: _How) -> tuple[Tensor, Tensor]:
    """Run documents of one row as the rows of a batch, padded on the right."""
    lengths = ends.diff()
    within = torch.arange(int(lengths.max()), device=ends.device)
    live = within < lengths[:, None]
    index = torch.where(live, ends[:-1, None] + within, 0)
    rows = call.change(lambda a: a[0, index])._replace(
        live=live if call.live is None else live & call.live[0, index],
        starts=None if call.starts is None else call.starts[0, index] & live,
        ends=None,
    )
    y, state = _run_eager(rows, how)
    return y[live][None], state[live][None] if how.every else state


def _run_flat(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    past: Tensor | None,
    flags: Tensor | None,
    ends: Tensor | None,
    delta: bool,
    scale: float,
) -> Tensor:
    """Compute what the kernel does in plain torch: outputs and state in one row."""
    live, starts = (None if flags is None else flags & bit != 0 for bit in (kernel.LIVE, kernel.START))
    call = _Call(q, k, v, decay, beta, past, live, None if starts is None or live is None else starts & live, ends)
    y, state = _run_eager(call, _How(delta, scale, every=False))
    return torch.cat([y.flatten(), state.flatten()])


recurrence_kernel = Operator(
    "recurrence",
    "q(B,T,R,K):float32 k(B,T,R,K):float32 v(B,T,H,V):float32 decay?(B,T,H,E):float32 beta?(B,T,H):float32 "
    "past?(N,H,K,V):float32 flags?!(B,T):uint8 ends?!(M):int64",
    "bool delta, float scale",
    saves=("less", "starts"),
    eager=_run_flat,
    shape=kernel.result_shape,
    fits=lambda at, given: (
        at["H"] % max(at["R"], 1) == 0
        and 0 < at["K"] <= kernel.WIDEST
        and 0 < at["V"] <= kernel.WIDEST
        and at.get("E", 1) in (1, at["K"])
        and (at.get("M") is None or at["B"] == 1 and at["M"] > 1)
        and at.get("N", 1) == (1 if "N" not in at else at["M"] - 1 if at.get("M") else at["B"])
    ),
    on=("cpu", "standard"),
)
"""Compute outputs (B, T, H, V) and states (documents, H, K, V), in one row; by a delta rule if ``delta``."""


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, past: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute outputs (B, T, H, dv) and the last state from q, k, v, decay and beta (B, T, H, .), in chunks."""
    B, T, H, dk = k.shape
    size = 1
    while size < CHUNK and (is_exporting() or size < T):
        size *= 2
    q, k, v = (_cut(a, size) for a in (q, k, v))  # (B, H, n, size, .)
    g = None if decay is None else _cut(decay, size)
    b = None if beta is None else _cut(beta[..., None], size)
    seen, inverse = _triangles(q, k, g, b)
    first, last, through = k, k, None
    if g is not None:
        total = g.cumsum(-2)
        reach = torch.exp(total)
        q, first, last, through = (
            q * reach,
            k * reach,
            k * torch.exp(_after(g)),
            torch.exp(total[..., -1, :])[..., None],
        )
    write = v
    if b is not None and inverse is not None:
        write, erase = inverse @ (b * v), inverse @ (b * first)
    S = v.new_zeros(B, H, dk, v.shape[-1]) if past is None else past
    outputs = []
    for n in range(v.shape[2]):
        new = write[:, :, n] - erase[:, :, n] @ S if b is not None else write[:, :, n]
        outputs.append(q[:, :, n] @ S + seen[:, :, n] @ new)
        S = (S if through is None else through[:, :, n] * S) + last[:, :, n].mT @ new
    y = torch.stack(outputs, 2).flatten(2, 3)[:, :, :T] if outputs else v.flatten(2, 3)
    return y.transpose(1, 2), S


def _cut(a: Tensor, size: int) -> Tensor:
    """Cut (B, T, H, c) into chunks (B, H, n, size, c); what is added is the identity, a token of zeros."""
    return F.pad(a.transpose(1, 2), (0, 0, 0, -a.shape[1] % size)).unflatten(2, (-1, size))


def _after(g: Tensor) -> Tensor:
    """Sum the log-decays of the tokens after each one."""
    return F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def _triangles(q: Tensor, k: Tensor, g: Tensor | None, beta: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return M (..., C, C) and, with beta, (I + A)^-1; see above. C is a power of 2.

    Blocks on the diagonal are joined in pairs; the corner below them takes all decays up to the border of the two.
    """
    C = int(q.shape[-2])  # a trace takes it for a tensor
    seen = (q * k).sum(-1)[..., None, None]  # (..., C, 1, 1)
    inverse = None if beta is None else torch.ones_like(seen)
    for h in (1 << i for i in range(C.bit_length() - 1)):
        k0, k1 = k.unflatten(-2, (-1, 2, h)).unbind(-3)
        q1 = q.unflatten(-2, (-1, 2, h))[..., 1, :, :]
        if g is not None:
            g0, g1 = g.unflatten(-2, (-1, 2, h)).unbind(-3)
            late, k0 = torch.exp(g1.cumsum(-2)), k0 * torch.exp(_after(g0))
            q1, k1 = q1 * late, k1 * late
        seen = _join(seen, q1 @ k0.mT)
        if beta is not None and inverse is not None:
            i0, i1 = inverse.unflatten(-3, (-1, 2)).unbind(-3)
            inverse = _join(inverse, -(i1 * beta.unflatten(-2, (-1, 2, h))[..., 1, :, :].mT) @ (k1 @ k0.mT) @ i0)
    return seen.squeeze(-3), None if inverse is None else inverse.squeeze(-3)


def _join(blocks: Tensor, corner: Tensor) -> Tensor:
    """Join blocks (..., 2 n, h, h) on the diagonal in pairs: (..., n, 2 h, 2 h), with corners (..., n, h, h) below."""
    first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    return torch.cat([F.pad(first, (0, first.shape[-1])), torch.cat([corner, second], -1)], -2)


def _every_state(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, past: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute outputs (B, T, H, dv) and the state after each token (B, T, H, dk, dv), token by token."""
    B, T, H, dk = k.shape
    S = v.new_zeros(B, H, dk, v.shape[-1]) if past is None else past
    keep = None if decay is None else torch.exp(decay)
    states = [S[:, None, :][:, :0]]
    for t in range(T):
        S, key, new = S if keep is None else S * keep[:, t, :, :, None], k[:, t, :, None], v[:, t, :, None]
        if beta is not None:
            new = beta[:, t, :, None, None] * (new - key @ S)
        S = S + key.mT @ new
        states.append(S[:, None])
    every = torch.cat(states, 1)
    return (q[..., None, :] @ every).squeeze(-2), every


def _check_options(rule: object, layout: object, keep: object, scale: object, l2norm: object) -> None:
    check_name(WHO, "rule", rule, RULES)
    check_name(WHO, "layout", layout, LAYOUTS)
    check_name(WHO, "keep", keep, KEEP)
    check_scale(WHO, scale)
    check_flags(WHO, l2norm=l2norm)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, rule: str, decay: Tensor | None, beta: Tensor | None) -> None:
    if not all(a.ndim == 4 for a in (q, k, v)) or not q.shape[:2] == k.shape[:2] == v.shape[:2] or 0 in q.shape[2:]:
        raise MixerError(f"{WHO}: expects q, k (B, T, heads, dk) and v (B, T, heads, dv), got {_shapes(q, k, v)}.")
    if q.shape[3] != k.shape[3] or 0 in k.shape[2:] or 0 in v.shape[2:]:
        got = _shapes(q, k, v)
        raise MixerError(f"{WHO}: q and k must have one width dk, and nothing but B and T may be 0, got {got}.")
    hq, hk, hv = q.shape[2], k.shape[2], v.shape[2]
    if hv % hk or hq % hv and hv % hq:
        raise MixerError(
            f"{WHO}: the {hv} heads of v must be a multiple of the {hk} of k, and of the {hq} of q or divide them."
        )
    if not all(a is None or a.is_floating_point() for a in (q, k, v, decay, beta)):
        raise MixerError(f"{WHO}: expects floating point q, k, v, decay and beta.")
    if decay is not None and rule in ("linear", "delta"):
        raise MixerError(
            f"{WHO}: rule={rule!r} has no decay; choose {'gated' if rule == 'linear' else 'gated_delta'!r}."
        )
    if beta is not None and rule in ("linear", "gated"):
        raise MixerError(f"{WHO}: rule={rule!r} has no beta; scale v by it, or choose a delta rule.")
    rows = tuple(v.shape[:3])
    if decay is not None and tuple(decay.shape) not in (rows, (*rows, k.shape[3])):
        raise MixerError(
            f"{WHO}: decay must be (B, T, H) = {rows} or (B, T, H, dk) = {(*rows, k.shape[3])}, H the heads of v, "
            f"got {tuple(decay.shape)}."
        )
    if beta is not None and tuple(beta.shape) != rows:
        raise MixerError(f"{WHO}: beta must be (B, T, H) = {rows}, H the heads of v, got {tuple(beta.shape)}.")


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(str(tuple(a.shape)) for a in tensors)


def _check_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: Tensor | None,
    cu_seqlens: Tensor | None,
    positions: Tensor | None,
    key_mask: Tensor | None,
) -> None:
    check_key_mask(WHO, key_mask, q)
    rows = q.shape[0]
    if positions is not None and (positions.shape != q.shape[:2] or positions.is_floating_point()):
        raise MixerError(f"{WHO}: expects integer positions {tuple(q.shape[:2])}, got {tuple(positions.shape)}.")
    if cu_seqlens is not None:
        rows = _check_documents(q, cu_seqlens)
    wanted = (rows, v.shape[2], k.shape[3], v.shape[3])
    if past is not None and (tuple(past.shape) != wanted or not past.is_floating_point()):
        raise MixerError(f"{WHO}: expects a state past {wanted}, got {past.dtype} {tuple(past.shape)}.")


def _check_documents(q: Tensor, ends: Tensor) -> int:
    """Refuse ends of documents that do not fit one row of q, and return how many documents there are."""
    B, T = q.shape[:2]
    if ends.ndim != 1 or ends.is_floating_point() or ends.dtype == torch.bool or len(ends) < 2 or B != 1:
        raise MixerError(
            f"{WHO}: cu_seqlens are integers (documents + 1,) for one row, got {ends.dtype} {tuple(ends.shape)} "
            f"for {B} rows."
        )
    if int(ends[0]) != 0 or int(ends[-1]) != T or bool((ends.diff() < 0).any()):
        raise MixerError(f"{WHO}: cu_seqlens must rise from 0 to {T}, the number of tokens, got {_shorten(ends)}.")
    return len(ends) - 1


def _shorten(ends: Tensor) -> str:
    some = [str(int(n)) for n in ends[:6]]
    return f"[{', '.join(some)}{', ...' if len(ends) > 6 else ''}]"
