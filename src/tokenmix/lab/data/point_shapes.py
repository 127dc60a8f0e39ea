"""Meshes of this library: solids of ten classes and objects of labelled parts, each with proportions of its own.

They are synthetic: made of boxes and surfaces of revolution, so that point clouds can be learned without a download.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SEGMENTS = 24  # of a full turn


class Mesh(NamedTuple):
    """Triangles in space.

    Attributes:
        vertices: (V, 3) float64.
        faces: (F, 3) int64, indices of vertices.
        parts: (F,) int64, the part that each face belongs to.
    """

    vertices: Tensor
    faces: Tensor
    parts: Tensor


Draw = Callable[[float, float], float]
"""Draws a number between two bounds."""


def sample_mesh(mesh: Mesh, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw n points evenly over the area of a mesh: points (n, 3) float64, and the part of each, (n,)."""
    a, b, c = mesh.vertices[mesh.faces].unbind(1)
    face = torch.multinomial(triangle_areas(mesh), n, replacement=True, generator=generator)
    u, v = torch.rand(2, n, 1, generator=generator, dtype=torch.float64)
    root = u.sqrt()  # (1 - sqrt u, sqrt u (1 - v), sqrt u v) is even over a triangle
    points = (1 - root) * a[face] + root * (1 - v) * b[face] + root * v * c[face]
    return points, mesh.parts[face]


def triangle_areas(mesh: Mesh) -> Tensor:
    """Return the area of each face, (F,)."""
    a, b, c = mesh.vertices[mesh.faces].unbind(1)
    return torch.linalg.cross(b - a, c - a).norm(dim=1) / 2


def join_meshes(*meshes: Mesh) -> Mesh:
    """Return several meshes as one."""
    starts = torch.tensor([0, *(len(m.vertices) for m in meshes)]).cumsum(0)
    faces = [m.faces + start for m, start in zip(meshes, starts, strict=False)]
    return Mesh(torch.cat([m.vertices for m in meshes]), torch.cat(faces), torch.cat([m.parts for m in meshes]))


def place_mesh(mesh: Mesh, at: Sequence[float] = (0, 0, 0), *, part: int | None = None, upright: bool = True) -> Mesh:
    """Return a mesh moved by ``at``, as a part of another number; not ``upright``: its z axis lies along y first."""
    vertices = mesh.vertices if upright else mesh.vertices[:, [0, 2, 1]]
    parts = mesh.parts if part is None else torch.full_like(mesh.parts, part)
    return Mesh(vertices + torch.tensor(at, dtype=torch.float64), mesh.faces, parts)


def box(width: float, depth: float, height: float) -> Mesh:
    """Return a box of these sides about the origin."""
    corners = torch.cartesian_prod(
        *(torch.tensor([-s / 2, s / 2], dtype=torch.float64) for s in (width, depth, height))
    )
    sides = ((0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3))
    faces = torch.tensor([t for a, b, c, d in sides for t in ((a, b, c), (a, c, d))])
    return Mesh(corners, faces, torch.zeros(len(faces), dtype=torch.long))


def revolve_profile(
    profile: Sequence[tuple[float, float]], turn: float = 2 * math.pi, segments: int = SEGMENTS
) -> Mesh:
    """Return the surface that a profile of (radius, height) sweeps in a turn about the z axis."""
    r, z = torch.tensor(profile, dtype=torch.float64).unbind(1)
    angle = torch.linspace(0, turn, segments + 1, dtype=torch.float64)[:, None]
    vertices = torch.stack([r * angle.cos(), r * angle.sin(), z.expand(segments + 1, -1)], -1).flatten(0, 1)
    rows, here = len(r), torch.cartesian_prod(torch.arange(segments), torch.arange(len(r) - 1))
    first = here[:, 0] * rows + here[:, 1]
    a, b, c, d = first, first + 1, first + rows + 1, first + rows
    faces = torch.cat([torch.stack([a, b, c], 1), torch.stack([a, c, d], 1)])
    return Mesh(vertices, faces, torch.zeros(len(faces), dtype=torch.long))


def circle(radius: float, centre: tuple[float, float], start: float = 0, stop: float = 2 * math.pi) -> list:
    """Return points of an arc as (radius, height)."""
    n = SEGMENTS // 2
    angles = [start + (stop - start) * i / n for i in range(n + 1)]
    return [(max(centre[0] + radius * math.cos(a), 0.0), centre[1] + radius * math.sin(a)) for a in angles]


def rod(radius: float, height: float, top: float | None = None, segments: int = SEGMENTS) -> Mesh:
    """Return a closed cylinder that stands on the origin, or a cone with another radius at its top."""
    top = radius if top is None else top
    return revolve_profile([(0, 0), (radius, 0), (top, height), (0, height)], segments=segments)


def ball(radius: float) -> Mesh:
    """Return a sphere about the origin."""
    return revolve_profile(circle(radius, (0, 0), -math.pi / 2, math.pi / 2))


def ring(radius: float, thickness: float, turn: float = 2 * math.pi) -> Mesh:
    """Return a torus, or a piece of one, about the z axis."""
    return revolve_profile(circle(thickness, (radius, 0)), turn)


def _egg(draw: Draw) -> Mesh:
    found = ball(1)
    sides = torch.tensor([draw(0.7, 1.3) for _ in range(3)], dtype=torch.float64)
    return found._replace(vertices=found.vertices * sides)


def _dumbbell(draw: Draw) -> Mesh:
    size, apart = draw(0.3, 0.5), draw(0.8, 1.1)
    bar = place_mesh(rod(size / 4, 2 * apart), (0, -apart, 0), upright=False)
    return join_meshes(place_mesh(ball(size), (0, apart, 0)), place_mesh(ball(size), (0, -apart, 0)), bar)


def _cross(draw: Draw) -> Mesh:
    thin = draw(0.15, 0.4)
    return join_meshes(box(2, thin, thin), box(thin, draw(1.4, 2), thin), box(thin, thin, draw(1.4, 2)))


SOLIDS: dict[str, Callable[[Draw], Mesh]] = {
    "ball": _egg,
    "box": lambda draw: box(draw(0.6, 1.4), draw(0.6, 1.4), draw(0.6, 1.4)),
    "cylinder": lambda draw: rod(draw(0.4, 0.8), draw(1, 2)),
    "cone": lambda draw: rod(draw(0.5, 1), draw(1, 2), 0.0),
    "ring": lambda draw: ring(1, draw(0.15, 0.45)),
    "pyramid": lambda draw: rod(draw(0.6, 1.2), draw(1, 2), 0.0, segments=4),
    "cross": _cross,
    "bowl": lambda draw: revolve_profile(circle(draw(0.8, 1.2), (0, 0), -math.pi / 2, draw(-0.2, 0.3))),
    "arch": lambda draw: place_mesh(ring(1, draw(0.12, 0.3), math.pi), upright=False),
    "dumbbell": _dumbbell,
}
"""How a solid of each class is made."""


def _corners(mesh: Mesh, x: float, y: float, part: int) -> list[Mesh]:
    return [place_mesh(mesh, (i * x, j * y, 0), part=part) for i in (-1, 1) for j in (-1, 1)]


def _table(draw: Draw) -> Mesh:
    width, depth, height = draw(1.2, 2), draw(0.8, 1.4), draw(0.6, 1.2)
    legs = _corners(rod(draw(0.05, 0.1), height), 0.42 * width, 0.42 * depth, 1)
    return join_meshes(place_mesh(box(width, depth, 0.1), (0, 0, height), part=0), *legs)


def _chair(draw: Draw) -> Mesh:
    side, height, back = draw(0.8, 1.1), draw(0.6, 0.9), draw(0.7, 1.2)
    seat = place_mesh(box(side, side, 0.1), (0, 0, height), part=0)
    rest = place_mesh(box(side, 0.1, back), (0, side / 2, height + back / 2), part=1)
    return join_meshes(seat, rest, *_corners(rod(0.06, height), 0.42 * side, 0.42 * side, 2))


def _lamp(draw: Draw) -> Mesh:
    height, wide = draw(1.2, 1.8), draw(0.5, 0.8)
    shade = revolve_profile([(wide, height - 0.3), (draw(0.2, 0.4), height + draw(0.2, 0.5))])
    return join_meshes(
        place_mesh(rod(draw(0.3, 0.5), 0.1), part=0), place_mesh(rod(0.05, height), part=1), place_mesh(shade, part=2)
    )


def _mug(draw: Draw) -> Mesh:
    radius, height = draw(0.5, 0.7), draw(0.9, 1.4)
    handle = ring(draw(0.25, 0.38), 0.07, math.pi)
    turned = place_mesh(handle, upright=False)  # in the plane of x and z, open to -z
    sideways = turned._replace(vertices=turned.vertices[:, [2, 1, 0]])
    body = revolve_profile([(0, 0), (radius, 0), (radius, height)])
    return join_meshes(place_mesh(body, part=0), place_mesh(sideways, (radius, 0, height / 2), part=1))


def _rocket(draw: Draw) -> Mesh:
    radius, height = draw(0.25, 0.4), draw(1.2, 2)
    fins = [place_mesh(box(a, b, 0.4), (x, y, 0.2), part=2) for a, b, x, y in _four_sides(radius, draw(0.3, 0.5))]
    nose = place_mesh(rod(radius, draw(0.4, 0.8), 0.0), (0, 0, height), part=1)
    return join_meshes(place_mesh(rod(radius, height), part=0), nose, *fins)


def _four_sides(radius: float, wide: float) -> list[tuple[float, float, float, float]]:
    far = radius + wide / 2
    return [(wide, 0.05, far, 0), (wide, 0.05, -far, 0), (0.05, wide, 0, far), (0.05, wide, 0, -far)]


OBJECTS: dict[str, tuple[Callable[[Draw], Mesh], tuple[str, ...]]] = {
    "table": (_table, ("top", "legs")),
    "chair": (_chair, ("seat", "back", "legs")),
    "lamp": (_lamp, ("base", "pole", "shade")),
    "mug": (_mug, ("body", "handle")),
    "rocket": (_rocket, ("body", "nose", "fins")),
}
"""How an object of each category is made, and the names of its parts."""


def make_mesh(make: Callable[[Draw], Mesh], generator: torch.Generator) -> Mesh:
    """Make a mesh with drawn proportions, turned about the vertical by a drawn angle."""

    def draw(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))

    mesh = make(draw)
    return mesh._replace(vertices=mesh.vertices @ turn_about_z(draw(0, 2 * math.pi)).mT)


def turn_about_z(angle: float) -> Tensor:
    """Return the rotation matrix (3, 3) about the vertical."""
    c, s = math.cos(angle), math.sin(angle)
    return torch.tensor([[c, -s, 0], [s, c, 0], [0, 0, 1]], dtype=torch.float64)
