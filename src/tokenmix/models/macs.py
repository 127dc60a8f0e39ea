"""Multiply-accumulates of a model of images, from the shapes of its layers and the cost formulas of its mixers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

from torch import nn

from ..errors import MixerError
from .blocks import Block
from .eamlp import EAMLP, STRIDE, MemoryBlock, split_grids
from .images import both_sides
from .pyramid import Pyramid
from .segmentation import MixerResidual, Segmenter
from .vit import ViT

Size = tuple[int, int]
Places = Iterator[tuple[nn.Module, int]]


class Macs(NamedTuple):
    """Multiply-accumulates of one image.

    total: of all matrix products and convolutions, and of what joins tokens; norms, activations, biases and softmax are not counted, as papers do.
    mixing: the part that joins tokens, beside the projections: 2 T^2 D a layer for attention, 2 T D for Hydra.
    """

    total: int
    mixing: int

    @property
    def share(self) -> float:
        """The part of all that goes into joining tokens."""
        return self.mixing / self.total


def macs(model: nn.Module, image_size: Any = None) -> Macs:
    """Multiply-accumulates of ``model`` on one image of ``image_size``, by default the size it is built for; nothing is run.

    Args:
        model: a ViT, Pyramid, EAMLP or Segmenter; also one on the meta device.
        image_size: one number or (height, width), filled up to whole patches as the model does. Learned positions cost nothing and need no ``resize``.

    A mixer counts by its own ``cost(T)``: one that reduces a grid (``spatial_reduction``) is exact where its ratio divides the grid.

    Raises:
        MixerError: where a mixer declares no cost, or has parameters for fewer positions than the size has tokens.
    """
    walk = WALKS.get(type(model))
    if walk is None:
        raise MixerError(f"macs: knows {', '.join(c.__name__ for c in WALKS)}, got {type(model).__name__}.")
    config: Any = model.backbone.config if isinstance(model, Segmenter) else model.config
    size = config.image_size if image_size is None else both_sides(image_size, "macs")
    counts = [count(module, places) for module, places in walk(model, size)]
    return Macs(sum(c.total for c in counts), sum(c.mixing for c in counts))


def count(module: Any, places: int) -> Macs:
    """Of one layer applied at so many places: tokens, output cells of a convolution, or one."""
    if isinstance(module, (Block, MixerResidual)):
        cost = module.mixer.cost(places)
        mlp = count(module.mlp, places).total if isinstance(module, Block) else 0
        return Macs(cost.flops // 2 + mlp, cost.mixing // 2)
    if isinstance(module, MemoryBlock):
        mixing = places * (module.memory.memory_k.numel() + module.memory.memory_v.numel())
        return Macs(mixing + weights(module.memory, places) + weights(module.mlp, places), mixing)
    return Macs(weights(module, places), 0)


def weights(module: nn.Module, places: int) -> int:
    """Every weight of the Linear and convolutional layers inside, once at each place."""
    return places * sum(m.weight.numel() for m in module.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))


def cells(size: Size, stride: int) -> int:
    """Cells of this stride that cover an image."""
    return prod(-(-n // stride) for n in size)


def of_vit(model: ViT, size: Size, head: bool = True) -> Places:
    """Each layer of a ViT, and at how many places it is applied."""
    patches = cells(size, model.config.patch)
    yield model.patch, patches
    yield from ((block, model.config.prefix + patches) for block in model.blocks)
    if head and model.head is not None:
        yield model.head, 1


def of_pyramid(model: Pyramid, size: Size, head: bool = True) -> Places:
    """Each layer of a pyramid, and at how many places it is applied."""
    c = model.config
    whole = (-(-size[0] // c.stride) * c.stride, -(-size[1] // c.stride) * c.stride)
    for stage, stride in zip(model.stages, c.strides, strict=True):
        patches = cells(whole, stride)
        yield stage.patch, patches
        yield from ((block, stage.prefix + patches) for block in stage.blocks)
    if head and model.head is not None:
        yield model.head, 1


def of_eamlp(model: EAMLP, size: Size) -> Places:
    """Each layer of an EAMLP, and at how many places it is applied."""
    whole = (-(-size[0] // STRIDE) * STRIDE, -(-size[1] // STRIDE) * STRIDE)
    *grids, last = (prod(grid) for grid in split_grids(whole))
    for stage, tokens in zip(model.token_stages, grids, strict=True):
        yield stage.project, tokens
        yield stage.block, tokens
    yield model.project, last
    yield from ((block, 1 + last) for block in model.blocks)
    if model.head is not None:
        yield model.head, 1


def of_segmenter(model: Segmenter, size: Size) -> Places:
    """Each layer of a backbone and a segmentation head, and at how many places it is applied."""
    backbone: Any = model.backbone
    yield from (of_vit if isinstance(backbone, ViT) else of_pyramid)(backbone, size, head=False)
    unit = backbone.config.patch if isinstance(backbone, ViT) else backbone.config.stride
    places = cells(size, unit) * (unit // model.stride) ** 2
    for layer in (model.head.reduce, model.head.block, model.head.refine, model.head.classify):
        yield layer, places


WALKS: dict[type, Callable[..., Places]] = {ViT: of_vit, Pyramid: of_pyramid, EAMLP: of_eamlp, Segmenter: of_segmenter}
