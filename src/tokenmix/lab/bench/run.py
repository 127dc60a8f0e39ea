"""A whole benchmark: limits, gates, then every length and pass with all subjects in turns. The result is one JSON
value.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...errors import MixerError
from ...kernels.fast_linear import fast_linear
from ...system.cuda_graph import capture_graph
from ...system.machine import memory_available, torch_threads
from ...types import Record
from .cases import SDPA, BenchSubject, Prepared, is_causal, needed_bytes, prepare
from .correctness import Verdict, gate
from .flops import Setting, Work
from .peers import PEERS
from .roofline import Limits, machine, probe
from .timing import Sampler, Timing, exponent, measure, peak_memory, sampler

SCHEMA = 1
Tell = Callable[[str], None]
FITS = 0.7
"""The part of the free memory that a call may be estimated to need; calls above it are skipped."""
WRONG = "wrong on adversarial keys"


@dataclass(frozen=True)
class Plan:
    """What to measure. Lengths are numbers of tokens, or grids such as (14, 14)."""

    subjects: list[BenchSubject]
    lengths: list[tuple[int, ...]]
    setting: Setting
    passes: tuple[str, ...] = ("forward", "both")
    budget: float = 60.0
    longest_call: float = 10.0
    threads: int | None = None
    baseline: str | None = None
    revision: str | None = None
    cuda_graph: bool = False
    fast_linear: bool = False


@dataclass
class Entry:
    """The progress of one subject: its verdict, its last time, and why it is no longer measured."""

    subject: BenchSubject
    verdict: Verdict | None = None
    status: str = "ok"
    why: str = ""
    last: dict[str, tuple[int, float]] = field(default_factory=dict)


def run(plan: Plan, tell: Tell = lambda text: None) -> Record:
    """Measure everything that was planned.

    Args:
        tell: called with one line for each step.

    Returns:
        {"schema", "machine", "limits", "setting", "rows", "fits"}, all plain JSON values; times in seconds.
    """
    from .revision import Revision

    s = plan.setting
    with ExitStack() as stack:
        stack.enter_context(torch_threads(plan.threads))
        linear = stack.enter_context(fast_linear()) if plan.fast_linear else None
        other = stack.enter_context(Revision(plan.revision, tell)) if plan.revision else None
        tell("measuring the limits of this machine")
        largest = _largest_probe(plan)
        limits = _limits(plan, largest)
        entries = [Entry(subject) for subject in plan.subjects]
        for i, entry in enumerate(entries):
            tell(f"gate {i + 1} of {len(entries)}: {entry.subject.label} on adversarial inputs")
            for grid in _kinds(plan):
                if entry.status == "ok":
                    _judge(entry, replace(s, grid=grid, backward="both" in plan.passes))
        _skip_duplicates(entries)
        rows = []
        for point, share in _points(plan):
            rows += _measure_point(plan, entries, point, plan.budget * share, other, tell)
            tell("measuring the limits of this machine again")
            limits = limits.best(_limits(plan, largest))
        for row in rows:
            _score(row, limits, s.dtype)
        if other is not None:
            other.check_all_measured(rows)
        setting = {**_describe_setting(plan), "fast_linear": linear and linear._asdict()}
        found = {
            "schema": SCHEMA,
            "machine": machine(s.device),
            "limits": limits.to_json(),
            "setting": setting,
            "rows": rows,
            "fits": fit_exponents(rows),
        }
        return {**found, **({"base": other.about()} if other else {})}


def _kinds(plan: Plan) -> list[tuple[int, ...] | None]:
    """Return what to judge: sequences, and the first of the grids; a mixer may have a form for each."""
    return list({len(length): length if len(length) > 1 else None for length in reversed(plan.lengths)}.values())


def _limits(plan: Plan, largest: int) -> Limits:
    """Measure the limits with a small part of the budget, before each length and pass and once at the end."""
    dtypes = tuple(dict.fromkeys(("float32", plan.setting.dtype)))
    return probe(plan.setting.device, dtypes=dtypes, budget=min(2.0, plan.budget / 20), largest=largest)


def _largest_probe(plan: Plan) -> int:
    """Return the bytes of the largest probe; a small benchmark does not write gigabytes to find its limits."""
    s = plan.setting
    tokens = max(math.prod(length) for length in plan.lengths) * s.batch * s.dim
    return int(max(32 * 2**20, min(2**30, 64.0 * tokens, (memory_available(s.device) or 2**30) / 8)))


def _describe_setting(plan: Plan) -> Record:
    kept = {k: v for k, v in asdict(plan.setting).items() if k not in ("T", "grid", "backward")}
    lengths = ["x".join(map(str, length)) for length in plan.lengths]
    more = {
        "passes": list(plan.passes),
        "budget_s": plan.budget,
        "baseline": plan.baseline,
        "revision": plan.revision,
        "cuda_graph": plan.cuda_graph,
    }
    return {**kept, "lengths": lengths, "subjects": [x.label for x in plan.subjects], **more}


def _judge(entry: Entry, s: Setting) -> None:
    """Run the gate. One of our subjects that fails is not timed; a peer is, and its time is marked."""
    peer = entry.subject.name in (*PEERS, SDPA)
    try:
        entry.verdict = gate(entry.subject, s)
    except (
        MixerError,
        RuntimeError,
        TypeError,
        ValueError,
        ImportError,
        AssertionError,
        AttributeError,
    ) as why:  # a peer may raise anything
        entry.status, entry.why = ("skipped" if isinstance(why, MixerError) else "error"), one_line(why)
        return
    if not entry.verdict.passed:
        entry.status = "wrong" if peer else "FAILED"
        found = entry.verdict
        entry.why = f"{WRONG}: error {found.error:.2g} where {found.tolerance:.2g} is allowed ({found.case})"


def one_line(why: BaseException) -> str:
    """Format an error in one line."""
    text = " ".join(str(why).split())
    return text.removeprefix("bench: ") if isinstance(why, MixerError) else f"{type(why).__name__}: {text[:160]}"


def _skip_duplicates(entries: list[Entry]) -> None:
    """Skip the eager backend of subjects for which ``auto`` is eager too, so that nothing is measured twice."""
    auto = {
        replace(e.subject, backend="auto").label
        for e in entries
        if e.subject.backend == "auto" and e.verdict and e.verdict.path == "eager"
    }
    for e in entries:
        if e.subject.backend == "eager" and e.status == "ok" and replace(e.subject, backend="auto").label in auto:
            e.status, e.why = "skipped", "the same as auto, which is the eager form here"


def _points(plan: Plan) -> list[tuple[Setting, float]]:
    """Return the settings to measure, shorter ones first, each with its share of the budget: longer calls get more of
    it.
    """
    s = plan.setting
    found = []
    for length in sorted(plan.lengths, key=math.prod):
        T, grid = math.prod(length), length if len(length) > 1 else None
        found += [(replace(s, T=T, grid=grid, backward=which == "both"), T**0.5) for which in plan.passes]
    return [(point, weight / sum(w for _, w in found)) for point, weight in found]


def _measure_point(plan: Plan, entries: list[Entry], s: Setting, budget: float, other: Any, tell: Tell) -> list[Record]:
    name = f"{s.level} {'x'.join(map(str, s.grid)) if s.grid else f'T={s.T}'} {pass_name(s)}"
    ready: dict[str, Prepared] = {}
    rows = {e.subject.label: _row(e, s) for e in entries}
    samplers: dict[str, Sampler] = {}
    first: dict[str, float] = {}
    for e in entries:
        label = e.subject.label
        if e.status not in ("ok", "wrong"):
            continue
        tell(f"{name}: preparing {label}")
        try:
            ready[label], first[label] = _prepare_call(plan, e, s)
        except (
            MixerError,
            RuntimeError,
            TypeError,
            ValueError,
            AssertionError,
            MemoryError,
        ) as why:  # OutOfMemoryError is a RuntimeError
            rows[label].update(status="skipped" if isinstance(why, MixerError) else "error", why=one_line(why))
            continue
        samplers[label] = sampler(ready[label].call, device=s.device, scope=e.subject.scope)
        if other is not None and (base := other.sampler(e.subject, s)) is not None:
            samplers[f"{label} base"] = base
    timings = measure(
        samplers, budget=budget, warm=other is not None, known=first, tell=lambda text: tell(f"{name}: {text}")
    )
    for e in entries:
        if e.subject.label in ready:
            label, call = e.subject.label, ready[e.subject.label]
            tell(f"{name}: memory of {label}")
            rows[label] |= _numbers(timings[label], call.work)
            rows[label]["peak_bytes"] = peak_memory(call.call, device=s.device, scope=e.subject.scope)
            e.last[pass_name(s)] = s.T, timings[label].wall
            if f"{label} base" in timings:
                rows[label]["base_wall_s"] = timings[f"{label} base"].wall
                rows[label]["x_base"] = timings[f"{label} base"].wall / timings[label].wall
    ready.clear()
    samplers.clear()
    gc.collect()
    return _ratios(list(rows.values()), plan.baseline)


def pass_name(s: Setting) -> str:
    """Return the name of the pass."""
    return "forward+backward" if s.backward else "forward"


def _row(e: Entry, s: Setting) -> Record:
    subject, place = e.subject, "x".join(map(str, s.grid)) if s.grid else str(s.T)
    known = {
        "subject": subject.label,
        "name": subject.name,
        "options": subject.options,
        "backend": subject.backend,
        "level": s.level,
        "pass": pass_name(s),
    }
    more = {"causal": is_causal(subject, s), "length": place, "T": s.T, "status": e.status, "why": e.why}
    return {
        **known,
        **more,
        "path": e.verdict.path if e.verdict else None,
        "gate": asdict(e.verdict) if e.verdict else None,
    }


def _prepare_call(plan: Plan, e: Entry, s: Setting) -> tuple[Prepared, float]:
    """Prepare a call and make it once; return it and its seconds.

    Raises:
        MixerError: the call would not fit into memory or would take too long.
    """
    kernel = bool(e.verdict and "tokenmix::" in e.verdict.path)
    free, need = memory_available(s.device), needed_bytes(e.subject, s, kernel)
    if free is not None and need > FITS * free:
        raise MixerError(f"needs about {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free.")
    if pass_name(s) in e.last:
        T, seconds = e.last[pass_name(s)]
        likely = seconds * (s.T / T) ** (2 if s.level != "decode" else 1)
        if likely / 2 > plan.longest_call and seconds > 1e-3:
            raise MixerError(f"a call might take {likely:.0f} s; --longest-call {math.ceil(likely / 2)} allows it.")
    with e.subject.scope():
        prepared = prepare(e.subject, s)
        if plan.cuda_graph and s.device == "cuda":
            prepared.call = capture_graph(prepared.call)
    seconds = sampler(prepared.call, device=s.device, scope=e.subject.scope)(1)[0]
    if seconds > plan.longest_call:
        e.last[pass_name(s)] = s.T, seconds
        raise MixerError(f"a call takes {seconds:.0f} s; --longest-call {math.ceil(seconds)} allows it.")
    return prepared, seconds


def _numbers(t: Timing, work: Work) -> Record:
    counted = {"read_bytes": work.read, "written_bytes": work.written, "held_bytes": work.held, "flops": work.flops}
    return {
        "wall_s": t.wall,
        "wall_min_s": t.wall_min,
        "cpu_s": t.cpu,
        "samples": t.samples,
        "calls_per_sample": t.inner,
        **counted,
    }


def _score(row: Record, limits: Limits, dtype: str) -> None:
    """Add the least time this machine takes for the counted work, what sets it, and its share of the time taken."""
    if "wall_s" in row:
        floor, bound = limits.floor(
            Work(row["read_bytes"], row["written_bytes"], row["flops"], row["held_bytes"]), dtype
        )
        row.update(floor_s=floor, bound=bound, share=floor / row["wall_s"])


def _ratios(rows: list[Record], baseline: str | None) -> list[Record]:
    """Add how many times as fast as SDPA, and as the chosen baseline, each row is.

    The ratios are of lower quartiles, of SDPA also of minima and of CPU time.
    """
    for key, label, field_ in (
        ("x_sdpa", SDPA, "wall_s"),
        ("x_sdpa_min", SDPA, "wall_min_s"),
        ("x_sdpa_cpu", SDPA, "cpu_s"),
        ("x_baseline", baseline, "wall_s"),
    ):
        against = next((r for r in rows if r["subject"] == label and "wall_s" in r), None)
        for row in rows:
            if against is not None and row.get(field_, 0.0) > 0:
                row[key] = against[field_] / row[field_]
    return rows


def fit_exponents(rows: list[Record]) -> list[Record]:
    """Fit the exponent of time in length for every subject and pass measured at two lengths or more."""
    series: dict[tuple[str, str], list[Record]] = {}
    for row in rows:
        if "wall_s" in row:
            series.setdefault((row["subject"], row["pass"]), []).append(row)
    found = []
    for (subject, each), points in series.items():
        slope = exponent([p["T"] for p in points], [p["wall_s"] for p in points])
        if slope is not None:
            found.append({"subject": subject, "pass": each, "exponent": slope, "lengths": [p["T"] for p in points]})
    return found
