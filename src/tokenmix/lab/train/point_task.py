"""Point clouds: their classes, scored by accuracy, and their parts, scored by intersection over union."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import MixerError
from ...models import PointClassifierConfig, PointSegmenterConfig
from ...types import Record
from ..data.inventory import Inventory
from ..data.points import POINT_SETS, Cloud, Jitter, PointSampler, PointSet, open_points, stack_clouds
from .config import RunConfig
from .registry import TaskData
from .task import Inputs, Task, groups_of, record_seconds


@dataclass(frozen=True)
class PointsDataConfig(TaskData):
    """Point clouds for a classifier, or for a segmenter of parts.

    Args:
        source: "solids" (synthetic, for classification), "objects" (synthetic, with parts), or a folder: ModelNet40's,
            or ShapeNet's parts; see ``data.open_points``.
        points: N, points drawn from each cloud.
        valid: share of the training clouds of a folder held out for validation, in (0, 1), where there are none, and
            as many for the test where there are none.
        layout: "classes" or "splits": what the first folders are; None: told by their names; see ``data.open_points``.
        clouds: clouds for training of a synthetic set.
        held_out: clouds for validation of a synthetic set, and as many others for its test.
        jitter: how clouds are changed in training: noise, scale, shift, drop, rotate.
    """

    source: str = "solids"
    points: int = 1024
    valid: float = 0.1
    layout: str | None = None
    clouds: int = 1000
    held_out: int = 200
    jitter: Jitter = field(default_factory=Jitter)
    kind: ClassVar[str] = "points"

    def open(self) -> PointSet:
        """Open the set."""
        return open_points(
            self.source, valid=self.valid, layout=self.layout, clouds=self.clouds, held_out=self.held_out
        )


class PointBatch(NamedTuple):
    """What a segmenter reads: points (B, N, 3), and the category of each cloud (B,)."""

    points: Tensor
    category: Tensor


@dataclass(frozen=True)
class PointClassScore:
    """The score of a classifier on ``clouds`` clouds of ``points`` points.

    Attributes:
        accuracy: share of the clouds whose class is right.
        class_accuracy: the mean over the classes of that share, ModelNet's "mAcc".
        cross_entropy: mean cross-entropy in nats.
    """

    accuracy: float
    class_accuracy: float
    cross_entropy: float
    clouds: int
    points: int
    seconds: float = 0.0

    def text(self) -> str:
        return (
            f"{100 * self.accuracy:.2f} % right, {100 * self.class_accuracy:.2f} % as the mean over classes, "
            + f"cross-entropy {self.cross_entropy:.4f}, {self.clouds:,} clouds of {self.points:,} points"
        )


@dataclass(frozen=True)
class PartScore:
    """The score of a segmenter on ``clouds`` clouds of ``points`` points, as for ShapeNet's parts.

    Attributes:
        instance_miou: mean over the clouds of the mean over the parts of its category of intersection over union, which
            is 1 for a part that neither the truth nor the prediction has.
        category_miou: the mean of a category's clouds first, then over the categories.
        point_accuracy: share of the points whose part is right.
        cross_entropy: mean cross-entropy of a point in nats, over all labels.
    """

    instance_miou: float
    category_miou: float
    point_accuracy: float
    cross_entropy: float
    clouds: int
    points: int
    seconds: float = 0.0

    def text(self) -> str:
        return (
            f"instance mIoU {100 * self.instance_miou:.2f} %, category mIoU {100 * self.category_miou:.2f} %, "
            + f"{100 * self.point_accuracy:.2f} % of points right, cross-entropy {self.cross_entropy:.4f}, "
            + f"{self.clouds:,} clouds of {self.points:,} points"
        )


class PointTask(Task):
    """What both tasks on point clouds have in common: the set."""

    config = PointsDataConfig
    movable = ("source",)
    sets = POINT_SETS
    scored = ("data.source", "data.valid", "data.held_out")
    matches = True
    unit = "clouds"
    higher = True

    def __init__(self, config: RunConfig, folder: Path | None = None):
        super().__init__(config, folder)
        self.set: PointSet = self.data.open()
        check_fits(self.set, self.model)
        self.set.check_points(self.data.points)
        loop, data = self.train, self.data
        self.sampler = PointSampler(
            self.set, points=data.points, batch_size=loop.batch_size, seed=loop.seed, jitter=data.jitter
        )

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Refuse options of point clouds that are out of range."""
        data, model = cast(Any, config.data), cast(Any, config.model)
        if data.points < model.least_points():
            raise MixerError(
                f"config: data.points={data.points}, but model.samples={list(model.samples)} and model.neighbours="
                + f"{list(model.neighbours)} need clouds of at least {model.least_points()} points."
            )

    @classmethod
    def match(cls, config: RunConfig) -> RunConfig:
        data, model = cast(Any, config.data), cast(Any, config.model)
        found = data.open()
        parts = {"parts": max(found.labels, 2)} if hasattr(model, "parts") else {}
        return replace(config, model=replace(model, classes=len(found.classes), **parts))

    def facts(self) -> Record:
        return {"clouds": self.set.describe()}

    def inventory(self) -> Inventory | None:
        return self.set.inventory

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.float().flatten(0, -2), targets.flatten())

    def predictions(self, model: nn.Module, split: str) -> Iterator[tuple[list[Cloud], Tensor]]:
        """Yield the clouds of a split in batches, and the model's logits in float64."""
        groups = groups_of(self.set.held_out(split, self.data.points), self.train.eval_batch)
        batches = ((self.read_of(*stack_clouds(clouds)[:2]), clouds) for clouds in groups)
        return ((clouds, logits.double().cpu()) for logits, clouds in self.answers(model, batches))

    def read_of(self, points: Tensor, category: Tensor) -> Inputs:
        """Return what the model reads of a batch."""
        raise NotImplementedError


class PointClassTask(PointTask):
    """Train a classifier of clouds."""

    models = ("point_classifier",)
    metric = "accuracy"
    outputs, places = "classes", 0

    def read_of(self, points: Tensor, category: Tensor) -> Inputs:
        return points

    def batch(self, step: int) -> tuple[Inputs, Tensor]:
        points, category, _ = self.sampler.batch(step)
        return points, category

    @record_seconds
    def evaluate(self, model: nn.Module, split: str, /) -> PointClassScore:
        """Score the classifier on a split."""
        classes = len(self.set.classes)
        (right, count), nats = torch.zeros(2, classes, dtype=torch.float64), 0.0
        for clouds, logits in self.predictions(model, split):
            wanted = torch.tensor([cloud.category for cloud in clouds])
            nats += float(F.cross_entropy(logits, wanted, reduction="sum"))
            hit = wanted[logits.argmax(-1) == wanted]
            right, count = right + hit.bincount(minlength=classes), count + wanted.bincount(minlength=classes)
        n, seen = int(count.sum()), count > 0
        mean = float((right[seen] / count[seen]).mean())
        return PointClassScore(float(right.sum()) / n, mean, nats / n, n, self.data.points)


class PartTask(PointTask):
    """Train a segmenter of the parts of clouds."""

    models = ("point_segmenter",)
    metric = "instance_miou"
    outputs = "parts"

    def read_of(self, points: Tensor, category: Tensor) -> Inputs:
        return PointBatch(points, category)

    def batch(self, step: int) -> tuple[Inputs, Tensor]:
        points, category, parts = self.sampler.batch(step)
        return PointBatch(points, category), parts

    def count_targets(self, targets: Tensor) -> int:
        return targets.numel()

    @record_seconds
    def evaluate(self, model: nn.Module, split: str, /) -> PartScore:
        """Score the segmenter on a split; it chooses among the parts of each cloud's category, as is usual."""
        found, right, points, nats = [], 0, 0, 0.0
        for clouds, logits in self.predictions(model, split):
            for cloud, each in zip(clouds, logits, strict=True):
                said = part_labels(each, self.set.parts[cloud.category])
                found.append((cloud.category, part_iou(said, cloud.parts, self.set.parts[cloud.category])))
                right, points = right + int((said == cloud.parts).sum()), points + len(said)
                nats += float(F.cross_entropy(each, cloud.parts, reduction="sum"))
        of_category = [
            [iou for c, iou in found if c == category] for category in sorted({category for category, _ in found})
        ]
        n = len(found)
        return PartScore(
            sum(iou for _, iou in found) / n,
            sum(sum(ious) / len(ious) for ious in of_category) / len(of_category),
            right / points,
            nats / points,
            n,
            points // n,
        )


def part_labels(logits: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Return the most likely label of each point, logits (N, labels) -> (N,), among those of a category."""
    allowed = torch.tensor(parts, device=logits.device)
    return allowed[logits[:, allowed].argmax(-1)]


def part_iou(said: Tensor, wanted: Tensor, parts: tuple[int, ...]) -> float:
    """Return the mean over the parts of a category of intersection over union; 1 for a part that is in neither."""
    found = []
    for part in parts:
        here, there = said == part, wanted == part
        union = int((here | there).sum())
        found.append(int((here & there).sum()) / union if union else 1.0)
    return sum(found) / len(found)


def check_fits(data: PointSet, model: PointClassifierConfig | PointSegmenterConfig) -> None:
    """Refuse a model whose outputs are not those of the set."""
    if model.classes != len(data.classes):
        raise MixerError(
            f"config: model.classes={model.classes}, but {data.name} has {len(data.classes)} classes; set "
            + f"model.classes={len(data.classes)}, or give --data, which does."
        )
    parts = getattr(model, "parts", None)
    if parts is not None and not data.labels:
        raise MixerError(f"config: {data.name} has no parts; a segmenter needs 'objects' or ShapeNet's parts.")
    if parts is not None and parts != data.labels:
        raise MixerError(
            f"config: model.parts={parts}, but {data.name} has {data.labels} labels of parts; set model.parts="
            + f"{data.labels}, or give --data, which does."
        )
