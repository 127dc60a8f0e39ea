"""Parts of mixers of different families: projections, checked positions, long chunks, the largest logit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...functional import aft_chunk as chunk
from ...functional.layout.heads import by_head
from ...functional.layout.masks import valid_mask as valid_mask
from ...functional.layout.positions import first_true
from ...functional.short_conv import in_a_row
from ...kernels.backend import is_intercepted
from ..base import Mixer, State, chunk_positions
from .options import check_heads
from .weights_on_call import ReadLinear

NOWHERE = -(1 << 62)  # below every position


def add_projections(mixer: Mixer, *, heads: int, qkv_bias: bool, out_bias: bool, read: tuple[str, ...] = ()) -> None:
    """Add q_proj, k_proj, v_proj and out_proj, all dim x dim, for heads of equal width.

    Args:
        read: names of the projections whose weights the mixer also reads.
    """
    check_heads(mixer, heads)
    for name in ("q_proj", "k_proj", "v_proj"):
        mixer.register_module(name, (ReadLinear if name in read else nn.Linear)(mixer.dim, mixer.dim, bias=qkv_bias))
    mixer.register_module("out_proj", nn.Linear(mixer.dim, mixer.dim, bias=out_bias))


def check_positions(
    mixer: Mixer,
    positions: Tensor | None,
    key_mask: Tensor | None,
    *,
    rising: bool = False,
    past: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Refuse explicit positions (B, T) that the mixer would misread.

    Positions of valid tokens must be 0 or above. Values are read outside of compilation and export only.

    Args:
        rising: whether positions must rise along each row.
        past: (valid, positions) of the tokens of a stream so far, which the new positions must exceed.
    """
    if positions is None or positions.numel() == 0 or torch.compiler.is_compiling():
        return
    valid = valid_mask(positions, key_mask)
    wrong, L = valid & (positions < 0), positions.shape[1]
    if rising:
        all_valid, all_positions = (
            (valid, positions.long())
            if past is None
            else (torch.cat(pair, 1) for pair in zip(past, (valid, positions.long()), strict=True))
        )
        before = torch.where(all_valid, all_positions, NOWHERE).cummax(1).values
        wrong = wrong | valid & (all_positions[:, -L:] <= F.pad(before, (1, -1), value=NOWHERE)[:, -L:])
    if bool(wrong.any()):
        row = int(wrong.any(1).nonzero()[0])
        must = "be 0 or above" + " and rise along each row" * rising
        got = ", ".join(str(int(n)) for n in positions[row, :9]) + " .." * (L > 9)
        mixer.refuse(f"positions of valid tokens must {must}, got {got} in row {row}")


def check_rising_after(mixer: Mixer, positions: Tensor | None, key_mask: Tensor | None, last: Tensor) -> None:
    """Refuse explicit positions of a chunk that do not rise along each row, or start before ``last`` (B,).

    For streams that keep the position of their last valid token alone.
    """
    past = torch.ones_like(last, dtype=torch.bool)[:, None], last[:, None] - 1
    check_positions(mixer, positions, key_mask, rising=True, past=past)


def ascend(positions: Tensor, key_mask: Tensor | None) -> bool:
    """Return whether the positions (B, T) of valid tokens rise along each row and are 0 or above."""
    valid = valid_mask(positions, key_mask)
    before = F.pad(torch.where(valid, positions.long(), -1).cummax(1).values, (1, -1), value=-1)
    return not bool((valid & (positions <= before)).any())


def has_holes(past: Tensor, key_mask: Tensor | None) -> bool:
    """Return whether a masked token follows a valid one in a ring (B, R) and the chunk (B, L) after it.

    Where values cannot be read, return True.
    """
    if key_mask is None:
        return False
    if torch.compiler.is_compiling() or key_mask.is_meta or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    valid = torch.cat([past, key_mask], 1)
    return bool((valid[:, :-1] & ~valid[:, 1:]).any())


def row_starts(key_mask: Tensor | None, positions: Tensor | None) -> Tensor | None:
    """Return the index (B,) of position 0 of each row, its first True key.

    None where the positions are the indices or are given.
    """
    return None if key_mask is None or positions is not None else first_true(key_mask)[:, 0]


def in_pieces(
    mix_piece: Callable[..., tuple[Tensor, State]], x: Tensor, state: State, *beside: Tensor | None
) -> tuple[Tensor, State]:
    """Mix a long chunk in pieces, which bounds the memory of its weights.

    Args:
        beside: tensors that are cut along time like x, or None.
    """
    if x.shape[1] <= chunk.PIECE:
        return mix_piece(x, state, *beside)
    outputs, xs = [], x.split(chunk.PIECE, 1)
    for x_piece, *pieces in zip(
        xs, *([None] * len(xs) if a is None else a.split(chunk.PIECE, 1) for a in beside), strict=True
    ):
        y, state = mix_piece(x_piece, state, *pieces)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def ring_chunk(
    mixer: Any,
    x: Tensor,
    state: State,
    *,
    positions: Tensor | None,
    key_mask: Tensor | None,
    ring: bool = True,
    pairs: bool = True,
) -> tuple[Tensor, State]:
    """Mix a chunk of a mixer whose state holds tokens, and project the outputs.

    Calls ``_mix_piece(x, state, positions, valid)`` for each piece.

    Args:
        ring: whether the state is a ring of the last tokens; otherwise it holds all tokens.
        pairs: whether tokens in a row are weighed pair by pair. If not, they are one piece where the graph keeps what
            is computed, as pieces would save no memory.
    """
    if ring and positions is not None:
        check_positions(mixer, positions, key_mask, rising=True, past=(state.valid, state.positions))
    query_positions, next_position = chunk_positions(state.position, x, positions, key_mask)
    holes = ring and key_mask is not None and has_holes(state.valid, key_mask)
    beside = query_positions, valid_mask(x, key_mask)
    mix_piece = partial(mixer._mix_piece, holes=True) if holes else mixer._mix_piece
    whole = torch.is_grad_enabled() and not (pairs or holes or is_intercepted())
    if whole and in_a_row(torch.cat([state.valid, beside[1]], 1), torch.cat([state.positions, beside[0]], 1)):
        y, state = mix_piece(x, state, *beside)
    else:
        y, state = in_pieces(mix_piece, x, state, *beside)
    return mixer.out_proj(y), state._replace(position=next_position)


def largest_dot(q: Tensor, k: Tensor, heads: int, kv_heads: int | None = None, scale: float | None = None) -> float:
    """Return the largest |scale q_t . k_s| of any head; the default scale is 1 / sqrt(width)."""
    kv_heads = kv_heads or heads
    qh, kh = (by_head(a.detach(), n) for a, n in ((q, heads), (k, kv_heads)))
    scale = scale or qh.shape[-1] ** -0.5
    return float((qh @ kh.repeat_interleave(heads // kv_heads, 1).transpose(-1, -2)).abs().max()) * scale


def largest_added(options: dict[str, Any], reach: int) -> float:
    """Return the largest |number| that a form's option ``added`` adds to logits, up to a distance of ``reach``."""
    added = options.get("added")
    if added is None:
        return 0.0
    found = added if isinstance(added, Tensor) else added(torch.arange(-reach, reach + 1))
    return float(found.detach().abs().max())
