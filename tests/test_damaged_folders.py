"""Folders of runs in which a file is a pipe or a link, or a field has a type that nothing can look up."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tokenmix import MixerError
from tokenmix.lab.cli.host_folders import is_host_folder
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.train import load_model
from tokenmix.lab.train.config import RunConfig
from tokenmix.lab.train.loop import Trainer
from tokenmix.lab.train.rundir import RunDir
from tokenmix.lab.train.subword_task import TOKENIZER, read_tokenizer
from tokenmix.models import config_from_json
from tokenmix.system.checkpoint import MANIFEST, find_fault


@pytest.fixture(autouse=True)
def in_time():
    """End a test that waits for a pipe."""

    def late(number, frame):
        raise TimeoutError("it waits for a pipe")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_pipe_for_a_config_is_no_host(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert not is_host_folder(tmp_path)


def test_a_pipe_for_a_manifest_is_a_fault(tmp_path):
    os.mkfifo(tmp_path / MANIFEST)
    assert find_fault(tmp_path) == f"{tmp_path / MANIFEST} is missing"


def test_brackets_without_end_are_no_manifest_and_no_config(tmp_path):
    for name in (MANIFEST, "config.json", "model.safetensors"):
        (tmp_path / name).write_text("[" * 100_000)
    assert find_fault(tmp_path) == f"{tmp_path / MANIFEST} is truncated or edited"
    assert not is_host_folder(tmp_path)
    with pytest.raises(MixerError, match=r"config.json is not readable JSON"):
        load_model(tmp_path)


def test_a_pipe_or_a_device_for_a_tokenizer_is_refused(tmp_path):
    os.mkfifo(tmp_path / TOKENIZER)
    with pytest.raises(MixerError, match=r"tokenizer.json is a link or no regular file"):
        read_tokenizer(tmp_path)
    (tmp_path / TOKENIZER).unlink()
    (tmp_path / TOKENIZER).symlink_to("/dev/zero")
    with pytest.raises(MixerError, match=r"tokenizer.json is a link or no regular file"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", [{}, [], None, 5])
def test_kinds_that_are_no_names_are_one_line(kind):
    config = RECIPES["text"].config().to_json()
    for section in ("data", "model"):
        changed = json.loads(json.dumps(config))
        changed[section]["kind"] = kind
        with pytest.raises(MixerError, match="kind"):
            RunConfig.from_json(changed)
    with pytest.raises(MixerError, match="there is no model of kind"):
        config_from_json({"kind": kind})


def test_what_a_task_prepares_of_all_its_texts_is_no_training_time(tmp_path, monkeypatch):
    """The clock of a run that may take a second began before a million texts were cut into subwords."""
    table = tmp_path / "a.tsv"
    table.write_text("text\tlabel\n" + "".join(f"text {i}\t{'pos' if i % 2 else 'neg'}\n" for i in range(200)))
    fields = {"data.source": str(table), "model.dim": 16, "model.layers": 1, "model.vocab": 300, "model.classes": 2}
    config = RECIPES["sentences"].config().override({**fields, "train.steps": 1, "train.device": "cpu"})
    import torch

    trainer = Trainer(config, RunDir(tmp_path / "run"), torch.device("cpu"), verbose=False)
    prepared = []
    monkeypatch.setattr(trainer, "done", lambda: prepared.append("pool" in vars(trainer.task)) or True)
    monkeypatch.setattr(trainer, "summary", dict)
    (tmp_path / "run").mkdir()
    trainer.run()
    assert prepared == [True]
