"""Multiply-accumulates of an image model, from the shapes of its layers and the cost formulas of its mixers."""

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
from .resnet import ResNet
from .segmentation import MixerResidual, Segmenter
from .vit import ViT

Size = tuple[int, int]
Applications = Iterator[tuple[nn.Module, int]]


class Macs(NamedTuple):
    """Multiply-accumulates for one image.

    Attributes:
        total: those of all matrix products and convolutions and of token mixing. Norms, activations, biases and softmax
            are not counted, as is usual in papers.
        mixing: those of token mixing without the projections: 2 T^2 D per layer for attention, 2 T D for Hydra.
    """

    total: int
    mixing: int

    @property
    def share(self) -> float:
        """Return the share of token mixing in the total."""
        return self.mixing / self.total


def macs(model: nn.Module, image_size: Any = None) -> Macs:
    """Count the multiply-accumulates of ``model`` on one image of ``image_size``, without running it.

    Each mixer is counted by its ``cost(T)``; one that reduces a grid (``spatial_reduction``) is exact if its ratio
    divides the grid.

    Args:
        model: a ViT, Pyramid, EAMLP, ResNet or Segmenter, which may be on the meta device.
        image_size: one number or (height, width), padded to whole patches as the model does; None: the size it is built
            for. Learned positions cost nothing and need no ``resize``.

    Raises:
        MixerError: if a mixer declares no cost, or has parameters for fewer positions than the size has tokens.
    """
    walk = WALKS.get(type(model))
    if walk is None:
        raise MixerError(f"macs: supports {', '.join(c.__name__ for c in WALKS)}, got {type(model).__name__}.")
    config: Any = model.backbone.config if isinstance(model, Segmenter) else model.config
    size = config.image_size if image_size is None else both_sides(image_size, "macs")
    counts = [layer_macs(module, times) for module, times in walk(model, size)]
    return Macs(sum(c.total for c in counts), sum(c.mixing for c in counts))


def layer_macs(module: Any, times: int) -> Macs:
    """Count those of one layer that is applied ``times`` times.

    It is applied to each token, to each output cell of a convolution, or once.
    """
    if isinstance(module, (Block, MixerResidual)):
        cost = module.mixer.cost(times)
        mlp = layer_macs(module.mlp, times).total if isinstance(module, Block) else 0
        return Macs(cost.flops // 2 + mlp, cost.mixing // 2)
    if isinstance(module, MemoryBlock):
        mixing = times * (module.memory.memory_k.numel() + module.memory.memory_v.numel())
        return Macs(mixing + weight_macs(module.memory, times) + weight_macs(module.mlp, times), mixing)
    return Macs(weight_macs(module, times), 0)


def weight_macs(module: nn.Module, times: int) -> int:
    """Count every weight of the linear and convolutional layers inside, once for each of ``times`` applications."""
    return times * sum(m.weight.numel() for m in module.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))


def cells(size: Size, stride: int) -> int:
    """Count the cells of this stride that cover an image."""
    return prod(-(-n // stride) for n in size)


def layers_of_vit(model: ViT, size: Size, head: bool = True) -> Applications:
    """Yield each layer of a ViT with the number of times it is applied."""
    patches = cells(size, model.config.patch)
    yield model.patch, patches
    yield from ((block, model.config.prefix + patches) for block in model.blocks)
    if head and model.head is not None:
        yield model.head, 1


def layers_of_pyramid(model: Pyramid, size: Size, head: bool = True) -> Applications:
    """Yield each layer of a pyramid with the number of times it is applied."""
    c = model.config
    whole = (-(-size[0] // c.stride) * c.stride, -(-size[1] // c.stride) * c.stride)
    for stage, stride in zip(model.stages, c.strides, strict=True):
        patches = cells(whole, stride)
        yield stage.patch, patches
        yield from ((block, stage.prefix + patches) for block in stage.blocks)
    if head and model.head is not None:
        yield model.head, 1


def layers_of_eamlp(model: EAMLP, size: Size) -> Applications:
    """Yield each layer of an EAMLP with the number of times it is applied."""
    whole = (-(-size[0] // STRIDE) * STRIDE, -(-size[1] // STRIDE) * STRIDE)
    *grids, last = (prod(grid) for grid in split_grids(whole))
    for stage, tokens in zip(model.token_stages, grids, strict=True):
        yield stage.project, tokens
        yield stage.block, tokens
    yield model.project, last
    yield from ((block, 1 + last) for block in model.blocks)
    if model.head is not None:
        yield model.head, 1


def layers_of_resnet(model: ResNet, size: Size) -> Applications:
    """Yield each layer of a ResNet with the number of times it is applied: a stage's once in each of its cells."""
    yield model.stem, cells(size, 1)
    for i, stage in enumerate(model.stages):
        yield stage, cells(size, 2**i)  # the stride is in a block's first convolution
    if model.head is not None:
        yield model.head, 1


def layers_of_segmenter(model: Segmenter, size: Size) -> Applications:
    """Yield each layer of a backbone and a segmentation head with the number of times it is applied."""
    backbone: Any = model.backbone
    yield from (layers_of_vit if isinstance(backbone, ViT) else layers_of_pyramid)(backbone, size, head=False)
    unit = backbone.config.patch if isinstance(backbone, ViT) else backbone.config.stride
    times = cells(size, unit) * (unit // model.stride) ** 2
    for layer in (model.head.reduce, model.head.block, model.head.refine, model.head.classify):
        yield layer, times


WALKS: dict[type, Callable[..., Applications]] = {
    ViT: layers_of_vit,
    Pyramid: layers_of_pyramid,
    EAMLP: layers_of_eamlp,
    ResNet: layers_of_resnet,
    Segmenter: layers_of_segmenter,
}
