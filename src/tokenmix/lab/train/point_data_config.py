"""The config of point clouds as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...errors import MixerError
from ...system.config import Json
from ..data.points import Jitter, PointSet, open_points


@dataclass(frozen=True)
class PointsDataConfig(Json):
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


def check_points(data: PointsDataConfig, model: Any) -> None:
    """Refuse options of point clouds that are out of range."""
    if data.points < model.least():
        raise MixerError(
            f"config: data.points={data.points}, but model.samples={list(model.samples)} and model.neighbours="
            + f"{list(model.neighbours)} need clouds of at least {model.least()} points."
        )
