"""Sizes that fit into no memory: one line that says so, wherever they meet the allocator."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tokenmix import build_mixer
from tokenmix.errors import MixerError
from tokenmix.lab.cli.entry import main
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.train import loop, train
from tokenmix.models import LMConfig, build_model
from tokenmix.system.memory import lack_of_memory

SMALL = {"dim": 8, "layers": 1, "max_len": 16, "mixers": ({"name": "aft_simple"},)}
HUGE: list[dict[str, Any]] = [{"mlp_ratio": 1e13}, {"mlp_ratio": 1e300}, {"max_len": 10**13}, {"vocab": 10**13}]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: torch.empty(2**50), "out of memory, asked for 4 PiB at once"),
        (lambda: torch.empty(2**62, 8), "out of memory"),
        (lambda: torch.empty(10**30), "out of memory"),
        (lambda: np.zeros(2**50), "out of memory, asked for 8 PiB at once"),
        (lambda: bytearray(2**60), "out of memory"),
        (lambda: torch.ones(2) @ torch.ones(3), ""),
        (lambda: 1.0 / 0, ""),
    ],
)
def test_an_error_of_memory_is_told_from_all_others(call: Any, said: str) -> None:
    with pytest.raises((RuntimeError, MemoryError, TypeError, ArithmeticError)) as found:
        call()
    assert lack_of_memory(found.value) == said


@pytest.mark.parametrize("size", HUGE, ids=str)
def test_a_model_that_fits_into_no_memory_names_its_largest_numbers(size: dict[str, Any]) -> None:
    name = next(iter(size))
    with pytest.raises(MixerError, match=rf"LMConfig: the model does not fit: out of memory.*numbers are {name}="):
        build_model(LMConfig(**{**SMALL, **size}))


def test_a_mixer_that_fits_into_no_memory_names_its_options() -> None:
    with pytest.raises(MixerError, match=r"AFTSimple: its parameters do not fit into memory with dim=2000000000"):
        build_mixer("aft_simple", dim=2_000_000_000)


def test_as_many_layers_as_nobody_builds_are_refused() -> None:
    with pytest.raises(MixerError, match="layers must be at most 16384, got 1000000"):
        build_model(LMConfig(**{**SMALL, "layers": 10**6}))
    with pytest.raises(MixerError, match="layers must be at most 16384, got 1000000"):
        RECIPES["text"].config().override({"model.layers": 10**6})


@pytest.mark.parametrize("field", ["batch_size", "workers", "threads"])
def test_counts_of_a_run_that_no_machine_has_are_refused(field: str) -> None:
    with pytest.raises(MixerError, match=rf"train.{field} must be at most"):
        RECIPES["text"].config().override({f"train.{field}": 10**9})


def small_text(tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_bytes(b"the cat sat on the mat. " * 300)
    options = "--model.dim 8 --model.layers 1 --data.seq_len 16 --model.max_len 16 --train.steps 4 --train.batch_size 2"
    options += " --train.eval_every 2 --train.save_every 2 --train.log_every 1 --train.eval_bytes 100 --optim.warmup 0"
    return ["train", "text", "--data", str(tmp_path / "text.txt"), *options.split()]


def test_train_of_a_huge_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*small_text(tmp_path), "--model.mlp_ratio", "1e13", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "error: LMConfig: the model does not fit: out of memory, asked for" in said
    assert "Traceback" not in said


def test_memory_that_ends_in_a_run_says_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third step asks for more than there is."""
    (tmp_path / "text.txt").write_bytes(b"the cat sat on the mat. " * 300)
    fields = {"data.source": str(tmp_path / "text.txt"), "data.seq_len": 16, "model.max_len": 16, "model.dim": 8}
    fields |= {"model.layers": 1, "train.steps": 4, "train.eval_every": 2, "train.save_every": 2, "train.batch_size": 2}
    usual = loop.update

    def update(model: Any, optimizers: Any, optim: Any, step: int, *more: Any) -> None:
        torch.empty(2**50 if step == 2 else 1)
        usual(model, optimizers, optim, step, *more)

    monkeypatch.setattr(loop, "update", update)
    with pytest.raises(MixerError) as found:
        train(RECIPES["text"].config("aft_simple").override(fields), tmp_path / "run", verbose=False)
    wanted = r"run: out of memory, asked for 4 PiB at once; step 2 is saved, and `tokenmix resume .*` continues"
    assert re.search(wanted, str(found.value))
    assert "train.accumulate" in str(found.value)


def test_every_verb_says_it_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tokenmix.lab.cli.library.ListAll.run", lambda self: torch.empty(2**50))
    assert main(["list"]) == 2
    assert capsys.readouterr().err == "error: list: out of memory, asked for 4 PiB at once; give smaller sizes.\n"
    with pytest.raises(RuntimeError, match="allocate memory"):
        main(["list", "--debug"])


def test_a_bug_is_no_error_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmix.lab.cli.library.ListAll.run", lambda self: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        main(["list"])
