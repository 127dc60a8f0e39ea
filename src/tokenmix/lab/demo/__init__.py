"""``make demo``: small language models, compared after equal text on one page.

It runs as ``python -m tokenmix.lab.demo``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import product
from pathlib import Path

import torch

from ...errors import MixerError
from ...models import build_model
from ...system.machine import busy_cores
from ...system.malloc import keep_memory_here
from ..bench import decoding
from ..data import open_corpus
from ..report import Run, read_run, write_report
from .lanes import lanes_for, run_alone
from .picture import pictures
from .plan import MODELS, Measured, Plan
from .tables import decode_table, findings, main_table, yardsticks
from .training import LONGER, PROMPT, train_all, trial

__all__ = [
    "MODELS",
    "Measured",
    "Plan",
    "decode_table",
    "demo",
    "findings",
    "main",
    "main_table",
    "yardsticks",
]

MEASURING = 60.0
"""About how many times as long as one step of every model the measurements after training take."""
ROUNDS = 3
"""Times that generation is measured."""
STARTING = 30.0
"""Seconds for the starts of processes, the samples and the page."""

NOTES = (
    "Equal text: each model gets the same steps on the same batches, and its learning rate goes down to 0 at the last "
    + "of them. The learning rate of each is the best of four that a sweep tried; docs/quality.md has its table.",
    "Times hold for this machine and its load; the sentences above name none.",
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
    parser.add_argument("--steps", type=int, default=Plan.steps, help="updates of each model")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    try:
        demo(free_name(given.out), Plan(seed=given.seed, steps=given.steps))
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


def demo(out: Path, plan: Plan) -> Path:
    """Train and measure the models, write the page, print the table. Returns the page's path."""
    began, busy = time.perf_counter(), busy_note()
    lanes = lanes_for(len(MODELS), torch.get_num_threads())
    say(
        f"The corpus is the Python standard library, {open_corpus('stdlib').size:,} bytes. Timing a step of each of "
        + f"{len(MODELS)} models, {lanes.count} at a time ..."
    )
    took = trial(plan, lanes)
    left = LONGER * plan.steps * sum(took.values()) / lanes.count + MEASURING * sum(took.values()) + STARTING
    say(f"Training each for {plan.steps:,} steps, {lanes.count} at a time. All takes about {left / 60:.0f} minutes.")
    for name, done in train_all(plan, lanes, out, say).items():
        say(f"{name}: {done['valid_bits_per_byte']:.3f} bits per byte on unseen text, in {done['seconds']:.0f} s")
    say("Measuring the speed of generation, with nothing beside it ...")
    measured = run_alone(measure, plan)
    page = write_page(out, plan, {name: read_run(out / name) for name in MODELS}, measured, busy)
    say(f"\nTook {time.perf_counter() - began:.0f} s. The page: {page.resolve()}")
    return page


def write_page(out: Path, plan: Plan, runs: dict[str, Run], measured: Measured, busy: list[str]) -> Path:
    """Write the page, print its main table and its findings, and return its path."""
    said = [*findings(plan, runs, measured), *busy]
    tables = [main_table(plan, runs, measured), decode_table(measured)]
    page = write_report(
        [out / name for name in MODELS],
        out / "report.html",
        tables=tables,
        title="What do attention and mixers without it cost, and what do they learn from the same text?",
        lead=said,
        pictures=pictures(plan, runs, measured),
        samples_first=f"Unedited, after {PROMPT.decode()!r}, as many bytes as the models were trained on at a time.",
        notes=NOTES,
        compare=False,
        caution=False,  # the findings say it
    )
    say("\n" + "\n\n".join([tables[0].text(), *said]))
    return page


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
    """Measure generation after each context, in turns: of each model and context the fastest round counts.

    Weights are random, as only time and size are measured. What else the machine does only makes a round slower, and
    seldom all of them.
    """
    found = Measured({name: {} for name in MODELS})
    models = {name: build_model(plan.model(name, max_len=max(plan.contexts) + 256)) for name in MODELS}
    for _, n, (name, model) in product(range(ROUNDS), plan.contexts, models.items()):
        new, by = decoding(model, n), found.decode[name]
        by[n] = min(by.get(n, new), new, key=lambda each: each.ms_per_token)
    return found
