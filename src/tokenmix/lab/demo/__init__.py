"""``make demo``: small language models, compared after equal training time on one page.

It runs as ``python -m tokenmix.lab.demo``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from ...errors import MixerError
from ...models import build_model
from ...system.machine import busy_cores
from ...system.malloc import keep_memory_here
from ..advise import advise, load_host
from ..advise.text import candidate_tables, shares_table
from ..advise.text import findings as advice_findings
from ..bench import decoding, training_rate
from ..data import open_corpus
from ..report import Run, Table, read_run, write_report
from .lanes import Lanes, lanes_for, run_alone
from .picture import pictures
from .plan import CANDIDATES, MODELS, Measured, Plan
from .tables import by_length, decode_table, findings, main_table, yardsticks
from .training import PROMPT, schedules, train_all, training_seconds, trial

__all__ = [
    "MODELS",
    "Measured",
    "Plan",
    "by_length",
    "decode_table",
    "demo",
    "findings",
    "main",
    "main_table",
    "yardsticks",
]

MEASURING = 45.0
"""About how many times as long as one step of every model the measurements after training take."""
SHARES = 4
"""The part of the time for ``tokenmix advise`` that attention's shares take; candidates take three times as much."""
STARTING = 25.0
"""Seconds for the starts of processes, the samples and the page."""

NOTES = (
    "Equal training time: each model gets the steps that fit, by a trial before training, and its learning rate goes "
    + "down to 0 at the last of them. The learning rate of each is the best of four that a sweep tried; "
    + "docs/quality.md has its table, with AFT-simple among the rows.",
    "Speeds within 5 percent of the best are named together with it.",
)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run the demo."""
    if argv is None:  # a process of its own
        keep_memory_here()
    parser = argparse.ArgumentParser(
        prog="python -m tokenmix.lab.demo",
        description=f"Train {len(MODELS)} small byte language models and compare them in one page.",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="directory for the runs and report.html")
    parser.add_argument("--minutes", type=float, default=5.5, help="approximate total time")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    try:
        demo(free_name(given.out), Plan(seed=given.seed), minutes=given.minutes)
    except MixerError as why:
        print(f"demo: {why}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("demo: stopped; no process is left running.", file=sys.stderr)
        return 130
    return 0


def free_name(out: Path) -> Path:
    """Return ``out``, or ``out-2``, ``out-3`` ... so that earlier demos are not overwritten."""
    names = [out, *(out.with_name(f"{out.name}-{i}") for i in range(2, 1000))]
    return next(p for p in names if not p.exists())


def demo(out: Path, plan: Plan, *, minutes: float | None = None) -> Path:
    """Train and measure the models, write the page, print the table. Returns the page's path.

    With ``minutes``, the training time is set so that everything takes about as long.
    """
    began, busy = time.perf_counter(), busy_note()
    lanes = lanes_for(len(MODELS), torch.get_num_threads())
    say(
        f"The corpus is the Python standard library, {open_corpus('stdlib').size:,} bytes. "
        + f"Timing a step of each of {len(MODELS)} models, {describe_lanes(lanes)} ..."
    )
    took = trial(plan, lanes)
    if minutes is not None:
        after = MEASURING * sum(took.values()) / lanes.count + plan.advice_seconds + STARTING
        left = 60 * minutes - (time.perf_counter() - began) - after
        plan = replace(plan, seconds=round(max(5.0, training_seconds(plan, took, lanes, left))))
    steps = schedules(plan, took, plan.seconds)
    listed = ", ".join(f"{name} {schedule.steps:,}" for name, schedule in steps.items())
    say(f"Training each for about {plan.seconds:.0f} s, {describe_lanes(lanes)}. Steps: {listed}.")
    for name, done in train_all(plan, steps, lanes, out, say).items():
        say(
            f"{name}: {done['valid_bits_per_byte']:.3f} bits per byte on unseen text, {done['step']:,} steps in "
            + f"{done['seconds']:.0f} s"
        )
    say("Measuring speed of generation and training by length, with nothing beside it ...")
    measured = run_alone(measure, plan)
    say("Running tokenmix advise: should the attention of the trained Transformer be replaced? ...")
    advised = run_alone(advice, plan, out / "attention")
    runs = {name: read_run(out / name) for name in MODELS}
    page = write_page(out, plan, runs, measured, advised, busy)
    say(f"\nTook {time.perf_counter() - began:.0f} s. The page: {page.resolve()}")
    return page


def write_page(
    out: Path, plan: Plan, runs: dict[str, Run], measured: Measured, advised: tuple[str, list[Table]], busy: list[str]
) -> Path:
    """Write the page, print its main table and its findings, and return its path."""
    said = [*findings(plan, runs, measured), advised[0], *busy]
    tables = [
        main_table(plan, runs, measured),
        by_length("Training speed by sequence length, tokens/s", measured.rates, 0),
        decode_table(measured),
        *advised[1],
    ]
    page = write_report(
        [out / name for name in MODELS],
        out / "report.html",
        tables=tables,
        title="tokenmix demo: attention and attention-free mixers, side by side",
        lead=said,
        pictures=pictures(plan, runs, measured),
        samples_first=f"Unedited, after {PROMPT.decode()!r}, as many bytes as the models were trained on at a time.",
        notes=NOTES,
        compare=False,  # by plan, the models train for the same time and not for the same steps
    )
    say("\n" + "\n\n".join([tables[0].text(), *said]))
    return page


def describe_lanes(lanes: Lanes) -> str:
    """Say how many models train at a time."""
    return f"{lanes.count} at a time with {lanes.threads} thread{'s' if lanes.threads > 1 else ''} each"


def busy_note() -> list[str]:
    """Return a warning if other work uses the cores that the measurements need.

    It is to be called before the demo's own work begins.
    """
    busy, cores = busy_cores(), os.cpu_count() or 1
    if busy is None or busy < 0.25 * cores:
        return []
    return [
        f"The machine was busy with other work at the start ({busy:.1f} of {cores} cores): "
        "speeds are too low, and not by the same factor for all models."
    ]


def say(text: str) -> None:
    """Print without delay, as the user is watching."""
    print(text, flush=True)


def measure(plan: Plan) -> Measured:
    """Measure generation after each context, and forward and backward at each length.

    Weights are random, as only time and size are measured.
    """
    found = Measured()
    models = {name: build_model(plan.model(name, max_len=max(plan.contexts) + 256)) for name in MODELS}
    for n in plan.contexts:
        for name, model in models.items():
            found.decode.setdefault(name, {})[n] = decoding(model, n)
    models = {name: build_model(plan.model(name, max_len=max(plan.lengths))) for name in MODELS}
    for n in plan.lengths:
        batch = max(1, max(plan.lengths) // n)
        for name, model in models.items():
            found.rates.setdefault(name, {})[n] = training_rate(model, n, batch_size=batch, repeats=2)
    return found


def advice(plan: Plan, run: Path) -> tuple[str, list[Table]]:
    """Find out whether the attention of the Transformer in ``run`` should be replaced, by the mixers that the other
    models consist of.

    Returns the answer, and the tables of the model's parts and of the candidates by length. The model is built for
    longer inputs than it was trained on.
    """
    host = load_host(str(run), {"max_len": max(plan.advice)})
    found = advise(host, plan.advice, seconds=plan.advice_seconds / SHARES, candidates=",".join(CANDIDATES))
    said = f"Should the attention of this Transformer be replaced? {advice_findings(found)[0]}"
    return said, [shares_table(found), *candidate_tables(found)]
