"""Sweeps: rows are tuned alike, any interruption leaves the same table, verdicts need what the protocol asks."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from image_sets import noise, save
from page_checks import check_page
from tokenmix import MixerError
from tokenmix.lab import cli
from tokenmix.lab.report.figures import Picture
from tokenmix.lab.sweep import Results, SweepPlan, compare, curves, results_table, shortcomings, sweep, worker
from tokenmix.lab.sweep import run as run_module
from tokenmix.lab.sweep.curves import final_pictures, tuning_pictures
from tokenmix.lab.sweep.modules import load_modules
from tokenmix.lab.sweep.plan import Job, Jobs, run_key
from tokenmix.lab.sweep.results import markdown
from tokenmix.lab.sweep.run import FLOOR, Queue, middle_first
from tokenmix.lab.sweep.sweep_page import comparison_table, write_sweep_page
from tokenmix.lab.train import evaluate_run
from tokenmix.lab.train.rundir import RunDir
from tokenmix.models import build_model
from tokenmix.system.lock import hold_lock

ROOT = Path(__file__).parents[1]
SMALL = {"model.dim": 16, "model.layers": 1, "model.max_len": 16, "data.seq_len": 16, "train.batch_size": 2}
SMALL |= {"train.eval_bytes": 200, "train.eval_batch": 4}
PLAN = SweepPlan("text", {"aft_simple": {}, "hydra": {}}, rates=(1e-3, 1e-2, 1e-1), seeds=(0, 1), steps=8, tune=0.5)


@pytest.fixture
def plan(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 60)
    return replace(PLAN, changes={**SMALL, "data.source": str(text)})


class Inline:
    """A worker's process, run within this one."""

    returncode = 0

    def __init__(self, command, **_):
        worker.main(command[-1])

    def poll(self):
        return 0

    wait = terminate = poll


@contextlib.contextmanager
def in_this_process():
    """Let jobs run in this process, as starting one takes seconds; its cores stay as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module.subprocess, "Popen", Inline)
        patch.setattr(run_module, "slot_cores", lambda slot, threads: [])
        patch.setattr(worker, "_end_with_parent", lambda parent: None)
        yield


@pytest.fixture
def inline():
    with in_this_process():
        yield


def finished(tmp_path, scores: dict[str, list[float]], yardsticks=((FLOOR, 100.0),), **changes) -> Results:
    """Return results with these final scores, as if three rates had been tried for each row."""
    rows = {row: {} for row in scores}
    plan = replace(PLAN, rows=rows, seeds=tuple(range(max(map(len, scores.values())))), shell="modern", **changes)
    found = Results(tmp_path / "results.json", plan, yardsticks=dict(yardsticks))
    common = {"metric": "bits_per_byte", "steps": 8, "tokens": 256, "seconds": 1.0, "peak_mib": 1.0, "parameters": 7}
    common |= {"curve": [[256, 1.0, 1.0]], "stopped": False}
    for row, each in scores.items():
        for rate in plan.rates:
            found.runs[f"tune/{row}/{rate}"] = {"phase": "tune", "row": row, "rate": rate, "seed": 0, "score": rate}
            found.runs[f"tune/{row}/{rate}"] |= common
        for seed, score in enumerate(each):
            record = {"phase": "final", "row": row, "rate": 1e-3, "seed": seed, "score": score}
            found.runs[f"final/{row}/{seed}"] = record | common
    return found


def test_a_run_without_others_beside_it_is_kept_on_no_core(plan, tmp_path, inline, monkeypatch):
    """Two sweeps of one process each once shared the first core, while the second had nothing to do."""
    monkeypatch.setattr(run_module, "slot_cores", lambda slot, threads: [0])
    sweep(replace(plan, rows={"hydra": {}}, seeds=(3,), hopeless=None), tmp_path / "out")
    files = [file for file in (tmp_path / "out/jobs").glob("*.json") if "outcome" not in file.name]
    assert [json.loads(file.read_text())["cores"] for file in files] == [[]] * len(files)
    assert len(files) >= 4


def test_rows_are_tuned_and_repeated(plan, tmp_path, inline, monkeypatch):
    said, built = [], []
    build = SweepPlan.config
    monkeypatch.setattr(SweepPlan, "config", lambda self, row: built.append(row) or build(self, row))
    out, pages = tmp_path / "out", []

    def tell(line):
        said.append(line)
        pages.append((out / "sweep.html").read_text())

    found = sweep(replace(plan, seeds=(3,), hopeless=None), out, tell=tell)
    assert len(said) == len(found.runs) == 2 * (3 + 1)
    assert sorted(built) == sorted(plan.rows)  # once each: the config of a plan on images reads their file
    for row in plan.rows:
        tried = {r["rate"]: r["score"] for r in found.of("tune", row)}
        assert found.best_rate(row) == min(tried, key=lambda rate: tried[rate])
        (final,) = found.of("final", row)
        assert (final["rate"], final["seed"], final["steps"]) == (found.best_rate(row), 3, 8)
        assert [point[0] for point in final["curve"]] == [32 * step for step in range(1, 9)]
        config = json.loads(
            (tmp_path / "out" / "runs" / f"final/{row}/rate_{final['rate']:g}_seed_3/config.json").read_text()
        )
        assert config["train"]["seed"] == 3
    assert (tmp_path / "out" / "table.md").read_text() == markdown(results_table(found))
    assert (tmp_path / "out" / "curves.png").stat().st_size > 1000
    last = (out / "sweep.html").read_text()
    assert "0 of 8 runs have ended, 1 in progress, 7 to come" in pages[0]
    assert "All 8 runs have ended" in last
    reloads = '<meta http-equiv="refresh"'
    assert (reloads in pages[0], reloads in last) == (True, False)
    again = []
    assert sweep(None, tmp_path / "out", tell=again.append).runs == found.runs
    assert again == []


def test_any_kill_leaves_the_same_table(plan, tmp_path):
    """kill -9 takes the workers along; the same command goes on, and finished runs are not repeated.

    SIGTERM lets them save first.
    """
    plan = replace(plan, rows={"aft_simple": {}}, rates=(1e-3, 1e-2))
    with in_this_process():
        whole = sweep(plan, tmp_path / "whole")
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    command = [sys.executable, "-m", "tokenmix", "sweep", str(tmp_path / "plan.json"), "--out", str(tmp_path / "cut")]
    for wanted, number in ((1, signal.SIGKILL), (2, signal.SIGTERM)):  # the final runs take seconds to start
        with (tmp_path / "said").open("w") as said:
            process = subprocess.Popen([*command, "--processes", "2"], stderr=said, stdout=said)
        results = tmp_path / "cut" / "results.json"
        while process.poll() is None and not (
            results.exists() and len(json.loads(results.read_text())["runs"]) >= wanted
        ):
            time.sleep(0.05)
        assert process.poll() is None, (tmp_path / "said").read_text()
        os.kill(process.pid, number)
        assert process.wait() == (-9 if number == signal.SIGKILL else 143)
    before = json.loads(results.read_text())["runs"]
    with in_this_process():
        found = sweep(plan, tmp_path / "cut")
    assert len(before) < len(found.runs) == len(whole.runs)
    for key, record in whole.runs.items():
        for name in ("score", "rate", "steps", "stopped", "tokens"):
            assert found.runs[key][name] == record[name], (key, name)
    assert all(found.runs[key] == record for key, record in before.items())


def test_a_worker_whose_sweep_was_killed_before_it_could_look_trains_nothing(plan, tmp_path):
    job = Jobs(replace(plan, rows={"aft_simple": {}}), 1).tune("aft_simple", 1e-3)
    said = {"run": str(tmp_path / "run"), "outcome": str(tmp_path / "outcome.json"), "config": job.config.to_json()}
    said |= {"limits": {}, "test_bytes": None, "lengths": [], "final": False, "probe": False, "modules": []}
    for parent, trains in ((os.getppid(), False), (os.getpid(), True)):
        (tmp_path / "job.json").write_text(json.dumps(said | {"parent": parent}))
        ended = subprocess.run(
            [sys.executable, "-m", "tokenmix.lab.sweep.worker", str(tmp_path / "job.json")], check=False
        )
        assert (tmp_path / "run").exists() == (tmp_path / "outcome.json").exists() == trains
        assert ended.returncode == (0 if trains else 1)


def test_a_hopeless_rate_is_given_up_half_way(plan, tmp_path, inline):
    """A rate of 1e-9 learns nothing, so it misses the limit that the rate before it has set."""
    plan = replace(plan, rows={"aft_simple": {}, "hydra": {}}, rates=(1e-9, 3e-2), seeds=(0,), hopeless=0.01, steps=40)
    found = sweep(plan, tmp_path / "out")
    for row in plan.rows:
        bad, good = found.of("tune", row)
        order = middle_first(plan.rates)
        assert good["steps"] == 20
        assert not good["stopped"]
        assert bad["steps"] == (10 if order[0] == 3e-2 else 20)


def test_a_rate_that_diverges_is_not_the_best(plan, tmp_path, inline):
    found = sweep(replace(plan, rates=(1e-2, 1e30), seeds=(0,), hopeless=None), tmp_path / "out")
    for row in plan.rows:
        assert found.best_rate(row) == 1e-2
        assert [r["score"] is None for r in found.of("tune", row)] == [False, True]
        assert all(r["peak_mib"] > 0 for r in found.of("tune", row))


def test_a_row_whose_rates_all_diverge_ends_the_sweep_and_stands_in_table_and_page(plan, tmp_path, inline):
    with pytest.raises(MixerError, match="every rate of row 'aft_simple' diverged; give lower rates"):
        sweep(replace(plan, rates=(1e29, 1e30), hopeless=None), tmp_path)
    assert "| aft_simple | not measured | - | 0 | all diverged |" in (tmp_path / "table.md").read_text()
    page = (tmp_path / "sweep.html").read_text()
    assert "<td>all diverged</td>" in page
    assert "The sweep was stopped" in page


def test_a_row_with_a_bar_in_its_name_stays_in_its_column(tmp_path):
    assert "\n| a \\| b | 1.000 |" in markdown(results_table(finished(tmp_path, {"a | b": [1.0]})))


def test_a_single_rate_is_named_as_not_tuned(plan, tmp_path):
    ended = finished(tmp_path, {"a": [1.0, 1.1], "b": [1.5]}, rates=(2e-3,))
    for found in (Results(tmp_path / "results.json", replace(plan, rates=(2e-3,))), ended):
        table = results_table(found)
        assert [line[4] for line in table.rows] == ["0.002, not tuned"] * 2
        assert table.title.endswith("equal tokens; not tuned: one rate, 0.002")
    assert "not tuned yet" in results_table(Results(tmp_path / "none.json", plan)).text()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": {}}, "rows is empty"),
        ({"seeds": ()}, "seeds is empty; give at least one"),
        ({"rates": (1e-3, 1e-3)}, "holds the same value twice"),
        ({"rates": (-1.0,)}, "rates must be positive"),
        ({"tune": 0.0}, "tune must be in"),
        ({"confirm": 0}, "confirm must be an integer from 1 to the number of rates, 3, got 0"),
        ({"confirm": 4}, "confirm must be an integer from 1 to the number of rates, 3, got 4"),
        ({"equal": "time"}, "choose 'tokens', or 'time' and its seconds"),
        ({"shell": "classic"}, "no shell 'classic'"),
        ({"rows": {"..": {}}}, "becomes a folder"),
        ({"seeds": (1 << 65,)}, "out of range"),
        ({"rates": (float("nan"),)}, "rates must be positive"),
        ({"rates": (1e-3, float("inf"))}, "rates must be positive"),
        ({"rates": (10**400,)}, "rates must be positive"),
        ({"rates": ("1e-3",)}, "rates must be a list of numbers, got '1e-3' in it"),
        ({"rates": (True,)}, "rates must be a list of numbers"),
        ({"rates": (1e-3, 1.0000001e-3)}, "holds the same value twice"),  # their runs have the same folder
        ({"seeds": ("0",)}, "seeds must be a list of integers"),
        ({"seeds": (1.5,)}, "seeds must be a list of integers"),
        ({"modules": (None,)}, "modules must be a list of names"),
        ({"rows": ["aft_simple"]}, "rows must be an object"),
        ({"rows": {"aft_simple": None}}, "row 'aft_simple' must be an object"),
        ({"rows": {"aft_simple": {"row": 3}}}, "with the name of a recipe's row"),
        ({"rows": {"a\0": {}}}, "becomes a folder"),
        ({"changes": None}, "changes must be an object"),
        ({"equal": "time", "seconds": -1.0}, "seconds must be positive"),
        ({"test_bytes": 0}, "test_bytes must be at least 2"),
    ],
)
def test_bad_plans_are_refused(changes, words):
    with pytest.raises(MixerError, match=words):
        replace(PLAN, **changes)


def test_bad_rows_and_machines_are_refused_before_anything_runs(plan, tmp_path, inline, monkeypatch, capsys):
    for rows, words in (
        ({"aft_simpel": {}}, "has no row 'aft_simpel'; nearest: aft_simple"),
        ({"aft_simple": {"model.dmi": 3}}, "no field 'model.dmi'"),
        ({"aft_simple": {"optim.lr": -1}}, "optim.lr must be positive"),
    ):
        with pytest.raises(MixerError, match=words):
            sweep(replace(plan, rows=rows), tmp_path / "out")
    with pytest.raises(MixerError, match="processes and threads must be positive"):
        sweep(plan, tmp_path / "out", processes=0)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(run_module, "memory_available", lambda device: 1 << 20)
    with pytest.raises(MixerError, match=r"2 processes need .* by their measured peaks, and 1.00 MiB are free"):
        sweep(replace(plan, rows={"aft_simple": {}}), tmp_path / "out", processes=2)
    monkeypatch.setattr(worker, "probe", None)  # one process has no trial
    assert sweep(replace(plan, rows={"aft_simple": {}}, rates=(1e-3,), seeds=(0,)), tmp_path / "one").done() == 1
    assert cli.main(["sweep", "text", "--out", str(tmp_path / "two"), "--rates", "0.1"]) == 2
    assert (
        capsys.readouterr().err.strip()
        == "error: sweep: rows is empty; give at least one, such as --rows attention aft_simple."
    )


def test_the_page_of_a_sweep_shows_table_verdicts_curves_and_what_is_left(tmp_path):
    found = finished(tmp_path, {"a": [1.0, 1.1, 1.2], "b": [1.5, 1.61, 1.7], "c": [2.0]}, {"gzip -9": 2.5})
    gone = [key for key, r in found.runs.items() if r["row"] == "c" and r["rate"] == 1e-1]
    for key in [*gone, "final/c/0"]:
        del found.runs[key]
    job = Job("tune", "c", 1e-1, 0, None)
    page = write_sweep_page(found, [job], tmp_path / "sweep.html", refresh=10)
    assert check_page(page) == []
    text = page.read_text()
    assert "14 of 18 runs have ended, 1 in progress, 3 to come" in text
    assert "<h1>Which is best on text: a, b, c?</h1>" in text
    assert "Worse than a: b (+0.503 +- 0.014, 3 seeds)." in text
    assert "plan.changes" not in text
    assert "Each row was tried at the rates" in text
    assert row_of(text, "b", 1) == ["worse", "+0.503", "+- 0.014", "3"]
    assert row_of(text, "c", 1) == ["not yet", "-", "-", "0"]
    assert row_of(text, "c", 2) == ["rate 0.1", "-", "0, 1, 2"]
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["Final runs", "Tuning runs", "How this was measured"]
    assert text.count("<figure>") == 5
    empty = Results(tmp_path / "none.json", found.plan)
    assert check_page(write_sweep_page(empty, [], page, refresh=None)) == []
    assert "0 of 18 runs have ended. The sweep was stopped" in page.read_text()
    assert "not measured" not in page.read_text()


def test_a_sweep_on_images_scores_the_test_split_by_size_of_class(tmp_path, inline):
    changes = {"data.source": "digits", "data.long_tail": 100.0, "train.eval_every": 3, "train.save_every": 3}
    plan = SweepPlan("aft_cifar10_classify", {"aft_simple": {}}, (1e-3,), (0, 1), steps=3, changes=changes)
    found = sweep(plan, tmp_path)
    table = results_table(found)
    for record in found.finals("aft_simple"):
        run = next(tmp_path.glob(f"runs/final/aft_simple/*_seed_{record['seed']}"))
        score = evaluate_run(run, split="test", record=False)
        assert record["test_top1"] == pytest.approx(100 * score.top1, abs=1e-3)
        assert record["test_top1_few"] == pytest.approx(100 * score.top1_few, abs=1e-3)
    assert {"test %", "spread test %", "many %", "medium %", "few %"} <= set(table.columns)
    assert "test %, many %, medium %, few %: right on the test split" in table.notes


def test_a_sweep_on_images_counts_images(tmp_path):
    found = finished(tmp_path, {"a": [0.7, 0.8], "b": [0.5]})
    for record in found.runs.values():
        record.update(metric="top1", higher=True)
        record["score"] *= -1 if record["phase"] == "tune" else 1
    table = results_table(found)
    assert "images" in table.columns
    assert "tokens" not in table.columns
    assert table.notes[0].startswith("score: top1 on validation")
    assert final_pictures(found)[0].caption.startswith("Top1 on validation against images seen")
    assert "above 0 is better than a" in comparison_table(found).notes[0]


def height_of(picture: Picture) -> int:
    """Return the pixels of a picture from top to bottom, which stand in the head of its PNG."""
    return int.from_bytes(base64.b64decode(picture.light.split(",")[1])[20:24], "big")


def test_a_legend_has_room_for_the_rows_that_are_drawn_and_no_more(tmp_path):
    """A plan of many rows used to leave a blank stripe below its curves until all of them had run."""
    scores = {f"row {i}": [1.0 + i] for i in range(14)}
    all_ran, two_ran = (finished(tmp_path, scores) for _ in range(2))
    for key, record in list(two_ran.runs.items()):
        if record["row"] not in ("row 3", "row 9"):
            del two_ran.runs[key]
    few = finished(tmp_path, {"row 3": [4.0], "row 9": [10.0]})
    for pictures in (final_pictures, tuning_pictures):
        high, low, least = ([height_of(p) for p in pictures(found)] for found in (all_ran, two_ran, few))
        assert low == least
        assert all(a > b for a, b in zip(high, low, strict=True))


def test_a_legend_names_the_rates_that_were_tried(tmp_path, monkeypatch):
    found = finished(tmp_path, {"a": [1.0], "b": [1.5]})
    tried, other, *_ = found.plan.rates
    for key, record in list(found.runs.items()):
        if record["phase"] == "tune" and record["rate"] != tried:
            del found.runs[key]
    labels = []
    monkeypatch.setattr(curves, "render_both", lambda draw, size: labels.append(legend_of(draw)) or ("", ""))
    tuning_pictures(found)
    assert labels[0] == ["a", "b", f"rate {tried:g}", FLOOR]
    assert f"rate {other:g}" not in labels[0]


def legend_of(draw) -> list[str]:
    ax = Figure().add_subplot()
    draw(ax)
    return [text.get_text() for text in ax.get_legend().get_texts()]


def row_of(page: str, row: str, table: int) -> list[str]:
    """Return the cells of a row in the nth table of a page."""
    body = page.split("<table")[1 + table]
    found = re.search(rf'<th scope="row">{row}</th>(.*?)</tr>', body)
    return re.findall("<td>(.*?)</td>", found[1]) if found else []


def test_a_stopped_sweep_leaves_a_page_that_no_longer_reloads(plan, tmp_path, inline, monkeypatch):
    def interrupt(self, each):
        assert "refresh" in (tmp_path / "out" / "sweep.html").read_text()
        raise KeyboardInterrupt

    monkeypatch.setattr(Queue, "finish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sweep(plan, tmp_path / "out")
    text = (tmp_path / "out" / "sweep.html").read_text()
    assert "0 of 10 runs have ended. The sweep was stopped" in text
    assert "refresh" not in text


def test_another_plan_in_the_same_folder_is_refused(plan, tmp_path):
    Results(tmp_path / "results.json", plan).save()
    with pytest.raises(MixerError, match=r"another plan \(steps was 8, is 9\); give another --out"):
        sweep(replace(plan, steps=9), tmp_path)
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(MixerError, match="cannot be read as the results of a sweep"):
        sweep(plan, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"score": float("nan")}, "it holds NaN"),
        ({"score": "1.5"}, "has score '1.5'"),
        ({"rate": None}, "has rate None"),
        ({"curve": None}, "has curve None"),
    ],
)
def test_results_that_no_run_writes_are_refused(tmp_path, changes, words):
    """A NaN would be neither better nor worse than another score, and so the best of any."""
    found = finished(tmp_path, {"a": [1.0], "b": [1.5]})
    found.runs["tune/a/0.001"] |= changes
    found.save()
    with pytest.raises(MixerError, match=words):
        Results.open(found.path)
    for text in ("", "[]", '{"plan": 3}', json.dumps({"plan": PLAN.to_json(), "runs": [1]}), "[" * 100_000):
        found.path.write_text(text)
        with pytest.raises(MixerError, match="cannot be read as the results of a sweep"):
            Results.open(found.path)


def test_the_seed_of_the_tuning_runs_stays(plan, tmp_path):
    Results(tmp_path / "results.json", plan).save()
    with pytest.raises(MixerError, match="the first seed, that of the tuning runs, was 0, is 5"):
        sweep(replace(plan, seeds=(5, 0, 1)), tmp_path)


def test_while_an_added_rate_is_tried_the_finals_at_the_best_rate_so_far_count(tmp_path):
    found = finished(tmp_path, {"a": [1.0, 1.1, 1.2]})
    other = {**found.runs["final/a/0"], "rate": 1e-1, "score": 9.0}  # of the time before the best rate was added
    found.runs["final/a/other"] = other
    found.plan = replace(found.plan, rates=(*found.plan.rates, 1.0))
    assert found.scores("a") == {0: 1.0, 1: 1.1, 2: 1.2}
    assert shortcomings(found, "a") == ["a: not tried yet at 1"]


def test_a_second_sweep_in_the_same_folder_is_refused(plan, tmp_path, inline):
    """Each would write results.json without the records of the other."""
    with hold_lock(tmp_path, "busy"), pytest.raises(MixerError, match="another sweep is running in"):
        sweep(plan, tmp_path)


def test_a_run_of_another_sweep_is_not_gone_on_with(plan, tmp_path):
    """Its folder has the same name, whatever was trained in it."""
    jobs = [Jobs(replace(plan, changes=plan.changes | more), 1) for more in ({}, {"model.layers": 2})]
    then, now = (each.tune("hydra", 1e-3).config for each in jobs)
    RunDir.create(tmp_path / "run", then, {})
    job = {"limits": {}, "test_bytes": None, "lengths": (), "final": False}
    with pytest.raises(MixerError, match=r"another sweep \(model.layers was 1, is 2\); delete it, or give another"):
        worker.run(now, tmp_path / "run", job)
    worker.check_same_run(then.override({"train.threads": 2}), tmp_path / "run")


def test_rows_and_seeds_are_added_to_a_sweep(plan, tmp_path, inline):
    before = replace(plan, rows={"aft_simple": {}}, seeds=(0,))
    then = dict(sweep(before, tmp_path).runs)
    more = sweep(replace(before, rows={"hydra": {}, "aft_simple": {}}, seeds=(0, 1)), tmp_path)
    assert all(more.runs[key] == record for key, record in then.items())
    assert len(more.runs) == 2 * (3 + 2)
    with pytest.raises(MixerError, match=r"another plan \(rows.aft_simple have model.layers too\); give"):
        sweep(replace(plan, rows={"aft_simple": {"model.layers": 2}, "hydra": {}}), tmp_path)
    with pytest.raises(MixerError, match=r"another plan \(rows lack hydra; rows have linear too\); give"):
        sweep(replace(plan, rows={"aft_simple": {}, "linear": {}}), tmp_path)


def test_sweeps_with_parts_of_a_plan_share_a_file(plan, tmp_path, inline):
    """Each has a row or a seed; the file holds the whole plan and all runs, whoever wrote last."""
    whole, file = replace(plan, rows={"hydra": {}, "aft_simple": {}}, seeds=(0, 1)), tmp_path / "shared.json"
    first = sweep(replace(whole, rows={"aft_simple": {}}, seeds=(0,)), tmp_path / "a", results=file)
    second = sweep(replace(whole, rows={"hydra": {}}, seeds=(0,)), tmp_path / "b", results=file)
    third = sweep(replace(whole, rows={"aft_simple": {}}), tmp_path / "c", results=file)
    assert [len(each.plan.rows) for each in (first, second, third)] == [1, 1, 1]
    late = Results.open(file, first.plan, shared=True)
    late.runs = dict(list(first.runs.items())[:1])  # as a sweep that began before the others and ends after them
    late.save()
    found = Results.open(file, whole)
    assert set(found.plan.rows) == set(whole.rows)
    assert found.plan.seeds == (0, 1)
    assert {(r["phase"], r["row"], r["seed"]) for r in found.runs.values()} == {
        *((phase, row, 0) for phase in ("tune", "final") for row in whole.rows),
        ("final", "aft_simple", 1),
    }
    assert Results.open(file).plan.rows == {"aft_simple": {}, "hydra": {}}
    assert Results.open(file, replace(whole, rows={"aft_simple": {}}), shared=True).scores("aft_simple").keys() == {
        0,
        1,
    }
    with pytest.raises(MixerError, match=r"another plan \(steps was 8, is 9\); give another --results"):
        sweep(replace(whole, rows={"hydra": {}}, steps=9), tmp_path / "d", results=file)
    with pytest.raises(MixerError, match="another plan .*rates was .*; give another --results"):
        sweep(replace(whole, rates=(1e-3,)), tmp_path / "d", results=file)
    with pytest.raises(MixerError, match="the first seed, that of the tuning runs, was 0, is 2"):
        sweep(replace(whole, seeds=(2,)), tmp_path / "d", results=file)  # another seed of the tuning runs


def test_a_file_that_many_write_loses_nothing(plan, tmp_path):
    """Processes add a record each, at once and again and again."""
    Results(tmp_path / "shared.json", replace(plan, seeds=tuple(range(40)))).save()
    code = (
        "import sys, json; from pathlib import Path; from types import SimpleNamespace;"
        "from tokenmix.lab.sweep import Results; found = Results.open(Path(sys.argv[1]), shared=True);"
        "add = lambda seed: found.add(SimpleNamespace(key=f'final/a/{seed}', phase='final', row='a', rate=1e-3,"
        "seed=seed), {'score': 1.0, 'metric': 'm', 'tokens': 1, 'steps': 1, 'seconds': 1.0, 'peak_mib': 1,"
        "'curve': []});"
        "[add(seed) for seed in range(int(sys.argv[2]), 40, 2)]"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "shared.json")]
    writers = [subprocess.Popen([*command, str(part)]) for part in range(2)]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    assert len(Results.open(tmp_path / "shared.json").runs) == 40


def test_rates_are_added_to_a_sweep(plan, tmp_path, inline):
    """Finished runs stay; where an added rate is better, the final runs at it are those that count."""
    before = replace(plan, rows={"aft_simple": {}}, rates=(1e-5, 1e-4, 1e-3), seeds=(0,), hopeless=None)
    then = dict(sweep(before, tmp_path).runs)
    more = sweep(replace(before, rates=(1e-5, 1e-4, 1e-3, 1e-2)), tmp_path)
    assert all(more.runs[key] == record for key, record in then.items())
    assert (before.total(), len(then), more.plan.total(), more.done(), len(more.runs)) == (4, 4, 5, 5, 6)
    (counted,) = more.finals("aft_simple")
    assert counted["rate"] == more.best_rate("aft_simple") == 1e-2
    assert more.scores("aft_simple") == {0: counted["score"]}
    assert "All 5 runs have ended" in (tmp_path / "sweep.html").read_text()


def test_the_best_rates_are_tried_again_over_all_steps(plan, tmp_path, inline):
    """A row's rate is then the best of these, which short runs may not have had first."""
    before = replace(plan, rows={"aft_simple": {}}, hopeless=None)
    then = dict(sweep(before, tmp_path).runs)
    more = sweep(replace(before, confirm=2), tmp_path)
    assert all(more.runs[key] == record for key, record in then.items())
    first, second = more.leading_rates("aft_simple")
    tried = {r["rate"]: r["score"] for r in more.of("tune", "aft_simple")}
    assert sorted(tried, key=tried.get)[:2] == [first, second]
    full = {r["rate"]: r["score"] for r in more.of("final", "aft_simple") if r["seed"] == 0}
    assert set(full) == {first, second}
    best = min(full, key=full.get)
    assert more.best_rate("aft_simple") == best
    assert {(r["rate"], r["seed"]) for r in more.finals("aft_simple")} == {(best, 0), (best, 1)}
    assert more.plan.total() == 3 + 1 + 2 == more.done()
    assert "All 6 runs have ended" in (tmp_path / "sweep.html").read_text()
    assert "the best 2 again over all of them" in results_table(more).text()


def test_a_full_run_at_another_rate_decides_and_a_missing_one_is_marked(tmp_path):
    found = finished(tmp_path, {"a": [2.0, 2.1]}, confirm=2)
    found.runs = {run_key(r["phase"], r["row"], r["rate"], r["seed"]): r for r in found.runs.values()}
    assert found.leading_rates("a") == [1e-3, 1e-2]
    assert not found.is_confirmed("a")
    assert found.scores("a") == {0: 2.0, 1: 2.1}
    assert "0.001+*" in results_table(found).text()
    other = {**found.runs[run_key("final", "a", 1e-3, 0)], "rate": 1e-2, "score": 1.5}
    found.runs[run_key("final", "a", 1e-2, 0)] = other
    assert found.is_confirmed("a")
    assert found.best_rate("a") == 1e-2
    assert found.scores("a") == {0: 1.5}
    assert "+" not in results_table(found).rows[0][4]


def test_classifiers_of_texts_are_compared_by_accuracy(tmp_path, inline):
    rows = [f"{['good', 'bad', 'fine'][i % 3]} film number {i}\t{['yes', 'no', 'perhaps'][i % 3]}" for i in range(200)]
    (tmp_path / "all.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    small = {"model.dim": 16, "model.layers": 1, "model.vocab": 300, "train.batch_size": 8}
    changes = {**small, "data.source": "reviews", "data.path": str(tmp_path / "all.tsv")}
    plan = SweepPlan("sentences", {"attention": {}, "hydra": {}}, rates=(1e-3, 1e-2), seeds=(0,), steps=20, tune=0.5)
    found = sweep(replace(plan, changes=changes, hopeless=None), tmp_path / "out")
    assert found.metric() == "accuracy"
    assert found.higher_is_better()
    assert len(found.runs) == 6
    best = {row: found.best_rate(row) for row in plan.rows}
    for row, rate in best.items():
        tried = {r["rate"]: r["score"] for r in found.of("tune", row)}
        assert tried[rate] == max(tried.values())


def test_runs_start_from_those_of_another_sweep(tmp_path, inline):
    films = "".join(f"a {('bad', 'good')[i % 2]} film number {i}\t{i % 2}\n" for i in range(200))
    (tmp_path / "all.tsv").write_text("sentence\tlabel\n" + films)
    small = {"model.dim": 16, "model.layers": 1, "model.vocab": 300, "train.batch_size": 8, "data.max_tokens": 16}
    rows, data = {"attention": {}, "hydra": {}}, {"data.source": "reviews", "data.path": str(tmp_path / "all.tsv")}
    first = SweepPlan("masked", rows, rates=(1e-3,), seeds=(0,), steps=4, changes=small | data)
    second = replace(first, recipe="sentences", seeds=(0, 1), init=True)
    with pytest.raises(MixerError, match="starts from the runs of another sweep; give its folder as --init"):
        sweep(second, tmp_path / "out")
    with pytest.raises(MixerError, match="starts from random weights; leave out --init"):
        sweep(first, tmp_path / "masked", init=tmp_path)
    with pytest.raises(MixerError, match="row 'attention' has no final run to start from in .*masked; finish that"):
        sweep(second, tmp_path / "out", init=tmp_path / "masked")
    sweep(first, tmp_path / "masked")
    found = sweep(second, tmp_path / "out", init=tmp_path / "masked")
    for row in rows:
        for seed in (0, 1):
            run = tmp_path / "out/runs/final" / row / f"rate_0.001_seed_{seed}"
            start = Path(RunDir(run).config().train.init)
            right = evaluate_run(run, split="test", record=False).accuracy
            assert found.runs[run_key("final", row, 1e-3, seed)]["test_accuracy"] == pytest.approx(
                100 * right, abs=1e-3
            )
            assert start == tmp_path / "masked/runs/final" / row / "rate_0.001_seed_0"
    assert json.loads(found.path.read_text())["plan"]["init"] is True
    shutil.copytree(start, start.with_name("rate_0.002_seed_0"))
    with pytest.raises(MixerError, match="has runs at several rates with seed 0; keep one to start from"):
        sweep(second, tmp_path / "again", init=tmp_path / "masked")


def test_a_table_names_the_machines_that_its_seconds_come_from(tmp_path):
    found = finished(tmp_path, {"attention": [2.0]})
    found.machine = {"cpu": "one"}
    assert not any("machines" in note for note in results_table(found).notes)
    found.runs["final/attention/0"]["cpu"] = "another"
    assert "seconds and peak MiB: of runs on different machines (another, one)" in results_table(found).notes


def test_rows_of_a_plan_can_be_run_alone(plan, tmp_path, inline, capsys):
    """And nothing that stands in the plan is given beside it, where it would be ignored."""
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan.to_json()))
    row = list(plan.rows)[-1]
    command = ["sweep", str(file), "--out", str(tmp_path / "out")]
    assert cli.main([*command, "--rows", row, "--seeds", "0"]) == 0
    alone = Results.open(tmp_path / "out" / "results.json")
    assert {(r["row"], r["seed"]) for r in alone.runs.values()} == {(row, 0)}
    assert f"Missing for a verdict:\n{shortcomings(alone)[0]}\n" in capsys.readouterr().out
    assert cli.main(["report", str(tmp_path / "out")]) == 2  # no run, but what holds some
    assert "is the folder of a sweep; its page is" in capsys.readouterr().err
    for more, said in (
        (["--rows", "aft_simpel"], "the plan has no row 'aft_simpel'; nearest: aft_simple"),
        (["--shell", "paper", "--seeds", "5"], "is a plan, which holds --shell; change it there"),
        (["--steps", "9", "--model.layers", "3"], "is a plan, which holds --steps, --model.layers; change it there"),
    ):
        assert cli.main([*command, *more]) == 2
        assert said in capsys.readouterr().err


def test_a_plan_with_two_rows_of_one_name_is_refused(tmp_path, capsys):
    """JSON would keep the last of them."""
    file = tmp_path / "plan.json"
    file.write_text('{"recipe": "text", "rates": [0.1], "rows": {"hydra": {}, "hydra": {"model.layers": 2}}}')
    assert cli.main(["sweep", str(file), "--out", str(tmp_path / "out")]) == 2
    assert "(it names 'hydra' twice in one object)" in capsys.readouterr().err


MINE = """
import torch
from tokenmix import register_mixer
from tokenmix.mixers import Facts, Mixer


class Doubled(Mixer):
    facts = Facts(causal=True)

    def mix(self, inputs):
        return 2.0 * inputs.x


register_mixer("doubled", Doubled)
"""


def test_a_row_names_a_mixer_of_your_own(plan, tmp_path):
    """In a process of its own, as the names of this one stay; the model does not stream, which training allows."""
    (tmp_path / "mine.py").write_text(MINE)
    row = {"mine": {"row": "aft_simple", "model.mixers": [{"name": "doubled"}]}}
    mine = replace(plan, rows=row, rates=(1e-3,), seeds=(0,), steps=2, modules=(str(tmp_path / "mine.py"),))
    (tmp_path / "plan.json").write_text(json.dumps(mine.to_json()))
    command = [sys.executable, "-m", "tokenmix", "sweep", str(tmp_path / "plan.json"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (run,) = Results.open(tmp_path / "out" / "results.json").runs.values()
    assert run["score"] is not None
    for text, words in (("raise ValueError('torn')", "torn"), (None, "missing.py")):
        file = tmp_path / ("missing.py" if text is None else "torn.py")
        if text is not None:
            file.write_text(text)
        with pytest.raises(MixerError, match=words):
            sweep(replace(mine, modules=(str(file),)), tmp_path / "other")


def test_equal_time_sets_the_steps_by_the_speed_of_tuning(plan, tmp_path):
    found = finished(tmp_path, {"aft_simple": [2.0]}, changes={**plan.changes}, equal="time", seconds=100.0)
    assert Queue(found, tmp_path, Jobs(found.plan, 1), 1, print).final_steps("aft_simple") == 800  # 8 steps a second
    for rate in found.plan.rates[1:]:  # a run that diverged has no speed
        found.runs[f"tune/aft_simple/{rate}"] |= {"score": None, "steps": 0, "tokens": 0, "seconds": 0.0}
    assert Queue(found, tmp_path, Jobs(found.plan, 1), 1, print).final_steps("aft_simple") == 800


def test_a_verdict_needs_rates_seeds_a_shell_and_a_trained_model(tmp_path):
    good = finished(tmp_path, {"a": [1.0, 1.1, 1.2], "b": [1.5, 1.61, 1.7]}, {"gzip -9": 2.0})
    assert shortcomings(good) == []
    assert compare(good, "a", "b").verdict == "better"
    assert compare(good, "b", "a").verdict == "worse"
    near = finished(tmp_path, {"a": [1.0, 1.3, 1.2], "b": [1.2, 1.1, 1.25]}, {"gzip -9": 2.0})
    assert compare(near, "a", "b").verdict == "no difference"
    for found, words in (
        (finished(tmp_path, {"a": [1.0, 1.1], "b": [1.5, 1.6]}), "a: 2 seeds, needs 3"),
        (
            finished(tmp_path, {"a": [2.5] * 3, "b": [1.5] * 3}, {"gzip -9": 2.0}),
            "a: not above the floor (2.500 against",
        ),
        (replace(good, plan=replace(good.plan, shell=None)), "names no shell"),
    ):
        assert compare(found, "a", "b").verdict == "cannot be tested"
        assert words in compare(found, "a", "b").text()
    one = compare(finished(tmp_path, {"a": [1.0], "b": [1.5]}), "a", "b")
    assert "one seed, indicative" in one.text()
    with pytest.raises(MixerError, match="no row 'c'"):
        compare(good, "a", "c")


def test_a_verdict_needs_three_seeds_in_common_none_of_which_diverged(tmp_path):
    apart = finished(tmp_path, {"a": [None, None, 1.0, 1.1, 1.2], "b": [1.5, 1.6, 1.7, None, None]})
    assert compare(apart, "a", "b").verdict == "cannot be tested"
    assert compare(apart, "a", "b").why == (
        "a: diverged with seed 0, 1",
        "b: diverged with seed 3, 4",
        "1 seed in common, needs 3",
    )
    one = finished(tmp_path, {"a": [1.0, 1.1, 1.2, None], "b": [1.5, 1.6, 1.7, 1.8]})
    assert compare(one, "a", "b").why == ("a: diverged with seed 3",)
    missing = finished(tmp_path, {"a": [1.0, 1.1, 1.2, 1.3], "b": [1.5, 1.6, 1.7, 1.8]})
    del missing.runs["final/a/0"], missing.runs["final/b/3"]
    assert compare(missing, "a", "b").why == ("2 seeds in common, needs 3",)


def test_a_verdict_needs_rows_that_saw_and_are_scored_on_the_same(tmp_path):
    found = finished(tmp_path, {"a": [1.0, 1.1, 1.2], "b": [1.5, 1.61, 1.7]})
    for seed in range(3):
        found.runs[f"final/a/{seed}"]["tokens"] = 512
    assert compare(found, "a", "b").why == ("the rows have not seen the same tokens (512 and 256)",)
    assert compare(replace(found, plan=replace(found.plan, equal="time", seconds=1.0)), "a", "b").verdict == "better"
    other = finished(tmp_path, {"a": [1.0, 1.1, 1.2], "b": [1.5, 1.61, 1.7]})
    other.plan = replace(other.plan, rows={"a": {"data.source": "else.txt"}, "b": {}})
    assert compare(other, "a", "b").why == ("the rows differ in data.source",)


def test_two_rows_that_may_be_one_model_have_no_verdict(tmp_path):
    """Hydra with a sigmoid and a softmax is AFT-simple: another config, and the same score with every seed."""
    found = finished(tmp_path, {"a": [1.0, 1.1, 1.2], "b": [1.0, 1.1, 1.2], "c": [1.0, 1.1, 1.3]})
    assert compare(found, "a", "b").verdict == "cannot be tested"
    assert compare(found, "a", "b").why == (
        "the rows have the same score with every seed, as one model under two names would",
    )
    assert compare(found, "a", "c").verdict == "no difference"


@pytest.mark.parametrize(
    ("n", "quantile"), [(2, 12.7062), (3, 4.3027), (10, 2.2622), (11, 2.2281), (15, 2.1448), (31, 2.0423)]
)
def test_the_interval_is_that_of_students_t(tmp_path, n, quantile):
    """Differences of +1 and -1, and 0 where the number is odd, have a standard deviation known by hand."""
    signs = [(-1) ** seed for seed in range(n - n % 2)] + [0] * (n % 2)
    found = compare(finished(tmp_path, {"a": [5.0 + sign for sign in signs], "b": [5.0] * n}), "a", "b")
    spread = ((n - n % 2) / (n - 1)) ** 0.5
    assert found.margin == pytest.approx(quantile * spread / n**0.5, rel=1e-3)
    equal = compare(finished(tmp_path, {"a": [1.0] * 3, "b": [1.0] * 3}), "a", "b")
    assert (equal.verdict, equal.margin) == ("no difference", 0.0)


def test_text_is_scored_beyond_the_length_of_training(plan, tmp_path, inline):
    """The mean is over bytes with more context than training had; a model with learned positions has none."""
    rows = {"aft_simple": {}, "attention": {"model.positions": None}}
    found = sweep(
        replace(plan, rows=rows, rates=(1e-3,), seeds=(0, 1), lengths=(64,), test_bytes=260), tmp_path / "out"
    )
    assert [r["beyond"] for r in found.of("final", "aft_simple")] == [None, None]
    (first, _) = found.of("final", "attention")
    parts = first["by_context_beyond"]
    assert [part[:2] for part in parts[-3:]] == [[16, 31], [32, 63], [64, 64]]
    assert first["beyond"] == pytest.approx((32 * parts[-2][2] + parts[-1][2]) / 33)
    table = results_table(found)
    assert table.columns[-2:] == ["beyond", "spread beyond"]
    assert [line[0] for line in table.rows] == ["attention", "aft_simple"]
    assert table.rows[1][-2] == "not measured"
    assert any("more context than training had, from the next power of two up to 64" in note for note in table.notes)


def test_a_segmenter_s_classes_are_those_of_its_masks(tmp_path):
    for i in range(6):
        save(tmp_path / "images" / f"{i}.png", noise(8, 8, 3, seed=i))
        save(tmp_path / "masks" / f"{i}.png", noise(8, 8, seed=i) % 3)
    plan = SweepPlan("segmentation", {"attention": {}}, (2e-3,), changes={"data.source": str(tmp_path)})
    assert plan.config("attention").model.head.classes == 3


@pytest.mark.usefixtures("controls")
@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/sweeps").glob("*.json")), ids=lambda path: path.stem)
def test_every_row_of_the_projects_plans_can_be_built(path, monkeypatch):
    monkeypatch.chdir(ROOT)  # modules of plans are relative to it
    monkeypatch.setattr(
        "tokenmix.lab.sweep.plan.match_data", lambda config: config
    )  # images may not be on this machine
    plan = SweepPlan.from_json(json.loads(path.read_text()))
    load_modules(plan.modules)
    for row in plan.rows:
        with torch.device("meta"):
            model = build_model(plan.config(row).model)
        assert sum(p.numel() for p in model.parameters()) > 0
        if plan.lengths and plan.config(row).data.kind == "synthetic":
            sequences = plan.config(row).data.sequences(model.vocab)
            assert max(plan.lengths) > sequences.longest
            assert (
                model.max_len is None or sequences.tokens((max(plan.lengths),) * len(sequences.sizes)) <= model.max_len
            )
