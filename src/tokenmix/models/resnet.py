"""The residual network of convolutions for small images (He et al. 2016, arXiv 1512.03385, Sec. 4.2), a baseline.

It has no mixers: neighbourhoods of 3 x 3 cells alone join the places of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from ..system.config import Json
from .images import both_sides, check_images
from .layers import BatchNorm2d, DropPath, init_linear
from .model import Model


@dataclass(frozen=True)
class ResNetConfig(Json):
    """A convolutional image classifier as JSON; defaults are those of ResNet-20 for CIFAR.

    Args:
        widths: channels of each stage; every stage but the first halves the sides of the image.
        depths: blocks of each stage, as many as there are widths.
        image_size: [height, width] in pixels that the model is trained on; any size is accepted.
        channels: channels of the images, at least 1.
        classes: outputs of the head; 0: no head, the model returns the pooled features.
        drop_path: drop path rate of the last block, in [0, 1); it rises linearly from 0 in the first block.
    """

    widths: tuple[int, ...] = (16, 32, 64)
    depths: tuple[int, ...] = (3, 3, 3)
    image_size: tuple[int, ...] = (32, 32)
    channels: int = 3
    classes: int = 10
    drop_path: float = 0.0
    kind: ClassVar[str] = "resnet"
    init_std: ClassVar[float] = 0.02

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", both_sides(self.image_size, "ResNetConfig"))
        for name in ("widths", "depths"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.widths or len(self.widths) != len(self.depths) or min(*self.widths, *self.depths) < 1:
            raise MixerError(
                f"ResNetConfig: widths and depths must be positive and as many as each other, got {list(self.widths)} "
                + f"and {list(self.depths)}."
            )
        if self.channels < 1 or self.classes < 0 or not 0 <= self.drop_path < 1:
            raise MixerError(
                "ResNetConfig: channels must be positive, classes >= 0 and drop_path in [0, 1), got "
                + f"{self.channels}, {self.classes} and {self.drop_path}."
            )

    @property
    def strides(self) -> tuple[int, ...]:
        """Return the side in pixels of a cell of each stage: 1, 2, 4 ..."""
        return tuple(2**i for i in range(len(self.widths)))


class BasicBlock(nn.Module):
    """Compute relu(f(x) + s(x)), f two 3 x 3 convolutions with BatchNorm, s the identity or a 1 x 1 convolution.

    Args:
        before: channels of x.
        width: channels of the result.
        stride: 2 halves the sides; s is then a convolution, as where the channels change.
        drop_path: drop path rate of f.
    """

    def __init__(self, before: int, width: int, stride: int, drop_path: float = 0.0):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = BatchNorm2d(width)
        same = stride == 1 and before == width
        self.shortcut = None if same else nn.Conv2d(before, width, 1, stride=stride, bias=False)
        self.shortcut_norm = None if same else BatchNorm2d(width)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, before, H, W) to (B, width, H / stride, W / stride), rounded up."""
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.shortcut is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut(x))
        return F.relu(self.drop_path(y) + x)


class ResNet(Model):
    """A 3 x 3 stem, stages of basic blocks, the mean over all places, and a linear head.

    Args:
        config: a ``ResNetConfig``.
    """

    config_class = ResNetConfig
    pipeline_tags = "image-classification", "image-feature-extraction"

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.config = config
        with torch.random.fork_rng():  # as in LM: only reset_parameters below may draw
            self.stem = nn.Conv2d(config.channels, config.widths[0], 3, padding=1, bias=False)
            self.stem_norm = BatchNorm2d(config.widths[0])
            last, built, before = max(sum(config.depths) - 1, 1), 0, config.widths[0]
            stages: list[nn.Module] = []
            for i, (width, depth) in enumerate(zip(config.widths, config.depths, strict=True)):
                blocks = []
                for j in range(depth):
                    stride = 2 if i and not j else 1
                    blocks.append(BasicBlock(before, width, stride, config.drop_path * built / last))
                    built, before = built + 1, width
                stages.append(nn.Sequential(*blocks))
            self.stages = nn.ModuleList(stages)
            self.head = nn.Linear(before, config.classes) if config.classes else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialise every parameter from torch's generator.

        Convolutions are drawn from N(0, 2 / fan_out), the head from N(0, init_std); norms are the identity.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
        if self.head is not None:
            init_linear(self.head, self.config.init_std)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, classes), or to the pooled features if there is no head."""
        pooled = self.feature_maps(images)[-1].mean((2, 3))
        return pooled if self.head is None else self.head(pooled)

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        """Compute the map of each stage, finest first: (B, width, H / stride, W / stride), rounded up."""
        check_images("ResNet", images, self.config.channels)
        x, found = F.relu(self.stem_norm(self.stem(images))), []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        return found

    def resize(self, image_size: int | Sequence[int]) -> ResNet:
        """Note another image size in the config; no parameter depends on it."""
        self.config = replace(self.config, image_size=both_sides(image_size, "ResNet.resize"))
        return self
