"""What models of images check alike: the images themselves, and their size where parameters belong to positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor

from ..errors import MixerError
from .blocks import Block


def check_images(who: str, images: Tensor, channels: int) -> None:
    """Refuse what is not a batch of normalised images."""
    if images.ndim != 4 or images.shape[1] != channels or min(images.shape[2:]) < 1:
        raise MixerError(f"{who}: expects images (batch, {channels}, height, width), got {tuple(images.shape)}.")
    if not images.is_floating_point():
        raise MixerError(f"{who}: expects normalised floating point images, got {images.dtype}.")


def image_block(config: Any, layer: int, *, dim: int, mlp_ratio: float, tokens: int, grid: tuple[int, int]) -> Block:
    """Block number ``layer`` of a model of images; drop path rises linearly to the config's over all layers."""
    options: dict[str, Any] = {"mlp_ratio": mlp_ratio, "norm_eps": config.norm_eps, "dropout": config.dropout}
    drop_path = config.drop_path * layer / max(config.layers - 1, 1)
    return Block(dim, config.specs()[layer], causal=False, max_len=tokens, grid=grid, drop_path=drop_path, **options)


def bound_parts(blocks: Iterable[Any], positions: str = "") -> list[str]:
    """What in a model has parameters per position: the name given to its table, if it has one, and its mixers' class names."""
    return [positions] * bool(positions) + sorted({type(block.mixer).__name__ for block in blocks if block.mixer.max_len is not None})


def refuse_size(who: str, images: Tensor, built: tuple[int, ...], patch: int, parts: list[str]) -> NoReturn:
    """The one error for images of another size than the parameters per position were made for."""
    height, width = images.shape[2:]
    grid = -(-height // patch), -(-width // patch)
    got = f"{height} x {width}, a grid of {grid[0]} x {grid[1]}"
    wanted = [n * patch for n in grid]
    size = " x ".join(str(n) for n in built)
    raise MixerError(f"{who}: {' and '.join(parts)} belong to images of {size}, got {got}; call model.resize({wanted}) first, or resize the images.")
