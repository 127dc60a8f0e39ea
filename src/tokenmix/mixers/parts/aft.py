"""Parts of the AFT layers: projections, states, and steps over the ring of the windowed forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...functional import aft_chunk as chunk
from ...functional.layout.positions import gather_tokens, last_valid
from ...functional.sums.filtered import cap_keys
from ...functional.sums.gates import Gate, check_gate
from ...functional.sums.window import Filters
from ..base import Mixer, register_state, token_positions
from .history import join_rings
from .options import at_least, check_spread
from .shared import valid_mask


@register_state
class AFTSimpleState(NamedTuple):
    """Sums over all keys so far, in float64. The size is constant.

    m (B, D): the scale of each feature. num (B, D): the numerators. den (B, D): the denominators.
    """

    m: Tensor
    num: Tensor
    den: Tensor

    def merge_with(self, later: AFTSimpleState) -> AFTSimpleState:
        """Return the sums over two adjacent stretches of tokens."""
        return AFTSimpleState(*chunk.merge_past(self, later))


@register_state
class AFTRingState(NamedTuple):
    """The last R tokens, the sums over all older ones, and the next position. Its size is constant.

    keys (B, R, h), values (B, R, D), valid (B, R), positions (B, R): the last R tokens; False in ``valid`` marks empty
    or masked ones. m, den (B, h), num (B, D): sums over the older tokens, in float64. position (B,): the next position.
    AFT-local keeps R = window - 1 and h = D; AFT-conv keeps R = kernel_size - 1 and h = heads.
    """

    keys: Tensor
    values: Tensor
    valid: Tensor
    positions: Tensor
    m: Tensor
    num: Tensor
    den: Tensor
    position: Tensor


@register_state
class AFTFullState(NamedTuple):
    """Every key and value so far.

    keys, values (B, S, D); valid (B, S) bool, True = may be attended; positions (B, S); position (B,), the next one.
    """

    keys: Tensor
    values: Tensor
    valid: Tensor
    positions: Tensor
    position: Tensor


@register_state
class AFTDecayState(NamedTuple):
    """Sums over all keys so far, in float64, that decay with the distance in positions. The size is constant.

    m, num, den (B, D): the scale of each feature, the numerators, the denominators. last (B,): the position of the last
    valid token. position (B,): the next position.
    """

    m: Tensor
    num: Tensor
    den: Tensor
    last: Tensor
    position: Tensor


def empty_decay(batch_size: int, dim: int, *, device: Any) -> AFTDecayState:
    """Return the sums before the first key and value."""
    first = torch.zeros(batch_size, dtype=torch.long, device=device)
    return AFTDecayState(*chunk.empty_past(batch_size, dim, dim, device=device), first, first.clone())


def empty_full(batch_size: int, dim: int, *, device: Any, dtype: torch.dtype) -> AFTFullState:
    """Return the state before the first key and value."""
    keys = torch.zeros(batch_size, 0, dim, device=device, dtype=dtype)
    positions = torch.zeros(batch_size, 0, dtype=torch.long, device=device)
    return AFTFullState(keys, keys.clone(), positions.bool(), positions, positions.new_zeros(batch_size))


def history_of(mixer: Mixer, context: Tensor, context_mask: Tensor | None) -> AFTFullState:
    """Return the state over a context, with its keys and values projected once."""
    positions = token_positions(context, context_mask)
    keys, values = (mixer.get_submodule(name)(context) for name in ("k_proj", "v_proj"))
    return AFTFullState(
        keys, values, valid_mask(context, context_mask), positions, positions.new_zeros(positions.shape[0])
    )


def check_pair_bias(mixer: Mixer, max_len: int, max_context_len: int | None, rank: int | None, init_std: float) -> None:
    """Refuse options that do not define a pair bias, and set the number of keys that it covers."""
    at_least(mixer, 1, max_len=max_len, max_context_len=max_len if max_context_len is None else max_context_len)
    if rank is not None and rank < 1:
        mixer.refuse(f"rank must be a positive integer, or None for a plain table, got {rank!r}")
    if mixer.causal and max_context_len is not None and max_context_len < max_len:
        mixer.refuse(
            f"max_context_len={max_context_len} must be >= max_len={max_len} with causal=True: x is its own context"
        )
    check_spread(mixer, init_std=init_std, learned=rank is None)
    mixer.max_context_len = max_context_len or max_len


def add_projections(mixer: Mixer, *, key_width: int, gate: Gate | None, qkv_bias: bool, out_bias: bool) -> None:
    """Add the four projections of an AFT layer; without a gate there is no q_proj."""
    check_gate(gate, type(mixer).__name__)
    dim = mixer.dim
    mixer.register_module("q_proj", None if gate is None else nn.Linear(dim, dim, bias=qkv_bias))
    mixer.register_module("k_proj", nn.Linear(dim, key_width, bias=qkv_bias))
    mixer.register_module("v_proj", nn.Linear(dim, dim, bias=qkv_bias))
    mixer.register_module("out_proj", nn.Linear(dim, dim, bias=out_bias))


def queries(mixer: Mixer, x: Tensor) -> Tensor:
    """Return the projected queries; without a gate x itself, whose shape alone is used."""
    q_proj = mixer._modules["q_proj"]
    return x if q_proj is None else q_proj(x)


def empty_ring(batch: int, ring: int, keys: int, dim: int, *, device: Any, dtype: torch.dtype) -> AFTRingState:
    """Return the state of a windowed mixer before the first token."""
    values = torch.zeros(batch, ring, dim, device=device, dtype=dtype)
    positions = torch.zeros(batch, ring, dtype=torch.long, device=device)
    sums, position = (
        chunk.empty_past(batch, keys, dim, device=device),
        torch.zeros(batch, dtype=torch.long, device=device),
    )
    return AFTRingState(
        torch.zeros(batch, ring, keys, device=device, dtype=dtype), values, positions.bool(), positions, *sums, position
    )


def join_ring_states(
    earlier: AFTRingState, later: AFTRingState, *, only_near: bool, heads: int = 1, divide: bool = True
) -> AFTRingState:
    """Return the state after two adjacent stretches: tokens that leave the joined ring are added to the sums.

    Args:
        only_near, heads, divide: as in ``ring_step``.
    """
    ring, both, left = join_rings(earlier, later)
    if only_near:
        return ring
    far = chunk.merge_past((earlier.m, earlier.num, earlier.den), (later.m, later.num, later.den), heads=heads)
    m, num, den = chunk.absorb(far, cap_keys(both.keys, divide), both.values, left, heads=heads)
    return ring._replace(m=m, num=num, den=den)


class DecaySegments:
    """The segments of AFT-full whose bias falls linearly with the distance."""

    def narrow_capabilities(self, can):
        return replace(super().narrow_capabilities(can), segments=self.decays)

    def fades(self, x, valid):
        return None, self.decay(x.new_zeros(x.shape[0], 1, self.dim), None)[:, 0]

    def join_states(self, earlier, later, fade):
        sums = chunk.merge_faded(earlier[:3], later[:3], fade)
        return AFTDecayState(*sums, later.last, later.position)


class RingSegments:
    """The segments of a mixer with a ring of its last tokens, and sums of older ones unless ``outside`` is "none"."""

    @property
    def halo(self):
        return max(self.window - 1, 0) if self.outside == "none" else 0

    @property
    def only_halo(self):
        return self.outside == "none"

    def join_states(self, earlier, later, fade):
        return join_ring_states(earlier, later, only_near=self.outside == "none")


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
    filters: Filters = "exp",
    divide: bool = True,
) -> tuple[Tensor, AFTRingState]:
    """Mix L new tokens with the ring and each other, with weights w (.., L, R + L).

    Tokens that leave the ring are added to the sums, unless ``only_near``, where tokens outside of the window do not
    count.

    Args:
        positions: (B, L), of the new tokens.
        key_positions: of the ring and the new tokens (B, R + L), or of the ring after them (B, R).
        valid: (B, L) bool, True = the new token may be attended.
        holes: whether masked tokens may stand between valid ones.
        filters, divide: as in ``functional.aft_conv``.

    Returns:
        The outputs before ``out_proj``, and the new state.
    """
    kept, far = (state.keys, state.values, state.valid), (state.m, state.num, state.den)
    new = mixer.k_proj(x).to(state.keys.dtype), mixer.v_proj(x).to(state.values.dtype), valid
    options: dict[str, Any] = {"only_near": only_near, "heads": heads, "gate": mixer.gate, "holes": holes}
    y, ring, sums = chunk.ring_chunk(
        queries(mixer, x), new, kept, far, w, near, filters=filters, divide=divide, **options
    )
    if holes:
        index = last_valid(torch.cat([state.valid, valid], 1), state.valid.shape[1])[0]
        return y, AFTRingState(
            *ring, gather_tokens(torch.cat([state.positions, positions], 1), index), *sums, state.position
        )
    return y, AFTRingState(
        *ring,
        key_positions if key_positions.shape[1] == kept[0].shape[1] else key_positions[:, x.shape[1] :],
        *sums,
        state.position,
    )
