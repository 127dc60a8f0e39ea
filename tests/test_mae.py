"""Masked autoencoders: kept positions are the masked full sequence, the equation of the loss, whole runs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from cases import BOTH_WAYS, CASES
from tokenmix import MixerError
from tokenmix.lab import cli
from tokenmix.lab.data import Augment, long_tail_counts
from tokenmix.lab.data.masking import draws_of, kept_patches
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.report import write_report
from tokenmix.lab.report.reconstructions import enlarge_image, reconstruction_pictures
from tokenmix.lab.report.runs import read_run
from tokenmix.lab.report.tables import summary_table
from tokenmix.lab.train import (
    ImageDataConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    evaluate_run,
    load_run,
    match_data,
    resume,
    train,
)
from tokenmix.lab.train.init_from import start_from
from tokenmix.lab.train.optim import build_optimizers, parameter_groups, set_rates
from tokenmix.lab.train.rundir import RunDir
from tokenmix.lab.train.tasks import open_task
from tokenmix.models import MAE, EncoderConfig, MAEConfig, ViTConfig, build_model, masked_autoencoder
from tokenmix.models.mae import hidden_patches, images_of, kept_count, patches_of, pixel_loss, pixel_targets
from tokenmix.positions.grid import sincos

ATTENTION = {"name": "attention", "heads": 2}
DECODER = {"decoder_dim": 8, "decoder_layers": 1, "decoder_mixers": (ATTENTION,)}
NOT_OF_PATCHES = ("aft_conv-3d", "axial-sum", "axial-3d")
"""Cases on grids of three dimensions."""
ENCODERS = [
    (case, pool)
    for case in BOTH_WAYS
    for pool in ("class", "mean")
    if case not in NOT_OF_PATCHES and (CASES[case][0], pool) != ("pooling", "class")
]
"""Cases with and without a class token, which is no cell of a grid that ``pooling`` pools."""


def vit(spec=ATTENTION, **options) -> ViTConfig:
    given = {"dim": 16, "layers": 2, "image_size": (8, 8), "patch": 2, "channels": 1, "classes": 0, "pool": "mean"}
    return ViTConfig(mixers=(spec,), **{**given, **options})


def make(config: MAEConfig) -> MAE:
    model = build_model(config).double().eval()
    for parameter in model.parameters():  # zeros and tiny values would hide what is wrong
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def keep_of(batch: int, patches: int, kept: int) -> torch.Tensor:
    return kept_patches(torch.rand(batch, patches), kept)


@pytest.mark.parametrize(("case", "pool"), ENCODERS)
def test_kept_positions_are_the_masked_full_sequence(case, pool):
    """The encoder's outputs at kept patches, without the others, and with them behind a key mask."""
    name, options = CASES[case]
    spec = {"name": name, **{k: v for k, v in options.items() if k not in ("max_len", "max_context_len")}}
    model = make(masked_autoencoder(vit(spec, pool=pool, registers=int(pool == "class")), **DECODER)).encoder
    images, keep, prefix = torch.randn(2, 1, 8, 8, dtype=torch.float64), keep_of(2, 16, 5), model.config.prefix
    x, given = model.embed(images)
    at = torch.cat([torch.arange(prefix).expand(2, -1), prefix + keep], 1)
    mask = torch.zeros(2, x.shape[1], dtype=torch.bool).scatter(1, at, True)
    for block in model.blocks:
        x = block(x, key_mask=mask, positions=torch.arange(x.shape[1]).expand(2, -1), **given)
    want = model.norm(x).gather(1, at[..., None].expand(-1, -1, 16))
    torch.testing.assert_close(model.forward_features(images, keep=keep), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_predictions_are_the_equation(pool):
    """Encoder, a map to the decoder's width, mask tokens, sinusoids, blocks, norm, a map to pixels: patch by patch."""
    config = masked_autoencoder(vit(channels=3, pool=pool), **DECODER)
    model, images, keep = make(config), torch.randn(2, 3, 8, 8, dtype=torch.float64), keep_of(2, 16, 4)
    said = model(images, keep)
    part, places, prefix = model.decoder, sincos((4, 4), 8).double(), config.prefix
    encoded = part.embed(model.encoder.forward_features(images, keep=keep))
    for b in range(2):
        rows = [*encoded[b, :prefix]]
        kept = keep[b].tolist()
        for n in range(16):
            rows.append((encoded[b, prefix + kept.index(n)] if n in kept else part.mask_token) + places[n])
        x = torch.stack(rows)[None]
        for block in part.blocks:
            x = block(x)
        hidden = [n for n in range(16) if n not in kept]
        torch.testing.assert_close(said[b], part.head(part.norm(x))[0, [prefix + n for n in hidden]])


def test_hidden_patches_have_no_influence():
    model, images, keep = (
        make(masked_autoencoder(vit(), **DECODER)),
        torch.randn(2, 1, 8, 8).double(),
        keep_of(2, 16, 4),
    )
    patches = patches_of(images, 2)
    other = patches.scatter(1, hidden_patches(keep, 16)[..., None].expand(-1, -1, 4), 9.0)
    assert torch.equal(model(images, keep), model(images_of(other, 2, (8, 8)), keep))
    seen = patches.scatter(1, keep[..., None].expand(-1, -1, 4), 9.0)
    assert not torch.allclose(model(images, keep), model(images_of(seen, 2, (8, 8)), keep), atol=1e-3)


def test_patches_are_cut_row_by_row():
    images = torch.randn(2, 3, 6, 4)
    patches = patches_of(images, 2)
    assert patches.shape == (2, 6, 12)
    for n in range(6):
        top, left = n // 2 * 2, n % 2 * 2
        assert torch.equal(patches[:, n], images[:, :, top : top + 2, left : left + 2].flatten(1))
    assert torch.equal(images_of(patches, 2, (6, 4)), images)
    odd = torch.randn(1, 1, 5, 3)
    assert torch.equal(images_of(patches_of(odd, 2), 2, (5, 3)), odd)


@pytest.mark.parametrize("normalise", [True, False])
def test_the_loss_is_the_equation(normalise):
    """In numpy, patch by patch: the mean over hidden patches of the mean squared error of their pixels."""
    images, keep = torch.randn(2, 3, 4, 6, dtype=torch.float64), keep_of(2, 6, 2)
    said, hidden = torch.randn(2, 4, 12, dtype=torch.float64), hidden_patches(keep, 6)
    errors = []
    for b in range(2):
        for j, n in enumerate(m for m in range(6) if m not in keep[b].tolist()):
            assert hidden[b, j] == n
            x = images[b, :, n // 3 * 2 : n // 3 * 2 + 2, n % 3 * 2 : n % 3 * 2 + 2].numpy().reshape(-1)
            if normalise:
                x = (x - x.mean()) / np.sqrt(((x - x.mean()) ** 2).sum() / 11 + 1e-6)
            errors.append(((said[b, j].numpy() - x) ** 2).mean())
    targets = pixel_targets(images, hidden, 2, normalise=normalise)
    assert pixel_loss(said, targets).item() == pytest.approx(np.mean(errors), rel=1e-12)
    half = pixel_loss(said.bfloat16(), targets.float())
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(np.mean(errors), rel=0.02)


def test_gradients_of_the_loss():
    images, keep = torch.randn(1, 1, 4, 4, dtype=torch.float64), torch.tensor([[0, 3]])
    hidden = hidden_patches(keep, 4)
    said = torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: pixel_loss(x, pixel_targets(images, hidden, 2)), said)
    model = make(masked_autoencoder(vit(image_size=(4, 4), dim=8, layers=1), mask_ratio=0.5, **DECODER))
    pixels = images.clone().requires_grad_()  # through the encoder, and through the targets
    assert torch.autograd.gradcheck(lambda x: pixel_loss(model(x, keep), pixel_targets(x, hidden, 2)), pixels)
    model.train()
    pixel_loss(model(images, keep), pixel_targets(images, hidden, 2)).backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None or not bool(p.grad.isfinite().all())]


def test_constant_patches_are_predicted_as_zero():
    targets = pixel_targets(torch.full((1, 1, 4, 4), 0.3), torch.arange(4)[None], 2)
    assert float(targets.abs().max()) < 1e-3


def test_masks_are_drawn_evenly_and_kept_in_order():
    assert [kept_count(n, ratio) for n, ratio in ((196, 0.75), (16, 0.75), (10, 0.9), (16, 0.8))] == [49, 4, 1, 3]
    keep = kept_patches(torch.rand(4000, 8, generator=torch.Generator().manual_seed(0)), 2)
    assert bool((keep.diff(dim=1) > 0).all())
    shares = torch.bincount(keep.flatten(), minlength=8) / 4000
    assert float((shares - 0.25).abs().max()) < 0.03
    assert torch.equal(draws_of([7, 3], 5)[1], draws_of([3], 5)[0])
    assert torch.equal(hidden_patches(torch.tensor([[1, 2]]), 5), torch.tensor([[0, 3, 4]]))


def test_a_reconstruction_keeps_what_was_seen():
    """Predicted patches are scaled back by their own moments: a perfect prediction is the image."""
    model, images, keep = (
        make(masked_autoencoder(vit(), **DECODER)),
        torch.randn(2, 1, 8, 8).double(),
        keep_of(2, 16, 4),
    )
    made, hidden = model.reconstruct(images, keep), hidden_patches(keep, 16)
    at = lambda x, index: patches_of(x, 2).gather(1, index[..., None].expand(-1, -1, 4))  # noqa: E731  (patches there)
    assert torch.equal(at(made, keep), at(images, keep))
    true = at(images, hidden)
    said = (at(made, hidden) - true.mean(-1, keepdim=True)) / (true.var(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(said, model(images, keep))
    model.forward = lambda x, kept: pixel_targets(x, hidden_patches(kept, 16), 2)
    torch.testing.assert_close(model.reconstruct(images, keep), images)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mask_ratio": 0.0}, "mask_ratio must be in (0, 1) and keep 1 to 15 of the 16 patches, got 0.0"),
        ({"mask_ratio": 1.0}, "mask_ratio must be in (0, 1) and keep 1 to 15 of the 16 patches, got 1.0"),
        ({"mask_ratio": 0.97}, "keep 1 to 15 of the 16 patches, got 0.97"),
        ({"mask_ratio": float("nan")}, "got nan"),
        ({"decoder_dim": 6}, "decoder_dim must be a positive multiple of 4, got 6"),
        ({"decoder_layers": 0}, "decoder_mixers must hold 1 to decoder_layers=0 specs, got 1"),
        ({"patch": 1}, "normalise=true needs patches of at least 2 values"),
        ({"classes": 10}, "classes must be 0, got 10"),
    ],
)
def test_a_config_out_of_range_is_one_line(options, said):
    own = {k: v for k, v in vit().to_json().items() if k not in ("kind", "classes")}
    with pytest.raises(MixerError) as why:
        MAEConfig(**{**own, **DECODER, **options})
    assert said in str(why.value)
    assert "\n" not in str(why.value)


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        ([[0, 16]], "keep must be patches in 0..15, got 0 to 16"),
        ([[-1, 3]], "keep must be patches in 0..15, got -1 to 3"),
        ([[3, 3]], "ascending order, each once"),
        ([[5, 3]], "ascending order, each once; sort it"),
        ([list(range(16))], "keep must be (batch, 1 to 15 of 16 patches), got (1, 16)"),
        ([[]], "keep must be (batch, 1 to 15 of 16 patches), got (1, 0)"),
    ],
)
def test_kept_positions_out_of_range_are_one_line(keep, said):
    model = build_model(masked_autoencoder(vit(), **DECODER))
    with pytest.raises(MixerError) as why:
        model(torch.randn(1, 1, 8, 8), torch.tensor(keep, dtype=torch.long))
    assert said in str(why.value)


def config(model=None, **loop) -> RunConfig:
    given = {"steps": 4, "batch_size": 8, "log_every": 2, "eval_every": 2, "save_every": 2, "eval_images": 30}
    model = masked_autoencoder(vit(), **DECODER) if model is None else model
    data = ImageDataConfig(augment=Augment(crop="pad", pad=1))
    optim = OptimConfig(lr=3e-3, warmup=2, schedule="constant")
    return RunConfig(model, data, optim, TrainConfig(**{**given, "threads": 1, "device": "cpu", "keep": 9, **loop}))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mae") / "pretrained"
    train(config(), folder)
    return folder


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, pretrained):
    """Masks are functions of the seed and the step; those of evaluations of the image's place."""
    train(config(steps=2), tmp_path / "parts")
    resume(tmp_path / "parts", changes={"train.steps": 4})
    timing = ("seconds", "images_per_s", "peak_mib")
    lines = [
        [{k: v for k, v in x.items() if k not in timing} for x in RunDir(folder).read_metrics()]
        for folder in (pretrained, tmp_path / "parts")
    ]
    assert lines[0] == lines[1]
    whole, parts = (load_run(folder)[0].state_dict() for folder in (pretrained, tmp_path / "parts"))
    assert all(torch.equal(whole[k], parts[k]) for k in whole)
    train(config(accumulate=2, steps=2), tmp_path / "other")  # the same batches, in two parts
    halves, parts = load_run(tmp_path / "other")[0].state_dict(), load_run(pretrained, step=2)[0].state_dict()
    assert all(torch.allclose(halves[k], parts[k], atol=1e-6) for k in halves)


def test_every_step_hides_other_patches_and_evaluations_the_same():
    task = open_task(config())
    (first, targets), (again, _), (later, _) = task.batch(0), task.batch(0), task.batch(1)
    assert torch.equal(first.keep, again.keep)
    assert not torch.equal(first.keep, later.keep)
    assert len({tuple(row) for row in first.keep.tolist()}) > 1
    assert targets.shape == (8, 12, 4)
    torch.testing.assert_close(targets, pixel_targets(first.images, hidden_patches(first.keep, 16), 2))


def test_a_run_is_scored_by_its_pixel_loss(pretrained):
    model, _ = load_run(pretrained)
    score = evaluate_run(pretrained, record=False, max_images=20)
    task = open_task(config(eval_batch=7))
    assert task.evaluate(model, "test", max_images=20).pixel_loss == pytest.approx(score.pixel_loss, rel=1e-6)
    images = (task.images.split("test").pixels[:20].float() / 255 - 0.5) / 0.5
    keep = kept_patches(draws_of(range(20), 16), 4)
    targets = pixel_targets(images, hidden_patches(keep, 16), 2)
    with torch.no_grad():
        assert score.pixel_loss == pytest.approx(float(pixel_loss(model(images, keep), targets)), rel=1e-5)
    assert score.mean_loss == pytest.approx(float(targets.square().mean()), rel=1e-5)
    assert (score.hidden, score.images) == (0.75, 20)
    assert f"pixel loss {score.pixel_loss:.4f} (a prediction of 0: {score.mean_loss:.4f}) with 75 % of" in score.text()
    line = [x for x in RunDir(pretrained).read_metrics() if x["kind"] == "eval"][-1]
    assert {"pixel_loss", "mean_loss", "hidden"} <= set(line)
    table = summary_table([read_run(pretrained)])
    assert "valid pixel loss" in table.columns


def test_a_classifier_starts_from_the_encoder(pretrained, tmp_path):
    source, _ = load_run(pretrained)
    model = build_model(vit(classes=10))
    head = model.head.weight.clone()
    start_from(model, pretrained)
    own = model.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in source.encoder.state_dict().items())
    assert torch.equal(model.head.weight, head)
    assert set(own) - set(source.encoder.state_dict()) == {"head.weight", "head.bias"}
    tuned = replace(config(vit(classes=10), init=str(pretrained), steps=1), optim=OptimConfig(lr=1e-5, warmup=0))
    train(tuned, tmp_path / "tuned")
    found = load_run(tmp_path / "tuned")[0].state_dict()
    assert float((found["patch.weight"] - source.state_dict()["encoder.patch.weight"]).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dim": 32}, "it has model.dim=16 (not 32)."),
        ({"layers": 3}, "it has model.layers=2 (not 3)."),
        ({"pool": "class"}, "it has model.pool='mean' (not 'class')."),
        ({"image_size": (16, 16)}, "it has model.image_size=[8, 8] (not [16, 16])."),
        ({"registers": 2, "patch": 4}, "it has model.patch=2 (not 4), model.registers=0 (not 2)."),
    ],
)
def test_an_encoder_of_another_shape_is_one_line(options, said, pretrained):
    with pytest.raises(MixerError) as why:
        start_from(build_model(vit(classes=10, **options)), pretrained)
    assert str(why.value) == f"{pretrained}: the encoder that was trained there does not fit the model: {said}"


def test_convert_reads_the_encoder_and_resizes_it(pretrained, tmp_path, capsys):
    spec = json.dumps({"name": "hydra"})
    assert cli.main(["convert", str(pretrained), spec, "--classes", "10", "--out", str(tmp_path / "hydra")]) == 0
    assert "hydra" in capsys.readouterr().out.lower()
    model = build_model(vit({"name": "hydra"}, classes=10))
    start_from(model, tmp_path / "hydra")
    source, _ = load_run(pretrained)
    assert torch.equal(model.blocks[0].mlp.up.weight, source.encoder.blocks[0].mlp.up.weight)


def test_what_needs_labels_is_refused():
    given = config()
    for data in (
        ImageDataConfig(loss="bce"),
        ImageDataConfig(smoothing=0.1),
        ImageDataConfig(augment=Augment(mixup=0.8)),
        ImageDataConfig(augment=Augment(cutmix=1.0)),
    ):
        with pytest.raises(MixerError, match="a masked autoencoder has no labels; leave out data.loss, data.smooth"):
            replace(given, data=data)
    with pytest.raises(MixerError, match="optim.layer_decay=0.75 is for training from given weights"):
        replace(given, optim=OptimConfig(layer_decay=0.75))


def test_layer_decay_holds_under_muon_too():
    model = build_model(vit(classes=10))
    names = {id(p): n for n, p in model.named_parameters()}
    given = OptimConfig(name="muon", lr=1e-3, muon_lr=0.02, layer_decay=0.5)
    optimizers = build_optimizers(model, given)
    set_rates(optimizers, 1e-3)
    rates = {names[id(p)]: g["lr"] for o in optimizers for g in o.param_groups for p in g["params"]}
    assert rates["blocks.1.mlp.up.weight"] == pytest.approx(0.01)
    assert rates["blocks.0.mlp.up.weight"] == pytest.approx(0.005)
    assert rates["blocks.0.mlp.up.bias"] == pytest.approx(0.25e-3)
    assert rates["patch.weight"] == pytest.approx(0.125e-3)
    assert rates["head.weight"] == pytest.approx(1e-3)


def test_a_text_classifier_s_head_has_the_full_rate_too():
    model = build_model(EncoderConfig(dim=8, max_len=4, mixers=(ATTENTION,), vocab=9, classes=3))
    names = {id(p): n for n, p in model.named_parameters()}
    groups = parameter_groups(model, OptimConfig(layer_decay=0.5))
    scale = {names[id(p)]: g["scale"] for g in groups for p in g["params"]}
    assert (scale["classifier.weight"], scale["blocks.0.mlp.up.weight"]) == (1.0, 0.5)


def test_the_recipe_as_printed():
    paper = RECIPES["livt_pretrain"].config(size="paper")
    model, optim, loop, data = paper.model, paper.optim, paper.train, paper.data
    assert (model.dim, model.layers, model.patch, model.image_size) == (768, 12, 16, (224, 224))
    assert (model.decoder_dim, model.decoder_layers, model.mask_ratio, model.normalise) == (512, 8, 0.75, True)
    assert (model.specs()[0], model.decoder_mixers) == (
        {"name": "attention", "heads": 12},
        ({"name": "attention", "heads": 16},),
    )
    assert (loop.batch_size, loop.steps, optim.warmup) == (4096, 800 * (115_846 // 4096), 40 * (115_846 // 4096))
    assert (optim.name, optim.betas, optim.weight_decay, optim.schedule) == ("adamw", (0.9, 0.95), 0.05, "cosine")
    assert (optim.lr, optim.min_lr_ratio) == (pytest.approx(1.5e-4 * 16), 0.0)
    assert (data.augment.crop, data.augment.flip, data.long_tail) == ("resized", 0.5, None)


@pytest.mark.parametrize("size", ["smoke", "gpu"])
@pytest.mark.parametrize(
    ("row", "tuned"),
    [("attention", "balanced_bce"), ("aft_conv", "aft_conv/balanced_bce"), ("hydra", "hydra/balanced_bce")],
)
def test_the_long_tail_recipe_starts_from_its_runs(row, tuned, size):
    first, second = RECIPES["livt_pretrain"].config(row, size), RECIPES["livt_cifar10_lt"].config(tuned, size)
    assert replace(second.model, classes=0, drop_path=0.0) == first.model.encoder
    assert (first.data.source, first.data.valid, first.data.long_tail) == (
        second.data.source,
        second.data.valid,
        second.data.long_tail,
    )


@pytest.mark.parametrize("size", ["gpu", "paper"])
@pytest.mark.parametrize("row", ["attention", "aft_conv", "hydra"])
def test_the_second_stage_on_imagenet_starts_from_the_first(row, size):
    tuned = "balanced_bce" if row == "attention" else f"{row}/balanced_bce"
    first = RECIPES["livt_pretrain"].config(row, "paper")
    second = RECIPES["livt_imagenet_lt"].config(tuned, size)
    assert replace(second.model, classes=0, drop_path=0.0) == first.model.encoder
    assert (first.data.source, first.data.valid) == (second.data.source, second.data.valid)
    with torch.device("meta"):
        model, pretrained = build_model(second.model), build_model(first.model)
    assert {n: t.shape for n, t in model.state_dict().items() if not n.startswith("head.")} == {
        n: t.shape for n, t in pretrained.encoder.state_dict().items()
    }


def test_the_second_stage_on_imagenet_as_printed():
    paper, gpu = (RECIPES["livt_imagenet_lt"].config(size=size) for size in ("paper", "gpu"))
    optim, loop, data = paper.optim, paper.train, paper.data
    assert (loop.batch_size, loop.steps, optim.warmup) == (1024, 100 * (115_846 // 1024), 10 * (115_846 // 1024))
    assert (optim.name, optim.betas, optim.weight_decay, optim.layer_decay) == ("adamw", (0.9, 0.99), 0.05, 0.75)
    assert (optim.lr, optim.schedule, optim.lr * optim.min_lr_ratio) == (1e-3, "cosine", pytest.approx(1e-6))
    assert (data.loss, data.loss_tau, data.smoothing, data.long_tail) == ("balanced_bce", 1.0, 0.1, None)
    assert (data.augment.mixup, data.augment.cutmix, data.augment.erasing) == (0.8, 1.0, 0.25)
    assert (paper.model.classes, paper.model.pool, paper.model.drop_path) == (1000, "mean", 0.1)
    assert (gpu.train.batch_size, gpu.optim.lr) == (256, 2.5e-4)


def test_data_give_the_model_its_size_but_no_classes(tmp_path):
    images = tmp_path / "set"
    for split in ("train", "val"):
        for label in "ab":
            folder = images / split / label
            folder.mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (12, 8), (40 * i, 0, 9)).save(folder / f"{i}.png")
    given = config()
    matched = match_data(replace(given, data=ImageDataConfig(source=str(images), valid=1))).model
    assert (matched.channels, matched.classes, matched.image_size) == (3, 0, (8, 12))


def test_pages_and_files_show_reconstructions(pretrained, tmp_path):
    page = write_report([pretrained], tmp_path / "page.html").read_text()
    assert page.index("Reconstructions") < page.index("Token norms")
    assert "12 of 16 patches hidden; mean squared error" in page
    Image.new("L", (20, 20), 90).save(tmp_path / "grey.png")
    command = ["look", "images", str(pretrained), str(tmp_path / "grey.png"), "--out", str(tmp_path / "drawn")]
    assert cli.main(command) == 0
    assert (tmp_path / "drawn" / "reconstructions.png").is_file()


def test_reconstructions_are_the_model_s(pretrained):
    model, _ = load_run(pretrained)
    images = torch.randn(3, 1, 8, 8)
    (picture,) = reconstruction_pictures(model, images, ["a", "b", "c"])
    keep = kept_patches(draws_of(range(3), 16), 4)
    with torch.no_grad():
        error = pixel_loss(model(images, keep), pixel_targets(images, hidden_patches(keep, 16), 2))
    assert f"mean squared error {float(error):.3f}" in picture.caption
    assert "which the model is not told" in picture.caption
    assert enlarge_image(images[0]).shape == (1, 112, 112)
    assert torch.equal(enlarge_image(images[0])[:, ::14, ::14], images[0])


def test_the_recipes_run_one_after_the_other(tmp_path, capsys):
    small = ["--train.steps", "2", "--train.batch_size", "8", "--train.threads", "1", "--train.eval_images", "40"]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert cli.main(["train", "livt_pretrain", "--size", "smoke", *small, "--out", first]) == 0
    assert "pixel loss" in capsys.readouterr().out
    assert RunDir(first).env()["images"]["images"] == [sum(long_tail_counts(142, 10, 100)), 180, 180]
    tuned = ["--train.init", first, "--optim.layer_decay", "0.75"]
    assert cli.main(["train", "livt_cifar10_lt", "--size", "smoke", *small, *tuned, "--out", second]) == 0
    wide = ["--train.init", first, "--model.dim", "32", "--out", str(tmp_path / "third")]
    assert cli.main(["train", "livt_cifar10_lt", "--size", "smoke", *small, *wide]) == 2
    assert "does not fit the model: it has model.dim=64 (not 32)" in capsys.readouterr().err
