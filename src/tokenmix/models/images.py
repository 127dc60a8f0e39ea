"""What image models share: checks of configs and images, blocks, and resizing of parameters per position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MixerError
from ..mixers.traced import hold_grid, hold_symbolic_grid, is_symbolic
from ..types import Options, Spec
from .blocks import Block

ResizeStep = tuple[Any, tuple[int, int], tuple[int, int], int]
"""A mixer, the old and the new grid of its parameters, and the tokens before the grid."""


class ImageConfig(Protocol):
    """The fields of the config of an image model that this module reads."""

    @property
    def mixers(self) -> tuple[Spec, ...]: ...
    @property
    def layers(self) -> int: ...
    @property
    def image_size(self) -> tuple[int, ...]: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def dropout(self) -> float: ...
    @property
    def drop_path(self) -> float: ...
    def specs(self) -> list[Spec]: ...


_tracing = torch._C._get_tracing_state


def normalise_image_config(config: ImageConfig, *positive: str, not_negative: Sequence[str] = ("classes",)) -> None:
    """Convert the lists of a frozen config to tuples and its image size to two numbers; refuse numbers out of range.

    Dropout and drop_path are checked as well.
    """
    who = type(config).__name__
    object.__setattr__(config, "mixers", tuple(config.mixers))
    object.__setattr__(config, "image_size", both_sides(config.image_size, who))
    for names, least, wanted in ((positive, 1, "positive"), (not_negative, 0, ">= 0")):
        for name in names:
            if getattr(config, name) < least:
                raise MixerError(f"{who}: {name} must be {wanted}, got {getattr(config, name)}.")
    if not (0 <= config.dropout < 1 and 0 <= config.drop_path < 1):
        raise MixerError(
            f"{who}: dropout and drop_path must be in [0, 1), got {config.dropout} and {config.drop_path}."
        )


def check_layers(config: ImageConfig) -> None:
    """Refuse more specs than layers, or none."""
    if not 0 < len(config.mixers) <= config.layers:
        raise MixerError(
            f"{type(config).__name__}: mixers must hold 1 to layers={config.layers} specs, got {len(config.mixers)}."
        )


def check_multiples(config: ImageConfig, of: int, named: str) -> None:
    """Refuse an image size that is not a multiple of ``of``, so not made of whole tokens."""
    if any(n % of for n in config.image_size):
        raise MixerError(f"{type(config).__name__}: image_size={list(config.image_size)} must be multiples of {named}.")


def check_images(who: str, images: Tensor, channels: int) -> None:
    """Raise an error unless ``images`` are a batch of normalised images."""
    if images.ndim != 4 or images.shape[1] != channels or min(images.shape[2:]) < 1:
        raise MixerError(f"{who}: expects images (batch, {channels}, height, width), got {tuple(images.shape)}.")
    if not images.is_floating_point():
        raise MixerError(f"{who}: expects normalised floating point images, got {images.dtype}.")


def fit_images(
    who: str, images: Tensor, *, channels: int, patch: int, built: tuple[int, ...], parts: list[str]
) -> Tensor:
    """Check images and pad them to whole patches; refuse another size than ``built`` if ``parts`` belong to it.

    A program of torch.fx, which holds no checks in Python, has one of its own for the size.
    """
    if is_symbolic(images):
        x = pad_to_patches(images, patch)
        return hold_symbolic_grid(x, built, who) if parts else x
    check_images(who, images, channels)
    x = pad_to_patches(images, patch)
    if parts and tuple(x.shape[2:]) != built:
        refuse_size(who, images, built, patch, parts)
    return held_size(x, who) if parts else x


def image_block(
    config: ImageConfig,
    layer: int,
    *,
    dim: int,
    mlp_ratio: float,
    tokens: int,
    grid: tuple[int, int],
    cls: type[Block] = Block,
    **more: object,
) -> Block:
    """Build block number ``layer`` of an image model, a ``cls``.

    Drop path rises linearly over all layers to that of the config. ``more`` are further options of the block.
    """
    options: Options = {"mlp_ratio": mlp_ratio, "norm_eps": config.norm_eps, "dropout": config.dropout, **more}
    drop_path = config.drop_path * layer / max(config.layers - 1, 1)
    return cls(dim, config.specs()[layer], causal=False, max_len=tokens, grid=grid, drop_path=drop_path, **options)


def parts_with_positions(blocks: Iterable[Block], positions: str = "") -> list[str]:
    """Name the parts of a model that have parameters per position.

    These are its table, if ``positions`` names one, and its mixers' classes.
    """
    return [positions] * bool(positions) + sorted(
        {type(block.mixer).__name__ for block in blocks if block.mixer.max_len is not None}
    )


def refuse_size(who: str, images: Tensor, built: tuple[int, ...], patch: int, parts: list[str]) -> NoReturn:
    """Raise the error for images of another size than that of the parameters per position."""
    height, width = images.shape[2:]
    grid = -(-height // patch), -(-width // patch)
    got = f"{height} x {width}, a grid of {grid[0]} x {grid[1]}"
    wanted = [n * patch for n in grid]
    size = " x ".join(str(n) for n in built)
    raise MixerError(
        f"{who}: {' and '.join(parts)} belong to images of {size}, got {got}; "
        + f"call model.resize({wanted}) first, or resize the images."
    )


def resize_mixers(steps: Sequence[ResizeStep]) -> None:
    """Interpolate the mixers' parameters per position, or none of them if one does not support it.

    A mixer without such parameters is left as it is.
    """
    for mixer, old, new, prefix in resizable(steps):
        mixer.resize_grid(old, new, prefix)


def resizable(steps: Sequence[ResizeStep]) -> list[ResizeStep]:
    """Return the steps that change something; refuse a mixer that does not support it."""
    bound = [
        step
        for step in steps
        if step[1] != step[2] and (step[0].max_len is not None or getattr(step[0], "grid_size", None) is not None)
    ]
    for mixer, _, new, _ in bound:
        if not hasattr(mixer, "resize_grid"):
            why = (
                "has parameters per position that cannot be resized to another image; "
                + f"build the model for {new} patches"
            )
            raise MixerError(f"{type(mixer).__name__} {why}.")
    return bound


def held_size(images: Tensor, who: str) -> Tensor:
    """Return images, or patches, (B, C, H, W), such that a program of torch.jit.trace refuses those of another size."""
    return hold_grid(images, tuple(images.shape[2:]), who)[0] if _tracing() is not None else images


def pad_to_patches(images: Tensor, patch: int) -> Tensor:
    """Pad images with zeros at the right and bottom, up to whole patches."""
    down, right = -images.shape[2] % patch, -images.shape[3] % patch
    # a program of torch.jit.trace or torch.fx may be given images of another size
    pads = is_symbolic(images) or _tracing() is not None or down or right
    return F.pad(images, (0, right, 0, down)) if pads else images


def both_sides(size: int | Sequence[int], who: str) -> tuple[int, int]:
    """Return (height, width) of an image size given as one number or two."""
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2 or not all(isinstance(n, int) and n > 0 for n in sides):
        raise MixerError(f"{who}: image_size must be a positive integer or two, [height, width], got {size!r}.")
    return sides
