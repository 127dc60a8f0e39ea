"""Images as sequences of sub-pixels for density models (AFT paper, Sec. 5.1).

Each has 256 values; they run row by row, the colours of a pixel one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...errors import MixerError
from . import augment_ops as ops
from .augment import Augment
from .image_source import in_threads, to_channels
from .images import ImageSplit

# After these an image still belongs to the set; a density model must not learn mixtures or noise.
ALLOWED = ("flip", "shift", "repeats")


def from_pixels(images: Tensor) -> Tensor:
    """Convert images (B, C, H, W) to tokens (B, H*W*C), int64.

    The order is R, G, B of the first pixel, then of the one to its right.
    """
    return images.permute(0, 2, 3, 1).flatten(1).long()


def to_pixels(tokens: Tensor, size: tuple[int, int], channels: int) -> Tensor:
    """Convert tokens (B, H*W*C) to images, uint8 (B, C, H, W)."""
    if tokens.dim() != 2 or tokens.shape[1] != size[0] * size[1] * channels:
        raise MixerError(
            f"to_pixels: tokens of shape {tuple(tokens.shape)} are not (batch, {size[0]} * {size[1]} * {channels})."
        )
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) <= 255:
        raise MixerError(f"to_pixels: tokens must lie in 0..255, got {int(tokens.min())}..{int(tokens.max())}.")
    return tokens.view(-1, *size, channels).permute(0, 3, 1, 2).to(torch.uint8)


class PixelSampler:
    """Sample training batches of tokens, each a pure function of (seed, step).

    Images larger than ``size`` are cropped at random; nothing is ever resized.

    Args:
        augment: ``flip``, ``shift`` and ``repeats`` only.
    """

    def __init__(
        self,
        split: ImageSplit,
        *,
        size: tuple[int, int],
        channels: int,
        batch_size: int,
        seed: int = 0,
        augment: Augment = Augment(),
    ):
        other = [
            n
            for n in Augment.__dataclass_fields__
            if n not in (*ALLOWED, "pad") and getattr(augment, n) != getattr(Augment(), n)
        ]
        if other:
            raise MixerError(
                f"PixelSampler: {other[0]}={getattr(augment, other[0])!r} would change the distribution that is "
                f"modelled; only {', '.join(ALLOWED)} are allowed."
            )
        _check("PixelSampler", split, size, channels, batch_size)
        self.split, self.size, self.channels, self.batch_size = split, (size[0], size[1]), channels, batch_size
        self.seed, self.augment = seed, augment

    @property
    def epoch(self) -> int:
        """Return the number of images in an epoch."""
        return len(self.split) * self.augment.repeats

    def images(self, step: int) -> Tensor:
        """Return the batch of a step as images, uint8 (B, C, H, W)."""
        chosen, g = (
            ops.image_indices(step, self.batch_size, len(self.split), seed=self.seed, repeats=self.augment.repeats),
            ops.generator(self.seed, step, 3),
        )
        if self.split.pixels is not None:
            images = to_channels(self.split.pixels[chosen], self.channels)
            images = ops.window(images, self.size, g) if self.split.size != self.size else images
        else:
            whole = in_threads(lambda i: to_channels(_large_enough(self.split, i, self.size), self.channels), chosen)
            images = torch.cat([ops.window(image[None], self.size, g) for image in whole])
        images = ops.flip(images, self.augment.flip, g) if self.augment.flip else images
        return ops.shift(images, self.augment.shift, g) if self.augment.shift else images

    def batch(self, step: int) -> Tensor:
        """Return the batch of a step as tokens, int64 (B, H*W*C)."""
        return from_pixels(self.images(step))


def pixel_batches(
    split: ImageSplit, batch_size: int, size: tuple[int, int], channels: int, limit: int | None = None
) -> Iterator[Tensor]:
    """Yield the tokens of every image once, in order, for evaluation.

    Images larger than ``size`` are cropped to their centre.

    Args:
        limit: use only the first ``limit`` images; None: all.
    """
    _check("pixel_batches", split, size, channels, batch_size)
    end = len(split) if limit is None else min(limit, len(split))
    for start in range(0, end, batch_size):
        chosen = range(start, min(start + batch_size, end))
        if split.pixels is not None:
            images = _centre(split.pixels[chosen.start : chosen.stop], size)
        else:
            images = torch.stack(list(in_threads(lambda i: _centre(_large_enough(split, i, size), size), chosen)))
        yield from_pixels(to_channels(images, channels))


def _centre(images: Tensor, size: tuple[int, int]) -> Tensor:
    top, left = (images.shape[-2] - size[0]) // 2, (images.shape[-1] - size[1]) // 2
    return images[..., top : top + size[0], left : left + size[1]]


def _large_enough(split: ImageSplit, i: int, size: tuple[int, int]) -> Tensor:
    image = split.image(i)
    if image.shape[-2] < size[0] or image.shape[-1] < size[1]:
        raise MixerError(
            f"images: {split.files[i]} is {image.shape[-2]}x{image.shape[-1]}, smaller than the requested size "
            + f"{size[0]}x{size[1]}."
        )
    return image


def _check(who: str, split: ImageSplit, size: tuple[int, int], channels: int, batch_size: int) -> None:
    if len(split) == 0:
        raise MixerError(f"{who}: the split {split.name!r} has no images.")
    if batch_size < 1 or channels not in (1, 3) or len(size) != 2 or min(size) < 1:
        raise MixerError(
            f"{who}: batch_size={batch_size} must be at least 1, channels={channels} 1 or 3, size={tuple(size)} "
            + "(height, width)."
        )
    if split.size is not None and (split.size[0] < size[0] or split.size[1] < size[1]):
        raise MixerError(
            f"{who}: size {size[0]}x{size[1]} is larger than the images, {split.size[0]}x{split.size[1]}; "
            + "give a smaller one (model.size in a config)."
        )
