"""Beam search over any model that writes one token at a time."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import MixerError
from .sampling import finite_rows, not_finite


class Writer(Protocol):
    """A model in the middle of several targets, which it continues token by token."""

    def next(self, token: Tensor) -> Tensor:
        """Add one token (rows, 1) to each target and return the logits (rows, vocab) of what follows."""

    def reorder(self, index: Tensor) -> None:
        """Go on with the targets of these rows (rows,), with repetition."""


class Found(NamedTuple):
    """A finished target and its score."""

    score: float
    tokens: list[int]


def check_beam(who: str, beams: object, length_penalty: float, temperature: float) -> None:
    """Refuse settings of a beam search that are out of range; ``who`` is named in the error."""
    if not isinstance(beams, int) or isinstance(beams, bool) or beams < 1:
        raise MixerError(f"{who}: beams must be an integer of at least 1, got {beams!r}.")
    if not 0 <= length_penalty < float("inf"):
        raise MixerError(f"{who}: length_penalty must be 0 or more, got {length_penalty}.")
    if beams > 1 and temperature != 0:
        raise MixerError(f"{who}: a beam search does not sample; leave temperature at 0, or beams at 1.")


class BeamSearch:
    """Follow the most likely targets of each row at once.

    A target y of n tokens, its end included, scores log p(y) / n^penalty. A row is finished once as many targets have
    ended as it has beams and none of those still open scores higher now; this is the usual early stop, after which an
    open target could still overtake if its next tokens are almost certain.

    Args:
        beams: open targets per row, K.
        penalty: exponent of the length.
        end: token that ends a target.
    """

    def __init__(self, beams: int, penalty: float, end: int):
        self.beams, self.penalty, self.end = beams, penalty, end

    def write(self, writer: Writer, rows: int, n: int, device: torch.device, *, start: int) -> Tensor:
        """Return the best target of each row (rows, at most n); behind its end a row is filled with the end token.

        Args:
            writer: holds one target per row, without a token.
            start: token that every target begins with; it is not returned.

        Raises:
            MixerError: if logits are NaN or infinite.
        """
        K = self.beams
        writer.reorder(torch.arange(rows, device=device).repeat_interleave(K))
        found: list[list[Found]] = [[] for _ in range(rows)]
        open_rows = list(range(rows))  # rows that are not finished, in the order of the writer's
        tokens = torch.empty(rows, K, 0, dtype=torch.long, device=device)
        last = torch.full((rows * K, 1), start, dtype=torch.long, device=device)
        sums = torch.full((rows, K), float("-inf"), dtype=torch.float64, device=device)
        sums[:, 0] = 0.0  # the others are copies of the first
        for length in range(1, n + 1):
            logits = writer.next(last)
            self._check(logits, open_rows, length)
            logs = logits.double().log_softmax(-1).unflatten(0, (-1, K))
            vocab = logs.shape[-1]
            best, at = (sums[..., None] + logs).flatten(1).topk(min(2 * K, K * vocab), 1)
            beam, token = at // vocab, at % vocab
            self._collect(found, open_rows, tokens, best, beam, token, length)
            # Ended targets leave the beam; 2 K candidates always hold K others, unless the vocabulary is tiny.
            rest = best.masked_fill(token == self.end, float("-inf"))
            sums, kept = rest.topk(min(K, rest.shape[1]), 1)
            beam, token = beam.gather(1, kept), token.gather(1, kept)
            tokens = torch.cat([tokens.gather(1, beam[..., None].expand(-1, -1, length - 1)), token[..., None]], 2)
            going = [
                i for i, row in enumerate(open_rows) if not self._is_finished(found[row], float(sums[i, 0]), length)
            ]
            if not going or length == n:
                break
            chosen = torch.tensor(going, device=device)
            writer.reorder((chosen[:, None] * K + beam[chosen]).flatten())
            open_rows = [open_rows[i] for i in going]
            tokens, sums = tokens[chosen], sums[chosen]
            last = tokens[..., -1:].flatten(0, 1)
        for i, row in enumerate(open_rows):  # a row in which nothing has ended gives its best open target
            if not found[row]:
                found[row].append(Found(float(sums[i, 0]), tokens[i, 0].tolist()))
        return self._best_targets(found, device)

    def _check(self, logits: Tensor, open_rows: list[int], length: int) -> None:
        bad = (~finite_rows(logits)).nonzero()
        if len(bad):
            row = open_rows[int(bad[0]) // self.beams]
            raise MixerError(not_finite("BeamSearch", f"logits of new token {length - 1}", row))

    def _collect(
        self,
        found: list[list[Found]],
        open_rows: list[int],
        tokens: Tensor,
        best: Tensor,
        beam: Tensor,
        token: Tensor,
        length: int,
    ) -> None:
        """Add the targets that end with this token; only those among the K best candidates count."""
        ends = (token[:, : self.beams] == self.end) & best[:, : self.beams].isfinite()
        for i, j in ends.nonzero().tolist():
            written = [*tokens[i, int(beam[i, j])].tolist(), self.end]
            kept = found[open_rows[i]]
            kept.append(Found(float(best[i, j]) / length**self.penalty, written))
            kept.sort(key=lambda each: -each.score)
            del kept[self.beams :]

    def _is_finished(self, found: list[Found], best_open: float, length: int) -> bool:
        return len(found) == self.beams and found[-1].score >= best_open / length**self.penalty

    def _best_targets(self, found: list[list[Found]], device: torch.device) -> Tensor:
        texts = [targets[0].tokens for targets in found]
        longest = max((len(text) for text in texts), default=0)
        filled = [text + [self.end] * (longest - len(text)) for text in texts]
        return torch.tensor(filled, dtype=torch.long, device=device).reshape(len(texts), longest)
