"""Training: right numbers, and a run that can be stopped anywhere."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kill_nine
from cases import CASES, ONLY_CAUSAL
from tokenmix import MixerError, build_mixer
from tokenmix.lab.report import read_run
from tokenmix.lab.train import (
    DataConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    evaluate,
    evaluate_run,
    load_run,
    progress,
    resume,
    sample_run,
    train,
)
from tokenmix.lab.train.evaluate import windows
from tokenmix.lab.train.loop import Trainer
from tokenmix.lab.train.optim import learning_rate, parameter_groups
from tokenmix.lab.train.rundir import RunDir
from tokenmix.lab.train.tasks import open_task
from tokenmix.mixers.parts.short_conv import ShortConv
from tokenmix.models import LM, LMConfig
from tokenmix.system import checkpoint

HYBRID = ({"name": "aft_local", "window": 4, "rank": 3}, {"name": "attention", "heads": 2})
FILES = ("model.safetensors", "optimizer.safetensors", "rng.safetensors", "progress.json")


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """Fifty thousand bytes that can be learnt."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"%d times %d is %d\n" % (i % 97, i % 89, (i % 97) * (i % 89)) for i in range(3000)))
    return path


def config(text: Path, *, mixers=HYBRID, dropout: float = 0.1, optim=None, **loop_fields) -> RunConfig:
    model = LMConfig(dim=16, max_len=32, mixers=mixers, layers=2, dropout=dropout)
    fields = {
        "steps": 20,
        "batch_size": 4,
        "accumulate": 2,
        "log_every": 3,
        "eval_every": 10,
        "eval_bytes": 600,
        "save_every": 5,
        "keep": 3,
        "threads": 1,
    }
    return RunConfig(
        model,
        DataConfig(str(text), seq_len=32),
        optim or OptimConfig(lr=1e-2, warmup=5),
        TrainConfig(**{**fields, **loop_fields}),
    )


@pytest.fixture(scope="session")
def whole(text, tmp_path_factory) -> Path:
    """A run nobody touched."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(config(text), out)
    return out


@pytest.fixture
def run(whole, tmp_path) -> Path:
    """A copy of it, to be ill-treated."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def step_dir(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def names(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def test_a_run_learns_and_leaves_its_record(whole, text):
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    trained, evaluated = ([x for x in lines if x["kind"] == kind] for kind in ("train", "eval"))
    assert [x["step"] for x in trained] == [3, 6, 9, 12, 15, 18, 20]
    assert [(x["step"], x["split"]) for x in evaluated] == [(10, "valid"), (20, "valid")]
    assert evaluated[-1]["bits_per_byte"] < trained[0]["bpb"] - 1
    assert all(x["bpb"] == pytest.approx(x["loss"] / math.log(2)) and x["tokens"] == x["step"] * 128 for x in trained)
    assert set(trained[0]) == {"kind", "step", "loss", "bpb", "lr", "tokens", "tokens_per_s", "seconds", "peak_mib"}
    assert RunConfig.from_json(json.loads((whole / "config.json").read_text())) == config(text)
    env = json.loads((whole / "env.json").read_text())
    assert env["parameters"] == sum(p.numel() for p in LM(config(text).model).parameters())
    assert env["corpus"]["bytes"] == text.stat().st_size
    assert env["threads"] == 1
    assert env["state_bytes_per_row"] > 0
    assert names(whole) == ["step_00000010", "step_00000015", "step_00000020"]


@pytest.mark.parametrize("step", [10, 15])
def test_going_back_and_on_again_gives_the_same_bits(run, whole, step):
    resume(run, from_step=step)
    kill_nine.compare(whole, run)


def test_killed_three_times_it_gives_the_same_bits(tmp_path, text):
    fields = {
        "--row": "hybrid",
        "--data": str(text),
        "--model.dim": "16",
        "--data.seq_len": "32",
        "--model.max_len": "32",
        "--model.dropout": "0.1",
    }
    loop_fields = {
        "--train.steps": "160",
        "--train.log_every": "1",
        "--train.eval_every": "40",
        "--train.save_every": "4",
        "--train.eval_bytes": "2000",
    }
    options = [word for pair in (fields | loop_fields | {"--train.threads": "1"}).items() for word in pair]
    said: list[str] = []
    kill_nine.torture(tmp_path, 3, ["text", *options], say=said.append)
    assert "before the first checkpoint" in said[1]
    assert "inside a checkpoint" in said[2]


def test_the_peak_memory_of_a_run_is_that_of_its_steps_whichever_process_made_them(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"peak_mib": 1e6} if line["kind"] == "train" and line["step"] == 6 else {}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert resume(run)["peak_mib"] == 1e6


def test_a_resumed_run_without_checkpoint_starts_again(run, whole):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    with (run / "metrics.jsonl").open("a") as f:
        f.write('{"kind": "train", "st')
    resume(run)
    kill_nine.compare(whole, run)


@pytest.mark.parametrize("allowed", [0, 1, 2, 4])
def test_a_full_disk_during_a_checkpoint_loses_nothing(tmp_path, text, whole, monkeypatch, allowed):
    written = []
    real = checkpoint.write_file

    def full(path: Path, content: bytes) -> None:
        if "00000010" in path.parent.name:
            if len(written) == allowed:
                path.write_bytes(content[: len(content) // 2])
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            written.append(path)
        real(path, content)

    monkeypatch.setattr(checkpoint, "write_file", full)
    out = tmp_path / "run"
    with pytest.raises(
        MixerError, match="step 10 could not be written .No space left on device.; the checkpoint of step 5 is intact"
    ):
        train(config(text), out)
    assert names(out) == ["step_00000005"]
    assert kill_nine.last_step(out) == 10
    monkeypatch.setattr(checkpoint, "write_file", real)
    resume(out)
    kill_nine.compare(whole, out)


def test_a_full_disk_under_the_metrics_is_one_clear_error(tmp_path, text, monkeypatch):
    real = RunDir.append

    def full(self, line):
        if line["step"] >= 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, line)

    monkeypatch.setattr(RunDir, "append", full)
    with pytest.raises(
        MixerError,
        match=r"metrics.jsonl could not be written .No space left on device.; the checkpoint of step 5 is intact",
    ):
        train(config(text), tmp_path / "run")


@pytest.mark.parametrize("damage", ["truncated", "edited", "missing"])
@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_previous_one_offered(run, name, damage):
    file = step_dir(run, 20) / name
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(content[:-7])
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    for use in (resume, load_run):
        with pytest.raises(MixerError, match=f"{name}.*latest intact one before it is step 15.*--from 15") as caught:
            use(run)
        assert "\n" not in str(caught.value)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"} == {
        p: b for p, b in before.items() if p.name != ".lock"
    }


def test_the_offered_checkpoint_works(run, whole):
    (step_dir(run, 20) / "model.safetensors").write_bytes(b"")
    (step_dir(run, 15) / "rng.safetensors").write_bytes(b"")
    with pytest.raises(MixerError, match="--from 10"):
        resume(run)
    resume(run, from_step=10)
    kill_nine.compare(whole, run)


def test_a_checkpoint_that_is_not_there_is_refused(run):
    with pytest.raises(MixerError, match="no checkpoint of step 7; available: 10, 15, 20"):
        resume(run, from_step=7)
    with pytest.raises(MixerError, match="'last' or 'best'"):
        load_run(run, step="newest")


def test_output_directories_that_will_not_do(tmp_path, text, whole):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").touch()
    (tmp_path / "file").touch()
    cases = {
        whole: "holds a run already; continue it with",
        tmp_path / "full": "not empty",
        tmp_path / "file": "is a file",
    }
    cases[tmp_path / "file" / "run"] = "could not be created"
    for out, words in cases.items():
        with pytest.raises(MixerError, match=words):
            train(config(text), out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "full"]
    with pytest.raises(MixerError, match="not a run directory"):
        resume(tmp_path / "full")


def test_an_empty_directory_will_do(tmp_path, text):
    assert train(config(text, steps=1), tmp_path)["step"] == 1


def test_the_last_and_the_best_checkpoints_are_kept(tmp_path):
    for step in range(1, 7):
        checkpoint.save_checkpoint(tmp_path, step, {"model": {"w": torch.ones(1)}}, {})
        checkpoint.prune(tmp_path, 2, best=2 if step >= 2 else None)
    assert checkpoint.list_steps(tmp_path) == [2, 5, 6]


def test_the_best_checkpoint_can_be_loaded(tmp_path, text):
    out = tmp_path / "run"
    train(
        config(
            text,
            dropout=0.0,
            optim=OptimConfig(lr=1e-2, warmup=0, schedule="constant"),
            steps=12,
            eval_every=4,
            save_every=2,
            keep=1,
        ),
        out,
    )
    resume(out, changes={"train.steps": 24})
    bits = {x["step"]: x["bits_per_byte"] for x in RunDir(out).read_metrics() if x["kind"] == "eval"}
    best = min(bits, key=lambda s: bits[s])
    model, _ = load_run(out, step="best")
    saved = checkpoint.load_checkpoint(out / "checkpoints", best, "model")[0]["model"]
    assert all(torch.equal(v, saved[k]) for k, v in model.state_dict().items())
    assert evaluate_run(out, split="valid", step="best", max_bytes=600, record=False).bits_per_byte == bits[best]


def test_a_second_process_is_refused(run):
    with RunDir(run).lock(), pytest.raises(MixerError, match="another process is training"):
        resume(run)


def test_a_changed_environment_warns_and_a_changed_corpus_is_refused(run, text, tmp_path):
    env = json.loads((run / "env.json").read_text())
    (run / "env.json").write_text(json.dumps(env | {"torch": "1.0"}))
    with pytest.warns(UserWarning, match=r"torch was 1\.0, is"):
        resume(run, from_step=15)
    other = tmp_path / "other.txt"
    other.write_bytes(text.read_bytes() + b"!")
    (run / "config.json").write_text((run / "config.json").read_text().replace(str(text), str(other)))
    with pytest.raises(MixerError, match="changed since this run began"):
        resume(run, from_step=15)
    with pytest.raises(MixerError, match="changed since this run began"):
        evaluate_run(run)


def test_only_the_loop_can_change_on_resume(run):
    for name in ("model.dim", "data.seq_len", "train.batch_size"):
        with pytest.raises(MixerError, match=f"{name} cannot change"):
            resume(run, changes={name: 64})
    assert resume(run, changes={"train.steps": 22})["step"] == 22
    assert json.loads((run / "config.json").read_text())["train"]["steps"] == 22


def test_time_can_end_a_run(tmp_path, text):
    summary = train(config(text, steps=None, max_seconds=0.3, optim=OptimConfig(schedule="constant")), tmp_path / "run")
    assert 0.3 <= summary["seconds"] < 5
    assert summary["valid_bits_per_byte"] is not None
    assert resume(tmp_path / "run")["step"] == summary["step"]


def test_a_run_that_diverges_stops_before_it_spoils_its_checkpoints(tmp_path, text):
    wild = OptimConfig(lr=1e25, warmup=0, schedule="constant", clip=0.0)
    with pytest.raises(
        MixerError, match=r"the loss became nan by step 3; there is no checkpoint yet. Try a lower optim.lr"
    ):
        train(config(text, optim=wild), tmp_path / "run")


def test_a_run_that_diverges_in_the_update_before_an_evaluation_has_no_score(tmp_path, text):
    """The last loss is still finite: a score of NaN would be the best one, as nothing is below it."""
    wild = OptimConfig(lr=1e25, warmup=0, schedule="constant", clip=0.0)
    with pytest.raises(MixerError, match="the bits per byte on the validation split became nan by step 1"):
        train(config(text, optim=wild, steps=1, eval_bytes=50), tmp_path / "run")
    assert [line["kind"] for line in RunDir(tmp_path / "run").read_metrics()] == ["train"]
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_accumulating_is_one_large_batch(tmp_path, text):
    losses = []
    for parts in (1, 4):
        train(config(text, dropout=0.0, accumulate=parts, steps=6, log_every=1), tmp_path / str(parts))
        losses.append([x["loss"] for x in RunDir(tmp_path / str(parts)).read_metrics() if x["kind"] == "train"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_bf16_and_compile_train_like_fp32(tmp_path, text, monkeypatch):
    calls = []
    real = torch.compile

    def traced(model):
        calls.append(model)
        return real(model, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", traced)
    losses = {}
    for name, fields in {"fp32": {}, "bf16": {"precision": "bf16"}, "compiled": {"compile": True}}.items():
        train(config(text, dropout=0.0, steps=6, log_every=1, **fields), tmp_path / name)
        losses[name] = [x["loss"] for x in RunDir(tmp_path / name).read_metrics() if x["kind"] == "train"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)
    assert losses["bf16"] != losses["fp32"]
    assert losses["compiled"] == pytest.approx(losses["fp32"], rel=1e-4)
    assert len(calls) == 1


def test_only_linear_weights_decay():
    model = LM(LMConfig(dim=16, max_len=32, mixers=HYBRID))
    groups = parameter_groups(model, OptimConfig(weight_decay=0.5))
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    others = {id(p) for group in groups if not group["weight_decay"] for p in group["params"]}
    for name, p in model.named_parameters():
        linear = name.endswith("weight") and any(part in name for part in ("_proj", "mlp.up", "mlp.down", "head"))
        assert (id(p) in decayed, id(p) in others) == (linear, not linear), name
    assert {g["role"]: g["weight_decay"] for g in groups} == {
        "matrix": 0.5,
        "map": 0.5,
        "embedding": 0.0,
        "vector": 0.0,
        "mixer": 0.0,
    }


def test_learning_rates():
    def rates(steps, *at, **fields):
        return [learning_rate(t - 1, OptimConfig(lr=1.0, warmup=10, min_lr_ratio=0.1, **fields), steps) for t in at]

    assert rates(None, 1, 5, 10, 40, 1000, schedule="vaswani") == pytest.approx([0.1, 0.5, 1.0, 0.5, 0.1])
    assert rates(110, 5, 10, 60, 110, schedule="cosine") == pytest.approx([0.5, 1.0, 0.55, 0.1])
    assert rates(110, 5, 10, 60, 110, schedule="linear") == pytest.approx([0.5, 1.0, 0.55, 0.1])
    assert rates(None, 5, 10, 500, schedule="constant") == pytest.approx([0.5, 1.0, 1.0])


@pytest.mark.parametrize(
    ("size", "seq_len", "stride"),
    [(100, 10, 5), (101, 10, 10), (7, 10, 5), (11, 10, 1), (12, 10, 3), (57, 8, 8), (2, 1, 1)],
)
def test_every_byte_is_scored_once_with_enough_context(size, seq_len, stride):
    scored = []
    for start, length, first in windows(size, seq_len, stride):
        assert length == min(seq_len, size - 1)
        assert 0 <= start <= size - 1 - length
        for j in range(first, length):
            target, context = start + j + 1, j + 1
            scored.append(target)
            assert context >= min(target, seq_len - stride)
    assert scored == list(range(1, size))


class Constant(nn.Module):
    """Always the same logits."""

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, x):
        return self.logits.expand(*x.shape, 256)


def test_bits_of_models_that_are_known():
    data = torch.randint(256, (3000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert evaluate(Constant(torch.zeros(256)), data, seq_len=64).bits_per_byte == pytest.approx(8.0, abs=1e-6)
    probs = torch.rand(256, generator=torch.Generator().manual_seed(1)).softmax(0)
    by_hand = (8.0 - probs.log2()[data[1:].long()].double().sum().item()) / 3000
    for stride in (1, 7, 64):
        result = evaluate(Constant(probs.log()), data, seq_len=64, stride=stride, batch_size=5)
        assert result.bits_per_byte == pytest.approx(by_hand, abs=1e-6)
        assert result.bytes == 3000


@torch.no_grad()
def test_stride_one_is_the_full_context_of_every_byte():
    torch.manual_seed(0)
    model = LM(LMConfig(dim=16, max_len=8, mixers=HYBRID, init_std=0.3)).eval()
    data = torch.randint(256, (40,)).to(torch.uint8)
    bits = 8.0
    for t in range(1, 40):
        context = data[max(0, t - 8) : t].long()[None]
        bits -= model(context)[0, -1].log_softmax(-1)[data[t].long()].item() / math.log(2)
    assert evaluate(model, data, seq_len=8, stride=1).bits_per_byte == pytest.approx(bits / 40, abs=1e-5)
    assert evaluate(model, data, seq_len=8, stride=8).bits_per_byte != pytest.approx(bits / 40, abs=1e-3)
    with pytest.raises(MixerError, match="stride"):
        evaluate(model, data, seq_len=8, stride=9)


def test_the_score_by_context(run):
    """Bytes with so much context, each scored once; 500 bytes are 15 windows of 32 and what is left over."""
    whole = evaluate_run(run, split="test", max_bytes=500, stride=32, record=False)
    found = evaluate_run(run, split="test", max_bytes=500, by_context=True)
    assert found.bits_per_byte == whole.bits_per_byte
    assert [part[:2] for part in found.by_context] == [(1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 32)]
    model, cfg = load_run(run)
    data = open_task(cfg).corpus.split("test")[:500].long()
    rows = data[: 15 * 32 + 1].unfold(0, 33, 32)
    with torch.no_grad():
        nats = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:], reduction="none")
    assert found.by_context[1][2] == pytest.approx(float(nats[:, 1:3].mean()) / math.log(2), abs=1e-5)
    assert "16 to 31" in found.text()
    assert RunDir(run).read_metrics()[-1]["by_context"]["1-1"] == found.by_context[0][2]


def test_evaluation_and_samples_of_a_run(run, text):
    result = evaluate_run(run, split="test", max_bytes=500)
    assert RunDir(run).read_metrics()[-1]["bits_per_byte"] == result.bits_per_byte
    model, cfg = load_run(run)
    data = torch.tensor(list(text.read_bytes()[-len(text.read_bytes()) // 20 :]), dtype=torch.uint8)
    assert cfg == config(text)
    assert abs(evaluate(model, data[:500], seq_len=32).bits_per_byte - result.bits_per_byte) < 0.3
    a, b = (sample_run(run, n=20, prompt=b"12 times", seed=3) for _ in range(2))
    assert a == b
    assert a.startswith(b"12 times")
    assert len(a) == 28
    with pytest.raises(MixerError, match="n can be at most 24"):
        sample_run(run, n=25, prompt=b"12 times")


def test_windows_beyond_the_length_of_a_model_need_a_resize(run):
    with pytest.raises(MixerError, match="built with max_len=32, got 48 tokens"):
        evaluate_run(run, seq_len=48, max_bytes=200)
    found = evaluate_run(run, seq_len=48, max_bytes=200, resize=True)
    model, cfg = load_run(run)
    wanted = evaluate(model.resize(48), open_task(cfg).corpus.split("test"), seq_len=48, max_bytes=200)
    assert (found.seq_len, found.resized, found.bits_per_byte) == (48, 48, wanted.bits_per_byte)
    assert "the model stretched to 48 tokens" in found.text()


def test_scores_with_scaled_positions_are_kept(text, tmp_path):
    rotary = {"name": "attention", "heads": 2, "positions": {"name": "rotary"}}
    out = tmp_path / "run"
    short = config(text, mixers=(rotary,), steps=2, csv=True)
    train(replace(short, model=replace(short.model, positions=None)), out)
    found = evaluate_run(out, seq_len=64, max_bytes=300, scaling="ntk")
    last = RunDir(out).read_metrics()[-1]
    assert (last["scaling"], last["seq_len"]) == ({"name": "ntk", "factor": 2.0}, 64) == (found.scaling, found.seq_len)
    assert read_run(out).evals[-1] == last
    with pytest.raises(MixerError, match="no reader knows such a line: .*surprise"):
        RunDir(out).append({**last, "surprise": [1, 2]})
    assert RunDir(out).read_metrics()[-1] == last


def test_options_that_an_evaluation_does_not_have_are_refused(run):
    before = (run / "metrics.jsonl").read_bytes()
    for options, words in (
        ({"max_images": 3}, "takes stride, seq_len, max_bytes, by_context, scaling, resize; leave out max_images"),
        ({"scaling": "ntk"}, "has no rotary positions to scale"),
        ({"max_bytes": -5}, "max_bytes must be at least 1, got -5"),  # not all bytes but the last five
    ):
        with pytest.raises(MixerError, match=words):
            evaluate_run(run, **options)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_fewer_steps_than_were_done_are_refused_and_the_config_stays(run):
    before = (run / "config.json").read_bytes()
    with pytest.raises(MixerError, match=r"train.steps=5 is less than the 20 steps that .* has done"):
        resume(run, changes={"train.steps": 5})
    assert (run / "config.json").read_bytes() == before


def test_samples_are_written_and_do_not_disturb_the_run(tmp_path, text, whole):
    train(config(text, sample_bytes=10), tmp_path / "run")
    assert [p.name for p in sorted((tmp_path / "run" / "samples").iterdir())] == [
        "step_00000010.txt",
        "step_00000020.txt",
    ]
    assert kill_nine.lines(tmp_path / "run") == kill_nine.lines(whole)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train.stepz": 3}, "no field 'train.stepz'; nearest: train.steps"),
        ({"trian.steps": 3}, "no field 'trian'"),
        ({"train": 3}, "train must be an object"),
        ({"train.steps": 0}, "train.steps must be positive"),
        ({"train.steps": None}, "this run would never end"),
        ({"train.steps": None, "train.max_seconds": 5}, "needs train.steps"),
        ({"train.accumulate": 3}, "must divide"),
        ({"train.precision": "fp8"}, "fp8"),
        ({"train.stride": 33}, "train.stride must be in"),
        ({"data.seq_len": 33}, "data.seq_len must be in 1..model.max_len=32"),
        ({"optim.schedule": "step"}, "schedule='step'"),
        ({"optim.lr": -1.0}, "optim.lr must be positive"),
        ({"optim.betas": [0.9]}, "betas"),
        ({"optim.betas": ["a", 0.9]}, "optim.betas.0 must be a float, got 'a'"),
        ({"data.split": [90, True, 5]}, "data.split.1 must be a float, got True"),
        ({"optim.clip": math.nan}, "optim.clip must be a number, got nan"),
        ({"train.compile": "yes"}, "must be a bool"),
    ],
)
def test_wrong_configs_are_refused(text, changes, words):
    with pytest.raises(MixerError, match=words):
        config(text).override(changes)


def test_wrong_devices_are_refused(text, tmp_path):
    with pytest.raises(MixerError, match="device='tpu9' is unknown"):
        train(config(text, device="tpu9"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("changes", "words"), [({"row": None}, "row"), ({"recipe": 3}, "recipe")])
def test_a_config_that_nobody_could_read_again_is_refused_before_anything_is_made(tmp_path, text, changes, words):
    with pytest.raises(MixerError, match=f"config: {words} must be a str"):
        train(dataclasses.replace(config(text), **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_short_corpus_is_refused_before_anything_is_made(tmp_path):
    (tmp_path / "short").write_bytes(b"x" * 30)
    with pytest.raises(MixerError, match="too short"):
        train(config(tmp_path / "short"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_threads_of_the_caller_are_given_back(tmp_path, text):
    before = torch.get_num_threads()
    train(config(text, steps=1, threads=before + 1), tmp_path / "run")
    assert torch.get_num_threads() == before


# --- runs that were edited, damaged, or cannot be written


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optim.lr", 2e-2),
        ("train.seed", 1),
        ("train.batch_size", 8),
        ("train.precision", "bf16"),
        ("data.seq_len", 16),
        ("model.dropout", 0.0),
    ],
)
def test_what_cannot_change_in_the_middle_of_a_run_cannot_be_edited_either(run, field, value):
    file, (part, name) = run / "config.json", field.split(".")
    edited = json.loads(file.read_text())
    edited[part][name] = value
    file.write_text(json.dumps(edited))
    for use in (resume, load_run):
        with pytest.raises(
            MixerError,
            match=f"config.json was edited since the checkpoint was written: {field} was .*, is {value!r}; restore it",
        ) as caught:
            use(run)
        assert "\n" not in str(caught.value)
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    with pytest.raises(MixerError, match="config.json was edited since this run began"):
        resume(run)


def test_a_checkpoint_that_does_not_say_its_config_is_taken(run, whole):
    """As earlier versions wrote them."""
    groups, progress = checkpoint.load_checkpoint(run / "checkpoints", 15, "model", "optimizer", "rng")
    del progress["config"]
    checkpoint.save_checkpoint(run / "checkpoints", 15, groups, progress)
    resume(run, from_step=15)
    kill_nine.compare(whole, run)


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind": "train", "loss": 1.0}',
        b"[1, 2]",
        b'{"kind": "train", "step": "3", "loss": 1.0}',
        b"\xff\xfe{}",
        b"null",
        b"[" * 9999,
    ],
)
def test_damaged_lines_of_metrics_are_kept_aside_and_reported(run, whole, line):
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([*lines[:2], line + b"\n", *lines[2:]]) + b'{"kind": "tr')
    with pytest.warns(
        UserWarning, match="report: .*metrics.jsonl: 1 line cannot be read .the first: line 3, .*; skipped"
    ):
        assert len(read_run(run).train) == len(read_run(whole).train)
    with pytest.warns(UserWarning, match="metrics.jsonl: 1 line cannot be read .*; moved to metrics.damaged"):
        resume(run, from_step=15)
    assert (run / "metrics.damaged").read_bytes() == line + b"\n"
    kill_nine.compare(whole, run)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", "it must hold an object, got list"),
        ('{"threads": 1000000}', "threads must be an integer from 1 to 1024, got 1000000"),
        ('{"threads": "2"}', "threads must be an integer"),
        ('{"threads": -1}', "threads must be an integer"),
        ('{"resumed": {}}', "resumed must be a list"),
        ('{"corpus": {"bytes": 3}}', "corpus has no 'sha256'"),
        ('{"corpus": 3}', "corpus must be an object, got 3"),
        ("[" * 9999, "is not readable JSON"),
    ],
)
def test_an_env_of_another_shape_is_one_clear_error(run, content, words):
    (run / "env.json").write_text(content)
    for use in (resume, evaluate_run):
        with pytest.raises(MixerError, match=f"env.json.*{words}") as caught:
            use(run)
        assert "\n" not in str(caught.value)


def test_numbers_that_torch_does_not_take_are_refused(run, text, tmp_path):
    for field, value, words in (
        ("seed", 1 << 70, "train.seed=.* out of range"),
        ("threads", 1_000_000, "train.threads must be at most 1024"),
    ):
        with pytest.raises(MixerError, match=words):
            config(text, **{field: value})
    with pytest.raises(MixerError, match="sample: seed=.* is out of range; a seed is an integer from"):
        sample_run(run, seed=1 << 70)
    with pytest.raises(MixerError, match="device='meta' holds no numbers here"):
        train(config(text, device="meta"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_sample_is_as_long_as_fits_unless_a_length_is_given(run):
    assert len(sample_run(run)) == 32
    assert len(sample_run(run, prompt=b"12 times")) == 32
    with pytest.raises(MixerError, match="max_len=32"):
        sample_run(run, prompt=b"x" * 32)


def test_without_safetensors_nothing_is_begun(run, text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for use in (lambda: train(config(text), tmp_path / "new"), lambda: resume(run), lambda: load_run(run)):
        with pytest.raises(MixerError, match=r"checkpoints need the extra 'train' .*pip install 'tokenmix\[train\]'"):
            use()
    assert not (tmp_path / "new").exists()


def test_an_evaluation_that_cannot_be_recorded_is_not_lost(run):
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    with pytest.warns(UserWarning, match="metrics.jsonl cannot be written to .*the result will not be added"):
        assert evaluate_run(run, max_bytes=100).bytes == 100


def test_an_evaluation_whose_record_meets_a_full_disk_is_not_lost(run, monkeypatch):
    def full(self, line):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunDir, "append", full)
    with pytest.warns(
        UserWarning, match="metrics.jsonl cannot be written to .No space left on device.; the result is not added"
    ):
        assert evaluate_run(run, max_bytes=100).bytes == 100


def test_a_run_that_is_asked_to_stop_says_where_and_goes_on_to_the_same_bits(tmp_path, text, whole, monkeypatch, capfd):
    real = Trainer.step

    def step(self):
        real(self)
        if self.progress.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "step", step)
    with pytest.raises(SystemExit) as end:
        train(config(text), tmp_path / "run")
    assert end.value.code == 143
    said = f"{tmp_path / 'run'}: stopped by SIGTERM after step 7, which is saved; "
    said += f"`tokenmix resume {tmp_path / 'run'}` continues it.\n"
    found, told = capfd.readouterr().err.split("\n", 1)
    assert found.startswith(f"data: {text}: 1 file, ")
    assert told == said
    assert names(tmp_path / "run") == ["step_00000005", "step_00000007"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    monkeypatch.setattr(Trainer, "step", real)
    resume(tmp_path / "run")
    kill_nine.compare(whole, tmp_path / "run")


@pytest.fixture
def ctrl_c():
    """Python's own answer to Ctrl-C, which it leaves out where a shell started it in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_saves_the_step_and_names_the_run(tmp_path, text, whole, monkeypatch, capfd):
    real, out = Trainer.step, tmp_path / "a run"

    def step(self):
        real(self)
        if self.progress.step == 7:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "step", step)
    said = f"{out}: stopped by Ctrl-C after step 7, which is saved; `tokenmix resume '{out}'` continues it."
    with pytest.raises(KeyboardInterrupt) as end:
        train(config(text), out)
    assert end.value.args == (said,)
    assert "Ctrl-C again ends at once" in capfd.readouterr().err
    assert names(out) == ["step_00000005", "step_00000007"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(Trainer, "step", real)
    resume(out)
    kill_nine.compare(whole, out)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    ("at", "saved"),
    [
        (3, "nothing was saved yet, so `tokenmix resume {out}` starts it from the beginning"),
        (7, "step 5 is saved, and `tokenmix resume {out}` continues from it"),
    ],
)
def test_ctrl_c_twice_ends_at_once_and_says_what_is_saved(tmp_path, text, monkeypatch, at, saved):
    real, out = Trainer.step, tmp_path / "run"

    def step(self):
        if self.progress.step == at:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        real(self)

    monkeypatch.setattr(Trainer, "step", step)
    with pytest.raises(KeyboardInterrupt) as end:
        train(config(text), out)
    assert end.value.args == (f"{out}: stopped by Ctrl-C; {saved.format(out=out)}.",)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_before_the_run_began_says_that_there_is_nothing(tmp_path, text, monkeypatch):
    monkeypatch.setattr("tokenmix.lab.train.start.environment", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match="nothing of this run was written yet"):
        train(config(text), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_checkpoint_says_that_it_starts_again(run):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    with pytest.warns(UserWarning, match=f"{run}: nothing was saved yet, so the run starts from the beginning"):
        resume(run)


def test_one_of_several_processes_without_the_others_is_refused(tmp_path, text, run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert train(config(text, steps=1), tmp_path / "one")["step"] == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("RANK", raising=False)
    words = "one of 4 processes .WORLD_SIZE=4.*, which did not meet .* RANK expected.*; start them with torchrun"
    with pytest.raises(MixerError, match=f"train: this is {words}"):
        train(config(text), tmp_path / "new")
    with pytest.raises(MixerError, match=f"resume: this is {words}"):
        resume(run)
    assert not (tmp_path / "new").exists()


def test_progress_without_a_terminal_is_plain_lines(tmp_path, text, monkeypatch, capfd):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    train(config(text, steps=6), tmp_path / "run")
    found, first, second = capfd.readouterr().err.splitlines()
    assert found.startswith(f"data: {text}: 1 file, ")
    number = r"[\d,.]+"
    assert re.fullmatch(rf"step 3 \(50%\)  {number} bits/byte  {number} tokens/s  about {number} s left", first)
    assert second.startswith("step 6 (100%)  ")
    train(config(text, steps=3), tmp_path / "quiet", verbose=False)
    assert capfd.readouterr().err == ""


def test_the_handler_of_a_program_around_is_left_alone(tmp_path, text):
    def mine(*_):
        raise AssertionError

    before = signal.signal(signal.SIGTERM, mine)
    try:
        train(config(text, steps=1), tmp_path / "run")
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("case", CASES)
def test_mixer_lr_moves_what_is_the_mixers_own(case):
    """Biases, tables, filters and memories, in child modules too; no projection, convolution of torch or norm."""
    name, options = CASES[case]
    model = nn.ModuleDict({"mixer": build_mixer(name, 8, **options, causal=case in ONLY_CAUSAL)})
    names = {id(p): n.removeprefix("mixer.") for n, p in model.named_parameters()}
    moved = {
        names[id(p)]
        for group in parameter_groups(model, OptimConfig(mixer_lr=3.0))
        for p in group["params"]
        if group["scale"] == 3.0
    }
    shared = re.compile(r"(.*_proj|.*_proj\.(linear|down|up)|.*_global|stage_\d|feed|.*conv|.*norm.*)\.(weight|bias)")
    convs = [n.removeprefix("mixer.") for n, m in model.named_modules() if isinstance(m, ShortConv)]
    taps = {f"{n}.{kind}" for n in convs for kind in ("weight", "bias")}
    assert moved == {n for n in names.values() if n in taps or not shared.fullmatch(n)}
    if name in ("aft_full", "synthesizer_random", "synthesizer_factorized_random") and options.get("trainable", True):
        assert any(n.startswith(("bias.", "logits.")) for n in moved)
