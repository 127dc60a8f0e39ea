"""``make demo``: four small language models, compared at equal training time on one page.

It runs as ``python -m tokenmix.demo``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..advise import advise, load_host
from ..advise.text import findings as advice_findings
from ..advise.text import shares_table
from ..bench import decoding, training_rate
from ..data import open_corpus
from ..errors import MixerError
from ..models import build_model
from ..report import Table, read_run, write_report
from ..system.files import whole_file
from ..train import sample_run, train
from ..train.optim import build_optimizers, learning_rate, set_rates
from .picture import quality_pictures
from .plan import MODELS, Measured, Plan
from .tables import by_length, decode_table, findings, main_table, yardsticks

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

# Start-up, evaluation and measurements take about this many times as long as the trial of one step of each model.
TRIALS = 9
TRIAL_STEPS = 10

NOTES = (
    "Equal training time: each model gets the steps that fit, by a trial before training, and its learning rate goes "
    + "down to 0 at the last of them. All have the same rates, which were not tuned for each.",
    "A result counts as a win at a length when it is better by more than 5 percent.",
)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run the demo."""
    parser = argparse.ArgumentParser(
        prog="python -m tokenmix.demo",
        description="Train four small byte language models and compare them in one page.",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="directory for the runs and report.html")
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="approximate total time; a little more on a fast machine"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    try:
        demo(free_name(given.out), Plan(seed=given.seed), minutes=given.minutes)
    except MixerError as why:
        print(f"demo: {why}", file=sys.stderr)
        return 2
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
    say(
        f"The corpus is the Python standard library, {open_corpus('stdlib').size:,} bytes. "
        + "Timing one step of each model ..."
    )
    took = in_new_process(trial, plan)
    if minutes is not None:
        plan = replace(
            plan,
            seconds=round(
                max(
                    5.0,
                    (60 * minutes - plan.advice_seconds - (1 + TRIALS) * (time.perf_counter() - began)) / len(MODELS),
                )
            ),
        )
    steps = {name: max(plan.evals, int(plan.seconds / seconds)) for name, seconds in took.items()}
    for i, name in enumerate(MODELS, 1):
        say(f"[{i}/{len(MODELS)}] {name}: training for about {plan.seconds:.0f} s, {steps[name]:,} steps ...")
        done = in_new_process(train_one, plan, name, steps[name], out / name)
        say(
            f"      {done['step']:,} steps, {done['valid_bits_per_byte']:.3f} bits per byte, "
            + f"{done['tokens_per_s']:,.0f} tokens/s"
        )
    say("Measuring speed of generation and training by length, all models side by side ...")
    measured = in_new_process(measure, plan)
    say("Running tokenmix advise: should the attention of the trained Transformer be replaced? ...")
    advised, share = in_new_process(advice, plan, out / "attention")
    runs = {name: read_run(out / name) for name in MODELS}
    said = findings(plan, runs, measured)
    tables = [
        main_table(plan, runs, measured),
        by_length("Training speed by sequence length, tokens/s", measured.rates, 0),
        decode_table(measured),
        share,
    ]
    page = write_report(
        [out / name for name in MODELS],
        out / "report.html",
        tables=tables,
        title="tokenmix demo: attention and attention-free mixers, side by side",
        lead=[*said, advised, *busy],
        pictures=quality_pictures(plan, runs, measured),
        notes=NOTES,
    )
    say("\n" + "\n\n".join([tables[0].text(), *said, advised, *busy]))
    say(f"\nTook {time.perf_counter() - began:.0f} s. The page: {page.resolve()}")
    return page


def busy_note() -> list[str]:
    """Return a warning if other work uses the cores that the measurements need.

    It is to be called before the demo's own work counts.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    cores = os.cpu_count() or 1
    if load < 0.5 * cores:
        return []
    return [
        f"The machine was busy with other work at the start (load average {load:.1f} on {cores} cores): "
        "speeds are too low, and not by the same factor for all models."
    ]


def say(text: str) -> None:
    """Print without delay, as the user is watching."""
    print(text, flush=True)


def in_new_process(task: Callable[..., Any], *args: Any) -> Any:
    """Run a task in a new process, so that the memory of one model does not count for another.

    Its threads sleep while they wait: on a machine busy with other work, spinning threads made attention ten times
    slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(task, *args).result()


def trial(plan: Plan) -> dict[str, float]:
    """Measure the seconds of one step of each model, update included."""
    return {name: step_seconds(plan, name) for name in MODELS}


def step_seconds(plan: Plan, name: str) -> float:
    """Return the median time of a few training steps after two to warm up."""
    model: Any = build_model(plan.model(name))
    optimizers, optim = build_optimizers(model, plan.run(name, 100).optim), plan.run(name, 100).optim
    tokens = torch.randint(256, (plan.batch_size, plan.seq_len + 1), generator=torch.Generator().manual_seed(0))
    times = []
    for i in range(2 + TRIAL_STEPS):
        start = time.perf_counter()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
        set_rates(optimizers, learning_rate(i, optim, 100))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - start)
    return median(times[2:])


def train_one(plan: Plan, name: str, steps: int, out: Path) -> dict[str, Any]:
    """Train one row, then let the model write a sample."""
    done = train(plan.run(name, steps), out)
    prompt = b"def "[: max(1, plan.seq_len - plan.sample_bytes)]
    text = sample_run(
        out, n=min(plan.sample_bytes, plan.seq_len - len(prompt)), prompt=prompt, seed=plan.seed, device="cpu"
    )
    with whole_file(out / "samples" / "after_training.txt") as f:
        f.write(text)
    return done


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


def advice(plan: Plan, run: Path) -> tuple[str, Table]:
    """Find out whether the attention of the Transformer in ``run`` should be replaced.

    Returns the advice and a table of the model's parts by length. The model is built for longer inputs than it was
    trained on.
    """
    host = load_host(str(run), {"max_len": max(plan.advice)})
    found = advise(host, plan.advice, seconds=plan.advice_seconds)
    return f"Should the attention of this Transformer be replaced? {advice_findings(found)[0]}", shares_table(found)
