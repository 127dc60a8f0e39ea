"""The demo's training: every model for the same steps, side by side, after a trial that says how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F

from ...models import build_model
from ...system.files import whole_file
from ...types import Record
from ..bench.timing import measure, sampler
from ..train import sample_run, train
from ..train.optim import build_optimizers, update
from ..train.rundir import RunDir
from .lanes import Lanes, side_by_side
from .plan import MODELS, Plan

PROMPT = b"def "
LONGER = 1.3
"""Time of a step while training, as a multiple of the trial's fastest: batches, logs, evaluations, waiting."""


def trial(plan: Plan, lanes: Lanes) -> dict[str, float]:
    """Measure the seconds of one step of each model, while as many train beside it as later on.

    Only the estimate of the whole time depends on it.
    """
    tasks = {f"trial {i + 1}": (fastest_steps, (plan,)) for i in range(lanes.count)}
    found = side_by_side(lanes, tasks).values()
    return {name: min(took[name] for took in found) for name in MODELS}


def fastest_steps(plan: Plan) -> dict[str, float]:
    """Return the seconds of the fastest training step of each model, update included, over ``plan.trial_seconds``."""
    steps = {name: sampler(partial(next, training_steps(plan, name))) for name in MODELS}
    return {name: timing.wall_min for name, timing in measure(steps, budget=plan.trial_seconds).items()}


def training_steps(plan: Plan, name: str) -> Iterator[None]:
    """Make one training step of a model whenever the next item is asked for, without end."""
    model, optim = build_model(plan.model(name)), plan.run(name, 100).optim
    optimizers = build_optimizers(model, optim)
    tokens = torch.randint(256, (plan.batch_size, plan.seq_len + 1), generator=torch.Generator().manual_seed(0))
    for step in count():
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        update(model, optimizers, optim, min(step, 99), 100)
        yield


def train_all(plan: Plan, lanes: Lanes, out: Path, say: Callable[[str], None]) -> dict[str, Record]:
    """Train all models into folders of ``out``, with a line about those that train every ten seconds."""
    began = time.perf_counter()

    def watch(names: list[str]) -> None:
        shown = [told for name in names if (told := progress(out / name, plan.steps)) is not None]
        if shown:
            say(f"  {time.perf_counter() - began:4.0f} s   {'   '.join(shown)}")

    tasks = {name: (train_one, (plan, name, out / name)) for name in MODELS}
    return side_by_side(lanes, tasks, watch=watch)


def progress(run: Path, steps: int) -> str | None:
    """Say how far a run has come, by the last line that it logged; None before the first."""
    last = next((line for line in reversed(RunDir(run).read_metrics()) if line["kind"] == "train"), None)
    return None if last is None else f"{run.name} {last['step'] / steps:.0%}, {last['bpb']:.2f} bits"


def train_one(plan: Plan, name: str, out: Path) -> Record:
    """Train one row, then let the model write a sample."""
    done = train(plan.run(name, plan.steps), out, verbose=False)
    prompt = PROMPT[: plan.seq_len - 1]
    text = sample_run(
        out, n=min(plan.sample_bytes, plan.seq_len - len(prompt)), prompt=prompt, seed=plan.seed, device="cpu"
    )
    with whole_file(out / "samples" / "after_training.txt") as f:
        f.write(text)
    return done
