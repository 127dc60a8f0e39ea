"""Settings without effect are told in one line before a run begins."""

from __future__ import annotations

import pytest

from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.train import resume, train
from tokenmix.lab.train.idle_settings import idle_settings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train.steps": 20, "optim.warmup": 100}, "optim.warmup=100 is longer than train.steps=20"),
        ({"train.steps": 20, "train.eval_every": 21, "train.keep": 3}, "train.eval_every=21 comes"),
        ({"optim.muon_lr": 0.5}, "optim.muon_lr=0.5 is only for optim.name='muon'"),
        ({"optim.decay": 0.5}, "optim.decay=0.5 is only for optim.schedule='wsd'"),
        ({"optim.schedule": "constant", "optim.min_lr_ratio": 0.5}, "optim.min_lr_ratio=0.5 is only for"),
        ({"optim.schedule": "wsd", "train.steps": 100, "optim.warmup": 90}, "optim.decay=0.2 begins inside of"),
        ({"optim.ema": 0.9999}, "optim.ema=0.9999 is not reached"),
        ({"train.eval_images": 5}, "train.eval_images=5 is only for data of kind images or masks"),
        ({"train.distill": 2.0}, "train.distill=2.0 is only for train.teacher"),
    ],
)
def test_a_setting_without_effect_is_described(changes, words):
    quiet = {
        "optim.name": "adamw",
        "optim.schedule": "cosine",
        "optim.warmup": 10,
        "train.sample_bytes": 0,
        "train.eval_every": 20,
        "train.save_every": 20,
    }
    config = RECIPES["text"].config().override({**quiet, "optim.muon_lr": 0.02})
    assert idle_settings(config) == []
    found = idle_settings(config.override(changes))
    assert len(found) == 1
    assert words in found[0]


@pytest.mark.parametrize(
    ("recipe", "changes", "words"),
    [
        ("text", {"train.shard": "fsdp"}, "train.shard='fsdp' is only for several processes (torchrun)"),
        ("masked", {"train.samples": 3}, "train.samples=3 is only for model.kind lm"),
        ("masked", {"data.span": 5.0}, "data.span=5.0 is only for model.kind seq2seq"),
        ("spans", {"data.whole_words": False}, "data.whole_words=False is only for model.kind encoder"),
        ("recall", {"data.symbols": 12}, "data.symbols=12 is only for data.task copy or reverse or selective_copy"),
        ("arithmetic_addition", {"data.pairs": 3}, "data.pairs=3 is only for data.task recall"),
        ("aft_cifar10_density", {"train.samples": 3}, ""),
    ],
)
def test_a_setting_that_another_one_leaves_unread_is_described(recipe, changes, words):
    found = idle_settings(RECIPES[recipe].config().override(changes))
    assert found == [words] if words else found == []


def test_shards_of_several_processes_are_no_idle_setting():
    assert idle_settings(RECIPES["text"].config().override({"train.shard": "fsdp"}), ranks=2) == []


def test_recipes_set_nothing_without_effect():
    for recipe in RECIPES.values():
        for row in recipe.rows:
            assert idle_settings(recipe.config(row, "paper")) == [], f"{recipe.name} {row}"
        assert idle_settings(recipe.config(None, "smoke")) == [], recipe.name


def test_training_says_so_once(tmp_path):
    text = tmp_path / "a.txt"
    text.write_bytes(b"the cat sat on the mat. " * 200)
    small = {"data.source": str(text), "data.seq_len": 16, "model.dim": 16, "model.layers": 1, "train.batch_size": 2}
    config = RECIPES["text"].config().override({**small, "train.steps": 2, "optim.warmup": 5, "train.device": "cpu"})
    with pytest.warns(UserWarning, match="^settings without effect: optim.warmup=5 is longer than train.steps=2"):
        train(config, tmp_path / "run")
    with pytest.warns(UserWarning, match="longer than train.steps=4"):
        resume(tmp_path / "run", changes={"train.steps": 4})
