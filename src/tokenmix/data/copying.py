"""Copying: a string of random symbols, a separator, and the string again, which the model must predict.

Recurrent models are held to this task since Hochreiter and Schmidhuber (1997); Jelassi et al. 2024 (arXiv 2402.01032)
show that a state of constant size bounds the length of the string, and that two layers of attention copy strings of any
length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MixerError
from .recall import IGNORED


def copy_batch(batch: int, *, seq_len: int, vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a batch: tokens (B, T) and targets (B, T), both int64.

    A row is s1 .. sn 0 s1 .. s(n-1) with n = T / 2: symbols drawn evenly from 1 .. vocab - 1, token 0 as the separator,
    and the symbols once more. The targets of the second half, from the separator on, are s1 .. sn; the first half has
    none, as it cannot be predicted.

    Raises:
        MixerError: if the length is odd or the vocabulary holds fewer than two symbols beside the separator.
    """
    check_copy(seq_len=seq_len, vocab=vocab)
    half = seq_len // 2
    string = torch.randint(1, vocab, (batch, half), generator=generator)
    tokens = torch.cat([string, torch.zeros(batch, 1, dtype=torch.long), string[:, :-1]], 1)
    return tokens, torch.cat([torch.full_like(string, IGNORED), string], 1)


def check_copy(*, seq_len: int, vocab: int, who: str = "copy_batch") -> None:
    """Refuse a length or a vocabulary with which there is nothing to copy; ``who`` begins the message."""
    if seq_len < 2 or seq_len % 2 or vocab < 3:
        raise MixerError(
            f"{who}: a string and its copy need an even seq_len >= 2 and vocab >= 3, got seq_len={seq_len}, "
            + f"vocab={vocab}."
        )
