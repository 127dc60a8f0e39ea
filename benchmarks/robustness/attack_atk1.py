"""Sizes that fit nowhere, and texts, runs and file systems as nobody had tried them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from . import attempt

LIMIT = 60  # seconds; what takes longer hangs
TINY = "--model.dim 8 --model.layers 1 --data.seq_len 16 --model.max_len 16 --train.steps 4 --train.batch_size 2"
TINY += " --train.eval_every 2 --train.save_every 2 --train.log_every 1 --train.eval_bytes 100 --train.sample_bytes 4"


def _told(*args: str) -> str:
    """Return how a command ends: in a line, in a traceback, or not at all."""
    command = [sys.executable, "-m", "tokenmix", *args]
    try:
        found = subprocess.run(command, capture_output=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return "hangs"
    said = found.stderr.decode(errors="replace")
    last = (said.strip().splitlines() or ["nothing said"])[-1]
    return f"exit {found.returncode}: {'traceback: ' if 'Traceback' in said else ''}{last[:200]!r}"


def _train(*more: str) -> str:
    """Train a small model of bytes."""
    Path("text.txt").write_bytes(b"the cat sat on the mat. " * 300)
    return _told("train", "text", "--data", "text.txt", *TINY.split(), *more)


@attempt("1", "A layer of a petabyte on the command line")
def layer_of_a_petabyte() -> str:
    """No machine has it."""
    return _train("--model.mlp_ratio", "1e13")


@attempt("2", "A million layers")
def million_layers() -> str:
    """Each of them is built."""
    return _train("--model.layers", "1000000")


@attempt("3", "A batch of a billion rows")
def billion_rows() -> str:
    """Each of them is drawn."""
    return _train("--train.batch_size", "1000000000")


@attempt("4", "A learned position for each of 10^13 tokens in an evaluation")
def resized_beyond_memory() -> str:
    """The model is stretched first."""
    _train("--out", "run")
    return _told("eval", "run", "--seq-len", "10000000000000", "--resize")


def _warned(recipe: str, changes: dict[str, object]) -> str:
    from tokenmix.recipes import RECIPES
    from tokenmix.train.idle_settings import idle_settings

    return "; ".join(idle_settings(RECIPES[recipe].config().override(changes))) or "no word"


@attempt("5", "Shards on one process, samples of a masked model, spans of a masked model, symbols of recall")
def idle() -> str:
    """None of them is read."""
    found = [_warned("text", {"train.shard": "fsdp"}), _warned("masked", {"train.samples": 3})]
    found += [_warned("masked", {"data.span": 5.0}), _warned("recall", {"data.symbols": 12})]
    return " | ".join(found)
