"""Attempts on the doctor, the extras, and sets of images, masks and clouds, made on the merged tree."""

from __future__ import annotations

import os
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import tokenmix.lab.report
import tokenmix.models
from tokenmix.lab.data import Bounds, open_images, open_masks

from . import attempt, run_command


@attempt("D1", "The doctor beside a torchvision that tokenmix mends: exit code, processes' CPU time")
def doctor_of_a_mended_torchvision() -> str:
    before = os.times()
    ended = run_command("doctor")
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return f"exit {ended.returncode}, {used:.0f} s; {ended.stdout.strip().splitlines()[-1]}"


def _images(root: str, *names: str) -> str:
    os.environ["XDG_CACHE_HOME"] = str(Path("cache").resolve())
    for i, name in enumerate(names):
        file = Path(root, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(i).integers(0, 255, (40, 40, 3), np.uint8)).save(file)
    return root


def _opened(source: str, **options: Any) -> str:
    """Return the classes and what is told of a set, or its error."""
    try:
        found = open_images(source, **options)
    except Exception as why:
        return f"{type(why).__name__}: {why}"[:300]
    return f"{found.classes}; {' '.join(found.inventory.lines()) if found.inventory else ''}"[:400]


@attempt("A1", "A .tar of a folder around everything")
def tar_of_a_folder() -> str:
    _images("pets", *(f"{c}/{i}.png" for c in "ab" for i in range(5)))
    with tarfile.open("pets.tar", "w") as tar:
        tar.add("pets", "pets")
    return _opened("pets.tar")


@attempt("A2", "Eight threads read the files of one .tar")
def threads_in_a_tar() -> str:
    _images("pets", *(f"{c}/{i}.png" for c in "ab" for i in range(300)))
    with tarfile.open("pets.tar", "w") as tar:
        tar.add("pets", ".")
    sys.setswitchinterval(1e-6)
    from tokenmix.lab.data.trees import tar_tree

    tree = tar_tree(Path("pets.tar"), Bounds())
    with ThreadPoolExecutor(8) as pool:
        got = [pool.submit(tree.bytes, name) for _ in range(5) for name in tree.names]
    wrong = sum(
        bool(f.exception()) or f.result() != Path("pets", n).read_bytes()
        for f, n in zip(got, tree.names * 5, strict=True)
    )
    return f"{wrong} of {len(got)} reads are wrong"


@attempt("A3", "Folders images_train/ and images_val/ of the classes a and b")
def splits_with_a_word_before() -> str:
    return _opened(
        _images("set", *(f"images_{s}/{c}/{i}.png" for s in ("train", "val") for c in "ab" for i in range(5)))
    )


@attempt("A4", "train/CLASS/* beside a test that lies in test/images/")
def unlabelled_test_in_a_folder() -> str:
    names = [f"train/{c}/{i}.png" for c in "ab" for i in range(5)]
    return _opened(_images("set", *names, *(f"test/images/{i}.png" for i in range(3))))


@attempt("A5", "A .zip whose folders end in backslashes")
def backslashes_in_a_zip() -> str:
    _images("pets", *(f"{c}/{i}.png" for c in "ab" for i in range(5)))
    with zipfile.ZipFile("pets.zip", "w") as z:
        for path in sorted(Path("pets").rglob("*.png")):
            z.write(path, str(path).replace("/", "\\"))
    return _opened("pets.zip")


def _cloud(name: str, content: str) -> str:
    Path(name).write_text(content)
    try:
        from tokenmix.lab.data.point_files import read_cloud

        found = read_cloud(Path(name))
    except Exception as why:
        return f"{type(why).__name__}: {why}"[:300]
    return f"points {found.tolist()}" if hasattr(found, "tolist") else f"{len(found.faces)} faces"


@attempt("P1", "A table of points whose first line is x,y,z, with a byte order mark")
def table_with_names() -> str:
    return _cloud("a.csv", "\ufeffx,y,z\n1,2,3\n4,5,6\n")


@attempt("P2", "A .ply in text that promises 2 of its 3 points")
def ply_of_more_points() -> str:
    head = "ply\nformat ascii 1.0\nelement vertex 2\nproperty float x\nproperty float y\nproperty float z\nend_header\n"
    return _cloud("a.ply", head + "0 0 0\n1 0 0\n0 1 0\n")


@attempt("P3", "An .stl whose solid is called facet")
def stl_called_facet() -> str:
    corners = "outer loop\nvertex 0 0 0\nvertex 1 0 0\nvertex 0 1 0\nendloop"
    return _cloud("a.stl", f"solid a facet\nfacet normal 0 0 1\n{corners}\nendfacet\nendsolid a facet\n")


def _masks(make: Any, names: str = "") -> str:
    _images("set", *(f"images/{i}.png" for i in range(8)))
    Path("set/masks").mkdir()
    for i in range(8):
        make(np.random.default_rng(i).integers(0, 2, (40, 40)).astype(np.uint8), i).save(f"set/masks/{i}.png")
    if names:
        Path("set/classes.txt").write_text(names)
    try:
        found = open_masks("set")
    except Exception as why:
        return f"{type(why).__name__}: {why}"[:300]
    return f"{found.classes}; {' '.join(found.inventory.lines())}"[:400]


@attempt("M1", "Masks of one bit beside masks of 0 and 255")
def one_bit_beside_black_and_white() -> str:
    return _masks(lambda grey, i: Image.fromarray(grey.astype(bool) if i % 2 else grey * 255))


@attempt("M2", "A classes.txt with a byte order mark")
def marked_list_of_classes() -> str:
    return _masks(lambda grey, i: Image.fromarray(grey), "\ufeffsky\nroad\n")


@attempt("M3", "Masks whose labels begin at 1")
def labels_from_1() -> str:
    return _masks(lambda grey, i: Image.fromarray(grey + 1))


@attempt("E1", "advise on a factory that raises an error of two lines")
def factory_that_fails() -> str:
    Path("factories.py").write_text("def make():\n    raise RuntimeError('two\\nlines')\n")
    ended = run_command("advise", "factories:make")
    said = ended.stderr.strip().splitlines()
    return f"exit {ended.returncode}: {said[-1][:200]}, {len(said)} lines"


@attempt("E2", "A resume on clouds of which one changed")
def resume_on_changed_clouds() -> str:
    rng = np.random.default_rng(0)
    for name in (f"set/{c}/{i}.xyz" for c in "ab" for i in range(6)):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        np.savetxt(name, rng.normal(size=(64, 3)))
    steps = ("--train.steps", "2")
    run_command("train", "points_classify", "--data", "set", "--data.points", "64", "--out", "run", *steps)
    np.savetxt("set/a/0.xyz", rng.normal(size=(64, 3)))
    ended = run_command("resume", "run", "--train.steps", "3")
    return f"exit {ended.returncode}: {ended.stderr.strip().splitlines()[-1]}"


@attempt("E3", "pictures without matplotlib")
def pictures_without_matplotlib() -> str:
    sys.modules["matplotlib"] = None
    model = tokenmix.models.build_model("deit_tiny", layers=1, image_size=(32, 32))
    try:
        tokenmix.lab.report.draw_pictures(model, [_images("set", "a.png") + "/a.png"], "out")
    except Exception as why:
        return f"{type(why).__name__}: {why}"
    return "drawn"
