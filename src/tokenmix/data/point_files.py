"""Files of points and meshes: .off, .txt and .npy, with one line of error for whatever is wrong with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import MixerError
from .point_shapes import Mesh, triangle_areas

SUFFIXES = (".off", ".txt", ".npy")


def read_off(path: Path) -> Mesh:
    """Read a mesh in the Object File Format; polygons become triangles, and all faces are part 0.

    A header that runs into its counts, as in some files of ModelNet40 ("OFF490 518 0"), is read too.

    Raises:
        MixerError: the file is missing, not OFF or cut off, names a vertex that it has not, has a coordinate that is
            not finite, or no area.
    """
    lines = (line.partition("#")[0] for line in _text(path).splitlines())
    words = " ".join(lines).split()
    if not words or not words[0].startswith("OFF"):
        raise MixerError(f"data: {path} is not an .off file; it begins with {' '.join(words[:1])!r}, not with 'OFF'.")
    words = ([words[0][3:]] if len(words[0]) > 3 else []) + words[1:]
    try:
        n, m = int(words[0]), int(words[1])
        numbers = torch.tensor([float(w) for w in words[3 : 3 + 3 * n]], dtype=torch.float64)
        faces, at = [], 3 + 3 * n
        for _ in range(m):
            corners = [int(w) for w in words[at + 1 : at + 1 + int(words[at])]]
            if len(corners) != int(words[at]):
                raise IndexError
            faces += [(corners[0], b, c) for b, c in zip(corners[1:], corners[2:], strict=False)]
            at += 1 + len(corners)
        vertices = numbers.view(n, 3)
    except (ValueError, IndexError, RuntimeError):
        raise MixerError(
            f"data: {path} is a broken .off file: its header promises {' '.join(words[:2]) or 'nothing'} vertices and "
            + "faces, and the numbers after it are fewer or are not numbers; download it again, or leave it out."
        ) from None
    check_finite(vertices, path)
    triangles = torch.tensor(faces, dtype=torch.long).view(-1, 3)
    if len(triangles) and not (int(triangles.min()) >= 0 and int(triangles.max()) < n):
        raise MixerError(f"data: {path} has a face with vertex {int(triangles.max())}, but only {n} vertices.")
    mesh = Mesh(vertices, triangles, torch.zeros(len(triangles), dtype=torch.long))
    if not float(triangle_areas(mesh).sum()) > 0:
        raise MixerError(f"data: {path} has no surface to draw points from; its {len(triangles)} faces have no area.")
    return mesh


def read_points(path: Path) -> Tensor:
    """Read a table of points, one a row: .npy, or .txt with commas or spaces. Returns (N, columns) float64.

    Raises:
        MixerError: the file is missing or not such a table, has fewer than three columns, or a number that is not
            finite.
    """
    try:
        import numpy
    except ImportError as why:
        raise MixerError(f"data: reading points needs numpy ({why}): pip install numpy.") from None
    _exists(path)
    try:
        if path.suffix == ".npy":
            table: Any = numpy.load(path, allow_pickle=False)
        else:
            text = _text(path).replace(",", " ").splitlines()
            table = numpy.loadtxt(text, dtype=numpy.float64, ndmin=2) if text else numpy.empty((0, 3))
        points = torch.from_numpy(numpy.asarray(table, dtype=numpy.float64))
    except (ValueError, OSError, EOFError, TypeError) as why:
        raise MixerError(f"data: {path} is not a table of numbers ({' '.join(str(why).split())[:120]}).") from None
    if points.ndim != 2 or points.shape[1] < 3:
        raise MixerError(
            f"data: {path} must be a table of points with at least x, y and z, got shape {tuple(points.shape)}."
        )
    if not len(points):
        raise MixerError(f"data: {path} has no points.")
    check_finite(points, path)
    return points


def check_finite(points: Tensor, where: Any) -> None:
    """Refuse NaN and infinity; the error names the first row that has one."""
    bad = ~points.isfinite().all(-1)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise MixerError(f"data: {where} has a coordinate that is not finite in point {row}: {points[row].tolist()}.")


def _exists(path: Path) -> None:
    if not path.is_file():
        raise MixerError(f"data: there is no file {path}.")


def _text(path: Path) -> str:
    _exists(path)
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as why:
        raise MixerError(f"data: {path} cannot be read as text ({why}).") from None
