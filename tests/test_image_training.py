"""Training on images: classification and density through the loop that trains text, resumable to the bit."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from page_checks import check_page
from tokenmix import MixerError
from tokenmix.lab import cli
from tokenmix.lab.data import Augment, open_images
from tokenmix.lab.report import read_run, write_report
from tokenmix.lab.train import (
    ImageDataConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    draw_run,
    evaluate_run,
    load_run,
    match_data,
    resume,
    sample_run,
    train,
)
from tokenmix.lab.train.optim import Average, build_optimizers, parameter_groups
from tokenmix.lab.train.rundir import RunDir
from tokenmix.models import ImageDensityConfig, ViTConfig, build_model

CONV = {"name": "aft_conv", "heads": 4, "kernel_size": 3}
AUGMENT = Augment(crop="pad", pad=1, flip=0.5, erasing=0.5, mixup=0.8, cutmix=1.0, repeats=2)


def vit(**options) -> ViTConfig:
    given = {
        "dim": 16,
        "layers": 2,
        "image_size": (8, 8),
        "patch": 2,
        "channels": 1,
        "classes": 10,
        "pool": "mean",
        "positions": None,
        "drop_path": 0.2,
    }
    return ViTConfig(**{"mixers": (CONV,), **given, **options})


def config(model=None, *, data=None, optim=None, **loop) -> RunConfig:
    data = ImageDataConfig(augment=AUGMENT, smoothing=0.1) if data is None else data
    given = {
        "steps": 8,
        "batch_size": 8,
        "log_every": 2,
        "eval_every": 4,
        "save_every": 2,
        "keep": 9,
        "threads": 1,
        "device": "cpu",
        "eval_images": 40,
    }
    return RunConfig(
        vit() if model is None else model,
        data,
        optim or OptimConfig(lr=3e-3, warmup=2),
        TrainConfig(**{**given, **loop}),
    )


def density(**loop) -> RunConfig:
    model = ImageDensityConfig(
        dim=16, size=(8, 8), channels=1, mixers=({"name": "aft_local", "window": 4, "rank": 2},), layers=1
    )
    return config(model, data=ImageDataConfig(augment=Augment(shift=2)), **loop)


def lines(run, kind):
    return [x for x in RunDir(run).read_metrics() if x["kind"] == kind]


def test_classification_writes_a_run(tmp_path):
    summary = train(config(), tmp_path / "run")
    assert (summary["step"], summary["images"]) == (8, 64)
    assert 0 <= summary["valid_top1"] <= 1
    assert summary["best_top1"] >= summary["valid_top1"]
    trained, scored = lines(tmp_path / "run", "train"), lines(tmp_path / "run", "eval")
    assert set(trained[0]) == {"kind", "step", "loss", "lr", "images", "images_per_s", "seconds", "peak_mib"}
    assert set(scored[0]) == {
        "kind",
        "split",
        "step",
        "top1",
        "top5",
        "cross_entropy",
        "images",
        "image_size",
        "seconds",
    }
    assert scored[0]["images"] == 40
    env = json.loads((tmp_path / "run" / "env.json").read_text())
    assert env["images"]["name"] == "digits"
    assert sum(env["images"]["images"]) == 1797


@pytest.mark.parametrize("make", [config, lambda **loop: density(samples=1, **loop)], ids=["classify", "density"])
def test_a_stopped_run_goes_on_to_the_same_bits(make, tmp_path):
    """With augmentation, drop path, mixing, an average of the weights and layer-wise rates."""
    optim = OptimConfig(lr=3e-3, warmup=2, ema=0.9, layer_decay=0.7, schedule="constant")
    train(replace(make(), optim=optim), tmp_path / "whole")
    train(replace(make(steps=4), optim=optim), tmp_path / "parts")
    resume(tmp_path / "parts", changes={"train.steps": 8})
    timing = ("seconds", "images_per_s", "peak_mib")
    kept = [
        [{k: v for k, v in x.items() if k not in timing} for x in RunDir(tmp_path / name).read_metrics()]
        for name in ("whole", "parts")
    ]
    assert kept[0] == kept[1]
    whole, parts = (load_run(tmp_path / name)[0].state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[k], parts[k]) for k in whole)


def test_workers_prepare_the_same_batches(tmp_path):
    plain, ahead = (train(config(steps=3, workers=n, eval_every=3), tmp_path / str(n)) for n in (0, 1))
    assert plain["valid_top1"] == ahead["valid_top1"]
    both = [load_run(tmp_path / str(n))[0].state_dict() for n in (0, 1)]
    assert all(torch.equal(both[0][k], both[1][k]) for k in both[0])


def test_density_is_scored_in_bits_per_dimension(tmp_path):
    summary = train(density(samples=2), tmp_path / "run")
    assert summary["valid_bits_per_dim"] < 8.2
    model, _ = load_run(tmp_path / "run")
    score = evaluate_run(tmp_path / "run", max_images=5, record=False)
    from tokenmix.lab.data import open_images, pixel_batches

    tokens = next(
        iter(pixel_batches(open_images("digits").split("test"), batch_size=5, size=(8, 8), channels=1, limit=5))
    )
    with torch.no_grad():
        logits = model(tokens).double().log_softmax(-1)
    by_hand = -logits.gather(-1, tokens[..., None]).mean() / math.log(2)
    assert score.bits_per_dim == pytest.approx(float(by_hand), abs=1e-5)
    assert (score.images, score.dims) == (5, 64)
    with Image.open(tmp_path / "run" / "samples" / "step_00000008.png") as picture:
        assert picture.size == (4 * 17, 4 * 26)
    train_line = lines(tmp_path / "run", "train")[0]
    assert train_line["bpd"] == pytest.approx(train_line["loss"] / math.log(2))


def test_drawing_and_completing(tmp_path):
    train(density(steps=2), tmp_path / "run")
    first, second = (draw_run(tmp_path / "run", n=3, seed=4) for _ in range(2))
    assert first.shape == (3, 1, 8, 8)
    assert torch.equal(first, second)
    both = draw_run(tmp_path / "run", n=2, complete=True, seed=1)
    assert torch.equal(both[:2, :, :4], both[2:, :, :4])
    with pytest.raises(MixerError, match="which generates no text"):
        sample_run(tmp_path / "run", n=3)
    train(config(steps=1), tmp_path / "vit")
    with pytest.raises(MixerError, match="'vit', which generates no images"):
        draw_run(tmp_path / "vit")


def test_a_model_without_positions_is_scored_at_other_sizes(tmp_path):
    train(config(), tmp_path / "run")
    assert evaluate_run(tmp_path / "run", image_size=12, max_images=20, record=False).image_size == (12, 12)
    train(config(vit(positions="learned")), tmp_path / "fixed")
    with pytest.raises(MixerError, match="learned positions belong to images of 8 x 8"):
        evaluate_run(tmp_path / "fixed", image_size=12, record=False)


def test_scores_are_those_of_the_average(tmp_path):
    run = config(optim=OptimConfig(lr=3e-2, warmup=1, ema=0.99), steps=6, eval_images=None, eval_every=6)
    train(run, tmp_path / "run")
    at_end = lines(tmp_path / "run", "eval")[-1]
    again = evaluate_run(tmp_path / "run", split="valid", record=False)
    assert (again.top1, again.cross_entropy) == (at_end["top1"], pytest.approx(at_end["cross_entropy"], rel=1e-6))
    from tokenmix.system.checkpoint import load_checkpoint

    groups, _ = load_checkpoint(RunDir(tmp_path / "run").checkpoints, 6, "model", "ema")
    assert not torch.equal(groups["model"]["head.weight"], groups["ema"]["head.weight"])


def test_an_average_follows_its_formula():
    model = torch.nn.Linear(1, 1, bias=False)
    average = Average(model, 0.5)
    want = model.weight.item()
    for step in range(4):
        with torch.no_grad():
            model.weight.fill_(step + 1.0)
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        want = decay * want + (1 - decay) * (step + 1.0)
    assert float(average.mean["weight"]) == pytest.approx(want)
    with average.in_place():
        assert model.weight.item() == pytest.approx(want)
    assert model.weight.item() == 4.0


def test_rates_fall_towards_the_input():
    model = build_model(vit(positions="learned", registers=1))
    groups = parameter_groups(model, OptimConfig(layer_decay=0.5))
    names = {id(p): n for n, p in model.named_parameters()}
    scale = {names[id(p)]: g["scale"] for g in groups for p in g["params"]}
    assert (scale["head.weight"], scale["norm.bias"]) == (1.0, 1.0)
    assert (scale["blocks.1.mlp.up.weight"], scale["blocks.0.mixer.raw"]) == (0.5, 0.25)
    assert (scale["patch.weight"], scale["positions"], scale["registers"]) == (0.125, 0.125, 0.125)
    assert len(scale) == len(names)
    decayed = {names[id(p)] for g in groups for p in g["params"] if g["weight_decay"]}
    assert "patch.weight" in decayed
    assert not {"positions", "registers", "norm.weight", "blocks.0.mixer.raw", "head.bias"} & decayed
    groups = parameter_groups(model, OptimConfig(layer_decay=0.5, mixer_lr=3.0))
    scale = {names[id(p)]: g["scale"] for g in groups for p in g["params"]}
    assert (scale["blocks.1.mixer.raw"], scale["blocks.1.mixer.q_proj.weight"], scale["blocks.0.mixer.raw"]) == (
        1.5,
        0.5,
        0.75,
    )
    assert {n for n, s in scale.items() if s in (1.5, 0.75)} == {
        n for n in scale if n.split(".")[-1] in ("raw", "gamma", "beta")
    }
    (adamw,) = build_optimizers(model, OptimConfig(mixer_lr=2.0))
    assert sorted({g["scale"] for g in adamw.param_groups}) == [1.0, 2.0]


def test_weights_to_start_from(tmp_path):
    train(config(steps=3), tmp_path / "first")
    train(config(steps=1, init=str(tmp_path / "first"), batch_size=8), tmp_path / "second")
    first, second = (load_run(tmp_path / n)[0].state_dict() for n in ("first", "second"))
    assert float((first["head.weight"] - second["head.weight"]).abs().max()) < 0.01
    with pytest.raises(MixerError, match="do not fit the model.*tokenmix convert"):
        train(config(vit(dim=8), init=str(tmp_path / "first")), tmp_path / "third")
    with pytest.raises(MixerError, match="contains no model"):
        train(config(init=str(tmp_path)), tmp_path / "fourth")


def test_a_teacher_and_a_penalty_add_their_losses(tmp_path):
    """Check that a teacher and a penalty add their losses.

    The teacher, a softmax model, distils layer by layer into Hydra; the penalty pulls filters towards one tap. Both are
    logged beside the loss, and both fall when weighed alone.
    """
    softmax = vit(mixers=({"name": "attention", "heads": 2},), positions="learned")
    train(config(softmax, steps=4), tmp_path / "teacher")
    student = replace(softmax, mixers=({"name": "hydra"},))
    run = config(
        student,
        steps=30,
        log_every=10,
        teacher=str(tmp_path / "teacher"),
        init=str(tmp_path / "teacher"),
        distill=100.0,
        eval_every=30,
    )
    train(replace(run, optim=OptimConfig(lr=1e-2, warmup=2)), tmp_path / "student")
    seen = [x["aux"]["distill"] for x in lines(tmp_path / "student", "train")]
    assert seen[-1] < seen[0]
    run = config(vit(), optim=OptimConfig(lr=1e-2, warmup=2, one_hot=10.0), steps=30, log_every=10, eval_every=30)
    train(run, tmp_path / "sparse")
    seen = [x["aux"]["one_hot"] for x in lines(tmp_path / "sparse", "train")]
    assert seen[-1] < seen[0]
    with pytest.raises(MixerError, match="contains no model"):
        train(config(student, teacher=str(tmp_path)), tmp_path / "none")


@pytest.mark.parametrize(
    ("model", "data", "says"),
    [
        (vit(classes=7), None, "model.classes=7, but digits has 10 classes; set model.classes=10"),
        (vit(), ImageDataConfig(source="digit"), "digit"),
        (vit(), ImageDataConfig(source="imagenet"), "give its folder, with train/CLASS"),
        (vit(), ImageDataConfig(smoothing=1.0), "smoothing"),
    ],
)
def test_wrong_configs_are_refused(model, data, says, tmp_path):
    with pytest.raises(MixerError, match=says):
        train(config(model, data=data), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_text_and_images_do_not_mix():
    from tokenmix.lab.train import DataConfig

    with pytest.raises(MixerError, match="kind 'vit' is trained on data of kind 'images', got 'text'"):
        RunConfig(vit(), DataConfig())
    found = RunConfig.from_json(config().to_json())
    assert found == config()
    with pytest.raises(MixerError, match="nearest: vit"):
        RunConfig.from_json({**config().to_json(), "model": {**vit().to_json(), "kind": "vitt"}})


def test_changed_images_are_refused(tmp_path, monkeypatch):
    train(config(steps=4), tmp_path / "run")
    env = json.loads((tmp_path / "run" / "env.json").read_text())
    env["images"]["sha256"] = "0" * 64
    (tmp_path / "run" / "env.json").write_text(json.dumps(env))
    with pytest.raises(MixerError, match="images digits changed since this run began"):
        resume(tmp_path / "run", changes={"train.steps": 6})


def test_a_model_follows_its_images(tmp_path):
    import numpy as np

    drawn = np.random.default_rng(0).integers(0, 256, (30, 13, 11, 3), dtype=np.uint8)
    np.savez(tmp_path / "some.npz", x_train=drawn, y_train=np.arange(30) % 3, x_test=drawn, y_test=np.arange(30) % 3)
    found = match_data(config(data=ImageDataConfig(source=str(tmp_path / "some.npz")))).model
    assert (found.classes, found.channels, found.image_size) == (3, 3, (12, 10))
    found = match_data(replace(density(), data=ImageDataConfig(source=str(tmp_path / "some.npz")))).model
    assert (found.channels, found.size) == (3, (13, 11))


def test_shrunk_images_are_what_a_model_follows_and_trains_on(tmp_path):
    small = match_data(replace(density(steps=2), data=ImageDataConfig(shrink=2)))
    assert small.model.size == (4, 4)
    train(small, tmp_path / "run")
    model = load_run(tmp_path / "run")[0].eval()
    images = open_images("digits").split("valid").pixels[:40]
    with torch.no_grad():
        by_hand = model.bits(model.to_tokens(F.avg_pool2d(images.float(), 2).round().to(torch.uint8))).mean()
    score = evaluate_run(tmp_path / "run", split="valid", max_images=40)
    assert score.bits_per_dim == pytest.approx(float(by_hand), abs=1e-5)
    with pytest.raises(MixerError, match=r"data.shrink must be at least 1, .*, got 0"):
        train(replace(density(), data=ImageDataConfig(shrink=0)), tmp_path / "none")


def test_the_command_line_on_images(tmp_path, capsys):
    few = [
        "--train.steps",
        "2",
        "--train.batch_size",
        "4",
        "--train.eval_images",
        "20",
        "--train.threads",
        "1",
        "--model.layers",
        "1",
    ]
    for recipe, name in (("aft_cifar10_classify", "c"), ("aft_cifar10_density", "d")):
        assert cli.main(["train", recipe, "--out", str(tmp_path / name), *few]) == 0
    printed = capsys.readouterr().out
    assert "top-1 on valid" in printed
    assert "bits/dim on valid" in printed
    assert cli.main(["eval", str(tmp_path / "c"), "--max-images", "10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 10
    assert (
        cli.main(["sample", str(tmp_path / "d"), "--images", "2", "--complete", "--out", str(tmp_path / "x.png")]) == 0
    )
    assert (tmp_path / "x.png").stat().st_size > 50
    assert cli.main(["eval", str(tmp_path / "d"), "--split", "all"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_reports_of_images(tmp_path):
    train(config(), tmp_path / "c")
    train(density(samples=2), tmp_path / "d")
    page = write_report([tmp_path / "c", tmp_path / "d"], tmp_path / "page.html")
    assert check_page(page) == []
    text = page.read_text()
    for what in ("valid top-1", "valid bits/dim", "Images drawn", "images/s", "Top-1 accuracy on the validation split"):
        assert what in text
    assert "tokens/s</th>" not in text
    run = read_run(tmp_path / "c")
    assert run.last_eval("valid") == lines(tmp_path / "c", "eval")[-1]["top1"]
    assert run.last_eval("valid", "bits_per_byte") is None
