"""Rectified flow on images: a diffusion transformer learns the velocity from images to noise (``models/flow.py``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...models import DiT, DiTConfig
from ...models.flow import add_noise, path_velocity, squared_errors
from ...types import Options, Record
from ..data.augment import ImageSampler, as_bytes, moments
from ..data.augment_ops import generator
from .config import RunConfig
from .constant import Zeros
from .image_data_config import ImageDataConfig
from .image_tasks import ImageTask, write_grid
from .task import record_seconds

DRAWS, HELD_OUT = 4, 5
"""Tell the draws of a step, and those of held-out images, from those of augmentation and masks, numbers 0 to 3."""
BUCKETS = 5
"""Equal parts of the times 0 to 1 in which held-out images are scored."""
COLUMNS = 16
"""Most classes that have a column each in a picture; with more, pictures have 8 columns."""


class NoisyImages(NamedTuple):
    """What a diffusion transformer reads.

    Attributes:
        images: (B, C, H, W), x_t = (1 - t) x + t e.
        time: (B,), t.
        classes: (B,) the class of each image, or the number of classes where it is hidden.
    """

    images: Tensor
    time: Tensor
    classes: Tensor


@dataclass(frozen=True)
class FlowScore:
    """The score of a flow on ``images`` images, each with ``BUCKETS`` times and noises of its own.

    Attributes:
        flow_loss: mean squared error of the velocity, per number of an image, over all times.
        zero_loss: the same of a prediction of 0.
        by_noise: ``flow_loss`` by the share t of noise, in per cent: "0-20", "20-40" and so on.
    """

    flow_loss: float
    zero_loss: float
    by_noise: dict[str, float]
    images: int
    image_size: tuple[int, int]
    seconds: float = 0.0

    def text(self) -> str:
        size = " x ".join(str(n) for n in self.image_size)
        parts = ", ".join(f"{share} %: {loss:.4f}" for share, loss in self.by_noise.items())
        return (
            f"flow loss {self.flow_loss:.4f} (a prediction of 0: {self.zero_loss:.4f}) over {self.images:,} images of "
            + f"{size}; by share of noise {parts}"
        )


class FlowTask(ImageTask):
    """Train a diffusion transformer: E |v(x_t, t, class) - (e - x)|^2 with t uniform in [0, 1) and e from N(0, 1).

    Pixels are normalised to -1..1 unless the config says otherwise.
    """

    models = ("dit",)
    writes = "generate"
    metric = "flow_loss"
    options = ("max_images",)

    def __init__(self, config: RunConfig, folder: Path | None = None):
        super().__init__(config, folder)
        classes = len(self.images.classes)
        if self.model.classes not in (0, classes):
            raise MixerError(
                f"config: model.classes={self.model.classes}, but {self.images.name} has {classes} classes; "
                + f"set model.classes={classes}, or 0 for a model that is told no class."
            )
        self.check_samples()
        options = {**self.sampler_options, **self.pixels, "image_size": self.model.image_size}
        self.sampler = ImageSampler(self.images.split("train"), classes=classes, **options)

    @classmethod
    def check_loss(cls, data: ImageDataConfig) -> None:
        """Refuse what belongs to classifiers, and what would change the images that a diffusion transformer learns."""
        how = data.augment
        given = {"data.loss": data.loss != "cross_entropy", "data.smoothing": data.smoothing}
        given |= {f"data.augment.{name}": getattr(how, name) for name in ("mixup", "cutmix", "erasing", "randaugment")}
        wrong = [name for name, value in given.items() if value]
        if wrong:
            raise MixerError(
                "config: a diffusion transformer learns images as they are and has one loss; leave out "
                + f"{', '.join(wrong)}."
            )

    @classmethod
    def check_sides(cls, name: str, sides: tuple[int, int] | None, patch: int) -> None:
        if sides is not None and min(sides) < patch:
            raise MixerError(
                f"config: the images {name} are {sides[0]} x {sides[1]}, smaller than a patch of {patch} x {patch}; "
                + "set a smaller model.patch."
            )

    @classmethod
    def told_classes(cls, model: DiTConfig, classes: int) -> int:
        return classes if model.classes else 0

    @property
    def pixels(self) -> Options:
        """Return the options by which pixels are normalised; by default to -1..1."""
        mean, std = pixel_range(self.data, self.model.channels)
        return {"mean": mean, "std": std}

    def facts(self) -> Record:
        return {**super().facts(), "class_names": list(self.images.classes) if self.model.classes else []}

    def batch(self, step: int) -> tuple[NoisyImages, Tensor]:
        images, labels = self.prepared_batch(step)
        g = generator(self.train.seed, step, DRAWS)
        t, hidden = (torch.rand(len(images), generator=g) for _ in range(2))
        noise = torch.randn(images.shape, generator=g)
        return self.example(images, labels.masked_fill(hidden < self.model.class_dropout, self.model.classes), t, noise)

    def example(self, images: Tensor, labels: Tensor, t: Tensor, noise: Tensor) -> tuple[NoisyImages, Tensor]:
        """Return what the model reads at times t (B,) with this noise, and the velocity that it is to predict."""
        classes = labels if self.model.classes else torch.zeros_like(labels)
        return NoisyImages(add_noise(images, noise, t), t, classes), path_velocity(images, noise)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return squared_errors(outputs, targets).mean()

    def constant(self) -> Zeros:
        """Return the model of no velocity."""
        return Zeros()

    @record_seconds
    def evaluate(self, model: nn.Module, split: str, /, *, max_images: int | None = None) -> FlowScore:
        """Score the model on a split, with the classes of its images.

        Each image has one time in each bucket and a noise for it, which depend on its place in the split only.

        Args:
            max_images: evaluate on the first ``max_images`` images; None: all of them.
        """
        sums, zero, scored = [0.0] * BUCKETS, 0.0, 0
        for said, (k, targets) in self.answers(model, self._held_out_examples(split, max_images)):
            sums[k] += float(squared_errors(said.double(), targets.to(said.device)).sum())
            zero += float(targets.double().square().flatten(1).mean(1).sum())
            scored += len(said)
        n = scored // BUCKETS
        by_noise = {bucket_name(k): total / n for k, total in enumerate(sums)}
        size = (self.model.image_size[0], self.model.image_size[1])
        return FlowScore(sum(sums) / scored, zero / scored, by_noise, n, size)

    def _held_out_examples(self, split: str, limit: int | None) -> Iterator[tuple[NoisyImages, tuple[int, Tensor]]]:
        n = 0
        for images, labels in self.held_out(split, limit):
            for k, (t, noise) in enumerate(held_out_draws(range(n, n + len(images)), images.shape[1:])):
                inputs, targets = self.example(images, labels, t, noise)
                yield inputs, (k, targets)
            n += len(images)

    def sample(self, model: DiT, folder: Path, step: int) -> None:
        """Write a picture of ``train.samples`` images, of every class in turn."""
        n = self.train.samples
        if n:
            drawn = draw_images(model, self.data, in_turn(range(self.model.classes), n), n, seed=self.train.seed)
            columns, scale = columns_of(self.model.classes), max(256 // max(self.model.image_size), 1)
            write_grid(folder / f"step_{step:08d}.png", drawn, columns=columns, scale=min(scale, 4))


def draw_images(model: Any, data: Any, classes: Tensor | None, n: int, **options: Any) -> Tensor:
    """Sample n images of a diffusion transformer as bytes, (n, C, H, W) uint8; ``options`` are those of its sampler."""
    images = model.sample(n, classes, **options)
    return as_bytes(images, *pixel_range(data, model.config.channels)).cpu()


def pixel_range(data: ImageDataConfig, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and deviation by which pixels in 0..1 are normalised: the config's, or 0.5 for -1..1."""
    half = (0.5,) * channels
    return moments("config", channels, half if data.mean is None else data.mean, half if data.std is None else data.std)


def held_out_draws(images: Iterable[int], shape: torch.Size) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each bucket times (B,) in it and noise (B, *shape), functions of the images' places alone."""
    generators = [generator(i, HELD_OUT) for i in images]
    for k in range(BUCKETS):
        t = torch.cat([torch.rand(1, generator=g) for g in generators])
        yield (k + t) / BUCKETS, torch.stack([torch.randn(shape, generator=g) for g in generators])


def bucket_name(k: int) -> str:
    """Return the bounds of a bucket in per cent of noise, such as "20-40"."""
    return f"{100 * k // BUCKETS}-{100 * (k + 1) // BUCKETS}"


def in_turn(classes: Iterable[int], n: int) -> Tensor | None:
    """Return the classes of n images, one after the other and again from the first; None if there is no class."""
    found = list(classes)
    return torch.tensor([found[i % len(found)] for i in range(n)]) if found else None


def columns_of(classes: int) -> int:
    """Return the columns of a picture: one for each class, if these are few."""
    return classes if 1 < classes <= COLUMNS else 8
