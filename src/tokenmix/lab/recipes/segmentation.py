"""Semantic segmentation on the feature pyramid of PVT (arXiv 2102.12122), with EANet's head (arXiv 2105.02358).

The rows are the mixers in the pyramid's stages: PVT's spatial reduction attention, External attention, AFT-conv and
softmax attention; and a ResNet in the pyramid's place. The head's own mixer is EANet's External attention in each. The
combination is ours, so no paper prints its scores.

``paper`` is PVT's training on ADE20K as in the configs its authors released: AdamW at 1e-4, decay 1e-4, power 0.9,
80,000 steps of batch 16, sides scaled by 0.5 to 2, crops of 512, mirrored. EANet's on VOC has a rate of 9e-3, the same
decay, power and batch, 45,000 steps and crops of 513, with a ResNet-101, which is not here. Both start from ImageNet
weights; here weights are random, or those of ``--train.init``. The masks are your own: ``--data``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...models import MODELS, PyramidConfig, ResNetConfig, SegmentationConfig, SegmenterConfig
from ...models.segmentation import external_head
from ...types import Options, Spec
from ..data.augment_masks import MaskAugment
from ..data.scenes import SCENE_CLASSES
from ..train import MaskDataConfig
from ..train.config import OptimConfig, RunConfig, TrainConfig
from .images import ImageRow
from .recipe import Recipe

ADE20K_CLASSES = 150
HEADS = (1, 2, 5, 8)  # of PVT's stages, whose dims are 64, 128, 320 and 512


def pyramid(*specs: Spec) -> PyramidConfig:
    """Return PVT-small with one spec for each stage, or one for all, without a class token."""
    return replace(MODELS["pvt_small"], mixers=specs, pool="mean", classes=0)


def of_heads(name: str, **options: object) -> PyramidConfig:
    """Return the pyramid with a mixer of PVT's heads in every stage."""
    return pyramid(*({"name": name, "heads": heads, **options} for heads in HEADS))


ROWS = {
    "pvt": ImageRow("PVT: spatial reduction attention in every stage", pyramid(*MODELS["pvt_small"].mixers)),
    "external": ImageRow("External attention, 64 slots, in every stage", pyramid({"name": "external", "slots": 64})),
    "aft_conv": ImageRow("AFT-conv with filters of 7 x 7 in every stage", of_heads("aft_conv", kernel_size=7)),
    "hydra": ImageRow("Hydra attention in every stage", pyramid({"name": "hydra"})),
    "attention": ImageRow("softmax attention in every stage", of_heads("attention")),
    "resnet": ImageRow(
        "a ResNet: depths and widths of ResNet-34 on the pyramid's grids, two finer stages before",
        ResNetConfig(widths=(16, 32, 64, 128, 256, 512), depths=(1, 1, 3, 4, 6, 3), classes=0),
    ),
}


def size_backbone(row: ImageRow, depths: tuple[int, ...], **options: Any) -> PyramidConfig | ResNetConfig:
    """Return a row's backbone with these depths on the grids of the pyramid."""
    if not isinstance(row.model, ResNetConfig):
        return replace(row.model, depths=depths, **options)
    widths = options.pop("dims", row.model.widths[2:])
    options.pop("mlp_ratios", None)
    widths = (widths[0] // 4, widths[0] // 2, *widths)
    return replace(row.model, widths=widths, depths=(1, 1, *depths), **options)


def levels(backbone: PyramidConfig | ResNetConfig, *those: int) -> tuple[int, ...]:
    """Return the feature maps on these grids of the pyramid."""
    return tuple(n + 2 * isinstance(backbone, ResNetConfig) for n in those)


def build(row: ImageRow, size: str) -> RunConfig:
    """Return the config of a row at a size.

    ``gpu`` is PVT-tiny's depth on synthetic scenes of 128 x 128, in bf16. ``smoke`` has one narrow layer in each stage
    and scenes of 64 x 64: it shows that the row learns, and is no comparison of mixers.
    """
    if size == "paper":
        backbone = replace(row.model, image_size=(512, 512), drop_path=0.1)
        head = SegmentationConfig(classes=ADE20K_CLASSES, levels=levels(backbone, 1, 2, 3))
        augment = MaskAugment(scale=(0.5, 2.0), flip=0.5)
        data = MaskDataConfig(source=None, ignore=0, first_label=1, augment=augment)
        optim = OptimConfig(lr=1e-4, weight_decay=1e-4, schedule="poly", warmup=0, min_lr_ratio=0.0, clip=0.0)
        loop = TrainConfig(steps=80_000, batch_size=16, log_every=100, eval_every=8000, save_every=2000, samples=6)
        return RunConfig(SegmenterConfig(backbone, head), data, optim, loop)
    data = MaskDataConfig(augment=MaskAugment(scale=(0.75, 1.5) if size == "gpu" else (1.0, 1.25), flip=0.5))
    often: Options = {"samples": 6, "eval_batch": 32}
    if size == "gpu":
        backbone = size_backbone(row, (2, 2, 2, 2), image_size=(128, 128), drop_path=0.1)
        head = SegmentationConfig(classes=len(SCENE_CLASSES), width=256, hidden=128, levels=levels(backbone, 1, 2, 3))
        model = SegmenterConfig(backbone, head)
        optim = OptimConfig(lr=5e-4, weight_decay=0.05, schedule="poly", warmup=500, min_lr_ratio=0.0)
        loop = TrainConfig(
            steps=20_000, batch_size=32, precision="bf16", log_every=100, eval_every=2000, save_every=2000, **often
        )
        return RunConfig(model, replace(data, scenes=20_000), optim, loop)
    narrow: Options = {"dims": (16, 32, 40, 64), "image_size": (64, 64), "mlp_ratios": (4.0, 4.0, 2.0, 2.0)}
    backbone = size_backbone(row, (1, 1, 1, 1), **narrow)
    head = SegmentationConfig(
        classes=len(SCENE_CLASSES),
        mixer={**external_head(), "slots": 16},
        width=48,
        hidden=32,
        levels=levels(backbone, 0, 1, 2, 3),
        dropout=0.0,
    )
    optim = OptimConfig(lr=3e-3, weight_decay=0.01, schedule="poly", warmup=50, min_lr_ratio=0.0)
    loop = TrainConfig(steps=600, batch_size=8, log_every=20, eval_every=300, save_every=300, **often)
    return RunConfig(SegmenterConfig(backbone, head), data, optim, loop)


RECIPE = Recipe(
    "segmentation",
    "semantic segmentation on the feature pyramid: PVT, External attention, AFT-conv, softmax attention; a ResNet",
    ROWS,
    "pvt",
    build,
)
