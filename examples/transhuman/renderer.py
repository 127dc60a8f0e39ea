"""Exact images of a triangle mesh: which surface each pixel's ray meets first, where, and how far away.

Pixels are sampled at their centres; a pinhole camera maps a point p to K (R p + t), with x to the right, y down and z
forward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmix import MixerError

NEAR = 0.05
"""The nearest depth in metres that a camera sees."""


@dataclass(frozen=True)
class Camera:
    """A pinhole camera.

    Attributes:
        rotation, translation: world to camera, (3, 3) and (3,).
        focal: in pixels.
        size: rows and columns of its images.
    """

    rotation: Tensor
    translation: Tensor
    focal: float
    size: tuple[int, int]

    @property
    def centre(self) -> Tensor:
        """The place of the camera in the world (3,)."""
        return -self.rotation.T @ self.translation

    def project(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pixel coordinates x, y (..., 2) of points in the world, and their depths (...)."""
        p = points @ self.rotation.T + self.translation
        middle = torch.tensor([self.size[1] / 2, self.size[0] / 2]).to(p)
        return self.focal * p[..., :2] / p[..., 2:].clamp_min(1e-6) + middle, p[..., 2]

    def rays(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the origin (3,) and directions (..., 3) of length 1 of the rays through pixels x, y (..., 2)."""
        middle = torch.tensor([self.size[1] / 2, self.size[0] / 2]).to(pixels)
        across = (pixels - middle) / self.focal
        local = torch.cat([across, torch.ones_like(across[..., :1])], -1)
        return self.centre, torch.nn.functional.normalize(local @ self.rotation, dim=-1)

    def to(self, dtype: torch.dtype) -> Camera:
        """Return the camera with numbers of another dtype."""
        return Camera(self.rotation.to(dtype), self.translation.to(dtype), self.focal, self.size)

    def move(self, rotation: Tensor, translation: Tensor) -> Camera:
        """Return the camera after the world has been moved by p -> rotation p + translation."""
        turned = self.rotation @ rotation.T
        return Camera(turned, self.translation - turned @ translation, self.focal, self.size)


def look_at(place: Tensor, target: Tensor, focal: float, size: tuple[int, int]) -> Camera:
    """Return a camera at a place that looks at a target, with the world's y up."""
    forward = torch.nn.functional.normalize(target - place, dim=0)
    up = torch.tensor([0.0, 1.0, 0.0]).to(place)
    right = torch.linalg.cross(forward, up)
    if float(right.norm()) < 1e-6:
        raise MixerError("look_at: a camera straight above or below its target has no upright; move it to the side.")
    right = right / right.norm()
    rotation = torch.stack([right, torch.linalg.cross(forward, right), forward])
    return Camera(rotation, -rotation @ place, focal, size)


def orbit(angle: float, target: Tensor, *, distance: float, height: float, focal: float, size: int) -> Camera:
    """Return a camera on a circle around a target; angle 0, in radians, looks at the front of a body."""
    offset = torch.tensor([distance * math.sin(angle), height, distance * math.cos(angle)]).to(target)
    return look_at(target + offset, target, focal, (size, size))


@dataclass(frozen=True)
class Image:
    """What a camera sees of a mesh.

    Attributes:
        depth: (H, W), distance along the camera's axis; infinity where there is no surface.
        face: (H, W), index of the triangle; -1 where there is none.
        weights: (H, W, 3), weights of the triangle's vertices at the pixel.
    """

    depth: Tensor
    face: Tensor
    weights: Tensor

    def interpolate(self, values: Tensor, faces: Tensor) -> Tensor:
        """Return values of the vertices (N, C) at the pixels (H, W, C); zeros where there is no surface."""
        corners = values[faces[self.face.clamp_min(0)]]
        return (self.weights[..., None] * corners).sum(-2) * (self.face >= 0)[..., None]


def rasterize(vertices: Tensor, faces: Tensor, camera: Camera) -> Image:
    """Draw a mesh: for every pixel the nearest triangle that covers its centre, with weights exact in perspective.

    Raises:
        MixerError: if the mesh, or a part of it, is behind the camera.
    """
    height, width = camera.size
    points, depth = camera.project(vertices)
    if not torch.isfinite(points).all():
        raise MixerError("rasterize: a vertex of the mesh is not finite.")
    if float(depth.min()) < NEAR:
        raise MixerError(
            f"rasterize: the camera must stand before the mesh, {NEAR} m away at least; "
            f"its nearest vertex has a depth of {float(depth.min()):.2f} m."
        )
    corners, far = points[faces], depth[faces]
    low = (corners.amin(1) - 0.5).ceil().long().clamp_min(0)
    high = (corners.amax(1) - 0.5).floor().long()
    high = torch.minimum(high, torch.tensor([width - 1, height - 1]))
    spans = (high - low + 1).clamp_min(0)
    counts = spans.prod(1)
    triangle = torch.repeat_interleave(torch.arange(len(faces)), counts)
    number = torch.arange(len(triangle)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    across = spans[triangle, 0]
    x, y = low[triangle, 0] + number % across, low[triangle, 1] + number // across
    p = torch.stack([x, y], 1).to(points) + 0.5
    a, b, c = corners[triangle].unbind(1)
    areas = torch.stack([_cross(b - p, c - p), _cross(c - p, a - p), _cross(a - p, b - p)], 1)
    whole = areas.sum(
        1
    )  # not from the corners alone: of a tiny triangle, rounding would leave weights that sum to less
    flat = areas / whole[:, None]
    inverse = flat / far[triangle]
    distance = 1 / inverse.sum(1)
    covered = (flat >= 0).all(1) & (whole != 0) & torch.isfinite(distance)
    triangle, x, y, distance, inverse = (t[covered] for t in (triangle, x, y, distance, inverse))
    pixel = y * width + x
    order = distance.argsort(descending=True, stable=True)  # the nearest is written last
    pixel, triangle, distance, weights = (t[order] for t in (pixel, triangle, distance, inverse * distance[:, None]))
    nearest = torch.full((height * width,), math.inf).to(distance)
    nearest = nearest.scatter_reduce(0, pixel, distance, "amin")
    first = distance == nearest[pixel]
    face = torch.full((height * width,), -1)
    face[pixel[first]] = triangle[first]
    found = torch.zeros(height * width, 3).to(weights)
    found[pixel[first]] = weights[first]
    return Image(nearest.unflatten(0, camera.size), face.unflatten(0, camera.size), found.unflatten(0, camera.size))


def _cross(a: Tensor, b: Tensor) -> Tensor:
    return a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]


def vertex_normals(vertices: Tensor, faces: Tensor) -> Tensor:
    """Return the normals (N, 3) of the surface at its vertices, outward, of length 1."""
    a, b, c = vertices[faces].unbind(1)
    normal = torch.linalg.cross(b - a, c - a)
    total = torch.zeros_like(vertices).index_add(0, faces.flatten(), normal.repeat_interleave(3, 0))
    return torch.nn.functional.normalize(total, dim=1)


def find_visible(vertices: Tensor, faces: Tensor, camera: Camera, *, tolerance: float = 0.015) -> Tensor:
    """Return which vertices (N,) a camera sees: those in front of the nearest surface, up to a tolerance in metres.

    The depths are drawn at four times the camera's resolution.
    """
    fine = Camera(camera.rotation, camera.translation, camera.focal * 4, (camera.size[0] * 4, camera.size[1] * 4))
    depth = rasterize(vertices, faces, fine).depth
    points, far = fine.project(vertices)
    x, y = points.floor().long().unbind(-1)
    inside = (x >= 0) & (y >= 0) & (x < fine.size[1]) & (y < fine.size[0])
    seen = depth[y.clamp(0, fine.size[0] - 1), x.clamp(0, fine.size[1] - 1)]
    toward = ((camera.centre - vertices) * vertex_normals(vertices, faces)).sum(1) > 0
    return inside & toward & (far <= torch.where(torch.isfinite(seen), seen, far) + tolerance)
