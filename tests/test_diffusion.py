"""Diffusion transformers: the flow's loss and solver by their definitions, guidance, training to the bit, pictures."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from page_checks import check_page
from tokenmix import MixerError
from tokenmix.lab import cli
from tokenmix.lab.data import Augment
from tokenmix.lab.data.augment import as_bytes, normalise
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.report import read_run, write_report
from tokenmix.lab.train import (
    ImageDataConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    draw_run,
    evaluate_run,
    generate_run,
    load_run,
    match_data,
    resume,
    train,
)
from tokenmix.lab.train.flow_task import BUCKETS
from tokenmix.lab.train.rundir import RunDir
from tokenmix.lab.train.tasks import open_task
from tokenmix.models import DiTConfig, build_model
from tokenmix.models.flow import add_noise, guide_velocity, path_velocity, solve_flow, squared_errors

RECIPE = RECIPES["image_diffusion"]
CONV = {"name": "aft_conv", "heads": 4, "kernel_size": 3}
NAMES = [str(i) for i in range(10)]


def dit(**options) -> DiTConfig:
    given = {"dim": 16, "layers": 2, "mixers": (CONV,), "image_size": (8, 8), "channels": 1, "classes": 10}
    return DiTConfig(**{**given, **options})


def config(model=None, *, data=None, **loop) -> RunConfig:
    given = {"steps": 8, "batch_size": 8, "log_every": 2, "eval_every": 4, "save_every": 2, "threads": 1}
    given |= {"device": "cpu", "eval_images": 20, "eval_batch": 7, "samples": 12}
    optim = OptimConfig(lr=3e-3, warmup=2, ema=0.5, schedule="constant")
    data = data or ImageDataConfig(augment=Augment(crop="pad", pad=1, flip=0.5))
    return RunConfig(model or dit(), data, optim, TrainConfig(**{**given, **loop}))


def perturbed(model, std=0.05):
    """The model with noise on every parameter, so that no gate is 0."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += std * torch.randn(parameter.shape, generator=g)
    return model.eval()


def test_the_loss_is_the_literal_one():
    """Over single numbers in float64: the square of v - (e - x), at x_t = (1 - t) x + t e, with the task's draws."""
    task = open_task(config())
    (x_t, time, classes), target = task.batch(3)
    images, labels = task.sampler.batch(3)
    out = torch.randn(target.shape, generator=torch.Generator().manual_seed(0))
    total = 0.0
    for b, c, i, j in np.ndindex(*x_t.shape):
        x, t, point = float(images[b, c, i, j]), float(time[b]), float(x_t[b, c, i, j])
        e = (point - (1 - t) * x) / t
        total += (float(out[b, c, i, j]) - (e - x)) ** 2
    assert task.loss(out, target).item() == pytest.approx(total / x_t.numel(), rel=1e-4)
    assert set(classes[classes != labels].tolist()) <= {10}
    assert images.min() >= -1
    assert images.max() <= 1


def test_draws_are_those_that_the_flow_says():
    """Uniform times, noise of mean 0 and variance 1, a tenth of the classes hidden: over 2,000 images, to 5 sigma."""
    task = open_task(config(batch_size=2000))
    (x_t, time, classes), target = task.batch(0)
    images, _ = task.sampler.batch(0)
    e = target + images
    n = e.numel()
    assert abs(float(time.mean()) - 0.5) < 5 * 12**-0.5 / 2000**0.5
    assert abs(float(time.var()) - 1 / 12) < 0.01
    assert abs(float(e.mean())) < 5 / n**0.5
    assert abs(float(e.var()) - 1) < 5 * (2 / n) ** 0.5
    assert abs(float((classes == 10).float().mean()) - 0.1) < 5 * (0.09 / 2000) ** 0.5
    assert torch.allclose(x_t, add_noise(images, e, time), atol=1e-5)
    assert not torch.equal(open_task(config()).batch(0)[1], open_task(config()).batch(1)[1])


def test_a_path_runs_from_images_to_noise_at_its_velocity():
    x, e = torch.randn(2, 3, 4, 4, 4, dtype=torch.float64)
    assert torch.equal(add_noise(x, e, torch.zeros(3)), x)
    assert torch.equal(add_noise(x, e, torch.ones(3)), e)
    h, t = 1e-3, torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    slope = (add_noise(x, e, t + h) - add_noise(x, e, t - h)) / (2 * h)
    assert torch.allclose(slope, path_velocity(x, e), atol=1e-9)
    assert squared_errors(x, e).tolist() == pytest.approx([float(((x - e)[i] ** 2).mean()) for i in range(3)])


MEAN, STD = 0.7, 0.3


def gaussian_velocity(x, t):
    """E[e - x | x_t] for images from N(MEAN, STD^2), in closed form."""
    t = t[:, None]
    variance = (1 - t) ** 2 * STD**2 + t**2
    return (t - (1 - t) * STD**2) / variance * (x - (1 - t) * MEAN) - MEAN


@pytest.mark.parametrize(("solver", "order", "bound"), [("euler", 1, 1.0), ("heun", 2, 10.0)])
def test_the_solver_reaches_the_mean_and_the_variance_of_gaussian_images(solver, order, bound):
    """The exact flow maps e to MEAN + STD e. Errors are at most bound / steps^order, and fall by 2^order at twice the
    steps, to 15 %."""
    e = torch.randn(4000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    errors = []
    for steps in (32, 64, 128):
        x = solve_flow(gaussian_velocity, e, steps=steps, solver=solver)
        assert abs(float(x.mean()) - (MEAN + STD * float(e.mean()))) < bound / steps**order
        errors.append(abs(float(x.std()) - STD * float(e.std())))
        assert errors[-1] < bound / steps**order
        assert float((x - MEAN - STD * e).abs().max()) < 5 * bound / steps**order
    for coarse, fine in zip(errors, errors[1:], strict=False):
        assert coarse / fine == pytest.approx(2**order, rel=0.15)


def test_guidance_goes_beyond_the_class_by_its_weight():
    a, b = torch.randn(2, 5)
    assert torch.equal(guide_velocity(a, b, 0.0), b)
    assert torch.allclose(guide_velocity(a, b, 1.0), a)
    assert torch.allclose(guide_velocity(a, b, 3.0), a + 2 * (a - b), atol=1e-6)


def test_samples_follow_the_guided_velocity():
    """One Euler step is e - v(e, 1) of the guided velocity, computed here from two calls of the model."""
    model, classes = perturbed(build_model(dit())), torch.tensor([3, 7])
    noise = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    one, none = (model(noise, torch.ones(2), c) for c in (classes, torch.tensor([10, 10])))
    for weight in (1.0, 0.0, 4.0):
        found = model.sample(2, classes, steps=1, solver="euler", guidance=weight, seed=5)
        assert torch.allclose(found, noise - (none + weight * (one - none)), atol=1e-5)
    assert not torch.allclose(one, none, atol=1e-3)
    assert torch.equal(model.sample(2, steps=3, seed=1), model.sample(2, torch.tensor([10, 10]), steps=3, seed=1))
    assert not torch.equal(model.sample(2, steps=3, seed=1), model.sample(2, steps=3, seed=2))


@pytest.mark.parametrize("row", RECIPE.rows)
def test_time_and_class_change_what_a_model_says(row):
    """Not at first, as the gates and the head are 0, but once they are perturbed; and each patch reaches the others."""
    model = build_model(RECIPE.config(row).model).eval()
    x, t, c = torch.randn(2, 1, 8, 8), torch.tensor([0.2, 0.8]), torch.tensor([1, 2])
    assert not model(x, t, c).any()
    before = perturbed(model)(x, t, c)
    for changed in ((x, t.flip(0), c), (x, t, c.flip(0)), (x, t, torch.full_like(c, 10))):
        assert not torch.allclose(model(*changed), before, atol=1e-4)
    other = x.clone()
    other[:, :, :2, :2] += 3.0
    assert not torch.allclose(model(other, t, c)[:, :, 4:, 4:], before[:, :, 4:, 4:], atol=1e-5)
    assert torch.allclose(model(x[1:], t[1:], c[1:]), before[1:], atol=1e-5)


def test_a_new_block_is_the_identity_and_its_norms_have_no_weights():
    model = build_model(dit())
    x, c = torch.randn(2, 16, 16), torch.randn(2, 16)
    assert torch.equal(model.blocks[0](x, c, grid=(4, 4), prefix=0), x)
    assert not [name for name, _ in model.named_parameters() if "norm" in name and "mixer.norm" not in name]


def test_a_block_is_its_equation():
    block = perturbed(build_model(dit(mixers=({"name": "aft_simple"},)))).blocks[1]
    x, c = torch.randn(2, 16, 16), torch.randn(2, 16)
    b1, s1, g1, b2, s2, g2 = (c @ block.modulation.weight.T + block.modulation.bias)[:, None].chunk(6, -1)
    norm = lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()  # noqa: E731
    y = x + g1 * block.mixer(norm(x) * (1 + s1) + b1)
    y = y + g2 * block.mlp(norm(y) * (1 + s2) + b2)
    assert torch.allclose(block(x, c), y, atol=1e-5)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "whole"
    return path, train(config(csv=True), path)


def test_a_stopped_run_goes_on_to_the_same_bits(run, tmp_path):
    train(config(steps=4), tmp_path / "parts")
    resume(tmp_path / "parts", changes={"train.steps": 8})
    timing = ("seconds", "images_per_s", "peak_mib")
    kept = [
        [{k: v for k, v in x.items() if k not in timing} for x in RunDir(path).read_metrics()]
        for path in (run[0], tmp_path / "parts")
    ]
    assert kept[0] == kept[1]
    for file in ("model.safetensors", "ema.safetensors"):
        a, b = (RunDir.open(p).checkpoints / "step_00000008" / file for p in (run[0], tmp_path / "parts"))
        assert a.read_bytes() == b.read_bytes(), file


def test_held_out_images_are_scored_by_time(run):
    """As computed here image by image; the score depends neither on the batches nor on the run's seed."""
    path, summary = run
    score = evaluate_run(path, split="valid", max_images=20, device="cpu", record=False)
    assert score.flow_loss == pytest.approx(summary["valid_flow_loss"], rel=1e-6)
    assert list(score.by_noise) == ["0-20", "20-40", "40-60", "60-80", "80-100"]
    assert sum(score.by_noise.values()) / BUCKETS == pytest.approx(score.flow_loss)
    from tokenmix.lab.train.flow_task import held_out_draws

    model, found = load_run(path)
    other = open_task(replace(found, train=replace(found.train, eval_batch=20, seed=9)))
    assert other.evaluate(model, "valid", max_images=20).by_noise == pytest.approx(score.by_noise, rel=1e-5)
    split, errors, zeros = other.images.split("valid"), np.zeros((20, BUCKETS)), []
    for i in range(20):
        x = 2 * split.image(i)[None].float() / 255 - 1
        for k, (t, e) in enumerate(held_out_draws([i], x.shape[1:])):
            assert k / BUCKETS <= float(t) < (k + 1) / BUCKETS
            with torch.no_grad():
                v = model((1 - t) * x + t * e, t, split.labels[i : i + 1])
            errors[i, k] = float((v - (e - x)).double().square().mean())
            zeros.append(float((e - x).double().square().mean()))
    assert list(score.by_noise.values()) == pytest.approx(errors.mean(0).tolist(), rel=1e-5)
    assert score.zero_loss == pytest.approx(sum(zeros) / len(zeros), rel=1e-5)
    assert "by share of noise 0-20 %" in score.text()
    assert "by_noise.20-40" in (path / "metrics.csv").read_text().splitlines()[0].split(",")


def test_bytes_come_back_from_normalised_images():
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    mean, std = (0.1, 0.5, 0.4), (0.2, 0.5, 0.3)
    assert torch.equal(as_bytes(normalise(images, mean, std), mean, std), images)
    assert as_bytes(torch.tensor([[[[-9.0, 9.0]]]]), (0.5,), (0.5,)).tolist() == [[[[0, 255]]]]


def test_generating_names_the_classes(run):
    path, _ = run
    drawn, names = generate_run(path, n=4, classes=["7", "2"], steps=2, seed=3, device="cpu")
    assert (drawn.dtype, drawn.shape, names) == (torch.uint8, (4, 1, 8, 8), ["7", "2", "7", "2"])
    model, _ = load_run(path)
    images = model.sample(4, torch.tensor([7, 2, 7, 2]), steps=2, seed=3)
    assert torch.equal(drawn, ((images + 1) * 127.5).round().clamp(0, 255).byte())
    assert generate_run(path, n=12, steps=1, device="cpu")[1] == [*NAMES, "0", "1"]


def test_sample_writes_a_picture(run, tmp_path, capsys):
    path, out = run[0], tmp_path / "drawn.png"
    asked = ["sample", str(path), "--images", "20", "--seed", "1", "--out", str(out), "--device", "cpu"]
    fast = ["--solver-steps", "2"]
    assert cli.main([*asked, *fast]) == 0
    assert capsys.readouterr().out == f"{out} (columns: {', '.join(NAMES)})\n"
    first = np.asarray(Image.open(out))
    assert first.shape == (4 * 17, 4 * 89)
    assert cli.main([*asked, *fast, "--guidance", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"images": 20, "file": str(out), "classes": 2 * NAMES}
    assert not np.array_equal(first, np.asarray(Image.open(out)))
    assert cli.main([*asked, "--solver", "euler", "--classes", "4"]) == 0
    assert capsys.readouterr().out == f"{out} (class 4)\n"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--classes", "3", "12"], "has no class '12'; nearest: "),
        (["--solver-steps", "0"], "the number of steps must be an integer of at least 1, got 0"),
        (["--images", "0"], "the number of images must be positive, got 0"),
        (["--temperature", "1"], "--temperature is for density and language models; "),
        (["--complete"], "--complete is for density and language models; "),
        (["--beams", "2"], "--beams is for encoder-decoders; "),
        (["--step", "3"], "step 3"),
    ],
)
def test_wrong_requests_are_one_line(run, capsys, options, says):
    assert cli.main(["sample", str(run[0]), *options]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_runs_that_draw_nothing_say_so_of_images(run, tmp_path, capsys):
    from test_image_training import config as classifier
    from test_segmentation_training import config as segmenter

    for name, one in (("vit", classifier(steps=1)), ("segmentation", segmenter(steps=1, samples=0))):
        train(one, tmp_path / name, verbose=False)
        assert cli.main(["sample", str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert f"holds a model of kind '{name}', which generates no images; density models and diffusion" in said
        assert "text" not in said
        assert said.count("\n") == 1
        with pytest.raises(MixerError, match="which is no diffusion transformer"):
            generate_run(tmp_path / name)
    assert cli.main(["sample", str(tmp_path / "vit"), "--guidance", "2"]) == 2
    assert "--guidance is for diffusion transformers; " in capsys.readouterr().err
    with pytest.raises(MixerError, match="kind 'dit', which generate_run samples"):
        draw_run(run[0])


def test_a_model_without_classes_trains_and_is_asked_for_none(tmp_path):
    train(config(dit(classes=0, positions=None), steps=2), tmp_path / "run")
    drawn, names = generate_run(tmp_path / "run", n=3, steps=2, device="cpu")
    assert (len(drawn), names) == (3, [])
    with pytest.raises(MixerError, match="is told no class .model.classes=0.; leave the classes out"):
        generate_run(tmp_path / "run", classes=["1"], device="cpu")
    with pytest.raises(MixerError, match="guidance=2.0 needs .* has model.classes=0; leave guidance at 1"):
        generate_run(tmp_path / "run", guidance=2.0, device="cpu")


def test_the_page_shows_samples_and_the_loss_by_noise(run, tmp_path):
    path, _ = run
    picture = np.asarray(Image.open(sorted((path / "samples").glob("*.png"))[-1]))
    assert picture.shape == (4 * 17, 4 * 89)  # 12 images, a column for each class
    evaluate_run(path, device="cpu")
    page = write_report([path], tmp_path / "page.html")
    text = page.read_text()
    assert not check_page(page)
    for what in (
        "valid flow loss",
        "Flow loss by share of noise",
        "Images drawn",
        "drawn by the model from noise, one of each class in turn: 0, 1, 2",
        "squared error of the velocity",
        "2 x aft_conv",
    ):
        assert what in text, what
    assert len(read_run(path).last_eval("valid", "by_noise")) == BUCKETS


@pytest.mark.parametrize("row", RECIPE.rows)
def test_every_row_takes_a_smoke_step(row, tmp_path):
    fields = {"train.steps": 1, "train.batch_size": 2, "train.samples": 2, "train.eval_images": 4}
    summary = train(RECIPE.config(row, "smoke").override(fields), tmp_path / "run")
    assert summary["valid_flow_loss"] == pytest.approx(1.8, abs=0.4)  # of a velocity of 0: 1 and the pixels' square


def test_the_paper_s_training_as_printed():
    run = RECIPE.config("attention", "paper")
    optim, loop, model = run.optim, run.train, run.model
    assert (optim.name, optim.lr, optim.weight_decay, optim.schedule, optim.warmup, optim.ema) == (
        "adamw",
        1e-4,
        0.0,
        "constant",
        0,
        0.9999,
    )
    assert (loop.steps, loop.batch_size, run.data.augment) == (400_000, 256, Augment(flip=0.5))
    assert (model.layers, model.dim, model.mixers[0]["heads"], model.patch, model.class_dropout) == (
        12,
        768,
        12,
        2,
        0.1,
    )


def test_a_config_goes_to_json_and_back_and_takes_its_sizes_from_the_images():
    run = config()
    assert RunConfig.from_json(json.loads(json.dumps(run.to_json()))) == run
    told = match_data(config(dit(classes=3, channels=3, image_size=(16, 16)))).model
    assert (told.classes, told.channels, told.image_size) == (10, 1, (8, 8))
    assert match_data(config(dit(classes=0))).model.classes == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model.patch": 16}, "must be multiples of patch=16"),
        ({"model.classes": 4}, "model.classes=4, but digits has 10 classes"),
        ({"model.class_dropout": 1.0}, "class_dropout must be in"),
        ({"model.positions": "rotary"}, "choose 'sinusoidal', 'learned' or null"),
        ({"model.dim": 18, "model.mixers": [{"name": "hydra"}]}, "dim must be a multiple of 4"),
        ({"data.augment.mixup": 0.5, "data.smoothing": 0.1}, "leave out data.smoothing, data.augment.mixup"),
        ({"data.loss": "bce"}, "leave out data.loss"),
    ],
)
def test_wrong_configs_are_one_line(change, says):
    with pytest.raises(MixerError, match=says) as why:
        open_task(config().override(change))
    assert "\n" not in str(why.value)


def test_images_smaller_than_a_patch_are_refused():
    with pytest.raises(MixerError, match="are 8 x 8, smaller than a patch of 16 x 16; set a smaller model.patch"):
        match_data(config(dit(patch=16, image_size=(32, 32))))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: m(torch.zeros(1, 1, 8, 6), torch.zeros(1)), "for images of 8 x 8, got 8 x 6"),
        (lambda m: m(torch.zeros(1, 3, 8, 8), torch.zeros(1)), "expects images"),
        (lambda m: m(torch.zeros(2, 1, 8, 8), torch.zeros(1)), r"time must be floating point of shape \(2,\)"),
        (lambda m: m(torch.zeros(1, 1, 8, 8), torch.zeros(1), torch.tensor([11])), r"classes must be in 0..10 \(10: n"),
        (lambda m: m.sample(2, torch.tensor([1])), r"classes must be integers of shape \(2,\)"),
        (lambda m: m.sample(-1), "n must be an integer >= 0"),
        (lambda m: m.sample(1, steps=0), "at least 1, got 0"),
        (lambda m: m.sample(1, steps=2.5), "at least 1, got 2.5"),
        (lambda m: m.sample(1, solver="rk4"), "choose 'euler' or 'heun'"),
        (lambda m: build_model(dit(class_dropout=0.0)).sample(1, guidance=2.0), "has model.class_dropout=0"),
    ],
)
def test_bad_input_is_refused(call, says):
    with pytest.raises(MixerError, match=says):
        call(build_model(dit()))
