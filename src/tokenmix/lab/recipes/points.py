"""Point clouds in the shell of PCT (Guo et al. 2020, arXiv 2012.09688): classes of clouds and parts of their points.

``points_classify`` is ModelNet40 at ``paper`` and ``gpu`` (``--data FOLDER``), ``points_parts`` ShapeNet-part; the
External Attention paper (Guo et al. 2021, arXiv 2105.02358) trains the same shell with its own layer on both. At
``smoke`` both are trained on clouds made here, which need no file. Sizes, optimiser and batches of the two large sizes
are those of PCT's paper; what the paper leaves open was chosen here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...models import ModelConfig, PointClassifierConfig, PointSegmenterConfig
from ...types import Options, Spec
from ..data.points import Jitter
from ..train import PointsDataConfig
from ..train.config import OptimConfig, RunConfig, TrainConfig
from .recipe import Recipe, Row, shrink_spec

LAYERS, DIM, POINTS, HEADS = 4, 256, 1024, 8
MODELNET, SHAPENET = 9840, 14_007  # clouds for training
SMALL: dict[str, Options] = {
    "points_classify": {"dim": 64, "lift": 32, "neighbours": (8,), "samples": (64,), "fuse": 128, "hidden": (64,)},
    "points_parts": {"dim": 64, "lift": 32, "neighbours": (8,), "samples": (0,), "fuse": 96, "hidden": (64,)},
}
"""Models of the smoke size; they have 2 blocks."""
CHANGES = Jitter(noise=0.01, scale=1.25, shift=0.1, drop=0.3)


def row(about: str, spec: Spec) -> Row:
    """Return a row with this mixer in all blocks."""
    return Row(about, (spec,), LAYERS, DIM, POINTS)


ROWS = {
    "pct": row("offset attention, PCT's own", {"name": "pct_attention", "tied": True}),
    "attention": row("softmax attention without positions", {"name": "attention", "heads": HEADS}),
    "external": row("External attention, 64 slots", {"name": "external", "slots": 64}),
    "hydra": row("Hydra attention", {"name": "hydra"}),
    "aft_simple": row("AFT-simple", {"name": "aft_simple"}),
    "linear": row("linear attention, elu + 1", {"name": "linear", "heads": HEADS}),
    "set": row("attention through 32 learned points", {"name": "set", "points": 32, "heads": HEADS}),
}


def build(row: Row, size: str, *, name: str) -> RunConfig:
    """Return the config of a row at a size."""
    parts = name == "points_parts"
    if size == "smoke":
        return _smoke(row, name)
    data = PointsDataConfig(
        source="shapenet_parts" if parts else "modelnet40",
        points=2048 if parts else POINTS,
        jitter=Jitter(scale=1.5, shift=0.2, drop=0.875, noise=0.01 if parts else 0.0),
    )
    if parts:
        model: ModelConfig = PointSegmenterConfig(classes=16, mixers=row.mixers, dim=128 if size == "gpu" else DIM)
    else:
        model = PointClassifierConfig(classes=40, mixers=row.mixers)
    epochs, batch = 250 if size == "paper" else 60, 16 if parts else 32
    steps = epochs * ((SHAPENET if parts else MODELNET) // batch)
    loop = TrainConfig(
        steps=steps, batch_size=batch, eval_every=steps // epochs * 5, eval_batch=batch, save_every=steps // epochs * 5
    )
    optim = OptimConfig(lr=1e-3, weight_decay=1e-4, schedule="cosine", min_lr_ratio=0.01, warmup=200)
    return RunConfig(model, data, optim, loop)


def _smoke(row: Row, name: str) -> RunConfig:
    mixers = tuple(shrink_spec(spec, seq_len=64, heads=4, rank=None) for spec in row.mixers)
    at: Options = SMALL[name] | {"mixers": mixers, "layers": 2, "dropout": 0.1}
    if name == "points_parts":
        model: ModelConfig = PointSegmenterConfig(classes=5, parts=13, category=16, **at)
        source, points, steps, batch = "objects", 192, 160, 12
    else:
        model = PointClassifierConfig(classes=10, **at)
        source, points, steps, batch = "solids", 192, 300, 24
    data = PointsDataConfig(source=source, points=points, clouds=1000, held_out=200, jitter=CHANGES)
    every = steps // 4
    loop = TrainConfig(steps=steps, batch_size=batch, eval_every=every, eval_batch=50, save_every=every)
    return RunConfig(model, data, replace(OptimConfig(), lr=3e-3, weight_decay=1e-4, warmup=20), loop)


ABOUT = {
    "points_classify": "classes of point clouds: ModelNet40, or synthetic solids at smoke, in the shell of PCT",
    "points_parts": "parts of point clouds: ShapeNet-part, or synthetic objects at smoke, in the shell of PCT",
}
RECIPES = tuple(Recipe(name, about, ROWS, "pct", partial(build, name=name)) for name, about in ABOUT.items())
