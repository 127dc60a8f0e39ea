"""Configs of runs that were made when there were more fields: read if these have their old defaults, else refused."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
import torch

import tokenmix.lab.sweep
from tokenmix import MixerError
from tokenmix.lab.train import DataConfig, OptimConfig, RunConfig, TrainConfig, evaluate_run, loop, resume, train
from tokenmix.lab.train.config import fixed_fields
from tokenmix.models import LMConfig
from tokenmix.system.checkpoint import load_checkpoint
from tokenmix.system.config import Json, dotted_fields, from_json, removed_fields
from tokenmix.system.removed_fields import REMOVED


def subclasses(cls: type) -> list[type]:
    return [each for sub in cls.__subclasses__() for each in (sub, *subclasses(sub))]


CONFIGS = {cls.__name__: cls for cls in (*subclasses(Json), OptimConfig, TrainConfig) if removed_fields(cls)}


def test_removed_fields_are_those_of_configs():
    assert set(REMOVED) <= set(CONFIGS)
    assert tokenmix.lab.sweep  # which defines configs too
    for cls in CONFIGS.values():
        assert not set(removed_fields(cls)) & {field.name for field in fields(cls)}


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, cls in CONFIGS.items() for field in removed_fields(cls)]
)
def test_another_value_than_the_old_default_is_refused(name, field):
    with pytest.raises(MixerError, match=rf"{field} is no longer an option, always .*, got 'other'") as why:
        from_json(CONFIGS[name], {field: "other"})
    assert "\n" not in str(why.value)


def old(config: RunConfig) -> dict[str, Any]:
    """Return the JSON of a config as it was when there were more fields."""
    found = config.to_json()
    for part in ("model", "data", "optim", "train"):
        found[part] |= removed_fields(type(getattr(config, part)))
    return found


def test_an_old_run_is_scored_and_resumed_to_the_bit(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_bytes(b"the cat sat on the mat. " * 200)
    model = LMConfig(dim=8, max_len=16, mixers=({"name": "aft_simple"},), layers=1)
    how = TrainConfig(steps=4, batch_size=2, eval_every=4, save_every=2, threads=1)
    config = RunConfig(
        model,
        DataConfig(str(tmp_path / "text.txt"), seq_len=16),
        OptimConfig(name="muon", warmup=1, schedule="constant"),
        how,
    )
    train(config, tmp_path / "whole", verbose=False)
    now, then = dotted_fields(config.to_json()), dotted_fields(old(config))
    recorded = {name: value for name, value in then.items() if name not in now}
    assert "optim.muon_momentum" in recorded
    with monkeypatch.context() as earlier:
        earlier.setattr(loop, "fixed_fields", lambda config: fixed_fields(config) | recorded)
        train(config.override({"train.steps": 2}), tmp_path / "run", verbose=False)
    file = tmp_path / "run" / "config.json"
    file.write_text(json.dumps(old(config.override({"train.steps": 2}))))
    evaluate_run(tmp_path / "run", max_bytes=100)
    resume(tmp_path / "run", changes={"train.steps": 4})
    mine, theirs = (load_checkpoint(tmp_path / n / "checkpoints", 4, "model")[0]["model"] for n in ("run", "whole"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
