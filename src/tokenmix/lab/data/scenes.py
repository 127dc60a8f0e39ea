"""Synthetic scenes with a mask: textured shapes that cover each other, a pure function of seed and index.

They are drawn by a few formulas and are no photographs: a score on them says that a model learns to outline shapes,
and nothing of how well it outlines things in the world.
"""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from ...errors import MixerError
from .augment_ops import key_of

SCENE_CLASSES = ("background", "disc", "square", "triangle", "ring", "cross")
TEXTURES = ("plain", "stripes", "checks", "spots", "grid")  # each the usual one of a shape, in the same order
USUAL = 0.75  # share of the shapes that have it
OBJECTS = (2, 5)  # fewest and most in a scene
RADIUS = (0.15, 0.32)  # of the shorter side
NOISE = 6.0  # standard deviation of the noise of a sub-pixel


def scene(seed: int, index: int, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Draw scene ``index`` of a seed: an image, uint8 (3, H, W), and its mask of classes, int64 (H, W).

    A scene has 2 to 5 shapes of ``SCENE_CLASSES`` at random places, sizes and angles, drawn one over the other on a
    textured background; what is covered belongs to the shape on top. Three shapes of four have the texture that is
    usual for their class, the others any; the colours tell nothing. The same numbers give the same scene; nothing is
    stored.

    Raises:
        MixerError: for a size below 8 x 8.
    """
    picture, owner, kinds = scene_of_shapes(seed, index, size)
    return picture, kinds[owner]


def scene_of_shapes(seed: int, index: int, size: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the same scene with its shapes apart, as detection and instance segmentation need them.

    Returns:
        the image, uint8 (3, H, W); the number of the shape that each pixel belongs to, 0 for the background, int64
        (H, W); and the class of each number, int64 (1 + shapes,). A shape that others cover has no pixel.

    Raises:
        MixerError: for a size below 8 x 8.
    """
    height, width = size
    if min(size) < 8:
        raise MixerError(f"scene: size={height} x {width} must be at least 8 x 8.")
    rng = random.Random(key_of(seed, index, 0))
    short = min(size)
    y, x = torch.arange(height)[:, None] + 0.5, torch.arange(width)[None] + 0.5
    picture, owner = _texture(rng, rng.choice(TEXTURES), x / short, y / short), torch.zeros(size, dtype=torch.int64)
    kinds = [0]
    for _ in range(rng.randint(*OBJECTS)):
        kinds.append(kind := rng.randrange(1, len(SCENE_CLASSES)))
        radius = short * rng.uniform(*RADIUS)
        left, top, angle = rng.uniform(0, width), rng.uniform(0, height), rng.uniform(0, 2 * math.pi)
        box = tuple(slice(max(int(at - radius), 0), int(at + radius) + 1) for at in (top, left))
        dx, dy = (x[:, box[1]] - left) / radius, (y[box[0]] - top) / radius
        u, v = math.cos(angle) * dx + math.sin(angle) * dy, math.cos(angle) * dy - math.sin(angle) * dx
        inside = _inside_shape(SCENE_CLASSES[kind], u, v)
        texture = TEXTURES[kind - 1] if rng.random() < USUAL else rng.choice(TEXTURES)
        part, own = picture[:, *box], _texture(rng, texture, u * radius / short, v * radius / short)
        picture[:, *box] = torch.where(inside, own, part)
        owner[box][inside] = len(kinds) - 1
    noise = torch.randn(picture.shape, generator=torch.Generator().manual_seed(key_of(seed, index, 1)))
    image = (picture + NOISE * noise).round_().clamp_(0, 255).to(torch.uint8)
    return image, owner, torch.tensor(kinds)


def _inside_shape(shape: str, u: Tensor, v: Tensor) -> Tensor:
    """Return which points (u, v) lie inside a shape within the unit circle."""
    if shape == "disc":
        return u.square() + v.square() <= 1
    if shape == "square":
        return torch.maximum(u.abs(), v.abs()) <= math.sqrt(0.5)
    if shape == "triangle":  # three half planes at a distance of 1/2 from the centre
        turns = [2 * math.pi * k / 3 for k in range(3)]
        return torch.stack([math.cos(t) * u + math.sin(t) * v for t in turns]).amax(0) <= 0.5
    if shape == "ring":
        return ((u.square() + v.square()) - 0.625).abs() <= 0.375  # radii from 1/2 to 1
    arm, along = torch.minimum(u.abs(), v.abs()), torch.maximum(u.abs(), v.abs())
    return (arm <= 0.3) & (along <= math.sqrt(1 - 0.3**2))  # cross


def _texture(rng: random.Random, kind: str, x: Tensor, y: Tensor) -> Tensor:
    """Return a texture of two colours (3, H, W) in 0..255 at the points (x, y), in sides of the picture."""
    first, second = (torch.tensor([float(rng.randrange(256)) for _ in range(3)])[:, None, None] for _ in range(2))
    x, y = torch.broadcast_tensors(x, y)
    period, phase = rng.uniform(0.06, 0.14), rng.uniform(0, 1)
    a, b = 2 * math.pi * (x / period + phase), 2 * math.pi * (y / period + phase)
    if kind == "plain":
        return first.repeat(1, *x.shape)
    if kind == "stripes":
        share = (a.sin() > 0).float()
    elif kind == "checks":
        share = (a.sin() * b.sin() > 0).float()
    elif kind == "spots":
        share = (a.sin() + b.sin() > 0.8).float()
    else:
        share = (torch.maximum(a.sin(), b.sin()) > 0.8).float()
    return first + share * (second - first)
