"""Semantic segmentation with EANet's head (Guo et al. 2021, arXiv 2105.02358) on maps of a ViT, pyramid or ResNet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from ..mixers import Mixer, build_mixer
from ..system.config import Json
from ..system.properties import named_errors
from ..types import Spec
from .blocks import PROJECTIONS, Block, check_form, complete_spec
from .images import both_sides, resizable, resize_mixers
from .layers import BatchNorm2d, init_linear
from .model import Model
from .pyramid import Pyramid, PyramidConfig
from .resnet import ResNet, ResNetConfig
from .vit import ViT, ViTConfig

Backbone: TypeAlias = Pyramid | ViT | ResNet
BACKBONES: tuple[type[Backbone], ...] = (Pyramid, ViT, ResNet)


def external_head() -> Spec:
    """Return the spec of EANet's layer.

    Its first 1 x 1 convolution has a bias, its second none; one memory has 64 slots.
    """
    return {"name": "external", "slots": 64, "tied": True, "out_bias": False}


@dataclass(frozen=True)
class SegmentationConfig(Json):
    """The segmentation head as JSON; the defaults are EANet's.

    Args:
        classes: classes of each pixel, at least 1.
        mixer: spec of the middle layer; any mixer of width ``width``.
        width: channels after the first 3 x 3 convolution, at least 1.
        hidden: channels after the second 3 x 3 convolution, at least 1.
        levels: indices of the backbone's feature maps that are read, rising, finest first. They are resampled to the
            finest grid among them and concatenated.
        dropout: rate in [0, 1) at which whole channels are dropped before the classifier.
    """

    classes: int
    mixer: Spec = field(default_factory=external_head)
    width: int = 512
    hidden: int = 256
    levels: tuple[int, ...] = (1, 2, 3)
    dropout: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", tuple(self.levels))
        for name in ("classes", "width", "hidden"):
            if getattr(self, name) < 1:
                raise MixerError(f"SegmentationConfig: {name} must be positive, got {getattr(self, name)}.")
        rising = all(isinstance(n, int) and n >= 0 for n in self.levels) and list(self.levels) == sorted(
            set(self.levels)
        )
        if not self.levels or not rising:
            raise MixerError(
                "SegmentationConfig: levels must be rising indices of feature maps, like [1, 2, 3], got "
                + f"{list(self.levels)}."
            )
        if not 0 <= self.dropout < 1:
            raise MixerError(f"SegmentationConfig: dropout must be in [0, 1), got {self.dropout}.")


@dataclass(frozen=True)
class SegmenterConfig(Json):
    """A whole ``Segmenter`` as JSON: its backbone and its head.

    Args:
        backbone: a ``PyramidConfig``, ``ViTConfig`` or ``ResNetConfig`` with ``classes=0``, as a model without a head
            of its own.
        head: the segmentation head.
    """

    backbone: PyramidConfig | ViTConfig | ResNetConfig
    head: SegmentationConfig
    kind: ClassVar[str] = "segmentation"

    def __post_init__(self) -> None:
        if self.backbone.classes:
            raise MixerError(
                f"SegmenterConfig: the backbone has a classifier of {self.backbone.classes} classes, which is not "
                + "used; set backbone.classes=0, and the classes of a pixel as head.classes."
            )

    @property
    def classes(self) -> int:
        """Return the number of classes of a pixel."""
        return self.head.classes

    @property
    def channels(self) -> int:
        """Return the channels of the images."""
        return self.backbone.channels

    @property
    def image_size(self) -> tuple[int, ...]:
        """Return height and width in pixels that the model is built for."""
        return self.backbone.image_size


class MixerResidual(nn.Module):
    """relu(x + BatchNorm(mixer(x))) on maps.

    In EANet's block, the two 1 x 1 convolutions are the mixer's first and last projection.
    """

    def __init__(self, dim: int, spec: Spec, grid: tuple[int, int]):
        super().__init__()
        spec = complete_spec(spec, prod(grid), grid)
        check_form("Segmenter", spec["name"], causal=False)
        self.mixer: Mixer = build_mixer(dim=dim, causal=False, **spec)
        self.on_grid = self.mixer.capabilities.grid and getattr(self.mixer, "ndim", 2) == 2
        self.norm = BatchNorm2d(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, D, H, W) to (B, D, H, W)."""
        grid = tuple(x.shape[2:])
        mixed = self.mixer(x.flatten(2).transpose(1, 2), **({"grid": grid} if self.on_grid else {}))
        return torch.relu(x + self.norm(mixed.transpose(1, 2).unflatten(2, grid)))

    def reset_parameters(self) -> None:
        """Re-initialise mixer and norm.

        Projections are drawn from N(0, 2 / outputs), where 2 / outputs is the variance; biases are 0.
        """
        self.mixer.reset_parameters()
        for name, child in self.mixer.named_children():
            if name in PROJECTIONS and isinstance(child, nn.Linear):
                init_linear(child, (2 / child.out_features) ** 0.5)
        self.mixer.start_copies()
        self.norm.reset_parameters()


class EAHead(nn.Module):
    """The segmentation head of EANet.

    Its layers are a 3 x 3 convolution, BatchNorm, ReLU; the mixer's block; a 3 x 3 convolution, BatchNorm, ReLU;
    dropout of channels; a 1 x 1 classifier.

    Args:
        channels: channels of the input map.
        config: sizes and mixer of the head.
        grid: rows and columns of that map at the size the model is built for, for mixers with parameters per position.
    """

    def __init__(self, channels: int, config: SegmentationConfig, grid: tuple[int, int]):
        super().__init__()
        self.config = config
        self.reduce = nn.Conv2d(channels, config.width, 3, padding=1, bias=False)
        self.reduce_norm = BatchNorm2d(config.width)
        self.block = MixerResidual(config.width, config.mixer, grid)
        self.refine = nn.Conv2d(config.width, config.hidden, 3, padding=1, bias=False)
        self.refine_norm = BatchNorm2d(config.hidden)
        self.dropout = nn.Dropout2d(config.dropout)
        self.classify = nn.Conv2d(config.hidden, config.classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, channels, H, W) to (B, classes, H, W)."""
        x = self.block(torch.relu(self.reduce_norm(self.reduce(x))))
        return self.classify(self.dropout(torch.relu(self.refine_norm(self.refine(x)))))

    def reset_parameters(self) -> None:
        """Re-initialise every parameter.

        Convolutions are drawn with variance 2 / (kernel area * outputs); biases are 0.
        """
        for conv in (self.reduce, self.refine, self.classify):
            init_linear(conv, (2 / (conv.out_channels * prod(conv.kernel_size))) ** 0.5)
        for norm in (self.reduce_norm, self.refine_norm):
            norm.reset_parameters()
        self.block.reset_parameters()


@named_errors
class Segmenter(Model):
    """A backbone's feature maps, the head, and logits at the size of the image.

    Args:
        backbone: a ``Pyramid``, a ``ViT`` or a ``ResNet``, best built with ``classes=0``; its head and last norm are
            not used. The model accepts the image sizes that the backbone accepts. Or a ``SegmenterConfig``, for both.
        head: a ``SegmentationConfig``; None: that of the ``SegmenterConfig``.
    """

    config_class = SegmenterConfig
    pipeline_tags = "image-segmentation", "image-segmentation"

    def __init__(self, backbone: Backbone | SegmenterConfig, head: SegmentationConfig | None = None):
        super().__init__()
        if isinstance(backbone, SegmenterConfig) and head is None:
            head, inner = backbone.head, backbone.backbone
            kind: Any = next(kind for kind in BACKBONES if isinstance(inner, kind.config_class))
            backbone = kind(inner)
        if head is None:
            raise MixerError("Segmenter: give a backbone and a SegmentationConfig, or a SegmenterConfig for both.")
        if not isinstance(backbone, BACKBONES):
            raise MixerError(
                f"Segmenter: the backbone must be a Pyramid, a ViT or a ResNet, got {type(backbone).__name__}."
            )
        dims, strides = map_widths(backbone), map_strides(backbone)
        if head.levels[-1] >= len(dims):
            raise MixerError(
                f"Segmenter: levels={list(head.levels)}, but the backbone has {len(dims)} feature maps, 0 to "
                + f"{len(dims) - 1}."
            )
        self.backbone = backbone
        self.stride = strides[head.levels[0]]
        with torch.random.fork_rng():
            self.head = EAHead(sum(dims[i] for i in head.levels), head, self.grid)
        self.head.reset_parameters()

    @property
    def config(self) -> SegmenterConfig:
        """Return the configs of backbone and head."""
        return SegmenterConfig(replace(self.backbone.config, classes=0), self.head.config)

    @property
    def blocks(self) -> list[Block]:
        """Return the layers of the backbone that have mixers, none of a ResNet."""
        return [] if isinstance(self.backbone, ResNet) else list(self.backbone.blocks)

    @property
    def grid(self) -> tuple[int, int]:
        """Return rows and columns of the finest map that is read, at the size the backbone is built for."""
        height, width = self.backbone.config.image_size
        return -(-height // self.stride), -(-width // self.stride)

    def reset_parameters(self) -> None:
        """Re-initialise backbone and head from torch's generator."""
        self.backbone.reset_parameters()
        self.head.reset_parameters()

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, classes, H, W)."""
        maps = self.backbone.feature_maps(images)
        first, *others = (maps[i] for i in self.head.config.levels)
        size = first.shape[2:]
        if tuple(size) != self.grid and self.head.block.mixer.max_len is not None:
            name, built = (
                type(self.head.block.mixer).__name__,
                " x ".join(str(n) for n in self.backbone.config.image_size),
            )
            raise MixerError(
                f"Segmenter: {name} belongs to images of {built}, got {images.shape[2]} x {images.shape[3]}; "
                + "call model.resize first."
            )
        logits = self.head(torch.cat([first, *(on_grid(m, size) for m in others)], 1))
        whole = on_grid(logits, torch.Size(n * self.stride for n in size))  # size of the padded image
        return whole[..., : images.shape[2], : images.shape[3]]

    def resize(self, image_size: int | Sequence[int]) -> Segmenter:
        """Adapt this model to another image size in place, as the backbone's ``resize`` does."""
        height, width = both_sides(image_size, "Segmenter.resize")
        steps = [(self.head.block.mixer, self.grid, (-(-height // self.stride), -(-width // self.stride)), 0)]
        resizable(steps)  # refuse before the backbone changes
        self.backbone.resize((height, width))
        resize_mixers(steps)
        return self


def map_widths(backbone: Backbone) -> list[int]:
    """Return the channels of each of the backbone's feature maps."""
    if isinstance(backbone, ViT):
        return [backbone.config.dim] * 4
    return list(backbone.config.dims if isinstance(backbone, Pyramid) else backbone.config.widths)


def map_strides(backbone: Backbone) -> list[int]:
    """Return the side in pixels of a cell of each feature map."""
    return [backbone.config.patch] * 4 if isinstance(backbone, ViT) else list(backbone.config.strides)


def on_grid(x: Tensor, size: torch.Size) -> Tensor:
    """Resample a map to another grid, bilinearly between the centres of cells."""
    return x if x.shape[2:] == size else F.interpolate(x, size=tuple(size), mode="bilinear", align_corners=False)
