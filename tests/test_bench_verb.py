"""`tokenmix bench`: its measurements are right, wrong results are refused, and its report follows from the numbers."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from tokenmix import MIXERS, MixerError, functional
from tokenmix.kernels import cpu
from tokenmix.kernels.cpu import decode as step
from tokenmix.lab import cli
from tokenmix.lab.bench import cases as subjects
from tokenmix.lab.bench import correctness as gate
from tokenmix.lab.bench import roofline as limits
from tokenmix.lab.bench import run, timing
from tokenmix.lab.bench.cases import SDPA, BenchSubject, build, needed_bytes, parse_subjects, prepare
from tokenmix.lab.bench.flops import Setting, Work
from tokenmix.lab.bench.peers import PEERS
from tokenmix.lab.bench.table import text
from tokenmix.lab.cli.output import progress
from tokenmix.system.text import seconds

TINY = ["--dim", "16", "--heads", "2", "--batch", "1", "--budget", "0.05"]
MIB = 2**20
SMALL = Setting("op", 24, 1, 16, 2)


@pytest.fixture(autouse=True)
def _quick_limits(monkeypatch):
    """The limits and, where errors are not the point, the gate at toy sizes."""
    monkeypatch.setattr(gate, "LENGTH", 40)
    monkeypatch.setattr(gate, "WIDTH", 16)
    monkeypatch.setattr(limits, "GEMM", 32)
    monkeypatch.setattr(limits, "SIZES", (MIB // 4,))


def bench(capsys, *argv: str) -> dict:
    """The JSON of a tiny run."""
    code = cli.main(["bench", *TINY, "--json", "-", *argv])
    found = json.loads(capsys.readouterr().out)
    assert code == (1 if any(r["status"] == "FAILED" for r in found["rows"]) else 0)
    return found


def refused(capsys, *argv: str) -> str:
    assert cli.main(["bench", *TINY, *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


# --- what comes out


def test_every_row_says_what_was_measured(capsys, tmp_path):
    picture = tmp_path / "cost.png"
    found = bench(
        capsys,
        "--ops",
        "aft_simple,hydra:causal=false",
        "--lengths",
        "16,48",
        "--baseline",
        "hydra:causal=false",
        "--plot",
        str(picture),
    )
    assert found["schema"] == run.SCHEMA
    assert [(r["subject"], r["T"], r["pass"]) for r in found["rows"]] == [
        (subject, T, which)
        for T in (16, 48)
        for which in ("forward", "forward+backward")
        for subject in (SDPA, "aft_simple", "hydra:causal=false")
    ]
    for r in found["rows"]:
        assert (r["status"], r["why"]) == ("ok", "")
        assert 0 < r["wall_min_s"] <= r["wall_s"]
        assert r["cpu_s"] >= 0
        assert r["samples"] >= timing.MIN_ROUNDS
        assert r["floor_s"] == pytest.approx(r["share"] * r["wall_s"])
        assert r["bound"] in ("copy", "gemm")
        assert r["gate"]["error"] <= r["gate"]["tolerance"]
        assert r["peak_bytes"] is None or r["peak_bytes"] >= 0
        same = [o for o in found["rows"] if (o["T"], o["pass"]) == (r["T"], r["pass"])]
        assert r["x_sdpa"] == pytest.approx(same[0]["wall_s"] / r["wall_s"])
        assert r["x_baseline"] == pytest.approx(same[2]["wall_s"] / r["wall_s"])
    assert [r["causal"] for r in found["rows"][:3]] == [True, True, False]
    assert {(f["subject"], f["pass"]) for f in found["fits"]} == {(r["subject"], r["pass"]) for r in found["rows"]}
    assert {"threads", "torch", "allocator", "kernels", "device"} <= set(found["machine"])
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_table_names_the_machine_the_limits_and_every_subject(capsys):
    assert cli.main(["bench", *TINY, "--ops", "aft_simple", "--lengths", "16", "--pass", "forward"]) == 0
    said = capsys.readouterr().out
    for word in (
        "C kernels",
        "GB/s",
        "GFLOP/s",
        "transparent huge pages",
        "T = 16, forward",
        "aft_simple",
        "x sdpa",
        "lower quartile",
    ):
        assert word in said
    assert max(len(line) for line in said.splitlines()) <= 170


@pytest.mark.parametrize(
    ("level", "argv", "names"),
    [
        ("layer", ["--ops", "hydra"], [SDPA, "hydra"]),
        (
            "decode",
            ["--ops", "aft_simple,aft_conv:kernel_size=5,attention"],
            [SDPA, "aft_simple", "aft_conv:kernel_size=5", "attention"],
        ),
        ("model", ["--ops", "aft_local:window=4", "--layers", "1"], [SDPA, "aft_local:window=4"]),
    ],
)
def test_levels(capsys, level, argv, names):
    found = bench(capsys, "--level", level, "--lengths", "20", *argv)
    timed = [r for r in found["rows"] if "wall_s" in r]
    assert list(dict.fromkeys(r["subject"] for r in timed)) == names
    assert {r["pass"] for r in timed} == {
        "layer": {"forward", "forward+backward"},
        "decode": {"forward"},
        "model": {"forward+backward"},
    }[level]


@pytest.mark.skipif(not cpu.available(), reason="no C library here")
def test_what_is_judged_while_decoding_is_what_is_timed(capsys, monkeypatch):
    argv = ["--level", "decode", "--ops", "aft_simple", "--lengths", "20"]
    assert bench(capsys, *argv)["rows"][1]["path"] == "step_simple in C"
    right = step.simple
    monkeypatch.setattr(step, "simple", lambda *args: (2 * right(*args)[0], right(*args)[1]))
    assert bench(capsys, *argv)["rows"][1]["status"] == "FAILED"


def test_a_context_that_takes_too_long_to_read_is_said(capsys, monkeypatch):
    monkeypatch.setattr(subjects, "READING", -1)
    row = bench(capsys, "--level", "decode", "--ops", "aft_simple", "--lengths", "20")["rows"][1]
    assert row["status"] == "skipped"
    assert "reading the first 0 of 20 tokens" in row["why"]


def test_grids_and_the_dtype_at_hand(capsys):
    found = bench(
        capsys,
        "--ops",
        "aft_conv:kernel_size=3",
        "--lengths",
        "3x4",
        "--no-causal",
        "--dtype",
        "bfloat16",
        "--pass",
        "forward",
    )
    assert [(r["length"], r["T"], r["status"], r["causal"]) for r in found["rows"]] == [("3x4", 12, "ok", False)] * 2
    assert found["rows"][1]["gate"]["error"] > 1e-4  # bfloat16 was judged, not float32
    assert found["rows"][1]["path"] == (
        "tokenmix::aft_conv2d" if cpu.available() else "eager"
    )  # the form for grids was judged, not that for sequences


def test_a_backend_that_is_the_same_is_measured_once(capsys):
    found = bench(
        capsys, "--ops", "pooling:window=3", "--backends", "auto,eager", "--lengths", "16", "--pass", "forward"
    )
    assert [(r["subject"], "wall_s" in r) for r in found["rows"]] == [
        (SDPA, True),
        ("pooling:window=3", True),
        ("pooling:window=3@eager", False),
    ]
    assert "same as auto" in found["rows"][2]["why"]


# --- the gate


def mutated(right, wrong):
    """``right`` where the eager form is asked for, else ``wrong``."""

    @functools.wraps(right)
    def form(*args, backend="auto", **options):
        return (right if backend == "eager" else wrong)(*args, backend=backend, **options)

    return form


def test_a_wrong_operation_is_refused_and_not_timed(capsys, monkeypatch):
    def careless(q, k, v, *, causal=False, key_mask=None, gate="sigmoid", backend="auto", **_):
        e = torch.exp(k - k.amax(1, keepdim=True))
        return torch.sigmoid(q) * torch.cumsum(e * v, 1) / torch.cumsum(e, 1)

    monkeypatch.setattr(functional, "aft_simple", mutated(functional.aft_simple, careless))
    found = bench(capsys, "--ops", "aft_simple", "--lengths", "16", "--pass", "forward")
    row = next(r for r in found["rows"] if r["subject"] == "aft_simple")
    assert row["status"] == "FAILED"
    assert "wrong on adversarial keys" in row["why"]
    assert "wall_s" not in row
    assert "aft_simple  FAILED: wrong on adversarial keys" in text(found)


def test_a_wrong_gradient_is_refused():
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return 0.999 * g

    right = functional.hydra
    with mock.patch.object(functional, "hydra", mutated(right, lambda q, k, v, **o: right(q, Halved.apply(k), v, **o))):
        assert gate.gate(BenchSubject("hydra"), SMALL).passed
        assert not gate.gate(BenchSubject("hydra"), replace(SMALL, backward=True)).passed


@pytest.mark.parametrize("name", ["aft_simple", "aft_local:window=8", "attention", SDPA])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_ours_pass_and_the_operators_are_named(name, dtype):
    (subject,) = parse_subjects(name)
    verdict = gate.gate(subject, replace(SMALL, dtype=dtype))
    assert verdict.passed, verdict
    if name == SDPA:
        assert "scaled_dot_product" in verdict.path


def test_peers_pass_the_same_gate_or_are_marked(capsys):
    pytest.importorskip("aft_pytorch", reason="the peers come with the dev group")
    some = {name: PEERS[name] for name in ("aft_pytorch.AFTFull", "aft_pytorch.AFTSimple", "aft_pytorch.AFTLocal")}
    with mock.patch.dict(PEERS, some, clear=True), mock.patch.object(gate, "PEER_LENGTH", 48):
        found = bench(
            capsys,
            "--level",
            "layer",
            "--against",
            "peers",
            "--ops",
            "aft_simple",
            "--lengths",
            "16",
            "--pass",
            "forward",
        )
    rows = {r["subject"]: r for r in found["rows"]}
    assert rows["aft_pytorch.AFTFull"]["status"] == "wrong"  # exp without a maximum
    assert rows["aft_pytorch.AFTFull"]["wall_s"] > 0
    assert rows["aft_pytorch.AFTSimple"]["status"] == rows["aft_simple"]["status"] == "ok"
    assert "aft_pytorch.AFTFull  WRONG: wrong on adversarial keys" in text(found)


def test_a_leak_from_the_future_is_wrong():
    class Leaky(torch.nn.Module):
        def forward(self, x):
            return x + x.mean(1, keepdim=True)

    peer = replace(PEERS["performer_pytorch.SelfAttention"], package="torch", make=lambda *a, **o: Leaky())
    with mock.patch.dict(PEERS, {"leaky": peer}):
        verdict = gate.gate(BenchSubject("leaky"), replace(SMALL, level="layer"))
    assert not verdict.passed
    assert "future" in verdict.case


def test_a_peer_that_is_missing_is_named():
    with mock.patch.dict(
        PEERS, {"missing": replace(PEERS["linformer.LinformerSelfAttention"], package="tokenmix-no-such-package")}
    ):
        entry = run.Entry(BenchSubject("missing"))
        run._judge(entry, replace(SMALL, level="layer"))
    assert (entry.status, entry.why) == (
        "skipped",
        "tokenmix-no-such-package is not installed; `pip install tokenmix-no-such-package`.",
    )


# --- time, memory, exponents


def test_turns_share_the_budget_and_short_calls_repeat():
    calls = {"short": 0, "long": 0}

    def of(name, cost):
        def sample(n):
            calls[name] += n
            return cost, cost

        return sample

    found = timing.measure({"short": of("short", 1e-5), "long": of("long", 0.04)}, budget=0.0)
    assert (found["long"].samples, found["long"].inner) == (timing.MIN_ROUNDS, 1)
    assert found["short"].inner == 400
    assert found["short"].samples == timing.MIN_ROUNDS
    assert found["short"].wall == pytest.approx(1e-5)


def test_quartile_minimum_and_cpu_of_samples():
    found = timing._summary([(4.0, 8.0), (1.0, 2.0), (3.0, 6.0), (2.0, 4.0)], 7, ())
    assert (found.wall, found.wall_min, found.cpu, found.samples, found.inner) == (2.0, 1.0, 4.0, 4, 7)


def test_wall_and_cpu_time_of_a_known_call():
    import time

    wall, cpu = timing.sampler(lambda: time.sleep(0.02))(2)
    assert 0.02 <= wall < 1.0
    assert cpu < 0.02


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory of a call is measured on Linux")
def test_peak_memory_of_a_known_allocation():
    def call(size):
        kept = torch.ones(size * MIB // 4)
        gone = torch.ones(2 * size * MIB // 4)
        return kept + gone[0]

    for size in (16, 64):
        call(size)
        assert 3 * size * MIB * 0.95 <= timing.peak_memory(lambda size=size: call(size)) <= 4 * size * MIB + 8 * MIB
    assert timing.peak_memory(lambda: None) < 4 * MIB


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_exponent_of_a_power_law(power):
    lengths = [256, 1024, 4096]
    assert timing.exponent(lengths, [3e-6 * n**power for n in lengths]) == pytest.approx(power)
    assert timing.exponent([256], [1.0]) is None


def test_the_limits_are_rates_and_set_the_floor():
    gemm = {"float32 matmul": 1e11, "float32 oneDNN": 2e11, "bfloat16 matmul": 4e11}
    small, large = limits.Rates(300e9, 200e9, 250e9), limits.Rates(40e9, 20e9, 30e9)
    found = limits.Limits({4 * MIB: small, 1024 * MIB: large}, gemm, 1e9)
    assert found.rates(1023 * MIB) == small, "what may lie in a cache is judged by the cache"
    assert found.rates(1024 * MIB) == large
    assert found.rates(1.0) == small
    assert found.best_gemm("float32") == ("float32 oneDNN", 2e11)
    held = 2048.0 * MIB
    assert found.floor(Work(40e9, 0.0, 1e9, held), "float32") == (40 / 30, "copy"), "of all bytes"
    assert found.floor(Work(0.0, 40e9, 1e9, held), "float32") == (2.0, "copy"), "of those that are written"
    assert found.floor(Work(40e9, 0.0, 8e11, held), "bfloat16") == (2.0, "gemm")


def test_a_limit_is_the_best_of_all_probes():
    slow = limits.Limits(
        {MIB: limits.Rates(9e9, 5e9, 8e9), 4 * MIB: limits.Rates(20e9, 3e9, 10e9)}, {"float32 matmul": 1e11}, 2e9
    )
    fast = limits.Limits(
        {MIB: limits.Rates(7e9, 6e9, 9.5e9), 4 * MIB: limits.Rates(5e9, 4e9, 5e9)}, {"float32 matmul": 3e11}, 1e9
    )
    best = slow.best(fast)
    assert best.memory == {MIB: limits.Rates(9.5e9, 6e9, 9.5e9), 4 * MIB: limits.Rates(20e9, 4e9, 10e9)}
    assert (best.gemm, best.exp) == ({"float32 matmul": 3e11}, 2e9)
    assert best.rates(MIB) == limits.Rates(20e9, 6e9, 10e9), "fewer bytes cannot take longer"


def test_every_limit_is_probed():
    measured = limits.probe(budget=0.01)
    assert all(min(r.read, r.write, r.both) > 0 for r in measured.memory.values())
    assert all(r.read >= r.both for r in measured.memory.values())
    assert all(rate > 0 for rate in (*measured.gemm.values(), measured.exp))


def test_shares_come_of_the_probes_before_and_after_each_length(capsys, monkeypatch):
    seen, rate = [], iter(range(1, 9))
    real = limits.probe

    def probe(*args, **options):
        found = real(*args, **options)
        seen.append(1e15 * next(rate))
        return replace(
            found,
            gemm=dict.fromkeys(found.gemm, seen[-1]),
            memory={n: limits.Rates(1e18, 1e18, 1e18) for n in found.memory},
        )

    monkeypatch.setattr(run, "probe", probe)
    found = bench(capsys, "--ops", "linear", "--lengths", "16,48", "--pass", "forward")
    assert len(seen) == 3
    assert set(found["limits"]["gemm_flop_per_s"].values()) == {3e15}
    assert all(r["floor_s"] == pytest.approx(r["flops"] / 3e15) for r in found["rows"])


def test_the_allocator_and_the_machine_are_stated(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "0")
    assert "MALLOC_MMAP_MAX_=0" in limits.allocator()
    found = limits.machine()
    assert found["environment"]["MALLOC_MMAP_MAX_"] == "0"
    assert found["threads"] == torch.get_num_threads()


# --- subjects


def test_subjects_are_written_as_they_are_read():
    names = ["aft_simple", "aft_local:window=32,rank=none", "hydra:causal=false@eager", "synthesizer_mixture:join=plus"]
    found = parse_subjects(",".join(names))
    assert [s.label for s in found] == names
    assert found[1].options == {"window": 32, "rank": None}
    assert found[2].backend == "eager"
    assert parse_subjects("aft_local,window=8")[0].label == "aft_local:window=8"


@pytest.mark.parametrize("name", [n for n in MIXERS if n != "axial"])
def test_any_mixer_can_be_measured(name):
    subject, s = BenchSubject(name), replace(SMALL, backward=True)
    assert needed_bytes(subject, s, kernel=False) > 0
    with subject.scope():
        prepared = prepare(subject, s if hasattr(MIXERS[name], "functional_args") else replace(s, level="layer"))
        prepared.call()
    assert prepared.work.bytes_moved > 0


def test_work_counts_what_must_move_and_be_computed():
    with BenchSubject("aft_simple").scope():
        forward, both = (
            prepare(BenchSubject("aft_simple"), Setting("op", 32, 2, 16, 2, backward=b)).work for b in (False, True)
        )
        attention = prepare(BenchSubject(SDPA), Setting("op", 32, 2, 16, 2)).work
    tensor = 2 * 32 * 16 * 4
    assert (forward.read, forward.written) == (3 * tensor, tensor)
    assert (both.read, both.written, both.bytes_moved) == (7 * tensor, 4 * tensor, 11 * tensor)
    assert (forward.held, both.held) == (4 * tensor, 4 * tensor)
    assert attention.flops == pytest.approx(4 * 2 * 32 * 32 * 16 * 33 / 64)  # causal: only the pairs at or behind


def test_what_would_not_fit_or_end_is_skipped(capsys, monkeypatch):
    monkeypatch.setattr(run, "memory_available", lambda device: MIB)
    found = bench(capsys, "--ops", "aft_full@eager", "--lengths", "512", "--pass", "forward")
    row = next(r for r in found["rows"] if r["subject"] == "aft_full@eager")
    assert row["status"] == "skipped"
    assert "GiB are free" in row["why"]
    monkeypatch.undo()
    assert (
        "--longest-call"
        in bench(capsys, "--ops", "hydra", "--lengths", "16", "--pass", "forward", "--longest-call", "1e-9")["rows"][1][
            "why"
        ]
    )


def test_decoding_without_projections_mixes_the_features_themselves():
    s = Setting("decode", 6, 2, 8, 2)
    with BenchSubject("aft_simple").scope():
        assert torch.isfinite(prepare(BenchSubject("aft_simple"), s).call()[0]).all()
    kept = build(BenchSubject("aft_simple"), s)
    assert hasattr(kept.q_proj, "weight")
    with pytest.raises(MixerError, match="cannot be separated"):
        prepare(BenchSubject("routing"), s)


# --- mistakes


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--ops", "aft_simpel"], "nearest: aft_simple"),
        (["--ops", "aft_simple:windw=3", "--lengths", "16"], None),
        (["--ops", "aft_simple:causal"], "write name:option=value"),
        (["--lengths", "12,x"], "such as 1024"),
        (["--lengths", ","], "--lengths is empty"),
        (["--heads", "3"], "does not divide"),
        (["--budget", "0"], "--budget must be a positive number"),
        (["--budget", "nan"], "--budget must be a positive number"),
        (["--backends", "gpu"], "choose auto, eager, cpu, triton"),
        (["--against", "peers"], "add --level layer"),
        (["--level", "decode", "--pass", "backward"], "no backward pass"),
        (["--plot", "/no/such/folder/x.png"], "does not exist"),
        (["--base", "no-such-revision", "--lengths", "16"], "--base needs a git checkout"),
        (["--level", "row"], "--level"),
    ],
)
def test_mistakes_are_one_line(capsys, argv, said):
    if said is None:  # an option the mixer lacks is a fact about one subject
        found = bench(capsys, *argv)
        assert "has no option 'windw'" in found["rows"][1]["why"]
        return
    assert said in refused(capsys, *argv)


def test_progress_is_silent_about_nothing(capsys):
    tell = progress()
    tell("")
    tell("one")
    tell("two")
    assert capsys.readouterr().err == "one\n"


@pytest.mark.parametrize(
    ("value", "said"),
    [(1.5, "1.50 s"), (0.0123, "12.3 ms"), (4.56e-4, "456 us"), (2e-8, "0.02 us"), (0.9999, "1.00 s")],
)
def test_seconds_in_three_figures(value, said):
    assert seconds(value) == said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_another_revision_is_timed_in_turns(capsys):
    """HEAD is timed against the working tree; the checkout is removed again, and subjects that HEAD lacks are named."""
    root = Path(__file__).parent.parent

    def checkouts():
        listed = subprocess.run(
            ["git", "-C", str(root), "worktree", "list", "--porcelain"], capture_output=True, text=True, check=True
        ).stdout
        return [line for line in listed.splitlines() if line.startswith("worktree") and "tokenmix-base" in line]

    found = bench(capsys, "--ops", "aft_simple", "--lengths", "64", "--base", "HEAD", "--pass", "forward")
    row = next(r for r in found["rows"] if r["subject"] == "aft_simple")
    assert row["x_base"] == pytest.approx(row["base_wall_s"] / row["wall_s"])
    assert len(found["base"]["commit"]) == 40
    assert checkouts() == []
