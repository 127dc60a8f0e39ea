"""Images: classification, scored by top-1 accuracy, and density, scored in bits per dimension."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import MixerError
from ...models import ImageDensity, evaluation_mode
from ...system.files import whole_file
from ...system.machine import autocast
from ...types import Options, Record
from ..data.augment import ImageSampler, eval_batches, stream
from ..data.bounds import Bounds
from ..data.images import IMAGE_SETS, ImageData, open_images, shrink_images
from ..data.inventory import Inventory
from ..data.long_tail import FEW, MANY, SHOTS, class_counts, long_tailed, shots_of
from ..data.pixels import PixelSampler, pixel_batches, to_pixels
from .class_losses import ClassLoss, check_class_loss
from .config import RunConfig
from .constant import Constant, shares
from .image_data_config import ImageDataConfig, check_images, check_tau
from .registry import TaskData
from .task import Evaluate, Task, check_unchanged, per_cent, record_seconds
from .text_task import streaming_cost

STEPS_AHEAD = 100_000  # steps to plan ahead when only time limits the run


@dataclass(frozen=True)
class ClassScore:
    """The accuracy of a classifier on ``images`` images.

    Attributes:
        top1: fraction of images whose class is the first guess.
        top5: fraction of images whose class is among the first five guesses.
        cross_entropy: mean cross-entropy in nats.
        top1_many: ``top1`` of the images of classes with more than 100 training images, if the training images are
            long-tailed (the largest class has at least twice the images of the smallest), else None.
        top1_medium: the same of classes with 20 to 100 training images.
        top1_few: the same of classes with fewer than 20.
    """

    top1: float
    top5: float
    cross_entropy: float
    images: int
    image_size: tuple[int, int]
    seconds: float = 0.0
    top1_many: float | None = None
    top1_medium: float | None = None
    top1_few: float | None = None

    def text(self) -> str:
        size = " x ".join(str(n) for n in self.image_size)
        whole = (
            f"{100 * self.top1:.2f} % top-1, {100 * self.top5:.2f} % top-5, cross-entropy {self.cross_entropy:.4f} "
            + f"over {self.images:,} images of {size}"
        )
        shares = zip(SHOTS, (self.top1_many, self.top1_medium, self.top1_few), strict=True)
        parts = [f"{name} {100 * share:.2f} %" for name, share in shares if share is not None]
        rest = f" (classes with more than {MANY}, {FEW} to {MANY}, fewer than {FEW} training images)"
        return whole + (f"; {', '.join(parts)}{rest}" if parts else "")


@dataclass(frozen=True)
class DensityScore:
    """The mean of -log2 p over all sub-pixels of ``images`` images of ``dims`` sub-pixels each."""

    bits_per_dim: float
    images: int
    dims: int
    seconds: float = 0.0

    def text(self) -> str:
        return f"{self.bits_per_dim:.4f} bits/dim over {self.images:,} images of {self.dims:,} sub-pixels"


class ImageTask(Task):
    """What classification, density and segmentation have in common: the image set."""

    config: ClassVar[type[TaskData]] = ImageDataConfig
    movable: ClassVar[tuple[str, ...]] = ("source", "path", "max_unpacked", "max_pixels")
    matches = True
    sets: ClassVar[Collection[str]] = IMAGE_SETS
    downloads: ClassVar[Collection[str]] = IMAGE_SETS.keys() - {"digits"}
    scored: ClassVar[tuple[str, ...] | None] = ("data.source", "data.path", "data.valid", "train.eval_images")
    reads = ("eval_images", "workers", "samples")
    reads_with: ClassVar[dict[str, tuple[str, tuple[str, ...]]]] = {
        "train.samples": ("model.kind", ("image_density", "dit"))
    }
    unit = "images"
    sampler: Any
    images: Any

    def __init__(self, config: RunConfig, folder: Path | None = None):
        super().__init__(config, folder)
        self.images = self.open_images()
        self.ahead: Iterator[Any] | None = None
        self.next_step = -1

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Refuse options of images that are out of range, and a loss that the model is not trained with."""
        data: Any = config.data
        check_images(data)
        check_class_loss(data.loss)
        cls.check_loss(data)
        check_tau(data)

    @classmethod
    def check_loss(cls, data: ImageDataConfig) -> None:
        """Refuse a loss, or options of it, that the model is not trained with."""

    @classmethod
    def match(cls, config: RunConfig) -> RunConfig:
        """Return the config with the model's classes, channels and size taken from its images.

        Sizes are rounded down to whole patches; for a set of files of different sizes the model keeps its own.
        """
        images, model = open_set(cast(ImageDataConfig, config.data), None), cast(Any, config.model)
        sides, patch = images.split("train").size, getattr(model, "patch", 1)
        cls.check_sides(images.name, sides, patch)
        size = model.image_size if sides is None else tuple(max(n // patch, 1) * patch for n in sides)
        classes = cls.told_classes(model, len(images.classes))
        return replace(config, model=replace(model, channels=images.channels, classes=classes, image_size=size))

    @classmethod
    def check_sides(cls, name: str, sides: tuple[int, int] | None, patch: int) -> None:
        """Refuse images that are too small for the patches of the model."""

    @classmethod
    def told_classes(cls, model: Any, classes: int) -> int:
        """Return how many classes a model has that is trained on images of this many."""
        return classes

    def open_images(self) -> Any:
        """Open the image set of the config."""
        return open_set(self.data, self.model.channels)

    def prepared_batch(self, step: int) -> Any:
        """Return the sampler's batch of a step; with workers, prepared ahead as long as steps are consecutive."""
        if not self.train.workers:
            return self.sampler.batch(step)
        if self.ahead is None or step != self.next_step:
            self.ahead = stream(
                self.sampler, range(step, self.train.steps or step + STEPS_AHEAD), workers=self.train.workers
            )
        self.next_step = step + 1
        return next(self.ahead)

    def facts(self) -> Record:
        return {"images": self.images.describe()}

    def inventory(self) -> Inventory | None:
        return self.images.inventory

    def check_samples(self) -> None:
        """Report a package that pictures of samples lack now, and not at the first evaluation."""
        if self.train.samples:
            write_grid(Path(os.devnull), torch.zeros(1, 1, 1, 1, dtype=torch.uint8))

    def check_same(self, env: Record) -> None:
        check_unchanged("images", env.get("images"), self.images.describe())

    def eval_options(self) -> Options:
        return {"max_images": self.train.eval_images}

    def held_out(self, split: str, limit: int | None, size: int | tuple[int, int] | None = None) -> Iterator[Any]:
        """Yield the first images of a split, as the model reads them, and their classes."""
        return eval_batches(
            self.images.split(split),
            **self.pixels,
            batch_size=self.train.eval_batch,
            image_size=self.model.image_size if size is None else size,
            channels=self.model.channels,
            limit=limit,
        )

    @property
    def sampler_options(self) -> Options:
        """Return the options common to all samplers of training images."""
        data, train = self.data, self.train
        return {
            "channels": self.model.channels,
            "batch_size": train.batch_size,
            "seed": train.seed,
            "augment": data.augment,
        }

    @property
    def pixels(self) -> Options:
        """Return the options by which pixels are normalised."""
        return {"mean": self.data.mean, "std": self.data.std}


class ClassifyTask(ImageTask):
    """Train an image classifier."""

    models = ("vit", "pyramid", "eamlp", "resnet")
    metric = "top1"
    higher = True
    options = ("image_size", "max_images")
    places = 0

    def __init__(self, config: RunConfig, folder: Path | None = None):
        super().__init__(config, folder)
        classes = len(self.images.classes)
        if self.model.classes != classes:
            raise MixerError(
                f"config: model.classes={self.model.classes}, but {self.images.name} has {classes} classes; "
                + f"set model.classes={classes}."
            )
        options = {
            **self.sampler_options,
            **self.pixels,
            "image_size": self.model.image_size,
            "smoothing": self.data.smoothing,
        }
        train = self.images.split("train")
        self.sampler = ImageSampler(train, classes=classes, **options)
        self.counts = class_counts(train, classes)
        self.shots = shots_of(self.counts)
        self.of_class = ClassLoss(self.data.loss, self.counts, tau=self.data.loss_tau)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self.prepared_batch(step)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.of_class(outputs, targets)

    @record_seconds
    def evaluate(
        self, model: Any, split: str, *, image_size: int | tuple[int, int] | None = None, max_images: int | None = None
    ) -> ClassScore:
        """Score the classifier on a split.

        Args:
            image_size: size of the test images, for models that accept sizes they were not trained on; None: the
                training size.
            max_images: evaluate on the first ``max_images`` images; None: all of them.
        """
        size = self.model.image_size if image_size is None else image_size
        right, within, nats, n = 0, 0, 0.0, 0
        of_shots = torch.zeros(2, len(SHOTS), dtype=torch.int64)  # right, all
        for said, classes in self.answers(model, self.held_out(split, max_images, size)):
            logits, labels = said.float(), classes.to(said.device)
            order = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
            right, within, n = right + int(order[:, 0].sum()), within + int(order.any(1).sum()), n + len(labels)
            nats += float(F.cross_entropy(logits.double(), labels, reduction="sum"))
            if self.shots is not None:
                shots = torch.tensor(self.shots)[labels.cpu()]
                of_shots[0] += torch.bincount(shots[order[:, 0].cpu()], minlength=len(SHOTS))
                of_shots[1] += torch.bincount(shots, minlength=len(SHOTS))
        sides = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
        by_shots = {f"top1_{s}": hit / of for s, hit, of in zip(SHOTS, *of_shots.tolist(), strict=True) if of}
        return ClassScore(right / n, within / n, nats / n, n, sides, **by_shots)

    @classmethod
    def score_test_split(cls, evaluate: Evaluate, test_bytes: int | None) -> Record:
        return per_cent(evaluate(), "top1", *(f"top1_{shots}" for shots in SHOTS))

    def constant(self) -> Constant:
        """Return the model that gives every image the shares of the classes among the training images."""
        return Constant((torch.tensor(self.counts).clamp_min(0.5) / sum(self.counts)).log(), self.places)


class DensityTask(ImageTask):
    """Train an autoregressive model of sub-pixels."""

    models = ("image_density",)
    writes = "draw"
    metric = "bits_per_dim"
    options = ("max_images",)

    def __init__(self, config: RunConfig, folder: Path | None = None):
        super().__init__(config, folder)
        self.check_samples()
        self.sampler = PixelSampler(self.images.split("train"), size=self.model.size, **self.sampler_options)

    @classmethod
    def check_loss(cls, data: ImageDataConfig) -> None:
        if data.loss != "cross_entropy":
            raise MixerError(
                f"config: data.loss={data.loss!r} is for classifiers; a model of kind 'image_density' has "
                + "cross_entropy."
            )

    @classmethod
    def match(cls, config: RunConfig) -> RunConfig:
        images, model = open_set(cast(ImageDataConfig, config.data), None), cast(Any, config.model)
        size = images.split("train").size or model.size
        return replace(config, model=replace(model, channels=images.channels, size=size))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        tokens = self.prepared_batch(step)
        return tokens, tokens

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.float().flatten(0, 1), targets.flatten())

    def train_fields(self, loss: float) -> Record:
        return {"bpd": loss / math.log(2)}

    def constant(self) -> Constant:
        """Return the model that gives every sub-pixel the shares of the values among those of training."""
        return Constant(shares(self.batch, 256), self.places)

    @record_seconds
    def evaluate(self, model: Any, split: str, *, max_images: int | None = None) -> DensityScore:
        options = {
            "batch_size": self.train.eval_batch,
            "size": self.model.size,
            "channels": self.model.channels,
            "limit": max_images,
        }
        device, bits, n = next(model.parameters()).device, 0.0, 0
        with evaluation_mode(model):
            for tokens in pixel_batches(self.images.split(split), **options):
                with autocast(device, self.train.precision):
                    bits += float(model.bits(tokens.to(device)).double().sum())
                n += len(tokens)
        return DensityScore(bits / n, n, math.prod(self.model.size) * self.model.channels)

    def sample(self, model: ImageDensity, folder: Path, step: int) -> None:
        """Write an image of three rows.

        They show sampled images, validation images whose lower halves are sampled, and those validation images
        themselves.
        """
        n, seed = self.train.samples, self.train.seed
        if not n:
            return
        real = self.pictures("valid", n)
        halves = model.complete(real, real.shape[2] // 2, seed=seed)
        write_grid(
            folder / f"step_{step:08d}.png",
            torch.cat([model.sample(n, seed=seed).cpu(), halves.cpu(), real]),
            columns=n,
        )

    def pictures(self, split: str, n: int) -> Tensor:
        """Return the first images of a split, uint8 (n, C, H, W)."""
        size, channels = self.model.size, self.model.channels
        tokens = next(
            iter(pixel_batches(self.images.split(split), batch_size=n, size=size, channels=channels, limit=n))
        )
        return to_pixels(tokens, size, channels)

    def model_facts(self, model: ImageDensity) -> Record:
        return streaming_cost(model)


def open_set(data: ImageDataConfig, channels: int | None) -> ImageData:
    """Open the images of a config."""
    if data.source == "imagenet" and not Path("imagenet").exists():
        raise MixerError(
            "ImageNet cannot be downloaded without its owners' permission; "
            + "give its folder, with train/CLASS/* and val/CLASS/*, as --data PATH."
        )
    bounds = Bounds(data.max_unpacked, data.max_pixels)
    images = open_images(
        data.source,
        path=data.path,
        valid=data.valid,
        skip_bad_files=data.skip_bad_files,
        layout=data.layout,
        channels=channels,
        bounds=bounds,
    )
    if data.long_tail is not None:
        images = long_tailed(images, data.long_tail, largest=data.per_class)
    return images if data.shrink == 1 else shrink_images(images, data.shrink)


def write_grid(path: Path, images: Tensor, *, columns: int = 8, scale: int = 4) -> None:
    """Write uint8 images (N, C, H, W) side by side as one PNG, each pixel ``scale`` wide."""
    try:
        import numpy  # noqa: F401  (Pillow receives the pixels through it)
        from PIL import Image
    except ImportError as why:
        raise MixerError(f"writing images needs the extra 'vision' ({why}): pip install 'tokenmix[vision]'.") from None
    n, channels, height, width = images.shape
    columns = min(columns, n)
    rows = -(-n // columns)
    sheet = torch.full((channels, rows * (height + 1) - 1, columns * (width + 1) - 1), 255, dtype=torch.uint8)
    for i, image in enumerate(images.cpu()):
        top, left = i // columns * (height + 1), i % columns * (width + 1)
        sheet[:, top : top + height, left : left + width] = image
    sheet = sheet.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    array = sheet[0] if channels == 1 else sheet.permute(1, 2, 0)
    kind = Image.registered_extensions().get(path.suffix.lower(), "PNG")
    with whole_file(path) as f:
        Image.fromarray(array.contiguous().numpy()).save(f, format=kind)
