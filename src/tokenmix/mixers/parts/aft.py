"""What the AFT layers share: projections, the ring state of the windowed ones, and long chunks in pieces."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...functional import aft_chunk as chunk
from ...functional.layout.positions import last_live, taken
from ...functional.sums.gates import check_gate
from ..base import Mixer, register_state
from .options import at_least, check_spread


@register_state
class AFTRingState(NamedTuple):
    """The last R keys (B, R, h) and values (B, R, D), which may be attended, where they stand; the sums of all older ones; the next position.

    Constant size. The sums m, den (B, h) and num (B, D) are float64. AFT-local keeps R = window - 1 and h = D; AFT-conv R = kernel_size - 1, h = heads.
    """

    keys: Tensor
    values: Tensor
    valid: Tensor
    positions: Tensor
    m: Tensor
    num: Tensor
    den: Tensor
    position: Tensor


def check_pair_bias(mixer: Mixer, max_len: int, max_context_len: int | None, rank: int | None, init_std: float) -> None:
    """Refuse options no bias can be built from, and keep how many keys it covers."""
    at_least(mixer, 1, max_len=max_len, max_context_len=max_len if max_context_len is None else max_context_len)
    if rank is not None and rank < 1:
        mixer.refuse(f"rank must be a positive integer, or None for a plain table, got {rank!r}")
    if mixer.causal and max_context_len is not None and max_context_len < max_len:
        mixer.refuse(f"max_context_len={max_context_len} must be at least max_len={max_len} with causal=True, where x is its own context")
    check_spread(mixer, init_std=init_std, learned=rank is None)
    mixer.max_context_len = max_context_len or max_len


def add_projections(mixer: Mixer, *, key_width: int, gate: str | None, qkv_bias: bool, out_bias: bool) -> None:
    """The four projections every AFT layer has; without a gate there is no query."""
    check_gate(gate, type(mixer).__name__)
    dim = mixer.dim
    mixer.register_module("q_proj", None if gate is None else nn.Linear(dim, dim, bias=qkv_bias))
    mixer.register_module("k_proj", nn.Linear(dim, key_width, bias=qkv_bias))
    mixer.register_module("v_proj", nn.Linear(dim, dim, bias=qkv_bias))
    mixer.register_module("out_proj", nn.Linear(dim, dim, bias=out_bias))


def queries(mixer: Mixer, x: Tensor) -> Tensor:
    """The projected queries; x itself, for its shape, where the mixer has no gate."""
    q_proj = mixer._modules["q_proj"]
    return x if q_proj is None else q_proj(x)


def empty_ring(batch: int, ring: int, keys: int, dim: int, *, device: Any, dtype: torch.dtype) -> AFTRingState:
    """The state of a windowed mixer that has seen nothing."""
    values = torch.zeros(batch, ring, dim, device=device, dtype=dtype)
    positions = torch.zeros(batch, ring, dtype=torch.long, device=device)
    sums, position = chunk.empty_past(batch, keys, dim, device=device), torch.zeros(batch, dtype=torch.long, device=device)
    return AFTRingState(torch.zeros(batch, ring, keys, device=device, dtype=dtype), values, positions.bool(), positions, *sums, position)


def ring_step(
    mixer: Any,
    x: Tensor,
    state: AFTRingState,
    positions: Tensor,
    key_positions: Tensor,
    valid: Tensor,
    w: Tensor,
    near: Tensor | None,
    *,
    only_near: bool,
    heads: int = 1,
    holes: bool = False,
) -> tuple[Tensor, AFTRingState]:
    """New tokens over the ring and each other with weights w (.., L, R + L); what leaves the ring joins the sums, unless ``only_near`` counts.

    Args:
        at: where the new tokens stand.
        places: of the ring and the new tokens, or of the ring after them.
    """
    kept, far = (state.keys, state.values, state.valid), (state.m, state.num, state.den)
    new = mixer.k_proj(x).to(state.keys.dtype), mixer.v_proj(x).to(state.values.dtype), valid
    y, ring, sums = chunk.ring_chunk(queries(mixer, x), new, kept, far, w, near, only_near=only_near, heads=heads, gate=mixer.gate, holes=holes)
    if holes:
        index = last_live(torch.cat([state.valid, valid], 1), state.valid.shape[1])[0]
        return y, AFTRingState(*ring, taken(torch.cat([state.positions, positions], 1), index), *sums, state.position)
    return y, AFTRingState(*ring, key_positions if key_positions.shape[1] == kept[0].shape[1] else key_positions[:, x.shape[1] :], *sums, state.position)
