"""What the image recipes share: rows, DeiT's training, and shrinking a row so that it runs on a CPU in a minute."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ...models import ModelConfig, ResNetConfig
from ...types import Options, Spec
from ..data.augment import Augment
from ..train import ImageDataConfig
from ..train.config import OptimConfig, RunConfig, TrainConfig

IMAGENET_IMAGES, CIFAR_IMAGES = 1_281_167, 50_000
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
DEIT_AUGMENT = Augment(
    crop="resized",
    flip=0.5,
    randaugment="rand-m9-mstd0.5-inc1",
    colour=0.3,
    erasing=0.25,
    mixup=0.8,
    cutmix=1.0,
    repeats=3,
)


@dataclass(frozen=True)
class ImageRow:
    """One experiment.

    Args:
        about: description of the row.
        model: config at the paper's size.
        printed: the paper's own numbers, for reports.
        optim: fields of ``OptimConfig`` that differ for this row.
        train: fields of ``TrainConfig`` that differ for this row.
        keeps: sizes that the row's name states (``sizes.amounts``); where a size changes one, the row does not run.
    """

    about: str
    model: Any
    printed: dict[str, float] = field(default_factory=dict)
    optim: Options = field(default_factory=dict)
    train: Options = field(default_factory=dict)
    keeps: tuple[str, ...] = ()


def deit_training(row: ImageRow, size: str, **small: int) -> RunConfig:
    """Return the config of a ViT on ImageNet with DeiT's training (arXiv 2012.12877, Table 9).

    AdamW, lr 5e-4 x batch / 512, weight decay 0.05, 5 epochs of warm-up, cosine to 1e-5, 300 epochs of batch 1024,
    label smoothing 0.1, RandAugment, mixup 0.8, cutmix 1.0, erasing 0.25, repeated augmentation, drop path 0.1.

    ``gpu`` is 100 epochs of batch 256 in bf16 on one GPU, ``smoke`` a tiny model on digits, whose sizes may be given as
    those of ``shrink``.
    """
    if size == "smoke":
        return digits_training(row, **small)
    batch, epochs = (1024, 300) if size == "paper" else (256, 100)
    model = replace(row.model, drop_path=0.1)
    return imagenet_like(
        row,
        model,
        ImageDataConfig(source="imagenet", augment=DEIT_AUGMENT, smoothing=0.1),
        IMAGENET_IMAGES,
        batch,
        epochs,
        size,
    )


def imagenet_like(
    row: ImageRow, model: ModelConfig, data: ImageDataConfig, images: int, batch: int, epochs: int, size: str
) -> RunConfig:
    """Return a config with DeiT's optimiser and ``epochs`` epochs of ``images`` images."""
    epoch = images // batch
    rate = 5e-4 * batch / 512
    optim = OptimConfig(lr=rate, weight_decay=0.05, warmup=5 * epoch, min_lr_ratio=1e-5 / rate, clip=0.0)
    often: Options = {"log_every": 100, "eval_every": max(epoch, 1), "save_every": 1000, "eval_batch": 256}
    loop = TrainConfig(steps=epochs * epoch, batch_size=batch, precision="bf16" if size == "gpu" else "fp32", **often)
    return RunConfig(model, data, replace(optim, **row.optim), replace(loop, **row.train))


def digits_training(row: ImageRow, **small: int) -> RunConfig:
    """Return the row as a tiny model on the 8 x 8 digits of scikit-learn.

    It shows that the row runs and learns, but is no comparison with the paper.
    """
    data = ImageDataConfig(source="digits", augment=Augment(crop="pad", pad=1))
    optim = OptimConfig(lr=4e-3, weight_decay=0.05, warmup=100)
    loop = TrainConfig(steps=1500, batch_size=64, log_every=50, eval_every=500, save_every=500, eval_batch=128)
    return RunConfig(shrink(row.model, **small), data, replace(optim, **row.optim), replace(loop, **row.train))


def shrink(config: Any, *, layers: int = 4, dim: int = 64, image_size: int = 8, patch: int = 2) -> Any:
    """Shrink a ViT or ResNet config to the size of the digits.

    A ResNet keeps one block of each stage, and 16 channels in its first stage, twice as many in each after it. From a
    longer pattern of mixers, evenly spaced layers are kept, counting from the last.
    """
    sizes: Options = {"image_size": (image_size, image_size), "channels": 1, "classes": 10, "drop_path": 0.0}
    if isinstance(config, ResNetConfig):
        stages = range(len(config.widths))
        return replace(config, widths=tuple(16 * 2**i for i in stages), depths=tuple(1 for _ in stages), **sizes)
    specs = config.specs()
    step = len(specs) // layers
    kept = tuple(
        shrink_spec(specs[len(specs) - 1 - i * step], dim=dim, most_taps=2 * (image_size // patch) - 1)
        for i in reversed(range(layers))
    )
    mixers = kept[:1] if all(spec == kept[0] for spec in kept) else kept
    return replace(config, dim=dim, layers=layers, mixers=mixers, patch=patch, **sizes)


def shrink_spec(spec: Spec, *, dim: int, most_taps: int) -> Spec:
    """Adapt a mixer spec to fewer features and smaller grids; heads that divide the features stay."""
    small = dict(spec)
    if "heads" in small and (small["heads"] > dim or dim % small["heads"]):
        most = dim if small["name"] in ("aft_conv", "multihead_linear") else 4
        small["heads"] = max(n for n in range(1, min(small["heads"], most) + 1) if dim % n == 0)
    if "kernel_size" in small:
        small["kernel_size"] = min(small["kernel_size"], most_taps)
    if small.get("rank") is not None:
        small["rank"] = min(small["rank"], 16)
    return small
