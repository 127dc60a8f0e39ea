"""External attention (Guo et al. 2021, arXiv:2105.02358): tokens read two small memories instead of each other.

Tokens meet in the first normalisation only, a softmax over tokens in each slot. It is computed through its logarithm, so that no slot and no token can
give 0/0. Layout (B, T, heads * e); memories (S, e) serve every head.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import MixerError
from ..kernels.operator import Operator
from .attention import attention
from .backend import Backend, choose
from .layout.checks import check_eps, check_flags, check_key_mask, check_name
from .sums.nonfinite import honest, honest_chunk
from .sums.precision import exact
from .sums.softmax import FLOOR, MASKED_KEY, Sums, merge, prefix_sums

NORMS = ("double", "tokens", "slots")
EPS = 1e-9


class SlotSums(NamedTuple):
    """What a stream carries, in float64 (B, heads * S): the largest logit of each slot so far, and the sum of exp(logit - m)."""

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
    """y_t = Norm(x_t M_k^T + b_k) M_v + b_v in each head. Time O(T S D).

    Args:
        x: (B, T, heads * e), the projected tokens.
        memory_k, memory_v: (S, e), shared by all heads; the same tensor twice where they are tied.
        memory_k_bias (S,), memory_v_bias (e,): of the official multi-head form.
        norm: "double": softmax over the tokens in each slot, then each token's weights divided by eps + their sum over the slots.
            "tokens": the first step only. "slots": a softmax over the slots instead, with which tokens no longer meet.
        eps: as in the official code; 0 gives the paper's equation and is as safe.
        key_mask: (B, T): a masked token takes no part in the softmax over tokens, and its own output is exactly 0.
        causal: the softmax of token t runs over tokens 0..t; ours, the paper has no causal form.

    Returns:
        (B, T, heads * e) in x's dtype.
    """
    lacks = "its kernel has no causal form" if causal else "its kernel has no norm='slots'" if norm == "slots" else None
    where = choose("external", backend, x, on=("cpu",), lacks=lacks)
    check_norm("external", norm, eps)
    check_flags("external", causal=causal)
    _check(x, memory_k, memory_v, memory_k_bias, memory_v_bias, heads, key_mask)
    if 0 in x.shape:
        return torch.zeros_like(x)

    def form(x: Tensor) -> Tensor:
        logits = slot_logits(x, memory_k, memory_k_bias, heads, key_mask)
        if where == "cpu":
            return _apply(external_weights(logits, key_mask, norm, float(eps)), memory_v, memory_v_bias, key_mask).to(
                x.dtype
            )
        if norm == "slots":
            level = logits.new_zeros(())
        elif causal:
            level = extend_slots(logits, empty_slots(x.shape[0], heads * memory_k.shape[0], device=x.device), key_mask)[
                0
            ]
        else:
            level = over_all_tokens(logits, key_mask)
        return read_memory(x, logits, level, memory_v, memory_v_bias, norm=norm, eps=eps, valid=key_mask)

    return honest(form, None, x, causal=causal, key_mask=key_mask, reach=_itself if norm == "slots" else None)


def _itself(mark: Tensor) -> Tensor:
    """With norm="slots" tokens do not meet."""
    return mark


@exact
def slot_logits(x: Tensor, memory_k: Tensor, bias: Tensor | None, heads: int, valid: Tensor | None) -> Tensor:
    """x_t M_k^T + b_k: (B, T, heads, S) in float32 or better; masked tokens are zeroed before."""
    if valid is not None:
        x = torch.where(valid[..., None], x, 0.0)
    wide = torch.promote_types(x.dtype, torch.float32)
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
    """The weights applied to the second memory; a token that is not valid gives 0. ``level`` is log sum exp over tokens."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return _apply(weights(logits, level, norm=norm, eps=eps, valid=valid).to(wide), memory_v, bias, valid).to(x.dtype)


def weights(logits: Tensor, level: Tensor, *, norm: str, eps: float, valid: Tensor | None) -> Tensor:
    """The weights from their logarithms; those of a token that is not valid are finite."""
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
    """Weights (B, T, heads, S) times the second memory: (B, T, heads * e)."""
    y = w @ memory_v.to(w.dtype)
    if bias is not None:
        y = y + bias.to(w.dtype)
    if valid is not None:
        y = torch.where(valid[..., None, None], y, 0.0)
    return y.flatten(2)


def over_all_tokens(logits: Tensor, valid: Tensor | None) -> Tensor:
    """log sum exp over all valid tokens: (B, 1, heads, S)."""
    if valid is not None:
        logits = logits.masked_fill(~valid[..., None, None], torch.finfo(logits.dtype).min)
    return logits.logsumexp(1, keepdim=True)


def _eager_weights(logits: Tensor, key_mask: Tensor | None, norm: str, eps: float) -> Tensor:
    w = weights(logits, over_all_tokens(logits, key_mask), norm=norm, eps=eps, valid=key_mask)
    return w if key_mask is None else torch.where(key_mask[..., None, None], w, 0.0)


external_weights = Operator(
    "external",
    "logits key_mask?!",
    "str norm, float eps",
    saves=("level",),
    keeps_result=True,
    eager=_eager_weights,
    on=("cpu",),
)
"""The weights (B, T, heads, S) of float32 logits under ``norm`` "double" or "tokens" over all tokens; 0 where a token is masked."""


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
    """``external`` for new tokens of a stream: their outputs, and the sums after them."""

    def form(x: Tensor) -> tuple[Tensor, SlotSums]:
        logits = slot_logits(x, memory_k, memory_k_bias, heads, valid)
        level, after = extend_slots(logits, past, valid)
        level = level.new_zeros(()) if norm == "slots" else level
        return read_memory(x, logits, level, memory_v, memory_v_bias, norm=norm, eps=eps, valid=valid), after

    return form(x) if norm == "slots" else honest_chunk(form, None, x, key_mask=valid)


def empty_slots(batch: int, slots: int, *, device: torch.device | str | None = None) -> SlotSums:
    """The sums over no token."""
    none = torch.zeros(batch, slots, device=device, dtype=torch.float64)
    return SlotSums(none + FLOOR, none)


def extend_slots(logits: Tensor, past: SlotSums, valid: Tensor | None) -> tuple[Tensor, SlotSums]:
    """log sum exp over the past and the new tokens up to each (B, L, heads, S), and the sums after them."""
    keys = logits.double().flatten(2)
    if valid is not None:
        keys = torch.where(valid[..., None], keys, MASKED_KEY)
    total = merge(prefix_sums(keys, keys.new_zeros(*keys.shape[:-1], 0, keys.shape[-1])), _lift(past))
    den = total.acc[..., 0, :]
    none = den == 0  # not the opposite of den > 0: what is not a number stays so
    level = torch.where(none, 0.0, total.m + total.lift + torch.log(torch.where(none, 1.0, den)))
    after = SlotSums(total.m[:, -1], den[:, -1] * torch.exp(total.lift[:, -1]))
    return level.unflatten(-1, logits.shape[2:]), after


def merge_slots(earlier: SlotSums, later: SlotSums) -> SlotSums:
    """The sums over two adjacent stretches."""
    both = merge(_lift(earlier), _lift(later))
    return SlotSums(both.m[:, 0], both.acc[:, 0, 0])


def _lift(past: SlotSums) -> Sums:
    m, den = past.m[:, None], past.den[:, None, None]
    return Sums(m, torch.zeros_like(m), den)


@exact
def simplified_attention(
    x: Tensor,
    k: Tensor,
    *,
    scale: float = 1.0,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """y_t = sum_s softmax_s(scale x_t . k_s) k_s, with k = x in self-mixing: attention without projections and heads. O(T S D).

    The paper has scale 1: the logits then are as large as |x|^2, so half precision is computed in float32.
    """
    if x.ndim != 3 or k.ndim != 3 or x.shape[0] != k.shape[0] or x.shape[2] != k.shape[2]:
        raise MixerError(
            f"simplified_attention: expects x (B, T, D) and k (B, S, D), got {tuple(x.shape)} and {tuple(k.shape)}."
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    y = attention(
        x.to(wide),
        k.to(wide),
        k.to(wide),
        heads=1,
        scale=scale,
        causal=causal,
        key_mask=key_mask,
        attn_mask=attn_mask,
        backend=backend,
    )
    return y.to(x.dtype)


def check_norm(who: str, norm: str, eps: float) -> None:
    """Refuse a norm that does not exist, and a negative eps."""
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
            f"external: expects memory_k and memory_v of shape (slots, {e}) with heads={heads}, got {tuple(memory_k.shape)} and {tuple(memory_v.shape)}."
        )
    for name, bias, n in (("memory_k_bias", memory_k_bias, memory_k.shape[0]), ("memory_v_bias", memory_v_bias, e)):
        if bias is not None and bias.shape != (n,):
            raise MixerError(f"external: expects {name} of shape ({n},), got {tuple(bias.shape)}.")
    check_key_mask("external", key_mask, x)
