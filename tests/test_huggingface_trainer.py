"""Test transformers' Trainer on our models.

It goes on where it stopped, two processes are one, and a loss that counts labels wrongly shows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from huggingface_trainer import STEPS, trainer

HERE = Path(__file__).parent
LIBRARY = HERE.parent / "src" / "tokenmix"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights after an uninterrupted run of one process, where it began, and its directory."""
    out = tmp_path_factory.mktemp("whole")
    run = trainer(out)
    begun = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    run.train()
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}, begun, out


def test_it_learns_and_goes_on_where_it_stopped(whole):
    weights, begun, out = whole
    assert all(not torch.equal(weights[name], begun[name]) for name in weights)
    run = trainer(out)
    assert run.train(resume_from_checkpoint=str(out / "checkpoint-3")).global_step == STEPS
    for name, p in run.model.named_parameters():
        assert torch.equal(p, weights[name]), name


def test_it_evaluates_without_gathering_states(whole):
    run = trainer(whole[2])
    found = run.predict(run.train_dataset)
    assert found.predictions.shape == (16, 12, 40)
    assert found.metrics["test_loss"] > 0


def together(out: Path, library: Path) -> dict[str, torch.Tensor]:
    """The weights after two processes, over gloo, with a library."""
    paths = [str(library.parent), str(HERE), *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TOKENMIX_NO_KERNELS": "1",
    }
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # without it a crash of one hangs the other
    script = [str(HERE / "huggingface_trainer.py"), str(out)]
    asked = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *script,
    ]
    done = subprocess.run(asked, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return torch.load(out / "weights.pt")


def off(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in b)


def test_two_processes_are_one(whole, tmp_path):
    assert off(together(tmp_path, LIBRARY), whole[0]) < 1e-5


def test_a_loss_that_forgets_the_labels_of_others_is_noticed(whole, tmp_path):
    """The planted bug: each process averages over its own labels."""
    library = Path(
        shutil.copytree(LIBRARY, tmp_path / "tokenmix", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    )
    file, old = library / "hosts" / "huggingface" / "modeling.py", "vocab_size=self.config.vocab_size, **loss_options)"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, "vocab_size=self.config.vocab_size)"))
    (tmp_path / "out").mkdir()
    assert off(together(tmp_path / "out", library), whole[0]) > 1e-3
