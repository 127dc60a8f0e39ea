"""Run directories that were edited or damaged, and runs that meet a full disk, a missing package or a signal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from tokenmix.lab import cli
from tokenmix.lab.train import DataConfig, OptimConfig, RunConfig, TrainConfig, train
from tokenmix.models import LMConfig

from . import attempt

TEXT = b"the cat sat on the mat. " * 400


def _config(**fields: Any) -> RunConfig:
    os.environ["XDG_CACHE_HOME"] = str(Path("cache").resolve())
    Path("a.txt").write_bytes(TEXT)
    model = LMConfig(dim=16, max_len=32, mixers=({"name": "attention", "heads": 2},), layers=1)
    loop = {
        "steps": 6,
        "batch_size": 2,
        "log_every": 1,
        "eval_every": 6,
        "eval_bytes": 200,
        "save_every": 3,
        "device": "cpu",
        "threads": 1,
        **fields,
    }
    return RunConfig(model, DataConfig("a.txt", seq_len=32), OptimConfig(warmup=0), TrainConfig(**loop))


def _run(**fields: Any) -> Path:
    train(_config(**fields), "run")
    return Path("run")


def _edit(file: Path, **changes: Any) -> None:
    """Set dotted fields (``a__b``) of a JSON file."""
    content = json.loads(file.read_text())
    for dotted, value in changes.items():
        node, *names = content, *dotted.split("__")
        for name in names[:-1]:
            node = node[name]
        node[names[-1]] = value
    file.write_text(json.dumps(content))


def _called(*argv: str, encoding: str = "utf-8") -> str:
    """What a command prints: its exit code, then the last line of its errors, or what ended it."""
    out, err = io.TextIOWrapper(io.BytesIO(), encoding=encoding), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: Any = cli.main(list(argv))
        except Exception as why:
            code = f"traceback, {type(why).__name__}"
            traceback.print_exc(file=err)
    said = err.getvalue().strip().splitlines()
    return f"{code}: {said[-1] if said else 'no error'}".replace(str(Path.cwd()), ".")


@attempt("7", "The learning rate is edited in config.json before a resume")
def edited_rate() -> str:
    """On the command line it is refused."""
    _edit(_run() / "config.json", optim__lr=0.5, train__steps=8)
    return _called("resume", "run", "--json")


@attempt("7", "The number of heads is edited in config.json before an evaluation")
def edited_heads() -> str:
    """The weights have the same shapes."""
    _edit(_run() / "config.json", model__mixers=[{"name": "attention", "heads": 4}])
    return _called("eval", "run")


@attempt("7", "The precision is changed in the middle of a run")
def changed_precision() -> str:
    """By the command line."""
    _run()
    return _called("resume", "run", "--train.precision", "bf16", "--train.steps", "8")


@attempt("11", "One byte of metrics.jsonl is damaged before a resume")
def damaged_metrics() -> str:
    """It is no UTF-8 any more."""
    file = _run() / "metrics.jsonl"
    content = bytearray(file.read_bytes())
    content[20] = 0xFF
    file.write_bytes(content)
    said = _called("resume", "run", "--train.steps", "7")
    kept = any(0xFF in p.read_bytes() for p in Path("run").glob("metrics*"))
    return f"{said[:90]}; the damaged line {'is kept' if kept else 'is gone'}"


@attempt("11", "A line of metrics.jsonl has no step, in a report")
def stepless_metrics() -> str:
    """And one is no object."""
    file = _run() / "metrics.jsonl"
    file.write_bytes(b'{"kind": "train", "loss": 1.0}\n[1]\n' + file.read_bytes())
    return _called("report", "run")[:100]


@attempt("12", "Pictures of what a vision model looks at, asked of a text model")
def pictures_of_text() -> str:
    """One line is the answer."""
    _run()
    return _called("look", "images", "run", "a.txt", "--out", "drawn")[:120]


@attempt("12", "A sample on a terminal that is not UTF-8")
def sample_in_ascii() -> str:
    """An untrained model writes any bytes."""
    _run(steps=1)
    return _called("sample", "run", "--bytes", "20", "--seed", "1", encoding="ascii")[:100]


@attempt("13", "`tokenmix sample` without options, of a model of 32 positions")
def default_sample() -> str:
    """As the README does after its training."""
    _run(steps=1)
    return _called("sample", "run")


@attempt("14", "Training without safetensors")
def no_safetensors() -> str:
    """What is lost."""
    sys.modules.update({"safetensors": None, "safetensors.torch": None})
    try:
        train(_config(), "run")
    except Exception as why:
        steps = len(Path("run/metrics.jsonl").read_text().splitlines()) if Path("run").exists() else 0
        return f"{type(why).__name__} after {steps} steps"
    return "it trains"


@attempt("15", "env.json says 1,000,000 threads")
def million_threads() -> str:
    """In a process of its own."""
    _edit(_run() / "env.json", threads=1_000_000)
    config = json.loads(Path("run/config.json").read_text())
    config["train"]["threads"] = None
    Path("run/config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "tokenmix", "resume", "run", "--train.steps", "7"], capture_output=True, text=True
    )
    return f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}"


@attempt("15", "env.json holds a list; a seed of 2^70; the device meta")
def other_shapes() -> str:
    """Three commands."""
    _run()
    Path("run/env.json").write_text("[1]")
    found = [_called("resume", "run")]
    for option in ("--train.seed=" + str(1 << 70), "--train.device=meta"):
        found.append(_called("train", "text", "--data", "a.txt", "--out", "new", option, "--train.steps=1"))
    return "; ".join(f[:60] for f in found)


@attempt("m", "A run is told to stop by SIGTERM")
def sigterm() -> str:
    """While it trains, after some steps."""
    _config()
    options = [
        "--row=attention",
        "--model.dim=16",
        "--train.steps=100000",
        "--train.eval_every=50000",
        "--train.save_every=50000",
        "--train.log_every=1",
    ]
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tokenmix",
            "train",
            "text",
            "--data",
            "a.txt",
            "--data.seq_len=32",
            "--out",
            "run",
            *options,
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    while child.poll() is None and not (
        Path("run/metrics.jsonl").exists() and Path("run/metrics.jsonl").read_bytes().count(b"\n") > 3
    ):
        time.sleep(0.01)
    child.terminate()
    lines = child.communicate()[1].strip().replace(str(Path.cwd()), ".").splitlines() or [""]
    said = "".join(c for c in lines[-1] if not c.isdigit())
    end = f"dies of signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
    return f"{end}, says {said[:90]!r}, checkpoints: {len(list(Path('run/checkpoints').glob('step_*')))}"


@attempt("m", "An evaluation of a run whose metrics cannot be written to")
def read_only_eval() -> str:
    """Whether the result is to be had."""
    run = _run()
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()  # nobody can append to it, root included
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            code = cli.main(["eval", "run"])
    return f"exit code {code}, {'the result is printed' if 'bits/byte' in out.getvalue() else 'the result is lost'}"
