"""Images as sequences of sub-pixels."""

from __future__ import annotations

import pytest
import torch

from image_sets import pixels_split, smooth_files
from tokenmix import MixerError
from tokenmix.lab.data import Augment, ImageSplit, PixelSampler, from_pixels, pixel_batches, to_pixels
from tokenmix.lab.data import augment_ops as ops


@pytest.fixture
def file_split(tmp_path) -> ImageSplit:
    return smooth_files(tmp_path)


def test_sub_pixels_are_row_major_with_interleaved_colours():
    images = torch.arange(2 * 3 * 2 * 4).view(2, 3, 2, 4).to(torch.uint8)
    tokens = from_pixels(images)
    assert (tokens.shape, tokens.dtype) == ((2, 24), torch.int64)
    assert tokens[0, :6].tolist() == [images[0, c, 0, x] for x in (0, 1) for c in range(3)]
    assert int(tokens[1, (1 * 4 + 2) * 3 + 1]) == int(images[1, 1, 1, 2])
    assert torch.equal(to_pixels(tokens, (2, 4), 3), images)
    assert from_pixels(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)).shape == (1, 3072)


def test_pixel_batches_train_and_evaluate():
    split = pixels_split(10)
    s = PixelSampler(split, size=(8, 8), channels=3, batch_size=5, seed=3)
    seen = torch.cat([s.batch(0), s.batch(1)])
    everything = torch.cat(list(pixel_batches(split, 4, (8, 8), 3)))
    assert torch.equal(everything, from_pixels(split.pixels))
    assert sorted(map(tuple, seen.tolist())) == sorted(map(tuple, everything.tolist()))
    assert torch.equal(PixelSampler(split, size=(8, 8), channels=3, batch_size=5, seed=3).batch(1), seen[5:])
    assert [len(b) for b in pixel_batches(split, 4, (8, 8), 3, limit=5)] == [4, 1]


def test_the_papers_augmentation_flips_and_shifts():
    split = pixels_split(1)
    s = PixelSampler(split, size=(8, 8), channels=3, batch_size=200, augment=Augment(flip=0.5, shift=10))
    images = to_pixels(s.batch(0), (8, 8), 3).long()
    one, kinds = split.pixels[0].long(), set()
    for image in images:
        fits = [
            (f, d)
            for f in (False, True)
            for d in range(-10, 11)
            if torch.equal(image, ((one.flip(-1) if f else one) + d).clamp(0, 255))
        ]
        assert fits
        kinds.add(fits[0])
    assert len(kinds) > 35


@pytest.mark.parametrize("source", ["pixels", "files"])
def test_smaller_sizes_are_cut_not_resized(file_split, source):
    split = file_split if source == "files" else pixels_split(8, size=(9, 10))
    s = PixelSampler(split, size=(4, 6), channels=3, batch_size=8)
    cuts, places = to_pixels(s.batch(0), (4, 6), 3), set()
    chosen = ops.image_indices(0, 8, 8, seed=0)
    for cut, i in zip(cuts, chosen, strict=True):
        windows = split.image(i).unfold(1, 4, 1).unfold(2, 6, 1)
        at = (windows == cut[:, None, None]).all(0).flatten(2).all(2).nonzero().tolist()
        assert at
        places.add(tuple(at[0]))
    assert len(places) > 2
    for i, tokens in enumerate(torch.cat(list(pixel_batches(split, 3, (4, 6), 3)))):
        image = split.image(i)
        top, left = (image.shape[1] - 4) // 2, (image.shape[2] - 6) // 2
        assert torch.equal(to_pixels(tokens[None], (4, 6), 3)[0], image[:, top : top + 4, left : left + 6])


def test_refusals(file_split):
    with pytest.raises(
        MixerError, match="mixup=0.5 would change the distribution that is modelled; only flip, shift, repeats"
    ):
        PixelSampler(pixels_split(), size=(8, 8), channels=3, batch_size=2, augment=Augment(mixup=0.5))
    with pytest.raises(MixerError, match="size 9x8 is larger than the images, 8x8"):
        PixelSampler(pixels_split(), size=(9, 8), channels=3, batch_size=2)
    with pytest.raises(MixerError, match=r"7.png is 38x61, smaller than the requested size 39x38"):
        list(pixel_batches(file_split, 8, (39, 38), 3))
    with pytest.raises(MixerError, match=r"\(2, 10\) are not \(batch, 2 \* 2 \* 3\)"):
        to_pixels(torch.zeros(2, 10, dtype=torch.int64), (2, 2), 3)
    with pytest.raises(MixerError, match=r"lie in 0..255, got 0..256"):
        to_pixels(torch.tensor([[0, 256, 1]]), (1, 1), 3)
