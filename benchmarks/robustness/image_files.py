"""Folders of images, masks and clouds as users have them: what is read of them, and what is left out without a word."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tokenmix.lab.data import open_images, open_masks, open_points
from tokenmix.lab.data import point_files as files

from . import attempt

VERTICES = "0 0 0\n1 0 0\n0 1 0\n0 0 1\n"
FACES = ("3 0 1 2", "3 0 1 3", "3 0 2 3", "3 1 2 3")


def _own_cache() -> None:
    os.environ["XDG_CACHE_HOME"] = str(Path("cache").resolve())


def _put(root: str, *names: str, form: str = "PNG") -> str:
    _own_cache()
    for i, name in enumerate(names):
        file = Path(root, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), i % 250, np.uint8)).save(file, format=form)
    return root


def _said(work: Any) -> str:
    """What a call returns, and what its set says of itself, or its error."""
    try:
        found = work()
    except Exception as why:
        return f"{type(why).__name__}: {why}".replace(str(Path.cwd()), ".")[:300]
    inventory = getattr(found, "inventory", None)
    told = "" if inventory is None else "; " + " ".join(inventory.lines())
    if hasattr(found, "describe"):
        found = {name: value for name, value in found.describe().items() if name != "sha256"}
    return f"{found}{told}".replace(str(Path.cwd()), ".")[:400]


@attempt("F09", "A folder of training/ and testing/, each with three classes")
def spelled_splits() -> str:
    root = _put("set", *(f"{s}/{c}/{i}.png" for s in ("training", "testing") for c in "012" for i in range(10)))
    return _said(lambda: open_images(root).classes)


@attempt("F09", "Classes plane/, bus/ and train/")
def class_named_train() -> str:
    root = _put("set", *(f"{c}/{i}.png" for c in ("plane", "bus", "train") for i in range(10)))
    return _said(lambda: open_images(root))


@attempt("F09", "CLASS/train/* and CLASS/test/*")
def splits_in_classes() -> str:
    root = _put("set", *(f"{c}/{s}/{i}.png" for c in "ab" for s in ("train", "test") for i in range(10)))
    return _said(lambda: open_images(root))


@attempt("F11", "40 .png beside 160 .jfif and .jpe")
def other_endings() -> str:
    root = _put("set", *(f"{c}/{i}.png" for c in "ab" for i in range(20)))
    _put(root, *(f"{c}/{i}.{e}" for c in "ab" for i in range(20, 60) for e in ("jfif", "jpe")), form="JPEG")
    return f"{sum(open_images(root).describe()['images'])} of 200"


@attempt("F11", "Images without an ending, a film, a text and a hidden file among them")
def other_files() -> str:
    root = _put("set", *(f"{c}/{i}" for c in "ab" for i in range(5)), "a/x.png", "b/x.png", "a/y.png", "b/y.png")
    for name in ("a/film.mp4", "b/notes.txt", "a/.DS_Store"):
        Path(root, name).write_text("no image")
    return _said(lambda: open_images(root))


@attempt("F11", "A .tar.xz of images")
def images_in_a_tar() -> str:
    root = _put("set", *(f"{c}/{i}.png" for c in "ab" for i in range(5)))
    with tarfile.open("set.tar.xz", "w:xz") as tar:
        tar.add(root, ".")
    return _said(lambda: open_images("set.tar.xz"))


def _masks(root: str, mask: Any, how: int = 1) -> str:
    """Twelve images, turned by an EXIF orientation, and their masks."""
    _own_cache()
    exif = Image.Exif()
    exif[0x112] = how
    for i in range(12):
        for folder in ("images", "masks"):
            Path(root, folder).mkdir(parents=True, exist_ok=True)
        stored = np.asarray(mask(i), np.uint8)
        picture = np.stack([(stored > 0) * np.uint8(200)] * 3, -1)
        Image.fromarray(picture).save(f"{root}/images/{i}.jpg", exif=exif, quality=100)
        Image.fromarray(stored).save(f"{root}/masks/{i}.png")
    return root


@attempt("F24", "Masks of 0 and 255")
def black_and_white() -> str:
    root = _masks("set", lambda i: np.random.default_rng(i).choice([0, 255], (8, 10)))
    return "; ".join(_said(lambda given=given: open_masks(root, **given).classes) for given in ({}, {"ignore": None}))


@attempt("F24", "Masks of 0, 128 and 255")
def grey_levels() -> str:
    root = _masks("set", lambda i: np.random.default_rng(i).choice([0, 128, 255], (8, 10)))
    return _said(lambda: open_masks(root).classes)


def _turned(how: int) -> str:
    stored = np.zeros((8, 10))
    stored[:2] = 1
    root = _masks("set", lambda i: stored, how)

    def work() -> str:
        image, mask = open_masks(root).split("train").read(0)
        return f"image and mask agree: {bool(((image[0] > 100) == (mask == 1)).all())}"

    return _said(work)


@attempt("F29", "An image that EXIF turns upside down, and a mask of the stored image")
def upside_down() -> str:
    return _turned(3)


@attempt("F29", "An image that EXIF turns by a quarter, and a mask of the stored image")
def by_a_quarter() -> str:
    return _turned(6)


def _off(text: str) -> str:
    Path("a.off").write_text(text)

    def work() -> str:
        mesh = files.read_off(Path("a.off"))
        return f"{len(mesh.faces)} of 4 faces, last vertex {mesh.vertices[-1].tolist()}"

    return _said(work)


@attempt("F13", "An .off file without a count of edges")
def no_edge_count() -> str:
    return _off("OFF\n4 4\n" + VERTICES + "\n".join(FACES))


@attempt("F14", "An .off file with colours of faces")
def face_colours() -> str:
    return "; ".join(
        _off("OFF\n4 4 0\n" + VERTICES + "".join(f"{f} {c}\n" for f in FACES)) for c in ("1 0 0", "0 0 0", "1")
    )


@attempt("F14", "An .off file whose header promises a face less than there are")
def fewer_faces() -> str:
    return _off("OFF\n4 3 0\n" + VERTICES + "\n".join(FACES))


def _clouds(*names: str) -> str:
    _own_cache()
    for i, name in enumerate(names):
        file = Path("set", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        rows = io.StringIO()
        np.savetxt(rows, np.random.default_rng(i).random((9, 3)))
        head = "ply\nformat ascii 1.0\nelement vertex 9\n" + "".join(f"property float {a}\n" for a in "xyz")
        file.write_text((f"{head}end_header\n" if file.suffix == ".ply" else "") + rows.getvalue())
    return "set"


@attempt("F22", "10 .txt and 30 .ply of each class for training, 5 .ply for the test")
def ply_clouds() -> str:
    names = [f"train/{i}.txt" for i in range(10)] + [f"train/{i}.ply" for i in range(10, 40)]
    root = _clouds(*(f"{c}/{n}" for c in "ab" for n in [*names, *(f"test/{i}.ply" for i in range(5))]))
    splits = open_points(root)._splits
    return f"test is valid: {splits['test'] == splits['valid']}; {_said(lambda: open_points(root))}"


@attempt("F22", "A folder of clouds with its own val/")
def own_validation() -> str:
    root = _clouds(*(f"{c}/{s}/{i}.txt" for c in "ab" for s in ("train", "val", "test") for i in range(10)))
    return _said(lambda: open_points(root))


@attempt("F22", "One cloud changes its bytes and keeps its name")
def changed_cloud() -> str:
    root = _clouds(*(f"{c}/{s}/{i}.txt" for c in "ab" for s in ("train", "test") for i in range(4)))
    before = open_points(root).describe()
    Path(root, "a/train/0.txt").write_text("1 2 3\n" * 9)
    return f"told by the hash: {open_points(root).describe() != before}"


@attempt("F22", "One image of a set of different sizes is replaced by another of as many bytes")
def changed_image() -> str:
    _own_cache()
    for i, c in enumerate("ab" * 6):
        Path("set", c).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8 + i, 8, 3), i, np.uint8)).save(f"set/{c}/{i}.bmp")
    before = open_images("set").fingerprint
    Image.fromarray(np.full((8, 8, 3), 99, np.uint8)).save("set/a/0.bmp")
    return f"told by the hash: {open_images('set').fingerprint != before}"
