"""Test that loops that are not ours log into a run directory, which report and watch read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kill_nine import lines
from tokenmix import MixerError, lab
from tokenmix.lab.cli import main
from tokenmix.lab.report.watch import Watch

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "own-parts.md").read_text()


def plain_loop(run: lab.Run, steps: range) -> None:
    """A loop as anybody writes it."""
    torch.manual_seed(0)
    weights = torch.zeros(3, requires_grad=True)
    for step in steps:
        x = torch.randn(8, 3)
        loss = F.mse_loss(x @ weights, x.sum(1))
        loss.backward()
        with torch.no_grad():
            weights -= 0.1 * weights.grad
        weights.grad = None
        run.log(step, loss=loss, lr=0.1)
    run.eval(steps[-1], error=(weights.detach() - 1).abs().mean())


def states(folder: Path) -> list[str]:
    watch = Watch([folder])
    watch.read()
    assert watch.notes() == []
    return [run.state for run in watch.runs.values()]


def test_a_plain_loop_is_reported_and_watched(tmp_path, capsys):
    folder = tmp_path / "plain"
    with lab.Run(folder, steps=20, score="error", config={"optim": {"name": "sgd"}}) as run:
        assert states(folder) == ["running"]
        plain_loop(run, range(1, 11))
        with pytest.raises(MixerError, match="another process is training"), lab.Run(folder, after=3):
            pass
    assert states(folder) == ["finished"]
    with lab.Run(folder, after=5) as run:
        plain_loop(run, range(6, 21))
    assert [line["step"] for line in lines(folder)] == [*range(1, 21), 20]
    with pytest.raises(ZeroDivisionError), lab.Run(folder, after=20):
        _ = 1 / 0
    watch = Watch([folder])
    watch.read()
    assert [(each.state, each.trouble) for each in watch.runs.values()] == [("failed", "division by zero")]
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html"), "--csv", str(tmp_path / "all.csv")]) == 0
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "valid error" in page
    assert "Error: lower is better" in page
    capsys.readouterr()
    assert main(["report", "--watch", "--once", str(folder)]) == 0
    assert "plain" in capsys.readouterr().out


def test_what_no_reader_knows_is_refused(tmp_path):
    with lab.Run(tmp_path / "run") as run:
        with pytest.raises(MixerError, match="no reader knows such a line"):
            run.log(1, loss="low")
        with pytest.raises(MixerError, match="no reader knows such a line"):
            run.log(-1, loss=1.0)
    with pytest.raises(MixerError):
        lab.Run(tmp_path / "run")
    with pytest.raises(MixerError, match="is not a run directory"):
        lab.Run(tmp_path / "none", after=3)
    with pytest.raises(AttributeError, match="no attribute 'Walk'"):
        lab.Walk  # noqa: B018  (the access is the test)


def test_the_least_files_of_the_page_are_enough(tmp_path, recwarn):
    """The table of the page is written as it stands, by no code of ours."""
    rows = dict(re.findall(r"^\| `(config\.json|env\.json|metrics\.jsonl)` \| (.*) \|$", PAGE, flags=re.MULTILINE))
    folder = tmp_path / "other"
    folder.mkdir()
    for name, text in rows.items():
        found = [piece for piece in re.findall(r"`(\{.*?\})`", text) if json.loads(piece)]
        (folder / name).write_text("".join(piece + "\n" for piece in found))
    assert len(lines(folder)) == 2
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert "valid loss" in (tmp_path / "page.html").read_text()
    assert main(["report", "--watch", "--once", str(folder)]) == 0
    assert not recwarn.list


def test_the_trainer_of_transformers_logs_into_a_run(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import TrainerCallback
    from transformers.trainer_utils import IntervalStrategy

    from huggingface_trainer import rows, trainer

    source = next(block for block in re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL) if "class ToRun" in block)
    space = {"TrainerCallback": TrainerCallback}
    exec(source[: source.index("\nwith ")], space)
    folder = tmp_path / "hf"
    loop = trainer(tmp_path / "out", logging_steps=2, save_strategy="no")
    loop.args.eval_strategy, loop.args.eval_steps, loop.eval_dataset = IntervalStrategy.STEPS, 3, rows()[:4]
    with lab.Run(folder, steps=6) as run:
        loop.add_callback(space["ToRun"](run))
        loop.train()
    found = lines(folder)
    assert [(line["kind"], line["step"]) for line in found] == [
        *[("train", 2), ("eval", 3), ("train", 4), ("train", 6), ("eval", 6)]
    ]
    assert found[0]["loss"] > 0
    assert found[0]["grad_norm"] > 0
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert "valid loss" in (tmp_path / "page.html").read_text()
    assert states(folder) == ["finished"]
