"""Multiply-accumulates of a model of images or clouds, from the shapes of its layers and its mixers' cost formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import nn

from ..errors import MixerError
from .blocks import Block
from .dit import DiT, DiTBlock
from .eamlp import EAMLP, STRIDE, MemoryBlock, split_grids
from .images import both_sides
from .mae import MAE, kept_count
from .points import NeighbourEmbedding, PointBlock, PointClassifier, PointSegmenter
from .pyramid import Pyramid
from .resnet import ResNet
from .segmentation import MixerResidual, Segmenter
from .stem import ConvStem
from .vit import ViT

Size = tuple[int, int]
Applications = Iterator[tuple[nn.Module, int]]


class Macs(NamedTuple):
    """Multiply-accumulates for one image or cloud.

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


def macs(model: nn.Module, image_size: int | Sequence[int] | None = None) -> Macs:
    """Count the multiply-accumulates of ``model`` on one image of ``image_size`` or one cloud, without running it.

    Each mixer is counted by its ``cost(T)``; one that reduces a grid (``spatial_reduction``) is exact if its ratio
    divides the grid. An MAE is counted as it trains, with its share of patches hidden; a DiT for one step of sampling.
    The distances by which a cloud's neighbours are found are not counted.

    Args:
        model: a ViT, Pyramid, EAMLP, ResNet, Segmenter, MAE, DiT, PointClassifier or PointSegmenter, which may be on
            the meta device.
        image_size: one number or (height, width), padded to whole patches as the model does; None: the size it is built
            for. Learned positions cost nothing and need no ``resize``. Of a cloud, the number of its points.

    Raises:
        MixerError: if a mixer declares no cost, or has parameters for fewer positions than the size has tokens; for a
            cloud without a number of points, or with fewer than the model needs.
    """
    walk = WALKS.get(type(model))
    if walk is None:
        raise MixerError(f"macs: supports {', '.join(c.__name__ for c in WALKS)}, got {type(model).__name__}.")
    config: Any = model.backbone.config if isinstance(model, Segmenter) else model.config
    if isinstance(model, (PointClassifier, PointSegmenter)):
        size: Any = _points(model, image_size)
    else:
        size = config.image_size if image_size is None else both_sides(image_size, "macs")
    counts = [layer_macs(module, times) for module, times in walk(model, size)]
    return Macs(sum(c.total for c in counts), sum(c.mixing for c in counts))


def layer_macs(module: nn.Module, times: int) -> Macs:
    """Count those of one layer that is applied ``times`` times.

    It is applied to each token, to each output cell of a convolution, or once.
    """
    if isinstance(module, (Block, MixerResidual, PointBlock)):
        cost = module.mixer.cost(times)
        rest = module.mlp if isinstance(module, Block) else module.last if isinstance(module, PointBlock) else None
        beside = weight_macs(rest, times) if rest is not None else 0
        if isinstance(module, DiTBlock):
            beside += weight_macs(module.modulation, 1)
        return Macs(cost.flops // 2 + beside, cost.mixing // 2)
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


def layers_of_stem(stem: nn.Conv2d | ConvStem, size: Size) -> Applications:
    """Yield each convolution by which a ViT embeds its patches."""
    patch = int(stem.stride[0])
    if not isinstance(stem, ConvStem):
        yield stem, cells(size, patch)
        return
    whole = (-(-size[0] // patch) * patch, -(-size[1] // patch) * patch)
    for i, layer in enumerate(module for module in stem.layers if isinstance(module, nn.Conv2d)):
        yield layer, cells(whole, 2 ** (i + 1))
    yield stem.out, cells(whole, patch)


def layers_of_vit(model: ViT, size: Size, head: bool = True) -> Applications:
    """Yield each layer of a ViT with the number of times it is applied."""
    patches = cells(size, model.config.patch)
    yield from layers_of_stem(model.patch, size)
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


def layers_of_resnet(model: ResNet, size: Size, head: bool = True) -> Applications:
    """Yield each layer of a ResNet with the number of times it is applied: a stage's once in each of its cells."""
    yield model.stem, cells(size, 1)
    for i, stage in enumerate(model.stages):
        yield stage, cells(size, 2**i)  # the stride is in a block's first convolution
    if head and model.head is not None:
        yield model.head, 1


def layers_of_segmenter(model: Segmenter, size: Size) -> Applications:
    """Yield each layer of a backbone and a segmentation head with the number of times it is applied."""
    backbone: Any = model.backbone
    if isinstance(backbone, ResNet):
        yield from layers_of_resnet(backbone, size, head=False)
        unit = model.stride
    else:
        yield from (layers_of_vit if isinstance(backbone, ViT) else layers_of_pyramid)(backbone, size, head=False)
        unit = backbone.config.patch if isinstance(backbone, ViT) else backbone.config.stride
    times = cells(size, unit) * (unit // model.stride) ** 2
    for layer in (model.head.reduce, model.head.block, model.head.refine, model.head.classify):
        yield layer, times


def layers_of_mae(model: MAE, size: Size) -> Applications:
    """Yield each layer of a masked autoencoder with the number of times it is applied.

    All patches are embedded; those that are kept pass the encoder, all the decoder's blocks, and those that are hidden
    its head.
    """
    config = model.config
    patches = cells(size, config.patch)
    kept = kept_count(patches, config.mask_ratio)
    yield model.encoder.patch, patches
    yield from ((block, config.prefix + kept) for block in model.encoder.blocks)
    yield model.decoder.embed, config.prefix + kept
    yield from ((block, config.prefix + patches) for block in model.decoder.blocks)
    yield model.decoder.head, patches - kept


def layers_of_dit(model: DiT, size: Size) -> Applications:
    """Yield each layer of a diffusion transformer with the number of times it is applied in one step."""
    patches = cells(size, model.config.patch)
    yield model.patch, patches
    yield model.condition, 1
    yield from ((block, patches) for block in model.blocks)
    yield model.head.modulation, 1
    yield model.head.out, patches


def _points(model: PointClassifier | PointSegmenter, points: int | Sequence[int] | None) -> int:
    least = model.trunk.least
    if isinstance(points, bool) or not isinstance(points, int) or points < least:
        raise MixerError(
            f"macs: a {type(model).__name__} takes clouds of any size; give the number of points, at least {least}, as "
            + f"image_size, got {points!r}."
        )
    return points


def layers_of_points(model: PointClassifier | PointSegmenter, points: int) -> Applications:
    """Yield each layer of a model of clouds with the number of times it is applied."""
    trunk, left = model.trunk, points
    yield from ((layer, points) for layer in trunk.lift)
    for stage in trunk.stages:
        assert isinstance(stage, NeighbourEmbedding)
        left = stage.samples or left
        yield stage, left * stage.neighbours
    yield from ((layer, left) for layer in (*trunk.enter, *trunk.blocks, trunk.fuse))
    if isinstance(model, PointSegmenter) and model.told is not None:
        yield model.told, 1
    yield model.head, left if isinstance(model, PointSegmenter) else 1


WALKS: dict[type, Callable[..., Applications]] = {
    ViT: layers_of_vit,
    Pyramid: layers_of_pyramid,
    EAMLP: layers_of_eamlp,
    ResNet: layers_of_resnet,
    Segmenter: layers_of_segmenter,
    MAE: layers_of_mae,
    DiT: layers_of_dit,
    PointClassifier: layers_of_points,
    PointSegmenter: layers_of_points,
}
