"""Batches of images: order, augmentation, evaluation, sub-pixel sequences."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from image_sets import pixels_split, smooth_files
from tokenmix import MixerError
from tokenmix.lab.data import Augment, ImageSampler, ImageSplit, PixelSampler, eval_batches, open_images
from tokenmix.lab.data import augment_ops as ops
from tokenmix.lab.data.augment import IMAGENET_MEAN, IMAGENET_STD, stream
from tokenmix.lab.data.image_source import tensor_to_pil

RAND = "rand-m9-mstd0.5-inc1"
EVERYTHING = Augment(
    crop="pad", flip=0.5, shift=10, randaugment=RAND, colour=0.3, erasing=0.5, mixup=0.8, cutmix=1.0, repeats=3
)
PLAIN = {"mean": (0.0,) * 3, "std": (1.0,) * 3}


@pytest.fixture
def file_split(tmp_path) -> ImageSplit:
    return smooth_files(tmp_path)


def sampler(split, augment=Augment(), **options) -> ImageSampler:
    return ImageSampler(
        split, **{"classes": 4, "image_size": 8, "channels": 3, "batch_size": 4, "augment": augment, **PLAIN, **options}
    )


def levels(x: torch.Tensor) -> torch.Tensor:
    """The uint8 images that mean 0 and standard deviation 1 leave as x / 255."""
    return (x * 255).round().to(torch.uint8)


# --- order


@pytest.mark.parametrize("repeats", [1, 3])
def test_an_epoch_shows_each_image_once_or_repeats_times_in_a_row(repeats):
    s = sampler(pixels_split(10), Augment(repeats=repeats), batch_size=1)
    assert s.epoch == 10 * repeats
    epochs = [[s.indices(e * s.epoch + i)[0] for i in range(s.epoch)] for e in range(3)]
    for epoch in epochs:
        assert epoch == [i for i in epoch[::repeats] for _ in range(repeats)]
        assert sorted(epoch[::repeats]) == list(range(10))
    assert epochs[0] != epochs[1]
    assert sampler(pixels_split(10), Augment(repeats=repeats), batch_size=1, seed=1).indices(0) + epochs[0] != epochs[0]


def test_without_augmentation_a_batch_is_the_images():
    split = pixels_split(10)
    s = sampler(split, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    x, y = s.batch(1)
    chosen = s.indices(1)
    expected = (split.pixels[chosen].double() / 255 - torch.tensor(IMAGENET_MEAN).view(3, 1, 1)) / torch.tensor(
        IMAGENET_STD
    ).view(3, 1, 1)
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert torch.allclose(x.double(), expected, atol=1e-5)
    assert y.tolist() == split.labels[chosen].tolist()
    assert torch.equal(
        levels(sampler(split, channels=1, mean=(0.0,), std=(1.0,)).batch(1)[0]), ops_luma(split.pixels[chosen])
    )


def ops_luma(images: torch.Tensor) -> torch.Tensor:
    return torch.stack(
        [
            torch.from_numpy(np.asarray(Image.fromarray(i.permute(1, 2, 0).numpy()).convert("L")).copy())[None]
            for i in images
        ]
    )


@pytest.mark.parametrize("source", ["pixels", "files"])
@pytest.mark.parametrize("how", [Augment(flip=0.5, shift=9), Augment(crop="resized", erasing=0.5), EVERYTHING])
def test_a_batch_is_a_function_of_seed_and_step(file_split, source, how):
    split = file_split if source == "files" else pixels_split(10)
    a, b, other = (sampler(split, how, image_size=16, seed=s) for s in (5, 5, 6))
    b.batch(2)
    for step in (0, 7):
        first, again, third = a.batch(step), b.batch(step), other.batch(step)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])
        assert not torch.equal(first[0], third[0])
    assert not torch.equal(a.batch(0)[0], a.batch(10 * 3)[0]), "another epoch augments otherwise"


def test_worker_processes_give_the_same_batches(file_split):
    s = sampler(file_split, EVERYTHING, image_size=16)
    state = torch.get_rng_state()
    for (x, y), step in zip(stream(s, range(3, 6), workers=2), range(3, 6), strict=True):
        assert torch.equal(x, s.batch(step)[0])
        assert torch.equal(y, s.batch(step)[1])
    assert torch.equal(torch.get_rng_state(), state)


def test_global_generators_stand_where_they_stood(file_split):
    s = sampler(file_split, EVERYTHING, image_size=16)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    first = s.batch(0)[0]
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
    assert torch.equal(first, s.batch(0)[0]), "nor does a batch depend on them"


@pytest.mark.parametrize(
    "how",
    [
        Augment(crop="resized"),
        Augment(randaugment=RAND),
        Augment(colour=0.4),
        Augment(crop="pad"),
        Augment(erasing=1.0),
    ],
)
def test_an_image_is_augmented_anew_in_every_epoch(how):
    s = sampler(pixels_split(1, size=(32, 32)), how, image_size=32, batch_size=1)
    assert len({bytes(levels(s.batch(epoch)[0].clamp(0, 1)).flatten().tolist()) for epoch in range(4)}) >= 3


def test_repeated_images_are_augmented_differently():
    x, y = sampler(pixels_split(10), Augment(crop="pad", repeats=4)).batch(0)
    assert len(set(y.tolist())) == 1
    assert len({bytes(levels(i).flatten().tolist()) for i in x}) == 4


# --- each augmentation


def test_a_flip_is_a_mirror():
    images = pixels_split(400).pixels
    assert torch.equal(ops.flip(images, 1.0, ops.generator(0)), images.flip(-1))
    some = ops.flip(images, 0.25, ops.generator(0))
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(some, images, strict=True)]
    assert all(torch.equal(a, b) for a, b, m in zip(some, images, mirrored, strict=True) if not m)
    assert 70 < sum(mirrored) < 130


@pytest.mark.parametrize("mode", ["pad", "reflect"])
def test_a_padded_crop_is_a_piece_of_the_padded_image(mode):
    images = pixels_split(60, size=(5, 7)).pixels
    cut = ops.pad_crop(images, 2, mode == "reflect", ops.generator(1))
    padded = torch.nn.functional.pad(images.float(), (2, 2, 2, 2), mode="constant" if mode == "pad" else "reflect").to(
        torch.uint8
    )
    places = set()
    for one, whole in zip(cut, padded, strict=True):
        found = [(y, x) for y in range(5) for x in range(5) if torch.equal(one, whole[:, y : y + 5, x : x + 7])]
        assert found
        places.add(found[0])
    assert {y for y, _ in places} == {x for _, x in places} == set(range(5)), "every offset is drawn"


def test_a_shift_is_one_value_an_image():
    images = torch.full((300, 3, 4, 4), 100, dtype=torch.uint8)
    moved = ops.shift(images, 10, ops.generator(2)).long() - 100
    assert (moved == moved[:, :1, :1, :1]).all()
    assert set(moved[:, 0, 0, 0].tolist()) == set(range(-10, 11))
    extremes = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(-1, 3, 2, 2).repeat(50, 1, 1, 1)
    clipped = ops.shift(extremes, 10, ops.generator(3)).long()
    assert int(clipped[0::2].max()) <= 10
    assert int(clipped[1::2].min()) >= 245


def test_a_resized_crop_is_timms():
    from timm.data.transforms import RandomResizedCropAndInterpolation

    for height, width in ((60, 80), (10, 1000), (300, 20), (7, 7)):
        picture = Image.new("L", (width, height))
        for seed in range(100):
            ours = ops.resized_box(height, width, random.Random(seed))
            random.seed(seed)
            assert ours == RandomResizedCropAndInterpolation.get_params(picture, (0.08, 1.0), (3 / 4, 4 / 3))


def test_a_resized_crop_of_pixels_and_of_files_agree(file_split):
    """One way cuts and resizes tensors, the other PIL images: the same images at one size, through both."""
    pictures = [file_split.pil(i).resize((48, 40)) for i in range(8)]
    pixels = torch.stack([torch.from_numpy(np.asarray(p).copy()).permute(2, 0, 1) for p in pictures])
    for picture, file in zip(pictures, file_split.files, strict=True):
        picture.save(file)
    how = Augment(crop="resized", flip=0.5)
    a, b = (
        levels(sampler(s, how, image_size=24).batch(0)[0]).int()
        for s in (file_split, ImageSplit("train", file_split.labels, 3, pixels))
    )
    assert (a - b).abs().max() <= 1


def test_erasing_fills_one_box_with_noise():
    x = torch.full((400, 3, 32, 32), 7.0)
    y = ops.erase(x, 0.25, ops.generator(4))
    hit = (y != 7).any(1)
    erased = hit.flatten(1).any(1)
    assert 70 < erased.sum() < 130
    assert (x == 7).all(), "the images given are left alone"
    for mask in hit[erased]:
        rows, cols = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
        h, w = rows[-1] - rows[0] + 1, cols[-1] - cols[0] + 1
        assert int(mask.sum()) == h * w, "a full box"
        assert 0.01 < h * w / 1024 < 0.36
        assert 0.2 < h / w < 5
    noise = y[(y != 7)]
    assert abs(noise.mean()) < 0.05
    assert abs(noise.std() - 1) < 0.05


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_targets_are_those_of_timm(smoothing):
    from timm.data.mixup import mixup_target

    labels = torch.tensor([0, 3, 1, 2])
    ours = ops.soft_targets(labels, 4, smoothing)
    assert torch.allclose(ours, mixup_target(labels, 4, 1.0, smoothing))
    x = torch.randn(4, 3, 8, 8)
    mixed, targets = ops.mix(x, ours, 0.8, 0.0, random.Random(1))
    weight = random.Random(1).betavariate(0.8, 0.8)
    assert torch.allclose(mixed, weight * x + (1 - weight) * x.flip(0), atol=1e-6)
    assert torch.allclose(targets, mixup_target(labels, 4, weight, smoothing), atol=1e-6)


def test_cutmix_weighs_by_the_area_left():
    labels, shares = torch.arange(4), []
    x = torch.arange(4.0).view(4, 1, 1, 1).expand(-1, 3, 16, 16)
    for seed in range(200):
        mixed, targets = ops.mix(x, ops.soft_targets(labels, 4, 0.0), 0.0, 1.0, random.Random(seed))
        kept = (mixed == x).float().mean((1, 2, 3))
        assert torch.allclose(targets[labels, labels], kept)
        assert torch.allclose(targets[labels, 3 - labels], 1 - kept)
        shares.append(float(kept[0]))
    assert min(shares) < 0.2
    assert max(shares) > 0.95


def test_both_mixtures_take_turns():
    x, labels = torch.arange(4.0).view(4, 1, 1, 1).expand(-1, 3, 8, 8), ops.soft_targets(torch.arange(4), 4, 0.0)
    whole = [bool((ops.mix(x, labels, 0.8, 1.0, random.Random(s))[0].frac() != 0).any()) for s in range(200)]
    assert 60 < sum(whole) < 140, "mixup in about half of the batches; CutMix keeps whole numbers"
    only = [bool((ops.mix(x, labels, 0.8, 0.0, random.Random(s))[0].frac() != 0).any()) for s in range(20)]
    assert all(only)


def test_randaugment_is_timms(file_split):
    """The same draws through timm's own object give the same pictures."""
    from timm.data.auto_augment import rand_augment_transform

    split = pixels_split(4, size=(32, 32))
    keys = [11, 12, 13, 14]
    policy = ops.rand_augment(RAND, (32, 32), IMAGENET_MEAN)
    ours = ops.with_pillow(split.pixels, keys, policy, 0.0)
    theirs = rand_augment_transform(
        RAND, {"translate_const": 14, "img_mean": (124, 116, 104), "interpolation": Image.Resampling.BICUBIC}
    )
    with ops.kept_random_state():
        for i, key in enumerate(keys):
            random.seed(key), np.random.seed(key), torch.manual_seed(key)
            expected = np.asarray(theirs(Image.fromarray(split.pixels[i].permute(1, 2, 0).numpy())))
            assert np.array_equal(ours[i].permute(1, 2, 0).numpy(), expected)
    assert not torch.equal(ours, split.pixels)
    grey = sampler(
        pixels_split(4, 1), Augment(randaugment=RAND, colour=0.4), channels=1, mean=(0.5,), std=(0.5,)
    ).batch(0)[0]
    assert grey.shape == (4, 1, 8, 8)


def test_randaugment_at_every_strength():
    from PIL import ImageOps

    picture = tensor_to_pil(pixels_split(1, size=(32, 32)).pixels[0])
    for bits in range(1, 9):
        assert ops.posterize(picture, bits).tobytes() == ImageOps.posterize(picture, bits).tobytes()
    assert ops.posterize(picture, 0).getextrema() == ((0, 0),) * 3
    split = ImageSplit("train", torch.zeros(200, dtype=torch.int64), 3, pixels_split(200).pixels)
    for strength in (0, 10):
        x = sampler(split, Augment(randaugment=f"rand-m{strength}-mstd2-inc1-n4"), batch_size=200).batch(0)[0]
        assert x.shape == (200, 3, 8, 8)


def test_colour_changes_brightness_contrast_and_saturation():
    grey = Image.new("RGB", (4, 4), (100, 100, 100))
    seen = {ops.jitter(grey, 0.3, random.Random(i)).getpixel((0, 0)) for i in range(300)}
    assert all(r == g == b for r, g, b in seen)
    assert (min(seen)[0], max(seen)[0]) == (70, 130) or (70 <= min(seen)[0] < 75 and 125 < max(seen)[0] <= 130)
    red = [
        ops.jitter(Image.new("RGB", (4, 4), (200, 100, 100)), 0.3, random.Random(i)).getpixel((0, 0)) for i in range(50)
    ]
    assert len({round(r / g, 1) for r, g, _ in red}) > 3


def test_smoothing_alone_gives_soft_targets():
    s = sampler(pixels_split(10), smoothing=0.2)
    y = s.batch(0)[1]
    assert y.shape == (4, 4)
    assert torch.allclose(y.sum(1), torch.ones(4))
    assert y.argmax(1).tolist() == [i % 4 for i in s.indices(0)]
    assert torch.allclose(y.max(1).values, torch.tensor(0.85))


def test_a_resized_batch_matches_pillow():
    split = pixels_split(4, size=(20, 30))
    smooth = torch.nn.functional.interpolate(split.pixels[..., ::5, ::5].float(), (20, 30), mode="bilinear").to(
        torch.uint8
    )
    ours = ops.resize(smooth, (12, 40))
    for image, x in zip(smooth, ours, strict=True):
        theirs = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((40, 12), Image.Resampling.BICUBIC)
        assert np.abs(x.permute(1, 2, 0).numpy().astype(int) - np.asarray(theirs)).max() <= 1


# --- evaluation


def test_evaluation_shows_each_image_once_in_order(file_split):
    for split, size in ((pixels_split(10), 8), (file_split, (12, 10))):
        batches = list(
            eval_batches(split, batch_size=4, image_size=size, channels=3, mean=IMAGENET_MEAN, std=IMAGENET_STD)
        )
        assert torch.equal(torch.cat([y for _, y in batches]), split.labels)
        assert sum(len(x) for x, _ in batches) == len(split)
        few = list(eval_batches(split, batch_size=4, image_size=size, channels=3, limit=6))
        assert [len(x) for x, _ in few] == [4, 2]
        assert torch.equal(few[1][0], batches[1][0][:2])
    x, _ = next(eval_batches(pixels_split(10), batch_size=10, image_size=8, channels=3, **PLAIN))
    assert torch.equal(levels(x), pixels_split(10).pixels)


@pytest.mark.parametrize("size", [224, 240])
def test_evaluation_from_224_on_is_timms(file_split, size):
    from timm.data import create_transform

    theirs = create_transform(
        (3, size, size),
        is_training=False,
        interpolation="bicubic",
        crop_pct=0.875,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )
    x, _ = next(
        eval_batches(file_split, batch_size=8, image_size=size, channels=3, mean=IMAGENET_MEAN, std=IMAGENET_STD)
    )
    expected = torch.stack([theirs(file_split.pil(i)) for i in range(8)])
    assert torch.allclose(x, expected, atol=1e-5)


# --- what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"crop": "centre"}, "crop='centre' must be one of none, pad, reflect, resized"),
        ({"flip": 1.5}, "flip=1.5 must be a probability"),
        ({"erasing": -0.1}, "erasing=-0.1"),
        ({"mixup": -1.0}, "mixup=-1.0 must be 0 or more"),
        ({"cutmix": float("nan")}, "cutmix=nan"),
        ({"repeats": 0}, "repeats=0 must be an integer of at least 1"),
        ({"shift": 1.5}, "shift=1.5 must be an integer"),
    ],
)
def test_options_out_of_range(options, words):
    with pytest.raises(MixerError, match=words):
        Augment(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"classes": 3}, "label 3, out of range for classes=3"),
        ({"channels": 4}, "channels=4 must be 1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"image_size": (8, 8, 8)}, r"image_size=\(8, 8, 8\) must be one number or"),
        ({"image_size": 0}, "image_size=0"),
        ({"mean": (0.5,)}, r"mean=\[0.5\] .* must have 3 values"),
        ({"std": (0.5, 0.0, 0.5)}, "std above 0"),
        ({"smoothing": 1.0}, "smoothing=1.0"),
        ({"augment": Augment(randaugment="random")}, "randaugment='random' is not a RandAugment string of timm"),
    ],
)
def test_samplers_refuse(options, words):
    with pytest.raises(MixerError, match=words):
        sampler(pixels_split(), **options)


def test_more_refusals():
    with pytest.raises(MixerError, match="has no images"):
        sampler(ImageSplit("valid", torch.zeros(0, dtype=torch.int64), 3))
    with pytest.raises(MixerError, match="crop='reflect' needs a pad below .* pad=8 with 8x8"):
        sampler(pixels_split(), Augment(crop="reflect", pad=8)).batch(0)


def test_a_file_that_went_bad_after_opening_is_named(file_split):
    Path(file_split.files[3]).write_bytes(b"gone")
    with pytest.raises(MixerError, match="3.png is not an image"):
        [sampler(file_split).batch(i) for i in range(2)]


def test_the_digits_go_through_everything(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    split = open_images("digits").split("train")
    x, y = ImageSampler(
        split, classes=10, image_size=16, channels=1, batch_size=32, augment=Augment(crop="pad", pad=1)
    ).batch(3)
    assert x.shape == (32, 1, 16, 16)
    assert x.min() >= -1
    assert x.max() <= 1
    assert PixelSampler(split, size=(8, 8), channels=1, batch_size=32).batch(0).shape == (32, 64)
