"""Whether to replace a model's attention: measured shares, the bound they set, the candidates, and the answer."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, log
from pathlib import Path

from torch import nn

from ...errors import MixerError
from ...system.machine import memory_available
from ...types import Options, Record, Spec
from ..bench.cases import BenchSubject
from ..bench.roofline import machine
from ..bench.timing import expected_seconds as expected_turns
from .amdahl import Crossing, expected_seconds, first_length, share_for
from .attention_modules import AttentionModule, modules_of
from .candidates import OWN, Candidate, Tell, measure_candidates, parse_candidates, usual_mixers
from .choice import NO, OPEN, YES, Choice, at_longest, choose, decide, rows_in
from .inputs import Inputs
from .layer_plan import LayerPlan
from .loading import Host, host_of, load_host
from .measuring import FAILURES, Share, measure_share
from .probe import STEPS, Nearness, probe
from .runtimes import Runtime, check_runtime

PROBE = 64  # tokens, or about as many patches: run first, to estimate the rest
ROOM = 0.8  # the part of the free memory that a pass may take
CANDIDATES = 3  # times the seconds of the shares
PREPARING = 6  # times the seconds of the shares, to compile or to export


@dataclass(frozen=True)
class Skipped:
    """A length that was not measured, and why; ``fits``: the model takes it, only time or memory was lacking."""

    length: int
    why: str
    fits: bool = False


@dataclass
class Advice:
    """The results. ``tokenmix.lab.advise.text`` formats them as sentences and tables; ``to_json`` has every number."""

    host: Host
    modules: list[AttentionModule]
    batch: int
    worth: float
    machine: Record
    shares: list[Share] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    rows: list[Candidate] = field(default_factory=list)
    specs: dict[str, Spec] = field(default_factory=dict)  # of the candidates, by label
    nearness: dict[str, Nearness] = field(default_factory=dict)  # of the candidates that were probed, by label
    plan: LayerPlan | None = None  # the layers to replace, where a budget was given
    distilled: Record | None = None
    refused: str | None = None  # why nothing was replaced although it was asked for
    runtime: str = "eager"  # where the model will run

    @property
    def crossover(self) -> Crossing:
        """The length from which the bound reaches ``worth``."""
        return first_length(
            [s.tokens for s in self.shares], [s.mixing_share for s in self.shares], share_for(self.worth)
        )

    @property
    def verdict(self) -> str:
        """Whether to replace: "yes", "no" or "open", as ``choice.decide`` says."""
        return decide(self.shares, self.rows, self.worth, self.runtime, bool(self.left_out))

    @property
    def left_out(self) -> list[int]:
        """The lengths that the model takes, but that were left out for time or memory."""
        return [s.length for s in self.skipped if s.fits]

    @property
    def choice(self) -> Choice | None:
        """The candidate that the rule of the page selects, and why; None where none was measured."""
        return choose(self.rows, self.nearness, self.worth, self.runtime)

    @property
    def longest(self) -> list[Candidate]:
        """The candidates with times at the longest length that has any, the fastest first."""
        return at_longest(rows_in(self.rows, self.runtime))

    @property
    def says_no(self) -> str | None:
        """Why nothing should be replaced, by what was measured; None where replacing pays."""
        if self.plan is not None:
            return None if self.plan.reachable else f"the budget of {self.plan.budget:g}x cannot be reached"
        if self.verdict == YES:
            return None
        bar = f"the bar of {self.worth:g}x"
        if self.verdict == OPEN and self.longest:
            return f"it is open whether a candidate reaches {bar}"
        if self.longest:
            return f"no candidate measured reaches {bar}"
        return (
            f"not even a model without attention reaches {bar}" if self.verdict == NO else "no candidate was measured"
        )


def advise(
    model: str | Host | nn.Module,
    lengths: Sequence[int] | None = None,
    *,
    batch: int = 1,
    seconds: float = 20.0,
    worth: float = 1.25,
    candidates: str | None = None,
    device: str = "cpu",
    options: Options | None = None,
    steps: int = STEPS,
    data: Sequence[object] | None = None,
    runtime: str = "eager",
    inputs: Callable[[int, int], object] | None = None,
    tell: Tell = lambda _: None,
) -> Advice:
    """Measure attention's share of a model's forward pass at some lengths, the largest gain of replacing it, and
    candidates: how fast they are, and how near they come to attention after a short probe.

    Args:
        model: as in ``load_host``, or its result, or a module in eval mode: of a known host, perhaps changed by hand,
            or any other with ``inputs``.
        lengths: tokens; for a vision model, sides of square images. Default: some that the model takes.
        seconds: approximate time for the shares; the candidates take up to three times as long. Lengths that do not fit
            are skipped and reported.
        worth: the bar: the measured speed-up from which replacing pays.
        candidates: "auto", or mixers such as "hydra,aft_local:window=32"; None measures none.
        options: as in ``load_host``.
        steps: of the probe, at most; it takes up to ``seconds`` more. 0: none.
        data: batches for the probe; None: random inputs.
        runtime: "eager", "compile" or "onnx": where the model will run. Model and candidates are measured there first,
            by ``torch.compile`` for each length, or in ONNX Runtime from the file of ``export_onnx``, and then in
            eager torch.
        inputs: (length, batch) -> what a module is called with: a tensor, a tuple or a dict.

    Raises:
        MixerError: for a model that cannot be loaded or has no known attention, for bad arguments, and where no length
            can be measured.
    """
    _check_numbers(steps, batch, seconds, worth)
    check_runtime(runtime, device)
    host = _open(model, inputs, options, device)
    chosen = list(dict.fromkeys(sorted(lengths or host.inputs.usual_lengths(host.size))))
    if not chosen or chosen[0] < 1:
        raise MixerError(f"advise: lengths must be positive, got {list(lengths or [])}.")
    modules = modules_of(host.model, host.name)
    if candidates == "auto":
        candidates = usual_mixers(modules, images=host.inputs.patch is not None)
    subjects = None if candidates is None else parse_candidates(candidates)
    advice = Advice(
        host,
        modules,
        batch,
        worth,
        machine(device),
        runtime=runtime,
        specs={s.label: {"name": s.name, **s.options} for s in subjects or ()},
    )
    _measure_shares(advice, chosen, seconds, device, tell)
    if not advice.shares:
        raise MixerError(
            f"advise: {host.name}: no length could be measured; "
            + "; ".join(f"{s.length:,}: {s.why}" for s in advice.skipped)
            + "."
        )
    for name in dict.fromkeys((runtime, "eager")) if subjects else ():
        _measure_candidates(advice, subjects or [], name, seconds, device, tell)
    if subjects and steps and host.origin != "tokenmix":  # one of ours has new weights: nothing to be near to
        tell(f"probing how near the candidates come, {seconds:.0f} s at most")
        length = advice.shares[0].length
        advice.nearness = probe(host, subjects, length, seconds=seconds, steps=steps, data=data)
    return advice


def _check_numbers(steps: int, batch: int, seconds: float, worth: float) -> None:
    if steps < 0:
        raise MixerError(f"advise: the steps of the probe must be >= 0, got {steps}.")
    if batch < 1 or not 0 < seconds < inf or not 1 < worth < inf:
        given = f"got {batch}, {seconds} and {worth}"
        raise MixerError(f"advise: batch and seconds must be positive and worth larger than 1, all finite, {given}.")


def _open(
    model: str | Host | nn.Module, inputs: Callable[[int, int], object] | None, options: Options | None, device: str
) -> Host:
    if isinstance(model, nn.Module):
        return host_of(model, inputs, device=device)
    if inputs is not None:
        raise MixerError("advise: inputs are for a module; a name or a Host has its own.")
    return load_host(model, options, device=device) if isinstance(model, str) else model


def _measure_candidates(
    advice: Advice, subjects: list[BenchSubject], runtime: str, seconds: float, device: str, tell: Tell
) -> None:
    """Fill in the rows of the candidates at each length; those for which no time is left say so."""
    budgets = plan_budgets([s.seconds for s in advice.shares], len(subjects) + 1, CANDIDATES * seconds)
    rows: list[Candidate] = []
    with tempfile.TemporaryDirectory() as folder:
        prepared = Runtime(runtime, advice.host.inputs, advice.shares[-1].length, Path(folder), PREPARING * seconds)
        # the longest first: there a candidate gains the most, if time to compile runs out
        for share, budget in reversed([*zip(advice.shares, budgets, strict=True)]):
            passes = f"one pass of each takes about {share.seconds * (len(subjects) + 1):.0f} s; give more --seconds"
            why = passes if budget is None else prepared.refusal(share.length, [OWN, subjects[0].label])
            if budget is None or why is not None:
                tell(f"candidates at {share.length:,}: skipped, no time left")
                rows += [Candidate(s.label, share.length, why=why, runtime=runtime) for s in subjects]
                continue
            rows += measure_candidates(
                advice.host,
                subjects,
                share.length,
                batch=advice.batch,
                budget=budget,
                runtime=prepared,
                device=device,
                tell=tell,
            )
    advice.rows += sorted(rows, key=lambda r: r.length)


def plan_budgets(passes: Sequence[float], count: int, seconds: float) -> list[float | None]:
    """Divide the seconds among lengths, by the seconds of a pass there: each gets what it needs, the short ones first,
    and an equal part of what is left; None for a length that no time is left for.

    Half of it is for timing, as timings that do not settle take longer.

    Args:
        count: how many models take turns.
    """
    left, needs = max(seconds, 1.0), []
    for each in passes:
        need = expected_turns([each] * count, 0.0, against=True)[0]
        needs.append(need if need <= left else None)
        left -= need if need <= left else 0.0
    kept = sum(need is not None for need in needs)
    return [None if need is None else left / (2 * kept) for need in needs]


def _measure_shares(advice: Advice, lengths: list[int], seconds: float, device: str, tell: Tell) -> None:
    """Fill in shares and skipped lengths, from the shortest on."""
    host, began = advice.host, time.perf_counter()
    inputs: Inputs = host.inputs
    seen = [] if inputs.tokens(lengths[0]) <= 2 * PROBE else _probe(advice, device)
    for i, n in enumerate(lengths):
        # where the timings of shorter lengths did not settle and took all, each length still has its equal part
        left = max(seconds - (time.perf_counter() - began), seconds / len(lengths))
        why, fits = inputs.refusal(n), False
        if why is None:
            why, fits = _outlook(seen, inputs.tokens(n), left, device), True
        if why is None:
            tell(f"attention at {n:,} {inputs.unit}")
            found = _measure_length(advice, n, left / (len(lengths) - i), device)
            if isinstance(found, Share):
                seen.append(found)
                advice.shares.append(found)
                continue
            why, fits = found, False
        advice.skipped.append(Skipped(n, why, fits))


def _probe(advice: Advice, device: str) -> list[Share]:
    """Measure a short input once, to estimate what longer ones take; return nothing if the model does not take it."""
    inputs = advice.host.inputs
    n = inputs.length(PROBE)
    found = None if inputs.refusal(n) else _measure_length(advice, n, 0.0, device)
    return [found] if isinstance(found, Share) else []


def _measure_length(advice: Advice, n: int, budget: float, device: str) -> Share | str:
    """Return the measurement at one length, or why there is none."""
    host = advice.host
    try:
        host.inputs.fit(host.model, n)
        args, named = host.inputs.make(n, advice.batch)
        return measure_share(
            host.model,
            advice.modules,
            lambda: host.model(*args, **named),
            n,
            host.inputs.tokens(n),
            budget=budget,
            device=device,
        )
    except FAILURES as why:
        return f"the model does not take it ({' '.join(str(why).split())[:160]})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:,.0f} s"


def _outlook(seen: list[Share], tokens: int, left: float, device: str) -> str | None:
    """Return why a length would take too long or too much memory, estimated from shorter ones; None where it fits."""
    if not seen:
        return None
    last = seen[-1]
    takes = 4 * expected_seconds(
        last.seconds, last.mixing, last.tokens, tokens
    )  # a warm-up, two for memory, one that counts
    if takes > left:
        return f"its passes would take about {_seconds(takes)} of {_seconds(left)} that are left; give more --seconds"
    peak, free = expected_peak(seen, tokens), memory_available(device)
    if peak is not None and free is not None and peak > ROOM * free:
        return f"a pass would take up to {peak / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free"
    return None


def expected_peak(seen: list[Share], tokens: int) -> float | None:
    """Estimate the bytes at the peak of a pass at another length.

    It is extrapolated by the power of T between the last two lengths, else attention's part by T^2 and the rest by T.
    """
    last = seen[-1]
    if not last.peak or last.without is None:
        return None
    if len(seen) > 1 and seen[-2].peak and seen[-2].tokens < last.tokens:
        power = log(last.peak / seen[-2].peak) / log(last.tokens / seen[-2].tokens)
        return last.peak * (tokens / last.tokens) ** min(max(power, 1.0), 2.0)
    return expected_seconds(last.peak, max(last.peak - last.without, 0), last.tokens, tokens)
