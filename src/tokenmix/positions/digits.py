"""Positions of digits within their number: Abacus embeddings, and positions coupled across the numbers of a sum.

Both read tokens instead of positions, so that digits of equal significance have the same vector wherever they stand.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from .checks import check_init_std, is_whole


def digit_places(digit: Tensor, key_mask: Tensor | None, run: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of each digit in its number: 1, 2, 3 ..., and 0 for other tokens.

    Args:
        digit: (B, T) bool, where a digit stands.
        key_mask: (B, T) bool; tokens where it is False neither count nor end a run. None: all count.
        run: (B,) int64, length of the run of digits that the row ended in before these tokens; 0: none.

    Returns:
        The places (B, T), int64, and the length (B,) of the run that the rows end in now.
    """
    valid = torch.ones_like(digit) if key_mask is None else key_mask
    other, counted = valid & ~digit, valid.long().cumsum(1)
    # At index n, the count of tokens up to the n-th that is no digit (ONNX has no running maximum); the last is unused.
    nth = other.long().cumsum(1)
    ends = torch.cat([-run[:, None], torch.zeros_like(counted), torch.zeros_like(run)[:, None]], 1)
    ends = ends.scatter(1, torch.where(other, nth, digit.shape[1] + 1), counted)
    length = counted - ends.gather(1, nth)
    run = torch.cat([run[:, None], length], 1)[:, -1]
    return torch.where(valid & digit, length, 0), run


class DigitPositions(nn.Module):
    """A learned table (max_len, dim), looked up by the place of a digit in its number. A base class.

    Args:
        dim: features per position.
        max_len: rows of the table, at least 2.
        digits: first and last token that is a digit. Default: the bytes "0" to "9".
        max_offset: number of offsets K >= 1. In training each call adds one, drawn evenly from 0 .. K - 1, to the
            places of the whole batch, so that rows are trained beyond the longest number of the training data; in
            evaluation it is 0. Default 100, as in McLeish et al.
        init_std: standard deviation of the initial table.

    Raises:
        MixerError: for options out of range.
    """

    reads_tokens: ClassVar[bool] = True
    separators_move: ClassVar[bool]

    def __init__(
        self,
        dim: int,
        *,
        max_len: int = 1024,
        digits: tuple[int, int] = (48, 57),
        max_offset: int = 100,
        init_std: float = 0.02,
    ):
        super().__init__()
        name = type(self).__name__
        check_init_std(name, init_std)
        ends = digits if isinstance(digits, (tuple, list)) else ()
        if len(ends) != 2 or not all(is_whole(d, 0) for d in ends) or ends[0] > ends[1]:
            raise MixerError(f"{name}: digits must be the first and the last token that is one, got {digits!r}.")
        if not is_whole(max_len, 2) or not is_whole(max_offset, 1) or max_offset > max_len - 1:
            raise MixerError(
                f"{name}: needs max_len >= 2 and 1 <= max_offset < max_len, got {max_len!r} and {max_offset!r}."
            )
        self.rows, self.digits, self.max_offset, self.init_std = max_len, tuple(digits), max_offset, init_std
        self.weight = nn.Parameter(torch.empty(max_len, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table again."""
        nn.init.normal_(self.weight, std=self.init_std)

    def forward(self, tokens: Tensor, key_mask: Tensor | None, run: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors of tokens (B, T) -> (B, T, dim), and the run of digits (B,) that each row ends in.

        Args:
            key_mask: (B, T) bool, False at padding, which neither counts nor ends a number; None: there is none.
            run: (B,), the run that each row ended in before; see ``digit_places``.

        Raises:
            MixerError: on a CPU and outside of compilation, for a number with more digits than the table has rows for.
        """
        digit = (tokens >= self.digits[0]) & (tokens <= self.digits[1])
        places, run = digit_places(digit, key_mask, run)
        if self.training and self.max_offset > 1:
            offset = torch.randint(self.max_offset, (), device=tokens.device)
            places = places + (offset if self.separators_move else torch.where(places > 0, offset, 0))
        if (
            places.device.type == "cpu"
            and places.numel()
            and not torch.compiler.is_compiling()
            and not torch.compiler.is_exporting()
            and int(places.max()) >= self.rows
        ):
            offsets = f" and offsets of up to {self.max_offset - 1}" if self.training else ""
            raise MixerError(
                f"{type(self).__name__}: max_len={self.rows} has rows for places 0 to {self.rows - 1}, got "
                + f"{int(places.max())} (digits of a number{offsets}); build with a larger max_len."
            )
        return F.embedding(places, self.weight), run


class AbacusPositions(DigitPositions):
    """Abacus embeddings (McLeish et al. 2024, arXiv 2405.17399, Sec. 3): digit i of a number gets row i + offset.

    Digits count from 1 at the start of each number; what is no digit gets row 0, in training too, which is learned like
    the others. The paper draws offsets 1 .. k where the first digit has row 1 + offset - 1; here they are 0 .. k - 1,
    the same rows. See ``DigitPositions`` for the options.
    """

    separators_move = False


class CoupledPositions(DigitPositions):
    """Coupled positions (Cho et al. 2024, arXiv 2405.20671): digits of equal significance share one id.

    Digit i of each number gets row i + offset and what is no digit row 0 + offset, so that "=" stands right before the
    first digit of the result. Cho et al. write operands with the most significant digit first and count their ids down;
    here all numbers begin with the least significant digit, which gives the same couples. They pad operands with zeros
    to one length (``data.pad``), draw the offset from what the longest training row leaves free, and add nothing else
    that knows positions. See ``DigitPositions`` for the options.
    """

    separators_move = True
