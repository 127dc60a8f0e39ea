"""Guess several tokens and read them in one chunk: the text that ``generate`` writes, in fewer steps of the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import MixerError
from .blocks import evaluation_mode
from .decoder import serves
from .sampling import draw_noise, finite_rows, not_finite, pick_token

UNREAD = 16
"""The tokens of a row behind its state from which the next chunk has no guesses, so that the state catches up."""
FEW = 3
"""Tokens that a decoder reads one by one in less time than ``extend`` takes at once."""

Choose = Callable[[Tensor, int], int]
"""Chooses the i-th token after a text, given logits (V,) and i, with the random numbers of that place."""


@dataclass
class Counts:
    """What became of guesses, over all rows of a generation.

    Attributes:
        calls: calls of the model after the prompt, for all rows at once.
        checks: guesses that were read, each of one or several tokens.
        guessed: their tokens.
        right: those of them that the model wrote too.
    """

    calls: int = 0
    checks: int = 0
    guessed: int = 0
    right: int = 0

    @property
    def acceptance(self) -> float:
        """Return the share of guessed tokens that were right."""
        return self.right / max(self.guessed, 1)

    @property
    def tokens_per_check(self) -> float:
        """Return how many tokens of a row a check decides: those that were right, and the one after them."""
        return 1 + self.right / max(self.checks, 1)


class Drafter(ABC):
    """Guesses what a text goes on with; ``counts`` says of the last generation how often it was right.

    It is the ``draft=`` of ``LM.generate``. A subclass says how it guesses; whatever it says, the text stays the same.
    A drafter is for one thread.
    """

    counts = Counts()

    def begin(self, model: Any, rows: int) -> None:  # noqa: B027  (optional)
        """Prepare for a generation of ``rows`` rows by a model; what was known of earlier texts is forgotten."""

    @abstractmethod
    def guess(self, row: int, text: list[int], most: int, choose: Choose) -> list[int]:
        """Return at most ``most`` >= 1 tokens that may follow the text of a row, or none.

        Args:
            text: prompt and continuation so far; between two calls for a row it only grows.
            choose: how the model will choose: a drafter with probabilities of its own, which chooses with it, is right
                more often.
        """


class NgramDrafter(Drafter):
    """Guesses that what followed the last few tokens before will follow them again; needs no model.

    Args:
        tokens: most tokens of a guess.
        longest, shortest: how many last tokens are looked up, the longest first; the latest place counts. The defaults
            are for bytes; of words, two or three are as telling.
    """

    def __init__(self, tokens: int = 32, *, longest: int = 12, shortest: int = 8):
        if not (tokens >= 1 and 1 <= shortest <= longest):
            given = f"tokens={tokens}, shortest={shortest}, longest={longest}"
            raise MixerError(f"NgramDrafter: needs tokens >= 1 and 1 <= shortest <= longest, got {given}.")
        self.tokens, self.sizes = tokens, range(longest, shortest - 1, -1)

    def begin(self, model: Any, rows: int) -> None:
        """Forget all texts."""
        self._seen = [0] * rows
        self._places: list[dict[tuple[int, ...], int]] = [{} for _ in range(rows)]

    def guess(self, row: int, text: list[int], most: int, choose: Choose) -> list[int]:
        """Return what followed the last tokens of the text where they stood before."""
        places = self._places[row]
        for end in range(self._seen[row] + 1, len(text)):  # what nothing follows yet is no place
            for n in self.sizes:
                if n <= end:
                    places[tuple(text[end - n : end])] = end
        self._seen[row] = max(len(text) - 1, 0)
        for n in self.sizes:
            at = places.get(tuple(text[-n:])) if n <= len(text) else None
            if at is not None:  # what followed may run into the end of the text, and then goes on with itself
                return [text[at + i % (len(text) - at)] for i in range(min(most, self.tokens))]
        return []


class ModelDrafter(Drafter):
    """Guesses what a smaller ``LM`` would write with the same settings and random numbers.

    Args:
        model: an ``LM`` with the vocabulary of the one that generates, whose mixers stream. It reads no further than
            its ``max_len``, and guesses nothing there.
        tokens: most tokens of a guess.
    """

    def __init__(self, model: Any, tokens: int = 4):
        if tokens < 1:
            raise MixerError(f"ModelDrafter: tokens must be at least 1, got {tokens}.")
        if not model.streams:
            raise MixerError("ModelDrafter: a mixer of this model cannot continue from a state; take another model.")
        self.model, self.tokens = model, tokens

    def begin(self, model: Any, rows: int) -> None:
        """Forget all texts."""
        if model.vocab != self.model.vocab:
            sizes = f"{self.model.vocab} tokens and {model.vocab}"
            raise MixerError(f"ModelDrafter: the models have vocabularies of {sizes}; take two with the same.")
        self._seen = [0] * rows
        self._states: list[Any] = [None] * rows
        self._step: Any = None

    @torch.no_grad()
    def guess(self, row: int, text: list[int], most: int, choose: Choose) -> list[int]:
        """Return what the model writes after the text."""
        limit = self.model.max_len
        most = min(most, self.tokens, *([] if limit is None else [limit - len(text) + 1]))
        if most < 1:
            return []
        with evaluation_mode(self.model):
            logits, state = self._read(row, text)
            found = [choose(logits[0, -1], 0)]
            while len(found) < most:
                logits, state = self._step(self._tokens(found[-1:]), state)
                found.append(choose(logits[0, -1], len(found)))
        return found

    def _read(self, row: int, text: list[int]) -> tuple[Tensor, Any]:
        """Read what is new in a text; return the last logits and the state, which is kept."""
        new, state = text[self._seen[row] :], self._states[row]
        if self._step is None:
            self._step = self.model.decoder().extend if serves(self.model) else self.model.extend
        if state is None or self._step == self.model.extend:
            state = self.model.init_state(1, device=self.model.embed.weight.device) if state is None else state
            logits, state = self.model.extend(self._tokens(new), state)
        else:
            for token in new:
                logits, state = self._step(self._tokens([token]), state)
            state = pytree.tree_map_only(Tensor, torch.clone, state)  # the decoder goes on in its own memory
        self._seen[row], self._states[row] = len(text), state
        return logits, state

    def _tokens(self, tokens: list[int]) -> Tensor:
        return torch.tensor([tokens], device=self.model.embed.weight.device)


class Choices:
    """The tokens that a generation chooses from logits, each with random numbers of its own place.

    The numbers are drawn place by place, as they are without guesses; so a seed writes the same text, and a guess is
    right where it is the token that would have been chosen anyway.

    Args:
        generator: draws them; None: torch's own.
        options: temperature, top_k and top_p of ``pick_token``.
    """

    def __init__(self, generator: torch.Generator | None, **options: Any):
        self.generator, self.options = generator, options
        self._noise: dict[int, Tensor] = {}
        self._drawn = 0

    def pick(self, logits: Tensor, row: int, first: int, rows: int) -> list[int]:
        """Return the tokens of one row for the places ``first``, ``first`` + 1, ..., given their logits (L, V)."""
        if self.options["temperature"] == 0:
            likely: list[int] = logits.argmax(-1).tolist()
            return likely
        while self._drawn < first + len(logits):
            self._noise[self._drawn] = draw_noise(logits[:1].expand(rows, -1), self.generator)
            self._drawn += 1
        noise = torch.stack([self._noise[first + i][row] for i in range(len(logits))])
        chosen: list[int] = pick_token(logits, **self.options, noise=noise)[:, 0].tolist()
        return chosen

    def forget(self, before: int) -> None:
        """Drop the numbers of places that all rows have passed."""
        for place in [place for place in self._noise if place < before]:
            del self._noise[place]


class Speculation:
    """The continuation of prompts, guessed by a drafter and checked by a model.

    The state stands at some place of each row's text, behind which a few tokens are unread. A chunk holds these and
    the guesses. Where every guess of every row was right the state after the chunk is taken; otherwise it is dropped,
    and the next chunk begins with the tokens that are known by then. Nothing is rolled back, so all mixers do.

    Args:
        model: an ``LM`` that streams.
        step: ``extend`` of the model or of a decoder of it, for one token per row.
        texts: the tokens of each row so far.
        state: the model's, after these texts.
        n: how many tokens to add to each.
    """

    def __init__(
        self, model: Any, step: Any, drafter: Drafter, choices: Choices, texts: list[list[int]], state: Any, n: int
    ):
        self.model, self.step, self.drafter, self.choices = model, step, drafter, choices
        self.texts, self.state, self.n = texts, state, n
        self.begins = [len(text) for text in texts]
        self.unread = [0] * len(texts)
        drafter.counts = Counts()
        self.few = 1 if step == model.extend else FEW

    def write(self, logits: Tensor) -> Tensor:
        """Return the continuations (B, n), given the logits (B, V) after the prompts."""
        for row, each in enumerate(logits if self.n else ()):
            self._add(row, self._check(each[None], row, []))
        while any(self._left(row) for row in range(len(self.texts))):
            self._advance(logits.device)
        new = [text[begin:] for text, begin in zip(self.texts, self.begins, strict=True)]
        return torch.tensor(new, dtype=torch.long, device=logits.device).view(len(new), self.n)

    def _left(self, row: int) -> int:
        return self.n - len(self.texts[row]) + self.begins[row]

    def _advance(self, device: torch.device) -> None:
        """Read what is unread and a guess of each row, and add what is known then."""
        guesses = self._guess()
        unread = [
            text[len(text) - n :] if self._left(row) else []
            for row, (text, n) in enumerate(zip(self.texts, self.unread, strict=True))
        ]
        sizes = [len(a) + len(b) for a, b in zip(unread, guesses, strict=True)]
        rows = [a + b + [0] * (max(sizes) - len(a) - len(b)) for a, b in zip(unread, guesses, strict=True)]
        chunk = torch.tensor(rows, device=device)
        if not any(guesses) and len(set(sizes)) == 1 and sizes[0] <= self.few:
            logits, state = self._step_through(chunk)
        else:
            logits, state = self._extend(chunk, sizes)
        self.drafter.counts.calls += 1
        all_right = True
        for row, (known, guess) in enumerate(zip(unread, guesses, strict=True)):
            if known:
                new = self._check(logits[row, len(known) - 1 : sizes[row]], row, guess)
                all_right &= len(new) > len(guess)
                self._add(row, new)
        if all_right:
            self.state, self.unread = state, [1] * len(unread)
        self.choices.forget(min(len(text) - begin for text, begin in zip(self.texts, self.begins, strict=True)))

    def _step_through(self, chunk: Tensor) -> tuple[Tensor, Any]:
        """Read a chunk token by token."""
        each, state = [], self.state
        for token in chunk.split(1, dim=1):
            logits, state = self.step(token, state)
            each.append(logits.clone())  # a decoder's next step overwrites them
        return torch.cat(each, 1), state

    def _extend(self, chunk: Tensor, sizes: list[int]) -> tuple[Tensor, Any]:
        """Read a chunk whose rows hold ``sizes`` tokens each, and padding after them, which takes no positions."""
        if len(set(sizes)) == 1:
            logits, state = self.model.extend(chunk, self.state)
            return logits, state
        place, size = torch.arange(chunk.shape[1], device=chunk.device), torch.tensor(sizes, device=chunk.device)
        at = self.state.position[:, None] + place.minimum(size[:, None] - 1)
        logits, state = self.model.extend(chunk, self.state, key_mask=place < size[:, None], positions=at)
        return logits, state

    def _guess(self) -> list[list[int]]:
        """Return a guess for each row: none in a row that needs at most one more token, none where states lag."""
        if max(self.unread) > UNREAD:
            return [[] for _ in self.texts]
        guesses = []
        for row, text in enumerate(self.texts):
            most, place = self._left(row) - 1, len(text) - self.begins[row]

            def choose(logits: Tensor, i: int, row: int = row, place: int = place) -> int:
                return self.choices.pick(logits[None], row, place + i, len(self.texts))[0]

            guesses.append(self.drafter.guess(row, text, most, choose)[:most] if most > 0 else [])
        return guesses

    def _check(self, logits: Tensor, row: int, guess: list[int]) -> list[int]:
        """Return the guessed tokens that are right and the one after them, given the logits (L, V) for all of these."""
        place = len(self.texts[row]) - self.begins[row]
        chosen = self.choices.pick(logits, row, place, len(self.texts))
        right = count_right(chosen, guess)
        if not (good := finite_rows(logits[: right + 1])).all():
            what = f"logits of new token {place + int((~good).nonzero()[0])}"
            raise MixerError(not_finite("LM.generate", what, row))
        counts = self.drafter.counts
        counts.checks += bool(guess)
        counts.guessed += len(guess)
        counts.right += right
        return chosen[: right + 1]

    def _add(self, row: int, new: list[int]) -> None:
        self.texts[row] += new
        self.unread[row] += len(new)


def count_right(chosen: list[int], guess: list[int]) -> int:
    """Count the guessed tokens before the first that the model chose otherwise."""
    for i, (a, b) in enumerate(zip(chosen, guess, strict=False)):
        if a != b:
            return i
    return len(guess)
