"""Training of segmentation models: scores by their definitions, a loss that ignores, resuming to the bit, pages."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from image_sets import noise, save
from page_checks import check_page
from tokenmix import MixerError
from tokenmix.lab import cli
from tokenmix.lab.data import MaskAugment, MaskSplit
from tokenmix.lab.data.masks import paint_mask
from tokenmix.lab.data.pair_sampler import IGNORED
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.report import read_run, write_report
from tokenmix.lab.train import (
    MaskDataConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    confusion_matrix,
    evaluate_run,
    intersection_over_union,
    load_run,
    resume,
    train,
)
from tokenmix.lab.train.mask_scores import accuracies
from tokenmix.lab.train.optim import learning_rate
from tokenmix.lab.train.rundir import RunDir
from tokenmix.lab.train.tasks import match_data, open_task
from tokenmix.models import PyramidConfig, ResNetConfig, SegmentationConfig, SegmenterConfig, ViTConfig, build_model

RECIPE = RECIPES["segmentation"]


def segmenter(classes: int = 6, **backbone) -> SegmenterConfig:
    given = {
        "depths": (1, 1),
        "dims": (8, 12),
        "patches": (4, 2),
        "mlp_ratios": (1, 1),
        "image_size": (16, 16),
        "mixers": ({"name": "hydra"},),
        "classes": 0,
        "drop_path": 0.2,
        **backbone,
    }
    head = SegmentationConfig(classes, {"name": "external", "slots": 4}, 8, 6, (0, 1), 0.1)
    return SegmenterConfig(PyramidConfig(**given), head)


def config(model=None, data=None, **loop) -> RunConfig:
    data = data or MaskDataConfig(scenes=10, augment=MaskAugment((0.5, 2.0), 0.5, 0.2))
    given = {
        "steps": 8,
        "batch_size": 4,
        "log_every": 2,
        "eval_every": 4,
        "save_every": 2,
        "device": "cpu",
        "samples": 2,
    }
    return RunConfig(
        model or segmenter(),
        data,
        OptimConfig(lr=1e-2, warmup=2, ema=0.5, schedule="constant"),
        TrainConfig(**{**given, **loop}),
    )


def by_definition(predicted: np.ndarray, truth: np.ndarray, classes: int) -> list[float]:
    """IoU of sets of pixels, one class after the other, in float64; NaN where both sets are empty."""
    found = []
    for c in range(classes):
        a = {at for at in np.ndindex(truth.shape) if predicted[at] == c and truth[at] != IGNORED}
        b = {at for at in np.ndindex(truth.shape) if truth[at] == c}
        found.append(len(a & b) / len(a | b) if a | b else math.nan)
    return found


def test_iou_is_that_of_sets_of_pixels():
    g = torch.Generator().manual_seed(0)
    truth = torch.randint(0, 5, (3, 7, 6), generator=g)
    truth[truth == 4] = IGNORED
    predicted = torch.where(
        torch.rand(truth.shape, generator=g) < 0.5, truth.clamp(min=0), torch.randint(0, 4, (3, 7, 6), generator=g)
    )
    counts = confusion_matrix(predicted, truth, 5)
    want = by_definition(predicted.numpy(), truth.numpy(), 5)
    assert torch.allclose(
        intersection_over_union(counts), torch.tensor(want, dtype=torch.float64), atol=1e-12, equal_nan=True
    )
    assert math.isnan(want[4])
    seen = truth != IGNORED
    assert int(counts.sum()) == int(seen.sum())
    right = (predicted == truth)[seen].double().mean()
    each = [(predicted == truth)[truth == c].double().mean() for c in range(4)]
    assert accuracies(counts) == pytest.approx((float(right), float(sum(each) / 4)), abs=1e-12)
    assert counts[1, 2] == int(((truth == 1) & (predicted == 2)).sum())  # rows are true


def fixed(task, masks, monkeypatch) -> None:
    """Let the task have these masks as its validation split, on images of noise."""
    read = lambda i: (torch.full((3, *masks[i].shape), 10 * i, dtype=torch.uint8), masks[i])  # noqa: E731
    monkeypatch.setitem(task.images.splits, "valid", MaskSplit("valid", len(masks), read))


def test_pixels_are_counted_over_all_images_before_dividing(monkeypatch):
    """Against a model that answers by the image's grey: two images of unlike sizes, one class in one of them."""
    task = open_task(config(segmenter(positions=None, pool="mean")))
    masks = [torch.zeros(16, 16, dtype=torch.int64), torch.ones(32, 24, dtype=torch.int64)]
    masks[0][:8] = 1
    masks[1][:, :6] = IGNORED
    fixed(task, masks, monkeypatch)

    class Says(torch.nn.Linear):
        def forward(self, x):
            logits = torch.zeros(len(x), 6, 16, 16)
            logits[:, 1, :, :] = 1.0
            return logits

    score = task.evaluate(Says(1, 1), "valid")
    hit, pixels = 128 + 32 * 18, 256 + 32 * 18
    assert score.iou == {"background": 0.0, "disc": pytest.approx(hit / pixels)}
    assert score.miou == pytest.approx(hit / pixels / 2)
    assert score.pixel_accuracy == pytest.approx(hit / pixels)
    assert score.class_accuracy == pytest.approx(0.5)
    assert (score.images, score.pixels) == (2, pixels)
    nats = math.log(5 + math.e)
    assert score.cross_entropy == pytest.approx((pixels * nats - hit) / pixels, abs=1e-6)
    assert "mIoU" in score.text()
    assert "disc" in score.text()
    monkeypatch.setitem(
        task.images.splits,
        "valid",
        MaskSplit("valid", 1, lambda i: (torch.zeros(3, 8, 8, dtype=torch.uint8), torch.full((8, 8), IGNORED))),
    )
    with pytest.raises(MixerError, match="no pixel of the first 1 masks of valid has a class"):
        task.evaluate(Says(1, 1), "valid")


def test_the_loss_is_the_mean_over_pixels_with_a_class():
    task = open_task(config())
    z = torch.randn(2, 6, 5, 4, dtype=torch.float64, requires_grad=True)
    truth = torch.randint(0, 6, (2, 5, 4))
    truth[0, :2] = IGNORED
    terms = [
        -z[b, :, i, j].log_softmax(0)[truth[b, i, j]] for b, i, j in np.ndindex(2, 5, 4) if truth[b, i, j] != IGNORED
    ]
    loss = task.loss(z, truth)
    assert loss.item() == pytest.approx((sum(terms) / len(terms)).item(), rel=1e-6)
    loss.backward()
    assert not bool(z.grad[0, :, :2].any())
    assert task.count_targets(truth) == 32
    assert task.loss(z, torch.full_like(truth, IGNORED)).item() == 0


def test_parts_of_a_batch_weigh_by_their_pixels(tmp_path):
    """Padding differs between images; the head's BatchNorm sees parts, so it stands still here."""
    model = segmenter(drop_path=0.0)
    model = replace(model, head=replace(model.head, dropout=0.0))
    losses = []
    for parts in (1, 2):
        run = config(model, steps=1, accumulate=parts, eval_every=1, samples=0)
        task = open_task(run)
        torch.manual_seed(0)
        net = build_model(run.model).eval()
        x, y = task.batch(0)
        whole = sum(
            task.loss(net(a), b) * task.count_targets(b) / task.count_targets(y)
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True)
        )
        whole.backward()
        losses.append((whole.item(), next(net.head.parameters()).grad))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
    assert torch.allclose(losses[0][1], losses[1][1], atol=1e-6)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "whole"
    return path, train(config(csv=True), path)


def test_a_run_resumes_to_the_same_bits(run, tmp_path):
    whole, _ = run
    train(config(steps=4), tmp_path / "part")
    resume(tmp_path / "part", changes={"train.steps": 8})
    scores = [[e["miou"] for e in read_run(p).evals] for p in (whole, tmp_path / "part")]
    assert scores[0] == scores[1]
    step = sorted((RunDir.open(whole).checkpoints).iterdir())[-1].name
    for file in ("model.safetensors", "ema.safetensors"):
        a, b = (RunDir.open(p).checkpoints / step / file for p in (whole, tmp_path / "part"))
        assert a.read_bytes() == b.read_bytes(), file
    assert any("running_var" in name for name in load_run(whole)[0].state_dict())


def test_eval_scores_whatever_the_run_can_read(run, capsys):
    path, summary = run
    assert summary["valid_miou"] == read_run(path).last_eval("valid")
    assert cli.main(["eval", str(path), "--split", "valid", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["miou"] == pytest.approx(summary["valid_miou"])
    assert set(found["iou"]) <= {"background", "disc", "square", "triangle", "ring", "cross"}
    assert cli.main(["eval", str(path), "--max-images", "1"]) == 0
    assert "% mIoU" in capsys.readouterr().out
    assert cli.main(["eval", str(path), "--image-size", "32"]) == 2
    assert "belong to images of 16 x 16" in capsys.readouterr().err
    assert cli.main(["eval", str(path), "--max-texts", "3"]) == 2
    assert "takes image_size, max_images; leave out max_texts" in capsys.readouterr().err
    header, *rows = (path / "metrics.csv").read_text().splitlines()
    assert "iou.background" in header.split(",")
    assert len(rows) >= 7


def test_the_page_shows_images_masks_and_predictions(run, tmp_path):
    path, _ = run
    picture = torch.tensor(np.asarray(Image.open(sorted((path / "samples").glob("*.png"))[-1])).copy()).permute(2, 0, 1)
    picture = picture[:, ::4, ::4]
    task = open_task(RunDir.open(path).config(), path)
    image, mask = task.images.split("valid").read(0)
    assert picture.shape == (3, 3 * 17 - 1, 16)
    assert torch.equal(picture[:, :16], image)
    assert torch.equal(picture[:, 17:33], paint_mask(mask, 6))
    x = next(iter(task._predictions(load_run(path, step="last")[0], "valid", (16, 16), 1)))[0].argmax(0)
    assert torch.equal(picture[:, 34:], paint_mask(x, 6))
    evaluate_run(path, device="cpu")
    page = write_report([path], tmp_path / "page.html")
    text = page.read_text()
    assert not check_page(page)
    for what in (
        "valid mIoU",
        "test pixels right",
        "Predicted masks",
        "background black, disc blue",
        "2 x hydra",
        "Mean intersection over union on the validation split",
        "Intersection over union by class",
    ):
        assert what in text, what
    assert "Images drawn" not in text


@pytest.mark.parametrize("row", RECIPE.rows)
def test_every_row_takes_a_smoke_step(row, tmp_path):
    fields = {"train.steps": 1, "train.batch_size": 2, "data.scenes": 10, "train.samples": 1}
    summary = train(RECIPE.config(row, "smoke").override(fields), tmp_path / "run")
    assert 0 <= summary["valid_miou"] < 0.5
    model = RECIPE.config(row, "paper").model
    names = {"pvt": ["spatial_reduction"], "resnet": []}.get(row, [row])
    assert sorted({s["name"] for s in model.backbone.specs()} if names else []) == names
    assert [model.backbone.strides[level] for level in model.head.levels] == [8, 16, 32]


def test_the_paper_s_training_as_printed():
    run = RECIPE.config("pvt", "paper")
    optim, loop, data, model = run.optim, run.train, run.data, run.model
    assert (optim.name, optim.lr, optim.weight_decay, optim.schedule, optim.min_lr_ratio) == (
        "adamw",
        1e-4,
        1e-4,
        "poly",
        0,
    )
    assert (loop.steps, loop.batch_size, data.augment.scale, data.augment.flip) == (80_000, 16, (0.5, 2.0), 0.5)
    assert (model.backbone.depths, model.backbone.dims, model.image_size) == (
        (3, 4, 6, 3),
        (64, 128, 320, 512),
        (512, 512),
    )
    assert (model.head.width, model.head.mixer["slots"], model.classes, data.first_label, data.ignore) == (
        512,
        64,
        150,
        1,
        0,
    )
    with pytest.raises(MixerError, match="--data PATH, or data.source='scenes'"):
        open_task(run)


def test_a_backbone_starts_from_a_classifier_of_another_size(monkeypatch):
    """Its weights without head and class token, positions resized as by hand."""
    from tokenmix.lab.train import init_from

    model = build_model(segmenter(pool="mean"))
    source = build_model(replace(model.config.backbone, pool="class", classes=7, image_size=(32, 32)))
    head = {name: tensor.clone() for name, tensor in model.head.state_dict().items()}
    monkeypatch.setattr(init_from, "load_model", lambda path: (source, source.config))
    init_from.start_from(model, "classifier")
    source.resize((16, 16))
    images = torch.randn(2, 3, 16, 16)
    ours, theirs = (m.eval().feature_maps(images) for m in (model.backbone, source))
    assert torch.equal(ours[0], theirs[0])  # the second stage of the classifier mixes its class token in
    assert torch.equal(model.backbone.stages[1].positions, source.stages[1].positions[1:])
    assert all(torch.equal(tensor, head[name]) for name, tensor in model.head.state_dict().items())
    other = build_model(replace(source.config, dims=(8, 16)))
    monkeypatch.setattr(init_from, "load_model", lambda path: (other, other.config))
    with pytest.raises(MixerError, match="its weights do not fit the model"):
        init_from.start_from(model, "other")


def test_power_schedule():
    """lr (1 - t)^0.9 after the warm-up, down to its last rate."""
    optim = OptimConfig(lr=2.0, schedule="poly", warmup=10, min_lr_ratio=0.25)
    assert learning_rate(4, optim, 110) == 1.0
    for step in (10, 59, 108):
        left = (1 - (step + 1 - 10) / 100) ** 0.9
        assert learning_rate(step, optim, 110) == pytest.approx(2 * (0.25 + 0.75 * left))
    assert learning_rate(109, optim, 110) == pytest.approx(0.5)
    with pytest.raises(MixerError, match="'poly' needs train.steps"):
        RunConfig(segmenter(), MaskDataConfig(), optim, TrainConfig(steps=None, max_seconds=1.0))


def folder(root, n=10, classes=3):
    for i in range(n):
        save(root / "images" / f"{i}.png", noise(20, 24, 3, seed=i))
        save(root / "masks" / f"{i}.png", np.random.default_rng(i).integers(0, classes, (20, 24), dtype=np.uint8))
    return root


def test_a_folder_of_one_s_own_trains_from_the_command_line(tmp_path, capsys):
    root, out = folder(tmp_path / "set"), tmp_path / "run"
    asked = [
        "train",
        "segmentation",
        "--data",
        str(root),
        "--out",
        str(out),
        "--train.steps",
        "2",
        "--train.eval_every",
        "2",
    ]
    assert cli.main([*asked, "--train.batch_size", "2", "--train.device", "cpu"]) == 0
    assert "% mIoU on valid" in capsys.readouterr().out
    model, config = load_run(out)
    assert (config.model.classes, config.data.source) == (3, str(root))
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 3, 64, 64)
    save(root / "masks/0.png", np.zeros((20, 24), np.uint8))
    assert cli.main(["resume", str(out), "--train.steps", "3"]) == 2
    assert "the images set changed since this run began" in capsys.readouterr().err
    (root / "masks/0.png").unlink()
    asked[asked.index(str(out))] = str(tmp_path / "other")
    assert cli.main(asked) == 2
    said = capsys.readouterr().err
    assert "1 of 10 images has no mask (images/0.png)" in said
    assert said.count("\n") == 1


def test_wrong_configs_are_one_line(tmp_path):
    for change, says in (
        ({"model.head.classes": 4}, "model.head.classes=4, but scenes has 6 classes"),
        ({"data.valid": 0.5}, "data.valid must be above 0 and below 0.5"),
        ({"data.first_label": -1}, "must be 0 or more"),
        ({"data.scenes": 1}, "data.scenes must be at least 10"),
        ({"data.augment.flip": 2.0}, "flip=2.0 must be a probability"),
        ({"model.head.classes": 1}, "model.head.classes must be at least 2"),
        ({"model.backbone.classes": 3}, "set backbone.classes=0"),
    ):
        with pytest.raises(MixerError, match=says):
            open_task(config().override(change))
    with pytest.raises(MixerError, match="kind 'segmentation' is trained on data of kind 'masks'"):
        RunConfig(segmenter())
    with pytest.raises(MixerError, match="give a backbone and a SegmentationConfig"):
        build_model(segmenter()).__class__(build_model(segmenter().backbone))


def test_a_config_of_any_backbone_goes_to_json_and_back(tmp_path):
    vit = ViTConfig(dim=8, layers=4, mixers=({"name": "hydra"},), image_size=(16, 16), patch=4, classes=0)
    resnet = ResNetConfig(widths=(4, 6), depths=(1, 1), image_size=(16, 16), classes=0)
    others = [
        SegmenterConfig(each, SegmentationConfig(6, {"name": "hydra"}, 8, 6, those))
        for each, those in ((vit, (1, 3)), (resnet, (0, 1)))
    ]
    for model in (segmenter(), *others):
        run = config(model)
        assert RunConfig.from_json(json.loads(json.dumps(run.to_json()))) == run
        assert match_data(config(replace(model, head=replace(model.head, classes=9)))).model.classes == 6
        built = build_model(model)
        assert built.config == model
        assert built(torch.zeros(1, 3, 16, 16)).shape == (1, 6, 16, 16)
