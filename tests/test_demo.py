"""The demo at toy sizes: all models trained, measured, in one page whose sentences follow from the numbers."""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from page_checks import check_page
from tokenmix.lab import demo
from tokenmix.lab.bench import Decoding
from tokenmix.lab.demo.lanes import interrupts_later
from tokenmix.lab.demo.plan import RATES
from tokenmix.lab.demo.tables import GROWS, SPREAD, STAYS, best_names, rank_names
from tokenmix.lab.report import read_run
from tokenmix.system.machine import busy_cores

SIZES = {"dim": 16, "layers": 4, "seq_len": 32, "batch_size": 2, "eval_bytes": 600, "sample_bytes": 8}
TINY = demo.Plan(steps=9, trial_seconds=1.0, evals=3, contexts=(16, 64), **SIZES)


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "demo"
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "say", lines.append)
        page = demo.demo(out, TINY)
    return out, page, "\n".join(lines)


def test_every_model_is_in_the_table_and_on_the_page(shown):
    out, page, printed = shown
    assert page == out / "report.html"
    assert str(page.resolve()) in printed
    assert check_page(page) == []
    for name in (*demo.MODELS, "gzip -9", "xz -9e"):
        assert f'<th scope="row">{name}</th>' in page.read_text()
        assert re.search(rf"(?m)^model .*{name}", printed)


def test_training_ends_with_its_decay(shown):
    """All models make the same steps, and the last one has the lowest rate."""
    for name in demo.MODELS:
        run = read_run(shown[0] / name)
        steps = run.config["train"]["steps"]
        assert steps == TINY.steps
        assert run.config["train"]["threads"] == 1
        assert run.train[-1]["step"] == steps
        assert run.train[-1]["lr"] < 0.5 * RATES[name]
        assert run.evals[-1]["step"] == steps
        assert run.config["model"]["norm_type"] == "rms"
        assert run.config["optim"]["name"] == "muon"


def test_the_page_opens_with_one_picture_then_text_then_who_wins(shown):
    page = shown[1].read_text()
    places = [
        page.index(part)
        for part in ("Bars, shorter is better", "What each model writes", "Who wins where", 'class="lead"')
    ]
    assert places == sorted(places)
    assert page.index("<img") < places[1] < page.index("<img", page.index("<img") + 1)
    narrow = page.index('<source media="(max-width: 40rem)" srcset="data:image/png')
    assert narrow < page.index("<img"), "on a telephone the first picture has a form of its own"
    for name in demo.MODELS:
        written = (shown[0] / name / "samples" / "after_training.txt").read_bytes()
        assert written.startswith(b"def ")
        assert len(written) == 4 + TINY.sample_bytes
        assert page.count(f"<h3>{name}</h3>\n<pre>def ") == 1


def test_a_difference_within_the_spread_is_none():
    gap = 0.8 * SPREAD
    said = rank_names({"b": 2.0 + gap, "a": 2.0, "c": 2.0 + 2 * gap, "d": None})
    assert said == "a, no difference to b, then c"
    assert best_names({"b": 2.0 + gap, "a": 2.0, "c": 2.0 + 2 * gap}, plus=SPREAD) == {"a", "b"}
    assert best_names({"a": 1.0, "b": 1.04, "c": 1.06}, times=1.05) == {"a", "b"}


PAGE = {"attention": 2.191, "aft_forget": 2.202, "aft_local": 2.382, "hybrid": 2.437}
"""Bits per byte of a whole demo, seed 0 (LOG.md, 2026-11-30)."""
OF_SEEDS = 0.019
"""The standard deviation of one score over seeds: that of the difference between two, 0.027, by the root of 2."""


def test_another_seed_says_the_same():
    """Every score is moved by a standard deviation, up or down, in all combinations."""
    moved = [
        {name: score + sign * OF_SEEDS for (name, score), sign in zip(PAGE.items(), signs, strict=True)}
        for signs in product((-1, 1), repeat=len(PAGE))
    ]
    groups = {tuple(map(frozenset, groups_of(rank_names(page)))) for page in [PAGE, *moved]}
    assert groups == {(frozenset({"attention", "aft_forget"}), frozenset({"aft_local", "hybrid"}))}


def groups_of(said: str) -> list[list[str]]:
    """The models between which a sentence sees no difference."""
    return [group.split(", no difference to ") for group in said.split(", then ")]


def falsify(shown, *, ms=None, state=None, bits=None) -> list[str]:
    """The sentences, with other numbers of one kind: by model, then by context."""
    runs = {name: read_run(shown[0] / name) for name in demo.MODELS}
    constant = ("aft_local", "aft_forget")
    ms = {name: (1.0, 1.0) if name in constant else (1.0, 1.1 * GROWS) for name in runs} | (ms or {})
    state = {name: (9, 9) if name in constant else (9, 36) for name in runs} | (state or {})
    decode = {name: {c: Decoding(c, ms[name][i], state[name][i]) for i, c in enumerate((16, 64))} for name in runs}
    scores = {name: 2.0 for name in runs} | (bits or {})
    runs = {n: replace(r, evals=[{**r.evals[-1], "bits_per_byte": scores[n]}]) for n, r in runs.items()}
    return demo.findings(TINY, runs, demo.Measured(decode))


def test_each_sentence_changes_when_its_number_is_falsified(shown):
    take, memory, speed, quality, setup = falsify(shown)
    assert "constant state (aft_local, aft_forget) keeps the same memory" in take
    assert "the same time for each byte, while attention takes ever longer" in take
    assert "with one seed, no difference between aft_local and aft_forget and attention can be told" in take
    assert memory.endswith("It is the same after 16 bytes for aft_local, aft_forget.")
    assert speed.endswith(
        "as after 16 for attention; about as long after 64 bytes as after 16 for aft_local, aft_forget."
    )
    assert ": aft_forget, no difference to aft_local, no difference to attention, no difference to hybrid" in quality
    slow = falsify(shown, ms={"aft_local": (1.0, 1.1 * GROWS)})
    assert "takes the same time" not in slow[0]
    assert "as after 16 for attention, aft_local; about as long" in slow[2]
    between = (STAYS + GROWS) / 2
    assert falsify(shown, ms={"attention": (1.0, between)})[2] == (
        "Time for the next byte: about as long after 64 bytes as after 16 for aft_local, aft_forget."
    )
    grown = falsify(shown, state={"aft_local": (9, 10)})
    assert "constant state (aft_forget) keeps" in grown[0]
    assert grown[1] != memory
    worse = falsify(shown, bits={"aft_local": 2.0 + 1.1 * SPREAD})
    assert "no difference between aft_forget and attention can be told" in worse[0]
    assert ", then aft_local. One seed" in worse[3]
    ahead = falsify(shown, bits={"aft_forget": 2.0 - 1.1 * SPREAD})
    assert "seed, aft_forget learned more than attention, and no difference between aft_local and attention" in ahead[0]
    assert "all of them learned less than attention" in falsify(shown, bits={"attention": 2.0 - 1.1 * SPREAD})[0]
    assert "To take away: nothing" in falsify(shown, state=dict.fromkeys(demo.MODELS, (1, 2)))[0]
    assert setup == slow[4] == worse[4]


def test_a_disturbed_measurement_is_made_again(monkeypatch):
    """In each round but one, something else keeps the machine busy; the sentences are those of the quiet round."""
    calls: list[int] = []

    def decode_disturbed(model, n):
        calls.append(n)
        return Decoding(n, 1.0 if len(calls) > 2 * len(demo.MODELS) * len(TINY.contexts) else 9.0, 5)

    monkeypatch.setattr(demo, "decoding", decode_disturbed)
    found = demo.measure(TINY).decode
    assert {d.ms_per_token for by in found.values() for d in by.values()} == {1.0}
    assert sorted(found) == sorted(demo.MODELS)
    assert [list(by) for by in found.values()] == [list(TINY.contexts)] * len(demo.MODELS)


def test_yardstick_compresses_the_evaluated_bytes():
    from tokenmix.lab.data import open_corpus

    data = bytes(open_corpus("stdlib").split("valid")[: TINY.eval_bytes].tolist())
    assert demo.yardsticks(TINY)["gzip -9"] == 8 * len(gzip.compress(data, 9)) / TINY.eval_bytes


@pytest.mark.parametrize(("busy", "said"), [(None, False), (0.0, False), (0.5, True)])
def test_a_busy_machine_is_said(monkeypatch, busy, said):
    cores = os.cpu_count() or 1
    monkeypatch.setattr(demo, "busy_cores", lambda: None if busy is None else busy * cores)
    assert bool(demo.busy_note()) == said


def test_cores_at_work_are_counted():
    """At least one while a process works, where the system tells; how many more there are is not ours to say."""
    if not Path("/proc/stat").exists():
        assert busy_cores(0.01) is None
        return
    work = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        found = max(busy_cores(0.3) for _ in range(5))
    finally:
        work.kill()
        work.wait()
    assert 0.3 < found < 1.3 * (os.cpu_count() or 1)


def test_an_earlier_demo_is_left_alone(tmp_path):
    assert demo.free_name(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert demo.free_name(tmp_path / "demo") == tmp_path / "demo-3"


def children(pid: int) -> list[int]:
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


def count_threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def test_ctrl_c_waits_until_a_process_has_started():
    # which needs what the parent writes to it; the signal goes to whichever thread does not block it
    end, before = threading.Event(), signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=end.wait)
    thread.start()
    steps = []

    def interrupted() -> None:
        with interrupts_later():
            os.kill(os.getpid(), signal.SIGINT)
            for step in range(100):
                time.sleep(0.001)
                steps.append(step)

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert len(steps) == 100
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
        end.set()
        thread.join()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_stopped_demo_leaves_no_process(tmp_path, number, code):
    # a shell's background jobs, and what they start, ignore Ctrl-C
    script = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    script += "from tokenmix.lab.demo import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", script, "--out", str(tmp_path / "demo")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert "Timing" in run.stdout.readline()
        while len(started := children(run.pid)) < 2:
            time.sleep(0.05)
        # nobody can keep a process quiet whose parent is killed before it has said what to do
        while number == signal.SIGKILL and not any(count_threads(pid) > 1 for pid in started):
            time.sleep(0.05)
        run.send_signal(number)
        errors = run.stderr.read()  # ends when the last process that holds it has ended
    assert run.returncode == code
    assert errors == ("demo: stopped; no process is left running.\n" if code == 130 else "")
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in started):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.1)
