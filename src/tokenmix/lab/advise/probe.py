"""How near a candidate comes to the model's attention after a few steps of learning its outputs, layer by layer."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...hosts.surgery.capture import Call, adapters_by_site, capture_calls, layer_losses
from ...kernels.precision import at_least_float32
from ...system.calls import call_model
from ..bench.cases import BenchSubject
from .candidates import replace_attention
from .loading import Host
from .measuring import FAILURES

STEPS = 20
"""Fewer steps rank nothing: the order of the errors still changes with each."""
RATE = 3e-4
ROWS = 4


@dataclass(frozen=True)
class Nearness:
    """The error of a candidate's layers on inputs that it did not learn from, before and after the probe.

    The error is the mean over layers of the squared distance from what attention gave, over the square of that: 0 is
    attention itself, and 1 as far from it as giving zeros.
    """

    before: float
    after: float
    steps: int

    @property
    def ranks(self) -> bool:
        """Whether the probe was long enough to rank candidates."""
        return self.steps >= STEPS


def probe(
    host: Host,
    subjects: Sequence[BenchSubject],
    length: int,
    *,
    seconds: float,
    steps: int = STEPS,
    data: Sequence[object] | None = None,
) -> dict[str, Nearness]:
    """Probe each candidate with the same inputs and the same number of steps; those that do not fit, or whose
    error becomes no number, are left out.

    Args:
        seconds: about what all candidates together may take; it limits the steps.
        data: batches to learn from, the last one to be scored on; None: inputs made for ``length``, shuffled anew in
            each step.
    """
    host.inputs.fit(host.model, length)
    learners: dict[str, _Learner] = {}
    began, costs = time.perf_counter(), 0.0
    for subject in subjects:
        try:
            student = replace_attention(host, {"name": subject.name, **subject.options}).eval()
            learner = _Learner(host, student, length, data)
            start = time.perf_counter()
            learner.step(0)
        except FAILURES:  # the candidates' table says why
            continue
        costs += time.perf_counter() - start
        learners[subject.label] = learner
    if not learners:
        return {}
    left = seconds - (time.perf_counter() - began)
    steps = max(1, min(steps, 1 + int(left / max(costs, 1e-6))))
    for learner in learners.values():
        for i in range(1, steps):
            learner.step(i)
    found = {label: Nearness(learner.before, learner.score(), steps) for label, learner in learners.items()}
    return {label: near for label, near in found.items() if math.isfinite(near.after)}


class _Learner:
    """Teach a student's mixers the outputs of the host's attention, in float32 at least.

    In 16 bits Adam's small steps are rounded away or become NaN.
    """

    def __init__(self, host: Host, student: nn.Module, length: int, data: Sequence[object] | None):
        self.teacher, self.student = host.model, student
        self.inputs, self.length, self.data = host.inputs, length, data
        self.adapters = adapters_by_site(student)
        student.requires_grad_(False)
        for adapter in self.adapters.values():
            dtype = next((p.dtype for p in adapter.mixer.parameters()), torch.float32)
            adapter.mixer.to(torch.promote_types(dtype, torch.float32))
        weights = [p for adapter in self.adapters.values() for p in adapter.mixer.parameters()]
        # a mixer such as fourier has nothing that could learn
        self.optimizer = torch.optim.Adam([p.requires_grad_() for p in weights], RATE) if weights else None
        self.before = self.score()

    def step(self, i: int) -> None:
        """Learn from batch ``i``."""
        if self.optimizer is None:
            return
        self.optimizer.zero_grad()
        self._loss(self._batch(i)).backward()
        self.optimizer.step()

    @torch.no_grad()
    def score(self) -> float:
        """Return the mean error over the layers on the batch that is not learned from."""
        return float(self._loss(self._batch(-1)))

    def _loss(self, batch: object) -> Tensor:
        with torch.no_grad(), capture_calls(self.teacher, self.adapters) as calls:
            call_model(self.teacher, batch)
        wide = {name: Call(*pytree.tree_map(_to_float32, tuple(call))) for name, call in calls.items()}
        return torch.stack(list(layer_losses(self.adapters, wide).values())).mean()

    def _batch(self, i: int) -> object:
        if self.data is not None:
            return self.data[-1] if i < 0 or len(self.data) == 1 else self.data[i % (len(self.data) - 1)]
        args, named = self.inputs.make(self.length, ROWS)
        draw = torch.Generator().manual_seed(1000 + i)
        changed = {name: _shuffle_value(value, draw) for name, value in named.items()}
        return changed if named else tuple(_shuffle_value(value, draw) for value in args)


def _to_float32(value: object) -> object:
    return at_least_float32(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def _shuffle_value(value: object, draw: torch.Generator) -> object:
    """Return numbers of tokens in another order, and other noise for features; anything else as it is."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    if value.is_floating_point():
        return torch.randn(value.shape, generator=draw).to(value)
    order = torch.randperm(value.numel(), generator=draw)
    return value.flatten()[order.to(value.device)].view(value.shape)
