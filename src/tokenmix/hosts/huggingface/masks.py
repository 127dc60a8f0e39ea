"""Translate transformers' attention_mask and position_ids to the mask and the positions of a chunk of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import MixerError
from ...mixers.base import chunk_positions


class Place(NamedTuple):
    """Say how far each row has come: (B,) at the end of some tokens, (B, L) at each token of a chunk.

    Args:
        last: position of the last valid token; -1: there was none.
        counted: the same, if positions that restart after padding are counted on.
        pads: number of masked tokens since.
    """

    last: Tensor
    counted: Tensor
    pads: Tensor

    def next_position(self) -> Tensor:
        """Return the usual position of each row's next token; 0 before the first valid one."""
        return torch.where(self.last < 0, 0, self.last + self.pads + 1)

    def at_token(self, index: int) -> Place:
        """Return the place (B,) at one token of a chunk."""
        return Place(*(a[:, index] for a in self))

    def of_rows(self, index: Tensor) -> Place:
        """Return the places of some rows of the batch."""
        return Place(*(a.index_select(0, index.to(a.device)) for a in self))


class ChunkPositions(NamedTuple):
    """Hold the mask and positions of a chunk (B, L).

    Args:
        key_mask: what its mixers get; None: all tokens are valid.
        positions: what mixers get that turn queries and keys by them; None: the usual ones.
        counted: what other mixers get; None: the usual ones.
        at: positions of its tokens.
        place: how far each row has come at each token.
    """

    key_mask: Tensor | None
    positions: Tensor | None
    counted: Tensor | None
    at: Tensor
    place: Place


def chunk_mask(attention_mask: Tensor | None, x: Tensor, seen: int, who: str) -> Tensor | None:
    """Return the last L columns of attention_mask (B, seen + L), 1 = valid, as booleans; None if all are valid.

    Raises:
        MixerError: for another shape, such as 4-D masks.
    """
    if attention_mask is None:
        return None
    rows, length = x.shape[:2]
    if attention_mask.shape != (rows, seen + length):
        wanted = f"{(rows, seen + length)}" + (f", the {seen} tokens in the cache included" if seen else "")
        got = tuple(attention_mask.shape)
        raise MixerError(f"{who}: expects an attention_mask of shape {wanted}, 1 = valid, got {got}.")
    mask = attention_mask[:, seen:].to(x.device) != 0
    return None if not torch.compiler.is_compiling() and bool(mask.all()) else mask


def place_tokens(
    x: Tensor, start: Place | None, key_mask: Tensor | None, position_ids: Tensor | None, who: str
) -> ChunkPositions:
    """Return the positions of a chunk's tokens; ``start``: how far the rows had come before; None: they begin here.

    Without position_ids a token's position is its index minus that of the first valid token of its row. Positions that
    restart after padding are what generate() gives the tokens after a prompt with padding on the right. As in Llama,
    they are the angles by which queries and keys turn and the vectors that are added, while windows, decays and
    distances go by the order of the row.
    """
    begins = start is None
    if start is None:
        none = torch.full(x.shape[:1], -1, dtype=torch.long, device=x.device)
        start = Place(none, none, torch.zeros_like(none))
    usual = chunk_positions(start.next_position(), x, None, key_mask)[0]
    given = usual if position_ids is None else position_ids.to(x.device).expand(x.shape[0], -1)
    if given.shape != x.shape[:2]:
        wanted, got = tuple(x.shape[:2]), tuple(given.shape)
        raise MixerError(f"{who}: expects position_ids of shape {wanted}, got {got}.")
    compiling = torch.compiler.is_compiling()
    # mixers may have counted on from the positions of padding, behind a row's tokens or before the first of them
    begun = begins | (start.last >= 0)
    if position_ids is None if compiling else bool(((given == usual) & (begun & (start.pads == 0))[:, None]).all()):
        return ChunkPositions(key_mask, None, None, usual, _usual_place(start, usual, key_mask))
    if not compiling:
        _refuse_packed(given, key_mask, who)
    valid = torch.ones_like(given, dtype=torch.bool) if key_mask is None else key_mask
    place = _given_place(start, given, valid)
    # those of masked tokens, which hosts fill with anything, say at most what such a token itself gives
    at = torch.where(valid | (given >= 0) & (given <= usual), given, usual)
    counted = torch.where(valid, place.counted, (place.counted + place.pads).clamp_min(0))
    counted_on = chunk_positions(start._replace(last=start.counted).next_position(), x, None, key_mask)[0]
    plain = not compiling and bool(begun.all()) and torch.equal(counted, counted_on)
    return ChunkPositions(key_mask, at, None if plain else counted, at, place)


def _usual_place(start: Place, usual: Tensor, key_mask: Tensor | None) -> Place:
    """Return the place at each token of a chunk with the usual positions."""
    last = usual
    if key_mask is not None:
        last = torch.where(key_mask, usual, -1).cummax(1).values.maximum(start.last[:, None])
    pads = torch.where(last < 0, 0, usual - last)
    return Place(last, last + (start.counted - start.last)[:, None], pads)


def _given_place(start: Place, given: Tensor, valid: Tensor) -> Place:
    """Return the place at each token of a chunk with given positions."""
    steps = torch.arange(given.shape[1], device=given.device).expand_as(given)
    found = torch.where(valid, steps, -1).cummax(1).values  # index of the last valid token; -1: it came before
    last = torch.cat([start.last[:, None], given], 1).gather(1, found + 1)
    pads = torch.where(found < 0, start.pads[:, None] + steps + 1, steps - found)
    pads = torch.where(last < 0, 0, pads)
    last_before, pads_before = (
        torch.cat([a[:, None], b[:, :-1]], 1) for a, b in ((start.last, last), (start.pads, pads))
    )
    step = given - last_before
    restarts = (step <= 0) & (pads_before > 0) & (given >= 0)
    step = torch.where(restarts, pads_before + 1, step)
    counted = start.counted[:, None] + torch.where(valid, step, 0).cumsum(1)
    return Place(last, counted, pads)


def _refuse_packed(given: Tensor, key_mask: Tensor | None, who: str) -> None:
    falls = given[:, 1:] <= given[:, :-1]
    if key_mask is not None:
        falls = falls & key_mask[:, 1:] & key_mask[:, :-1]
    if bool(falls.any()):
        packed = "several sequences packed into one row would be mixed, give each a row of its own"
        raise MixerError(f"{who}: position_ids must rise along each row; {packed}.")
