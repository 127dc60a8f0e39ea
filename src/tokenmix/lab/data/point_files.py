"""Files of points and meshes: formats are read by trimesh and numpy, what they hold is checked here.

Whatever is wrong with a file is one line of error.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import MixerError
from ...types import Options
from .bounds import Bounds, check_regular
from .packed import BAD_ZIP
from .point_shapes import Mesh, triangle_areas

if TYPE_CHECKING:
    from numpy import ndarray


MESHES = (".off", ".ply", ".obj", ".stl")  # read by trimesh; without faces they are points
TABLES = (".txt", ".xyz", ".pts", ".asc", ".csv", ".npy", ".npz")
SUFFIXES = (*MESHES, *TABLES)
MOST_BYTES = 1 << 30  # of one file
OPTIONS: dict[str, Options] = {
    ".ply": {"fix_texture": False},
    ".obj": {"skip_materials": True, "split_objects": False, "group_material": False, "maintain_order": True},
}
SAID = {  # trimesh's words, and what they mean
    "PLY is unexpected length!": "it is not as long as its header promises: it was changed or cut off, or it is binary "
    + "and its faces have different numbers of corners, which are read from a .ply in text only",
}
OFF_HEADER = re.compile(r"(ST)?(C|N|CN)?OFF\b")


def read_cloud(path: Path) -> Mesh | Tensor:
    """Read a mesh, or points (N, columns) float64, by the ending of a file, in any case.

    Raises:
        MixerError: the file is missing, too large or broken, its numbers are not as many as its header says, it names a
            vertex that it has not, has a number that is not finite, or no area.
    """
    return read_mesh(path) if path.suffix.lower() in MESHES else read_points(path)


def read_off(path: Path) -> Mesh:
    """Read a mesh in the Object File Format, of any ending.

    Raises:
        MixerError: it is not such a file, is broken, or has no faces.
    """
    found = read_mesh(path)
    if not isinstance(found, Mesh):
        raise MixerError(f"data: {path} has no surface to draw points from; it has no faces.")
    return found


def read_mesh(path: Path) -> Mesh | Tensor:
    """Read an .off, .ply, .obj or .stl file; polygons become triangles, all of part 0. Without faces: its points."""
    raw, ending = _bytes(path), path.suffix.lower()
    faces_of = {".off": _off_polygons, ".obj": _obj_polygons}.get(ending)
    polygons = [] if faces_of is None else faces_of(raw, path)
    counts_of = {".ply": _ply_counts, ".stl": _stl_counts}.get(ending)
    declared = {"face": len(polygons)} if counts_of is None else counts_of(raw, path)
    try:
        import trimesh
    except ImportError as why:
        raise MixerError(f"data: reading {path} needs trimesh ({why}): pip install 'tokenmix[points]'.") from None
    try:
        file, options = io.BytesIO(raw), OPTIONS.get(ending, {})
        loaded: Any = trimesh.load(file, file_type=ending[1:], process=False, **options)
        if isinstance(loaded, trimesh.Scene):
            loaded = loaded.to_mesh()
        vertices = torch.as_tensor(loaded.vertices, dtype=torch.float64).clone()
        faces = torch.as_tensor(getattr(loaded, "faces", ()), dtype=torch.long).reshape(-1, 3).clone()
    except Exception as why:  # readers of formats raise whatever their decoding meets
        said = " ".join(str(why).split())[:120] or type(why).__name__
        said = f"it has no {said}" if isinstance(why, KeyError) else SAID.get(said, said)
        raise MixerError(f"data: {path} is a broken {ending} file ({said}); make it again, or leave it out.") from None
    if len(vertices) != declared.get("vertex", len(vertices)) or len(faces) < declared.get("face", 0):
        raise MixerError(
            f"data: {path} is a broken {ending} file: it promises {declared.get('vertex', len(vertices))} vertices and "
            + f"{declared.get('face', 0)} faces, and holds {len(vertices)} and {len(faces)}."
        )
    if vertices.ndim != 2 or not len(vertices):
        raise MixerError(f"data: {path} has no points.")
    check_finite(vertices, path)
    if any(len(corners) > 3 for corners in polygons) and max(map(max, polygons)) < len(vertices):
        faces = torch.tensor([t for corners in polygons for t in triangles_of(corners, vertices)], dtype=torch.long)
    if not len(faces):
        return vertices
    if not (int(faces.min()) >= 0 and int(faces.max()) < len(vertices)):
        wrong = int(faces.min() if int(faces.min()) < 0 else faces.max())
        raise MixerError(f"data: {path} has a face with vertex {wrong}, but only {len(vertices)} vertices.")
    mesh = Mesh(vertices, faces, torch.zeros(len(faces), dtype=torch.long))
    if not float(triangle_areas(mesh).sum()) > 0:
        raise MixerError(f"data: {path} has no surface to draw points from; its {len(faces)} faces have no area.")
    return mesh


def _off_polygons(raw: bytes, path: Path) -> list[tuple[int, ...]]:
    """Return the corners of the faces of an .off file, after checking that each line is what the header says.

    A header that runs into its counts, as in some files of ModelNet40 ("OFF490 518 0"), is one too.
    """
    text = raw.decode("utf-8-sig", "replace")
    lines = [line for each in text.splitlines() if (line := each.partition("#")[0].strip())]
    header = OFF_HEADER.match(re.sub(r"^(\w*?OFF)(?=\d)", r"\1 ", lines[0])) if lines else None
    if header is None:
        begin = lines[0][:20] if lines else ""
        raise MixerError(f"data: {path} is not an .off file; it begins with {begin!r}, not with 'OFF'.")
    if "BINARY" in lines[0]:
        raise MixerError(f"data: {path} is a binary .off file, which is not read; save it as text or as .ply.")
    lines[0] = lines[0][len(header[0]) :].strip()
    lines = lines if lines[0] else lines[1:]
    counts = lines[0].split() if lines else []
    try:
        n, m = (int(word) for word in counts[:2])
        if len(counts) > 3 or n < 0 or m < 0 or len(lines) != 1 + n + m:
            raise ValueError
        polygons = []
        for line in lines[1 + n :]:
            words = line.split()
            corners = tuple(int(word) for word in words[1 : 1 + int(words[0])])
            if len(corners) != int(words[0]) or any(not 0 <= corner < n for corner in corners):
                wrong = next((corner for corner in corners if not 0 <= corner < n), "missing")
                raise MixerError(f"data: {path} has a face with vertex {wrong}, but only {n} vertices: {line[:60]!r}.")
            polygons += [corners] if len(corners) > 2 else []
        if any(len(line.split()) < 3 for line in lines[1 : 1 + n]):
            raise ValueError
    except MixerError:
        raise
    except ValueError:
        raise MixerError(
            f"data: {path} is a broken .off file: its header promises {' '.join(counts[:2]) or 'nothing'} vertices and "
            + f"faces, one on each line, and {max(len(lines) - 1, 0)} lines follow, or hold no such numbers; make it "
            + "again, or leave it out."
        ) from None
    return polygons


def _ply_counts(raw: bytes, path: Path) -> dict[str, int]:
    """Return how many of each element the header of a .ply file promises, if the file can hold as many."""
    header, end, body = raw.partition(b"end_header")
    found = re.findall(rb"^[ \t]*element\s+(\w+)\s+(\d+)\s*$", header, re.M)
    counts = {name.decode("ascii", "replace"): int(n[:20]) for name, n in found}
    if not raw.startswith(b"ply") or not end:
        raise MixerError(f"data: {path} is not a .ply file; it begins with {raw[:12]!r} and has no whole header.")
    rows = [line for line in body.splitlines()[1:] if line.strip()] if b"ascii" in header else ()
    if len(rows) > sum(counts.values()):
        raise MixerError(
            f"data: {path} is a broken .ply file: its header promises {sum(counts.values())} lines, and {len(rows)} "
            + "follow; make it again, or leave it out."
        )
    if sum(counts.values()) > len(raw):
        what = ", ".join(f"{n} of {name}" for name, n in counts.items())
        raise MixerError(f"data: {path} is a broken .ply file: {len(raw)} bytes cannot hold {what}.")
    return counts


def _stl_counts(raw: bytes, path: Path) -> dict[str, int]:
    """Return how many faces an .stl file promises: by its words, or by a count that the length of the file must fit."""
    if raw.lstrip()[:5].lower() == b"solid" and (words := len(re.findall(rb"^\s*facet\b", raw, re.I | re.M))):
        return {"face": words}
    n = int.from_bytes(raw[80:84], "little")
    if len(raw) != 84 + 50 * n:
        raise MixerError(
            f"data: {path} is a broken .stl file: it promises {n} faces, which are {84 + 50 * n} bytes, but has "
            + f"{len(raw)}."
        )
    return {"face": n}


def _obj_polygons(raw: bytes, path: Path) -> list[tuple[int, ...]]:
    """Return the corners of the faces of an .obj file, from 0; negative ones count back from the last vertex."""
    n, polygons = 0, []
    for line in raw.decode("utf-8", "replace").replace("\\\n", " ").splitlines():
        kind, *words = line.partition("#")[0].split() or [""]
        n += kind == "v"
        if kind == "f":
            numbers = [int(word.split("/")[0]) if word.split("/")[0].lstrip("-").isdecimal() else 0 for word in words]
            polygons.append(tuple(i - 1 if i > 0 else n + i for i in numbers))
            if len(words) < 3 or 0 in numbers or min(polygons[-1]) < 0:
                raise MixerError(f"data: {path} is a broken .obj file: {line.strip()[:60]!r} is no face.")
    return polygons


def triangles_of(corners: Sequence[int], vertices: Tensor) -> list[tuple[int, int, int]]:
    """Cut a flat polygon, also one with notches, into triangles, by cutting off ears."""
    if len(corners) == 3:
        return [(corners[0], corners[1], corners[2])]
    at = vertices[list(corners)]
    normal = torch.linalg.cross(at, at.roll(-1, 0)).sum(0)
    drop = int(normal.abs().argmax())  # seen along the axis on which the polygon is largest
    sign = 1.0 if float(normal[drop]) >= 0 else -1.0
    x, y = (at[:, [1, 2, 0][drop]].tolist(), at[:, [2, 0, 1][drop]].tolist())

    def side(a: int, b: int, c: int) -> float:
        return sign * ((x[b] - x[a]) * (y[c] - y[a]) - (y[b] - y[a]) * (x[c] - x[a]))

    left, found = list(range(len(corners))), []
    while len(left) > 3:
        ear = next(
            (
                i
                for i in range(len(left))
                if side(a := left[i - 1], b := left[i], c := left[(i + 1) % len(left)]) > 0
                and not any(min(side(a, b, p), side(b, c, p), side(c, a, p)) >= 0 for p in left if p not in (a, b, c))
            ),
            0,  # corners in one line, or a polygon that crosses itself
        )
        found.append((left[ear - 1], left[ear], left[(ear + 1) % len(left)]))
        del left[ear]
    return [(corners[a], corners[b], corners[c]) for a, b, c in [*found, tuple(left)]]


def read_points(path: Path) -> Tensor:
    """Read a table of points, one a row: .npy, .npz, or text with commas or spaces. Returns (N, columns) float64.

    A first line of one number is the number of points, as in .pts files; one of names, with x, y and z among them, says
    which columns these are. Columns without a name are left out then.

    Raises:
        MixerError: the file is missing or not such a table, has rows of different widths, fewer than three columns, or
            a number that is not finite.
    """
    try:
        import numpy
    except ImportError as why:
        raise MixerError(f"data: reading points needs numpy ({why}): pip install 'tokenmix[points]'.") from None
    ending = path.suffix.lower()
    raw = _bytes(path)
    try:
        table: Any = (
            _array(path, raw, numpy)
            if ending in (".npy", ".npz")
            else _text_table(path, raw.decode("utf-8-sig"), numpy)
        )
        if table.dtype.kind not in "iuf":
            raise ValueError(f"its values are {table.dtype}")
        points = torch.from_numpy(numpy.asarray(table, dtype=numpy.float64))
    except MixerError:
        raise
    except (*BAD_ZIP, ValueError, OSError, EOFError, TypeError, KeyError, MemoryError, SyntaxError) as why:
        said = " ".join(str(why).split()).partition("; use `usecols`")[0][:120]
        raise MixerError(f"data: {path} is not a table of numbers ({said}).") from None
    if points.ndim != 2 or points.shape[1] < 3:
        raise MixerError(
            f"data: {path} must be a table of points with at least x, y and z, got shape {tuple(points.shape)}."
        )
    if not len(points):
        raise MixerError(f"data: {path} has no points.")
    check_finite(points, path)
    return points


def _text_table(path: Path, text: str, numpy: ModuleType) -> ndarray:
    lines = [line for each in text.splitlines() if (line := each.partition("#")[0].strip())]
    promised = int(lines[0]) if len(lines) > 1 and lines[0].isdecimal() else None
    lines = lines[1:] if promised is not None else lines
    if promised not in (None, len(lines)):
        raise ValueError(f"its first line promises {promised} points, and {len(lines)} follow")
    for line in lines:
        words = line.split()
        if len(words) > 1 and any("," in word.strip(",") for word in words):
            raise ValueError(f"commas and spaces separate the numbers of {line[:40]!r}; decimals need points")
    comma = "," if any("," in line for line in lines) else None
    order = _columns(lines[0].removeprefix("//").split(comma)) if lines else None
    lines = [line.rstrip(",") for line in (lines if order is None else lines[1:])]
    if not lines:
        return numpy.empty((0, 3))
    return numpy.loadtxt(lines, dtype=numpy.float64, ndmin=2, delimiter=comma, usecols=order)


def _columns(words: list[str]) -> list[int] | None:
    """Return the columns that a line of names puts in the order x, y, z and others; None: it is none."""
    names = [word.strip().strip("'\"").lower() for word in words]
    if not {"x", "y", "z"} <= set(names):
        return None
    first = [names.index(axis) for axis in "xyz"]
    return [*first, *(i for i, name in enumerate(names) if i not in first and name)]


def _array(path: Path, raw: bytes, numpy: ModuleType) -> ndarray:
    """Read the array of an .npy, or that of an .npz which is alone or called points or xyz."""
    with io.BytesIO(raw) as file:
        found = numpy.load(file, allow_pickle=False)
        if not hasattr(found, "files"):
            return found
        Bounds().check(path, sum(info.file_size for info in found.zip.infolist()))
        names = [name for name in found.files if name in ("points", "xyz")] or found.files
        if len(names) != 1:
            raise ValueError(f"it has the arrays {', '.join(found.files) or 'none'}; call that of the points 'points'")
        return found[names[0]]


def check_finite(points: Tensor, where: object) -> None:
    """Refuse NaN and infinity; the error names the first row that has one."""
    bad = ~points.isfinite().all(-1)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        raise MixerError(f"data: {where} has a coordinate that is not finite in point {row}: {points[row].tolist()}.")


def _bytes(path: Path) -> bytes:
    check_regular("data", path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise MixerError(f"data: {path} has {path.stat().st_size} bytes, more than the {MOST_BYTES} that are read.")
        return path.read_bytes()
    except FileNotFoundError:
        raise MixerError(f"data: there is no file {path}.") from None
    except OSError as why:
        raise MixerError(f"data: {path} cannot be read ({why.strerror}).") from None
