"""Long-tailed subsets, the losses for them against their equations, and the accuracy of many, medium and few."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from image_sets import folder, noise
from tokenmix import MixerError
from tokenmix.lab import cli
from tokenmix.lab.data import Augment, ImageSampler, long_tail_counts, long_tailed, open_images
from tokenmix.lab.data.long_tail import class_counts, shots_of
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.report import read_run
from tokenmix.lab.report.figures import loss_curves
from tokenmix.lab.report.tables import summary_table
from tokenmix.lab.train import (
    CLASS_LOSSES,
    ClassLoss,
    ImageDataConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    evaluate_run,
    load_run,
    resume,
    train,
)
from tokenmix.lab.train.rundir import RunDir
from tokenmix.lab.train.tasks import open_task
from tokenmix.models import ViTConfig

DIGITS = 142  # training images of the class 0
TOTALS = {(10, 100): 12_406, (10, 10): 20_431, (100, 100): 10_847, (100, 10): 19_573}


def array_set(path, counts, test=3):
    """An .npz of noise, 4 x 4 and grey, with these training images of each class and a few test images."""
    labels = np.repeat(np.arange(len(counts)), counts)
    labels = labels[np.random.default_rng(0).permutation(len(labels))]
    held = np.repeat(np.arange(len(counts)), test)
    arrays = {"x_train": noise(len(labels), 4, 4), "y_train": labels, "x_test": noise(len(held), 4, 4, seed=1)}
    np.savez(path, y_test=held, classes=np.array([f"class {c}" for c in range(len(counts))]), **arrays)
    return str(path)


def config(data, **loop) -> RunConfig:
    mixers = ({"name": "aft_simple"},)
    model = ViTConfig(dim=8, layers=1, mixers=mixers, image_size=(8, 8), patch=4, channels=1, classes=10, pool="mean")
    given = {"steps": 4, "batch_size": 8, "log_every": 2, "eval_every": 4, "save_every": 2, "threads": 1}
    return RunConfig(model, data, OptimConfig(lr=3e-3, warmup=2), TrainConfig(**{**given, **loop}, device="cpu"))


def test_counts_are_those_of_the_papers():
    for (classes, imbalance), total in TOTALS.items():
        assert sum(long_tail_counts(50_000 // classes, classes, imbalance)) == total
    assert long_tail_counts(5000, 10, 100) == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    for imbalance in (10, 50, 100):
        for classes in (10, 100):
            counts = long_tail_counts(50_000 // classes, classes, imbalance)
            assert counts == sorted(counts, reverse=True)
            assert counts[0] == imbalance * counts[-1] == 50_000 // classes
    assert long_tail_counts(1000, 4, 1000) == [1000, 100, 10, 1]  # 1000^(-1/3) lies just below or above 1/10
    assert long_tail_counts(7, 3, 1) == [7, 7, 7]


def test_the_images_of_cifar_are_as_many(tmp_path):
    data = open_images(array_set(tmp_path / "cifar.npz", [5000] * 10), valid=0)
    for imbalance, total in ((100, 12_406), (10, 20_431)):
        kept = long_tailed(data, imbalance)
        assert class_counts(kept.split("train"), 10) == long_tail_counts(5000, 10, imbalance)
        assert kept.describe()["images"] == [total, 30, 30]


def test_a_subset_is_of_the_set_and_the_rest_is_untouched():
    data = open_images("digits")
    kept = long_tailed(data, 10, seed=3)
    whole, part = data.split("train"), kept.split("train")
    known = {(int(y), x.numpy().tobytes()) for x, y in zip(whole.pixels, whole.labels, strict=True)}
    chosen = [(int(y), x.numpy().tobytes()) for x, y in zip(part.pixels, part.labels, strict=True)]
    assert set(chosen) <= known
    assert len(set(chosen)) == len(chosen)
    assert class_counts(part, 10) == long_tail_counts(max(class_counts(part, 10)), 10, 10)
    assert kept.split("valid") is data.split("valid")
    assert kept.split("test") is data.split("test")
    again, other = long_tailed(data, 10, seed=3), long_tailed(data, 10, seed=4)
    assert torch.equal(again.split("train").pixels, part.pixels)
    assert again.fingerprint == kept.fingerprint
    assert not torch.equal(other.split("train").pixels, part.pixels)
    assert len({data.fingerprint, kept.fingerprint, other.fingerprint}) == 3
    rarer = long_tailed(data, 100, seed=3).split("train")
    rare = {(int(y), x.numpy().tobytes()) for x, y in zip(rarer.pixels, rarer.labels, strict=True)}
    assert rare < set(chosen)


def test_the_largest_class_is_as_large_as_all_others_allow(tmp_path):
    data = open_images(array_set(tmp_path / "a.npz", [50, 10, 40]), valid=0)
    assert class_counts(long_tailed(data, 1).split("train"), 3) == [10, 10, 10]
    kept = class_counts(long_tailed(data, 16).split("train"), 3)
    assert kept == long_tail_counts(43, 3, 16) == [43, 10, 2]  # 44 / 4 is one too many
    assert class_counts(long_tailed(data, 16, largest=32).split("train"), 3) == [32, 8, 2]
    with pytest.raises(MixerError, match="a has images for a largest class of 1 to 43 at an imbalance of 16, got 44"):
        long_tailed(data, 16, largest=44)
    with pytest.raises(MixerError, match="'class 2' of a would keep none of its images; the largest class has 50, so"):
        long_tailed(data, 1000)


def test_files_stay_files(tmp_path):
    root = folder(tmp_path / "set", each=12, size=lambda i: (6 + i, 7))
    kept = long_tailed(open_images(str(root), valid=0.2), 3).split("train")
    assert kept.pixels is None
    assert [f.parent.name for f in kept.files] == [("cat", "dog")[y] for y in kept.labels.tolist()]
    assert class_counts(kept, 2) == [7, 2]


def test_sets_without_a_tail_are_refused(tmp_path):
    with pytest.raises(MixerError, match="a set with 1 class has no tail; it needs at least 2 classes"):
        long_tail_counts(10, 1, 10)
    for wrong in (0.5, -1, float("inf"), float("nan")):
        with pytest.raises(MixerError, match=f"long_tail: the imbalance .* at least 1 .*; got {wrong}"):
            long_tail_counts(10, 3, wrong)
    data = open_images(array_set(tmp_path / "b.npz", [5, 0, 4]), valid=0)
    with pytest.raises(MixerError, match="long_tail: the class 'class 1' of b has no training images; leave it out"):
        long_tailed(data, 2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"long_tail": 0.5}, r"data.long_tail is .*, at least 1 .*, got 0.5"),
        ({"per_class": 5}, "data.per_class=5 with data.long_tail=None; data.long_tail=1 keeps as many"),
        ({"long_tail": 2.0, "per_class": 0}, "at least 1; got data.per_class=0"),
        ({"valid": 0.0}, "data.valid must be a positive"),
        ({"loss": "balanced"}, "data.loss='balanced' is unknown; nearest: balanced_bce"),
        ({"loss": "bce", "loss_tau": 2.0}, "data.loss_tau=2.0 belongs to data.loss 'balanced_cross_entropy' or"),
        ({"loss": "balanced_bce", "loss_tau": -1.0}, "data.loss_tau must be finite and >= 0"),
    ],
)
def test_wrong_options_are_refused(fields, words):
    with pytest.raises(MixerError, match=words) as why:
        config(ImageDataConfig(**fields))
    assert "\n" not in str(why.value)


def test_a_density_model_has_no_other_loss():
    density = RECIPES["aft_cifar10_density"].config(size="smoke")
    with pytest.raises(MixerError, match="data.loss='bce' is for classifiers; a model of kind 'image_density'"):
        density.override({"data.loss": "bce"})


# The equations, one number at a time.


def literal(name, z, y, n, tau):
    """The loss of one batch in float64: logits z and targets y as (B, C), images of each class n."""
    total = torch.zeros((), dtype=torch.float64)
    images, classes = sum(n), len(n)
    weights = [(1 - 0.9999) / (1 - 0.9999 ** n[c]) for c in range(classes)]
    weights = [w * classes / sum(weights) for w in weights]
    for b in range(len(z)):
        pi = [n[c] / images for c in range(classes)]
        if name.endswith("cross_entropy"):
            bias = [tau * np.log(p) if name.startswith("balanced") else 0.0 for p in pi]
            below = sum(torch.exp(z[b, c] + bias[c]) for c in range(classes))
            total = total - sum(y[b, c] * torch.log(torch.exp(z[b, c] + bias[c]) / below) for c in range(classes))
            continue
        for c in range(classes):
            bias = tau * (np.log(pi[c]) - np.log(1 - pi[c])) if name == "balanced_bce" else 0.0
            p = 1 / (1 + torch.exp(-(z[b, c] + bias)))
            term = -(y[b, c] * torch.log(p) + (1 - y[b, c]) * torch.log(1 - p))
            total = total + term * (weights[c] if name == "class_balanced_bce" else 1.0)
    return total / len(z)


COUNTS = [5000, 1077, 232, 50, 3]


def targets(kind):
    labels = torch.tensor([0, 4, 2, 3, 3, 1])
    hard = torch.nn.functional.one_hot(labels, 5).double()
    smooth = 0.9 * hard + 0.1 / 5
    return {
        "labels": (labels, hard),
        "smoothed": (smooth, smooth),
        "mixed": (*[0.3 * smooth + 0.7 * smooth.flip(0)] * 2,),
    }[kind]


@pytest.mark.parametrize("kind", ["labels", "smoothed", "mixed"])
@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_a_loss_is_its_equation_and_so_is_its_gradient(name, kind):
    given, y = targets(kind)
    z = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    tau = 1.05 if name.startswith("balanced") else 1.0
    ours, theirs = z.clone().requires_grad_(), z.clone().requires_grad_()
    loss = ClassLoss(name, COUNTS, tau=tau)(ours, given)
    want = literal(name, theirs, y, COUNTS, tau)
    loss.backward()
    want.backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-12)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-13)
    single = ClassLoss(name, COUNTS, tau=tau)(z.float(), given if kind == "labels" else given.float())
    assert single.dtype == torch.float32
    assert single.item() == pytest.approx(want.item(), rel=1e-5)


def test_what_each_option_does():
    z, y = torch.zeros(1, 2), torch.tensor([1])
    # pi = 0.9, 0.1: the bias of the sigmoid is log 9 and -log 9, that of softmax log 0.9 and log 0.1.
    assert ClassLoss("balanced_bce", [9, 1])(z, y).item() == pytest.approx(2 * np.log(10))
    assert ClassLoss("balanced_cross_entropy", [9, 1])(z, y).item() == pytest.approx(np.log(10))
    assert ClassLoss("balanced_bce", [9, 1], tau=0)(z, y).item() == pytest.approx(2 * np.log(2))
    for name in ("balanced_cross_entropy", "class_balanced_bce"):  # on equal classes they are the plain losses
        plain = ClassLoss(name.removeprefix("class_").removeprefix("balanced_"), [7, 7])
        logits = torch.tensor([[0.3, -1.0]])
        assert ClassLoss(name, [7, 7])(logits, y).item() == pytest.approx(plain(logits, y).item())
    rare = ClassLoss("class_balanced_bce", COUNTS).weights
    assert rare.sum().item() == pytest.approx(5)
    assert rare.tolist() == sorted(rare.tolist())


def test_losses_refuse_what_they_are_not_defined_for():
    for name in ("balanced_cross_entropy", "class_balanced_bce", "balanced_bce"):
        with pytest.raises(MixerError, match=f"loss {name}: class 1 has no training images.*choose cross_entropy or b"):
            ClassLoss(name, [3, 0, 2])
    for name in ("cross_entropy", "bce"):
        assert ClassLoss(name, [3, 0, 2])(torch.randn(2, 3), torch.tensor([0, 2])).isfinite()
    with pytest.raises(MixerError, match="loss balanced_bce: the only class has all images"):
        ClassLoss("balanced_bce", [3])
    with pytest.raises(MixerError, match="data.loss='mse' is unknown; known: cross_entropy"):
        ClassLoss("mse", [3, 3])


def test_the_loss_of_training_sees_the_classes_of_the_subset():
    data = ImageDataConfig(
        long_tail=20.0, loss="balanced_bce", loss_tau=1.05, smoothing=0.1, augment=Augment(mixup=0.8)
    )
    task = open_task(config(data))
    counts = long_tail_counts(DIGITS, 10, 20)
    assert len(task.sampler.split) == sum(counts)
    x, y = task.batch(0)
    z = torch.randn(8, 10, dtype=torch.float64)
    assert y.shape == (8, 10)
    assert task.loss(z, y).item() == pytest.approx(literal("balanced_bce", z, y.double(), counts, 1.05).item())
    assert isinstance(task.sampler, ImageSampler)


def test_accuracy_of_many_medium_and_few(tmp_path):
    """The scores are those counted by hand from the model's answers, in eval, metrics and report."""
    assert shots_of([101, 100, 20, 19, 0]) == [0, 1, 1, 2, 2]
    assert shots_of([199, 100]) is None
    train(config(ImageDataConfig(long_tail=20.0), eval_batch=7), tmp_path / "run")
    score = evaluate_run(tmp_path / "run")
    model, _ = load_run(tmp_path / "run")
    data, counts = open_images("digits"), long_tail_counts(DIGITS, 10, 20)
    test = data.split("test")
    with torch.no_grad():
        guess = model((test.pixels.float() / 255 - 0.5) / 0.5).argmax(1)
    right = guess == test.labels
    of = torch.tensor(counts)[test.labels]
    assert score.top1 == pytest.approx(right.float().mean().item())
    assert score.top1_many == pytest.approx(right[of > 100].float().mean().item())
    assert score.top1_medium == pytest.approx(right[(of >= 20) & (of <= 100)].float().mean().item())
    assert score.top1_few == pytest.approx(right[of < 20].float().mean().item())
    assert {bool((of > 100).any()), bool((of < 20).any())} == {True}
    assert f"few {100 * score.top1_few:.2f} % (classes with more than 100, 20 to 100, fewer than 20" in score.text()
    lines = [x for x in RunDir(tmp_path / "run").read_metrics() if x["kind"] == "eval"]
    assert lines[-1]["top1_few"] == score.top1_few
    assert {"top1_many", "top1_medium", "top1_few"} <= set(lines[0])
    table = summary_table([read_run(tmp_path / "run")])
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert cells["test many"] == f"{100 * score.top1_many:.2f} %"
    assert {"valid few", "test medium", "test few"} <= set(cells)
    assert "Many, medium, few: top-1 on the classes with more than 100, 20 to 100, and fewer" in table.notes[0]


def test_sets_that_are_not_long_tailed_have_no_such_scores(tmp_path):
    train(config(ImageDataConfig(long_tail=1.0, per_class=30, loss="bce")), tmp_path / "run")
    score = evaluate_run(tmp_path / "run", max_images=20)
    assert (score.top1_many, score.top1_medium, score.top1_few) == (None, None, None)
    assert "few" not in score.text()
    run = read_run(tmp_path / "run")
    assert not any(name.startswith("top1_") for e in run.evals for name in e)
    table = summary_table([run])
    assert not any(c.endswith((" many", " medium", " few")) for c in table.columns)
    assert "Many" not in table.notes[0]
    env = json.loads((tmp_path / "run" / "env.json").read_text())
    assert env["images"]["images"] == [300, 180, 180]


def test_runs_with_different_losses_share_their_accuracy_but_not_their_loss(tmp_path, capsys):
    for name, loss in (("a", "cross_entropy"), ("b", "balanced_bce")):
        train(config(ImageDataConfig(long_tail=20.0, loss=loss)), tmp_path / name)
    runs = [read_run(tmp_path / name) for name in "ab"]
    assert [r.metric.loss for r in runs] == ["cross-entropy in nats", "balanced BCE in nats"]
    said = [picture.alt for picture in loss_curves(runs)]
    assert len([s for s in said if "balanced BCE" in s]) == len([s for s in said if "cross-entropy" in s]) == 2
    accuracy = [s for s in said if "top-1 accuracy" in s]
    assert len(accuracy) == 1
    assert all(f"{name} " in accuracy[0] for name in "ab")
    pytest.importorskip("plotext", reason="plotext comes with the extra plot")
    capsys.readouterr()
    assert cli.main(["report", "--watch", str(tmp_path), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "training loss, balanced BCE in nats, smoothed; points: valid cross-entropy\n" in shown
    assert "training loss, cross-entropy in nats, smoothed; points: validation\n" in shown


def test_a_stopped_run_goes_on_with_the_same_images(tmp_path):
    data = ImageDataConfig(long_tail=20.0, loss="balanced_bce", augment=Augment(mixup=0.8), smoothing=0.1)
    constant = OptimConfig(lr=3e-3, warmup=2, schedule="constant")
    train(replace(config(data), optim=constant), tmp_path / "whole")
    train(replace(config(data, steps=2), optim=constant), tmp_path / "parts")
    resume(tmp_path / "parts", changes={"train.steps": 4})
    whole, parts = (load_run(tmp_path / name)[0].state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[k], parts[k]) for k in whole)
    file = tmp_path / "parts" / "config.json"
    changed = json.loads(file.read_text())
    changed["data"]["long_tail"] = 30.0
    file.write_text(json.dumps(changed))
    with pytest.raises(MixerError, match="the images digits changed since this run began"):
        resume(tmp_path / "parts")


@pytest.mark.parametrize("classes", [10, 100])
def test_the_recipe_has_the_papers_images_and_every_loss(classes):
    recipe = RECIPES[f"livt_cifar{classes}_lt"]
    assert {row for row in recipe.rows if "/" not in row} == set(CLASS_LOSSES)
    paper, gpu = recipe.config(size="paper"), recipe.config(size="gpu")
    assert (paper.data.valid, paper.data.long_tail, paper.data.loss) == (0.0, 100.0, "balanced_bce")
    assert (paper.model.classes, paper.data.source) == (classes, f"cifar{classes}")
    assert paper.train.steps == 400 * (TOTALS[classes, 100] // 256)
    assert gpu.train.steps == 200 * (sum(long_tail_counts(45_000 // classes, classes, 100)) // 256)
    assert paper.optim.lr * paper.optim.min_lr_ratio == pytest.approx(1e-6)


@pytest.mark.parametrize("row", RECIPES["livt_cifar10_lt"].rows)
def test_the_recipe_s_rows_take_their_first_steps_without_a_download(row, tmp_path):
    small = ["--train.steps", "2", "--train.batch_size", "8", "--train.threads", "1", "--train.eval_images", "40"]
    command = ["train", "livt_cifar10_lt", "--row", row, "--size", "smoke", "--data", "digits", *small]
    assert cli.main([*command, "--out", str(tmp_path / "run")]) == 0
    run = read_run(tmp_path / "run")
    assert run.config["data"]["loss"] == row.split("/")[-1]
    assert run.env["images"]["images"] == [sum(long_tail_counts(DIGITS, 10, 100)), 180, 180]
    assert run.largest("step") == 2
    assert all(t.isfinite().all() for t in load_file(run.weights).values())
