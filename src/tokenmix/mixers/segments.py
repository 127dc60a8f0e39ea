"""Segments: the effect of consecutive tokens on any earlier state, so that parts of a sequence can be read separately.

A state says what all tokens so far amount to; a segment says how one stretch changes any state. Segments can be
computed on different machines, or at different times, and composed in any bracketing: ``a.then(b).after(state)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..functional.layout.positions import gather_tokens, last_valid
from ..system.properties import named_errors
from .input_checks import InputChecks
from .state import State

Join = Callable[[State, State, Tensor | None], State]
"""The state after two adjacent stretches, from the state of each; earlier sums are first multiplied by exp(fade)."""


@runtime_checkable
class Segment(Protocol):
    """What a stretch of tokens does to whatever came before it. ``Mixer.segment`` computes it."""

    def then(self, later: Self) -> Self:
        """Return the segment of both stretches, this one first. Associative, and not commutative."""

    def after(self, state: State) -> State:
        """Return the state after the stretch, given the state before it."""


class Halo(NamedTuple):
    """The last tokens before a stretch, as many as ``mixer.halo``.

    x (B, R, D), before any projection; valid (B, R) bool, False = no token, or a masked one; positions (B, R): as
    given, or else the index of each token counted from the first of the stretch, so below 0.
    """

    x: Tensor
    valid: Tensor
    positions: Tensor


def newest_halo(x: Tensor, valid: Tensor, positions: Tensor, *, size: int) -> Halo:
    """Return the last ``size`` valid tokens of x (B, S, D), S >= size, as a halo; masked tokens take no room."""
    index, there, _ = last_valid(valid, size)
    return Halo(gather_tokens(x, index), there, gather_tokens(positions, index))


class Stretch(NamedTuple):
    """The segment of every mixer here: the state after these tokens alone, and the factor that decays earlier states.

    Positions that were not given are counted from the first token of the stretch, and moved when it is composed.

    state: after the stretch alone. fade: the logarithm of the factor by which the stretch multiplies earlier sums, in
    the shape of the scale m; None: 1. rate: the same for each position of distance since the last valid token, instead
    of ``fade``. length (B,): the number of tokens. live (B,): of those from the first valid one on. placed (B,) bool:
    whether positions were given. cut (B,) bool: whether a document begins inside, so that nothing before it counts; the
    state is then that of the last document. join: composes two states.
    """

    state: State
    fade: Tensor | None
    rate: Tensor | None
    length: Tensor
    live: Tensor
    placed: Tensor
    cut: Tensor
    join: Join

    def then(self, later: Stretch) -> Stretch:
        """Return the segment of both stretches, this one first."""
        start = later.live - later.length  # less than 0 by the padding in front
        position = getattr(self.state, "position", self.length)
        seen = torch.where(self.placed, torch.where(position > 0, position, start), self.length)
        seen = torch.where(later.cut, torch.where(self.placed, start, 0), seen)
        new = _moved(later.state, torch.where(later.placed, 0, seen))
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
        both = None if later.fade is None or self.fade is None else self.fade + later.fade
        placed, cut = self.placed | later.placed, self.cut | later.cut
        return Stretch(state, both, later.rate, length, live, placed, cut, self.join)

    def after(self, state: State) -> State:
        """Return the state after the stretch, given the state before it."""
        none = torch.zeros_like(self.length)
        fade = None if self.fade is None else torch.zeros_like(self.fade)
        placed, cut = torch.ones_like(self.placed), torch.zeros_like(self.cut)
        return Stretch(state, fade, self.rate, none, none, placed, cut, self.join).then(self).state


def _rows(which: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the rows of a where ``which`` (B,) is true, and those of b elsewhere."""
    return torch.where(which.view(-1, *[1] * (a.ndim - 1)), a, b)


def _moved(state: State, by: Tensor) -> State:
    """Add ``by`` (B,) to every position in a state."""
    named = {"positions": by[:, None], "last": by, "position": by}
    return state._replace(**{name: getattr(state, name) + a for name, a in named.items() if name in state._fields})


class Ask(NamedTuple):
    """Passed to ``forward`` as its state: the segment of x is wanted."""

    halo: Halo | None


@named_errors
class Segmented(InputChecks):
    """The part of ``Mixer`` that computes segments; ``supports_segments`` tells whether a mixer has them.

    A mixer whose state is a sum (it has ``merge_with``) needs nothing else. Others write ``join_states``, and
    those whose sums fade ``fades``.
    """

    capabilities: Any
    empty_state: Callable[..., State]
    mix_chunk: Callable[..., tuple[Tensor, State]]
    context_state: Callable[..., State]

    @property
    def has_segments(self) -> bool:
        """Return whether this instance computes segments."""
        return self.supports_segments and self.capabilities.streaming

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
        """Return the segment of x (B, L, D), L >= 0: its effect on any earlier state.

        For any cut, ``segment(x ++ y)`` is ``segment(x).then(segment(y))``, and ``segment(x).after(state)`` is
        ``extend(x, state)[1]``: equal as states, whose scales may differ.

        Args:
            positions, key_mask: as in ``extend``. Positions that are not given need not be known: they are counted on
                from what comes before.
            halo: the last tokens before the stretch, for a mixer whose sums are of convolved tokens (``aft_forget``);
                None: there are none. Other mixers do not read it.

        Raises:
            MixerError: if the mixer has no segments.
        """
        if not self.has_segments:
            self.refuse(
                "has no segments here; causal mixers whose state is a sum or a window have them, such as aft_simple, "
                "hydra, linear and aft_local"
            )
        if x.shape[1] == 0:
            empty = self.empty_state(x.shape[0], device=x.device, dtype=x.dtype)
            return self.stretch_of(x, empty, *self.fades(x, torch.zeros_like(x[..., 0], dtype=torch.bool)), None, None)
        return self(x, positions=positions, key_mask=key_mask, state=Ask(halo))

    def _segment(self, x: Tensor, positions: Tensor | None, key_mask: Tensor | None, halo: Halo | None) -> Segment:
        """Compute ``segment``; the inputs have been checked."""
        state = self.empty_state(x.shape[0], device=x.device, dtype=x.dtype)
        index = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        at, first = index if positions is None else positions, 0
        if halo is not None and self.halo and not self.only_halo:
            if positions is None:  # so that no token of the halo is below 0
                first = self.halo + 1
                at, near = at + first, halo.positions + first
                halo = Halo(halo.x, halo.valid & (near >= 0), near.clamp_min(0))
            state = self.behind(halo, state)
        state = self.state_of(x, state, at, key_mask)
        state = _moved(state, torch.full_like(at[:, 0], -first)) if first else state
        valid = torch.ones_like(index, dtype=torch.bool) if key_mask is None else key_mask
        return self.stretch_of(x, state, *self.fades(x, valid), positions, key_mask)

    def stretch_of(
        self,
        x: Tensor,
        state: State,
        fade: Tensor | None,
        rate: Tensor | None,
        positions: Tensor | None,
        key_mask: Tensor | None,
    ) -> Stretch:
        """Return the segment with this state of x, as ``segment`` does."""
        length = torch.full((x.shape[0],), x.shape[1], device=x.device)
        live = length if key_mask is None else (key_mask.cumsum(1) > 0).sum(1)
        none = torch.zeros_like(length, dtype=torch.bool)
        return Stretch(state, fade, rate, length, live, none if positions is None else ~none, none, self.join_states)

    def state_of(self, x: Tensor, empty: State, positions: Tensor, key_mask: Tensor | None) -> State:
        """Return the state after x (B, L, D), from an empty one or from that of ``behind``."""
        if hasattr(empty, "merge_with") and self.supports_context:
            return self.context_state(x, key_mask)
        return self.mix_chunk(x, empty, positions=positions, key_mask=key_mask)[1]

    def behind(self, halo: Halo, empty: State) -> State:
        """Return a state with empty sums that holds these tokens one by one."""
        return empty

    def fades(self, x: Tensor, valid: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return ``fade`` and ``rate`` of ``Stretch``: the effect of x on earlier sums."""
        return None, None

    def join_states(self, earlier: State, later: State, fade: Tensor | None) -> State:
        """Return the state after two adjacent stretches; positions of the later one count on from the earlier one."""
        return earlier.merge_with(later)
