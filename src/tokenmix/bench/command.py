"""Implement `tokenmix bench`: turn options into a plan, and its results into text, a file and a picture."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import MixerError
from ..functional.backend import BACKENDS
from .cases import LEVELS, SDPA, Subject, parse_subjects
from .flops import DTYPES, Setting
from .peers import PEERS
from .plot import plot
from .revision import find
from .run import Plan, run
from .table import text

OPS = "aft_simple,aft_local:window=32,aft_full,hydra,linear,local"
LENGTHS = {"op": "256,1024,4096", "layer": "256,1024,4096", "decode": "256,1024,4096,16384", "model": "256,1024"}
BATCH = {"op": 4, "layer": 4, "decode": 1, "model": 1}
PASSES = {"forward": ("forward",), "backward": ("both",), "both": ("forward", "both")}
REPEAT = 2.0
"""Seconds between two lines of progress where the terminal cannot overwrite one."""


def bench(
    *,
    ops: str | None,
    backends: str,
    lengths: str | None,
    level: str,
    passes: str,
    batch: int | None,
    dim: int,
    heads: int,
    dtype: str,
    device: str,
    causal: bool,
    layers: int,
    threads: int | None,
    budget: float,
    longest_call: float,
    baseline: str | None,
    against: str | None,
    base: str | None,
    cuda_graph: bool,
    fast_linear: bool,
    json_to: str | None,
    plot_to: Path | None,
) -> int:
    """Plan, run and print. Return 1 if one of our subjects fails the gate, else 0."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    _check(level=(level, LEVELS), dtype=(dtype, tuple(DTYPES)), **{"pass": (passes, tuple(PASSES))}, against=(against or "peers", ("peers",)))
    _check(device=(device, ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)))
    _positive(batch=BATCH[level] if batch is None else batch, dim=dim, heads=heads, layers=layers, threads=1 if threads is None else threads, budget=budget)
    _fits_together(level, passes, against, dim, heads)
    setting = Setting(level, 1, batch or BATCH[level], dim, heads, dtype, device, causal, layers=layers)
    subjects, against_label = chosen(OPS if ops is None else ops, backends, baseline, peers=bool(against))
    which = ("forward",) if level == "decode" else ("both",) if level == "model" and passes == "both" else PASSES[passes]
    plan = Plan(
        subjects,
        parse_lengths(lengths or LENGTHS[level]),
        setting,
        passes=which,
        budget=budget,
        longest_call=longest_call,
        threads=threads,
        baseline=against_label,
        revision=base,
        cuda_graph=cuda_graph,
        fast_linear=fast_linear,
    )
    if plot_to is not None and not plot_to.parent.is_dir():
        raise MixerError(f"bench: the folder {plot_to.parent} of {plot_to.name} does not exist.")
    if base is not None:
        find(base)
    tell = progress()
    tell(f"{len(subjects)} subjects, lengths {lengths or LENGTHS[level]}, about {budget:.0f} s of timing after the gates")
    found = run(plan, tell)
    tell("")
    return _print(found, json_to, plot_to)


def _print(found: dict[str, Any], json_to: str | None, plot_to: Path | None) -> int:
    if json_to == "-":
        print(json.dumps(found, indent=1))
    else:
        if json_to is not None:
            Path(json_to).write_text(json.dumps(found, indent=1) + "\n")
        print(text(found))
    if plot_to is not None:
        plot(found, plot_to)
    return 1 if any(r["status"] == "FAILED" for r in found["rows"]) else 0


def _check(**given: tuple[str, tuple[str, ...]]) -> None:
    for option, (value, known) in given.items():
        if value not in known:
            raise MixerError(f"bench: --{option} {value} is unknown; choose {', '.join(known)}.")


def _positive(**given: float) -> None:
    for option, number in given.items():
        if not 0 < number < float("inf"):
            raise MixerError(f"bench: --{option} must be a positive number, got {number}.")


def _fits_together(level: str, passes: str, against: str | None, dim: int, heads: int) -> None:
    if dim % heads:
        raise MixerError(f"bench: --heads {heads} does not divide --dim {dim}.")
    if level == "decode" and passes == "backward":
        raise MixerError("bench: decoding has no backward pass; leave --pass out.")
    if against and level != "layer":
        raise MixerError("bench: --against peers compares whole layers; add --level layer.")


def chosen(ops: str, backends: str, baseline: str | None, *, peers: bool) -> tuple[list[Subject], str | None]:
    """Return all subjects, sdpa first, each once, and the label of the baseline."""
    wanted = [b.strip() for b in backends.split(",") if b.strip()]
    for name in wanted:
        _check(backends=(name, BACKENDS))
    subjects = [Subject(SDPA)]
    for subject in parse_subjects(ops):
        fixed = subject.backend != "auto" or subject.name == SDPA or subject.name in PEERS
        subjects += [subject] if fixed else [replace(subject, backend=b) for b in wanted]
    if peers:
        subjects += [Subject(name) for name in PEERS]
    label = None
    if baseline is not None:
        parsed = parse_subjects(baseline)
        if not parsed:
            raise MixerError("bench: --baseline needs a name, such as aft_simple@eager.")
        against = parsed[0]
        subjects.append(against)
        label = against.label
    for subject in subjects:
        _check(backends=(subject.backend, BACKENDS))
    return list({s.label: s for s in subjects}.values()), label


def parse_lengths(given: str) -> list[tuple[int, ...]]:
    """Parse lengths such as "256,1024", or grids such as "14x14,28x28"."""
    found = []
    for piece in filter(None, (p.strip() for p in given.split(","))):
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", piece):
            raise MixerError(f"bench: --lengths takes numbers of tokens such as 1024, or grids such as 14x14, got {piece!r}.")
        found.append(tuple(int(n) for n in piece.split("x")))
    if not found:
        raise MixerError("bench: --lengths is empty; write 256,1024 or 14x14,28x28.")
    return list(dict.fromkeys(found))


def progress() -> Callable[[str], None]:
    """Return a function that shows one line of progress on stderr.

    The line is overwritten on a terminal and repeated rarely elsewhere.
    """
    shown = [0.0]

    def tell(line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line[:100]}", end="", file=sys.stderr, flush=True)
        elif line and time.monotonic() - shown[0] > REPEAT:
            shown[0] = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    return tell
