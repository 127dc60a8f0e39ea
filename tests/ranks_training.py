"""What the processes of tests/test_ranks_training.py train; `python tests/ranks_training.py` is one of torchrun's."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tokenmix import MixerError
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.train import DataConfig, OptimConfig, RunConfig, TrainConfig, match_data, resume, train
from tokenmix.models import LMConfig

MIXERS = ({"name": "aft_simple"}, {"name": "aft_local", "window": 3}, {"name": "aft_forget"})
STEPS = 20
FSDP, TOKENS = {"train.shard": "fsdp"}, {"train.context_parallel": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"optim.name": "muon"},
    "average": {"optim.ema": 0.9},
}
LAYOUTS = {"whole": {}, "tokens": TOKENS, "fsdp": FSDP, "both": FSDP | TOKENS}
BAD: dict[str, dict[str, Any]] = {
    "segments": {"model.mixers": [{"name": "memory_compressed", "heads": 2}], **TOKENS},
    "divides": {"train.context_parallel": 3},
    "rows": {"train.batch_size": 1, "train.accumulate": 1},
    "penalty": {"optim.one_hot": 0.1, "model.mixers": [{"name": "aft_conv", "heads": 2, "kernel_size": 3}]},
    "compile": {"train.compile": True},
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


def train_losses(out: Path) -> list[float]:
    """The losses of a run's steps."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [x["loss"] for x in lines if x["kind"] == "train"]


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


def computed(rank: int, ranks: int, work: tuple[str, ...]) -> dict:
    """Do each piece of work: "train JOB LAYOUT OUT", "resume JOB LAYOUT OUT FROM", "short OUT" or "refuse NAME OUT"."""
    said = {}
    for each in work:
        verb, *words = each.split("|")
        if verb == "refuse":
            try:
                train(config(**BAD[words[0]]), words[1], verbose=False)
            except MixerError as why:
                said[words[0]] = str(why)
            continue
        if verb == "short":
            short(Path(words[0]))
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
