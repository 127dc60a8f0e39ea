"""`tokenmix report --watch`: what it finds, what it says has become of runs, and how it draws them on any terminal."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tokenmix import MixerError
from tokenmix.lab import cli
from tokenmix.lab.cli.output import can_show
from tokenmix.lab.report import curves
from tokenmix.lab.report.curves import Screen, clock, frame, table
from tokenmix.lab.report.live import Page
from tokenmix.lab.report.watch import Tail, Watch, Watched, find_runs
from tokenmix.system.lock import hold_lock

TEXT = {"model": {"kind": "lm"}, "train": {"steps": 100, "max_seconds": None}}
CLASSES = {"model": {"kind": "vit"}, "train": {"steps": 100, "max_seconds": None}}


def trained(step: int, **more: Any) -> dict[str, Any]:
    line = {"kind": "train", "step": step, "loss": 3.0 / step**0.3, "lr": 1e-3, "tokens": 64 * step}
    return {**line, "tokens_per_s": 12345.6, "seconds": step / 10, "peak_mib": 100.0, **more}


def scored(step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "eval", "split": "valid", "step": step, "bits_per_byte": 5.0 / step**0.3, "seconds": 9.0, **more}


def lines_of(steps: int) -> list[dict[str, Any]]:
    found = []
    for step in range(1, steps + 1):
        found += [trained(step)] + [scored(step)] * (step % 10 == 0)
    return found


def write(path: Path, lines: list[dict[str, Any]], config: dict[str, Any] = TEXT, saved: int = 0) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if saved:
        (path / "checkpoints" / f"step_{saved:08d}").mkdir(parents=True)
    return path


def note(path: Path, state: str, why: str = "") -> None:
    (path / ".lock").write_text(json.dumps({"state": state, "why": why}))


def once(capsys, *argv: str) -> str:
    assert cli.main(["report", "--watch", *argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_many_runs_in_a_folder(tmp_path, capsys):
    write(tmp_path / "sweep" / "deep" / "a", lines_of(100), saved=100)
    write(tmp_path / "sweep" / "b", lines_of(40), saved=40)
    write(tmp_path / "other", lines_of(7))
    out = once(capsys, str(tmp_path / "sweep"), str(tmp_path / "other"), "--once")
    rows = {line.split()[1]: line.split() for line in out.splitlines() if re.match(r"[a-z] \w", line)}
    assert list(rows) == ["b", "a", "other"]
    assert rows["a"][2:5] == ["finished", "100", "100%"]
    assert rows["b"][2:5] == ["stopped", "40", "40%"]
    assert rows["a"][6:] == ["1.256", "12.3", "k", "-"]
    assert max(map(len, out.splitlines())) <= 80
    assert "training loss, bits per byte, smoothed; points: validation" in out


def test_nothing_to_see_is_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert once(capsys, str(tmp_path / "empty")) == f"{tmp_path / 'empty'}: no run in it yet\n"
    write(tmp_path / "fresh", [])
    out = once(capsys, str(tmp_path / "fresh"))
    assert out.splitlines()[1].split() == ["a", "fresh", "new", "-", "0%", "-", "-", "-", "-"]
    assert len(out.splitlines()) == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["gone"], "gone does not exist; give run directories"),
        (["file"], "file is a file"),
        (["run", "--metric", "los"], "no run has the metric 'los'; nearest: "),
        (["run", "--every", "0"], "every must be above 0"),
        (["run", "--x", "epochs"], "--x"),
        (["run", "--out", "file/page.html"], "file"),
    ],
)
def test_what_does_not_work_is_one_line_and_exit_2(tmp_path, capsys, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run", lines_of(20))
    (tmp_path / "file").touch()
    assert cli.main(["report", "--watch", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_damaged_runs_are_one_line_each_and_hide_no_other(tmp_path, capsys):
    write(tmp_path / "good", lines_of(30))
    torn = write(tmp_path / "torn", lines_of(30))
    with (torn / "metrics.jsonl").open("a") as f:
        f.write('{"kind": "train"}\nnonsense\n{"kind": "train", "step": 31, "lo')
    (write(tmp_path / "config", lines_of(30)) / "config.json").write_text("{")
    write(tmp_path / "odd", lines_of(30), config={"model": 3})
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("[1]")
    (write(tmp_path / "strange", lines_of(3)) / ".lock").write_text("[")
    write(tmp_path / "sick", [trained(step, loss=float("nan")) for step in range(1, 9)])
    out = once(
        capsys, *(str(tmp_path / name) for name in ("good", "torn", "config", "odd", "model", "strange", "sick"))
    )
    said = [line for line in out.splitlines() if re.match(r"\w+: ", line)]
    assert said[0] == "torn: 2 lines of metrics.jsonl cannot be read and are left out"
    assert said[1].startswith("config: config.json is not readable JSON")
    assert said[2:] == ["odd: config.json is not the config of a run", "model: config.json is not the config of a run"]
    assert re.search(r"^a good +stopped +30 ", out, flags=re.MULTILINE)
    assert re.search(r"^g sick +stopped +8 +8% +nan ", out, flags=re.MULTILINE)


def test_states(tmp_path):
    def state(path: Path) -> str:
        run = Watched(path)
        run.read()
        return run.state

    run = write(tmp_path / "run", lines_of(50), saved=50)
    with hold_lock(run, "busy"):
        assert state(run) == "running"
    for said, seen in {"running": "killed", "stopped": "stopped", "failed": "failed", "ended": "stopped"}.items():
        note(run, said, "the loss became nan")
        assert state(run) == seen
    note(run, "failed", "the loss became nan")
    watch = Watch([run])
    watch.read()
    assert watch.notes() == ["run: the loss became nan"]
    done = write(tmp_path / "done", lines_of(100), saved=100)
    note(done, "failed", "a later resumption was refused")
    assert state(done) == "finished"
    unsaved = write(tmp_path / "unsaved", lines_of(100), saved=90)
    note(unsaved, "running")
    assert state(unsaved) == "killed"
    timed = write(tmp_path / "timed", lines_of(50), {**TEXT, "train": {"steps": None, "max_seconds": 5.0}}, saved=50)
    assert state(timed) == "finished"
    assert state(write(tmp_path / "new", [])) == "new"
    assert state(tmp_path / "nowhere") == "deleted"
    distilled = write(tmp_path / "d", lines_of(50), {"train": "all", "layer_steps": 20, "steps": 80, "model": {}})
    reader = Watched(distilled)
    reader.read()
    assert reader.done == 0.5


def test_time_left_follows_the_pace_of_the_last_lines(tmp_path):
    slow = [trained(step, seconds=step / 10) for step in range(1, 31)]
    slow += [trained(step, seconds=3 + step - 30.0) for step in range(31, 61)]
    run = Watched(write(tmp_path / "run", slow))
    run.read()
    assert run.left == pytest.approx(40.0)
    run.config = {**TEXT, "train": {"steps": 100, "max_seconds": 40.0}}
    assert run.left == pytest.approx(7.0)
    run.config = {**TEXT, "train": {}}
    assert run.left is None
    one = Watched(write(tmp_path / "one", [trained(5)]))
    one.read()
    assert one.left == pytest.approx(9.5)
    assert [clock(s) for s in (0, 61.4, 3661, 400_000)] == ["0:00:00", "0:01:01", "1:01:01", "4 d 15 h"]


def test_only_what_was_added_is_read(tmp_path):
    path = write(tmp_path / "run", lines_of(40)) / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read()
    assert not tail.read()
    with path.open("a") as f:
        f.write(json.dumps(trained(41))[:20])
    assert not tail.read()
    with path.open("a") as f:
        f.write(json.dumps(trained(41))[20:] + "\n")
    assert tail.read()
    assert tail.lines == [*lines_of(40), trained(41)]
    rest = path.read_text().splitlines(keepends=True)[:20]
    (tmp_path / "new").write_text("".join(rest))  # as a run that is resumed cuts its metrics
    (tmp_path / "new").replace(path)
    assert tail.read()
    assert tail.lines == [json.loads(line) for line in rest]
    path.write_text("".join(rest[:3]) + "damage\n")  # in place
    assert tail.read()
    assert (len(tail.lines), tail.bad) == (3, 1)
    path.write_text("")
    assert tail.read()
    assert tail.lines == []


def test_runs_appear_and_vanish_while_it_watches(tmp_path):
    watch = Watch([tmp_path])
    assert not watch.read()
    one = write(tmp_path / "x" / "run", lines_of(20))
    assert watch.read()
    assert not watch.read()
    write(tmp_path / "y" / "run", lines_of(20))
    shutil.copytree(one, tmp_path / ".run-0123.tmp")
    assert watch.read()
    assert [run.name for run in watch.runs.values()] == ["x/run", "y/run"]
    shutil.rmtree(one)
    assert watch.read()
    assert watch.notes() == ["x/run: the run directory was deleted"]
    assert re.search(r"^a x/run +deleted +20 ", frame(watch, Screen()), flags=re.MULTILINE)
    shutil.rmtree(tmp_path / "y")
    watch.read()
    assert "deleted" in frame(watch, Screen())


def test_runs_are_found_in_folders_only(tmp_path):
    run = write(tmp_path / "a" / "run", [])
    write(run / "inner", [])
    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "config.json").write_text("{}")
    assert list(find_runs(tmp_path)) == [run]
    assert list(find_runs(run)) == [run]
    assert list(find_runs(exported)) == [exported]  # named by the user, who is told what is missing
    watch = Watch([exported])
    watch.read()
    assert watch.notes() == ["exported: metrics.jsonl is missing"]


@pytest.fixture
def several(tmp_path):
    for name, steps in {"softmax": 100, "hydra": 60, "aft": 30}.items():
        write(tmp_path / name, lines_of(steps))
    top = [scored(s, top1=s / 100, cross_entropy=1.0 / s) for s in (10, 20)]
    write(tmp_path / "images", [trained(s, images=s, images_per_s=9.0) for s in range(1, 21)] + top, CLASSES)
    watch = Watch([tmp_path])
    watch.read()
    return watch


@pytest.mark.parametrize("unicode", [False, True])
@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, None), (40, 24), (200, 60), (80, 6)])
def test_a_frame_fits_its_screen(several, width, height, colour, unicode):
    pytest.importorskip("plotext", reason="plotext comes with the extra plot")
    text = frame(several, Screen(width, height, colour, unicode))
    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(map(len, bare.splitlines())) <= width
    assert height is None or len(bare.splitlines()) <= height
    assert colour == (text != bare) or height == 6
    assert unicode or bare.isascii()
    assert ("training loss" in bare) == (height != 6)
    if colour and unicode and height != 6:
        assert set(bare) & {chr(c) for c in range(0x2801, 0x2900)}


@pytest.mark.parametrize("x", ["step", "tokens", "seconds"])
@pytest.mark.parametrize("metric", ["loss", "score", "lr", "tokens_per_s", "bits_per_byte", "top1"])
def test_every_metric_can_be_drawn_against_everything(several, x, metric):
    pytest.importorskip("plotext", reason="plotext comes with the extra plot")
    several.check_metric(metric)
    text = frame(several, Screen(), x=x, metric=metric)
    assert {"step": "step", "tokens": "tokens", "seconds": "seconds of training"}[x] in text


def test_points_stand_where_the_run_was_when_it_was_evaluated(several):
    run = next(r for r in several.runs.values() if r.name == "aft").run
    assert curves._curve(run, "seconds", "score")[0][0] == [1.0, 2.0, 3.0]
    line, dots = curves._curve(run, "tokens", "loss")
    assert line[0] == [64.0 * s for s in range(1, 31)]
    assert dots == ([640.0, 1280.0, 1920.0], [scored(s)["bits_per_byte"] for s in (10, 20, 30)])
    assert line[1][0] == pytest.approx(3.0 / 0.6931, rel=1e-3)


def test_the_table_keeps_what_tells_runs_apart(tmp_path):
    write(tmp_path / "lr-0.001-a-very-long-name-of-a-run-indeed", lines_of(30))
    write(tmp_path / "\x1b[31mred\n", lines_of(30))
    watch = Watch([tmp_path])
    watch.read()
    runs = list(watch.runs.values())
    narrow = table(runs, Screen(50))
    assert max(map(len, narrow)) <= 50
    assert any(line.startswith("b lr-0.001") and "indeed" in line for line in table(runs, Screen(100)))
    assert "\\x1b[31mred\\n" in table(runs, Screen(100))[1]
    assert "tokens/s" in table(runs, Screen(100))[0]


def test_more_runs_than_lines(tmp_path):
    for i in range(40):
        write(tmp_path / f"run{i:02}", lines_of(3))
    watch = Watch([tmp_path])
    watch.read()
    lines = frame(watch, Screen(80, 24)).splitlines()
    assert len(lines) <= 24
    assert re.fullmatch(r"\.\.\. and \d+ more", lines[-1])
    assert len(table(list(watch.runs.values()), Screen())) == 41


def test_without_plotext_the_table_stays(several, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotext", None)
    text = frame(several, Screen())
    assert "curves need the extra 'plot': pip install 'tokenmix[plot]'." in text
    assert "softmax" in text


def test_an_ascii_terminal(tmp_path, monkeypatch):
    write(tmp_path / "née", lines_of(30))
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert not can_show("─")
    assert cli.main(["report", "--watch", str(tmp_path), "--once"]) == 0
    assert b"a n\\xe9e" in out.buffer.getvalue()


class Terminal(io.StringIO):
    """A terminal of 80 columns."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_live_frame_is_left_cleanly(tmp_path, monkeypatch):
    """It shows what was added between two looks; the last frame stays after Ctrl-C."""
    run, looks = write(tmp_path / "run", lines_of(20)), []

    def pause(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            raise KeyboardInterrupt
        write(run, lines_of(50))

    out = Terminal()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr(time, "sleep", pause)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert cli.main(["report", "--watch", str(tmp_path), "--every", "3"]) == 0
    assert looks == [3.0, 3.0]
    shown = out.getvalue()
    assert shown.index("\x1b[?1049h") < shown.index("\x1b[?1049l")  # the other screen, and back
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown[shown.rindex("\x1b[?1049l") :])
    assert re.search(r"━ run +stopped +50 +50%", last)
    monkeypatch.setenv("TERM", "dumb")
    assert cli.main(["report", "--watch", str(tmp_path)]) == 0
    assert len(looks) == 2


def test_a_page_is_written_when_something_changed(tmp_path, monkeypatch, capsys):
    from page_checks import check_page

    run, page = write(tmp_path / "runs" / "run", lines_of(20)), tmp_path / "page.html"
    once(capsys, str(tmp_path / "runs"), "--out", str(page))
    assert check_page(page) == []
    assert 'http-equiv="refresh"' not in page.read_text()
    watch, live = Watch([tmp_path / "runs"]), Page(page, 2.0)
    live.renew(watch, watch.read())
    text = page.read_text()
    assert '<meta http-equiv="refresh" content="5">' in text
    assert check_page(page) == []
    page.unlink()
    live.renew(watch, watch.read())
    assert not page.exists()
    write(run, lines_of(30))
    live.renew(watch, watch.read())
    assert not page.exists(), "too early"
    monkeypatch.setattr(time, "monotonic", lambda: 1e9)
    live.renew(watch, watch.read())
    assert page.exists()
    (run / "env.json").write_text("{")
    monkeypatch.setattr(time, "monotonic", lambda: 2e9)
    live.renew(watch, True)
    assert "env.json cannot be read" in live.trouble
    assert page.read_text() != ""
    with pytest.raises(MixerError, match="does not exist"):
        Watch([tmp_path / "nowhere"])


def test_a_page_that_cannot_be_written_is_no_success(tmp_path, monkeypatch, capsys):
    """A script that asks for the page once is told by the exit code; it was 0."""
    write(tmp_path / "run", lines_of(20))

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tokenmix.lab.report.live.write_report", full)
    assert cli.main(["report", str(tmp_path), "--watch", "--once", "--out", str(tmp_path / "page.html")]) == 1
    assert "page.html: not written: No space left on device" in capsys.readouterr().out
