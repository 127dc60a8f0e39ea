"""Test that a task in one file outside of the package is trained, killed, resumed, exported, swept and reported."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from kill_nine import checkpoints, compare, kill_when, start
from tokenmix.lab.cli import main
from tokenmix.lab.train.registry import TASKS

ROOT = Path(__file__).resolve().parents[1]
KIND = "own_task:CountLetters"
SHORT = ["--train.steps", "40", "--train.eval_every", "20", "--train.save_every", "10", "--train.log_every", "1"]


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The example in the working folder, registered for one test only."""
    shutil.copy(ROOT / "examples" / "own_task.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("own_task", None)
    TASKS.pop(KIND, None)


def test_it_is_trained_killed_resumed_exported_swept_and_reported(example, capsys, monkeypatch):
    text = (ROOT / "examples" / "own_task.py").read_text()
    assert len(text.splitlines()) <= 60
    assert text.strip() in (ROOT / "docs" / "own-task.md").read_text(), "the page shows another file"

    run = Path("runs/own_task")
    process = start("train", "own_task.py", *SHORT)
    assert kill_when(process, lambda: bool(checkpoints(run))), process.stderr.read()
    assert main(["resume", str(run)]) == 2
    assert "set TOKENMIX_MODULES=own_task if you trust it" in capsys.readouterr().err
    monkeypatch.setenv("TOKENMIX_MODULES", "own_task.py")
    assert main(["resume", str(run)]) == 0
    assert main(["train", "own_task.py", *SHORT, "--out", "whole"]) == 0
    compare(Path("whole"), run)
    assert main(["eval", str(run)]) == 0
    assert "wrong by" in capsys.readouterr().out
    assert main(["sample", str(run)]) == 2
    assert "model of the task 'own_task:CountLetters', of which no samples are taken" in capsys.readouterr().err
    assert main(["export", str(run), "folder"]) == 0
    card = Path("folder/README.md").read_text()
    assert "An encoder of sequences of ids" in card
    assert "AutoModelForSequenceClassification" in card
    assert "fill-mask" not in card

    sweep = ["sweep", "own_task.py", "--out", "swept", "--rows", "aft_simple", "attention", "--rates", "3e-3"]
    assert main([*sweep, "--seeds", "0", "--steps", "4"]) == 0
    found = json.loads(Path("swept/results.json").read_text())
    assert {record["metric"] for record in found["runs"].values()} == {"mean_error"}
    assert found["yardsticks"]["constant predictor"] > 0
    assert main(["report", str(run), "--out", "page.html"]) == 0
    page = Path("page.html").read_text()
    for said in ("valid mean error", "Mean error: lower is better", "sequences/s"):
        assert said in page
