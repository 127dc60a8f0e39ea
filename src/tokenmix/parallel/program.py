"""The program by which one rank mixes its share of a sequence: a generator that yields the exchanges it needs.

The program is the same whoever runs it: virtual ranks in one process, or processes. It knows two exchanges only.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ..errors import MixerError
from ..mixers import Mixer
from ..mixers.key_blocks import KeyBlocks
from ..mixers.segments import Segmented, Stretch, count_stretch, newest_halo
from ..mixers.state import Halo, Segment, State, chunk_positions

GATHER_LIMIT = 64 << 20
"""Most bytes of all segments together that every rank gathers at once; larger ones are scanned in steps."""
S = TypeVar("S", bound=Segment)
Scan = Literal["gather", "steps"]


class Gather(NamedTuple):
    """Every rank gives a tree of tensors and receives those of all ranks, as a list."""

    tree: object


class Shift(NamedTuple):
    """Rank r gives a tree of tensors and receives that of rank r - by, or None if there is none."""

    tree: object
    by: int


Program = Generator[Gather | Shift, Any, Any]


class Share(NamedTuple):
    """The consecutive tokens of one rank, of which there may be none.

    x (B, L, D); key_mask (B, L) bool or None; positions (B, L) of the whole sequence, or None: counted. starts: the
    indices in x at which a document begins; tokens see their own document only.
    """

    x: Tensor
    key_mask: Tensor | None = None
    positions: Tensor | None = None
    starts: tuple[int, ...] = ()

    def part(self, start: int, stop: int) -> Share:
        """Return the tokens from ``start`` to ``stop``, which belong to one document."""
        return Share(*(None if a is None else a[:, start:stop] for a in self[:3]))  # type: ignore[arg-type]  # x is never None


class _Position(NamedTuple):
    """A state that only counts tokens."""

    position: Tensor


def tree_bytes(tree: object) -> int:
    """Return the bytes of all tensors in a tree."""
    return sum(a.numel() * a.element_size() for a in pytree.tree_leaves(tree) if isinstance(a, Tensor))


def check_scan(who: str, scan: object) -> None:
    """Raise an error for an unknown name of a scan."""
    if scan not in ("gather", "steps", None):
        raise MixerError(f"{who}: scan must be 'gather', 'steps' or None, got {scan!r}.")


def check_shares(mixer: Mixer) -> None:
    """Refuse a mixer that has neither segments nor blocks of keys."""
    if not mixer.capabilities.segments and not mixer.capabilities.key_blocks:
        mixer.refuse(
            "has neither segments nor blocks of keys here, so ranks cannot share its sequences; causal mixers whose "
            "state is a sum or a window have segments, causal attention and AFT-full have blocks"
        )


def check_tokens(mixer: Mixer, x: Tensor, key_mask: Tensor | None, positions: Tensor | None) -> None:
    """Refuse masks and positions that are not one for each token; slices of them would fit."""
    shape = tuple(x.shape[:2])
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != shape):
        mixer.refuse(f"expects a bool key_mask of shape {shape}, got {key_mask.dtype} {tuple(key_mask.shape)}")
    if positions is not None and positions.shape != shape:
        mixer.refuse(f"expects positions of shape {shape}, got {tuple(positions.shape)}")


def mix_share(mixer: Mixer, share: Share, rank: int, ranks: int, *, scan: Scan | None = None) -> Program:
    """Compute the outputs (B, L, D) of one share of a sequence.

    1. The last ``mixer.halo`` tokens before the share come from the ranks on its left.
    2. The segment of the share's last document; a scan composes those of all ranks before this one.
    3. The outputs, from the state that this gives.

    A mixer that weighs every pair has blocks of keys instead: those of the share's last document go to every rank to
    the right, one rank further each time, and the sums over them merge.

    Args:
        scan: how segments are composed: every rank gathers all ("gather"), in ceil(log2 ranks) steps ("steps"), or None
            for "gather" up to ``GATHER_LIMIT`` bytes.

    Raises:
        MixerError: if the mixer has neither, or an argument does not fit.
    """
    check_shares(mixer)
    x, L = share.x, share.x.shape[1]
    check_tokens(mixer, x, share.key_mask, share.positions)
    if list(share.starts) != sorted(set(share.starts)) or not all(0 <= s < L for s in share.starts):
        mixer.refuse(f"expects starts that rise from 0 or more to below {L}, got {list(share.starts)}")
    begin = (0, *(s for s in share.starts if s > 0))
    parts = [share.part(*cut) for cut in zip(begin, (*begin[1:], L), strict=True)]
    cut, last = bool(share.starts), parts[-1]
    if isinstance(mixer, KeyBlocks) and mixer.capabilities.key_blocks:
        first = yield from _over_blocks(mixer, parts, share.starts, rank, ranks)
        return _join_outputs([*first, *_outputs(mixer, parts[len(first) :], None)]) if L else x
    assert isinstance(mixer, Segmented)
    halo = (yield from _halo(mixer.halo, last, cut, ranks)) if mixer.halo else None
    alone = halo if len(parts) == 1 and not cut else None
    state = mixer.init_state(x.shape[0], device=x.device, dtype=x.dtype)
    if halo is not None and mixer.only_halo:
        before = yield from _compose_before(_mark_cut(_count_share(last), cut), rank, ranks, scan)
        state = state if before is None else _state_after_halo(mixer, halo, before, share.positions is None)
    else:
        segment = _segment_of(mixer, last, alone)
        before = yield from _compose_before(_mark_cut(segment, cut), rank, ranks, scan)
        state = state if before is None else before.after(state)
    return _join_outputs(_outputs(mixer, parts, None if 0 in share.starts else state)) if L else x


def _join_outputs(outputs: list[Tensor]) -> Tensor:
    """Join outputs along the tokens; a single one is not copied."""
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _outputs(mixer: Mixer, parts: list[Share], state: State) -> list[Tensor]:
    """Return the outputs of documents, the first of which continues from ``state``; None: it begins here."""
    outputs = []
    for part in parts:
        if state is None:
            state = mixer.init_state(part.x.shape[0], device=part.x.device, dtype=part.x.dtype)
        outputs.append(mixer.extend(part.x, state, positions=part.positions, key_mask=part.key_mask)[0])
        state = None
    return outputs


def _over_blocks(mixer: KeyBlocks, parts: list[Share], starts: tuple[int, ...], rank: int, ranks: int) -> Program:
    """Return the outputs of the share's first part as a list, which is empty where a document begins with it."""
    first, last = parts[0], parts[-1]
    every = [_mark_cut(_count_share(last), bool(starts))]
    if ranks > 1:
        every = yield Gather(every[0])
    none, before, goes_on = torch.zeros_like(every[0].length), _compose_segments(every[:rank]), 0 not in starts
    taken = none if before is None or not goes_on else before.after(_Position(none)).position
    at = _share_positions(first, taken)
    block = mixer.key_block(first.x, at, first.key_mask)
    reading = None
    if goes_on and first.x.shape[1]:
        reading = mixer.read_blocks(first.x, at)
        reading.add(block, own=True)
    if last is not first:
        block = mixer.key_block(last.x, _share_positions(last, none), last.key_mask)
    sent = block.pad_to(max(int(each.length.max()) for each in every))
    nearest = max((r for r in range(rank) if bool(every[r].cut.any())), default=0)  # nothing before it is seen
    for by in range(1, ranks):
        received = yield Shift(sent, by)
        if reading is not None and received is not None and rank - by >= nearest:
            reading.add(received)
    return [] if reading is None else [reading.outputs(first.x)]


def _share_positions(share: Share, before: Tensor) -> Tensor:
    """Return the positions (B, L) of a share, ``before`` (B,) of which are taken by earlier tokens."""
    if not share.x.shape[1]:
        return before.new_zeros(share.x.shape[:2])
    return chunk_positions(before, share.x, share.positions, share.key_mask)[0]


def _segment_of(mixer: Mixer, share: Share, halo: Halo | None) -> Any:
    """Return the segment of a share; its activations are recomputed in the backward pass, not kept."""

    def segment(x: Tensor) -> Any:
        return mixer.segment(x, positions=share.positions, key_mask=share.key_mask, halo=halo)

    return checkpoint(segment, share.x, use_reentrant=False) if torch.is_grad_enabled() else segment(share.x)


def _mark_cut(segment: Any, cut: bool) -> Any:
    """Mark a segment before which a document begins; nothing before it counts."""
    return segment._replace(cut=torch.ones_like(segment.cut)) if cut else segment


def _compose_before(segment: Any, rank: int, ranks: int, scan: Scan | None) -> Program:
    """Compose the segments of all ranks before this one; None for rank 0."""
    if ranks == 1:
        return None
    if scan is None:
        scan = "gather" if ranks * tree_bytes(segment) <= GATHER_LIMIT else "steps"
    if scan == "gather":
        every = yield Gather(segment)
        return _compose_segments(every[:rank])
    step = 1
    while step < ranks:
        earlier = yield Shift(segment, step)
        segment = segment if earlier is None else earlier.then(segment)
        step *= 2
    return (yield Shift(segment, 1))


def _compose_segments(segments: list[S]) -> S | None:
    """Compose segments in their order; None if there are none."""
    total: S | None = None
    for other in segments:
        total = other if total is None else total.then(other)
    return total


def _halo(size: int, last: Share, cut: bool, ranks: int) -> Program:
    """Return the last ``size`` valid tokens before the share, passed on from rank to rank where shares are short."""
    x = last.x
    valid = x.new_ones(x.shape[:2], dtype=torch.bool) if last.key_mask is None else last.key_mask
    index = torch.arange(-size, x.shape[1], device=x.device).expand(x.shape[0], -1)
    nothing = Halo(x.new_zeros(x.shape[0], size, x.shape[2]), valid.new_zeros(x.shape[0], size), index[:, :size])
    if ranks == 1:
        return nothing
    counts = yield Gather(valid.sum(1).clamp_max(size) if not cut else torch.full_like(index[:, 0], size))
    own = Halo(x, valid, index[:, size:] if last.positions is None else last.positions)
    received = nothing
    for _ in range(_rounds(torch.stack(counts), size)):
        sent = newest_halo(
            *(torch.cat(pair, 1) for pair in zip(nothing if cut else received, own, strict=True)), size=size
        )
        if last.positions is None:  # counted from the first token of the next rank
            sent = sent._replace(positions=sent.positions - x.shape[1])
        got = yield Shift(sent, 1)
        received = nothing if got is None else got
    return received


def _rounds(counts: Tensor, size: int) -> int:
    """Return after how many shifts to the right every rank has the tokens that it needs; counts (P, B)."""
    sums = torch.cat([torch.zeros_like(counts[:1]), counts.cumsum(0)]).T.contiguous()  # of all ranks before each
    enough = (sums - size).clamp_min(0)
    first = torch.searchsorted(sums, enough, right=True) - 1
    ranks = torch.arange(sums.shape[1], device=sums.device)
    return int(torch.where(sums > 0, ranks - first, 0)[:, :-1].max())


def _count_share(share: Share) -> Stretch:
    """Return a segment that only counts the tokens of a share."""
    x, positions = share.x, share.positions
    length = torch.full((x.shape[0],), x.shape[1], device=x.device)
    at = length if positions is None or not x.shape[1] else positions[:, -1] + 1
    positions = positions if x.shape[1] else None
    return count_stretch(x, _Position(at), None, None, positions, share.key_mask, _take_later)


def _take_later(earlier: State, later: State, fade: Tensor | None) -> State:
    return later


def _state_after_halo(mixer: Mixer, halo: Halo, before: Stretch, counted: bool) -> State:
    """Return the state after the halo's tokens, at the position to which ``before`` counts."""
    rows = halo.x.shape[0]
    at = before.after(_Position(torch.zeros_like(before.length))).position
    positions = (halo.positions + at[:, None] if counted else halo.positions).clamp_min(0)
    empty = mixer.init_state(rows, device=halo.x.device, dtype=halo.x.dtype)
    state = mixer.extend(halo.x, empty, positions=positions, key_mask=halo.valid)[1]
    return state._replace(position=at)
