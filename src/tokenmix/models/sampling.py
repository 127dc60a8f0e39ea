"""Sampling of the next token from logits: temperature, top-k, top-p; and the refusal of logits that are no numbers."""

from __future__ import annotations

import math
from operator import index
from typing import Any

import torch
from torch import Tensor

from ..errors import MixerError


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuse settings out of range, or of another kind than numbers."""
    settings: tuple[tuple[str, Any], ...] = (
        ("temperature", temperature),
        ("top_k", top_k or 1),
        ("top_p", top_p or 1.0),
    )
    for name, given in settings:
        kinds = "an integer" if name == "top_k" else "a number"
        try:
            index(given) if name == "top_k" else float(given)
            right = not isinstance(given, str)
        except (TypeError, ValueError):
            right = False
        if not right:
            raise MixerError(f"{name} must be {kinds}, got {given!r}.")
    if not 0 <= temperature < math.inf:
        raise MixerError(f"temperature must be finite and >= 0 (0 is greedy), got {temperature}.")
    if top_k is not None and top_k < 1:
        raise MixerError(f"top_k must be at least 1, got {top_k}.")
    if top_p is not None and not 0 < top_p <= 1:
        raise MixerError(f"top_p must be in (0, 1], got {top_p}.")


def seeded_generator(seed: int | None, device: torch.device | str = "cpu") -> torch.Generator | None:
    """Return a generator that starts from ``seed``; None, torch's own, for None."""
    if seed is None:
        return None
    if not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise MixerError(f"seed must be an integer of 64 bits or None, got {seed!r}.")
    return torch.Generator(device).manual_seed(int(seed))


def pick_token(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """Sample tokens (B, 1) from logits (B, V); a small temperature takes the most likely token, as 0 does.

    Args:
        noise: what chooses in place of the generator's next numbers, from ``draw_noise``; (B, V).
    """
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    below = logits.to(wide) - logits.amax(-1, keepdim=True).to(wide)  # no temperature makes the largest overflow
    probs = keep_top((below / temperature).float(), top_k, top_p).softmax(-1)
    if noise is None:
        return torch.multinomial(probs, 1, generator=generator)
    return (probs / noise).argmax(-1, keepdim=True)


def draw_noise(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw the numbers that ``torch.multinomial`` would draw for logits (B, V): it takes the largest p / noise.

    Two models that choose with the same noise choose the same token with probability at least (1 - d) / (1 + d), where
    d is the total variation distance of their probabilities.
    """
    return torch.empty(logits.shape, device=logits.device).exponential_(generator=generator)


class FiniteSteps:
    """The check that every step of a generation is made of finite numbers.

    On the CPU each step is checked at once. Other devices would have to be waited for at each step, so there the steps
    are checked by ``finish``, and bad rows go on from zeros until then.

    Args:
        who: who generates, in errors.
        what: what a step is made of, such as "logits of new token {step}".
    """

    def __init__(self, who: str, what: str):
        self.who, self.what, self.count = who, what, 0
        self._later: list[Tensor] = []

    def logits(self, a: Tensor) -> Tensor:
        """Return the logits (B, V) of the next step. -inf forbids a token, but not all of a row."""
        return self._check_finite(a, finite_rows(a))

    def values(self, a: Tensor) -> Tensor:
        """Return the numbers (B, ...) of the next step, all of which must be finite."""
        return self._check_finite(a, a.isfinite().flatten(1).all(1))

    def _check_finite(self, a: Tensor, good: Tensor) -> Tensor:
        self.count += 1
        if a.is_cpu:
            self._refuse_bad(self.count - 1, good)
            return a
        self._later.append(good)
        return torch.where(good.view(-1, *[1] * (a.ndim - 1)), a, 0.0)

    def finish(self) -> None:
        """Raise MixerError if any step was bad."""
        if self._later and not bool(torch.stack(self._later).all()):
            for step, good in enumerate(self._later):
                self._refuse_bad(step, good)

    def _refuse_bad(self, step: int, good: Tensor) -> None:
        if not bool(good.all()):
            raise MixerError(not_finite(self.who, self.what.format(step=step), int((~good).nonzero()[0])))


def finite_rows(logits: Tensor) -> Tensor:
    """Return which rows of logits (B, V) a token can be chosen from: no NaN, no +inf, not all of them -inf."""
    return logits.amax(-1).isfinite()


def not_finite(who: str, what: str, row: int) -> str:
    """Return the message about numbers that nothing can be generated from."""
    look = "look for weights or inputs that are not finite, or for an overflow in half precision"
    return f"{who}: the {what} in row {row} are NaN or infinite; {look}."


def keep_top(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Keep of logits (..., V) the k most likely tokens, then the fewest whose probabilities reach p; others are -inf.

    None leaves the respective limit out.
    """
    if top_k is not None and top_k < logits.shape[-1]:
        order = logits.argsort(dim=-1, descending=True, stable=True)  # no threshold, as ties would keep more than k
        logits = logits.scatter(-1, order[..., top_k:], float("-inf"))
    if top_p is not None and top_p < 1:
        probs, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
        drop = probs.cumsum(-1) - probs >= top_p
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), float("-inf"))
    return logits
