"""Batches of images for training and evaluation.

A training batch is a pure function of (seed, step), so a run resumes exactly.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from ...errors import MixerError
from . import augment_ops as ops
from .image_source import in_threads, pil_to_tensor, pillow, to_channels
from .images import ImageSplit

if TYPE_CHECKING:
    from PIL.Image import Image


B = TypeVar("B", covariant=True)

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CROP_FRACTION = 0.875  # of the short side, for evaluation at 224 pixels or more
CROPS = ("none", "pad", "reflect", "resized")


@dataclass(frozen=True)
class Augment:
    """What happens to training images, in this order; by default nothing.

    Args:
        crop: "none" (resize to the requested size), "pad" (resize, then crop at random from the image padded with
            ``pad`` black pixels on each side), "reflect" (the same, padded with its reflection) or "resized" (a random
            part of 8 % to 100 % of the area, resized bicubically).
        pad: pixels of padding on each side for "pad" and "reflect", 0 or more.
        flip: probability of mirroring left to right, from 0 to 1.
        shift: one random value in -shift..shift is added to all sub-pixels of an image, clipped to 0..255 (AFT paper,
            Sec. 5.1); 0: none.
        randaugment: timm's string, such as "rand-m9-mstd0.5-inc1"; None: no RandAugment.
        colour: brightness, contrast and saturation are each scaled by a random factor in 1 - colour .. 1 + colour; 0:
            none.
        erasing: probability of replacing a box by noise, from 0 to 1.
        mixup: alpha of Beta(alpha, alpha); 0: no mixup.
        cutmix: alpha of CutMix in the same way; with both, each batch gets one or the other.
        repeats: how many times in a row an epoch shows each image (repeated augmentation, Hoffer et al. 2020), 1 or
            more.
    """

    crop: str = "none"
    pad: int = 4
    flip: float = 0.0
    shift: int = 0
    randaugment: str | None = None
    colour: float = 0.0
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.crop not in CROPS:
            raise MixerError(f"Augment: crop={self.crop!r} must be one of {', '.join(CROPS)}.")
        for name in ("flip", "erasing"):
            if not 0 <= getattr(self, name) <= 1:
                raise MixerError(f"Augment: {name}={getattr(self, name)} must be a probability from 0 to 1.")
        for name in ("colour", "mixup", "cutmix"):
            if not 0 <= getattr(self, name) < math.inf:
                raise MixerError(f"Augment: {name}={getattr(self, name)} must be 0 or more.")
        for name, least in (("pad", 0), ("shift", 0), ("repeats", 1)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise MixerError(f"Augment: {name}={getattr(self, name)} must be an integer of at least {least}.")


class ImageSampler:
    """Sample augmented, normalised batches.

    Every epoch visits each image once (``augment.repeats`` times) in a new order; nothing is stored between steps. Sets
    of one image size are processed as tensors; Pillow and timm are used for files of different sizes, RandAugment and
    colour.

    Args:
        classes: number of classes of the targets.
        smoothing: label smoothing; targets are then (B, classes).
        mean: mean of each channel, for pixels in 0..1; default that of ImageNet for 3 channels, 0.5 for grey.
        std: standard deviation of each channel, with the same defaults.
    """

    def __init__(
        self,
        split: ImageSplit,
        *,
        classes: int,
        image_size: int | tuple[int, int],
        channels: int,
        batch_size: int,
        seed: int = 0,
        augment: Augment = Augment(),
        smoothing: float = 0.0,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
    ):
        _check("ImageSampler", split, batch_size, channels)
        top = int(split.labels.max())
        if top >= classes:
            raise MixerError(
                f"ImageSampler: the split {split.name!r} has label {top}, out of range for classes={classes}."
            )
        if not 0 <= smoothing < 1:
            raise MixerError(f"ImageSampler: smoothing={smoothing} must lie in [0, 1).")
        self.split, self.classes, self.channels, self.batch_size, self.seed = split, classes, channels, batch_size, seed
        self.size, self.augment, self.smoothing = _pair("ImageSampler", image_size), augment, smoothing
        self.mean, self.std = moments("ImageSampler", channels, mean, std)
        self.policy = (
            None if augment.randaugment is None else ops.rand_augment(augment.randaugment, self.size, self.mean)
        )

    @property
    def epoch(self) -> int:
        """Return the number of images in an epoch."""
        return len(self.split) * self.augment.repeats

    def indices(self, step: int) -> list[int]:
        """Return the indices of the images in the batch of a step."""
        return ops.image_indices(step, self.batch_size, len(self.split), seed=self.seed, repeats=self.augment.repeats)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return images, float32 (B, C, H, W), and targets.

        Targets are int64 (B,), or float32 (B, classes) with smoothing, mixup or CutMix.
        """
        chosen, how = self.indices(step), self.augment
        g = ops.generator(self.seed, step, 0)
        keys = self._keys(step, len(chosen))
        images = self._resized_images(chosen, keys)
        if how.crop in ("pad", "reflect"):
            images = ops.pad_crop(images, how.pad, how.crop == "reflect", g)
        images = ops.flip(images, how.flip, g) if how.flip else images
        if self.policy is not None or how.colour:
            images = ops.with_pillow(images, keys, self.policy, how.colour)
        images = ops.shift(images, how.shift, g) if how.shift else images
        x = normalise(images, self.mean, self.std)
        x = ops.erase(x, how.erasing, g) if how.erasing else x
        labels = self.split.labels[chosen]
        if not (how.mixup or how.cutmix):
            return x, ops.soft_targets(labels, self.classes, self.smoothing) if self.smoothing else labels
        return ops.mix(
            x,
            ops.soft_targets(labels, self.classes, self.smoothing),
            how.mixup,
            how.cutmix,
            random.Random(ops.key_of(self.seed, step, 2)),
        )

    def _keys(self, step: int, images: int) -> list[int]:
        """Return the key of each image's own draws; 0 if there are none, as thousands of keys take milliseconds."""
        how = self.augment
        if how.crop != "resized" and self.policy is None and not how.colour:
            return [0] * images
        return [ops.key_of(self.seed, step * self.batch_size + i, 1) for i in range(images)]

    def _resized_images(self, chosen: list[int], keys: list[int]) -> Tensor:
        """Return the images at the requested size, uint8."""
        if self.split.pixels is None:
            return torch.stack(list(in_threads(self._resized_file, zip(chosen, keys, strict=True))))
        images = to_channels(self.split.pixels[chosen], self.channels)
        if self.augment.crop != "resized":
            return ops.resize(images, self.size)
        boxes = [ops.resized_box(images.shape[-2], images.shape[-1], random.Random(key)) for key in keys]
        return torch.cat(
            [
                ops.resize(x[None, :, t : t + h, left : left + w], self.size)
                for x, (t, left, h, w) in zip(images, boxes, strict=True)
            ]
        )

    def _resized_file(self, which: tuple[int, int]) -> Tensor:
        picture = self.split.pil(which[0])
        if self.augment.crop == "resized":
            top, left, h, w = ops.resized_box(picture.height, picture.width, random.Random(which[1]))
            picture = picture.crop((left, top, left + w, top + h))
        return to_channels(pil_to_tensor(_resize_picture(picture, self.size)), self.channels)


def eval_batches(
    split: ImageSplit,
    *,
    batch_size: int,
    image_size: int | tuple[int, int],
    channels: int,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    limit: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every image once, in order, normalised, with its label.

    Images are resized (bicubic); for sizes from 224 pixels on, the centre is cropped from 1 / 0.875 of the size, as
    timm does.

    Args:
        limit: use only the first ``limit`` images; None: all.
    """
    _check("eval_batches", split, batch_size, channels)
    size, (mean, std) = _pair("eval_batches", image_size), moments("eval_batches", channels, mean, std)
    end = len(split) if limit is None else min(limit, len(split))
    for start in range(0, end, batch_size):
        chosen = range(start, min(start + batch_size, end))
        if split.pixels is not None and min(size) < 224:
            images = ops.resize(to_channels(split.pixels[chosen.start : chosen.stop], channels), size)
        else:
            images = to_channels(
                torch.stack(list(in_threads(lambda i: pil_to_tensor(centre(split.pil(i), size)), chosen))), channels
            )
        yield normalise(images, mean, std), split.labels[chosen.start : chosen.stop]


def centre(picture: Image, size: tuple[int, int]) -> Image:
    """Resize and crop a PIL image to the size of evaluation."""
    if min(size) < 224:
        return _resize_picture(picture, size)
    want = [math.floor(s / CROP_FRACTION) for s in size]
    if picture.height * want[1] <= picture.width * want[0]:  # the height limits the crop
        grown = want[0], int(want[0] * picture.width / picture.height)
    else:
        grown = int(want[1] * picture.height / picture.width), want[1]
    picture = _resize_picture(picture, grown)
    top, left = round((grown[0] - size[0]) / 2), round((grown[1] - size[1]) / 2)
    return picture.crop((left, top, left + size[1], top + size[0]))


class Batches(Protocol[B]):
    """What has a batch for each step."""

    def batch(self, step: int) -> B:
        """Return the batch of a step."""


def stream(sampler: Batches[B], steps: Iterable[int], *, workers: int = 0) -> Iterator[B]:
    """Yield ``sampler.batch(step)`` for each step in order, prepared ahead by worker processes.

    The batches are the same for any number of workers.
    """
    if workers == 0:
        yield from map(sampler.batch, steps)
        return
    load = torch.utils.data.DataLoader(
        _Steps(sampler), batch_size=None, sampler=list(steps), num_workers=workers, generator=torch.Generator()
    )
    yield from load


class _Steps(torch.utils.data.Dataset[B]):
    def __init__(self, sampler: Batches[B]):
        self.sampler = sampler

    def __getitem__(self, step: int) -> B:
        return self.sampler.batch(step)


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Convert uint8 (B, C, H, W) to float32: (x / 255 - mean) / std of each channel."""
    return images.float().div_(255).sub_(torch.tensor(mean)[:, None, None]).div_(torch.tensor(std)[:, None, None])


def as_bytes(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Convert normalised images (B, C, H, W) back to uint8: the inverse of ``normalise``, rounded and clipped."""
    x = images.float() * images.new_tensor(std)[:, None, None] + images.new_tensor(mean)[:, None, None]
    return (255 * x).round().clamp(0, 255).to(torch.uint8)


def moments(
    who: str, channels: int, mean: tuple[float, ...] | None, std: tuple[float, ...] | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation of each channel, checked."""
    mean = tuple(mean) if mean is not None else IMAGENET_MEAN if channels == 3 else (0.5,)
    std = tuple(std) if std is not None else IMAGENET_STD if channels == 3 else (0.5,)
    if len(mean) != channels or len(std) != channels or min(std) <= 0:
        raise MixerError(
            f"{who}: mean={list(mean)} and std={list(std)} must have {channels} values, one for each channel, std "
            + "above 0."
        )
    return mean, std


def _check(who: str, split: ImageSplit, batch_size: int, channels: int) -> None:
    if len(split) == 0:
        raise MixerError(f"{who}: the split {split.name!r} has no images.")
    if batch_size < 1:
        raise MixerError(f"{who}: batch_size={batch_size} must be at least 1.")
    if channels not in (1, 3):
        raise MixerError(f"{who}: channels={channels} must be 1 (grey) or 3 (colour).")


def _pair(who: str, size: int | tuple[int, int]) -> tuple[int, int]:
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or min(pair) < 1:
        raise MixerError(f"{who}: image_size={size} must be one number or (height, width), at least 1.")
    return pair[0], pair[1]


def _resize_picture(picture: Image, size: tuple[int, int]) -> Image:
    if (picture.height, picture.width) == tuple(size):
        return picture
    return picture.resize((size[1], size[0]), pillow().Resampling.BICUBIC)
