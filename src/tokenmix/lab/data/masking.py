"""What a model has to fill in: masked tokens of BERT, corrupted spans of T5, hidden patches of images."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .pair_sampler import IGNORED
from .sampler import MASK as ALL_BITS
from .sampler import mix64
from .subwords import MASK, SPECIAL

MASKED, RANDOM = 0.8, 0.1
"""Shares of the chosen tokens that become ``<mask>`` and another token (BERT)."""


def mask_tokens(
    tokens: Tensor,
    maskable: Tensor,
    draws: Tensor,
    *,
    vocab: int,
    rate: float = 0.15,
    starts_word: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose tokens to predict and hide them, as BERT does (Devlin et al. 2019, arXiv 1810.04805, 3.1).

    Of the tokens that are chosen, 80 % become ``<mask>``, 10 % another token, and the rest stay. At least
    one token of each row that has any is chosen.

    Args:
        tokens: (B, T) integers.
        maskable: (B, T) bool, False at padding and special tokens, which are never chosen.
        draws: (3, B, T) random numbers in [0, 1): which tokens are chosen, what becomes of them, and which others there
            are.
        vocab: number of tokens; random ones are drawn from those that are not special.
        rate: probability that a token is chosen.
        starts_word: (V,) bool, whether a token begins a word; then whole words are chosen: each with the probability
            ``rate``, with all of its tokens. None: single tokens.

    Returns:
        The inputs (B, T), and the targets (B, T): the tokens that were chosen, ``IGNORED`` elsewhere.
    """
    if tokens.shape[1] == 0:
        return tokens, tokens.clone()
    rows = torch.arange(tokens.shape[0])[:, None]
    begins = torch.ones_like(maskable) if starts_word is None else starts_word[tokens] | ~maskable
    begins[:, 1:] |= ~maskable[:, :-1]
    word = (begins.long().cumsum(1) - 1).clamp_min(0)
    draw = draws[0][rows, word].masked_fill(~maskable, 2.0)
    least = draw.amin(1, keepdim=True)
    chosen = maskable & ((draw < rate) | (draw == least))
    others = (len(SPECIAL) + draws[2] * (vocab - len(SPECIAL))).long().clamp_max(vocab - 1)
    hidden = torch.where(draws[1] < MASKED, MASK, torch.where(draws[1] < MASKED + RANDOM, others, tokens))
    return torch.where(chosen, hidden, tokens), torch.where(chosen, tokens, IGNORED)


def corrupt_spans(
    tokens: list[int],
    generator: torch.Generator,
    *,
    sentinels: list[int],
    rate: float = 0.15,
    mean: float = 3.0,
) -> tuple[list[int], list[int]]:
    """Replace spans of a text by sentinels; the target says what stood there (T5, Raffel et al. 2020, 3.1.4).

    "Thank you for inviting me to your party" may give "Thank you <0> me to your <1>" and "<0> for inviting <1> party".
    As in the code of T5, a text begins with a span that stays and ends with one that is replaced, and the target has no
    sentinel at its end, which the paper's figure shows.

    Args:
        tokens: of a text; fewer than 2 stay as they are.
        sentinels: tokens that stand for spans, in their order; they bound the number of spans.
        rate: share of the tokens that are replaced.
        mean: mean length of a span that is replaced.

    Returns:
        The source and the target.
    """
    n = len(tokens)
    if n < 2:
        return list(tokens), []
    noise = min(max(round(n * rate), 1), n - 1)
    spans = min(max(round(noise / mean), 1), noise, n - noise, len(sentinels))
    source, target, at = [], [], 0
    for sentinel, kept, gone in zip(
        sentinels, _parts(n - noise, spans, generator), _parts(noise, spans, generator), strict=False
    ):
        source += [*tokens[at : at + kept], sentinel]
        target += [sentinel, *tokens[at + kept : at + kept + gone]]
        at += kept + gone
    return source, target


def _parts(total: int, count: int, generator: torch.Generator) -> list[int]:
    """Return ``count`` positive numbers with this sum, all such lists alike."""
    cuts = (torch.randperm(total - 1, generator=generator)[: count - 1] + 1).sort().values.tolist()
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def kept_patches(draws: Tensor, kept: int) -> Tensor:
    """Choose which patches of each image are kept: those with the smallest draws, (B, kept) in ascending order.

    Args:
        draws: (B, N) uniform numbers, one for each patch; every choice is then as likely.
    """
    return draws.argsort(1)[:, :kept].sort(1).values


def draws_of(images: Iterable[int], patches: int) -> Tensor:
    """Draw uniform numbers (B, patches) for images of a split, each a function of the image's place there alone."""
    generators = (torch.Generator().manual_seed(mix64(i) & ALL_BITS) for i in images)
    return torch.stack([torch.rand(patches, generator=each) for each in generators])
