"""Blocks applied several times with the same weights, and the embedded input added in again on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..positions.checks import is_whole
from ..system.config import Json
from .layers import init_linear

Inject = Literal["add", "concat"]
Every = Literal["pass", "layer"]
Start = Literal["input", "noise"]
NOISE_STD = 0.02


@dataclass(frozen=True)
class LoopConfig(Json):
    """How often a trunk's blocks are applied, and their inputs (McLeish et al. 2024, arXiv 2405.17399).

    A pass maps s to all blocks applied to s. The trunk makes ``times`` passes, each from the result of the one before.

    Args:
        times: number of passes, at least 1. ``model.loop.times`` may be set to another number later, also beyond it.
        inject: "add": s becomes s + e, with e the embedded input; "concat": a linear map of s and e; None: neither.
        every: where the input is injected: before every "pass", or before every "layer" of it.
        start: s before the first pass: the "input" e, or "noise", which is drawn from N(0, 0.02) in training and 0 in
            evaluation. Noise needs an injection.
        random: probability alpha in [0, 1] that a training step makes fewer passes: n of them without gradients, n
            drawn evenly from 0 .. times - 1, then m with, m from 1 .. min(times - n, times // 2). Its expectation over
            steps is the progressive loss (1 - alpha) L(times) + alpha L(n + m) of the paper, which computes both in
            each step.

    Raises:
        MixerError: for values out of range.
    """

    times: int = 1
    inject: Inject | None = None
    every: Every = "pass"
    start: Start = "input"
    random: float = 0.0

    def __post_init__(self) -> None:
        if not is_whole(self.times, 1):
            raise MixerError(f"loop: times must be an integer of at least 1, got {self.times!r}.")
        for name, known in (
            ("inject", (*get_args(Inject), None)),
            ("every", get_args(Every)),
            ("start", get_args(Start)),
        ):
            if getattr(self, name) not in known:
                raise MixerError(
                    f"loop: {name}={getattr(self, name)!r} is unknown; choose one of {', '.join(map(repr, known))}."
                )
        if not 0 <= self.random <= 1:
            raise MixerError(f"loop: random must be in [0, 1], got {self.random}.")
        if self.start == "noise" and self.inject is None:
            raise MixerError("loop: start='noise' without inject would never read the input; set inject.")


class Loop(nn.Module):
    """The passes of a trunk and the injection of its input.

    Args:
        config: a ``LoopConfig``.
        dim: features per token.
    """

    def __init__(self, config: LoopConfig, dim: int):
        super().__init__()
        self.config, self.times = config, config.times
        self.mix = nn.Linear(2 * dim, dim, bias=False) if config.inject == "concat" else None

    def reset_parameters(self, std: float) -> None:
        """Draw the weights of "concat" from N(0, std)."""
        if self.mix is not None:
            init_linear(self.mix, std)

    def passes(self) -> tuple[int, int]:
        """Return the number of passes without gradients and with them."""
        times, draw = self.times, None
        if self.training and self.config.random:
            draw = torch.rand((), dtype=torch.float32, device="cpu")
        if draw is None or draw >= self.config.random:
            return 0, times
        without = int(torch.randint(times, (), device="cpu"))
        return without, int(torch.randint(1, max(min(times - without, times // 2), 1) + 1, (), device="cpu"))

    def begin(self, x: Tensor) -> Tensor:
        """Return the input of the first pass, besides the injected input."""
        if self.config.start == "input":
            return x
        return NOISE_STD * torch.randn_like(x) if self.training else torch.zeros_like(x)

    def inject(self, s: Tensor, x: Tensor, block: int) -> Tensor:
        """Return the input of the n-th block of a pass: s, with the embedded input x if it is injected."""
        if self.config.inject is None or (block and self.config.every == "pass"):
            return s
        return s + x if self.mix is None else self.mix(torch.cat([s, x], -1))


def check_loop(loop: object, who: str) -> None:
    """Raise an error, in the name of ``who``, unless this is a ``LoopConfig``."""
    if loop is not None and not isinstance(loop, LoopConfig):
        raise MixerError(f"{who}: loop must be a LoopConfig or None, got {loop!r}.")
