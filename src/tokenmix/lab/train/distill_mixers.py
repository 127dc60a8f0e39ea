"""Distil after surgery: each mixer learns the outputs of the attention it replaced, then the model the teacher's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...hosts.surgery.adapters import Adapter
from ...hosts.surgery.capture import adapters_by_site, capture_calls, layer_losses, output_loss
from ...hosts.surgery.quality import Quality, join_qualities, predicts_next, score_rows, score_text
from ...system.calls import call_model
from ...system.checkpoint import list_steps, load_checkpoint, prune, save_checkpoint, sweep
from ...system.config import Json
from ...system.files import read_json
from ...system.machine import peak_mib
from ...types import Record
from .config import OptimConfig
from .optim import build_optimizers, load_optimizers, optimizer_tensors, update
from .progress import bar
from .rundir import RunDir, environment

Data = Sequence[Any] | Callable[[int], Any]


@dataclass(frozen=True)
class DistillConfig(Json):
    """Configure a distillation, as JSON.

    Args:
        layer_steps: steps of the first phase, in which every replaced layer learns by itself.
        steps: steps of the second phase, in which the whole model learns.
        train: what the second phase trains: "mixers", or "all" weights.
        task_weight: weight of the loss that the student itself returns for batches with labels.
        optim: warm-up and schedule apply to each phase separately.
    """

    layer_steps: int = 200
    steps: int = 200
    temperature: float = 1.0
    train: str = "mixers"
    task_weight: float = 0.0
    seed: int = 0
    log_every: int = 10
    eval_every: int = 100
    save_every: int = 100
    keep: int = 1
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(weight_decay=0.0, warmup=10))
    model: Record = field(default_factory=dict)
    kind: ClassVar[str] = "distill"

    def __post_init__(self) -> None:
        if self.train not in ("mixers", "all"):
            raise MixerError(f"distill: train must be 'mixers' or 'all', got {self.train!r}.")
        if self.layer_steps < 0 or self.steps < 0 or self.layer_steps + self.steps < 1:
            got = f"got {self.layer_steps} and {self.steps}"
            raise MixerError(f"distill: layer_steps and steps must be >= 0 and not both 0, {got}.")
        if odd := [n for n in ("log_every", "eval_every", "save_every") if getattr(self, n) < 1]:
            raise MixerError(f"distill: {odd[0]} must be >= 1, got {getattr(self, odd[0])}.")
        if not self.temperature > 0 or self.task_weight < 0:
            got = f"got {self.temperature} and {self.task_weight}"
            raise MixerError(f"distill: temperature must be positive and task_weight >= 0, {got}.")


def distill(
    teacher: nn.Module,
    student: nn.Module,
    data: Data,
    *,
    out: Path | str,
    valid: Data | None = None,
    resume: bool = False,
    verbose: bool | None = None,
    lr: float = 1e-3,
    **config: Any,
) -> Record:
    """Teach ``student``, which ``replace_mixers`` made of ``teacher``, to reproduce its attention.

    A student in which mixers were assigned by hand is taught too: its layers are the outermost modules that hold a
    mixer and are of another class than the teacher's of the same name. Both are called with the same arguments.

    The student is changed in place; the run is stored in ``out``. First all replaced layers learn at once, each by
    itself: a layer gets the input of the teacher's layer and learns its output (mean squared error over the mean
    square of the target; attention transfer, Zhang et al. 2024, arXiv 2410.10254). Then the whole model learns: the
    loss is the KL divergence of its logits from the teacher's, or the distance of last hidden states if a model has
    no logits, plus ``task_weight`` times the loss that the model itself returns.

    Args:
        teacher: the original model, in eval mode.
        data: the batches in order, repeated from the start as needed, or a function of the step; each a dict of
            keyword arguments, a tensor or a tuple of arguments.
        out: the run directory: config.json, env.json, metrics.jsonl, checkpoints; ``tokenmix report`` draws it.
        valid: batches for evaluations; at the start, every ``eval_every`` steps and at the end.
        resume: continue where ``out`` stopped, with the same numbers; ``steps`` may have grown.
        lr: the highest learning rate of both phases.
        config: further fields of ``DistillConfig``.

    Returns:
        A summary: steps, seconds, last training loss, last evaluation; with ``valid`` also ``quality``: the measure
        (perplexity, top-1 agreement with the teacher or cosine), its values for the teacher, the student before and
        after, and a sentence that says what is worse than before.

    Raises:
        MixerError: if ``data`` or ``valid`` hold no batches, the models do not belong together, the loss is not finite,
            or the directory is unusable.
    """
    if teacher.training:
        training = "the teacher is in training mode, so its outputs would be random"
        raise MixerError(f"distill: {training}; call teacher.eval() first.")
    _check_batches("data", data)
    if valid is not None:
        _check_batches("valid", valid)
    adapters = adapters_by_site(student, teacher)
    if any(p.dtype == torch.float16 for adapter in adapters.values() for p in adapter.mixer.parameters()):
        wide = "give teacher.float() and student.float(), or both in bfloat16"
        raise MixerError(f"distill: the mixers are float16, in which Adam's eps is 0 and steps become NaN; {wide}.")
    specs = [{"name": adapter.spec["name"]} for adapter in adapters.values()]
    optim = config.pop("optim", DistillConfig().optim)
    try:
        settings = DistillConfig(
            **config, optim=replace(optim, lr=lr), model={"kind": "surgery", "mixers": specs, "layers": len(specs)}
        )
    except TypeError as why:
        raise MixerError(f"distill: {str(why).partition('() ')[2] or why}.") from None
    run = _open_run(Path(out), settings, student, resume)
    with run.lock():
        worker = Distillation(teacher, student, adapters, data, valid, settings, run)
        if resume and list_steps(run.checkpoints):
            worker.load()
        return worker.work(verbose)


def _check_batches(name: str, batches: object) -> None:
    """Refuse what is no list of batches, and an empty one: over no batches every loss would be 0."""
    if callable(batches):
        return
    if not (hasattr(batches, "__getitem__") and hasattr(batches, "__len__")):
        got = f"a {type(batches).__name__}; list(loader) makes one"
    elif not len(batches):
        got = "an empty one" + ("; leave it out to distil without evaluations" if name == "valid" else "")
    else:
        return
    raise MixerError(f"distill: {name} must be a list of batches, or a function of the step, got {got}.")


def _open_run(out: Path, config: DistillConfig, student: nn.Module, resume: bool) -> RunDir:
    device = next(student.parameters()).device
    if not (resume and (out / "config.json").is_file()):
        env = environment({"parameters": sum(p.numel() for p in student.parameters())}, device)
        made: Any = config  # a run directory only needs a config that can be written
        return RunDir.create(out, made, env)
    run = RunDir.open(out)
    before = read_json(out / "config.json")
    now = config.to_json()
    changed = sorted(
        k
        for k in now
        if k not in ("steps", "log_every", "eval_every", "save_every", "keep") and before.get(k) != now[k]
    )
    if changed:
        settings = "give another out, or the same settings"
        raise MixerError(f"distill: {out} was started with other settings ({', '.join(changed)}); {settings}.")
    sweep(run.checkpoints)
    return run


class Distillation:
    """Run a distillation from its current step."""

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        adapters: dict[str, Adapter],
        data: Data,
        valid: Data | None,
        config: DistillConfig,
        run: RunDir,
    ):
        self.teacher, self.student, self.adapters = teacher, student, adapters
        self.data, self.valid, self.config, self.run = data, valid, config, run
        self.device = next(student.parameters()).device
        self.optimizers = build_optimizers(student, config.optim)
        self.step, self.seconds, self.seen, self.losses = 0, 0.0, 0, torch.zeros(0, dtype=torch.float64, device="cpu")
        torch.manual_seed(config.seed)

    @property
    def total(self) -> int:
        """Return the steps of both phases together."""
        return self.config.layer_steps + self.config.steps

    def work(self, verbose: bool | None) -> Record:
        """Run both phases to the end."""
        config = self.config
        flags = {p: p.requires_grad for p in self.student.parameters()}
        mode = self.student.training
        try:
            with bar(verbose) as show:
                if self.step == 0:
                    self.evaluate()
                while self.step < self.total:
                    self.update(show)
                    end = self.step == self.total
                    if end or self.step % config.eval_every == 0:
                        self.evaluate()
                    if end or self.step % config.save_every == 0:
                        self.save()
        finally:
            self.student.train(mode)
            for p, flag in flags.items():
                p.requires_grad_(flag)
        lines = self.run.read_metrics()
        last = {kind: next((x for x in reversed(lines) if x["kind"] == kind), None) for kind in ("train", "eval")}
        summary = {
            "run": str(self.run.path),
            "step": self.step,
            "seconds": round(self.seconds, 3),
            "train": last["train"],
            "valid": last["eval"],
        }
        first = next((x["quality"] for x in lines if x["kind"] == "eval" and "quality" in x), None)
        if first is not None and last["eval"] is not None:
            summary["quality"] = quality_summary(first, last["eval"]["quality"])
        return summary

    def update(self, show: Callable[[float, Record], None]) -> None:
        """Take one step of the current phase."""
        began, config = time.perf_counter(), self.config
        whole = self.step >= config.layer_steps
        self._prepare_phase(whole)
        batch = self._batch(self.data, self.step)
        loss = self._output_loss(batch) if whole else self._layer_loss(batch)
        loss.backward()
        at, of = (self.step - config.layer_steps, config.steps) if whole else (self.step, config.layer_steps)
        update(self.student, self.optimizers, config.optim, at, of)
        self.losses = torch.cat([self.losses, loss.detach().double().cpu()[None]])
        self.step += 1
        unit, many = _units(batch)
        self.seconds, self.seen = self.seconds + time.perf_counter() - began, self.seen + many
        if self.step % config.log_every == 0 or self.step in (config.layer_steps, self.total):
            self._log(show, "outputs" if whole else "layers", unit)

    def _prepare_phase(self, whole: bool) -> None:
        """Set training mode and the trained weights for a phase.

        Layers learn without dropout, because their targets have none.
        """
        self.student.train()
        mixers = {id(p) for adapter in self.adapters.values() for p in adapter.mixer.parameters()}
        for p in self.student.parameters():
            p.requires_grad_(id(p) in mixers or (whole and self.config.train == "all"))
        for adapter in self.adapters.values():
            for module in adapter.modules():
                if isinstance(module, nn.Dropout):
                    module.train(whole)

    def _log(self, show: Callable[[float, Record], None], phase: str, unit: str) -> None:
        loss = float(self.losses.mean())
        if not math.isfinite(loss):
            raise MixerError(f"{self.run.path}: the loss became {loss} by step {self.step}; try a lower lr.")
        line = {
            "kind": "train",
            "step": self.step,
            "loss": loss,
            "phase": phase,
            "lr": max(g["lr"] for g in self.optimizers[0].param_groups),
        }
        line |= {
            unit: self.seen,
            f"{unit}_per_s": round(self.seen / self.seconds, 1),
            "seconds": round(self.seconds, 3),
            "peak_mib": peak_mib(self.device),
        }
        self.run.append(line)
        self.losses = self.losses[:0]
        show(self.step / self.total, line)

    def _batch(self, data: Data, step: int) -> object:
        return _move_batch(data(step) if callable(data) else data[step % len(data)], self.device)

    def _layer_loss(self, batch: object) -> Tensor:
        with torch.no_grad(), capture_calls(self.teacher, self.adapters) as calls:
            call_model(self.teacher, batch)
        return torch.stack(list(layer_losses(self.adapters, calls).values())).mean()

    def _output_loss(self, batch: object) -> Tensor:
        with torch.no_grad():
            wanted = call_model(self.teacher, batch)
        given = call_model(self.student, batch)
        loss = output_loss(given, wanted, _keep(batch), self.config.temperature)
        if not self.config.task_weight:
            return loss
        own = getattr(given, "loss", None)
        if own is None:
            why = "task_weight needs batches with labels, for which the model returns a loss"
            raise MixerError(f"distill: {why}; it returned none.")
        return loss + self.config.task_weight * own

    @torch.no_grad()
    def evaluate(self) -> None:
        """Log the mean losses over the validation batches: of each layer, and of the outputs."""
        if self.valid is None:
            return
        began, mode = time.perf_counter(), self.student.training
        self.student.eval()
        batches = [self.valid(0)] if callable(self.valid) else self.valid
        layers: dict[str, float] = {}
        outputs = 0.0
        causal = predicts_next(self.teacher)
        scores: tuple[list[Quality], list[Quality]] = ([], [])
        for batch in (_move_batch(b, self.device) for b in batches):
            with capture_calls(self.teacher, self.adapters) as calls:
                wanted = call_model(self.teacher, batch)
            for name, loss in layer_losses(self.adapters, calls).items():
                layers[name] = layers.get(name, 0.0) + float(loss) / len(batches)
            given = call_model(self.student, batch)
            outputs += float(output_loss(given, wanted, _keep(batch), self.config.temperature)) / len(batches)
            for parts, outcome in zip(scores, (wanted, given), strict=True):
                parts.append(score_rows(outcome, wanted, batch, causal))
        self.student.train(mode)
        line = {"kind": "eval", "split": "valid", "step": self.step, "output_loss": outputs, "layer_loss": layers}
        teacher, student = join_qualities(scores[0]), join_qualities(scores[1])
        quality = {"measure": student.measure, "teacher": teacher.value, "student": student.value}
        line |= {"quality": quality | {"change": student.change(teacher)}}
        self.run.append(line | {"seconds": round(time.perf_counter() - began, 3)})

    def save(self) -> None:
        """Save a checkpoint; ``tokenmix.hosts.save_replaced`` writes the model itself."""
        rng = {"cpu": torch.get_rng_state(), "losses": self.losses}
        if self.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self.device)
        tensors = {name: p.detach().clone() for name, p in self.student.state_dict().items()}
        self.run.sync_metrics()
        groups = {"student": tensors, "optimizer": optimizer_tensors(self.student, self.optimizers), "rng": rng}
        save_checkpoint(
            self.run.checkpoints, self.step, groups, {"step": self.step, "seconds": self.seconds, "seen": self.seen}
        )
        prune(self.run.checkpoints, self.config.keep, None)

    def load(self) -> None:
        """Restore the last checkpoint."""
        step = list_steps(self.run.checkpoints)[-1]
        groups, progress = load_checkpoint(self.run.checkpoints, step, "student", "optimizer", "rng")
        try:
            self.student.load_state_dict(groups["student"])
        except RuntimeError as why:
            reason = " ".join(str(why).split())[:200]
            raise MixerError(f"{self.run.path}: the checkpoint does not fit this student ({reason}).") from None
        load_optimizers(self.student, self.optimizers, groups["optimizer"])
        self.step, self.seconds, self.seen = progress["step"], progress["seconds"], progress["seen"]
        self.losses = groups["rng"]["losses"]
        torch.set_rng_state(groups["rng"]["cpu"])
        if "cuda" in groups["rng"] and self.device.type == "cuda":
            torch.cuda.set_rng_state(groups["rng"]["cuda"], self.device)
        self.run.cut_metrics(step)


def quality_summary(first: Record, last: Record) -> Record:
    """Return the scores of teacher, replaced and distilled model, and what is worse than before, as one sentence."""
    measure = last["measure"]
    teacher, before, after = (score_text(measure, v) for v in (last["teacher"], first["student"], last["student"]))
    said = {
        "worse": f"worse than before: {after} instead of {teacher}",
        "better": f"better than before: {after} instead of {teacher}",
        "same": "no difference from before beyond noise",
    }[last["change"]]
    values = {"teacher": last["teacher"], "before": first["student"], "after": last["student"]}
    text = f"{measure} on held-out data: teacher {teacher}, replaced {before}, distilled {after}; {said}"
    return {"measure": measure, **values, "change": last["change"], "text": text}


def _move_batch(batch: object, device: torch.device) -> object:
    if isinstance(batch, Mapping):
        return {k: _move_batch(v, device) for k, v in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(_move_batch(v, device) for v in batch)
    return batch.to(device) if isinstance(batch, Tensor) else batch


def _keep(batch: object) -> Tensor | None:
    """Return the mask of valid tokens (B, T) that the batch states."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return None if mask is None or mask.ndim != 2 else mask.bool()


def _units(batch: object) -> tuple[str, int]:
    """Return the unit of speed and its count: images (B, C, H, W), or tokens (B, T, ...)."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple) else (batch,)
    first = next(v for v in values if isinstance(v, Tensor))
    return ("images", len(first)) if first.ndim == 4 else ("tokens", first.shape[:2].numel())
