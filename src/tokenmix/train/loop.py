"""The training loop: config in, run directory out, resumable to the bit."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data import Sampler
from ..errors import MixerError
from ..mixers import aux_losses
from ..models import build_model
from .checkpoint import list_steps, load_checkpoint, prune, remove_checkpoint, save_checkpoint, sweep
from .config import RunConfig
from .evaluate import autocast, evaluate
from .optim import build_optimizer, learning_rate, load_optimizer, optimizer_tensors
from .progress import bar
from .rundir import RunDir, check_free, differences, environment, peak_mib, reset_peak, write_json
from .runs import continue_bytes, eval_line, load_weights, open_data, pick_device, pick_step, same_corpus, streaming_cost

SAMPLE_PROMPT = 32


@dataclass
class Progress:
    """The counters of a run: what a checkpoint holds besides tensors."""

    step: int = 0
    seconds: float = 0.0
    loss_count: int = 0
    best_step: int | None = None
    best_bits: float | None = None


class Trainer:
    """One process training in one run directory, from wherever ``progress`` stands."""

    def __init__(self, config: RunConfig, run: RunDir, device: torch.device, *, verbose: bool | None = None):
        self.config, self.run_dir, self.device, self.verbose = config, run, device, verbose
        self.corpus = open_data(config.data)
        torch.manual_seed(config.train.seed)
        self.model: Any = build_model(config.model).to(device)
        self.forward: Any = torch.compile(self.model) if config.train.compile else self.model
        self.optimizer = build_optimizer(self.model, config.optim)
        self.sampler = Sampler(self.corpus.split("train"), seq_len=config.data.seq_len, batch_size=config.train.batch_size, seed=config.train.seed)
        self.progress = Progress()
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.aux: dict[str, torch.Tensor] = {}  # the auxiliary losses of the last batch
        self.tick = self.logged_at = 0.0

    def load(self, step: int) -> None:
        """Stand where the checkpoint of ``step`` stood."""
        groups, progress = load_checkpoint(self.run_dir.checkpoints, step, "model", "optimizer", "rng")
        load_weights(self.model, groups["model"], self.run_dir.path)
        load_optimizer(self.model, self.optimizer, groups["optimizer"])
        self.progress = Progress(**progress)
        if self.progress.best_step not in list_steps(self.run_dir.checkpoints):  # a later best took its place before the run was wound back
            self.progress.best_step = self.progress.best_bits = None
        self.loss_sum = groups["rng"]["loss_sum"].to(self.device)
        torch.set_rng_state(groups["rng"]["cpu"])
        if "cuda" in groups["rng"] and self.device.type == "cuda":
            torch.cuda.set_rng_state(groups["rng"]["cuda"], self.device)

    def run(self) -> dict[str, Any]:
        """Train to the end. Returns a summary of the run."""
        self.model.train()
        reset_peak(self.device)
        self.tick, self.logged_at = time.perf_counter(), self.progress.seconds
        with bar(self.verbose) as show:
            at_end = self.done()
            while not at_end:
                self.step()
                at_end = self.done()  # asked once a step: time may run out between two questions
                if at_end or self.progress.step % self.config.train.log_every == 0:
                    self.log(show)
                with self.untimed():
                    self.rest(at_end)
        return self.summary()

    def done(self) -> bool:
        """Whether the run has reached its last step or its time."""
        limits = self.config.train
        return (limits.steps is not None and self.progress.step >= limits.steps) or (limits.max_seconds is not None and self.seconds() >= limits.max_seconds)

    def seconds(self) -> float:
        """Training time so far, without evaluation, samples and checkpoints."""
        return self.progress.seconds + time.perf_counter() - self.tick

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Stop the clock of training time."""
        self.progress.seconds = self.seconds()
        yield
        self.tick = time.perf_counter()

    def step(self) -> None:
        """One update from one batch, in ``accumulate`` parts."""
        config = self.config
        inputs, targets = self.sampler.batch(self.progress.step)
        parts, weight = config.train.accumulate, config.optim.aux_weight
        self.aux = {}
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
            with aux_losses() as extra, autocast(self.device, config.train.precision):
                logits = self.forward(x)
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten()) / parts
            for name, value in extra.items():
                self.aux[name] = self.aux.get(name, 0) + value.detach() / parts
            (loss + weight / parts * sum(extra.values()) if weight else loss).backward()
            self.loss_sum += loss.detach()
        if config.optim.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), config.optim.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.progress.step, config.optim, config.train.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.loss_count += 1

    def log(self, show: Any) -> None:
        """One line of metrics: the mean loss since the last."""
        p, batch = self.progress, self.config.train.batch_size * self.config.data.seq_len
        loss = self.mean_loss()
        seconds = self.seconds()
        rate = p.loss_count * batch / max(seconds - self.logged_at, 1e-9)
        line = {"kind": "train", "step": p.step, "loss": loss, "bpb": loss / math.log(2), "lr": self.optimizer.param_groups[0]["lr"]}
        line |= {"tokens": p.step * batch, "tokens_per_s": round(rate, 1), "seconds": round(seconds, 3), "peak_mib": peak_mib(self.device)}
        if self.aux:
            line["aux"] = {name: float(value) for name, value in self.aux.items()}
        self.keep_line(line)
        self.loss_sum, p.loss_count, self.logged_at = torch.zeros_like(self.loss_sum), 0, seconds
        show(self.fraction(), line)

    def mean_loss(self) -> float:
        """Mean loss since the last line; a run that has diverged ends here, before it can overwrite good checkpoints."""
        loss = self.loss_sum.item() / max(self.progress.loss_count, 1)
        if not math.isfinite(loss):
            steps = list_steps(self.run_dir.checkpoints)
            kept = f"the last checkpoint is step {steps[-1]}" if steps else "there is no checkpoint yet"
            where = f"{self.run_dir.path}: the loss became {loss} by step {self.progress.step}"
            raise MixerError(f"{where}; {kept}. Try a lower optim.lr or a longer optim.warmup.")
        return loss

    def fraction(self) -> float:
        """How much of the run is behind."""
        limits = self.config.train
        by_steps = self.progress.step / limits.steps if limits.steps else 0.0
        return min(1.0, max(by_steps, self.seconds() / limits.max_seconds if limits.max_seconds else 0.0))

    def rest(self, at_end: bool) -> None:
        """What happens between steps: evaluation, a sample, a checkpoint."""
        step, config = self.progress.step, self.config.train
        better = False
        if at_end or step % config.eval_every == 0:
            better = self.evaluate()
            if config.sample_bytes:
                self.sample()
        if at_end or better or step % config.save_every == 0:
            self.save()

    def evaluate(self) -> bool:
        """Score the validation split; whether it is the best so far."""
        config, p = self.config, self.progress
        options: dict[str, Any] = {"stride": config.train.stride, "batch_size": config.train.eval_batch, "max_bytes": config.train.eval_bytes}
        result = evaluate(self.model, self.corpus.split("valid"), seq_len=config.data.seq_len, precision=config.train.precision, **options)
        self.keep_line(eval_line("valid", p.step, result))
        better = p.best_bits is None or result.bits_per_byte < p.best_bits
        if better:
            p.best_step, p.best_bits = p.step, result.bits_per_byte
        return better

    def sample(self) -> None:
        """Let the model continue the first bytes of the validation split."""
        limit = self.model.max_len or 1 << 30
        prompt = bytes(self.corpus.split("valid")[: min(SAMPLE_PROMPT, limit - 1)].tolist())
        n = min(self.config.train.sample_bytes, limit - len(prompt))
        text = continue_bytes(self.model, prompt, n, temperature=0.8, seed=self.config.train.seed)
        (self.run_dir.samples / f"step_{self.progress.step:08d}.txt").write_bytes(text)

    def save(self) -> None:
        """Write a checkpoint and drop those no longer kept."""
        self.mean_loss()
        folder, p = self.run_dir.checkpoints, self.progress
        rng = {"cpu": torch.get_rng_state(), "loss_sum": self.loss_sum}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        groups = {"model": self.model.state_dict(), "optimizer": optimizer_tensors(self.model, self.optimizer), "rng": rng}
        try:
            self.run_dir.sync_metrics()
            save_checkpoint(folder, p.step, groups, asdict(p))
        except OSError as why:
            raise self.disk_error(f"the checkpoint of step {p.step}", why) from why
        prune(folder, self.config.train.keep, p.best_step)

    def keep_line(self, line: dict[str, Any]) -> None:
        """Add a line to the run's metrics."""
        try:
            self.run_dir.append(line)
        except OSError as why:
            raise self.disk_error("metrics.jsonl", why) from why

    def disk_error(self, what: str, why: OSError) -> MixerError:
        """The one line for a disk that refuses."""
        steps = list_steps(self.run_dir.checkpoints)
        kept = f"the checkpoint of step {steps[-1]} is intact" if steps else "there is no earlier checkpoint, the run restarts from its config"
        path = self.run_dir.path
        return MixerError(f"{path}: {what} could not be written ({why.strerror or why}); {kept}. Make room, then `tokenmix resume {path}`.")

    def summary(self) -> dict[str, Any]:
        """The run in one dictionary."""
        p, config = self.progress, self.config
        tokens = p.step * config.train.batch_size * config.data.seq_len
        last = next((x for x in reversed(self.run_dir.read_metrics()) if x["kind"] == "eval" and x["split"] == "valid"), None)
        return {
            "run": str(self.run_dir.path),
            "step": p.step,
            "tokens": tokens,
            "seconds": round(p.seconds, 3),
            "tokens_per_s": round(tokens / max(p.seconds, 1e-9), 1),
            "peak_mib": peak_mib(self.device),
            "valid_bits_per_byte": last["bits_per_byte"] if last else None,
            "best_step": p.best_step,
            "best_bits_per_byte": p.best_bits,
        }


@contextlib.contextmanager
def _threads(n: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train(config: RunConfig, out: Path | str, *, verbose: bool | None = None) -> dict[str, Any]:
    """Train from scratch into the new run directory ``out``. Returns a summary; everything else is in the directory.

    Args:
        verbose: show a progress bar; default only on a terminal.

    Raises:
        MixerError: where the config, the corpus or the directory will not do, or the disk is full; ``resume(out)`` goes on afterwards.
    """
    check_free(out)
    device = pick_device(config.train.device)
    with _threads(config.train.threads):
        trainer = Trainer(config, RunDir(out), device, verbose=verbose)
        env = environment(trainer.corpus, device)
        env |= {"parameters": sum(p.numel() for p in trainer.model.parameters()), **streaming_cost(trainer.model), "resumed": []}
        trainer.run_dir = RunDir.create(out, config, env)
        with trainer.run_dir.lock():
            return trainer.run()


def resume(out: Path | str, *, from_step: int | None = None, changes: dict[str, Any] | None = None, verbose: bool | None = None) -> dict[str, Any]:
    """Go on with a run from its last checkpoint (or from its start, where it has none), to the same numbers as without the stop.

    Args:
        from_step: an earlier checkpoint; those after it are deleted, and metrics.jsonl is cut back to it.
        changes: dotted fields of ``train.`` to change from here on, such as ``{"train.steps": 2000}``; kept in config.json.
    """
    run = RunDir.open(out)
    config, env = run.config(), run.env()
    config = _changed(config, changes or {})
    device = pick_device(config.train.device)
    with run.lock(), _threads(config.train.threads or env.get("threads")):
        sweep(run.checkpoints)
        step = from_step if from_step is not None else (pick_step(run) if list_steps(run.checkpoints) else 0)
        trainer = Trainer(config, run, device, verbose=verbose)
        same_corpus(trainer.corpus, env)
        if step or from_step is not None:
            trainer.load(step)
        changed = differences(env, environment(trainer.corpus, device))
        if changed:
            warnings.warn(f"{out}: {'; '.join(changed)}. The run goes on, its bits may differ from an uninterrupted one.", stacklevel=2)
        env.setdefault("resumed", []).append({"step": step, "changed": changed})
        if changes:
            write_json(run.path / "config.json", config.to_json())
        write_json(run.path / "env.json", env)
        for later in list_steps(run.checkpoints):
            if later > step:
                remove_checkpoint(run.checkpoints, later)
        run.cut_metrics(step)
        return trainer.run()


def _changed(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    for name in changes:
        if not name.startswith("train.") or name in ("train.seed", "train.batch_size"):
            raise MixerError(f"resume: {name} cannot change in the middle of a run; fields such as train.steps, train.max_seconds and train.save_every can.")
    return config.override(changes) if changes else config
