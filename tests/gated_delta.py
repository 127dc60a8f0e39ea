"""A mixer with a causal form only, as somebody outside of the library writes one: the gated delta rule."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from tokenmix import Mixer
from tokenmix.mixers import (
    QKVO,
    About,
    Facts,
    Inputs,
    MixingCost,
    add_projections,
    at_least_float32,
    by_head,
    exact,
    guard_nonfinite,
    join_heads,
    propagate_nonfinite_chunk,
    register_state,
    zero_masked,
)


@register_state
class Memory(NamedTuple):
    """What each head has written so far, S (B, H, e, e)."""

    memory: Tensor


def unit(a: Tensor) -> Tensor:
    """Divide by the norm; 0 stays 0, and so do its gradients."""
    return a * (a.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def walk(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, write: Tensor, memory: Tensor, heads: int, key_mask: Tensor | None
) -> tuple[Tensor, tuple[Tensor]]:
    """S_t = a_t S_(t-1) + b_t k_t (v_t - S_(t-1)^T k_t a_t)^T, y_t = S_t^T q_t, token by token."""
    k, v, write = (at_least_float32(zero_masked(a, key_mask)) for a in (k, v, torch.sigmoid(write)))
    keep = torch.sigmoid(at_least_float32(keep))
    keep = keep if key_mask is None else torch.where(key_mask[..., None], keep, 1.0)
    qh, kh, vh = unit(by_head(at_least_float32(q), heads)), unit(by_head(k, heads)), by_head(v, heads)
    memory = memory.to(kh.dtype)
    read = [torch.zeros_like(qh[:, :, :0])]
    for t in range(q.shape[1]):
        memory = memory * keep[:, t, :, None, None]
        new = vh[:, :, t] - torch.einsum("bhkv,bhk->bhv", memory, kh[:, :, t])
        memory = memory + write[:, t, :, None, None] * kh[:, :, t, :, None] * new[:, :, None]
        read.append(torch.einsum("bhkv,bhk->bhv", memory, qh[:, :, t])[:, :, None])
    return join_heads(torch.cat(read, 2)).to(q.dtype), (memory,)


@exact
@guard_nonfinite("k", "v", "keep", "write", asks="q")
def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    write: Tensor,
    *,
    heads: int,
    causal: bool = True,
    key_mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute the outputs of the gated delta rule from an empty memory."""
    e = q.shape[-1] // heads
    empty = at_least_float32(q).new_zeros(len(q), heads, e, e)
    return walk(q, k, v, keep, write, empty, heads, key_mask)[0]


@exact
def gated_delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, write: Tensor, memory: Tensor, heads: int, key_mask: Tensor | None
) -> tuple[Tensor, tuple[Tensor]]:
    """Return the outputs of the next tokens of a stream, and the memory after them."""

    def form(q: Tensor, *keys: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        return walk(q, *keys, memory, heads, key_mask)

    return propagate_nonfinite_chunk(form, q, k, v, keep, write, key_mask=key_mask)


class GatedDelta(Mixer):
    """y_t = W_o S_t^T q_t with S_t = a_t (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T in each head.

    Args:
        heads: number of heads, 2 by default.
    """

    facts = Facts(
        causal_only=True,
        streaming=True,
        fixed_when_traced=True,  # a trace unrolls the loop over tokens
        about=About("nobody, for a test", "kernel", "T e D", "T e D", idea="writes what is new and forgets"),
        form=gated_delta,
        carries=QKVO,
        signed=True,
    )

    def __init__(self, dim: int, *, causal: bool = True, heads: int = 2, qkv_bias: bool = True, out_bias: bool = True):
        super().__init__(dim, causal=causal)
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        self.heads, self.gates = heads, nn.Linear(dim, 2 * heads)
        self.start = nn.Parameter(torch.empty(heads))
        self.init_parameters()

    def init_parameters(self):
        with torch.no_grad():
            self.start.copy_(torch.linspace(1.0, 4.0, self.heads))

    def functional_args(self, inputs):
        x = inputs.x
        keep, write = self.gates(x).chunk(2, -1)
        args = self.q_proj(x), self.k_proj(x), self.v_proj(x), keep + self.start, write
        return args, {"heads": self.heads, "causal": True, "key_mask": inputs.key_mask}

    def mixing_cost(self, T):
        numbers = T * self.dim * self.dim // self.heads
        return MixingCost(flops=8 * numbers, counted=None, activations=16 * numbers, state=4 * numbers // T)

    def empty_state(self, batch_size, *, device, dtype):
        e, wide = self.dim // self.heads, torch.promote_types(dtype, torch.float32)
        return Memory(torch.zeros(batch_size, self.heads, e, e, device=device, dtype=wide))

    def mix_chunk(self, x, state, *, positions, key_mask):
        args, _ = self.functional_args(Inputs(x))
        y, past = gated_delta_chunk(*args, state.memory, self.heads, key_mask)
        return self.out_proj(y), Memory(*past)


def equation(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, write: Tensor, *, heads: int, mask: Tensor | None = None
) -> Tensor:
    """Compute the gated delta rule from its definition: each query t has a memory of its own, S (B, T, H, e, e)."""
    B, T, _ = q.shape
    q, k, v = (a.unflatten(-1, (heads, -1)) for a in (q, k, v))
    q, k, keep, write = unit(q), unit(k), torch.sigmoid(keep)[..., None, None], torch.sigmoid(write)[..., None, None]
    S = q.new_zeros(B, T, heads, q.shape[-1], q.shape[-1])
    for s in range(T):
        key, value, a, b = (each[:, None, s] for each in (k, v, keep, write))
        old = torch.einsum("bihk,bthkv->bthv", key, S)
        after = a * (S - b * key[..., None] * old[..., None, :]) + b * key[..., None] * value[..., None, :]
        S = after if mask is None else torch.where(mask[:, :, s, None, None, None], after, S)
    return torch.einsum("bthk,bthkv->bthv", q, S).flatten(2)
