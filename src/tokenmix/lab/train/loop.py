"""The training loop, resumable bit for bit."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import torch
from torch import nn

from ...errors import MixerError
from ...mixers import aux_losses
from ...models import evaluation_mode
from ...system.checkpoint import list_steps, load_checkpoint, prune, save_checkpoint
from ...system.machine import autocast, peak_mib, reset_peak
from ...types import Record
from .config import RunConfig, check_unchanged, fixed_fields
from .init_from import extra_losses, start_from
from .optim import Average, build_optimizers, load_optimizers, optimizer_tensors, update
from .own import OwnTask, Parts
from .progress import bar
from .rundir import RunDir
from .runs import eval_line, load_weights
from .shards import of_parameters, save_shards
from .sinks import Sink, open_sinks
from .stopping import NAMES, asked_to_stop, resume_command
from .task import Task, call_model, first_of, parts_of, zero_loss
from .tasks import open_task
from .world import World

EMPTY_EVAL = 4
"""Fields of the line of an evaluation that has no score: kind, split, step, seconds."""


class Diverged(MixerError):
    """The loss of a run is no longer finite."""


@dataclass
class Progress:
    """The counters of a run: everything in a checkpoint that is not a tensor."""

    step: int = 0
    seconds: float = 0.0
    loss_count: int = 0
    best_step: int | None = None
    best_score: float | None = None
    config: Record | None = None
    own: Any = None
    scaler: Record | None = None


class Trainer:
    """One process that trains in one run directory, alone or with others, starting from ``progress``."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDir,
        device: torch.device,
        *,
        verbose: bool | None = None,
        limits: dict[int, float] | None = None,
        world: World | None = None,
        parts: Parts | None = None,
    ):
        self.world, self.parts = world or World(), parts or Parts()
        self.config, self.run_dir, self.device = config, run, device
        self.verbose = verbose if self.world.first else False
        self.limits, self.hopeless = limits or {}, False
        new = not (run.path / "config.json").is_file()
        own = self.parts.batches is not None
        self.task = OwnTask(config, parts=parts) if own else open_task(config, None if new else run.path)
        torch.manual_seed(config.train.seed)
        self.model = self.parts.build_model(config).to(device)
        if config.train.init is not None:
            start_from(self.model, config.train.init)
        self.world.check(config, self.task, self.model)
        self.facts = model_facts(self.model, self.task if self.parts.model is None else None) if new else {}
        self.world.spread(self.model)
        self.forward: Any = self.world.compile(self.model) if config.train.compile else self.model
        self.optimizers = self._build_optimizers()
        scaled = config.train.precision == "fp16"
        self.scaler = torch.amp.GradScaler(device.type) if scaled else None  # type: ignore[attr-defined]  # of torch.amp
        self.average = Average(self.model, config.optim.ema) if config.optim.ema else None
        self.extra = extra_losses(config, self.model, device)
        self.progress = Progress(config=fixed_fields(config))
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.aux: dict[str, torch.Tensor] = {}  # auxiliary losses of the last batch
        self.tick = self.logged_at = 0.0
        self.sinks: list[Sink] = []

    def _build_optimizers(self) -> list[torch.optim.Optimizer]:
        if self.parts.optimizer is None:
            return build_optimizers(self.model, self.config.optim)
        return self.parts.build_optimizer(self.model)

    def load(self, step: int) -> None:
        """Restore the state saved in the checkpoint of ``step``."""
        names = ["model", "optimizer", "rng"] + ["ema"] * (self.average is not None)
        names += ["own"] * bool(self.config.own)
        like: dict[str, Callable[[str], torch.Tensor | None]] | None = None
        if self.world.sharded:
            like = {"model": self.model.state_dict().get, "ema": self.model.state_dict().get}
            like["optimizer"] = of_parameters(self.model)
        groups, progress = load_checkpoint(self.run_dir.checkpoints, step, *names, like=like)
        check_unchanged(self.config, progress.get("config"), self.run_dir.path / "config.json")
        load_weights(self.model, groups["model"], self.run_dir.path)
        if self.average is not None:
            self.average.load(groups["ema"])
        load_optimizers(self.model, self.optimizers, groups["optimizer"])
        self.parts.load_state(groups.get("own", {}), progress.get("own"), self.optimizers)
        self.progress = Progress(**{**progress, "config": fixed_fields(self.config)})
        if self.scaler is not None and self.progress.scaler:
            self.scaler.load_state_dict(self.progress.scaler)
        # A later best may have replaced this one before the run was reset to an earlier step.
        if self.progress.best_step not in list_steps(self.run_dir.checkpoints):
            self.progress.best_step = self.progress.best_score = None
        self.loss_sum = groups["rng"]["loss_sum"].to(self.device)
        torch.set_rng_state(groups["rng"]["cpu"])
        if "cuda" in groups["rng"] and self.device.type == "cuda":
            torch.cuda.set_rng_state(groups["rng"]["cuda"], self.device)

    def run(self) -> Record:
        """Train to the end and return a summary of the run."""
        self.model.train()
        reset_peak(self.device)
        metric, lines = self.task.metric, self.run_dir.read_metrics() if self.limits else []
        self.hopeless = any(self.misses_limit(x["step"], x[metric]) for x in lines if x["kind"] == "eval")
        opened: contextlib.AbstractContextManager[list[Sink]] = nullcontext([])
        if self.world.first:
            opened = open_sinks(self.run_dir, self.config.train, self.progress.step)
        with (
            opened as self.sinks,
            bar(self.verbose) as show,
            asked_to_stop(interrupts=True) as asked,
            self.world.join(self.model),
        ):
            self.task.units()  # what a task prepares of all its texts is no training time
            self.tick, self.logged_at = time.perf_counter(), self.progress.seconds
            if self.config.own and not self.progress.step:
                self.save()  # an object may hold weights that no seed repeats
            at_end = self.done() or self.hopeless
            while not at_end:
                self.step()
                at_end = self.done()  # asked once per step, as time may run out between two calls
                if at_end or self.progress.step % self.config.train.log_every == 0:
                    self.log(show)
                with self.pause_clock():
                    self.between_steps(at_end)
                    at_end = at_end or self.hopeless
                    number = self.world.all_reduce_max(asked())
                    if number and not at_end:
                        self.stop(signal.Signals(number))
        return self.summary()

    def stop(self, number: signal.Signals) -> NoReturn:
        """End the process after the current step, which is saved first."""
        step, path = self.progress.step, self.run_dir.path
        if step not in list_steps(self.run_dir.checkpoints):
            self.save()
        said = f"{path}: stopped by {NAMES[number]} after step {step}, which is saved; "
        said += f"`{resume_command(path)}` continues it."
        if number == signal.SIGINT:
            raise KeyboardInterrupt(said)
        print(said, file=sys.stderr)
        raise SystemExit(128 + number)

    def done(self) -> bool:
        """Return whether the run has reached its last step or its time limit."""
        limits = self.config.train
        if limits.steps is not None and self.progress.step >= limits.steps:
            return True
        late = limits.max_seconds is not None and self.seconds() >= limits.max_seconds
        return bool(limits.max_seconds is not None and self.world.broadcast(late))

    def seconds(self) -> float:
        """Return the training time so far, without evaluation, samples and checkpoints."""
        return self.progress.seconds + time.perf_counter() - self.tick

    @contextlib.contextmanager
    def pause_clock(self) -> Iterator[None]:
        """Stop the clock of training time inside the block."""
        self.progress.seconds = self.seconds()
        yield
        self.tick = time.perf_counter()

    def step(self) -> None:
        """Make one update from one batch, processed in ``accumulate`` parts."""
        config = self.config
        inputs, targets = self.task.batch(self.progress.step)
        task_loss = self.parts.loss or self.task.loss
        parts, weight = config.train.accumulate, config.optim.aux_weight
        all_targets = self.task.count_targets(targets)
        zero = torch.zeros_like(self.loss_sum)
        loss_sum, aux = zero.clone(), dict.fromkeys(self.extra, zero)
        self.world.begin(self.model, config.train.seed, self.progress.step)
        pieces = [*zip(parts_of(inputs, parts), targets.chunk(parts), strict=True)]
        for i, (part, of_part) in enumerate(pieces):
            self.world.hold_gradients(self.model, i + 1 < len(pieces))
            x, y = self.world.share(part, of_part)
            mine, of_all = self.task.count_targets(y), self.task.count_targets(of_part)
            held, share = mine / max(of_all, 1), y.numel() / of_part.numel()
            y = y.to(self.device, non_blocking=True)
            with (
                aux_losses() as extra,
                autocast(self.device, config.train.precision),
                self.world.reading_share(self.model),
            ):
                outputs = call_model(self.forward, x, self.device)
            # a rank without a row of a short batch: a mean over no targets is NaN, and NaN times 0 too
            loss = task_loss(outputs, y) * (mine / all_targets) if mine else zero_loss(outputs)
            extra = {name: value if mine else torch.zeros_like(value) for name, value in extra.items()}
            total = loss + weight * held / parts * sum(extra.values()) if weight else loss
            extra = {name: value.detach() * held for name, value in extra.items()}
            for name, penalty in self.extra.items() if share else ():
                scale, value = penalty(first_of(x))
                total = total + scale * share / parts * value
                extra[name] = value.detach() * share
            for name, value in extra.items():
                aux[name] = aux.get(name, zero) + value / parts
            (total if self.scaler is None else self.scaler.scale(total)).backward()
            loss_sum += loss.detach()
        loss_sum, *of_aux = self.world.total(torch.stack([loss_sum, *aux.values()]))
        self.loss_sum, self.aux = self.loss_sum + loss_sum, dict(zip(aux, of_aux, strict=True))
        self.world.sum_gradients(self.model)
        step, steps = self.progress.step, config.train.steps
        update(self.model, self.optimizers, config.optim, step, steps, self.parts.rate(config, step), self.scaler)
        if self.average is not None:
            self.average.update(self.progress.step)
        self.progress.step += 1
        self.progress.loss_count += 1
        self.parts.notify("on_step", self.progress.step, self.model)

    def log(self, show: Callable[[float, Record], None]) -> None:
        """Write one line of metrics with the mean loss since the last line."""
        p, batch, unit = self.progress, self.task.units(), self.task.unit
        loss = self.mean_loss()
        seconds = self.seconds()
        rate = p.loss_count * batch / max(seconds - self.logged_at, 1e-9)
        rates = max(group["lr"] for group in self.optimizers[0].param_groups)
        of_task = self.task.train_fields(loss) if self.parts.loss is None else {}
        line = {"kind": "train", "step": p.step, "loss": loss, **of_task, "lr": rates}
        line |= {
            unit: p.step * batch,
            f"{unit}_per_s": round(rate, 1),
            "seconds": round(seconds, 3),
            "peak_mib": peak_mib(self.device),
        }
        if self.aux:
            line["aux"] = {name: float(value) for name, value in self.aux.items()}
        self.append_metrics(line)
        self.loss_sum, p.loss_count, self.logged_at = torch.zeros_like(self.loss_sum), 0, seconds
        show(self.fraction(), line)

    def mean_loss(self) -> float:
        """Return the mean loss since the last line of metrics.

        A run that has diverged ends here, before it can overwrite intact checkpoints.
        """
        loss = self.loss_sum.item() / max(self.progress.loss_count, 1)
        self.check_finite("loss", loss)
        return loss

    def check_finite(self, what: str, value: float) -> None:
        """End the run if a number of it is no longer finite."""
        if not math.isfinite(value):
            steps = list_steps(self.run_dir.checkpoints)
            kept = f"the last checkpoint is step {steps[-1]}" if steps else "there is no checkpoint yet"
            where = f"{self.run_dir.path}: the {what} became {value} by step {self.progress.step}"
            raise Diverged(f"{where}; {kept}. Try a lower optim.lr or a longer optim.warmup.")

    def fraction(self) -> float:
        """Return the completed fraction of the run."""
        limits = self.config.train
        by_steps = self.progress.step / limits.steps if limits.steps else 0.0
        return min(1.0, max(by_steps, self.seconds() / limits.max_seconds if limits.max_seconds else 0.0))

    def between_steps(self, at_end: bool) -> None:
        """Do what is due between two steps: evaluate, sample, save a checkpoint."""
        step, config = self.progress.step, self.config.train
        better = False
        if at_end or step % config.eval_every == 0:
            with self.swap_in_average():
                better = self.evaluate()
                if self.world.first or self.world.sharded:
                    self.sample()
            self.world.gather_in(self.model)
        if at_end or better or step % config.save_every == 0:
            self.save()

    def sample(self) -> None:
        """Write samples of the model; of several ranks only the first keeps them."""
        step = self.progress.step
        try:
            with nullcontext(self.run_dir.samples) if self.world.first else TemporaryDirectory() as folder:
                self.task.sample(self.model, Path(folder), step)
            for sink in self.sinks:
                sink.add_samples(step)
        except OSError as why:
            raise self.disk_error(f"the sample of step {step}", why) from why

    @contextlib.contextmanager
    def swap_in_average(self) -> Iterator[None]:
        """Make the model hold the average of its weights inside the block, if the run keeps one."""
        if self.average is None:
            yield
            return
        with self.average.in_place():
            yield

    def evaluate(self) -> bool:
        """Score the validation split and return whether it is the best score so far."""
        p, result = self.progress, self.task.evaluate(self.model, "valid", **self.task.eval_options())
        with evaluation_mode(self.model):
            line = eval_line("valid", p.step, result) | self.parts.notify("on_evaluate", p.step, self.model)
        for name, value in line.items():  # the update after the last loss may be the one that diverged
            if isinstance(value, float):
                self.check_finite(f"{name.replace('_', ' ')} on the validation split", value)
        if len(line) > EMPTY_EVAL:
            self.append_metrics(line)
        if getattr(result, self.task.metric) is None:
            return False
        score = self.world.broadcast(getattr(result, self.task.metric))
        better = self.task.better(score, p.best_score)
        if better:
            p.best_step, p.best_score = p.step, score
        self.hopeless = self.misses_limit(p.step, score)
        return better

    def misses_limit(self, step: int, score: float) -> bool:
        """Return whether a score is not better than the limit that was given for its step."""
        return step in self.limits and not self.task.better(score, self.limits[step])

    def save(self) -> None:
        """Write a checkpoint and delete those that are no longer kept."""
        self.mean_loss()
        folder, p = self.run_dir.checkpoints, self.progress
        rng = {"cpu": torch.get_rng_state(), "loss_sum": self.loss_sum}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        groups = {
            "model": self.model.state_dict(),
            "optimizer": {} if self.parts.optimizer else optimizer_tensors(self.model, self.optimizers),
            "rng": rng,
        }
        if self.average is not None:
            groups["ema"] = self.average.tensors()
        p.scaler = None if self.scaler is None else self.scaler.state_dict()
        if self.config.own:
            groups["own"], p.own = self.parts.state(self.optimizers)
        try:
            if self.world.first:
                self.run_dir.sync_metrics()
            if self.world.sharded:
                save_shards(folder, p.step, groups, asdict(p), self.world)
            elif self.world.first:
                save_checkpoint(folder, p.step, groups, asdict(p))
        except OSError as why:
            raise self.disk_error(f"the checkpoint of step {p.step}", why) from why
        if self.world.first:
            prune(folder, self.config.train.keep, p.best_step)
        self.world.wait()

    def append_metrics(self, line: Record) -> None:
        """Append a line to the run's metrics, in all their forms."""
        if not self.world.first:
            return
        try:
            self.run_dir.append(line)
            for sink in self.sinks:
                sink.add(line)
            if self.parts.on_log is not None:
                self.parts.on_log(line)
        except OSError as why:
            raise self.disk_error(Path(str(why.filename or "metrics.jsonl")).name, why) from why

    def disk_error(self, what: str, why: OSError) -> MixerError:
        """Return the error for a file that could not be written, with what is left and what to do."""
        steps = list_steps(self.run_dir.checkpoints)
        kept = (
            f"the checkpoint of step {steps[-1]} is intact"
            if steps
            else "there is no earlier checkpoint, so the run restarts from its config"
        )
        path, mend = self.run_dir.path, "Make room" if why.errno in (ENOSPC, EDQUOT, EFBIG, None) else "Mend that"
        return MixerError(
            f"{path}: {what} could not be written ({why.strerror or why}); {kept}. "
            + f"{mend}, then `{resume_command(path)}`."
        )

    def summary(self) -> Record:
        """Return the summary of the run as a dictionary."""
        p, unit, metric = self.progress, self.task.unit, self.task.metric
        done = p.step * self.task.units()
        lines = self.run_dir.read_metrics()
        last = next((x for x in reversed(lines) if x["kind"] == "eval" and x["split"] == "valid"), None)
        peaks = [x["peak_mib"] for x in lines if x["kind"] == "train"]  # this process may have made no step of the run
        return {
            "run": str(self.run_dir.path),
            "step": p.step,
            unit: done,
            "seconds": round(p.seconds, 3),
            f"{unit}_per_s": round(done / max(p.seconds, 1e-9), 1),
            "peak_mib": max([peak_mib(self.device), *peaks]),
            f"valid_{metric}": last.get(metric) if last else None,
            "best_step": p.best_step,
            f"best_{metric}": p.best_score,
        }


def model_facts(model: nn.Module, task: Task | None) -> Record:
    """Return what env.json records of a model; with a task, its sizes too, which a model of one's own need not have."""
    facts = {} if task is None else task.model_facts(model)
    return {"parameters": sum(p.numel() for p in model.parameters()), **facts}
