"""External attention (Guo et al. 2021, arXiv:2105.02358): tokens read two small memories instead of each other.

Tokens interact only in the first normalisation, a softmax over tokens in each slot. It is computed through its
logarithm, so that no slot and no token can give 0/0. Tensors have layout (B, T, heads * e); the memories (S, e) are
shared by all heads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend, choose
from ..kernels.operator import Operator
from ..kernels.precision import exact, sum_dtype
from .layout.checks import check_eps, check_flags, check_key_mask, check_name
from .layout.masks import zero_masked
from .sums.nonfinite import propagate_nonfinite, propagate_nonfinite_chunk
from .sums.softmax import FLOOR, MASKED_KEY, Sums, merge, prefix_sums

NORMS = ("double", "tokens", "slots")
EPS = 1e-9


class SlotSums(NamedTuple):
    """Hold the sums of a stream, in float64 (B, heads * S).

    ``m`` is the largest logit of each slot so far, ``den`` the sum of exp(logit - m) over the tokens so far.
    """

    m: Tensor
    den: Tensor


@exact
def external(
    x: Tensor,
    memory_k: Tensor,
    memory_v: Tensor,
    memory_k_bias: Tensor | None = None,
    memory_v_bias: Tensor | None = None,
    *,
    heads: int = 1,
    norm: str = "double",
    eps: float = EPS,
    causal: bool = False,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute external attention (Guo et al. 2021).

    y_t = Norm(x_t M_k^T + b_k) M_v + b_v in each head. Takes time O(T S D).

    Args:
        x: (B, T, heads * e), the projected tokens.
        memory_k, memory_v: (S, e), shared by all heads; pass the same tensor twice to tie them.
        memory_k_bias (S,), memory_v_bias (e,): biases of the official multi-head form.
        heads: number of heads.
        norm: "double": softmax over the tokens in each slot, then each token's weights divided by eps + their sum over
            the slots. "tokens": the first step only. "slots": a softmax over the slots instead; tokens then do not
            interact.
        eps: added to the sum over the slots, as in the official code; 0 gives the paper's equation and is equally safe.
        causal: take the softmax of token t over tokens 0..t. An addition; the paper has no causal form.
        key_mask: bool (B, T); a masked token takes no part in the softmax over tokens, and its output is exactly 0.
        backend: how to run; see ``choose``.

    Returns:
        (B, T, heads * e) in x's dtype.

    Raises:
        MixerError: shapes, dtypes or options do not fit, or the requested backend cannot run this call.
    """
    lacks = "its kernel has no causal form" if causal else "its kernel has no norm='slots'" if norm == "slots" else None
    where = choose("external", backend, x, on=external_weights.on, lacks=lacks)
    check_norm("external", norm, eps)
    check_flags("external", causal=causal)
    _check(x, memory_k, memory_v, memory_k_bias, memory_v_bias, heads, key_mask)
    if 0 in x.shape:
        return torch.zeros_like(x)

    def form(x: Tensor) -> Tensor:
        logits = slot_logits(x, memory_k, memory_k_bias, heads, key_mask)
        if where == "cpu":
            shares = external_weights(logits, key_mask, norm, float(eps))
            return _apply(shares, memory_v, memory_v_bias, key_mask).to(x.dtype)
        if norm == "slots":
            level = logits.new_zeros(())
        elif causal:
            before = empty_slots(x.shape[0], heads * memory_k.shape[0], device=x.device)
            level = extend_slots(logits, before, key_mask)[0]
        else:
            level = over_all_tokens(logits, key_mask)
        return read_memory(x, logits, level, memory_v, memory_v_bias, norm=norm, eps=eps, valid=key_mask)

    return propagate_nonfinite(
        form, None, x, causal=causal, key_mask=key_mask, reach=_keep_marks if norm == "slots" else None
    )


def _keep_marks(mark: Tensor) -> Tensor:
    """Return the marks unchanged: with norm="slots" a token reaches only itself."""
    return mark


@exact
def slot_logits(x: Tensor, memory_k: Tensor, bias: Tensor | None, heads: int, valid: Tensor | None) -> Tensor:
    """Compute the logits x_t M_k^T + b_k, (B, T, heads, S), in float32 or wider; masked tokens are zeroed first."""
    x = zero_masked(x, valid)
    wide = sum_dtype(x)
    logits = (x.to(wide).unflatten(-1, (heads, -1)) @ memory_k.to(wide).mT).to(wide)
    return logits if bias is None else logits + bias.to(wide)


@exact
def read_memory(
    x: Tensor,
    logits: Tensor,
    level: Tensor,
    memory_v: Tensor,
    bias: Tensor | None,
    *,
    norm: str,
    eps: float,
    valid: Tensor | None,
) -> Tensor:
    """Apply the weights to the second memory: (B, T, heads * e) in x's dtype, 0 for masked tokens.

    ``level`` is the log-sum-exp of the logits over tokens.
    """
    wide = sum_dtype(x)
    return _apply(weights(logits, level, norm=norm, eps=eps, valid=valid).to(wide), memory_v, bias, valid).to(x.dtype)


def weights(logits: Tensor, level: Tensor, *, norm: str, eps: float, valid: Tensor | None) -> Tensor:
    """Compute the weights from their logarithms; those of masked tokens are finite."""
    logits = logits - level
    if valid is not None:
        logits = torch.where(valid[..., None, None], logits, 0.0)
    if norm != "tokens":
        total = logits.logsumexp(-1, keepdim=True)
        if norm == "double" and eps > 0:
            total = torch.logaddexp(total, torch.full_like(total, math.log(eps)))
        logits = logits - total
    return logits.exp()


def _apply(w: Tensor, memory_v: Tensor, bias: Tensor | None, valid: Tensor | None) -> Tensor:
    """Multiply the weights (B, T, heads, S) by the second memory: (B, T, heads * e)."""
    y = w @ memory_v.to(w.dtype)
    if bias is not None:
        y = y + bias.to(w.dtype)
    if valid is not None:
        y = torch.where(valid[..., None, None], y, 0.0)
    return y.flatten(2)


def over_all_tokens(logits: Tensor, valid: Tensor | None) -> Tensor:
    """Compute the log-sum-exp over all valid tokens: (B, 1, heads, S)."""
    if valid is not None:
        logits = logits.masked_fill(~valid[..., None, None], torch.finfo(logits.dtype).min)
    return logits.logsumexp(1, keepdim=True)


def _eager_weights(logits: Tensor, key_mask: Tensor | None, norm: str, eps: float) -> Tensor:
    w = weights(logits, over_all_tokens(logits, key_mask), norm=norm, eps=eps, valid=key_mask)
    return w if key_mask is None else torch.where(key_mask[..., None, None], w, 0.0)


external_weights = Operator(
    "external",
    "logits(B,T,H,S):float32 key_mask?!(B,T):bool",
    "str norm, float eps",
    saves=("level",),
    keeps_result=True,
    eager=_eager_weights,
    fits=lambda _, given: given["norm"] in ("double", "tokens"),
    on=("cpu",),
)
"""Compute the weights (B, T, heads, S) of float32 logits over all tokens, for ``norm`` "double" or "tokens".

They are 0 for masked tokens.
"""


def external_chunk(
    x: Tensor,
    past: SlotSums,
    memory_k: Tensor,
    memory_v: Tensor,
    memory_k_bias: Tensor | None,
    memory_v_bias: Tensor | None,
    *,
    heads: int,
    norm: str,
    eps: float,
    valid: Tensor | None,
) -> tuple[Tensor, SlotSums]:
    """Compute ``external`` for new tokens of a stream: return their outputs and the sums after them."""

    def form(x: Tensor) -> tuple[Tensor, SlotSums]:
        logits = slot_logits(x, memory_k, memory_k_bias, heads, valid)
        level, after = extend_slots(logits, past, valid)
        level = level.new_zeros(()) if norm == "slots" else level
        return read_memory(x, logits, level, memory_v, memory_v_bias, norm=norm, eps=eps, valid=valid), after

    return form(x) if norm == "slots" else propagate_nonfinite_chunk(form, None, x, key_mask=valid)


def empty_slots(batch: int, slots: int, *, device: torch.device | str | None = None) -> SlotSums:
    """Return the sums over no tokens."""
    none = torch.zeros(batch, slots, device=device, dtype=torch.float64)
    return SlotSums(none + FLOOR, none)


def extend_slots(logits: Tensor, past: SlotSums, valid: Tensor | None) -> tuple[Tensor, SlotSums]:
    """Extend the sums by new tokens.

    Returns:
        The log-sum-exp over the past and the new tokens up to each one, (B, L, heads, S), and the sums after them.
    """
    keys = logits.double().flatten(2)
    if valid is not None:
        keys = torch.where(valid[..., None], keys, MASKED_KEY)
    total = merge(prefix_sums(keys, keys.new_zeros(*keys.shape[:-1], 0, keys.shape[-1])), _unflatten_sums(past))
    den = total.acc[..., 0, :]
    none = den == 0  # rather than ~(den > 0), so that NaN is passed on
    level = torch.where(none, 0.0, total.m + total.lift + torch.log(torch.where(none, 1.0, den)))
    after = SlotSums(total.m[:, -1], den[:, -1] * torch.exp(total.lift[:, -1]))
    return level.unflatten(-1, logits.shape[2:]), after


def merge_slots(earlier: SlotSums, later: SlotSums) -> SlotSums:
    """Merge the sums over two adjacent stretches of tokens."""
    both = merge(_unflatten_sums(earlier), _unflatten_sums(later))
    return SlotSums(both.m[:, 0], both.acc[:, 0, 0])


def _unflatten_sums(past: SlotSums) -> Sums:
    m, den = past.m[:, None], past.den[:, None, None]
    return Sums(m, torch.zeros_like(m), den)


def check_norm(who: str, norm: str, eps: float) -> None:
    """Refuse an unknown norm or a negative eps."""
    check_name(who, "norm", norm, NORMS)
    check_eps(who, eps, zero=True)


def _check(
    x: Tensor,
    memory_k: Tensor,
    memory_v: Tensor,
    memory_k_bias: Tensor | None,
    memory_v_bias: Tensor | None,
    heads: int,
    key_mask: Tensor | None,
) -> None:
    if (
        x.ndim != 3
        or not x.is_floating_point()
        or not isinstance(heads, int)
        or isinstance(heads, bool)
        or heads < 1
        or x.shape[-1] % heads
    ):
        raise MixerError(f"external: expects x (B, T, heads * e) with heads={heads!r}, got {x.dtype} {tuple(x.shape)}.")
    e = x.shape[-1] // heads
    if memory_k.ndim != 2 or memory_k.shape != memory_v.shape or memory_k.shape[1] != e or memory_k.shape[0] < 1:
        raise MixerError(
            f"external: expects memory_k and memory_v of shape (slots, {e}) with heads={heads}, "
            f"got {tuple(memory_k.shape)} and {tuple(memory_v.shape)}."
        )
    for name, bias, n in (("memory_k_bias", memory_k_bias, memory_k.shape[0]), ("memory_v_bias", memory_v_bias, e)):
        if bias is not None and bias.shape != (n,):
            raise MixerError(f"external: expects {name} of shape ({n},), got {tuple(bias.shape)}.")
    check_key_mask("external", key_mask, x)
