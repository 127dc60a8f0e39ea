"""Translate transformers' attention_mask and position_ids to the mask and the positions of a chunk of tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import MixerError
from ...mixers.base import chunk_positions, token_positions


class ChunkPositions(NamedTuple):
    """Hold the mask and positions of a chunk (B, L).

    Args:
        key_mask: what its mixers get; None: all tokens are valid.
        positions: what its mixers get; None: the usual ones.
        at: positions of its tokens.
        after: positions of the next tokens (B,); None without a cache.
    """

    key_mask: Tensor | None
    positions: Tensor | None
    at: Tensor
    after: Tensor | None


def chunk_mask(attention_mask: Tensor | None, x: Tensor, seen: int, who: str) -> Tensor | None:
    """Return the last L columns of attention_mask (B, seen + L), 1 = valid, as booleans; None if all are valid.

    Raises:
        MixerError: for another shape, such as 4-D masks, and for a row with padding on both sides, whose positions
            would have no start.
    """
    if attention_mask is None:
        return None
    rows, length = x.shape[:2]
    if attention_mask.shape != (rows, seen + length):
        wanted = f"{(rows, seen + length)}" + (f", the {seen} tokens in the cache included" if seen else "")
        got = tuple(attention_mask.shape)
        raise MixerError(f"{who}: expects an attention_mask of shape {wanted}, 1 = valid, got {got}.")
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
        both_sides = f"row {row} of attention_mask has padding on both sides"
        raise MixerError(f"{who}: {both_sides}; pad on the left, as generate() needs, or on the right.")


def place_tokens(
    x: Tensor, start: Tensor | None, key_mask: Tensor | None, position_ids: Tensor | None, who: str
) -> ChunkPositions:
    """Return the positions of a chunk's tokens; ``start`` (B,): those of the next tokens of a cache, None without one.

    Without position_ids a token's position is its index minus that of the first valid token of its row.
    """
    if start is None:
        at, after = token_positions(x, key_mask), None
    else:
        at, after = chunk_positions(start, x, None, key_mask)
    if position_ids is None:
        return ChunkPositions(key_mask, None, at, after)
    given = position_ids.to(x.device).expand(x.shape[0], -1)
    if given.shape != x.shape[:2]:
        wanted, got = tuple(x.shape[:2]), tuple(position_ids.shape)
        raise MixerError(f"{who}: expects position_ids of shape {wanted}, got {got}.")
    given = given if key_mask is None else torch.where(key_mask, given, at)
    if not torch.compiler.is_compiling():
        if torch.equal(given, at):  # as generate() passes; mixers may then rely on consecutive positions
            return ChunkPositions(key_mask, None, at, after)
        _refuse_packed(given, key_mask, who)
    return ChunkPositions(key_mask, given, given, None if start is None else given[:, -1] + 1)


def _refuse_packed(given: Tensor, key_mask: Tensor | None, who: str) -> None:
    falls = given[:, 1:] <= given[:, :-1]
    if key_mask is not None:
        falls = falls & key_mask[:, 1:] & key_mask[:, :-1]
    if bool(falls.any()):
        packed = "several sequences packed into one row would be mixed, give each a row of its own"
        raise MixerError(f"{who}: position_ids must rise along each row; {packed}.")
