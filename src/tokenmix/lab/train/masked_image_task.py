"""Masked images: a ViT predicts the pixels of patches that it does not see (MAE, arXiv 2111.06377)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...models.mae import hidden_patches, kept_count, pixel_loss, pixel_targets
from ..data.augment import ImageSampler
from ..data.augment_ops import generator
from ..data.masking import draws_of, kept_patches
from .config import RunConfig
from .constant import Zeros
from .image_data_config import ImageDataConfig
from .image_tasks import ImageTask
from .task import record_seconds

MASKS = 3
"""Tells the draws of masks from those of augmentation, which have the numbers 0 to 2."""


class MaskedImages(NamedTuple):
    """What a masked autoencoder reads.

    Attributes:
        images: (B, C, H, W), normalised.
        keep: (B, K) the patches that the encoder sees, in ascending order.
    """

    images: Tensor
    keep: Tensor


@dataclass(frozen=True)
class MaskedScore:
    """The score of a masked autoencoder on ``images`` images.

    Attributes:
        pixel_loss: mean squared error of the hidden patches, normalised as in training.
        mean_loss: the same of a prediction that is 0 everywhere: each patch's own mean, if patches are normalised.
        hidden: share of the patches that was hidden.
    """

    pixel_loss: float
    mean_loss: float
    hidden: float
    images: int
    image_size: tuple[int, int]
    seconds: float = 0.0

    def text(self) -> str:
        size = " x ".join(str(n) for n in self.image_size)
        return (
            f"pixel loss {self.pixel_loss:.4f} (a prediction of 0: {self.mean_loss:.4f}) with "
            + f"{100 * self.hidden:.0f} % of the patches hidden, over {self.images:,} images of {size}"
        )


class MaskedImageTask(ImageTask):
    """Train a masked autoencoder. Labels are not read."""

    models = ("mae",)
    metric = "pixel_loss"
    options = ("max_images",)

    def __init__(self, config: RunConfig, folder: Path | None = None):
        super().__init__(config, folder)
        options = {**self.sampler_options, **self.pixels, "image_size": self.model.image_size}
        self.sampler = ImageSampler(self.images.split("train"), classes=len(self.images.classes), **options)
        self.patches = prod(self.model.grid)
        self.kept = kept_count(self.patches, self.model.mask_ratio)

    @classmethod
    def check(cls, config: RunConfig) -> None:
        if config.optim.layer_decay != 1:
            raise MixerError(
                f"config: optim.layer_decay={config.optim.layer_decay} is for training from given weights; the layers "
                + "of a masked autoencoder all learn at one rate: leave it at 1."
            )
        super().check(config)

    @classmethod
    def check_loss(cls, data: ImageDataConfig) -> None:
        if data.loss != "cross_entropy" or data.smoothing or data.augment.mixup or data.augment.cutmix:
            raise MixerError(
                "config: a masked autoencoder has no labels; leave out data.loss, data.smoothing, data.augment.mixup "
                + f"and data.augment.cutmix, got {data.loss!r}, {data.smoothing}, {data.augment.mixup}, "
                + f"{data.augment.cutmix}."
            )

    @classmethod
    def told_classes(cls, model: object, classes: int) -> int:
        return 0

    def batch(self, step: int) -> tuple[MaskedImages, Tensor]:
        images, _ = self.prepared_batch(step)
        draws = torch.rand(len(images), self.patches, generator=generator(self.train.seed, step, MASKS))
        return self.example(images, draws)

    def example(self, images: Tensor, draws: Tensor) -> tuple[MaskedImages, Tensor]:
        """Return what the model reads and what it is to predict, with masks by the draws (B, N)."""
        keep = kept_patches(draws, self.kept)
        hidden = hidden_patches(keep, self.patches)
        targets = pixel_targets(images, hidden, self.model.patch, normalise=self.model.normalise)
        return MaskedImages(images, keep), targets

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return pixel_loss(outputs, targets)

    def constant(self) -> Zeros:
        """Return the model of no light: each patch's own mean, where patches are normalised."""
        return Zeros((self.patches - self.kept, self.model.patch**2 * self.model.channels))

    @record_seconds
    def evaluate(self, model: nn.Module, split: str, /, *, max_images: int | None = None) -> MaskedScore:
        """Score the model on a split. Which patches of an image are hidden depends on its place in the split only.

        Args:
            max_images: evaluate on the first ``max_images`` images; None: all of them.
        """
        size, total, blank, n = self.model.image_size, 0.0, 0.0, 0
        for said, targets in self.answers(model, self._held_out_examples(split, max_images)):
            total += len(said) * float(pixel_loss(said.double(), targets.to(said.device)))
            blank += len(said) * float(targets.double().square().mean())
            n += len(said)
        return MaskedScore(total / n, blank / n, 1 - self.kept / self.patches, n, (size[0], size[1]))

    def _held_out_examples(self, split: str, limit: int | None) -> Iterator[tuple[MaskedImages, Tensor]]:
        n = 0
        for images, _ in self.held_out(split, limit):
            yield self.example(images, draws_of(range(n, n + len(images)), self.patches))
            n += len(images)
