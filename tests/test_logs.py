"""What a run writes beside metrics.jsonl: a CSV table and TensorBoard's files, right after any end and resumption."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

import kill_nine
from run_dirs import SPECS
from tokenmix import MixerError
from tokenmix.lab import cli
from tokenmix.lab.data.metrics_csv import append_csv, write_csv
from tokenmix.lab.train import DataConfig, RunConfig, TrainConfig, evaluate_run, resume, train
from tokenmix.lab.train.loop import Trainer
from tokenmix.lab.train.rundir import RunDir
from tokenmix.lab.train.sinks import wait_for_later_name
from tokenmix.models import LMConfig
from tokenmix.system.lock import hold_lock, read_lock

TIMING = {"seconds", "tokens_per_s", "peak_mib", "eval_seconds"}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"%d and %d\n" % (i % 97, i % 89) for i in range(900)))
    return path


def config(text: Path, **loop) -> RunConfig:
    fields = {"steps": 12, "batch_size": 2, "log_every": 2, "eval_every": 6, "eval_bytes": 300, "save_every": 4}
    return RunConfig(
        LMConfig(dim=8, max_len=16, mixers=SPECS["attention"]),
        DataConfig(str(text), seq_len=16),
        train=TrainConfig(**{**fields, "sample_bytes": 4, "keep": 9, "threads": 1, "device": "cpu", **loop}),
    )


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> Path:
    """A run nobody touched, with all its logs."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(config(text, csv=True, tensorboard=True), out)
    return out


@pytest.fixture
def run(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def table(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as f:
        return list(csv.DictReader(f))


def repeatable(run: Path) -> list[dict[str, str]]:
    """The table without what differs between two equal runs."""
    return [{k: v for k, v in row.items() if k not in TIMING} for row in table(run)]


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_the_table_has_a_row_for_each_line_and_a_column_for_each_number(whole):
    lines, rows = RunDir(whole).read_metrics(), table(whole)
    assert [(row["kind"], int(row["step"])) for row in rows] == [(x["kind"], x["step"]) for x in lines]
    head = (whole / "metrics.csv").read_text().split("\n")[0].split(",")
    assert head[:9] == ["kind", "split", "step", "seconds", "tokens", "loss", "bpb", "lr", "bits_per_byte"]
    assert head[9:] == ["bytes", "eval_seconds", "peak_mib", "seq_len", "stride", "tokens_per_s"]
    for line, row in zip(lines, rows, strict=True):
        assert row["seconds"] == (str(line["seconds"]) if line["kind"] == "train" else "")
        assert float(row["loss"] or 0) == line.get("loss", 0)
        assert float(row["bits_per_byte"] or 0) == line.get("bits_per_byte", 0)


def test_logs_do_not_change_the_numbers(whole, text, tmp_path):
    train(config(text), tmp_path / "plain")
    kill_nine.compare(whole, tmp_path / "plain")
    assert not (tmp_path / "plain" / "metrics.csv").exists()
    assert not (tmp_path / "plain" / "tensorboard").exists()


@pytest.mark.parametrize("step", [None, 4, 8])
def test_a_resumed_run_has_the_logs_of_an_uninterrupted_one(run, whole, step):
    resume(run, from_step=step)
    assert repeatable(run) == repeatable(whole)
    now, before = scalars(run), scalars(whole)
    assert {name: [s for s, _ in points] for name, points in now.items()} == {
        name: [s for s, _ in points] for name, points in before.items()
    }
    assert now["train/loss"] == before["train/loss"]


@pytest.mark.parametrize("last", [3, 7, 9])
def test_a_run_that_broke_off_has_the_logs_of_an_uninterrupted_one(whole, text, tmp_path, monkeypatch, last):
    """It ends in the middle of a row, with rows of steps that come again."""
    real, out = Trainer.append_metrics, tmp_path / "run"

    def breaking(self, line):
        real(self, line)
        if line["step"] >= last:
            raise RuntimeError("broken off")

    monkeypatch.setattr(Trainer, "append_metrics", breaking)
    with pytest.raises(RuntimeError, match="broken off"):
        train(config(text, csv=True, tensorboard=True), out)
    with (out / "metrics.csv").open("a") as f:
        f.write("train,,10,0.")
    monkeypatch.setattr(Trainer, "append_metrics", real)
    resume(out)
    assert repeatable(out) == repeatable(whole)
    assert scalars(out)["train/loss"] == scalars(whole)["train/loss"]
    assert scalars(out)["valid/bits_per_byte"] == scalars(whole)["valid/bits_per_byte"]


def test_logs_can_begin_and_end_at_a_resumption(text, tmp_path, whole):
    out = tmp_path / "run"
    train(config(text, steps=6), out)
    assert not (out / "metrics.csv").exists()
    resume(out, changes={"train.steps": 12, "train.csv": True, "train.tensorboard": True})
    kinds = [(row["kind"], row["step"]) for row in table(whole)]
    assert [(row["kind"], row["step"]) for row in table(out)] == kinds
    assert [s for s, _ in scalars(out)["train/loss"]] == [2, 4, 6, 8, 10, 12]
    resume(out, from_step=8, changes={"train.csv": False, "train.tensorboard": False})
    assert max(int(row["step"]) for row in table(out)) == 8  # the rows of steps that were repeated are gone


def test_tensorboard_shows_lines_and_samples(whole):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown, lines = scalars(whole), RunDir(whole).read_metrics()
    assert shown["train/loss"] == [
        (x["step"], pytest.approx(x["loss"], rel=1e-6)) for x in lines if x["kind"] == "train"
    ]
    assert [s for s, _ in shown["valid/bits_per_byte"]] == [6, 12]
    assert {"train/lr", "train/tokens_per_s", "valid/seconds"} <= set(shown)
    found = EventAccumulator(str(whole / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    texts = [e.tensor_proto.string_val[0].decode() for e in found.Tensors("sample/text_summary")]
    assert len(texts) == 2
    assert texts[0].startswith("    ")


def test_tensorboard_shows_images(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from tokenmix.lab.train.image_tasks import write_grid
    from tokenmix.lab.train.sinks import TensorBoard

    run = RunDir(tmp_path)
    run.samples.mkdir()
    write_grid(run.samples / "step_00000003.png", torch.zeros(2, 1, 8, 8, dtype=torch.uint8), columns=2)
    sink = TensorBoard(run, 0)
    sink.add_samples(3)
    sink.close()
    (image,) = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Images("sample")
    assert (image.step, image.encoded_image_string) == (3, (run.samples / "step_00000003.png").read_bytes())


def test_a_missing_tensorboard_is_one_line_before_anything_is_written(text, tmp_path, monkeypatch, run):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(MixerError, match=r"extra 'tensorboard' .*pip install 'tokenmix\[tensorboard\]'"):
        train(config(text, tensorboard=True), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(MixerError, match="extra 'tensorboard'"):
        resume(run, from_step=4)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_an_evaluation_afterwards_is_a_row_too(run):
    evaluate_run(run, split="test", device="cpu", max_bytes=200)
    assert [row["split"] for row in table(run)][-2:] == ["valid", "test"]


def test_a_full_disk_under_the_table_is_one_clear_error(text, tmp_path, monkeypatch):
    from tokenmix.lab.train import sinks

    def full(*args):
        raise OSError(28, "No space left on device", str(tmp_path / "run" / "metrics.csv"))

    monkeypatch.setattr(sinks, "append_csv", full)
    with pytest.raises(MixerError, match=r"metrics.csv could not be written .No space left on device"):
        train(config(text, csv=True), tmp_path / "run")


def test_a_table_that_cannot_take_a_row_is_written_anew(tmp_path):
    metrics, out = tmp_path / "metrics.jsonl", tmp_path / "metrics.csv"
    lines = [
        {"kind": "train", "step": 1, "loss": 2.5, "aux": {"balance": 1.0}},
        {"kind": "train", "step": 2, "loss": float("nan")},
        {"kind": "eval", "split": "valid", "step": 2, "top1": 0.5, "image_size": [8, 8], "images": 3, "seconds": 1.0},
    ]
    for i, line in enumerate(lines):
        metrics.write_text("".join(json.dumps(x) + "\n" for x in lines[: i + 1]))
        append_csv(out, metrics, line)
    one = out.read_text()
    assert one.split("\n") == [
        "kind,split,step,loss,aux.balance,eval_images,eval_seconds,image_size,top1",
        "train,,1,2.5,1.0,,,,",
        "train,,2,nan,,,,,",
        "eval,valid,2,,,3,1.0,8x8,0.5",
        "",
    ]
    for damage in (one[:-3], "", "kind,step\n", "\n\n"):
        out.write_text(damage)
        append_csv(out, metrics, lines[-1])
        assert out.read_text() == one
    write_csv(out, [])
    assert out.read_text() == ""


def test_report_writes_one_table_of_several_runs(run, whole, tmp_path, capsys):
    (run / "metrics.jsonl").write_text(RunDir(run).metrics.read_text().split("\n")[0] + "\n")
    out = tmp_path / "all.csv"
    assert cli.main(["report", str(run), str(whole), "--csv", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    with out.open(newline="") as f:
        rows = list(csv.DictReader(f))
    names = [f"{tmp_path.name}/run", f"{whole.parent.name}/run"]
    assert [row["run"] for row in rows] == [names[0]] + [names[1]] * len(table(whole))
    assert next(iter(rows[0])) == "run"
    assert not (run / "report.html").exists()


def test_the_flags_are_shorthands_of_fields(text, tmp_path):
    out = str(tmp_path / "run")
    small = ["--model.dim", "8", "--model.layers", "1", "--model.max_len", "16", "--data.seq_len", "16"]
    small += ["--train.steps", "2", "--train.batch_size", "2", "--train.eval_bytes", "300", "--train.threads", "1"]
    assert cli.main(["train", "text", "--row", "attention", "--data", str(text), "--out", out, *small, "--csv"]) == 0
    said = json.loads(Path(out, "config.json").read_text())["train"]
    assert (said["csv"], said["tensorboard"]) == (True, False)
    assert len(table(Path(out))) == 2
    assert cli.main(["resume", out, "--train.steps", "3", "--tensorboard"]) == 0
    said = json.loads(Path(out, "config.json").read_text())["train"]
    assert (said["csv"], said["tensorboard"]) == (True, True)
    assert [s for s, _ in scalars(Path(out))["train/loss"]] == [2, 3]


def test_sigkill_leaves_logs_that_can_be_read(text, tmp_path):
    from tokenmix.lab.report.watch import Watch

    out = tmp_path / "run"
    small = ["--model.dim", "8", "--model.layers", "1", "--model.max_len", "16", "--data.seq_len", "16"]
    small += ["--train.steps", "100000", "--train.log_every", "1", "--train.save_every", "20", "--train.threads", "1"]
    small += ["--train.eval_every", "50", "--train.eval_bytes", "300"]
    logs = ["--csv", "--tensorboard", "--out", str(out), "--data", str(text)]
    process = kill_nine.start("train", "text", "--row", "attention", *small, *logs)
    watch = []

    def ready() -> bool:
        if kill_nine.last_step(out) >= 55 and not watch:
            watch.append(Watch([out]))
            watch[0].read()
            assert next(iter(watch[0].runs.values())).state == "running"
        return kill_nine.last_step(out) >= 70

    assert kill_nine.kill_when(process, ready)
    watch[0].read()
    assert next(iter(watch[0].runs.values())).state == "killed"
    assert len(table(out)) >= 69  # the kill may come between the metrics and the other two
    assert [s for s, _ in scalars(out)["train/loss"]][:69] == list(range(1, 70))
    saved = int(kill_nine.checkpoints(out)[-1].name[5:])
    resume(out, changes={"train.steps": saved + 25})
    assert [s for s, _ in scalars(out)["train/loss"]] == list(range(1, saved + 26))
    assert [int(row["step"]) for row in table(out) if row["kind"] == "train"] == list(range(1, saved + 26))


@pytest.mark.parametrize(
    ("why", "state"), [(None, "ended"), (KeyboardInterrupt(), "stopped"), (MixerError("the loss\nis nan"), "failed")]
)
def test_a_lock_says_how_its_holder_ended(tmp_path, why, state):
    assert read_lock(tmp_path) == (False, {"state": "", "why": ""})

    def hold():
        with hold_lock(tmp_path, "busy"):
            assert read_lock(tmp_path) == (True, {"state": "running", "why": ""})
            with pytest.raises(MixerError, match="busy"), hold_lock(tmp_path, "busy"):
                pass
            assert read_lock(tmp_path)[1]["state"] == "running"
            if why is not None:
                raise why

    if why is None:
        hold()
    else:
        with pytest.raises(type(why)):
            hold()
    assert read_lock(tmp_path) == (False, {"state": state, "why": "the loss is nan" if state == "failed" else ""})


def test_who_only_looks_keeps_nobody_out(tmp_path):
    """A look holds the lock for a moment; a run that begins in that moment waits for it."""
    import fcntl
    import threading

    with hold_lock(tmp_path, "busy"):
        pass
    with (tmp_path / ".lock").open("rb") as f:
        fcntl.flock(f, fcntl.LOCK_SH)
        timer = threading.Timer(0.01, lambda: fcntl.flock(f, fcntl.LOCK_UN))
        timer.start()
        with hold_lock(tmp_path, "busy"):
            pass
        timer.join()
    (tmp_path / ".lock").write_bytes(os.urandom(20))
    assert read_lock(tmp_path)[0] is False


def test_a_run_that_goes_on_within_the_same_second_is_read_after_the_first(tmp_path):
    """The names of TensorBoard's files order them by second, then by process."""
    first = tmp_path / f"events.out.tfevents.{int(time.time())}.host.99999.0"
    first.touch()
    wait_for_later_name(tmp_path)
    assert int(time.time()) > int(first.name.split(".")[3])
    (tmp_path / f"events.out.tfevents.{int(time.time()) + 3600}.host.1.0").touch()
    wait_for_later_name(tmp_path)  # a clock that was put back does not hold the run up
