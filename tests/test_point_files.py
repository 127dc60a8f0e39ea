"""Test files of points and meshes in all their formats, folders of them, and that what is left out is told."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenmix import MixerError
from tokenmix.lab.data import open_points
from tokenmix.lab.data.point_files import read_cloud, triangles_of
from tokenmix.lab.data.point_shapes import Mesh, triangle_areas

CORNERS = "0 0 0\n1 0 0\n0 1 0\n0 0 1\n"
FACES = ("3 0 1 2", "3 0 1 3", "3 0 2 3", "3 1 2 3")
VERTICES = [[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
AREA = 1.5 + 3**0.5 / 2
HUGE = (
    b"\x93NUMPY\x01\x00v\x00"
    + b"{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000, 3), }".ljust(117)
    + b"\n"
)
ROWS = np.random.default_rng(0).normal(size=(9, 3))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def read(tmp_path: Path, name: str, content: str | bytes) -> Mesh | torch.Tensor:
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_cloud(file)


def area(mesh: Mesh | torch.Tensor) -> float:
    assert isinstance(mesh, Mesh)
    return float(triangle_areas(mesh).sum())


def off(*, counts="4 4 0", faces=FACES, begin="OFF\n", corners=CORNERS) -> str:
    return f"{begin}{counts}\n{corners}" + "".join(f"{face}\n" for face in faces)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("edges.off", off()),
        ("no_edges.off", off(counts="4 4")),
        ("glued.OFF", off(begin="OFF")),
        (
            "comments.off",
            off(begin="# made by hand\nOFF\n\n# counts\n", corners=CORNERS.replace("\n", " # corner\n\n")),
        ),
        ("rgb.off", off(faces=[f"{face} 1 0 0" for face in FACES])),
        ("black.off", off(faces=[f"{face} 0 0 0" for face in FACES])),
        ("map.off", off(faces=[f"{face} 1" for face in FACES])),
        ("mixed.off", off(faces=[f"{face}{' 0.5 0.5 0.5 1' * (i % 2)}" for i, face in enumerate(FACES)])),
        ("coloured.off", off(begin="COFF\n", corners=CORNERS.replace("\n", " 255 0 0 255\n"))),
        ("lines.off", off().replace("\n", "\r\n")),
    ],
)
def test_off_files_are_read_by_lines(tmp_path, name, text):
    mesh = read(tmp_path, name, text)
    assert mesh.vertices.tolist() == VERTICES
    assert len(mesh.faces) == 4
    assert area(mesh) == pytest.approx(AREA)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (off(counts="4 5 0"), "header promises 4 5 vertices"),
        (off(counts="4 3 0"), "header promises 4 3 vertices"),
        (off(counts="3 4 0"), "header promises 3 4 vertices"),
        (off(counts="4"), "header promises 4 vertices"),
        (off(counts="99999999999 4 0"), "header promises 99999999999 4"),
        (off(counts="-4 4 0"), "header promises -4 4"),
        (off(faces=[*FACES[:3], "4 1 2 3"]), "broken .off file|a face with"),
        (off(faces=[*FACES[:3], "3 1 2 -3"]), "a face with vertex -3"),
        (off(corners=CORNERS.replace("0 1 0", "0 1")), "broken .off file"),
        (off(corners=CORNERS.replace("0 1 0", "0 one 0")), "broken .off file"),
        (off(corners=CORNERS.replace("0 1 0", "0 1e999 0")), "not finite in point 2"),
        ("OFF BINARY\n4 4 0\n", "binary .off file"),
        ("4OFF\n4 4 0\n", "not an .off file; it begins with '4OFF'"),
        ("", "not an .off file; it begins with ''"),
    ],
)
def test_off_files_that_lie_are_refused(tmp_path, text, words):
    with pytest.raises(MixerError, match=words) as refused:
        read(tmp_path, "a.off", text)
    assert "\n" not in str(refused.value)
    assert "a.off" in str(refused.value)


def test_polygons_become_triangles_of_the_same_area(tmp_path):
    square = "0 0 0\n2 0 0\n2 2 0\n0 2 0\n"
    assert area(read(tmp_path, "a.off", f"OFF\n4 1\n{square}4 0 1 2 3\n")) == pytest.approx(4)
    arrow = "0 0 0\n2 2 0\n0 1 0\n-2 2 0\n"  # with a notch
    for turn in range(4):
        order = " ".join(str((i + turn) % 4) for i in range(4))
        assert area(read(tmp_path, "b.off", f"OFF\n4 1\n{arrow}4 {order}\n")) == pytest.approx(2)
    star = torch.tensor(
        [[r * np.sin(k), 3.0, r * np.cos(k)] for k, r in zip(np.arange(10) * np.pi / 5, [1.0, 0.4] * 5, strict=True)]
    )
    cut = torch.tensor(triangles_of(range(10), star.double()))
    mesh = Mesh(star.double(), cut, torch.zeros(8, dtype=torch.long))
    assert cut.shape == (8, 3)
    assert area(mesh) == pytest.approx(10 * 0.5 * 0.4 * np.sin(np.pi / 5))
    assert len(triangles_of(range(5), torch.zeros(5, 3, dtype=torch.float64))) == 3, "without an area, no endless loop"


def ply(form: str, faces: bool, count: int = 4) -> bytes:
    head = f"ply\nformat {form} 1.0\ncomment by hand\nelement vertex {count}\n" + "".join(
        f"property float {a}\n" for a in "xyz"
    )
    head += "element face 4\nproperty list uchar int vertex_indices\n" if faces else ""
    triangles = [[int(w) for w in face.split()] for face in FACES]
    if form == "ascii":
        body = (CORNERS + "".join(f"{face}\n" for face in FACES) * faces).encode()
    else:
        order = "<" if "little" in form else ">"
        body = struct.pack(f"{order}12f", *sum(VERTICES, []))
        body += b"".join(struct.pack(f"{order}B3i", *face) for face in triangles) * faces
    return f"{head}end_header\n".encode() + body


@pytest.mark.parametrize("form", ["ascii", "binary_little_endian", "binary_big_endian"])
def test_ply_files_are_meshes_or_points(tmp_path, form):
    mesh = read(tmp_path, "a.ply", ply(form, True))
    assert mesh.vertices.tolist() == VERTICES
    assert area(mesh) == pytest.approx(AREA)
    points = read(tmp_path, "b.PLY", ply(form, False))
    assert points.tolist() == VERTICES
    for broken, words in (
        (ply(form, True, count=10**12), "bytes cannot hold 1000000000000 of vertex"),
        (ply(form, True)[:-20], "broken .ply file"),
        (ply(form, False, count=9), "broken .ply file"),
        (ply(form, False)[:60], "has no whole header"),
        (b"OFF\n", "not a .ply file"),
    ):
        with pytest.raises(MixerError, match=words):
            read(tmp_path, "c.ply", broken)


def test_obj_and_stl_files(tmp_path):
    corners = "".join(f"v {line}\n" for line in CORNERS.splitlines())
    faces = [[int(w) + 1 for w in face.split()[1:]] for face in FACES]
    mesh = read(
        tmp_path,
        "a.obj",
        f"# by hand\nmtllib missing.mtl\n{corners}vn 0 0 1\n"
        + "".join(f"f {a}//1 {b}//1 {c}//1\n" for a, b, c in faces),
    )
    assert area(mesh) == pytest.approx(AREA)
    square = "v 0 0 0\nv 2 0 0\nv 2 2 0\nv 0 2 0\n"
    assert area(read(tmp_path, "b.obj", f"{square}f 1 2 3 4\n")) == pytest.approx(4)
    arrow = "v 0 0 0\nv 2 2 0\nv 0 1 0\nv -2 2 0\n"
    for face in ("1 2 3 4", "2 3 4 1", "-4 -3 -2 -1", "2/1 3/1 4/1 1/1"):
        assert area(read(tmp_path, "b.obj", f"{arrow}vt 0 0\nf {face}\n")) == pytest.approx(2), face
    assert read(tmp_path, "c.obj", corners).tolist() == VERTICES
    for face in ("0 1 2", "1 2", "-9 1 2", "a b c"):
        with pytest.raises(MixerError, match="broken .obj file: .* is no face"):
            read(tmp_path, "d.obj", f"{corners}f {face}\n")
    with pytest.raises(MixerError, match="d.obj"):
        read(tmp_path, "d.obj", f"{corners}f 1 2 9\n")
    triangles = [[VERTICES[i - 1] for i in face] for face in faces]
    text = "".join(
        "facet normal 0 0 1\nouter loop\n" + "".join(f"vertex {x} {y} {z}\n" for x, y, z in t) + "endloop\nendfacet\n"
        for t in triangles
    )
    assert area(read(tmp_path, "a.stl", f"solid a\n{text}endsolid a\n")) == pytest.approx(AREA)
    binary = (
        bytes(80) + struct.pack("<I", 4) + b"".join(struct.pack("<12fH", 0, 0, 1, *sum(t, []), 0) for t in triangles)
    )
    assert area(read(tmp_path, "b.stl", binary)) == pytest.approx(AREA)
    for broken in (binary[:-10], f"solid a\n{text[:-60]}", b"", b"solid"):
        with pytest.raises(MixerError, match="broken .stl file"):
            read(tmp_path, "c.stl", broken)


def test_tables_of_points(tmp_path):
    for name, separator in (("a.txt", " "), ("b.xyz", "\t"), ("c.pts", " "), ("d.csv", ","), ("e.XYZ", ", ")):
        np.savetxt(tmp_path / name, ROWS, delimiter=separator, fmt="%.18e")
        assert np.allclose(read_cloud(tmp_path / name), ROWS), name
    with_count = "9\n" + "\n".join(" ".join(map(repr, row)) for row in ROWS.tolist())
    assert read(tmp_path, "f.pts", with_count).shape == (9, 3)
    np.save(tmp_path / "g.npy", ROWS.astype(np.float32))
    assert read_cloud(tmp_path / "g.npy").shape == (9, 3)
    np.savez(tmp_path / "h.npz", points=ROWS, label=np.ones(3))
    assert np.allclose(read_cloud(tmp_path / "h.npz"), ROWS)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "1 2 3\n4 5 6 7\n", "not a table of numbers"),
        ("a.xyz", "1 2 3\n4 5\n", "not a table of numbers"),
        ("a.txt", "1,2,3\n4,,6\n", "not a table of numbers"),
        ("a.txt", "1,5 2,5 3,5\n", "decimals need points"),
        ("a.pts", "3\n1 2 3\n4 5 6\n", "promises 3 points, and 2 follow"),
        ("a.csv", "a,b,c\n1,2,3\n", "not a table of numbers"),
        ("a.txt", "1 2 inf\n", "not finite in point 0"),
        ("a.txt", b"\xff\xfe1 2 3", "not a table of numbers"),
        ("a.npy", HUGE, "not a table"),
        ("a.npy", b"", "not a table of numbers"),
        ("a.npz", b"PK nothing", "not a table of numbers"),
        ("a.pts", "", "has no points"),
    ],
)  # fmt: skip
def test_tables_that_are_none_are_refused(tmp_path, name, content, words):
    with pytest.raises(MixerError, match=words) as refused:
        read(tmp_path, name, content)
    assert "\n" not in str(refused.value)


def test_arrays_that_are_no_numbers_or_of_unknown_meaning_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.array([["1", "2", "3"]]))
    np.savez(tmp_path / "b.npz", first=ROWS, second=ROWS)
    for name, words in (
        ("a.npy", "its values are <U1"),
        ("b.npz", "has the arrays first, second; call that of the points"),
    ):
        with pytest.raises(MixerError, match=words):
            read_cloud(tmp_path / name)


def test_without_trimesh_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trimesh", None)
    with pytest.raises(MixerError, match=r"needs trimesh .*pip install 'tokenmix\[points\]'"):
        read(tmp_path, "a.off", off())


# --- folders


def put(root: Path, *names: str) -> Path:
    for i, name in enumerate(names):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix.lower() == ".off":
            file.write_text(off(corners=CORNERS.replace("0 0 1", f"0 0 {i + 1}")))
        else:
            np.savetxt(file, np.random.default_rng(i).normal(size=(9, 3)))
    return root


def told(data) -> str:
    return "\n".join(data.inventory.lines())


def clouds_in(*splits: str, n: int = 6, ending: str = "txt") -> list[str]:
    return [f"{c}/{split}/{i}.{ending}" for c in "ab" for split in splits for i in range(n)]


def test_all_formats_of_a_folder_are_read_and_the_rest_is_told(tmp_path):
    root = put(
        tmp_path / "set", *clouds_in("train"), *clouds_in("train", ending="OFF"), *clouds_in("test", n=2, ending="xyz")
    )
    (root / "a" / "train" / "picture.png").write_text("x")
    (root / "a" / ".DS_Store").write_text("x")
    data = open_points(str(root))
    assert (data.classes, data.sizes) == (("a", "b"), {"train": 22, "valid": 2, "test": 4})
    said = told(data)
    assert "29 files, 28 clouds; splits: train 22, valid 2, test 4; classes: a 14, b 14" in said
    assert "left out: 1 hidden (a/.DS_Store); 1 no clouds (.png) (a/train/picture.png)" in said


@pytest.mark.parametrize(
    ("splits", "sizes"),
    [
        (("train",), {"train": 9, "valid": 2, "test": 1}),
        (("Training", "Validation"), {"train": 11, "valid": 12, "test": 1}),
        (("train", "testing"), {"train": 11, "valid": 1, "test": 12}),
        (("train", "val", "test"), {"train": 12, "valid": 12, "test": 12}),
    ],
)
@pytest.mark.parametrize("split_first", [False, True])
def test_own_splits_are_used_and_none_share_a_cloud(tmp_path, splits, sizes, split_first):
    names = [
        n if not split_first else "/".join([n.split("/")[1], n.split("/")[0], n.split("/")[2]])
        for n in clouds_in(*splits)
    ]
    data = open_points(str(put(tmp_path / "set", *names)))
    assert sum(data.sizes.values()) == 12 * len(splits)
    if len(splits) > 1:
        assert data.sizes == sizes
    items = [file for split in ("train", "valid", "test") for file, _ in data._splits[split]]
    assert len(items) == len(set(items))


def test_a_folder_that_may_be_a_class_is_refused_until_it_is_said(tmp_path):
    root = put(tmp_path / "set", *(f"{c}/{i}.off" for c in ("plane", "train") for i in range(5)))
    with pytest.raises(MixerError, match="data: the folder .*train is named as a split, but plane beside it is not"):
        open_points(str(root))
    assert open_points(str(root), layout="classes").classes == ("plane", "train")


def test_clouds_are_checked_once_and_told_by_their_contents(tmp_path):
    root = put(tmp_path / "set", *clouds_in("train", "test"))
    first = open_points(str(root)).describe()
    (root / "a" / "train" / "0.txt").rename(root / "a" / "train" / "00.txt")
    renamed = open_points(str(root)).describe()
    assert renamed["sha256"] == first["sha256"], "names that keep their order change nothing"
    file = root / "b" / "train" / "3.txt"
    text = file.read_text()
    file.write_text(text.replace("1", "2", 1))
    assert open_points(str(root)).describe()["sha256"] != first["sha256"]
    file.write_text(text)
    assert open_points(str(root)).describe() == renamed
    (root / "a" / "train" / "1.txt").unlink()
    assert open_points(str(root)).describe() != renamed
    file.write_text("1 2")
    with pytest.raises(MixerError, match="b/train/3.txt must be a table of points"):
        open_points(str(root))


def test_too_many_points_are_refused_before_training(tmp_path):
    data = open_points(str(put(tmp_path / "set", *clouds_in("train"))))
    data.check_points(9)
    with pytest.raises(MixerError, match="set: a/train/0.txt has 9 points, fewer than data.points=10"):
        data.check_points(10)


def test_a_resume_goes_by_contents_wherever_the_folder_lies(tmp_path):
    from tokenmix.lab.train.point_task import PointClassTask

    class Opened(PointClassTask):
        def __init__(self, root: Path):
            self.set = open_points(str(root))

    root = put(tmp_path / "set", *clouds_in("train", "test"))
    env = Opened(root).facts()
    moved = root.rename(tmp_path / "elsewhere")
    Opened(moved).check_same(env)
    (moved / "a" / "train" / "0.txt").write_text("1 2 3\n")
    with pytest.raises(MixerError, match="the clouds elsewhere changed since this run began"):
        Opened(moved).check_same(env)
