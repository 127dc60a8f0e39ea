"""`tokenmix bench`: turns its options into a plan, and what was measured into text, a file and a picture."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from ...errors import MixerError
from ...kernels.backend import BACKENDS
from ...system.files import whole_file
from .arguments import check_folder
from .output import progress, say, say_json

if TYPE_CHECKING:
    from ..bench.cases import BenchSubject
    from ..bench.run import Plan

OPS = "aft_simple,aft_local:window=32,aft_full,hydra,linear,local"
LENGTHS = {"op": "256,1024,4096", "layer": "256,1024,4096", "decode": "256,1024,4096,16384", "model": "256,1024"}
BATCH = {"op": 4, "layer": 4, "decode": 1, "model": 1}
PASSES = {"forward": ("forward",), "backward": ("both",), "both": ("forward", "both")}


@dataclass(frozen=True)
class Bench:
    """Measure speed and memory of mixers, with softmax attention and the machine's limits for comparison.

    Mixers that compute wrong results on adversarial inputs are reported instead of timed, and the exit code is then 1.
    """

    ops: str | None = None
    """Mixers to measure, such as aft_local:window=32,hydra:causal=false,attention@eager; `tokenmix list` shows all.
    Default: aft_simple,aft_local:window=32,aft_full,hydra,linear,local."""

    backends: str = "auto"
    """Backends to measure each mixer on, separated by commas: auto, eager, cpu, triton."""

    level: Literal["op", "layer", "decode", "model"] = "op"
    """What one call computes. op: the function of q, k and v; layer: the mixer with its projections;
    decode: one more token after a context; model: a training step of a language model."""

    lengths: str | None = None
    """Lengths in tokens, separated by commas, or grids such as 14x14; for decode, lengths of the context.
    Default: 256,1024,4096; for decode also 16384; for model 256,1024."""

    passes: Annotated[Literal["forward", "backward", "both"], arg(name="pass")] = "both"
    """Passes to time. forward: forward alone; backward: forward and backward together; both: each of these."""

    batch: int | None = None
    """Sequences per call. Default: 4, for decode and model 1."""

    dim: int = 512
    """Features per token."""

    heads: int = 8
    """Heads of the mixers that have heads; must divide --dim."""

    layers: int = 2
    """Layers of the model, at level model."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the tensors."""

    device: str = "auto"
    """Device to measure on: auto, cpu or cuda."""

    causal: bool = True
    """Use the causal form of mixers that have one."""

    threads: int | None = None
    """CPU threads of torch. Default: torch's own setting."""

    budget: float = 60.0
    """Seconds for timing, in addition to the correctness checks and the machine's limits."""

    longest_call: float = 10.0
    """Seconds; a call that takes longer is skipped and reported."""

    baseline: str | None = None
    """One more subject, such as aft_simple@eager, to report ratios against."""

    against: Literal["peers"] | None = None
    """peers: also measure the public implementations that are installed; needs --level layer."""

    base: str | None = None
    """Git revision of tokenmix to time in alternation with this one."""

    cuda_graph: bool = False
    """CUDA: replay calls as graphs."""

    fast_linear: bool = False
    """Let oneDNN compute float32 products if it is faster and as exact; the report says whether it was."""

    keep_memory: bool = True
    """Let the process keep freed memory, as `tokenmix.keep_memory()` does; --no-keep-memory measures the default."""

    json: str | None = None
    """File for everything measured, as JSON; - prints the JSON instead of the table."""

    plot: Path | None = None
    """PNG file for a plot of time against length."""

    def run(self) -> int:
        """Plan, measure and print; 1 if a mixer fails the correctness check."""
        from ..bench.plot import plot
        from ..bench.revision import find
        from ..bench.run import run
        from ..bench.table import text

        plan = make_plan(self)
        check_folder("bench", self.plot)
        if self.base is not None:
            find(self.base)
        tell = progress()
        subjects = f"{len(plan.subjects)} subjects, lengths {self.lengths or LENGTHS[self.level]}"
        tell(f"{subjects}, about {self.budget:.0f} s of timing after the correctness checks")
        found = run(plan, tell)
        tell("")
        if self.json == "-":
            say_json(found)
        else:
            if self.json is not None:
                with whole_file(Path(self.json)) as file:
                    file.write((json.dumps(found, indent=1) + "\n").encode())
            say(text(found))
        if self.plot is not None:
            plot(found, self.plot)
        return 1 if any(row["status"] == "FAILED" for row in found["rows"]) else 0


def make_plan(options: Bench) -> Plan:
    """Return what to measure, or raise MixerError for options that are wrong or do not fit together."""
    import torch

    from ..bench.flops import Setting
    from ..bench.run import Plan

    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    device = devices[-1] if options.device == "auto" else options.device
    _check_known("device", device, devices)
    batch = BATCH[options.level] if options.batch is None else options.batch
    check_positive(batch=batch, dim=options.dim, heads=options.heads, layers=options.layers)
    check_positive(threads=1 if options.threads is None else options.threads, budget=options.budget)
    _check_together(options)
    setting = Setting(
        options.level,
        1,
        batch,
        options.dim,
        options.heads,
        options.dtype,
        device,
        options.causal,
        layers=options.layers,
    )
    subjects, baseline = choose_subjects(options)
    passes = PASSES[options.passes]
    if options.level == "decode":
        passes = ("forward",)
    elif options.level == "model" and options.passes == "both":
        passes = ("both",)
    return Plan(
        subjects,
        parse_lengths(options.lengths or LENGTHS[options.level]),
        setting,
        passes=passes,
        budget=options.budget,
        longest_call=options.longest_call,
        threads=options.threads,
        baseline=baseline,
        revision=options.base,
        cuda_graph=options.cuda_graph,
        fast_linear=options.fast_linear,
    )


def choose_subjects(options: Bench) -> tuple[list[BenchSubject], str | None]:
    """Return all subjects, each once and sdpa first, and the label of the baseline."""
    from ..bench.cases import SDPA, BenchSubject, parse_subjects
    from ..bench.peers import PEERS

    backends = [b.strip() for b in options.backends.split(",") if b.strip()]
    for name in backends:
        _check_known("backends", name, BACKENDS)
    subjects = [BenchSubject(SDPA)]
    for subject in parse_subjects(OPS if options.ops is None else options.ops):
        fixed = subject.backend != "auto" or subject.name == SDPA or subject.name in PEERS
        subjects += [subject] if fixed else [replace(subject, backend=b) for b in backends]
    if options.against == "peers":
        subjects += [BenchSubject(name) for name in PEERS]
    label = None
    if options.baseline is not None:
        parsed = parse_subjects(options.baseline)
        if not parsed:
            raise MixerError("bench: --baseline needs a name, such as aft_simple@eager.")
        subjects.append(parsed[0])
        label = parsed[0].label
    for subject in subjects:
        _check_known("backends", subject.backend, BACKENDS)
    return list({s.label: s for s in subjects}.values()), label


def parse_lengths(given: str) -> list[tuple[int, ...]]:
    """Return the lengths in "256,1024", or the grids in "14x14,28x28"."""
    found = []
    for piece in filter(None, (p.strip() for p in given.split(","))):
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", piece):
            raise MixerError(
                f"bench: --lengths takes numbers of tokens such as 1024, or grids such as 14x14, got {piece!r}."
            )
        found.append(tuple(int(n) for n in piece.split("x")))
    if not found:
        raise MixerError("bench: --lengths is empty; write 256,1024 or 14x14,28x28.")
    return list(dict.fromkeys(found))


def check_positive(**given: float) -> None:
    """Refuse options that are not positive finite numbers."""
    for option, number in given.items():
        if not 0 < number < float("inf"):
            raise MixerError(f"bench: --{option} must be a positive number, got {number}.")


def _check_known(option: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise MixerError(f"bench: --{option} {value} is unknown; choose {', '.join(known)}.")


def _check_together(options: Bench) -> None:
    """Refuse options that exclude each other."""
    if options.dim % options.heads:
        raise MixerError(f"bench: --heads {options.heads} does not divide --dim {options.dim}.")
    if options.level == "decode" and options.passes == "backward":
        raise MixerError("bench: decoding has no backward pass; leave --pass out.")
    if options.against is not None and options.level != "layer":
        raise MixerError("bench: --against peers compares whole layers; add --level layer.")
