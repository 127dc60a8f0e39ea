"""transformers' attention_mask and position_ids as the mask and the positions of a chunk of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import MixerError
from ...mixers.base import chunk_positions, token_positions


class ChunkPositions(NamedTuple):
    """Of a chunk (B, L): the mask its mixers get, the positions they get where those are not the usual ones, where its tokens stand, and what follows (B,)."""

    key_mask: Tensor | None
    positions: Tensor | None
    at: Tensor
    after: Tensor | None


def chunk_mask(attention_mask: Tensor | None, x: Tensor, seen: int, who: str) -> Tensor | None:
    """The last L columns of attention_mask (B, seen + L), 1 = a real token, as booleans; None where all are real.

    Raises:
        MixerError: for another shape, as 4-D masks have, and for a row with padding on both sides, whose positions would have no start.
    """
    if attention_mask is None:
        return None
    rows, length = x.shape[:2]
    if attention_mask.shape != (rows, seen + length):
        wanted = f"{(rows, seen + length)}" + (f", the {seen} tokens in the cache included" if seen else "")
        raise MixerError(f"{who}: expects an attention_mask of shape {wanted}, 1 = a real token, got {tuple(attention_mask.shape)}.")
    mask = attention_mask.to(x.device) != 0
    if torch.compiler.is_compiling():
        return mask[:, seen:]
    if length > 1 or not seen:
        _refuse_both_sides(mask, who)
    return None if bool(mask[:, seen:].all()) else mask[:, seen:]


def _refuse_both_sides(mask: Tensor, who: str) -> None:
    both = ~mask[:, 0] & ~mask[:, -1] & mask.any(1)
    if bool(both.any()):
        row = int(both.nonzero()[0, 0])
        raise MixerError(f"{who}: row {row} of attention_mask has padding on both sides; pad on the left, as generate() needs, or on the right.")


def place_tokens(x: Tensor, start: Tensor | None, key_mask: Tensor | None, position_ids: Tensor | None, who: str) -> ChunkPositions:
    """Where the tokens of a chunk stand; ``start`` (B,): where the rows of a cache stand, None without one.

    Without position_ids a token's position is its index minus that of the first real token of its row.
    """
    if start is None:
        at, after = token_positions(x, key_mask), None
    else:
        at, after = chunk_positions(start, x, None, key_mask)
    if position_ids is None:
        return ChunkPositions(key_mask, None, at, after)
    given = position_ids.to(x.device).expand(x.shape[0], -1)
    if given.shape != x.shape[:2]:
        raise MixerError(f"{who}: expects position_ids of shape {tuple(x.shape[:2])}, got {tuple(position_ids.shape)}.")
    given = given if key_mask is None else torch.where(key_mask, given, at)
    if not torch.compiler.is_compiling():
        if torch.equal(given, at):  # what generate() passes: then mixers may use what they know of consecutive positions
            return ChunkPositions(key_mask, None, at, after)
        _refuse_packed(given, key_mask, who)
    return ChunkPositions(key_mask, given, given, None if start is None else given[:, -1] + 1)


def _refuse_packed(given: Tensor, key_mask: Tensor | None, who: str) -> None:
    falls = given[:, 1:] <= given[:, :-1]
    if key_mask is not None:
        falls = falls & key_mask[:, 1:] & key_mask[:, :-1]
    if bool(falls.any()):
        raise MixerError(f"{who}: position_ids must rise along each row; several sequences packed into one row would be mixed, give each a row of its own.")
