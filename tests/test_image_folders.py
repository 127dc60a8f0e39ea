"""Test what folders and archives of images are taken for, and that what is not read is told."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from image_sets import cifar, folder, noise, save
from tokenmix import MixerError
from tokenmix.lab.data import Bounds, open_images, progress
from tokenmix.lab.data.class_folders import split_of
from tokenmix.lab.data.image_source import image_endings


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenmix"


def put(root: Path, *names: str, form: str | None = None) -> Path:
    """Write an image of its own grey under each name."""
    for i, name in enumerate(names):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((6, 7, 3), i % 250, np.uint8)).save(file, format=form or "PNG")
    return root


def classes_in(*splits: str, each: int = 3, classes: str = "abc") -> list[str]:
    return [f"{split}/{c}/{i}.png".lstrip("/") for split in splits for c in classes for i in range(each)]


def told(data) -> str:
    assert data.inventory is not None
    return "\n".join(data.inventory.lines())


# --- splits by the names of folders


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        (("training", "testing"), None),
        (("Train", "Val", "Test"), [9, 9, 9]),
        (("TRAIN", "VALIDATION", "TEST"), [9, 9, 9]),
        (("train", "dev", "tests"), [9, 9, 9]),
        (("train2017", "val2017", "test_set"), [9, 9, 9]),
        (("train_images", "valid-images"), [9, 9, 9]),
        (("images_train", "images_val", "images_test"), [9, 9, 9]),
        (("pets.train-v2", "pets.test-v2"), None),
    ],
)
def test_splits_are_known_in_all_their_spellings(tmp_path, names, sizes):
    data = open_images(str(put(tmp_path / "set", *classes_in(*names))))
    assert data.classes == ("a", "b", "c")
    assert sizes is None or data.describe()["images"] == sizes
    assert sum({"train": 1, "test": 1}[s] for s in ("train", "test") if len(data.split(s))) == 2
    swapped = open_images(
        str(put(tmp_path / "turned", *(f"{c}/{s}/{i}.png" for s in names for c in "abc" for i in range(3))))
    )
    assert (swapped.classes, swapped.describe()["images"]) == (data.classes, data.describe()["images"])


def test_names_of_classes_are_no_splits():
    for name in (
        "trains",
        "trainer",
        "testimony",
        "valley",
        "device",
        "airplane",
        "validated",
        "contest",
        "0",
        "eval1",
    ):
        assert split_of(name) is None, name


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["plane/1.png", "bus/1.png", "train/1.png"], r"train is named as a split, but bus, plane.*layout='classes'"),
        (["train/1.png", "test/1.png"], r"test is named as a split, but it has no class folders.*layout='classes'"),
        ([*classes_in("val", "test")], "no training images, only test, val"),
        ([*classes_in("val", "validation", "train")], "val and validation, which are all the split 'valid'; keep one"),
        ([*classes_in("train", "val"), "extra/x.png"], r"train is named as a split, but extra beside it is not"),
        ([*classes_in("train"), "val/1.png"], r"val/1.png is not in a class folder; expected"),
        ([*classes_in("a", "b", classes=("train", "test")), "a/9.png"], r"\(test\), but a/9.png is in none"),
        ([*classes_in("a", "b", classes=("x",)), "9.png", "8.png"], r"8.png is not in a class folder \(nor"),
    ],
)  # fmt: skip
def test_folders_that_can_be_read_in_two_ways_are_refused(tmp_path, names, words):
    root = put(tmp_path / "set", *names)
    with pytest.raises(MixerError, match=words) as refused:
        open_images(str(root))
    assert "\n" not in str(refused.value)


def test_the_layout_may_be_said(tmp_path):
    trains = put(tmp_path / "a", *(f"{c}/{i}.png" for c in ("plane", "train", "test") for i in range(4)))
    assert open_images(str(trains), layout="classes").classes == ("plane", "test", "train")
    extra = put(tmp_path / "b", *classes_in("train", "val"), "extra/x.png", "extra/y.png")
    data = open_images(str(extra), layout="splits")
    assert data.describe()["images"] == [9, 9, 9]
    assert "2 outside of the splits (extra/x.png, extra/y.png)" in told(data)
    with pytest.raises(MixerError, match="layout must be 'classes' or 'splits', or left out, got 'split'"):
        open_images(str(extra), layout="split")
    with pytest.raises(MixerError, match="has no folder named as a split, but layout='splits'"):
        open_images(str(folder(tmp_path / "c")), layout="splits")


def test_a_class_of_one_split_only_and_empty_classes_are_told(tmp_path):
    root = put(tmp_path / "set", *classes_in("train"), *classes_in("val", classes="ab"))
    (root / "val" / "d").mkdir()
    data = open_images(str(root))
    assert "classes without any file for valid: c" in told(data)
    assert "1 empty class folders (val/d)" in told(data)
    assert "note: valid and test are the same images" in told(data)
    put(root, "val/e/1.png")
    with pytest.raises(MixerError, match="val/e/1.png belongs to a class that is not among the 3 in train/"):
        open_images(str(root))


def test_nested_folders_and_a_folder_around_everything(tmp_path):
    names = [f"pets/{c}/{i}.png" for c in ("cat", "dog") for i in range(4)]
    data = open_images(str(put(tmp_path / "set", *names, "pets/cat/small/1.png")))
    assert data.classes == ("cat", "dog")
    assert "1 nested file," in told(data)
    assert "inside of: pets" in told(data)


def test_tests_without_labels_are_left_out_and_told(tmp_path):
    data = open_images(str(put(tmp_path / "set", *classes_in("train", each=8), "test/1.png", "test/2.png")))
    assert sum(data.describe()["images"]) == 24
    assert "2 for the test without a class (test/1.png, test/2.png)" in told(data)


# --- which files are images


def test_a_test_in_one_folder_that_is_no_class_has_no_labels(tmp_path):
    root = put(tmp_path / "set", *classes_in("train", "val"), *classes_in("test", classes=("images",)))
    data = open_images(str(root))
    assert data.describe()["images"] == [9, 9, 9]
    assert (
        "left out: 3 for the test without a class (test/images/0.png, test/images/1.png, test/images/2.png)."
        in told(data)
    )
    with pytest.raises(MixerError, match="belongs to a class that is not among the 3"):
        open_images(str(put(tmp_path / "two", *classes_in("train"), *classes_in("test", classes=("x", "y")))))


def test_classes_whose_names_share_words_are_no_splits(tmp_path):
    data = open_images(str(put(tmp_path / "set", *classes_in("", classes=("red_train", "red_bus")))))
    assert data.classes == ("red_bus", "red_train")


def test_a_name_of_two_lines_is_told_in_one(tmp_path):
    data = open_images(str(put(tmp_path / "set", *classes_in("", classes=("a\nb", "c")))))
    assert data.classes == ("a\nb", "c")
    assert "classes: a\\nb 3, c 3." in told(data)


def test_every_ending_that_pillow_reads(tmp_path):
    forms = {
        "jfif": "JPEG",
        "jpe": "JPEG",
        "JPG": "JPEG",
        "PNG": "PNG",
        "webp": "WEBP",
        "tif": "TIFF",
        "jp2": "JPEG2000",
    }
    assert image_endings() > {".jfif", ".jpe", ".webp", ".tif", ".png"}
    assert not image_endings() & {".eps", ".mpg", ".h5", ".pdf"}, "they are not decoded here"
    for ending, form in forms.items():
        put(tmp_path / "set", *(f"{c}/{i}.{ending}" for c in "ab" for i in range(3)), form=form)
    data = open_images(str(tmp_path / "set"))
    assert sum(data.describe()["images"]) == 6 * len(forms)
    assert told(data).startswith(f"data: {tmp_path / 'set'}: 42 files, 42 images")


def test_the_content_decides_and_what_is_left_out_is_told_by_ending(tmp_path):
    root = put(tmp_path / "set", *(f"{c}/{i}" for c in "ab" for i in range(4)), "a/x.data")
    for name in ("a/1.txt", "b/2.txt", "a/clip.mp4", "b/.DS_Store", "a/README", "notes.csv"):
        (root / name).write_text("P5 is no picture")
    (root / ".git").mkdir()
    data = open_images(str(root))
    assert sum(data.describe()["images"]) == 9
    said = told(data)
    assert "9 images told by their content" in said
    assert "2 no images (.txt) (a/1.txt, b/2.txt)" in said
    assert "1 no images (.mp4) (a/clip.mp4)" in said
    assert "1 no images (no ending) (a/README)" in said
    assert "2 hidden (.git/, b/.DS_Store)" in said
    assert "classes: a 5, b 4" in said
    assert "splits: train 5, valid 2, test 2" in said
    assert open_images(str(root)).inventory == data.inventory, "the cache keeps it"


# --- archives


def packed(root: Path, file: Path, form: str) -> Path:
    with tarfile.open(file, form) as tar:
        tar.add(root, ".")
    return file


@pytest.mark.parametrize(("ending", "form"), [("tar", "w"), ("tar.gz", "w:gz"), ("tar.xz", "w:xz"), ("tbz2", "w:bz2")])
def test_images_in_a_tar(tmp_path, ending, form):
    root = folder(tmp_path / "pets", each=5)
    (root / "cat" / "notes.txt").write_text("no image")
    (root / "cat" / "link.png").symlink_to("0.png")
    (root / "._x.png").write_text("of another system")
    data = open_images(str(packed(root, tmp_path / f"pets.{ending}", form)))
    (root / "cat" / "link.png").unlink()
    whole = open_images(str(root))
    assert (data.classes, data.describe()["images"]) == (whole.classes, whole.describe()["images"])
    assert data.split("train").pixels.equal(whole.split("train").pixels)
    for words in ("1 links or devices (cat/link.png)", "1 no images (.txt)", "1 hidden (._x.png)"):
        assert words in told(data)


def test_tar_archives_that_are_no_set(tmp_path):
    root = folder(tmp_path / "pets")
    file = packed(root, tmp_path / "a.tar.xz", "w:xz")
    with pytest.raises(MixerError, match=r"unpacks to \d+ or more, but only 3000 are allowed"):
        open_images(str(file), bounds=Bounds(max_unpacked=3000))
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(MixerError, match="a.tar.xz is not a readable tar archive"):
        open_images(str(file))
    with tarfile.open(tmp_path / "b.tar", "w") as tar:
        member = tarfile.TarInfo("../cat/x.png")
        tar.addfile(member, io.BytesIO())
    with pytest.raises(MixerError, match="not a path inside it"):
        open_images(str(tmp_path / "b.tar"))
    cifar(tmp_path / "c", "binary")
    assert len(open_images("cifar10", path=str(packed(tmp_path / "c", tmp_path / "c.tar.xz", "w:xz"))).classes) == 10


def test_a_zip_tells_what_it_leaves_out(tmp_path):
    root = folder(tmp_path / "pets")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as z:
        for file in root.rglob("*.png"):
            z.write(file, file.relative_to(root))
        z.writestr("__MACOSX/cat/._0.png", b"x")
        z.writestr("README.md", b"x")
    assert "1 hidden (__MACOSX/cat/._0.png); 1 no images (.md) (README.md)" in told(
        open_images(str(tmp_path / "a.zip"))
    )


def test_arrays_that_are_not_used_are_told(tmp_path):
    arrays = {"x_train": noise(10, 4, 4), "y_train": np.arange(10) % 2, "x_test": noise(3, 4, 4), "weights": np.ones(3)}
    np.savez(tmp_path / "a.npz", **arrays)
    said = told(open_images(str(tmp_path / "a.npz")))
    assert "1 arrays of other names (weights); 1 arrays without their partner (x_test)" in said


# --- contents, progress


@pytest.mark.parametrize("sizes", ["one size", "different sizes"])
def test_the_fingerprint_is_of_contents_and_not_of_names(tmp_path, sizes):
    root = folder(tmp_path / "pets", each=6, size=lambda i: (6, 7 if sizes == "one size" else 7 + i))
    first = open_images(str(root)).fingerprint
    file = root / "cat" / "0.png"
    raw, stat = file.read_bytes(), file.stat()
    image = np.asarray(Image.open(io.BytesIO(raw))).copy()
    for value in range(256):  # another picture in a file of the same size
        image[0, 0, 0] = value
        save(file, image)
        if file.stat().st_size == len(raw) and file.read_bytes() != raw:
            break
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == len(raw)
    assert open_images(str(root)).fingerprint != first
    file.write_bytes(raw)
    assert open_images(str(root)).fingerprint == first
    (root / "cat" / "0.png").rename(root / "x.png")
    (root / "dog" / "0.png").rename(root / "cat" / "0.png")
    (root / "x.png").rename(root / "dog" / "0.png")
    assert open_images(str(root)).fingerprint != first, "two labels are exchanged"


def test_long_reading_shows_its_progress(tmp_path, capsys, monkeypatch):
    open_images(str(folder(tmp_path / "a")))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    open_images(str(folder(tmp_path / "b", size=lambda i: (6 + i, 7))))
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "data: hashing the files of b: 10 of 10, done"
    assert any(line.startswith("data: checking the images of b: 1 of 10, ") for line in said)


@pytest.mark.parametrize("sizes", ["one size", "different sizes"])
def test_a_resume_goes_by_contents_wherever_the_folder_lies(tmp_path, sizes):
    from tokenmix.lab.train.image_tasks import ClassifyTask

    class Opened(ClassifyTask):
        def __init__(self, root: Path):
            self.images = open_images(str(root))

    def refused(change, undo) -> None:
        change()
        with pytest.raises(MixerError, match="the images elsewhere changed since this run began"):
            Opened(moved).check_same(env)
        undo()
        Opened(moved).check_same(env)

    root = folder(tmp_path / "pets", each=8, size=lambda i: (6, 7 if sizes == "one size" else 7 + i))
    env = Opened(root).facts()
    moved = root.rename(tmp_path / "elsewhere")
    Opened(moved).check_same(env)
    first, other, extra = moved / "cat" / "0.png", moved / "dog" / "0.png", moved / "cat" / "x.png"
    a, b = first.read_bytes(), other.read_bytes()
    refused(lambda: (first.write_bytes(b), other.write_bytes(a)), lambda: (first.write_bytes(a), other.write_bytes(b)))
    refused(lambda: extra.write_bytes(a), extra.unlink)
    refused(first.unlink, lambda: first.write_bytes(a))
    refused(lambda: (moved / "cat").rename(moved / "cow"), lambda: (moved / "cow").rename(moved / "cat"))


KILLED = """
import os, signal
from tokenmix.lab.data import image_cache, open_images
decode, seen = image_cache._load, []
def once(*given):
    seen.append(1)
    if len(seen) == 30:
        os.kill(os.getpid(), signal.SIGKILL)
    return decode(*given)
image_cache._load = once
open_images("pets")
"""


def test_a_reader_that_is_killed_leaves_no_half_of_a_set(tmp_path, own_cache):
    root = folder(tmp_path / "pets", each=20)
    assert subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, check=False).returncode == -signal.SIGKILL
    left = [f.name for f in own_cache.rglob("*") if f.is_file()]
    assert all(name.endswith(".tmp") for name in left), left
    assert sum(open_images(str(root)).describe()["images"]) == 40


def test_a_set_of_many_small_images_is_read_in_bounded_memory(tmp_path):
    """2,000 images; the pixels of all would be 24 MB, of which only those that wait are held."""
    root, raw = tmp_path / "many", io.BytesIO()
    Image.fromarray(noise(64, 64, 3)).save(raw, "PNG")
    for c in range(20):
        (root / f"c{c}").mkdir(parents=True)
        for i in range(100):
            (root / f"c{c}" / f"{i}.png").write_bytes(raw.getvalue())
    tracemalloc.start()
    data = open_images(str(root))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert data.describe()["images"] == [1600, 200, 200]
    assert peak < 12e6, "names, labels, and what Python holds of the images that wait"


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_files_read_twice_through_links_are_told_before_training(tmp_path, link):
    """A class folder that links to another gave every image two labels without a word."""
    for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (tmp_path / name).mkdir(parents=True)
    for i, name in enumerate(("train/cat/0", "train/cat/1", "train/dog/2", "val/cat/3", "val/dog/4")):
        save(tmp_path / f"{name}.png", noise(8, 8, 3, seed=i))
    alone = open_images(str(tmp_path)).inventory
    assert not any("links" in name for name in alone.found)
    for at, to in (("train/dog/5", "train/cat/0"), ("val/cat/6", "train/cat/1"), ("train/cat/7", "train/cat/1")):
        link((tmp_path / to).with_suffix(".png").resolve(), (tmp_path / at).with_suffix(".png"))
    told = {name: fact for name, fact in open_images(str(tmp_path)).inventory.found.items() if "links" in name}
    assert told == {
        "read twice through links, in one class": "1 (train/cat/7.png is train/cat/1.png)",
        "read twice through links, in two classes": "1 (train/dog/5.png is train/cat/0.png)",
        "read twice through links, in two splits": "1 (val/cat/6.png is train/cat/1.png)",
    }


def test_a_class_folder_that_links_to_another_is_told(tmp_path):
    for i in range(3):
        (tmp_path / "cat").mkdir(exist_ok=True)
        save(tmp_path / "cat" / f"{i}.png", noise(8, 8, 3, seed=i))
    (tmp_path / "dog").symlink_to("cat")
    (line,) = open_images(str(tmp_path)).inventory.lines()
    assert "; read twice through links, in two classes: 3 (dog/0.png is cat/0.png, dog/1.png is cat/1.png, dog" in line
