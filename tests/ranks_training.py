"""What the processes of tests/test_ranks_training.py train; `python tests/ranks_training.py` is one of torchrun's."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tokenmix import MixerError
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.train import (
    DataConfig,
    ImageDataConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    match_data,
    resume,
    train,
)
from tokenmix.lab.train.optim import update
from tokenmix.mixers.parts.token_norm import LBR
from tokenmix.models import LMConfig, ViTConfig
from tokenmix.parallel import sum_gradients
from tokenmix.system.checkpoint import list_steps

MIXERS = ({"name": "aft_simple"}, {"name": "aft_local", "window": 3}, {"name": "aft_forget"})
STEPS = 20
FSDP, TOKENS = {"train.shard": "fsdp"}, {"train.context_parallel": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"optim.name": "muon"},
    "average": {"optim.ema": 0.9},
    "fp16": {"train.precision": "fp16"},
    "bf16": {"train.precision": "bf16"},
    "compiled": {"train.compile": True, "model.layers": 1, "model.mixers": MIXERS[:1]},
    "penalty": {"optim.one_hot": 0.1, "model.mixers": [{"name": "aft_conv", "heads": 2, "kernel_size": 3}]},
    "norms": {"model.mixers": [{"name": "lambda", "heads": 2, "window": 3}]},
}
LAYOUTS = {"whole": {}, "tokens": TOKENS, "fsdp": FSDP, "both": FSDP | TOKENS}
BAD: dict[str, dict[str, Any]] = {
    "segments": {"model.mixers": [{"name": "memory_compressed", "heads": 2}], **TOKENS},
    "divides": {"train.context_parallel": 3},
    "rows": {"train.batch_size": 1, "train.accumulate": 1},
    "penalty": {"optim.one_hot": 0.1, **FSDP, "model.mixers": [{"name": "aft_conv", "heads": 2, "kernel_size": 3}]},
    "compile": {"train.compile": True, **TOKENS},
    "moments": {"model.mixers": [{"name": "lambda", "heads": 2, "window": 3}], **TOKENS},
    "unlike": {},
    "redrawn": {"model.mixers": [{"name": "performer", "heads": 2, "redraw_interval": 2}]},
}


def text() -> Path:
    """A text that can be learnt, in a file that processes share."""
    path = Path(tempfile.gettempdir()) / f"ranks_training_{os.getuid()}.txt"
    content = b"".join(b"%d times %d is %d\n" % (i % 97, i % 89, (i % 97) * (i % 89)) for i in range(3000))
    if not path.is_file() or path.read_bytes() != content:
        own = path.with_suffix(f".{os.getpid()}")
        own.write_bytes(content)
        own.replace(path)
    return path


def config(**changes: Any) -> RunConfig:
    """A small model of three mixers; 31 tokens, which two ranks share unevenly, in two parts of 4 rows."""
    loop = TrainConfig(steps=STEPS, batch_size=8, accumulate=2, log_every=1, eval_every=10, save_every=10)
    model = LMConfig(dim=16, layers=3, mixers=MIXERS, max_len=32)
    data, optim = DataConfig(source=str(text()), seq_len=31), OptimConfig(lr=3e-3, warmup=5)
    few = {"train.eval_bytes": 400, "train.sample_bytes": 8, "train.threads": 1, "train.device": "cpu"}
    return RunConfig(model, data, optim, loop).override({**few, **changes})


def read_steps(out: Path) -> list[dict[str, Any]]:
    """The lines of a run's steps."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [x for x in lines if x["kind"] == "train"]


def train_losses(out: Path) -> list[float]:
    return [x["loss"] for x in read_steps(out)]


def last_step(out: Path) -> int:
    return list_steps(out / "checkpoints")[-1]


def losses(out: Path) -> list[float]:
    """The losses of a run, then the scores of its evaluations."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return train_losses(out) + [x["bits_per_byte"] for x in lines if x["kind"] == "eval"]


def in_dtype(job: str, out: Path, *, start: Path | None = None, **changes: Any) -> None:
    """Train a job such as "muon float64", or go on from step 10 of another run."""
    options, dtype = job.split()
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        if start is None:
            train(config(**OPTIONS[options], **changes), out, verbose=False)
        else:
            resume(out, from_step=10, changes={"train.shard": None, "train.context_parallel": 1, **changes})
    finally:
        torch.set_default_dtype(before)


def short(out: Path) -> None:
    """Train on labelled texts whose last batch of an epoch has one row, which two ranks cannot share."""
    folder = out.parent / f"labelled{os.getpid()}"
    folder.mkdir()
    for split, rows in (("train", 9), ("valid", 3), ("test", 3)):
        lines = [f"{split} {'cd'[i % 2] * (1 + i % 5)} {i * i},{'xy'[i % 2]}" for i in range(rows)]
        (folder / f"{split}.csv").write_text("\n".join(["text,label", *lines]))
    config = RECIPES["sentences"].config("aft_simple").override({"data.source": str(folder), "data.max_tokens": 16})
    config = match_data(config.override({"model.dim": 8, "model.layers": 1, "model.dropout": 0.0, "model.max_len": 16}))
    few = {"train.steps": 10, "train.batch_size": 4, "train.log_every": 1, "train.threads": 1, "train.device": "cpu"}
    train(config.override(few), out, verbose=False)


class Normed(nn.Module):
    """A model with batch norms of each kind, with weights that no seed of the run repeats."""

    def __init__(self, number: int = 0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(number)
            self.conv, self.map, self.tokens = nn.Conv2d(2, 4, 3), nn.Conv1d(16, 6, 1), LBR(6, 5)
            self.norms = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm1d(6, affine=False, momentum=None)])
            self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms[0](self.conv(x)).relu().flatten(1, 2)
        return self.head(self.tokens(self.norms[1](self.map(x)).transpose(1, 2)).mean(1))


def normed_batch(step: int) -> tuple[Tensor, Tensor]:
    """Seven rows, in parts of four and three; at the end one row in each part, which two ranks cannot share."""
    rows, generator = 7 if step < 8 else 2, torch.Generator().manual_seed(step)
    return torch.randn(rows, 2, 6, 6, generator=generator), torch.randint(3, (rows,), generator=generator)


def smooth(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten().long(), label_smoothing=0.1)


def halve_rate(step: int) -> float:
    return 0.5 ** (step // 5)


class Watcher:
    """A callback that counts the steps of this process."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, step: int, model: nn.Module) -> None:
        self.steps += 1

    def on_evaluate(self, step: int, model: nn.Module) -> dict[str, int]:
        return {"watched": self.steps}

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def norms(out: Path, *, number: int = 0) -> None:
    """Train a model, batches, a loss, a schedule and an optimiser of one's own."""
    loop = TrainConfig(steps=10, accumulate=2, batch_size=8, log_every=1, eval_every=5, device="cpu", threads=1)
    own: dict[str, Any] = {"model": Normed(number), "batches": normed_batch, "valid": [normed_batch(99)]}
    own |= {"loss": smooth, "schedule": halve_rate, "optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9)}
    train(loop, out, verbose=False, **own)


def parts(out: Path, **changes: Any) -> int:
    """Train a language model with a loss, a schedule and a callback of one's own; return how many lines were logged."""
    logged: list[dict] = []
    given = {"loss": smooth, "schedule": halve_rate, "callbacks": [Watcher()], "on_log": logged.append}
    train(config(**changes), out, verbose=False, resume=True, **given)
    return len(logged)


def train_with_teacher(out: Path) -> None:
    """Train a classifier of images whose layers learn from those of another, with rows that ranks share unevenly."""
    sizes: dict[str, Any] = {"image_size": (8, 8), "patch": 2, "channels": 1, "classes": 10, "pool": "mean"}
    model = ViTConfig(8, 2, ({"name": "hydra"},), **sizes)
    loop = TrainConfig(steps=10, batch_size=6, accumulate=2, log_every=1, eval_every=5, threads=1, device="cpu")
    first = RunConfig(model, ImageDataConfig(), OptimConfig(lr=3e-3, warmup=2), replace(loop, eval_images=40))
    teacher = out.parent / f"{out.name} teacher"
    train(first.override({"train.steps": 2}), teacher, verbose=False)
    changes = {"train.teacher": str(teacher), "train.distill": 10.0, "train.seed": 1}
    train(first.override(changes), out, verbose=False)


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def step_with_overflow(rank: int, sharded: bool) -> tuple[float, bool]:
    """Make an update after one number of one rank overflowed; return the scale, and whether the weights stayed."""
    torch.manual_seed(0)
    model, scaler = nn.Linear(4, 4), torch.amp.GradScaler("cpu", init_scale=8.0)
    if sharded:
        fully_shard(model)
    before = [local(p).clone() for p in model.parameters()]
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "scale": 1.0}], lr=0.1)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    if rank == 1:
        local(model.weight.grad)[0, 0] = torch.inf
    if not sharded:
        sum_gradients(model)
    update(model, [optimizer], OptimConfig(), 0, 10, None, scaler)
    return scaler.get_scale(), all(torch.equal(a, local(p)) for a, p in zip(before, model.parameters(), strict=True))


def count_exchanges(out: Path) -> int:
    """Train two steps of two parts with sharded weights; return how often gradients were sent."""
    names = ("reduce_scatter_single", "reduce_scatter_tensor")  # since torch 2.13, and before
    name = next(each for each in names if hasattr(torch.distributed, each))
    calls, send = [], getattr(torch.distributed, name)
    setattr(torch.distributed, name, lambda *args, **given: (calls.append(1), send(*args, **given))[1])
    try:
        train(config(**FSDP, **{"train.steps": 2}), out, verbose=False)
    finally:
        setattr(torch.distributed, name, send)
    return len(calls)


def refusal_of(rank: int, name: str, out: str) -> str:
    changes = {"optim.lr": 0.1} if name == "unlike" and rank else {}
    try:
        train(config(**BAD[name], **changes), out, verbose=False)
    except MixerError as why:
        return str(why)
    return "nothing"


def computed(rank: int, ranks: int, work: tuple[str, ...]) -> dict:
    """Do each piece of work: "train JOB LAYOUT OUT", "resume JOB LAYOUT OUT FROM", "refuse NAME OUT", and so on."""
    said: dict[str, Any] = {}
    others: dict[str, Callable[..., Any]] = {
        "refuse": lambda name, out: refusal_of(rank, name, out),
        "short": lambda out: short(Path(out)),
        "norms": lambda out: norms(Path(out), number=rank),
        "taught": lambda out: train_with_teacher(Path(out)),
        "parts": lambda out, layout: parts(Path(out), **LAYOUTS[layout]),
        "overflow": lambda out: [step_with_overflow(rank, sharded) for sharded in (False, True)],
        "reduced": lambda out: count_exchanges(Path(out)),
    }
    for each in work:
        verb, *words = each.split("|")
        if verb in others:
            said[" ".join([verb, *words[1:]]) if verb != "refuse" else words[0]] = others[verb](*words)
            continue
        job, layout, out = words[:3]
        start = Path(words[3]) if verb == "resume" else None
        if start is not None and rank == 0:
            shutil.copytree(start, out)
        torch.distributed.barrier()
        in_dtype(job, Path(out), start=start, **LAYOUTS[layout])
    return said


def main() -> None:
    """Train in torchrun's process; ``full`` names the rank whose files may not grow beyond some bytes after a step."""
    out, full, *changes = sys.argv[1:]
    if os.environ["RANK"] == full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    try:
        train(config(**dict(json.loads(each) for each in changes)), out)
    except MixerError as why:
        print(f"error: {why}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
