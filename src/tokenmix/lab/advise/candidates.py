"""Other mixers inside the model itself: time, peak memory, state and time per generated token, beside its own
attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...errors import MixerError
from ...hosts.surgery import replace_mixers
from ...mixers import MIXERS, is_softmax
from ...models import build_model
from ...types import Record, Spec
from ..bench.cases import BenchSubject, parse_subjects
from ..bench.timing import measure, peak_memory, sampler
from .attention_modules import AttentionModule
from .decoding import Decoded, decode
from .inputs import Given
from .loading import Host
from .measuring import FAILURES

OWN = "its own attention"
CAUSAL = "aft_simple,aft_local:window=32,rank=32,linear,local:window=64"
TEXT = "aft_simple,hydra,linear,external"
IMAGES = "aft_conv:kernel_size=7,hydra,linear,external"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """One candidate at one length: seconds, speed-up over the model's own attention and bytes of a pass; or why it has
    none.

    Args:
        least, most: the speed-up by the quartiles that are worst and best for the candidate; None: not known.
        saved: how many parameters fewer than with attention the model has.
    """

    mixer: str
    length: int
    seconds: float | None = None
    speedup: float | None = None
    peak: int | None = None
    decoded: Decoded | None = None
    why: str | None = None
    least: float | None = None
    most: float | None = None
    saved: int | None = None

    @property
    def faster(self) -> bool:
        """Whether the model is faster with it, beyond the noise of the timings."""
        return self.mixer != OWN and self.speedup is not None and (self.least or self.speedup) > 1

    def to_json(self) -> Record:
        """Return plain JSON values."""
        decoded = (
            {}
            if self.decoded is None
            else {"state_bytes": self.decoded.state_bytes, "ms_per_token": self.decoded.ms_per_token}
        )
        return {k: v for k, v in vars(self).items() if k != "decoded"} | decoded


def usual_mixers(modules: list[AttentionModule], *, images: bool) -> str:
    """Return a few core mixers that fit: causal ones where attention is causal, ones with a grid for images."""
    return IMAGES if images else CAUSAL if all(m.causal for m in modules) else TEXT


def parse_candidates(text: str) -> list[BenchSubject]:
    """Parse mixers such as "hydra,aft_local:window=32"."""
    found = parse_subjects(text)
    odd = [s.name for s in found if s.name not in MIXERS]
    if odd or not found:
        raise MixerError(
            f"advise: --candidates takes mixers of `tokenmix list`, such as hydra,aft_local:window=32, got {text!r}."
        )
    return found


@torch.no_grad()
def measure_candidates(
    host: Host,
    subjects: list[BenchSubject],
    length: int,
    *,
    batch: int,
    budget: float,
    device: str = "cpu",
    tell: Tell = lambda _: None,
) -> list[Candidate]:
    """Measure all candidates at one length, timed in turns in one process with the unchanged model."""
    models, rows = build_candidates(host, subjects, length)
    given = host.inputs.make(length, batch)
    calls = {label: _call(model, given) for label, model in models.items()}
    for label, call in list(calls.items()):
        tell(f"{label} at {length:,}")
        try:
            call()
        except FAILURES as why:
            rows.append(Candidate(label, length, why=_line(why)))
            del calls[label]
    timed = measure({label: sampler(call, device=device) for label, call in calls.items()}, budget=budget, tell=tell)
    own, weights = timed[OWN], _parameters(host.model)
    for label, call in calls.items():
        t, peak = timed[label], peak_memory(call, device=device)
        decoded, saved = decode(models[label], host.inputs, length, batch), weights - _parameters(models[label])
        bounds = (1.0, 1.0) if label == OWN else (own.wall / t.wall_high, own.wall_high / t.wall)
        rows.append(Candidate(label, length, t.wall, own.wall / t.wall, peak, decoded, None, *bounds, saved))
    order = [OWN, *(s.label for s in subjects)]
    return sorted(rows, key=lambda r: order.index(r.mixer))


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def build_candidates(
    host: Host, subjects: list[BenchSubject], length: int
) -> tuple[dict[str, nn.Module], list[Candidate]]:
    """Build the model with its own attention and with each mixer, by label, and a row with the reason for each that
    does not fit.
    """
    host.inputs.fit(host.model, length)
    models: dict[str, nn.Module] = {OWN: host.model}
    rows = []
    for subject in subjects:
        spec = {"name": subject.name, **subject.options}
        try:
            models[subject.label] = replace_attention(host, spec).eval()
        except MixerError as why:
            rows.append(Candidate(subject.label, length, why=_line(why)))
    return models, rows


def replace_attention(host: Host, spec: Spec) -> nn.Module:
    """Return a copy of the model with a mixer in place of its attention.

    In a model of another library projections are copied; one of ours has new weights throughout.
    """
    if host.origin != "tokenmix":
        return replace_mixers(host.model, spec, seed=0)[0]
    config: Any = host.model.config
    mixers = tuple(spec if is_softmax(old) else old for old in config.specs())
    with torch.random.fork_rng():
        return build_model(replace(config, mixers=mixers)).to(next(host.model.parameters()).device)


def _call(model: nn.Module, given: Given) -> Callable[[], object]:
    args, named = given
    return lambda: model(*args, **named)


def _line(why: BaseException) -> str:
    return " ".join(str(why).split()).removeprefix("replace_mixers: ")[:240].rstrip(".")
