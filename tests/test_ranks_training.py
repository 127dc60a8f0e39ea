"""`tokenmix train` on several processes equals one process, and goes on with another number of them."""

from __future__ import annotations

import shutil

import pytest
import torch

import ranks_process as at_ranks
import ranks_training as jobs
from tokenmix.train import load_run

CLOSE = {"adamw float64": 1e-10, "adamw float32": 1e-5, "muon float32": 1e-3, "average float32": 1e-5}
PAIRS = [("adamw float32", "whole"), ("adamw float64", "tokens"), ("muon float32", "fsdp"), ("average float32", "fsdp")]


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
def two(tmp_path_factory):
    """The runs of two processes and what they refused; all tests share one pair."""
    folder = tmp_path_factory.mktemp("two")
    work = [f"train|{job}|{layout}|{folder}/{job} {layout}" for job, layout in PAIRS]
    work += [f"refuse|{name}|{folder}/{name}" for name in jobs.BAD]
    return folder, at_ranks.run(folder, 2, *work, compute=jobs.computed)


def equal(one, many, job: str) -> None:
    a, b = jobs.losses(one), jobs.losses(many)
    assert len(a) == len(b) == jobs.STEPS + 2
    assert b == pytest.approx(a, rel=CLOSE[job], abs=0)


@pytest.mark.parametrize(("job", "layout"), PAIRS)
def test_two_ranks_train_as_one_process(two, alone, job, layout):
    """Losses of all steps and both scores, with gradient accumulation, clipping and uneven shares of tokens."""
    equal(alone(job), two[0] / f"{job} {layout}", job)


@pytest.mark.parametrize("job", ["muon float32", "average float32"])
def test_shards_are_read_by_one_process(two, alone, job):
    found, wanted = (load_run(path)[0].state_dict() for path in (two[0] / f"{job} fsdp", alone(job)))
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], atol=1e-3) for name in found)


def test_only_the_first_rank_writes(two):
    run = two[0] / "adamw float32 whole"
    assert len(jobs.losses(run)) == jobs.STEPS + 2
    assert sorted(p.name for p in run.iterdir()) == sorted(
        ["checkpoints", "config.json", "env.json", "metrics.jsonl", "samples", ".lock"]
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("segments", "Attention: has no segments here, so ranks cannot share its sequences"),
        ("divides", "train: train.context_parallel=3 does not divide 2 processes"),
        ("rows", "train: 2 processes need a row each, got 1 rows"),
        ("penalty", "train: 2 processes have only the loss of the task; leave optim.one_hot out"),
        ("compile", "train: 2 processes do not compile"),
        ("redrawn", "train: 2 processes cannot train what learns beside its gradient, got blocks.0.mixer."),
    ],
)
def test_every_rank_refuses_in_one_line(two, name, said):
    for rank in two[1]:
        assert rank[name].startswith(said)
        assert "\n" not in rank[name]


def test_four_ranks_train_as_one_process_and_go_on_as_four_two_and_one(alone, tmp_path):
    """FSDP2 over all, rows over two and tokens over two; from step 10 on another number of processes."""
    wanted = list(CLOSE)[:3]
    work = [f"train|{job}|both|{tmp_path}/{job}" for job in wanted]
    work += [f"resume|{wanted[0]}|fsdp|{tmp_path}/four|{tmp_path}/{wanted[0]}"]
    at_ranks.run(tmp_path, 4, *work, compute=jobs.computed, limit=480)
    for job in wanted:
        equal(alone(job), tmp_path / job, job)
    (tmp_path / "store").unlink()
    work = [f"resume|{wanted[0]}|both|{tmp_path}/two|{tmp_path}/{wanted[0]}"]
    work += [f"resume|{wanted[1]}|fsdp|{tmp_path}/back|{alone(wanted[1])}"]  # a checkpoint of one process
    at_ranks.run(tmp_path, 2, *work, compute=jobs.computed)
    shutil.copytree(tmp_path / wanted[0], tmp_path / "one")
    jobs.in_dtype(wanted[0], tmp_path / "one", start=tmp_path)
    for name in ("four", "two", "one"):
        equal(alone(wanted[0]), tmp_path / name, wanted[0])
    equal(alone(wanted[1]), tmp_path / "back", wanted[1])
