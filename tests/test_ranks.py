"""context_parallel: one sequence on processes that exchange through torch.distributed equals one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import context_parallel as example
import ranks_process as at_ranks
from tokenmix import MixerError
from tokenmix.parallel import context_parallel, shared_mean, sum_gradients

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "context_parallel.py"
CLOSE = {"float32": 1e-6, "float64": 1e-10}
JOBS = [(name, kind) for name in at_ranks.MIXERS for kind in at_ranks.KINDS]
JOBS += [("LM", kind) for kind in at_ranks.MODELLED]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two ranks computed; all of this file's tests share one pair of processes."""
    return at_ranks.run(tmp_path_factory.mktemp("two"), 2, "refused", "example")


def equals_one_process(found: list[dict], name: str, kind: str, dtype: str) -> None:
    """Compare outputs and gradients, relative to the largest."""
    each = [rank[name, kind, dtype] for rank in found]
    if name == "LM":
        want, shared = at_ranks.modelled(kind, at_ranks.DTYPES[dtype], False, 0, at_ranks.T), 1
    else:
        want, shared = at_ranks.mixed(name, kind, at_ranks.DTYPES[dtype], None, 0, at_ranks.T), 2
    got = [torch.cat([part[i] for part in each], 1) for i in range(shared)]
    largest = max((float(a.abs().max()) for a in want[shared:]), default=0.0)  # pooling has no parameters
    for i, a in enumerate(want):
        limit = CLOSE[dtype] * (float(a.abs().max()) if i < shared else largest)
        for b in [got[i]] if i < shared else [part[i] for part in each]:
            assert float((a - b).abs().max()) <= limit, (i, float((a - b).abs().max()), limit)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("name", "kind"), JOBS)
def test_two_ranks_equal_one_process(two, name, kind, dtype):
    """Outputs, loss and all gradients, of uneven shares."""
    equals_one_process(two, name, kind, dtype)


def test_four_ranks_equal_one_process(tmp_path):
    """One of them has no token."""
    found = at_ranks.run(tmp_path, 4)
    for dtype in CLOSE:
        for name, kind in JOBS:
            equals_one_process(found, name, kind, dtype)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("segments", "MemoryCompressed: has neither segments nor blocks of keys here"),
        ("rows", r"all shares must have the same rows, got \[2, 1\] of ranks 0 to 1"),
        ("rows of tokens", r"all shares must have the same rows, got \[2, 1\] of ranks 0 to 1"),
        ("long", "built with max_len=7, got 8 tokens on all ranks"),
        ("foreign", "Linear has no mixer of tokenmix"),
        ("mesh", r'has 2 dimensions; give the one of the shares, such as mesh\["cp"\]'),
        ("dtype", "the ranks are at different exchanges"),
    ],
)
def test_every_rank_refuses_in_one_line(two, name, said):
    for rank in two:
        assert "\n" not in rank["refused"][name]
    assert all(re.search(said, rank["refused"][name]) for rank in two)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("one", "AFTSimple: expects a bool key_mask"),
        ("one model", "MemoryCompressed: has neither segments nor blocks of keys here"),
        ("symbols", "LM: tokens must be in 0..6"),
    ],
)
def test_what_one_rank_refuses_all_refuse(two, name, said):
    first, second = (rank["refused"][name] for rank in two)
    assert second.startswith(said)
    assert first == f"context_parallel: rank 1 stopped: {second}"


def test_the_example_learns_the_same_on_two_ranks_and_on_one(two):
    model = example.build()
    optimizer, tokens, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), example.text(3 * 256 + 1), []
    for step in range(3):
        piece = tokens[step * 256 : (step + 1) * 256 + 1]
        loss = F.cross_entropy(model(piece[None, :-1])[0], piece[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert two[0]["example"] == two[1]["example"] == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0]


def test_torchrun_runs_the_example():
    """By the command of docs/scale.md."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--length", "512"], env=env, capture_output=True, text=True, timeout=200)
    losses = [float(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 5, done.stderr[-2000:]
    assert losses[-1] < losses[0]


def test_without_torch_distributed_nothing_is_shared():
    mixer = at_ranks.mixer_of("hydra", torch.float64)
    for ask, who in (
        (lambda: context_parallel(mixer).__enter__(), "context_parallel"),
        (lambda: sum_gradients(mixer), "sum_gradients"),
        (lambda: shared_mean(torch.zeros(()), 1), "shared_mean"),
    ):
        with pytest.raises(
            MixerError, match=f"^{who}: torch.distributed is not initialised; start .* torchrun"
        ) as caught:
            ask()
        assert "\n" not in str(caught.value)


def test_after_a_refusal_the_ranks_go_on(two):
    for name in ("one dimension", "grad"):
        assert [rank["refused"][name] for rank in two] == ["nothing", "nothing"]
