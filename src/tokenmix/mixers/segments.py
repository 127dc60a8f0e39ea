"""Segments: the effect of consecutive tokens on any earlier state, so that parts of a sequence can be read separately.

A state says what all tokens so far amount to; a segment says how one stretch changes any state. Segments can be
computed on different machines, or at different times, and composed in any bracketing: ``a.then(b).after(state)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..functional.layout.positions import gather_tokens, last_valid
from ..kernels.recompute import remembers_settings
from .base import Facts, Mixer
from .state import Halo, Segment, State

_tracing = torch._C._get_tracing_state
Join = Callable[[State, State, Tensor | None], State]
"""The state after two adjacent stretches, from the state of each; earlier sums are first multiplied by exp(fade)."""
Chain = Callable[[Tensor, Tensor], Tensor]
"""The fading by two adjacent stretches, from that by each."""


def newest_halo(x: Tensor, valid: Tensor, positions: Tensor, *, size: int) -> Halo:
    """Return the last ``size`` valid tokens of x (B, S, D), S >= size, as a halo; masked tokens take no room."""
    index, there, _ = last_valid(valid, size)
    return Halo(gather_tokens(x, index), there, gather_tokens(positions, index))


class Stretch(NamedTuple):
    """The segment of every mixer here: the state after these tokens alone, and the factor that decays earlier states.

    Positions that were not given are counted from the first token of the stretch, and moved when it is composed.

    state: after the stretch alone. fade: the logarithm of the factor by which the stretch multiplies earlier sums, in
    the shape of the scale m, or what else ``join`` reads; None: 1. rate: the same for each position of distance since
    the last valid token, instead of ``fade``. length (B,): the number of tokens. live (B,): of those from the first
    valid one on. placed (B,) bool: whether positions were given. cut (B,) bool: whether a document begins inside, so
    that nothing before it counts; the state is then that of the last document. join: composes two states. chain:
    composes two ``fade``.
    """

    state: State
    fade: Tensor | None
    rate: Tensor | None
    length: Tensor
    live: Tensor
    placed: Tensor
    cut: Tensor
    join: Join
    chain: Chain

    def then(self, later: Stretch) -> Stretch:
        """Return the segment of both stretches, this one first."""
        start = later.live - later.length  # less than 0 by the padding in front
        position = getattr(self.state, "position", self.length)
        seen = torch.where(self.placed, torch.where(position > 0, position, start), self.length)
        seen = torch.where(later.cut, torch.where(self.placed, start, 0), seen)
        new = _shift_positions(later.state, torch.where(later.placed, 0, seen))
        fade = later.fade
        if "last" in new._fields:
            new = new._replace(last=torch.where((later.live == 0) & ~later.cut, self.state.last, new.last))
        if later.rate is not None:
            passed = (new.last - self.state.last).to(later.rate.dtype)
            fade = later.rate * passed.view(-1, *[1] * (later.rate.ndim - 1))
        state = self.join(self.state, new, fade)
        if "position" in new._fields:
            state = state._replace(position=new.position)
        state = pytree.tree_map(lambda whole, alone: _rows(later.cut, alone, whole), state, new)
        length = torch.where(later.cut, later.length, self.length + later.length)
        live = torch.where((self.live > 0) & ~later.cut, self.live + later.length, later.live)
        both = None if later.fade is None or self.fade is None else self.chain(self.fade, later.fade)
        placed, cut = self.placed | later.placed, self.cut | later.cut
        return Stretch(state, both, later.rate, length, live, placed, cut, self.join, self.chain)

    def after(self, state: State) -> State:
        """Return the state after the stretch, given the state before it."""
        none = torch.zeros_like(self.length)
        placed, cut = torch.ones_like(self.placed), torch.zeros_like(self.cut)
        return Stretch(state, None, self.rate, none, none, placed, cut, self.join, self.chain).then(self).state


def _rows(which: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the rows of a where ``which`` (B,) is true, and those of b elsewhere."""
    return torch.where(which.view(-1, *[1] * (a.ndim - 1)), a, b)


def _shift_positions(state: State, by: Tensor) -> State:
    """Add ``by`` (B,) to every position in a state."""
    named = {"positions": by[:, None], "last": by, "position": by}
    return state._replace(**{name: getattr(state, name) + a for name, a in named.items() if name in state._fields})


def count_stretch(
    x: Tensor,
    state: State,
    fade: Tensor | None,
    rate: Tensor | None,
    positions: Tensor | None,
    key_mask: Tensor | None,
    join: Join,
    chain: Chain = torch.add,
) -> Stretch:
    """Return the segment of x (B, L, D) whose state alone and whose fading are given; its tokens are counted."""
    length = torch.full((x.shape[0],), x.shape[1], device=x.device)
    live = length if key_mask is None else (key_mask.cumsum(1) > 0).sum(1)
    none = torch.zeros_like(length, dtype=torch.bool)
    return Stretch(state, fade, rate, length, live, none if positions is None else ~none, none, join, chain)


class Segmented(Mixer):
    """A mixer that computes segments, where it streams.

    A mixer whose state is a sum (it has ``merge_with``) needs nothing else. Others write ``join_states``, and those
    whose sums fade ``fades``.
    """

    facts = Facts(segments=True)

    @property
    def halo(self) -> int:
        """Return how many tokens before a stretch its segment and its outputs depend on one by one; 0 for sums."""
        return 0

    @property
    def only_halo(self) -> bool:
        """Return whether the last ``halo`` tokens are all that the mixer knows of the past."""
        return False

    def segment(
        self, x: Tensor, *, positions: Tensor | None = None, key_mask: Tensor | None = None, halo: Halo | None = None
    ) -> Segment:
        if not self.capabilities.segments:
            return super().segment(x)
        if x.shape[1] == 0:
            empty = self.empty_state(x.shape[0], device=x.device, dtype=x.dtype)
            fades = self.fades(x, torch.zeros_like(x[..., 0], dtype=torch.bool))
            return count_stretch(x, empty, *fades, None, None, self.join_states, self.chain_fades)
        return self._enter(self._segment, halo, x, positions, key_mask)

    @remembers_settings
    def _segment(self, x: Tensor, halo: Halo | None, positions: Tensor | None, key_mask: Tensor | None) -> Segment:
        """Check the inputs of ``segment`` and compute it."""
        self._check_chunk(x, positions, key_mask)
        if _tracing() is not None:
            x = self._hold_chunk(x)
        state = self.empty_state(x.shape[0], device=x.device, dtype=x.dtype)
        index = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        at, first = index if positions is None else positions, 0
        if halo is not None and self.halo and not self.only_halo:
            if positions is None:  # so that no token of the halo is below 0
                first = self.halo + 1
                at, near = at + first, halo.positions + first
                halo = Halo(halo.x, halo.valid & (near >= 0), near.clamp_min(0))
            state = self.state_from_halo(halo, state)
        state, fade, rate = self.measure_stretch(x, state, at, key_mask)
        state = _shift_positions(state, torch.full_like(at[:, 0], -first)) if first else state
        return count_stretch(x, state, fade, rate, positions, key_mask, self.join_states, self.chain_fades)

    def measure_stretch(
        self, x: Tensor, empty: State, positions: Tensor, key_mask: Tensor | None
    ) -> tuple[State, Tensor | None, Tensor | None]:
        """Return ``state_of`` and ``fades``; a mixer for which both are one computation overrides this instead."""
        valid = torch.ones_like(positions, dtype=torch.bool) if key_mask is None else key_mask
        return self.state_of(x, empty, positions, key_mask), *self.fades(x, valid)

    def state_of(self, x: Tensor, empty: State, positions: Tensor, key_mask: Tensor | None) -> State:
        """Return the state after x (B, L, D), from an empty one or from that of ``state_from_halo``."""
        if hasattr(empty, "merge_with") and self.facts.context:
            return self.context_state(x, key_mask)
        return self.mix_chunk(x, empty, positions=positions, key_mask=key_mask)[1]

    def state_from_halo(self, halo: Halo, empty: State) -> State:
        """Return a state with empty sums that holds these tokens one by one."""
        return empty

    def fades(self, x: Tensor, valid: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return ``fade`` and ``rate`` of ``Stretch``: the effect of x on earlier sums."""
        return None, None

    def chain_fades(self, earlier: Tensor, later: Tensor) -> Tensor:
        """Return the ``fade`` of two adjacent stretches, from that of each."""
        return earlier + later

    def join_states(self, earlier: State, later: State, fade: Tensor | None) -> State:
        """Return the state after two adjacent stretches; positions of the later one count on from the earlier one."""
        return earlier.merge_with(later)
