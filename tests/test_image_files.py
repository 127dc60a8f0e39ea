"""Test images and image sets that are not what they should be.

They are converted where that is sound, else refused in one line or left out.
"""

from __future__ import annotations

import gzip
import io
import os
import struct
import subprocess
import sys
import tarfile
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from image_sets import cifar, folder, idx, noise, save
from tokenmix import MixerError
from tokenmix.lab.data import Bounds, image_archives, open_corpus, open_images, trees
from tokenmix.lab.data import images as images_module
from tokenmix.lab.data.image_downloads import OFFICIAL
from tokenmix.lab.data.image_source import pil_to_tensor, read_image, tensor_to_pil, to_channels


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenmix"


# --- one image file


def tensor_of(file: Path, channels: int = 3) -> torch.Tensor:
    return pil_to_tensor(read_image(file, channels))


def test_grey_and_colour_become_what_is_asked_for(tmp_path):
    grey, colour = noise(5, 6), noise(5, 6, 3)
    a, b = save(tmp_path / "g.png", grey), save(tmp_path / "c.png", colour)
    assert torch.equal(tensor_of(a), torch.from_numpy(grey).expand(3, 5, 6))
    assert torch.equal(tensor_of(a, 1), torch.from_numpy(grey)[None])
    assert torch.equal(tensor_of(b), torch.from_numpy(colour).permute(2, 0, 1))
    assert torch.equal(tensor_of(b, 1), to_channels(tensor_of(b), 1)), "ours rounds as Pillow's"
    assert torch.equal(pil_to_tensor(tensor_to_pil(tensor_of(b))), tensor_of(b))


def test_sixteen_bits_are_scaled_not_clipped(tmp_path):
    values = np.array([[0, 256, 65535], [128, 129, 32768]], np.uint16)
    file = save(tmp_path / "a.png", values)
    assert Image.open(file).mode == "I;16"
    assert tensor_of(file, 1).tolist() == [[[0, 1, 255], [0, 1, 128]]]
    wide = save(tmp_path / "b.tif", values.astype(np.int32))
    assert tensor_of(wide, 1).tolist() == [[[0, 1, 255], [0, 1, 128]]]
    for name, pixels, words in (
        ("c", values.astype(np.int32) * 2, "values from 0 to 131070"),
        ("d", values.astype(np.float32), "floating-point"),
    ):
        with pytest.raises(MixerError, match=f"{name}.tif has {words}"):
            tensor_of(save(tmp_path / f"{name}.tif", pixels))


def test_cmyk_is_colour(tmp_path):
    Image.new("CMYK", (4, 3), (0, 255, 255, 0)).save(tmp_path / "red.jpg", quality=100)
    r, g, b = tensor_of(tmp_path / "red.jpg").float().mean((1, 2)).tolist()
    assert r > 250
    assert max(g, b) < 5


def test_transparent_pixels_lie_over_white(tmp_path):
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 200, 100, 50])
    palette.putdata([0, 1])
    palette.save(tmp_path / "p.png", transparency=0)
    assert tensor_of(tmp_path / "p.png").permute(1, 2, 0).tolist() == [[[255, 255, 255], [200, 100, 50]]]
    save(tmp_path / "a.png", np.array([[[0, 0, 0, 0], [0, 0, 0, 255]]], np.uint8))
    assert tensor_of(tmp_path / "a.png", 1).tolist() == [[[255, 0]]]


def test_the_camera_held_sideways(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned right by 90 degrees
    pixels = noise(4, 6, 3)
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    assert torch.equal(tensor_of(tmp_path / "a.png"), torch.from_numpy(np.rot90(pixels, -1).copy()).permute(2, 0, 1))


# --- what cannot be read


def spoil(root: Path, how: str) -> str:
    file = root / "dog" / "2.jpg"
    if how == "not an image":
        file.write_text("this is a text")
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[:-40])
    elif how == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
        file.symlink_to(root / "nowhere.jpg")
    return str(file)


@pytest.mark.parametrize("sizes", ["one size", "different sizes"])
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("not an image", "not an"),
        ("truncated", "damaged or truncated"),
        ("empty", "not an"),
        ("link", "cannot be opened"),
    ],
)
def test_bad_files_are_refused_or_left_out(tmp_path, how, words, sizes):
    root = folder(tmp_path / "pets", each=5, suffix="jpg", size=lambda i: (16, 16 if sizes == "one size" else 16 + i))
    bad = spoil(root, how)
    with pytest.raises(MixerError, match=f"{bad} .*{words}.*skip_bad_files") as caught:
        open_images(str(root))
    assert "\n" not in str(caught.value)
    with pytest.warns(
        UserWarning, match="1 of 10 files of pets cannot be read and are left out; the first is dog/2.jpg"
    ) as warned:
        data = open_images(str(root), skip_bad_files=True)
    assert len(warned) == 1
    assert data.skipped == ("dog/2.jpg",)
    assert sum(data.describe()["images"]) == 9
    assert (data.split("train").size is None) == (sizes != "one size")
    labels = sorted(y for s in ("train", "valid", "test") for y in data.split(s).labels.tolist())
    assert labels == [0] * 5 + [1] * 4
    (root / "dog" / "2.jpg").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_images(str(root)).skipped == ()


def test_folders_that_are_no_set(tmp_path):
    (tmp_path / "empty").mkdir()
    save(tmp_path / "flat" / "a.png", noise(4, 4))
    folder(tmp_path / "one", classes=["cat"])
    folder(tmp_path / "hole")
    (tmp_path / "hole" / "bird").mkdir()
    for name, words in {
        "empty": "empty contains no images",
        "flat": "flat/a.png is not in a class folder; expected CLASS",
        "one": r"one has only one class \(cat\)",
        "hole": "class folder .*hole/bird contains no images",
    }.items():
        with pytest.raises(MixerError, match=words):
            open_images(str(tmp_path / name))


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("cifar-10", {}, "there is no file, folder or image set 'cifar-10'; did you mean 'cifar10'"),
        ("cifar10", {"path": "/nothing/here"}, "no file or folder '/nothing/here'; give the official files of cifar10"),
        ("digits", {"path": "x"}, "'digits' comes with scikit-learn"),
        ("/nothing", {"path": "x"}, "cannot be used"),
        ("digits", {"channels": 4}, "channels=4 must be 1"),
        ("digits", {"valid": 0}, "valid=0 would leave nothing to score"),
    ],
)
def test_wrong_requests(source, options, words):
    with pytest.raises(MixerError, match=words):
        open_images(source, **options)


def test_an_unknown_split_is_refused():
    with pytest.raises(MixerError, match="images digits: there is no split 'val'; choose one of train, valid, test"):
        open_images("digits").split("val")


def test_a_file_that_is_no_set(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(MixerError, match="notes.txt is not a set of images; give a folder"):
        open_images(str(tmp_path / "notes.txt"))
    for name, words in {
        "a.tar.gz": "not a readable tar",
        "b.zip": "not a readable zip",
        "c.npz": "not a readable .npz",
    }.items():
        (tmp_path / name).write_bytes(b"PK nothing")
        with pytest.raises(MixerError, match=f"{name} is {words}"):
            open_images(str(tmp_path / name))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x_train": noise(10, 4, 4).astype(np.float32)}, "x_train has dtype float32; images must be uint8"),
        ({"x_train": noise(10, 16)}, r"x_train has shape \(10, 16\)"),
        ({"x_train": noise(10, 4, 4, 4)}, "1 or 3 channels"),
        ({"x_train": noise(0, 4, 4), "y_train": np.zeros(0, int)}, r"x_train has shape \(0, 1, 4, 4\)"),
        ({"x_test": noise(4, 5, 5)}, r"shapes \(1, 4, 4\) and \(1, 5, 5\)"),
        ({"y_train": np.arange(9)}, r"y_train has shape \(9,\) .*10 images need \(10,\) integers"),
        ({"y_train": np.linspace(0, 1, 10)}, "dtype float64"),
        ({"y_train": np.arange(10) - 1}, "label -1 of image 0 is out of range"),
        ({"y_train": np.arange(10) * 1_000_000}, "label 9000000 is out of range"),
        ({"classes": np.array(["a", "b"])}, "label 2 of image 2 is out of range; 2 classes have labels 0 to 1"),
        ({"x_train": None}, "must contain x_train, y_train .* it contains y_train"),
        ({"y_train": np.array([{}] * 10)}, "not a readable .npz"),
    ],
)
def test_arrays_of_the_wrong_kind(tmp_path, change, words):
    arrays = {
        "x_train": noise(10, 4, 4),
        "y_train": np.arange(10) % 3,
        "x_test": noise(4, 4, 4),
        "y_test": np.arange(4) % 3,
        **change,
    }
    np.savez(tmp_path / "a.npz", **{k: v for k, v in arrays.items() if v is not None})
    with pytest.raises(MixerError, match=words):
        open_images(str(tmp_path / "a.npz"))


def test_broken_cifar_and_idx_files(tmp_path):
    cifar(tmp_path / "c", "binary")
    third = tmp_path / "c" / "data_batch_3.bin"
    whole = third.read_bytes()
    third.write_bytes(whole[:-1])
    with pytest.raises(MixerError, match="data_batch_3.bin has 12291 bytes, not a multiple of 3073"):
        open_images(str(tmp_path / "c"))
    third.write_bytes(bytes([200]) + whole[1:])
    with pytest.raises(MixerError, match="data_batch_3.bin: label 200 of image 0 is out of range; 10 classes"):
        open_images(str(tmp_path / "c"))
    third.unlink()
    with pytest.raises(MixerError, match="has no data_batch_3.bin"):
        open_images(str(tmp_path / "c"))
    idx(tmp_path / "m", packed=False)
    labels = tmp_path / "m" / "train-labels-idx1-ubyte"
    raw = labels.read_bytes()
    cases = {
        "announces 9 bytes but has 7": raw[:-2],
        "not an idx file of bytes": b"\0\0\x0d" + raw[3:],
        "label 77 of image 0": raw[:8] + bytes([77] * 9),
    }
    for words, spoiled in cases.items():
        labels.write_bytes(spoiled)
        with pytest.raises(MixerError, match=words):
            open_images("mnist", path=str(tmp_path / "m"))


def test_every_named_set_can_be_had():
    assert set(images_module.COUNTS) == set(images_module.IMAGE_SETS) == {*OFFICIAL, "digits"}
    for files in OFFICIAL.values():
        assert all(len(f.md5) == 32 and f.size > 4000 and f.url.startswith("http") for f in files)


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    root = folder(tmp_path / "pets")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MixerError, match=r"pip install 'tokenmix\[vision\]'"):
        open_images(str(root))


def test_an_image_in_memory():
    file = io.BytesIO()
    Image.fromarray(noise(3, 4)).save(file, "PNG")
    assert read_image(io.BytesIO(file.getvalue()), 1, "picture").size == (4, 3)
    with pytest.raises(MixerError, match="images: picture is not an image."):
        read_image(io.BytesIO(b"abc"), 1, "picture")


def test_the_package_needs_none_of_its_readers():
    """Without numpy, Pillow, timm and scikit-learn it imports, and says what is missing when it is asked for."""
    code = """
import sys
sys.modules.update({name: None for name in ("numpy", "PIL", "timm", "sklearn")})
from tokenmix.lab import data
try:
    data.open_images("digits")
except data.images.MixerError as why:
    print(why)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert "comes with scikit-learn; pip install 'tokenmix[vision]'" in done.stdout, done.stderr


# --- sets made by strangers


def test_a_pipe_among_the_images_is_no_file(tmp_path):
    root = folder(tmp_path / "pets")
    os.mkfifo(root / "cat" / "x.png")
    with pytest.raises(MixerError, match=r"cat/x.png is not a regular file.*skip_bad_files"):
        open_images(str(root))
    with pytest.warns(UserWarning, match="1 of 11 files"):
        assert open_images(str(root), skip_bad_files=True).skipped == ("cat/x.png",)
    os.mkfifo(tmp_path / "a.npz")
    with pytest.raises(MixerError, match="a.npz is not a regular file"):
        open_images(str(tmp_path / "a.npz"))
    idx(tmp_path / "m", packed=False)
    (tmp_path / "m" / "train-images-idx3-ubyte").unlink()
    os.mkfifo(tmp_path / "m" / "train-images-idx3-ubyte")
    with pytest.raises(MixerError, match="has no idx file train-images"):
        open_images(str(tmp_path / "m"))


def huge_png(file: Path, side: int) -> Path:
    """The header of a large picture, and nothing that could be decoded."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    file.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">2I5B", side, side, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(b""))
    )
    return file


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_pictures_of_too_many_pixels_are_refused_by_their_headers(tmp_path):
    for side, words in ((13_000, "13000 x 13000 pixels"), (20_000, "too many pixels")):
        with pytest.raises(
            MixerError,
            match=f"a.png has {words}, but only 89478485 are allowed; .* raise max_pixels .--data.max_pixels",
        ):
            read_image(huge_png(tmp_path / "a.png", side), 3)
    root = folder(tmp_path / "pets")
    with pytest.raises(MixerError, match=r"6 x 7 pixels|7 x 6 pixels"):
        open_images(str(root), bounds=Bounds(max_pixels=41))
    assert open_images(str(root), bounds=Bounds(max_pixels=42)).split("train").size == (6, 7)
    with pytest.raises(MixerError, match="max_pixels must be an integer of at least 1, got 0"):
        Bounds(max_pixels=0)


def archive(file: Path, size: int) -> Path:
    """An archive of a form that its name tells, whose useless part unpacks to ``size`` zeros."""
    kind, zeros = file.name.split(".", 1)[1], bytes(size)
    if kind == "tar.gz":
        with tarfile.open(file, "w:gz", compresslevel=1) as tar:
            member = tarfile.TarInfo("unused")
            member.size = size
            tar.addfile(member, io.BytesIO(zeros))
    elif kind == "npz":
        np.savez_compressed(
            file,
            x_train=noise(4, 4, 4),
            y_train=np.arange(4) % 2,
            x_test=np.zeros((2, size // 2, 1), np.uint8),
            y_test=np.arange(2),
        )
    elif kind == "zip":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as z:
            z.writestr("cat/a.png", zeros)
    else:
        (file.parent / "m").mkdir()
        for part, n in (("train", 2), ("t10k", 2)):
            for what, dims in (("images", 3), ("labels", 1)):
                shape = (n, size // 2, 1) if what == "images" else (n,)
                raw = struct.pack(f">4B{dims}i", 0, 0, 8, dims, *shape) + bytes(int(np.prod(shape)))
                (file.parent / "m" / f"{part}-{what}-idx{dims}-ubyte.gz").write_bytes(gzip.compress(raw, 1))
        return file.parent / "m"
    return file


@pytest.mark.parametrize("kind", ["tar.gz", "npz", "zip", "idx"])
def test_archives_that_unpack_to_too_much_are_refused(tmp_path, kind):
    file = archive(tmp_path / f"a.{kind}", 1 << 20)
    with pytest.raises(
        MixerError,
        match=r"unpacks to \d+ or more, but only 1000000 are allowed; "
        r"if you trust it, raise max_unpacked .--data.max_unpacked",
    ):
        open_images(str(file), bounds=Bounds(max_unpacked=1_000_000))


def test_members_that_nobody_asked_for_are_not_read(tmp_path):
    arrays = {"x_train": noise(10, 4, 4), "y_train": np.arange(10) % 2, "unused": np.zeros(1 << 20, np.uint8)}
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    assert len(open_images(str(tmp_path / "a.npz"), bounds=Bounds(max_unpacked=10_000)).classes) == 2


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["/etc/x.png", "dog/x.png"], "'/etc/x.png', which is not a path inside it"),
        (["../cat/x.png", "dog/x.png"], "not a path inside it"),
        (["cat//x.png", "dog/x.png"], "not a path inside it"),
        (["cat/x.png", "dog/x.png", "cat/x.png"], "'cat/x.png' twice"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_names_in_a_zip_that_lead_out_of_it_are_refused(tmp_path, names, words):
    picture = save(tmp_path / "x.png", noise(4, 4)).read_bytes()
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as z:
        for name in names:
            z.writestr(name, picture)
    with pytest.raises(MixerError, match=f"a.zip contains .*{words}"):
        open_images(str(tmp_path / "a.zip"))


def test_a_link_that_goes_round_is_refused(tmp_path):
    root = folder(tmp_path / "pets")
    (root / "cat" / "again").symlink_to(root)
    with pytest.raises(MixerError, match="pets/cat/again is a link to a folder that contains it; remove it"):
        open_images(str(root))
    (root / "cat" / "again").unlink()
    (tmp_path / "set").mkdir()
    for part in ("train", "val", "test"):
        (tmp_path / "set" / part).symlink_to(root)
    assert open_images(str(tmp_path / "set")).describe()["images"] == [10, 10, 10], (
        "links that do not go round are followed"
    )


@pytest.mark.parametrize("sizes", ["one size", "different sizes"])
def test_names_that_are_no_text(tmp_path, sizes):
    odd = os.fsdecode(b"n\xe9")
    root = folder(tmp_path / odd, classes=(odd, "dog"), size=lambda i: (6, 7 if sizes == "one size" else 7 + i))
    (root / odd / "0.png").rename(root / odd / f"{odd}.png")
    data = open_images(str(root))
    assert sum(len(data.split(s)) for s in ("train", "valid", "test")) == 10
    assert data.split("train").image(0).shape[0] == 3
    assert open_images(str(root)).fingerprint == data.fingerprint


def test_archives_with_one_damaged_byte_are_read_or_refused_in_one_line(tmp_path):
    """Each byte of the directories of a .zip and a .npz in turn: numpy and zipfile raise a dozen kinds of errors."""
    images = np.zeros((6, 2, 2), dtype=np.uint8)
    np.savez_compressed(tmp_path / "whole.npz", images=images, labels=np.arange(6) % 2)
    with zipfile.ZipFile(tmp_path / "whole.zip", "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("a/0.txt", b"to be or not to be")
    refused: list[str] = []
    for kind, read in (
        (".npz", lambda f: image_archives.read_npz(f, Bounds())),
        (".zip", lambda f: (trees.zip_tree(f, Bounds()), open_corpus(str(f)))),
    ):
        raw = (tmp_path / f"whole{kind}").read_bytes()
        for at in range(0, len(raw), 3):
            file = tmp_path / f"{at}{kind}"
            file.write_bytes(raw[:at] + bytes([raw[at] ^ 0x90]) + raw[at + 1 :])
            try:
                read(file)
            except MixerError as why:
                refused.append(str(why))
    assert len(refused) > 20
    assert not any("\n" in why for why in refused)
