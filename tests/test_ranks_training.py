"""`tokenmix train` on several processes equals one process, and goes on with another number of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import kill_ranks
import ranks_process as at_ranks
import ranks_training as jobs
from tokenmix import MixerError
from tokenmix.lab.train import load_run, world
from tokenmix.models.saved import read_weights_of

CLOSE = {"adamw float64": 1e-10, "adamw float32": 1e-6, "muon float32": 1e-5, "average float32": 1e-6}
CLOSE |= {"penalty float32": 1e-6, "norms float32": 1e-6, "compiled float32": 1e-6}
CLOSE |= {"fp16 float32": 1e-3, "bf16 float32": 1e-3}
CLOSE |= {"adamw float32 on four": 1e-5}  # with shared tokens: 20 steps of AdamW drift apart by 1.5e-6
FOUR = ("adamw float64", "adamw float32", "muon float32", "fp16 float32")
LIMIT = 280
"""Seconds for a group of ranks, as each exchange has a limit of its own."""
PAIRS = [("adamw float32", "whole"), ("adamw float64", "tokens"), ("muon float32", "fsdp"), ("average float32", "fsdp")]
PAIRS += [("fp16 float32", "whole"), ("fp16 float32", "fsdp"), ("bf16 float32", "fsdp"), ("penalty float32", "whole")]
PAIRS += [("norms float32", "fsdp"), ("compiled float32", "whole"), ("compiled float32", "fsdp")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs of one process, made when they are asked for."""
    folder, made = tmp_path_factory.mktemp("alone"), {}

    def run(job: str):
        if job not in made:
            made[job] = folder / job.replace(" ", "_")
            jobs.in_dtype(job, made[job])
        return made[job]

    return run


@pytest.fixture(scope="module")
def two(request, tmp_path_factory):
    """The runs of two processes and what they refused, as far as tests ask for them; all share one pair."""
    folder = tmp_path_factory.mktemp("two")
    asked = " ".join(item.name for item in request.session.items)
    pairs = [(job, layout) for job, layout in PAIRS if f"[{job}-{layout}]" in asked or f"[{job}]" in asked]
    work = [f"train|{job}|{layout}|{folder}/{job} {layout}" for job, layout in pairs]
    work += [f"refuse|{name}|{folder}/{name}" for name in jobs.BAD if f"[{name}-" in asked]
    work += [f"parts|{folder}/parts {layout}|{layout}" for layout in ("whole", "fsdp") if f"own[{layout}]" in asked]
    further = {"a_rank_without_a_row": "short", "batch_norms": "norms", "overflow": "overflow", "held": "reduced"}
    further["teacher"] = "taught"
    work += [f"{verb}|{folder}/{verb}" for name, verb in further.items() if name in asked]
    return folder, at_ranks.run(folder, 2, *work, compute=jobs.computed, limit=LIMIT)


def equal(one, many, job: str, on: str = "") -> None:
    a, b = jobs.losses(one), jobs.losses(many)
    assert len(a) == len(b) == jobs.STEPS + 2
    assert b == pytest.approx(a, rel=CLOSE.get(job + on, CLOSE[job]), abs=0)


@pytest.mark.parametrize(("job", "layout"), PAIRS)
def test_two_ranks_train_as_one_process(two, alone, job, layout):
    """Losses of all steps and both scores, with gradient accumulation, clipping and uneven shares of tokens."""
    equal(alone(job), two[0] / f"{job} {layout}", job)


@pytest.mark.parametrize("job", ["muon float32", "average float32"])
def test_shards_are_read_by_one_process(two, alone, job):
    found, wanted = (load_run(path)[0].state_dict() for path in (two[0] / f"{job} fsdp", alone(job)))
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], atol=1e-3) for name in found)


def test_a_rank_without_a_row_of_a_short_batch_adds_nothing(two, tmp_path):
    """The last batch of an epoch may have fewer rows than there are ranks; its loss was NaN on those without one."""
    jobs.short(tmp_path / "one")
    one, many = (jobs.train_losses(run) for run in (tmp_path / "one", two[0] / "short"))
    assert len(one) == 10
    assert many == pytest.approx(one, rel=1e-5)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return read_weights_of(run, jobs.last_step(run), averaged=False)[0]


def test_batch_norms_see_the_rows_of_all_ranks(two, tmp_path):
    """Of torch and of ours, in uneven parts and in one that a rank has no row of; all other parts are one's own too.

    Each rank built other weights: those of the first count.
    """
    same_norms(two[0] / "norms", tmp_path / "one")


def same_norms(many: Path, one: Path) -> None:
    jobs.norms(one)
    assert jobs.train_losses(many) == pytest.approx(jobs.train_losses(one), rel=1e-6)
    found, wanted = weights(many), weights(one)
    assert {"norms.0.running_var", "norms.1.running_mean", "tokens.norm.running_var"} <= found.keys()
    assert not torch.equal(wanted["norms.1.running_mean"], torch.zeros(6))
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-6), name


@pytest.mark.parametrize("layout", ["whole", "fsdp"])
def test_parts_of_ones_own(two, tmp_path, layout):
    """A loss, a schedule, a callback with a state and a logger, of which only the first rank's is called."""
    jobs.parts(tmp_path / "one")
    one, many = tmp_path / "one", two[0] / f"parts {layout}"
    assert jobs.losses(many) == pytest.approx(jobs.losses(one), rel=1e-6)
    assert [rank[f"parts {layout}"] for rank in two[1]] == [jobs.STEPS + 2, 0]
    shutil.copytree(many, tmp_path / "on")
    jobs.parts(tmp_path / "on", **{"train.steps": jobs.STEPS + 1})
    assert jobs.last_step(tmp_path / "on") == jobs.STEPS + 1


def test_each_rank_adds_its_share_of_what_a_teacher_says(two, tmp_path):
    """Losses and those of the layers, which are means over the rows of all ranks."""
    jobs.train_with_teacher(tmp_path / "one")
    one, many = (jobs.read_steps(run) for run in (tmp_path / "one", two[0] / "taught"))
    assert len(one) == 10
    assert [x["loss"] for x in many] == pytest.approx([x["loss"] for x in one], rel=1e-6)
    assert [x["aux"]["distill"] for x in many] == pytest.approx([x["aux"]["distill"] for x in one], rel=1e-5)


def test_an_overflow_on_one_rank_holds_all(two):
    """Whole weights and sharded ones, whose gradients only their rank can see."""
    for rank in two[1]:
        assert rank["overflow"] == [(4.0, True), (4.0, True)]


def test_gradients_are_held_until_the_last_part(two):
    """Four groups of weights, three blocks and the rest, are sent once in each of two steps of two parts."""
    assert [rank["reduced"] for rank in two[1]] == [8, 8]


@pytest.mark.parametrize(("name", "number", "found"), [("auto", 3, "cuda:1"), ("cuda", 0, "cuda:0"), ("cpu", 3, "cpu")])
def test_each_rank_of_a_machine_takes_its_own_gpu(monkeypatch, name, number, found):
    """Two GPUs that do not exist."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(world, "pick_device", torch.device)
    assert world.own_device(name, number) == torch.device(found)
    assert chosen == [torch.device(found)] * (found != "cpu")


def test_a_gpu_for_two_ranks_and_two_kinds_of_devices_are_refused():
    ranks = types.SimpleNamespace(ranks=2)
    world.check_devices(ranks, ["cpu", "cpu"])
    world.check_devices(ranks, ["cuda GPU-1", "cuda GPU-2"])
    with pytest.raises(MixerError, match="2 processes need a GPU each, got one for ranks 0 and 1; start fewer"):
        world.check_devices(ranks, ["cuda GPU-1", "cuda GPU-1"])
    with pytest.raises(MixerError, match="2 processes compute on one kind of device, got cpu, cuda; set"):
        world.check_devices(ranks, ["cpu", "cuda GPU-1"])


@pytest.mark.parametrize(("gpus", "backend"), [(False, "gloo"), (True, "cpu:gloo,cuda:nccl")])
def test_the_backend_follows_the_devices(monkeypatch, gpus, backend):
    asked: list[str] = []
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: asked.append(backend))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: gpus)
    world._rendezvous("train", "2")
    assert asked == [backend]


def test_a_group_that_cannot_carry_texts_is_refused(monkeypatch):
    """A program that has joined its processes by NCCL alone."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    with pytest.raises(MixerError, match=r"joined by nccl; call init_process_group\('cpu:gloo,cuda:nccl'\)"):
        world.Joined(jobs.config()).pick_device("cpu")


def test_only_the_first_rank_writes(two):
    run = two[0] / "adamw float32 whole"
    assert len(jobs.losses(run)) == jobs.STEPS + 2
    assert sorted(p.name for p in run.iterdir()) == sorted(
        ["checkpoints", "config.json", "env.json", "metrics.jsonl", "samples", ".lock"]
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "segments",
            "MemoryCompressed: has neither segments nor blocks of keys here, so ranks cannot share its sequences",
        ),
        ("divides", "train: train.context_parallel=3 does not divide 2 processes"),
        ("rows", "train: 2 processes need a row each, got 1 rows"),
        ("penalty", "train: 2 processes have no optim.one_hot where weights are sharded"),
        ("compile", "train: 2 processes do not compile what shares tokens"),
        ("moments", "train: 2 processes share no tokens of batch norms, got blocks.0.mixer."),
        ("unlike", "train: 2 processes need one config, got another optim.lr on rank 1 than on rank 0"),
        ("redrawn", "train: 2 processes cannot train what learns beside its gradient, got blocks.0.mixer."),
    ],
)
def test_every_rank_refuses_in_one_line(two, name, said):
    for rank in two[1]:
        assert rank[name].startswith(said)
        assert "\n" not in rank[name]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """The runs of four processes: FSDP2 over all, rows over two, tokens over two."""
    folder = tmp_path_factory.mktemp("four")
    work = [f"train|{job}|both|{folder}/{job}" for job in FOUR] + [f"norms|{folder}/norms"]
    at_ranks.run(folder, 4, *work, compute=jobs.computed, limit=LIMIT)
    return folder


@pytest.mark.parametrize("job", FOUR)
def test_four_ranks_train_as_one_process(four, alone, job):
    equal(alone(job), four / job, job, " on four")


def test_batch_norms_of_four_ranks(four, tmp_path):
    same_norms(four / "norms", tmp_path / "one")


@pytest.mark.parametrize(("ranks", "layout"), [(4, "fsdp"), (2, "both"), (2, "whole")])
def test_what_four_ranks_began_others_go_on_with(four, alone, tmp_path, ranks, layout):
    job = "adamw float64"
    at_ranks.run(
        tmp_path, ranks, f"resume|{job}|{layout}|{tmp_path}/on|{four / job}", compute=jobs.computed, limit=LIMIT
    )
    equal(alone(job), tmp_path / "on", job)


def test_what_four_ranks_began_one_process_goes_on_with(four, alone, tmp_path):
    job = "adamw float64"
    shutil.copytree(four / job, tmp_path / "on")
    jobs.in_dtype(job, tmp_path / "on", start=four / job)
    equal(alone(job), tmp_path / "on", job)


def test_what_one_process_began_sharded_ranks_go_on_with(alone, tmp_path):
    job = "adamw float32"
    at_ranks.run(tmp_path, 2, f"resume|{job}|fsdp|{tmp_path}/on|{alone(job)}", compute=jobs.computed, limit=LIMIT)
    equal(alone(job), tmp_path / "on", job)


def test_killed_ranks_leave_the_same_bits(tmp_path):
    kill_ranks.torture(tmp_path, 1)


def lines_of(started) -> list[str]:
    """What the ranks said, one line each."""
    _, said = started.communicate(timeout=LIMIT)
    assert started.returncode
    return [line for line in said.splitlines() if line.startswith("error: ")]


def test_what_does_not_fit_ends_every_rank_of_torchrun_in_one_line(tmp_path):
    said = lines_of(kill_ranks.torchrun(tmp_path / "run", {"train.context_parallel": 3}))
    assert len(said) == 2
    assert all("context_parallel=3 does not divide 2 processes" in line for line in said)


def test_a_full_disk_of_one_rank_ends_all_and_loses_nothing(tmp_path, alone):
    """Rank 1 may write no file beyond 2,000 bytes; the run goes on from its start, as nothing was saved."""
    run = tmp_path / "run"
    said = lines_of(kill_ranks.torchrun(run, {"train.shard": "fsdp"}, full="1"))
    assert len(said) == 2
    assert all("the checkpoint of step 10 could not be written (rank 1: " in line for line in said), said
    assert list((run / "checkpoints").iterdir()) == []
    jobs.resume(run, changes={"train.shard": None}, verbose=False)
    equal(alone("adamw float32"), run, "adamw float32")


def test_where_nobody_answers_a_rank_ends_in_one_line(tmp_path):
    env = {**os.environ, "WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    command = [sys.executable, kill_ranks.RUN, str(tmp_path / "run"), "none"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)  # a minute where it is quiet
    assert done.returncode == 2
    assert "WORLD_SIZE=2), which did not meet" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_without_a_rendezvous_a_rank_ends_in_one_line(tmp_path, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(MixerError, match=r"^train: this is one of 2 processes .*MASTER_ADDR.*; start them with torchr"):
        jobs.train(jobs.config(), tmp_path / "run", verbose=False)
