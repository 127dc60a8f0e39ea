"""Point clouds: sets of them, stateless batches, and augmentation, each batch a pure function of (seed, step)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import MixerError
from ...system.config import nearest
from .class_folders import tell_classes
from .corpus import SPLITS
from .inventory import Inventory
from .point_checks import Checked, check_clouds
from .point_files import read_cloud
from .point_folders import CATEGORIES, class_folders, shapenet_parts
from .point_shapes import OBJECTS, SOLIDS, Mesh, make_mesh, sample_mesh, turn_about_z
from .sampler import MASK, mix64, permute_index

POINT_SETS = {
    "solids": "synthetic: surfaces of ten kinds of solids with drawn proportions, made here, for classification",
    "objects": "synthetic: five kinds of objects of labelled parts, made here, for the segmentation of parts",
}
"""Sets that need no file."""
KEPT = 4096  # files kept in memory


class Cloud(NamedTuple):
    """One cloud.

    Attributes:
        points: (N, 3) float32, in the unit ball about their mean.
        category: the number of its class.
        parts: (N,) int64, the label of each point's part; 0 in a set without parts.
    """

    points: Tensor
    category: int
    parts: Tensor


@dataclass(frozen=True)
class Jitter:
    """How clouds are changed in training; the defaults change nothing.

    Args:
        noise: standard deviation of what is added to each coordinate, cut at five of them.
        scale: each axis is multiplied by a number from 1 / scale to scale.
        shift: each axis is moved by up to this much.
        drop: up to this share of the points is replaced by copies of the first that stays, so that their number is the
            same; the share is drawn for each cloud.
        rotate: turn each cloud about the vertical by a drawn angle.
    """

    noise: float = 0.0
    scale: float = 1.0
    shift: float = 0.0
    drop: float = 0.0
    rotate: bool = False

    def __post_init__(self) -> None:
        if self.noise < 0 or self.scale < 1 or self.shift < 0 or not 0 <= self.drop < 1:
            raise MixerError(
                "data: noise and shift of points must be at least 0, scale at least 1 and drop in [0, 1), got "
                + f"{self.noise}, {self.shift}, {self.scale} and {self.drop}."
            )

    def __call__(self, points: Tensor, parts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return changed points (N, 3) and their parts (N,)."""
        n, draw = len(points), generator
        if self.rotate:
            points = points @ turn_about_z(2 * math.pi * float(_uniform(1, draw))).mT.to(points.dtype)
        if self.scale > 1:
            points = points * self.scale ** (2 * _uniform(3, draw) - 1).to(points.dtype)
        if self.shift:
            points = points + self.shift * (2 * _uniform(3, draw) - 1).to(points.dtype)
        if self.noise:
            noise = torch.randn(n, 3, generator=draw).clamp(-5, 5)
            points = points + self.noise * noise.to(points.dtype)
        if self.drop:
            gone = _uniform(n, draw) < self.drop * float(_uniform(1, draw))
            first = int((~gone).to(torch.uint8).argmax())  # the first that stays; point 0 where none does
            points = torch.where(gone[:, None], points[first], points)
            parts = torch.where(gone, parts[first], parts)
        return points, parts


def _uniform(n: int, generator: torch.Generator) -> Tensor:
    return torch.rand(n, generator=generator, dtype=torch.float64)


class PointSet:
    """A set of clouds with classes and, in some sets, parts.

    Attributes:
        name: of the set.
        classes: names of the classes, by number.
        parts: the labels of the parts of each class; empty in a set without parts.
        sizes: number of clouds of each split.
        inventory: what was found in a folder, and what was left out; None for a synthetic set.
    """

    def __init__(
        self,
        name: str,
        classes: Sequence[str],
        parts: Sequence[tuple[int, ...]],
        splits: Mapping[str, Sequence[tuple[Path | int, int]]],
        *,
        root: Path | None = None,
        inventory: Inventory | None = None,
    ):
        self.name, self.classes, self.parts = name, tuple(classes), tuple(parts)
        self._splits, self.root, self.inventory = splits, root, inventory
        self.checked = Checked({}, None) if root is None else check_clouds(root, splits)
        self.sizes = {split: len(items) for split, items in splits.items()}

    def split(self, name: str) -> int:
        """Return how many clouds a split has; an unknown or empty split is refused."""
        if self.sizes.get(name, 0) < 1:
            known = ", ".join(s for s in SPLITS if self.sizes.get(s))
            raise MixerError(f"data: {self.name} has no split {name!r}; choose one of {known}.")
        return self.sizes[name]

    @property
    def labels(self) -> int:
        """Return the number of labels of parts, 0 in a set without parts."""
        return max((max(p) + 1 for p in self.parts), default=0)

    def cloud(self, split: str, index: int, n: int, generator: torch.Generator) -> Cloud:
        """Draw n points of a cloud: from the surface of a mesh, or among the points of a file.

        Raises:
            MixerError: a file is broken, or has fewer points than asked.
        """
        source, category = self._splits[split][index]
        table = (
            self._make_cloud(source, category)
            if isinstance(source, int)
            else _read_once(source, _modified_time(source))
        )
        if isinstance(table, Mesh):
            points, parts = sample_mesh(table, n, generator)
        else:
            if len(table) < n:
                raise MixerError(
                    f"data: {source} has {len(table)} points, fewer than data.points={n}; ask for at most "
                    + f"{len(table)}, or leave this cloud out."
                )
            rows = table[torch.randperm(len(table), generator=generator)[:n]]
            points, parts = rows[:, :3], self._parts_of(rows, category, str(source))
        return Cloud(unit_ball(points).float(), category, parts)

    def _make_cloud(self, seed: int, category: int) -> Mesh:
        name = self.classes[category]
        make = SOLIDS[name] if self.name == "solids" else OBJECTS[name][0]
        mesh = make_mesh(make, _generator(mix64(seed)))
        first = self.parts[category][0] if self.parts else 0
        return mesh._replace(parts=mesh.parts + first)

    def _parts_of(self, rows: Tensor, category: int, source: str) -> Tensor:
        if not self.parts:
            return torch.zeros(len(rows), dtype=torch.long)
        known = torch.tensor(self.parts[category], dtype=torch.float64)
        wrong = ~torch.isin(rows[:, -1], known)
        if bool(wrong.any()):
            raise MixerError(
                f"data: {source} has the part {float(rows[wrong][0, -1]):g}, which {self.classes[category]} has not; "
                + f"its parts are {', '.join(map(str, self.parts[category]))}."
            )
        return rows[:, -1].long()

    def held_out(self, split: str, n: int, limit: int | None = None) -> Iterator[Cloud]:
        """Draw the clouds of a split in their order, with the same points each time."""
        for index in range(min(self.split(split), limit or self.sizes[split])):
            yield self.cloud(split, index, n, _generator(mix64(SPLITS.index(split) + 1) ^ mix64(index)))

    def check_points(self, n: int) -> None:
        """Refuse to draw more points than the smallest table of the set has."""
        if self.checked.least is not None and self.checked.least[1] < n:
            name, most = self.checked.least
            raise MixerError(
                f"data: {self.name}: {name} has {most} points, fewer than data.points={n}; ask for at most {most}, or "
                + "leave this cloud out."
            )

    def describe(self) -> dict[str, object]:
        """Return what a run records of the set: name, classes, sizes, and a hash of which cloud is in which split.

        Clouds are told by the bytes of their files, not by their names.
        """
        said = repr([(s, [(self._source_id(i), c) for i, c in items]) for s, items in self._splits.items()])
        digest = hashlib.sha256((said if self.root is None else repr((self.classes, said))).encode()).hexdigest()
        return {"name": self.name, "classes": len(self.classes), **self.sizes, "sha256": digest}

    def _source_id(self, source: Path | int) -> str:
        if isinstance(source, int) or self.root is None:
            return str(source)
        return self.checked.hashes[str(source.relative_to(self.root))]


class PointSampler:
    """Draw the training batch of a step, a pure function of (seed, step): each epoch has every cloud once.

    Args:
        data: the set.
        points: N, points of each cloud.
        batch_size: clouds of a batch.
        seed: of the order, the points drawn, and their changes.
        jitter: how clouds are changed.
    """

    def __init__(self, data: PointSet, *, points: int, batch_size: int, seed: int = 0, jitter: Jitter | None = None):
        self.data, self.points, self.batch_size, self.seed = data, points, batch_size, seed
        self.jitter = Jitter() if jitter is None else jitter
        self.size = data.split("train")

    def cloud(self, i: int) -> Cloud:
        """Draw the cloud in place i of the order of training."""
        epoch, rank = divmod(i, self.size)
        key = mix64(self.seed * 0x9E3779B97F4A7C15 + epoch)
        generator = _generator(mix64(key ^ mix64(rank)) | 1)
        found = self.data.cloud("train", permute_index(rank, self.size, key), self.points, generator)
        points, parts = self.jitter(found.points, found.parts, generator)
        return Cloud(points, found.category, parts)

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return points (B, N, 3), categories (B,) and parts (B, N) of a step."""
        first = step * self.batch_size
        return stack_clouds([self.cloud(i) for i in range(first, first + self.batch_size)])


def stack_clouds(clouds: Sequence[Cloud]) -> tuple[Tensor, Tensor, Tensor]:
    """Stack clouds into a batch: points (B, N, 3), categories (B,) and parts (B, N).

    Raises:
        MixerError: they do not have the same number of points.
    """
    counts = sorted({len(cloud.points) for cloud in clouds})
    if len(counts) != 1:
        given = " and ".join(map(str, counts)) or "no clouds"
        raise MixerError(f"stacked: the clouds of a batch must have the same number of points, got {given}.")
    categories = torch.tensor([cloud.category for cloud in clouds])
    return torch.stack([c.points for c in clouds]), categories, torch.stack([c.parts for c in clouds])


def unit_ball(points: Tensor) -> Tensor:
    """Move points (N, 3) to have mean 0, and scale them to a largest norm of 1; all in one place become 0."""
    centred = points - points.mean(0)
    return centred / centred.norm(dim=1).max().clamp_min(1e-12)


def open_points(
    source: str, *, valid: float = 0.1, layout: str | None = None, clouds: int = 1000, held_out: int = 200
) -> PointSet:
    """Open a set of point clouds.

    Args:
        source: a name in ``POINT_SETS``; a folder with ShapeNet's parts (it has ``synsetoffset2category.txt``); or a
            folder with one folder for each class, as ModelNet40's; see ``point_folders.class_folders``.
        valid: share of the training clouds held out for validation, in (0, 1), where there are none, and as many for
            the test where there are none.
        layout: "classes": the first folders are classes, whatever their names; "splits": they are splits; None: told by
            the names, and refused where these can be understood in two ways.
        clouds: clouds for training of a synthetic set.
        held_out: clouds for validation of a synthetic set, and as many others for its test.

    Raises:
        MixerError: there is no such set or folder, or it is not as described.
    """
    if not 0 < valid < 1:
        raise MixerError(f"data: valid of points must be in (0, 1), got {valid}.")
    if source in POINT_SETS:
        makers = list(SOLIDS if source == "solids" else OBJECTS)
        if clouds < len(makers) or held_out < len(makers):
            raise MixerError(f"data: {source} needs at least {len(makers)} clouds and held_out, one of each kind.")
        sizes, first, splits = {"train": clouds, "valid": held_out, "test": held_out}, 0, {}
        for split, n in sizes.items():
            splits[split] = [(first + i, i % len(makers)) for i in range(n)]
            first += 1 << 32  # no proportions are drawn twice, whatever the sizes
        return PointSet(source, makers, _object_parts() if source == "objects" else (), splits)
    root = Path(source).expanduser()
    if not root.is_dir():
        raise MixerError(
            f"data: there is no folder {source!r} of point clouds; give one, or a set: {nearest(source, POINT_SETS)}."
        )
    read = Inventory(source)
    parts: tuple[tuple[int, ...], ...] = ()
    if (root / CATEGORIES).is_file():
        names, parts, found = shapenet_parts(root)
    else:
        names, found = class_folders(root, valid, layout, read)
    opened = PointSet(root.resolve().name, names, parts, found, root=root, inventory=read)
    read.count("clouds", len({file for items in found.values() for file, _ in items}))
    read.tell_counts("splits", opened.sizes)
    tell_classes(read, names, [label for items in found.values() for _, label in items])
    return opened


def _object_parts() -> list[tuple[int, ...]]:
    found, first = [], 0
    for _, names in OBJECTS.values():
        found.append(tuple(range(first, first + len(names))))
        first += len(names)
    return found


def _modified_time(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # reading the file raises the error that names it
        return 0


@lru_cache(KEPT)
def _read_once(path: Path, changed: int) -> Mesh | Tensor:
    return read_cloud(path)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed & MASK)
