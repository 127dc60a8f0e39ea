"""Test options of training: precisions, optimisers and schedules of other trainers, forks, one way in for data."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from kill_nine import compare, lines
from tokenmix import MixerError, build_mixer
from tokenmix.lab.cli import main
from tokenmix.lab.recipes import find_recipe
from tokenmix.lab.train import DataConfig, OptimConfig, RunConfig, TrainConfig, evaluate_run, load_run, resume, train
from tokenmix.lab.train.idle_settings import idle_settings
from tokenmix.lab.train.optim import build_optimizers, learning_rate
from tokenmix.models import LMConfig, build_model

LOOP = {"steps": 8, "batch_size": 2, "log_every": 2, "eval_every": 4, "eval_bytes": 200, "save_every": 4, "keep": 9}
ATTENTION = ({"name": "attention", "heads": 2},)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> list[Path]:
    """Two texts of digits."""
    folder = tmp_path_factory.mktemp("texts")
    for i in (1, 2):
        (folder / f"{i}.txt").write_bytes(b"".join(b"%d times %d\n" % (n % 97, i) for n in range(600)))
    return [folder / "1.txt", folder / "2.txt"]


def config(text: Path, optim: OptimConfig | None = None, **loop) -> RunConfig:
    fields = {**LOOP, "threads": 1, "device": "cpu", **loop}
    model = LMConfig(dim=8, max_len=16, mixers=ATTENTION)
    return RunConfig(model, DataConfig(str(text), seq_len=16), optim or OptimConfig(warmup=2), TrainConfig(**fields))


@pytest.fixture(scope="module")
def run(texts, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "run"
    train(config(texts[0]), out)
    return out


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_float16_trains_near_float32_and_goes_on_to_the_bit(texts, tmp_path, name):
    optim = OptimConfig(name=name, warmup=2)
    half = train(config(texts[0], optim, precision="fp16"), tmp_path / "whole")
    full = train(config(texts[0], optim), tmp_path / "full")
    assert half["valid_bits_per_byte"] == pytest.approx(full["valid_bits_per_byte"], rel=2e-2)
    assert half["valid_bits_per_byte"] != full["valid_bits_per_byte"]
    train(config(texts[0], optim, precision="fp16", steps=4), tmp_path / "part")
    with pytest.warns(UserWarning, match="schedule is stretched"):
        resume(tmp_path / "part", changes={"train.steps": 8})
    train(config(texts[0], replace(optim, schedule="constant"), precision="fp16", steps=4), tmp_path / "flat")
    resume(tmp_path / "flat", changes={"train.steps": 8})
    train(config(texts[0], replace(optim, schedule="constant"), precision="fp16"), tmp_path / "flat_whole")
    compare(tmp_path / "flat_whole", tmp_path / "flat")
    saved = json.loads((tmp_path / "flat" / "checkpoints" / "step_00000008" / "progress.json").read_text())
    assert saved["scaler"]["scale"] > 1


def test_a_step_that_overflows_changes_nothing(texts, tmp_path, monkeypatch):
    """The scale halves and the weights stay: such a scale makes gradients infinite."""
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**60))
    train(config(texts[0], precision="fp16", steps=1), tmp_path / "run")
    model, found = load_run(tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step_00000001"
    assert json.loads((folder / "progress.json").read_text())["scaler"]["scale"] == 2.0**59
    torch.manual_seed(found.train.seed)
    for name, weight in build_model(found.model).state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name


@pytest.mark.parametrize("steps", [10, 37, 100])
def test_one_cycle_is_that_of_torch(steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=steps)
    ours = OptimConfig(lr=0.5, schedule="onecycle", warmup=0)
    for step in range(steps):
        assert learning_rate(step, ours, steps) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        if step < steps - 1:
            theirs.step()
    with pytest.raises(MixerError, match="needs train.steps"):
        RunConfig(
            LMConfig(dim=8, max_len=16, mixers=ATTENTION), optim=ours, train=TrainConfig(steps=None, max_seconds=1.0)
        )


def test_sgd_has_momentum_and_all_groups():
    model = nn.Linear(3, 2)
    (found,) = build_optimizers(model, OptimConfig(name="sgd", betas=(0.8, 0.9)))
    assert type(found) is torch.optim.SGD
    assert {group["momentum"] for group in found.param_groups} == {0.8}
    assert sum(len(group["params"]) for group in found.param_groups) == 2


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: OptimConfig(lr="high"), "optim.lr must be a float, got 'high'"),
        (lambda: OptimConfig(name="lion"), r"choose one of adamw, muon, sgd, or give any other .* optimizer="),
        (lambda: TrainConfig(steps=2.5), "train.steps must be an int or null, got 2.5"),
        (lambda: TrainConfig(batch_size=0), "train.batch_size must be positive"),
        (lambda: TrainConfig(precision="fp8"), "choose one of fp32, bf16, fp16"),
    ],
)
def test_a_dataclass_refuses_a_wrong_field_itself(build, said):
    with pytest.raises(MixerError, match=said):
        build()


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model.mixers": "aft_simple"}, ["aft_simple"]),
        ({"model.mixers": "aft_simple, hydra"}, ["aft_simple", "hydra"]),
        ({"model.mixers": ["hydra", {"name": "attention", "heads": 2}]}, ["hydra", "attention"]),
        ({"model.mixers.0": "aft_simple"}, ["aft_simple"]),
    ],
)
def test_bare_names_of_mixers_are_specs(texts, changes, names):
    assert [spec["name"] for spec in config(texts[0]).override(changes).model.mixers] == names


def test_names_of_other_trainers_are_understood(texts, capsys):
    for name, meant in (("optim.learning_rate", "optim.lr"), ("train.max_steps", "train.steps")):
        with pytest.raises(MixerError, match=f"did you mean {meant}?"):
            config(texts[0]).override({name: 1})
    fields = find_recipe("text").config().to_json()
    from tokenmix.lab.train.config import MEANT

    for field in set(MEANT.values()) - {"model.mixers.0.heads"}:
        part, name = field.split(".")
        assert name in fields[part], field
    config(texts[0]).override({MEANT["n_head"]: 1})
    for option, meant in (("--fp16", "--train.precision"), ("--n-head", "--model.mixers.0.heads")):
        assert main(["train", "text", option]) == 2
        assert f"no option {option}; did you mean {meant}?" in capsys.readouterr().err


def test_one_cycle_has_no_warm_up_and_no_lowest_rate(texts):
    """A warm-up longer than the run is no trouble to it; what it does not read is named."""
    optim = OptimConfig(schedule="onecycle", warmup=50, min_lr_ratio=0.5)
    found = idle_settings(config(texts[0], optim))
    assert [each.split(" is ")[0] for each in found] == ["optim.min_lr_ratio=0.5", "optim.warmup=50"]
    assert not idle_settings(config(texts[0], OptimConfig(schedule="onecycle")))


def test_a_run_is_forked_with_new_settings(run, tmp_path, capsys):
    fork = tmp_path / "fork"
    more = ["--train.steps", "4", "--optim.lr", "1e-9", "--optim.warmup", "1"]
    assert main(["train", "--from", str(run), "--out", str(fork), *more]) == 0
    assert f"from: the settings and the last weights of {run}." in capsys.readouterr().err
    (model, before), (other, after) = load_run(run), load_run(fork)
    assert (after.optim.lr, after.train.steps, before.train.steps) == (1e-9, 4, 8)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], weight, atol=1e-6, rtol=0)
    for wrong, said in (
        (["train", "--from", str(run)], "give the new run a folder, --out"),
        (["train", "text", "--from", str(run), "--out", "x"], "leave out RECIPE"),
        (["train", "--from", str(run), "--out", "x", "--size", "gpu"], "leave out --size"),
        (["train", "--from", str(run), "--out", "x", "--model.dim", "4"], "has the shape (256, 8), not (256, 4)"),
        (["train", "--from", str(run), "--out", "x", "--optim.betas", "0.9"], "a list, written like [1, 2], got 0.9"),
        (["train", "--out", "x"], "name a recipe, such as text"),
        (["train", "--from", str(tmp_path), "--out", "x"], "is not a run directory"),
    ):
        assert main(wrong) == 2
        assert said in capsys.readouterr().err


def test_data_means_the_same_to_train_sweep_and_eval(run, texts, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = (run / "metrics.jsonl").read_bytes()
    assert main(["eval", str(run), "--data", str(texts[1]), "--split", "train"]) == 0
    assert "bits/byte" in capsys.readouterr().out
    assert (run / "metrics.jsonl").read_bytes() == before, "the score of other data was recorded"
    same, own = evaluate_run(run, data=str(texts[0])), evaluate_run(run, record=False)
    assert same.bits_per_byte == own.bits_per_byte
    assert main(["eval", str(run), "--data", "nowhere.txt"]) == 2
    assert "nowhere.txt" in capsys.readouterr().err
    small = ["--model.dim", "8", "--train.batch_size", "2", "--train.eval_bytes", "200", "--rates", "1e-3"]
    rows = ["--rows", "aft_simple", "--seeds", "0", "--steps", "2"]
    assert main(["sweep", "text", "--out", "swept", "--data", str(texts[0]), *rows, *small]) == 0
    (found,) = Path("swept/runs/final/aft_simple").iterdir()
    assert json.loads((found / "config.json").read_text())["data"]["source"] == str(texts[0])
    assert lines(found)


def test_check_and_train_take_the_same_classes(texts, tmp_path, monkeypatch, capsys, registry):
    monkeypatch.chdir(tmp_path)
    own = Path(__file__).with_name("own_mixer.py").read_text()
    plain = "\n\nclass Plain(nn.Module):\n    def __init__(self, dim):\n        super().__init__()\n"
    Path("layer_of_mine.py").write_text(own + plain)
    small = ["--data", str(texts[0]), "--train.steps", "2", "--model.dim", "8", "--train.eval_bytes", "200"]
    spec = '[{"name": "layer_of_mine.py:WeighedMean", "floor": 0.5}]'
    assert main(["train", "text", "--out", "run", "--model.mixers", spec, *small]) == 0
    capsys.readouterr()
    assert main(["train", "text", "--out", "plain", "--model.mixers", "layer_of_mine.py:Plain", *small]) == 2
    said = capsys.readouterr().err
    assert "make it a mixer in three lines" in said
    three = said.split("three lines: ")[1].split("; then state")[0].split(" | ")
    code = "import tokenmix\nfrom torch.nn import Identity\n"
    code += three[0] + "\n    " + "\n    ".join(three[1:])
    space = {}
    exec(code.replace("Plain", "Identity"), space)
    x = torch.randn(2, 3, 8)
    assert torch.equal(space["MyIdentity"](8)(x), x)
    assert build_mixer("aft_simple", 8)(x).shape == x.shape
