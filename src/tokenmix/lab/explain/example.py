"""A small encoder-decoder over the grammar, trained in seconds, with whole words as tokens: the docs' example."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.seq2seq import Seq2Seq, Seq2SeqConfig
from ...types import Spec
from ..data.grammar import sentence_pairs

SPECIAL = ("<pad>", "<s>", "</s>", "<unknown>")
PAD, START, END, UNKNOWN = range(4)
ATTENTION: Spec = {"name": "attention", "heads": 2}


class Words:
    """Whole words as tokens.

    Args:
        texts: every word in them gets a token.
    """

    def __init__(self, texts: Iterable[str]):
        self.words = [*SPECIAL, *dict.fromkeys(word for text in texts for word in text.split())]
        self.ids = {word: i for i, word in enumerate(self.words)}
        self.unknown = UNKNOWN

    @property
    def vocab(self) -> int:
        """Return the number of tokens."""
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without a start and an end."""
        return [self.ids.get(word, UNKNOWN) for word in text.split()]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of tokens, without special ones."""
        return " ".join(self.words[i] for i in ids if i >= len(SPECIAL))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return each token as readable text."""
        return [self.words[i] for i in ids]


def train_example(
    mixer: Spec | None = None,
    *,
    steps: int = 700,
    dim: int = 32,
    batch: int = 64,
    rate: float = 6e-3,
    seed: int = 0,
) -> tuple[Seq2Seq, Words]:
    """Train an encoder-decoder of one layer each on the grammar.

    Args:
        mixer: the mixer of the encoder and of the decoder over its own words; None: attention with two heads. The
            decoder reads the encoder with attention in either case.
        steps: batches of ``batch`` sentences.
        dim: size of the embedding.
        rate: the highest rate of learning; it falls to 0 along a line.
        seed: of the weights and of the order of the sentences.
    """
    pairs = sentence_pairs()
    words = Words(text for pair in pairs for text in pair)
    config = Seq2SeqConfig(
        dim=dim,
        max_len=16,
        mixers=(ATTENTION if mixer is None else mixer,),
        cross_mixers=(ATTENTION,),
        vocab=words.vocab,
        mlp_ratio=2.0,
        positions="learned",
        init_std=0.3,
    )
    source, target = (
        _pad_rows([[*first, *words.encode(pair[side]), END] for pair in pairs])
        for side, first in ((0, []), (1, [START]))
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Seq2Seq(config).train()
        optimiser = torch.optim.Adam(model.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps, pct_start=0.1)
        for _ in range(steps):
            rows = torch.randint(len(pairs), (batch,))
            rows[: min(3, batch)] = torch.randint(7, (min(3, batch),))  # the phrases come first, and would be rare
            logits = model(source[rows], target[rows, :-1], source[rows] != PAD)
            loss = F.cross_entropy(logits.flatten(0, 1), target[rows, 1:].flatten(), ignore_index=PAD)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return model.eval(), words


def _pad_rows(rows: list[list[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
