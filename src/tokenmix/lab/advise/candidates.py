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
from ...types import Options, Record, Spec
from ..bench.cases import BenchSubject, parse_subjects
from ..bench.timing import Timing, expected_seconds, measure, peak_memory, sampler
from .attention_modules import AttentionModule
from .decoding import Decoded, decode
from .loading import Host
from .measuring import FAILURES, SPREAD
from .runtimes import RUNTIMES, Prepared, Runtime

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
        seconds, high: the lower and the upper quartile of a pass.
        speedup: the median of the ratios of two passes, the model's own and the candidate's, timed one after the other.
        least, most: the lower and the upper quartile of these ratios; None: not known.
        saved: how many parameters fewer than with attention the model has.
        runtime: of ``RUNTIMES``.
        note: what else its user should know.
        turns: how many samples were timed.
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
    runtime: str = "eager"
    high: float | None = None
    note: str | None = None
    turns: int | None = None

    @property
    def spread(self) -> float | None:
        """By how much the upper quartile of the ratios is above the lower one, relative to it."""
        return None if self.least is None or self.most is None else self.most / self.least - 1

    @property
    def low_speedup(self) -> float:
        """The lower quartile of the ratios."""
        return self.least or self.speedup or 0.0

    @property
    def high_speedup(self) -> float:
        """The upper quartile of the ratios."""
        return self.most or self.speedup or 0.0

    def reaches(self, worth: float) -> bool:
        """Return whether it was measured to make the model ``worth`` times as fast, by the lower quartile too."""
        return self.mixer != OWN and self.speedup is not None and self.low_speedup >= worth

    def to_json(self) -> Record:
        """Return plain JSON values."""
        decoded = (
            {}
            if self.decoded is None
            else {"state_bytes": self.decoded.state_bytes, "ms_per_token": self.decoded.ms_per_token}
        )
        return {k: v for k, v in vars(self).items() if k != "decoded"} | {"spread": self.spread} | decoded


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
    runtime: Runtime,
    device: str = "cpu",
    tell: Tell = lambda _: None,
) -> list[Candidate]:
    """Measure all candidates at one length in one runtime, each timed in alternation with the unchanged model."""
    models, rows = build_candidates(host, subjects, length)
    given, at = host.inputs.make(length, batch), f"at {length:,}, {RUNTIMES[runtime.name]}"
    passes: dict[str, Prepared] = {}
    first: dict[str, float] = {}
    for i, (label, model) in enumerate(models.items()):
        tell(f"preparing {label} {at}{_preparing_left(runtime, len(models) - i)}")
        try:
            if why := runtime.refusal(length, [label]):
                raise MixerError(why)
            passes[label] = runtime.prepare(label, model, length, given)
            passes[label].call()
            first[label] = sampler(passes[label].call, device=device)(1)[0]
        except FAILURES as why:
            rows.append(Candidate(label, length, why=_line(why)))
            passes.pop(label, None)
    budget = budget if len(passes) > 1 else 0.0  # alone, the model is compared with nothing
    least, most = expected_seconds(list(first.values()), budget, against=True)
    tell(f"timing {len(passes)} models {at}: {least:.0f} to {most:.0f} s")
    timed = measure(
        {label: sampler(made.call, device=device) for label, made in passes.items()},
        budget=budget,
        against=OWN,
        known=first,
        warm=runtime.name == "onnx",  # sessions wait for work by spinning, which slows whatever comes next
        settle=SPREAD,
        tell=tell,
    )
    weights = _parameters(host.model)
    for label, t in timed.items():
        fields = (
            {} if runtime.name != "eager" else _beside_time(host, models[label], passes[label], length, batch, device)
        )
        row = Candidate(label, length, t.wall, high=t.wall_high, turns=t.samples, note=passes[label].note)
        rows.append(replace(row, saved=weights - _parameters(models[label]), **_compare_speed(label, t), **fields))
    order = [OWN, *(s.label for s in subjects)]
    return sorted((replace(r, runtime=runtime.name) for r in rows), key=lambda r: order.index(r.mixer))


def _compare_speed(label: str, t: Timing) -> Options:
    """Return the speed-up over the model's own attention, the median of the ratios, and their quartiles."""
    if label == OWN:
        return {"speedup": 1.0, "least": 1.0, "most": 1.0}
    return dict(zip(("least", "speedup", "most"), t.ratio, strict=True)) if t.ratios else {}


def _beside_time(host: Host, model: nn.Module, made: Prepared, length: int, batch: int, device: str) -> Options:
    """Measure the memory of a pass, and the state and time of one more token."""
    return {"peak": peak_memory(made.call, device=device), "decoded": decode(model, host.inputs, length, batch)}


def _preparing_left(runtime: Runtime, count: int) -> str:
    """Say about how long preparing the rest takes, by the slowest so far, where that is seconds."""
    slowest = max(runtime.prepare_seconds, default=0.0)
    if runtime.name == "compile" and not runtime.prepare_seconds:
        return f", {count} models, each in half a minute to a minute"
    return f", {count} models in about {slowest * count:.0f} s" if slowest > 1 else ""


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


def _line(why: BaseException) -> str:
    return " ".join(str(why).split()).removeprefix("replace_mixers: ")[:240].rstrip(".")
