"""What replacing gained and lost: the teacher, the replaced and the distilled model on the same data and lengths."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...errors import MixerError
from ...hosts.surgery.quality import Quality, measure_quality
from ...system.text import Table, number, size
from ...types import Record
from ..bench.timing import measure, peak_memory, sampler
from .candidates import Tell
from .decoding import Decoded, decode
from .inputs import Inputs, inputs_of

BYTES_OF_NOISE, PART_OF_NOISE = 2**20, 0.1
"""Peaks are read from the process's resident memory, in pages and the C library's pools: less is noise."""


@dataclass(frozen=True)
class Speed:
    """What one model takes at one length.

    Args:
        seconds, seconds_high: of a pass, the lower and the upper quartile, timed in turns with the other models.
        peak: bytes of a pass at its peak beyond the weights, the smaller and the larger of two; None: not reported.
        decoded: bytes of state and time per generated token; None: it does not generate.
    """

    seconds: float
    seconds_high: float
    peak: tuple[int, int] | None
    decoded: Decoded | None

    def faster_than(self, other: Speed) -> bool:
        """Return whether the quartiles of the two do not overlap and these are the smaller ones."""
        return self.seconds_high < other.seconds

    def leaner_than(self, other: Speed) -> bool:
        """Return whether its peak is lower by more than two measurements of it differ, a MiB, and a tenth."""
        if self.peak is None or other.peak is None:
            return False
        return self.peak[1] + max(BYTES_OF_NOISE, PART_OF_NOISE * other.peak[0]) < other.peak[0]


@dataclass(frozen=True)
class Comparison:
    """Hold the models' scores and speeds; the first model is the one before, the last the one after.

    Args:
        quality: by model; empty where no data was given.
        speeds: by length, then by model.
        unit: what a length counts: tokens or pixels.
    """

    names: tuple[str, ...]
    quality: dict[str, Quality]
    speeds: dict[int, dict[str, Speed]]
    unit: str = "tokens"
    batch: int = 1

    def table(self) -> Table:
        """Build the table: a row for each model at each length."""
        measure = self.quality[self.names[0]].measure if self.quality else ""
        streams = any(s.decoded for by_name in self.speeds.values() for s in by_name.values())
        columns = ["model", *([measure] if measure else []), *([self.unit, "ms a pass", "peak"] if self.speeds else [])]
        columns += ["state", "ms a token"] if streams else []
        rows = []
        for length in self.speeds or (None,):
            for name in self.names:
                row = [name, *([self.quality[name].text()] if measure else [])]
                rows.append(row + ([] if length is None else _cells(length, self.speeds[length][name], streams)))
        notes = ["Better is lower for perplexity, higher for agreement and cosine with the teacher."] if measure else []
        if self.speeds:
            notes.append(
                f"Batch {self.batch}; ms a pass: quartiles of passes in turns; peak: memory beyond the weights."
            )
        return Table("Gained and lost", columns, rows, notes)

    def sentence(self) -> str:
        """Say in one sentence what the last model does worse and better than the first, and what is noise."""
        before, after = self.names[0], self.names[-1]
        found: dict[str, list[str]] = {"worse": [], "better": [], "same": []}
        if self.quality:
            old, new = self.quality[before], self.quality[after]
            change = new.change(old)
            told = f" {new.text()} instead of {old.text()}" if change != "same" else ""
            found[change].append(f"{new.measure}{told}")
        for length, speeds in self.speeds.items():
            for kind, said in _changes(speeds[before], speeds[after]):
                found[kind].append(f"{said} at {length:,} {self.unit}")
        titles = {"worse": "worse than before", "better": "better", "same": "no difference beyond noise"}
        said = "; ".join(f"{title}: {', '.join(found[kind])}" for kind, title in titles.items() if found[kind])
        return f"{after}, {said}." if found["worse"] else f"{after}, nothing is worse than before beyond noise; {said}."

    def text(self) -> str:
        """Format table and sentence for a terminal."""
        return f"{self.table().text()}\n{self.sentence()}"

    def to_json(self) -> Record:
        """Return plain JSON values: scores, seconds and bytes by model, and the sentence."""
        return {
            "measure": self.quality[self.names[0]].measure if self.quality else None,
            "quality": {name: q.value for name, q in self.quality.items()},
            "unit": self.unit,
            "batch": self.batch,
            "speeds": [
                {"length": n, "model": name, **_numbers(s)} for n, by in self.speeds.items() for name, s in by.items()
            ],
            "text": self.sentence(),
        }


def compare(
    models: Mapping[str, nn.Module],
    batches: Sequence[object] | None,
    lengths: Sequence[int] = (),
    *,
    inputs: Inputs | None = None,
    batch: int = 1,
    seconds: float = 10.0,
    tell: Tell = lambda _: None,
) -> Comparison:
    """Compare a model before and after its attention was replaced: quality on held-out data, speed and memory.

    Args:
        models: by name, the one before first: ``{"teacher": bert, "replaced": hybrid, "distilled": taught}``.
        batches: held-out data, each a dict of keyword arguments, a tuple or a tensor; None: quality is left out.
        lengths: tokens, or sides of images, at which passes are timed.
        inputs: how the models are called at a length; None: as ``advise`` would call the first.
        seconds: approximate time for all lengths together.

    Returns:
        The comparison: ``print(found.text())`` shows the table and the sentence.

    Raises:
        MixerError: for fewer than two models, a model of which any part is in training mode, no batches, or a length
            that a model refuses.
    """
    if len(models) < 2 or (batches is None and not lengths):
        given = f"{len(models)} models, {'no' if batches is None else 'some'} data and {len(lengths)} lengths"
        raise MixerError(f"compare: expects two models or more, and data or lengths, got {given}.")
    if batch < 1 or any(n < 1 for n in lengths):
        raise MixerError(f"compare: batch and lengths must be >= 1, got {batch} and {list(lengths)}.")
    if training := [name for name, model in models.items() if any(m.training for m in model.modules())]:
        raise MixerError(f"compare: {training[0]} is in training mode; call its eval() first.")
    if batches is not None and not len(batches):
        raise MixerError("compare: batches is empty, and over no data every model looks the same; give one at least.")
    tell("scoring on held-out data")
    quality = {} if batches is None else measure_quality(models, batches)
    first = next(iter(models.values()))
    device = next((p.device.type for p in first.parameters()), "cpu")
    how = inputs if inputs is not None or not lengths else inputs_of(first, "the first model")
    if how is not None and how.patch is not None:  # fitting a model to other images changes it
        models = copy.deepcopy(dict(models))
    speeds = {}
    for length in lengths:
        assert how is not None
        if why := how.refusal(length):
            raise MixerError(f"compare: length {length:,}: {why}; leave it out.")
        tell(f"timing {len(models)} models at {length:,} {how.unit}")
        speeds[length] = _speeds(models, how, length, batch, seconds / len(lengths), device)
    return Comparison(tuple(models), quality, speeds, "tokens" if how is None else how.unit, batch)


@torch.no_grad()
def _speeds(
    models: Mapping[str, nn.Module], inputs: Inputs, length: int, batch: int, budget: float, device: str
) -> dict[str, Speed]:
    for model in models.values():
        inputs.fit(model, length)
    args, named = inputs.make(length, batch)
    calls = {name: (lambda m=model: m(*args, **named)) for name, model in models.items()}
    timed = measure({name: sampler(call, device=device) for name, call in calls.items()}, budget=budget)
    found = {}
    for name, call in calls.items():
        peaks = [peak_memory(call, device=device) for _ in range(2)]
        known = [p for p in peaks if p is not None]
        found[name] = Speed(
            timed[name].wall,
            timed[name].wall_high,
            (min(known), max(known)) if known else None,
            decode(models[name], inputs, length, batch),
        )
    return found


def _changes(before: Speed, after: Speed) -> list[tuple[str, str]]:
    """Return what changed between two models at one length: worse, better or same, and in what."""
    times = f"{before.seconds / after.seconds:.2f}x as fast"
    kind = "better" if after.faster_than(before) else "worse" if before.faster_than(after) else "same"
    found = [(kind, times if kind != "same" else "speed")]
    if before.peak and after.peak:
        kind = "better" if after.leaner_than(before) else "worse" if before.leaner_than(after) else "same"
        told = f"peak memory {size(after.peak[0])} instead of {size(before.peak[0])}"
        found.append((kind, told if kind != "same" else "peak memory"))
    if before.decoded and after.decoded and before.decoded.state_bytes != after.decoded.state_bytes:
        old, new = before.decoded.state_bytes, after.decoded.state_bytes
        found.append(("better" if new < old else "worse", f"state {size(new)} instead of {size(old)}"))
    return found


def _cells(length: int, speed: Speed, streams: bool) -> list[str]:
    low, high = 1e3 * speed.seconds, 1e3 * speed.seconds_high
    cells = [f"{length:,}", f"{low:,.2f} to {high:,.2f}", size(speed.peak[0] if speed.peak else None)]
    if not streams:
        return cells
    decoded = speed.decoded
    return [*cells, *([size(decoded.state_bytes), number(decoded.ms_per_token, 2)] if decoded else ["none", "none"])]


def _numbers(speed: Speed) -> Record:
    state = speed.decoded
    return {
        "seconds": speed.seconds,
        "seconds_high": speed.seconds_high,
        "peak": speed.peak[0] if speed.peak else None,
        "state_bytes": state.state_bytes if state else None,
        "ms_per_token": state.ms_per_token if state else None,
    }
