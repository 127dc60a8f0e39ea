"""Folders of runs as somebody else sends them: links, pipes, odd names and numbers; and what is typed by mistake."""

from __future__ import annotations

import json
import os
from pathlib import Path

from . import attempt, result_of_command, run_command


def _run() -> Path:
    """Train a small run."""
    from tokenmix.lab.recipes import RECIPES
    from tokenmix.lab.train import train

    Path("text.txt").write_bytes(b"the cat sat on the mat. " * 300)
    fields = {"data.source": str(Path("text.txt").resolve()), "data.seq_len": 16, "model.max_len": 16, "model.dim": 8}
    fields |= {"model.layers": 1, "train.steps": 4, "train.eval_every": 2, "train.save_every": 2}
    fields |= {"train.batch_size": 2, "train.eval_bytes": 100, "train.sample_bytes": 4, "train.log_every": 1}
    train(RECIPES["text"].config("aft_simple").override(fields), "run", verbose=False)
    return Path("run")


@attempt("1", "A link among the samples of a run that is reported")
def link_in_samples() -> str:
    """The page is shared, and holds what the link leads to."""
    run = _run()
    Path("secret.txt").write_text("the secret text")
    (run / "samples" / "step_00000099.txt").symlink_to(Path("secret.txt").resolve())
    told = result_of_command("report", "run", "--out", "page.html")
    return f"the page holds the secret: {'the secret text' in Path('page.html').read_text()}; {told}"


@attempt("2", "A pipe in place of a run's metrics, watched")
def pipe_for_metrics() -> str:
    """Nobody writes into it."""
    run = _run()
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    return result_of_command("report", "run", "--watch", "--once")


@attempt("3", "A loss of 1e308 in a run's metrics")
def huge_loss() -> str:
    """A finite number, of which no curve can be drawn."""
    run = _run()
    with (run / "metrics.jsonl").open("a") as f:
        f.write(json.dumps({"kind": "train", "step": 4, "loss": 1e308, "bpb": 1e308, "seconds": 4.0}) + "\n")
    return (
        f"watch {result_of_command('report', 'run', '--watch', '--once')}; report {result_of_command('report', 'run')}"
    )


@attempt("4", "A folder of checkpoints with a superscript for its step")
def superscript_step() -> str:
    """It is a digit to Python, and no number."""
    (_run() / "checkpoints" / "step_²").mkdir()
    return (
        f"watch {result_of_command('report', 'run', '--watch', '--once')}; resume {result_of_command('resume', 'run')}"
    )


@attempt("5", "A config of a run with a model of 10^12 features, or without data")
def odd_configs() -> str:
    """As after an edit."""
    run = _run()
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "model": {**config["model"], "dim": 10**12}}))
    wide = result_of_command("report", "run")
    (run / "config.json").write_text(json.dumps({**config, "data": None}))
    return f"report {wide}; watch {result_of_command('report', 'run', '--watch', '--once')}"


@attempt("6", "Sampling at a temperature of 1e-300")
def coldest() -> str:
    """Every logit divided by it is infinite."""
    _run()
    return result_of_command("sample", "run", "--bytes", "5", "--temperature", "1e-300")


@attempt("7", "A mistyped option, and one in a terminal without boxes")
def mistyped() -> str:
    """The parser answered with the options of other verbs."""
    plain = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    typed = run_command("sample", "x", "--n", "5"), run_command("report", "x", "--every", "1", env=plain)
    return "; ".join(f"exit {each.returncode}, {len(each.stderr)} characters" for each in typed)


@attempt("8", "A name with an escape sequence")
def escapes() -> str:
    """It would clear the terminal."""
    clear = "\x1b[2J"
    return f"the escape is echoed: {clear in run_command('report', f'{clear}x').stderr}"


@attempt("9", "More steps for a run with a cosine schedule")
def longer_cosine() -> str:
    """The rate jumps up again."""
    _run()
    said = run_command("resume", "run", "--train.steps", "8").stderr
    return f"the schedule is mentioned: {'schedule' in said}"
