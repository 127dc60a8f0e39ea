"""Batches of images with masks: an image and its mask are resized, cropped and mirrored together.

A training batch is a pure function of (seed, step), so a run resumes exactly.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import MixerError
from . import augment_ops as ops
from .augment import moments, normalise
from .image_source import in_threads, to_channels
from .masks import MaskSplit
from .pair_sampler import IGNORED


@dataclass(frozen=True)
class MaskAugment:
    """What happens to training images and their masks; by default nothing but resizing.

    Args:
        scale: least and most of the factor by which an image is resized, drawn evenly; at 1 its shorter side fills that
            of the model. A random window of the model's size is cut out; where the image is smaller, its mask is
            ignored. [1, 1]: no change.
        flip: probability of mirroring left to right, from 0 to 1.
        colour: brightness, contrast and saturation are each scaled by a random factor in 1 - colour .. 1 + colour; 0:
            none.
    """

    scale: tuple[float, ...] = (1.0, 1.0)
    flip: float = 0.0
    colour: float = 0.0

    def __post_init__(self) -> None:
        if len(self.scale) != 2 or not 0.1 <= self.scale[0] <= self.scale[1] <= 10:
            raise MixerError(f"MaskAugment: scale={list(self.scale)} must be [least, most], from 0.1 to 10.")
        if not 0 <= self.flip <= 1:
            raise MixerError(f"MaskAugment: flip={self.flip} must be a probability from 0 to 1.")
        if not 0 <= self.colour <= 1:
            raise MixerError(f"MaskAugment: colour={self.colour} must be from 0 to 1.")


class MaskSampler:
    """Sample augmented, normalised batches of images and masks.

    Every epoch visits each image once in a new order; nothing is stored between steps.

    Args:
        image_size: height and width of the batches.
        mean: mean of each channel, for pixels in 0..1; default that of ImageNet for 3 channels, 0.5 for grey.
        std: standard deviation of each channel, with the same defaults.
    """

    def __init__(
        self,
        split: MaskSplit,
        *,
        image_size: tuple[int, int],
        channels: int,
        batch_size: int,
        seed: int = 0,
        augment: MaskAugment = MaskAugment(),
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
    ):
        self.split, self.size, self.channels = split, (image_size[0], image_size[1]), channels
        self.batch_size, self.seed, self.augment = batch_size, seed, augment
        self.mean, self.std = moments("MaskSampler", channels, mean, std)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return images, float32 (B, C, H, W), and masks, int64 (B, H, W), with ``IGNORED`` where there is no class."""
        chosen = ops.image_indices(step, self.batch_size, len(self.split), seed=self.seed)
        keys = [ops.key_of(self.seed, step * self.batch_size + i, 1) for i in range(len(chosen))]
        loaded = in_threads(lambda which: self._load_pair(*which), zip(chosen, keys, strict=True))
        pairs = [self._finish_pair(*each) for each in loaded]
        return torch.stack([image for image, _ in pairs]), torch.stack([mask for _, mask in pairs])

    def _load_pair(self, index: int, key: int) -> tuple[Tensor, Tensor, int, random.Random]:
        """Return an image and its mask, resized, with the key and the generator of what else is drawn for them."""
        image, mask = self.split.read(index)
        rng = random.Random(key)
        image, mask = resize_pair(to_channels(image, self.channels), mask, self._scaled_size(mask, rng))
        return image, mask, key, rng

    def _finish_pair(self, image: Tensor, mask: Tensor, key: int, rng: random.Random) -> tuple[Tensor, Tensor]:
        """Change colours, normalise, cut and mirror, in one thread: colours use the random state of the process."""
        how = self.augment
        if how.colour:
            image = ops.with_pillow(image[None], [key], None, how.colour)[0]
        x = normalise(image[None], self.mean, self.std)[0]
        x, mask = window(x, mask, self.size, rng)
        if rng.random() < how.flip:
            x, mask = x.flip(-1), mask.flip(-1)
        return x, mask

    def _scaled_size(self, mask: Tensor, rng: random.Random) -> tuple[int, int]:
        """Return the size to which an image is resized: the model's own if nothing is drawn."""
        least, most = self.augment.scale
        if (least, most) == (1, 1):
            return self.size
        factor = rng.uniform(least, most) * min(self.size) / min(mask.shape)
        return max(round(mask.shape[0] * factor), 1), max(round(mask.shape[1] * factor), 1)


def resize_pair(image: Tensor, mask: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Resize an image, uint8 (C, H, W), bicubically, and its mask, int64 (H, W), to the nearest pixel's class.

    Both are sampled between the centres of pixels, so that they stay on each other.
    """
    if tuple(mask.shape) == size:
        return image, mask
    nearest = F.interpolate(mask[None, None].double(), size, mode="nearest-exact")[0, 0].long()
    return ops.resize(image[None], size)[0], nearest


def window(x: Tensor, mask: Tensor, size: tuple[int, int], rng: random.Random) -> tuple[Tensor, Tensor]:
    """Cut a random (h, w) window out of a normalised image and its mask.

    Where the image is smaller, it stands at a random place inside of the window; around it the image is 0 and the mask
    ``IGNORED``.
    """
    spare = [have - want for have, want in zip(mask.shape, size, strict=True)]
    top, left = (rng.randint(min(n, 0), max(n, 0)) for n in spare)
    place = (-left, size[1] + left - mask.shape[1], -top, size[0] + top - mask.shape[0])  # negative: cut off
    return F.pad(x, place), F.pad(mask, place, value=IGNORED)


def mask_batches(
    split: MaskSplit,
    *,
    batch_size: int,
    image_size: tuple[int, int],
    channels: int,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    limit: int | None = None,
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield every image once, in order: images resized to the model's size and normalised, masks at their own size.

    Args:
        limit: use only the first ``limit`` images; None: all.
    """
    mean, std = moments("mask_batches", channels, mean, std)
    size, end = (image_size[0], image_size[1]), len(split) if limit is None else min(limit, len(split))
    for start in range(0, end, batch_size):
        pairs = list(in_threads(split.read, range(start, min(start + batch_size, end))))
        images = torch.cat([ops.resize(to_channels(image, channels)[None], size) for image, _ in pairs])
        yield normalise(images, mean, std), [mask for _, mask in pairs]
