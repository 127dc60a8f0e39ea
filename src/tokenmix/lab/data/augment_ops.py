"""Augmentations of whole batches of images, uint8 or normalised, (B, C, H, W).

All randomness comes from the generator given.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import MixerError
from .image_source import pil_to_tensor, tensor_to_pil
from .sampler import mix64, permuted_ranks

if TYPE_CHECKING:
    from PIL.Image import Image


Box = tuple[int, int, int, int]  # top, left, height, width


def key_of(*parts: int) -> int:
    """Hash several numbers to one 63-bit key."""
    key = 0
    for part in parts:
        key = mix64(key ^ mix64(part))
    return key >> 1


def generator(*parts: int) -> torch.Generator:
    return torch.Generator().manual_seed(key_of(*parts))


def image_indices(step: int, batch: int, images: int, *, seed: int, repeats: int = 1) -> list[int]:
    """Return the indices of the images in the batch of a step.

    Every epoch visits each image ``repeats`` times in a row, in an order of its own.
    """
    at = torch.arange(step * batch, (step + 1) * batch)
    epochs, ranks = at // (images * repeats), at % (images * repeats) // repeats
    return torch.cat(
        [
            permuted_ranks(ranks[epochs == epoch], images, mix64(seed * 0x9E3779B97F4A7C15 + epoch))
            for epoch in epochs.unique().tolist()
        ]
    ).tolist()


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize uint8 images, bicubic with antialiasing."""
    if tuple(images.shape[-2:]) == size:
        return images
    return F.interpolate(images.float(), size, mode="bicubic", antialias=True).round_().clamp_(0, 255).to(torch.uint8)


def resized_box(height: int, width: int, rng: random.Random) -> Box:
    """Draw the box of a random resized crop (Szegedy et al. 2015) as is common practice.

    It has 8 % to 100 % of the area and sides from 3:4 to 4:3; after ten misses it is the centre.
    """
    for _ in range(10):
        area = height * width * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return rng.randint(0, height - h), rng.randint(0, width - w), h, w
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


def pad_crop(images: Tensor, pad: int, reflect: bool, g: torch.Generator) -> Tensor:
    """Crop each image at random, without changing its size, after padding it with ``pad`` pixels on each side.

    The padding is black, or the image's reflection without the edge.
    """
    n, _, height, width = images.shape
    if reflect and pad >= min(height, width):
        raise MixerError(
            f"Augment: crop='reflect' needs a pad below the size of the images, got pad={pad} with {height}x{width}."
        )
    top, left = torch.randint(0, 2 * pad + 1, (2, n), generator=g)
    sides = (pad, pad, pad, pad)
    padded = F.pad(images.float(), sides, mode="reflect").to(images.dtype) if reflect else F.pad(images, sides)
    return padded.unfold(2, height, 1).unfold(3, width, 1)[torch.arange(n), :, top, left]


def window(images: Tensor, size: tuple[int, int], g: torch.Generator) -> Tensor:
    """Crop a random (h, w) part of each image."""
    n, _, height, width = images.shape
    top = torch.randint(height - size[0] + 1, (n,), generator=g).tolist()
    left = torch.randint(width - size[1] + 1, (n,), generator=g).tolist()
    return torch.stack(
        [image[:, t : t + size[0], x : x + size[1]] for image, t, x in zip(images, top, left, strict=True)]
    )


def flip(images: Tensor, p: float, g: torch.Generator) -> Tensor:
    """Mirror each image left to right with probability p."""
    chosen = torch.rand(len(images), generator=g) < p
    return torch.where(chosen[:, None, None, None], images.flip(-1), images)


def shift(images: Tensor, most: int, g: torch.Generator) -> Tensor:
    """Add one value in -most..most to all sub-pixels of an image, clipped to 0..255 (AFT paper, Sec. 5.1)."""
    value = torch.randint(-most, most + 1, (len(images), 1, 1, 1), generator=g)
    return (images.long() + value).clamp_(0, 255).to(torch.uint8)


def erase(images: Tensor, p: float, g: torch.Generator) -> Tensor:
    """Replace a box of each normalised image by N(0, 1) with probability p (random erasing, Zhong et al. 2017).

    The box has 2 % to a third of the area and sides of ratio 0.3 to 1/0.3.
    """
    n, channels, height, width = images.shape
    images, chosen = images.clone(), torch.rand(n, generator=g) < p
    for i in chosen.nonzero().flatten().tolist():
        for area, aspect, y, x in torch.rand(10, 4, generator=g).tolist():
            inside = (0.02 + (1 / 3 - 0.02) * area) * height * width
            ratio = math.exp(math.log(0.3) * (1 - 2 * aspect))
            h, w = round(math.sqrt(inside * ratio)), round(math.sqrt(inside / ratio))
            if h < height and w < width:
                top, left = int(y * (height - h + 1)), int(x * (width - w + 1))
                images[i, :, top : top + h, left : left + w] = torch.randn(channels, h, w, generator=g)
                break
    return images


def soft_targets(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """Return targets (B, classes): 1 - smoothing on the label, and smoothing spread over all classes."""
    return F.one_hot(labels, classes).float() * (1 - smoothing) + smoothing / classes


def mix(images: Tensor, targets: Tensor, mixup: float, cutmix: float, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Mix the batch with itself reversed by mixup (Zhang et al. 2017) or CutMix (Yun et al. 2019).

    The weight is drawn from Beta(alpha, alpha). If both are enabled, each batch gets one of them with equal
    probability.
    """
    cut = cutmix > 0 and (mixup <= 0 or rng.random() < 0.5)
    alpha = cutmix if cut else mixup
    weight = rng.betavariate(alpha, alpha)
    if cut:
        height, width = images.shape[-2:]
        h, w = int(height * math.sqrt(1 - weight)), int(width * math.sqrt(1 - weight))
        y, x = rng.randrange(height), rng.randrange(width)
        top, bottom, left, right = (
            max(y - h // 2, 0),
            min(y + (h + 1) // 2, height),
            max(x - w // 2, 0),
            min(x + (w + 1) // 2, width),
        )
        images, other = images.clone(), images.flip(0)
        images[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
        # The borders may have cut the box.
        weight = 1 - (bottom - top) * (right - left) / (height * width)
    else:
        images = images * weight + images.flip(0) * (1 - weight)
    return images, targets * weight + targets.flip(0) * (1 - weight)


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch at the end of the block.

    timm's augmentations draw from them.
    """
    import numpy

    states = random.getstate(), numpy.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def rand_augment(spec: str, size: tuple[int, int], mean: tuple[float, ...]) -> Callable[[Image], Image]:
    """Build timm's RandAugment from its string, with the fill colour and translation of its ImageNet transforms."""
    from ...system.torchvision import ensure_torchvision

    ensure_torchvision()
    try:
        from timm.data.auto_augment import rand_augment_transform
    except ImportError as why:
        raise MixerError("Augment: randaugment needs timm; pip install 'tokenmix[vision]'.") from why
    fill = tuple(min(255, round(255 * m)) for m in (mean if len(mean) == 3 else mean * 3))
    from PIL import Image

    try:
        if not spec.startswith("rand-"):
            raise ValueError("it does not begin with 'rand-'")
        policy = rand_augment_transform(
            spec,
            {"translate_const": int(min(size) * 0.45), "img_mean": fill, "interpolation": Image.Resampling.BICUBIC},
        )
    except (AssertionError, ValueError, KeyError) as why:
        raise MixerError(
            f"Augment: randaugment={spec!r} is not a RandAugment string of timm ({why}); "
            + "an example is 'rand-m9-mstd0.5-inc1'."
        ) from why
    for op in policy.ops:
        if op.name.startswith("Posterize"):
            op.aug_fn = posterize
    return policy


def posterize(picture: Image, bits: int, **_: object) -> Image:
    """Keep the upper bits of each pixel.

    RandAugment's strength reaches 0 bits, which is black and which Pillow refuses from version 13 on.
    """
    mask = 0xFF & ~(2 ** (8 - bits) - 1)
    return picture.point([level & mask for level in range(256)] * len(picture.getbands()))


def with_pillow(images: Tensor, keys: list[int], policy: Callable[[Image], Image] | None, colour: float) -> Tensor:
    """Apply RandAugment and colour jitter to each image with its own key."""
    import numpy

    out = []
    with kept_random_state():
        for image, key in zip(images, keys, strict=True):
            random.seed(key)
            numpy.random.seed(key & 0xFFFFFFFF)
            torch.default_generator.manual_seed(key)
            picture = tensor_to_pil(image).convert("RGB")
            picture = policy(picture) if policy is not None else picture
            picture = jitter(picture, colour, random.Random(key_of(key, 1))) if colour > 0 else picture
            out.append(pil_to_tensor(picture.convert("L" if len(image) == 1 else "RGB")))
    return torch.stack(out)


def jitter(picture: Image, strength: float, rng: random.Random) -> Image:
    """Scale brightness, contrast and saturation in random order, each by a factor in 1 - strength .. 1 + strength."""
    from PIL import ImageEnhance

    kinds = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
    rng.shuffle(kinds)
    for kind in kinds:
        picture = kind(picture).enhance(rng.uniform(max(0.0, 1 - strength), 1 + strength))
    return picture
