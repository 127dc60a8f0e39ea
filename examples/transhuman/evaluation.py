"""Score fields on bodies that they were not trained on, and beside floors that need no training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor

from .model import TransHuman
from .scenes import Scene, View, draw_scene
from .training import HELD_OUT, TrainSettings
from .volume import Drawn, colour_vertices, draw_image

Draw = Callable[[Scene, View], Tensor]
"""A function of a scene and a view of it: the colours (3, H, W) that are drawn for it."""


@dataclass(frozen=True)
class Score:
    """Scores of one kind of scenes.

    Attributes:
        psnr: in decibels, over the box around the body.
        ssim: over the same box.
        unseen: root of the mean squared colour error at vertices that no reference view sees.
        seen: the same at the others.
    """

    psnr: float
    ssim: float
    unseen: float
    seen: float


def body_window(view: View, margin: int = 2) -> tuple[slice, slice]:
    """Return the rows and columns of the box around the body in an image."""
    rows, columns = (view.mask.any(axis).nonzero()[:, 0] for axis in (1, 0))
    height, width = view.mask.shape
    return (
        slice(max(0, int(rows.min()) - margin), min(height, int(rows.max()) + 1 + margin)),
        slice(max(0, int(columns.min()) - margin), min(width, int(columns.max()) + 1 + margin)),
    )


def psnr(drawn: Tensor, truth: Tensor) -> float:
    """Return the peak signal-to-noise ratio of colours in 0..1, in decibels."""
    return float(-10 * (drawn - truth).square().mean().clamp_min(1e-10).log10())


def ssim(drawn: Tensor, truth: Tensor) -> float:
    """Return the structural similarity of two images (3, H, W), by scikit-image."""
    from skimage.metrics import structural_similarity

    side = min(7, min(drawn.shape[1:]) // 2 * 2 - 1)
    return float(
        structural_similarity(drawn.numpy(), truth.numpy(), channel_axis=0, data_range=1.0, win_size=max(3, side))
    )


def held_out(kind: str, settings: TrainSettings, count: int) -> list[Scene]:
    """Return scenes that were not trained on: "pose" (people of training), "identity", "one view" (of new people)."""
    people = range(count) if kind == "pose" else range(HELD_OUT, HELD_OUT + count)
    found = [draw_scene(p, HELD_OUT + i, size=settings.size, targets=3) for i, p in enumerate(people)]
    return [s.with_references((1,) if kind == "one view" else settings.references) for s in found]


KINDS = ("pose", "identity", "one view")


def score_images(scenes: Iterable[Scene], draw: Draw) -> tuple[float, float]:
    """Return mean PSNR and SSIM of what is drawn for the target views."""
    values = []
    for scene in scenes:
        for view in scene.targets:
            rows, columns = body_window(view)
            drawn, truth = (image[:, rows, columns] for image in (draw(scene, view), view.colours))
            values.append((psnr(drawn, truth), ssim(drawn, truth)))
    return mean(v[0] for v in values), mean(v[1] for v in values)


def colour_error(found: Tensor, truth: Tensor) -> float:
    """Return the root of the mean squared error of colours (M, 3)."""
    return float((found - truth).square().mean().sqrt())


@torch.no_grad()
def score_model(model: TransHuman, scenes: list[Scene], *, samples: int = 24) -> Score:
    """Score a model on scenes."""
    known = {id(scene): model.encode(scene) for scene in scenes}

    def draw(scene: Scene, view: View) -> Tensor:
        drawn: Drawn = draw_image(model, known[id(scene)], scene, view.camera, samples=samples)
        return drawn.colours

    errors = []
    for scene in scenes:
        found = colour_vertices(model, known[id(scene)], scene, scene.frame.body.outside)
        truth, unseen = scene.colours[scene.frame.body.outside], scene.unseen[scene.frame.body.outside]
        errors.append((colour_error(found[unseen], truth[unseen]), colour_error(found[~unseen], truth[~unseen])))
    return Score(*score_images(scenes, draw), mean(e[0] for e in errors), mean(e[1] for e in errors))


def score_floors(scenes: list[Scene]) -> dict[str, Score]:
    """Score what needs no training: the mean colour of what is seen on the true silhouette, and the nearest view.

    For vertices: the mean colour of those that are seen, and the colour of the nearest one that is.
    """

    def mean_colour(scene: Scene) -> Tensor:
        return scene.colours[scene.visible.any(0)].mean(0)

    def flat(scene: Scene, view: View) -> Tensor:
        return mean_colour(scene)[:, None, None] * view.mask

    def nearest_view(scene: Scene, view: View) -> Tensor:
        away = [float((view.camera.centre - other.camera.centre).norm()) for other in scene.references]
        return scene.references[away.index(min(away))].colours

    flats, nearests = [], []
    for scene in scenes:
        outside, seen = scene.frame.body.outside, scene.visible.any(0)
        vertices = scene.frame.posed.vertices
        copied = scene.colours[seen][torch.cdist(vertices[scene.unseen], vertices[seen]).argmin(1)]
        truth = scene.colours[scene.unseen]
        flats.append(
            (
                colour_error(mean_colour(scene).expand_as(truth), truth),
                colour_error(mean_colour(scene).expand(int((seen & outside).sum()), 3), scene.colours[seen & outside]),
            )
        )
        nearests.append(colour_error(copied, truth))
    return {
        "mean colour": Score(*score_images(scenes, flat), mean(f[0] for f in flats), mean(f[1] for f in flats)),
        "nearest view": Score(*score_images(scenes, nearest_view), mean(nearests), 0.0),
    }
