"""Image sets: readers, splits, the cache, and files that are not what they should be."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tarfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tokenmix import MixerError
from tokenmix.data import images as images_module
from tokenmix.data import open_images
from tokenmix.data.image_downloads import OFFICIAL, Official
from tokenmix.data.image_source import pil_to_tensor, read_image, tensor_to_pil, to_channels


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenmix"


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(file: Path, pixels: np.ndarray, **options) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file, **options)
    return file


def folder(root: Path, each: int = 5, size=lambda i: (6, 7), classes=("cat", "dog"), suffix="png") -> Path:
    """CLASS/*.png of noise; size(i) gives the height and width of each class's image i."""
    for c, name in enumerate(classes):
        for i in range(each):
            save(root / name / f"{i}.{suffix}", noise(*size(i), 3, seed=100 * c + i))
    return root


def cifar(folder: Path, form: str, each: int = 4) -> tuple[np.ndarray, list[int]]:
    """Six files as CIFAR-10's authors write them. Returns all images (N, 3072) and labels, test last."""
    folder.mkdir(parents=True, exist_ok=True)
    data, labels = noise(6 * each, 3072), [i * 7 % 10 for i in range(6 * each)]
    for i, name in enumerate([f"data_batch_{j}" for j in range(1, 6)] + ["test_batch"]):
        x, y = data[i * each : (i + 1) * each], labels[i * each : (i + 1) * each]
        if form == "binary":
            (folder / f"{name}.bin").write_bytes(np.concatenate([np.array(y, np.uint8)[:, None], x], 1).tobytes())
        else:
            (folder / name).write_bytes(pickle.dumps({b"data": x, b"labels": y}, protocol=2))
    names = ["airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    if form == "binary":
        (folder / "batches.meta.txt").write_text("\n".join(names) + "\n\n")
    else:
        (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": [n.encode() for n in names]}, protocol=2))
    return data, labels


def content(data, *splits: str) -> list[tuple[int, bytes]]:
    """Label and bytes of every image of some splits, sorted."""
    return sorted((int(y), bytes(s.image(i).flatten().tolist())) for s in map(data.split, splits) for i, y in enumerate(s.labels))


# --- sets that come as arrays


def test_the_digits_are_there_without_download(own_cache):
    data = open_images("digits")
    assert (data.classes, data.channels, data.split("train").size) == (tuple("0123456789"), 1, (8, 8))
    assert data.describe() == {"name": "digits", "images": [1437, 180, 180], "classes": 10, "sha256": data.fingerprint}
    assert len(data.fingerprint) == 64
    from sklearn.datasets import load_digits

    theirs = load_digits()
    expected = sorted((int(y), bytes((x * 255 / 16).round().astype(np.uint8).ravel())) for x, y in zip(theirs.images, theirs.target, strict=True))
    assert content(data, "train", "valid", "test") == expected
    again = open_images("digits")
    assert again.fingerprint == data.fingerprint
    assert torch.equal(again.split("train").pixels, data.split("train").pixels)
    assert len(list((own_cache / "images").glob("*.pixels"))) == 1


@pytest.mark.parametrize("form", ["binary", "pickle"])
@pytest.mark.parametrize("packed", [False, True])
def test_cifar10_in_every_official_form(tmp_path, form, packed):
    there = tmp_path / "cifar-10-batches-py"
    data, labels = cifar(there, form)
    path = there.parent / "c.tar.gz" if packed else there
    if packed:
        with tarfile.open(path, "w:gz") as tar:
            tar.add(there, "cifar-10-batches-py")
    found = open_images("cifar10", path=str(path), valid=0.5)
    assert found.classes[:3] == ("airplane", "car", "bird")
    assert [len(found.split(s)) for s in ("train", "valid", "test")] == [10, 10, 4]
    assert content(found, "train", "valid") == sorted((y, x.tobytes()) for x, y in zip(data[:20], labels[:20], strict=True))
    assert torch.equal(found.split("test").pixels, torch.from_numpy(data[20:]).view(4, 3, 32, 32))
    assert found.split("test").labels.tolist() == labels[20:]
    assert open_images(str(path), valid=0.5).fingerprint == found.fingerprint


@pytest.mark.parametrize("form", ["binary", "pickle"])
def test_cifar100_has_fine_labels(tmp_path, form):
    for part, n in (("train", 6), ("test", 3)):
        x, fine, coarse = noise(n, 3072, seed=n), list(range(90, 90 + n)), [3] * n
        if form == "binary":
            (tmp_path / f"{part}.bin").write_bytes(np.concatenate([np.array([coarse, fine], np.uint8).T, x], 1).tobytes())
        else:
            (tmp_path / part).write_bytes(pickle.dumps({"data": x, "fine_labels": fine, "coarse_labels": coarse}))
    data = open_images("cifar100", path=str(tmp_path), valid=0)
    assert len(data.classes) == 100
    assert data.split("train").labels.tolist() == [90, 91, 92, 93, 94, 95]
    assert torch.equal(data.split("test").pixels.flatten(1), torch.from_numpy(noise(3, 3072, seed=3)))
    assert data.describe()["images"] == [6, 3, 3]  # nothing held out: valid is the test split


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    cifar(tmp_path / "c", "pickle")
    flag = tmp_path / "ran"
    (tmp_path / "c" / "data_batch_2").write_bytes(b"cos\nsystem\n(S'touch " + str(flag).encode() + b"'\ntR.")
    with pytest.raises(MixerError, match=r"data_batch_2 is not a pickle of CIFAR \(it asks for os.system\)"):
        open_images(str(tmp_path / "c"))
    assert not flag.exists()


def idx(folder: Path, packed: bool, shape=(12, 5, 4)) -> np.ndarray:
    folder.mkdir(exist_ok=True)
    x = noise(*shape)
    for name, n in (("train", 9), ("t10k", 3)):
        a, y = (x[:9], range(9)) if name == "train" else (x[9:], range(3))
        for file, raw in (
            (f"{name}-images-idx3-ubyte", struct.pack(">4B3i", 0, 0, 8, 3, n, *shape[1:]) + a.tobytes()),
            (f"{name}-labels-idx1-ubyte", struct.pack(">4Bi", 0, 0, 8, 1, n) + bytes(y)),
        ):
            (folder / (file + ".gz" * packed)).write_bytes(gzip.compress(raw) if packed else raw)
    return x


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files(tmp_path, packed):
    x = idx(tmp_path / "m", packed)
    data = open_images("mnist", path=str(tmp_path / "m"), valid=0)
    assert (data.channels, data.split("train").size, len(data.classes)) == (1, (5, 4), 10)
    assert torch.equal(data.split("train").pixels.squeeze(1), torch.from_numpy(x[:9]))
    assert torch.equal(data.split("test").pixels.squeeze(1), torch.from_numpy(x[9:]))
    assert open_images("fashion_mnist", path=str(tmp_path / "m"), valid=0).classes[9] == "Ankle boot"
    coloured = open_images(str(tmp_path / "m"), valid=0, channels=3).split("test").pixels
    assert torch.equal(coloured, torch.from_numpy(x[9:]).unsqueeze(1).expand(-1, 3, -1, -1))


@pytest.mark.parametrize("form", ["NHWC", "NCHW", "NHW", "16 bits", "labels (N, 1)"])
def test_npz_as_keras_writes_it(tmp_path, form):
    channels = 1 if form == "NHW" else 3
    x, y = noise(20, channels, 6, 5), np.arange(20) % 4
    last = x.transpose(0, 2, 3, 1)
    wide = np.minimum(last * np.int64(257) + 100, 65535).astype(np.uint16)
    stored = {"NCHW": x, "NHW": x[:, 0], "16 bits": wide}.get(form, last)
    labels = y[:, None] if "labels" in form else y
    np.savez(tmp_path / "set.npz", x_train=stored[:14], y_train=labels[:14], x_test=stored[14:], y_test=labels[14:])
    data = open_images(str(tmp_path / "set.npz"), valid=4)
    assert data.describe()["images"] == [10, 4, 6]
    assert torch.equal(data.split("test").pixels, torch.from_numpy(x[14:]))
    assert content(data, "train", "valid") == sorted((int(b), a.tobytes()) for a, b in zip(x[:14], y[:14], strict=True))


def test_npz_of_images_and_labels_is_divided(tmp_path):
    np.savez(tmp_path / "a.npz", images=noise(40, 4, 4), labels=np.arange(40) % 2, classes=np.array(["no", "yes"]))
    data = open_images(str(tmp_path / "a.npz"))
    assert data.classes == ("no", "yes")
    assert data.describe()["images"] == [32, 4, 4]
    assert [sorted(data.split(s).labels.tolist()) for s in ("valid", "test")] == [[0, 0, 1, 1]] * 2


# --- folders


def test_a_folder_of_classes_is_divided_by_names(tmp_path):
    root = folder(tmp_path / "pets", each=20)
    data = open_images(str(root))
    assert (data.classes, data.channels, data.describe()["images"]) == (("cat", "dog"), 3, [32, 4, 4])
    assert data.split("train").size == (6, 7)
    everything = sorted((c, noise(6, 7, 3, seed=100 * c + i).transpose(2, 0, 1).tobytes()) for c in (0, 1) for i in range(20))
    assert content(data, "train", "valid", "test") == everything
    moved = root.rename(tmp_path / "elsewhere")
    assert open_images(str(moved)).fingerprint == data.fingerprint, "the split belongs to the names, not to where they lie"


def test_different_sizes_stay_files(tmp_path):
    root = folder(tmp_path / "pets", each=6, size=lambda i: (6 + i, 9))
    data = open_images(str(root))
    train = data.split("train")
    assert (train.size, train.pixels) == (None, None)
    assert {tuple(train.image(i).shape) for i in range(len(train))} <= {(3, 6 + i, 9) for i in range(6)}
    assert len(content(data, "train", "valid", "test")) == 12
    assert open_images(str(root)).fingerprint == data.fingerprint
    assert open_images(str(root), channels=1).split("test").image(0).shape[0] == 1


def test_imagenet_layout(tmp_path):
    folder(tmp_path / "i" / "train", each=10)
    folder(tmp_path / "i" / "val", each=2)
    data = open_images(str(tmp_path / "i"))
    assert data.describe()["images"] == [20, 4, 4]
    assert content(data, "valid") == content(data, "test")
    assert open_images(str(tmp_path / "i"), valid=0.2).describe()["images"] == [16, 4, 4]
    folder(tmp_path / "i" / "test", each=3)
    assert open_images(str(tmp_path / "i")).describe()["images"] == [20, 4, 6]
    with pytest.raises(MixerError, match="has its own validation split of 4 images; leave valid=0.2 out"):
        open_images(str(tmp_path / "i"), valid=0.2)
    folder(tmp_path / "i" / "val", each=1, classes=["cow"])
    with pytest.raises(MixerError, match="val/cow/0.png belongs to a class that is none of the 2 in train/"):
        open_images(str(tmp_path / "i"))


def tiny_imagenet(root: Path) -> Path:
    rows = []
    for c, wnid in enumerate(("n01", "n02", "n03")):
        for i in range(4):
            save(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", np.full((8, 8, 3), 80 * c, np.uint8))
        save(root / "val" / "images" / f"val_{c}.JPEG", np.full((8, 8, 3), 80 * c, np.uint8))
        rows.append(f"val_{c}.JPEG\t{wnid}\t0\t0\t62\t62\n")
    save(root / "test" / "images" / "test_0.JPEG", noise(8, 8, 3))
    (root / "val" / "val_annotations.txt").write_text("".join(rows))
    (root / "wnids.txt").write_text("n03\nn01\nn02\n")
    return root


@pytest.mark.parametrize("packed", [False, True])
def test_tiny_imagenet(tmp_path, packed):
    path = root = tiny_imagenet(tmp_path / "tiny-imagenet-200")
    if packed:
        path = tmp_path / "tiny-imagenet-200.zip"
        with zipfile.ZipFile(path, "w") as z:
            for file in sorted(root.rglob("*")):
                z.write(file, file.relative_to(tmp_path))
    data = open_images(str(path))
    assert (data.classes, data.describe()["images"]) == (("n01", "n02", "n03"), [12, 3, 3])
    for split in ("train", "valid"):
        s = data.split(split)
        assert torch.equal(s.pixels[:, 0, 0, 0].long(), s.labels * 80), "each image with the label of its file"


def test_a_folder_of_images_in_a_zip(tmp_path):
    root = folder(tmp_path / "pets", each=5)
    with zipfile.ZipFile(tmp_path / "pets.zip", "w") as z:
        for file in root.rglob("*.png"):
            z.write(file, file.relative_to(tmp_path))
    assert content(open_images(str(tmp_path / "pets.zip")), "train") == content(open_images(str(root)), "train")
    with zipfile.ZipFile(tmp_path / "pets.zip", "a") as z:
        z.write(save(tmp_path / "large.png", noise(9, 9, 3)), "pets/cat/large.png")
    with pytest.raises(MixerError, match="different sizes, which are read from files only; unpack it"):
        open_images(str(tmp_path / "pets.zip"))


# --- splits and the cache


def test_what_is_held_out_is_fixed_and_even(tmp_path):
    y = np.repeat(np.arange(4), [40, 40, 16, 4])
    np.savez(tmp_path / "a.npz", x_train=noise(100, 4, 4), y_train=y, x_test=noise(4, 4, 4), y_test=np.arange(4))
    held = {v: open_images(str(tmp_path / "a.npz"), valid=v).split("valid").labels.bincount(minlength=4).tolist() for v in (None, 0.25, 30, 1)}
    assert sum(held[None]) == 10
    assert min(held[None]) >= 1
    assert held[0.25] == [10, 10, 4, 1]
    assert sum(held[30]) == 30
    assert held[1] == [1, 1, 1, 1], "at least one of each class"
    a, b = (open_images(str(tmp_path / "a.npz"), valid=0.25) for _ in range(2))
    assert torch.equal(a.split("valid").pixels, b.split("valid").pixels)
    everything = open_images(str(tmp_path / "a.npz"), valid=0)
    assert content(everything, "train") == content(a, "train", "valid")


@pytest.mark.parametrize(("valid", "words"), [(-0.1, "fraction in"), (2.5, "whole number"), (99, "cannot be held out"), (float("nan"), "fraction in")])
def test_a_validation_share_that_makes_no_sense(tmp_path, valid, words):
    np.savez(tmp_path / "a.npz", x_train=noise(20, 4, 4), y_train=np.arange(20) % 2, x_test=noise(4, 4, 4), y_test=np.arange(4) % 2)
    with pytest.raises(MixerError, match=words):
        open_images(str(tmp_path / "a.npz"), valid=valid)


def test_a_changed_file_is_read_again(tmp_path, own_cache):
    root = folder(tmp_path / "pets")
    first = open_images(str(root)).fingerprint
    before = {p: p.stat().st_mtime_ns for p in (own_cache / "images").iterdir()}
    assert open_images(str(root)).fingerprint == first
    assert {p: p.stat().st_mtime_ns for p in (own_cache / "images").iterdir()} == before
    save(root / "cat" / "0.png", noise(6, 7, 3, seed=77))
    assert open_images(str(root)).fingerprint != first
    file = next((own_cache / "images").glob("*.pixels"))
    for damaged in (own_cache / "images").glob("*.pixels"):
        os.truncate(damaged, 10)
    assert len(content(open_images(str(root)), "train", "valid", "test")) == 10, "a cut cache is written again"
    assert file.exists()


def test_a_failed_reading_leaves_nothing(tmp_path, own_cache):
    root = folder(tmp_path / "pets")
    (root / "dog" / "4.png").write_bytes(b"no")
    with pytest.raises(MixerError):
        open_images(str(root))
    assert [p for p in own_cache.rglob("*") if p.is_file()] == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path, own_cache):
    own_cache.mkdir(parents=True)
    (own_cache / "images").write_text("a file where a folder should be")
    with pytest.raises(MixerError, match="cannot write .* set XDG_CACHE_HOME"):
        open_images("digits")


def test_pixels_are_mapped(tmp_path):
    data = open_images("digits")
    pixels = data.split("valid").pixels
    assert pixels.data_ptr() - data.split("train").pixels.data_ptr() == 1437 * 64, "one map for all splits"
    data.split("valid").image(0).fill_(0)
    assert pixels[0].any(), "an image is a copy"


# --- downloads


def test_a_download_is_checked_and_kept(tmp_path, monkeypatch, own_cache):
    import hashlib

    idx(tmp_path / "there", packed=True)
    files = [tmp_path / "there" / o.name for o in OFFICIAL["mnist"]]
    right = [Official(f.as_uri(), f.stat().st_size, hashlib.md5(f.read_bytes()).hexdigest()) for f in files]
    wrong = [*right[:3], Official(right[3].url, right[3].size, "0" * 32)]
    with pytest.raises(MixerError, match=r"mnist is not in the cache .*train-images-idx3-ubyte.gz\); give a local copy"):
        open_images("mnist", download=False)
    monkeypatch.setitem(OFFICIAL, "mnist", wrong)
    with pytest.raises(MixerError, match="t10k-labels-idx1-ubyte.gz gave .* bytes with md5 .* expected"):
        open_images("mnist")
    assert not (own_cache / "downloads" / "mnist" / right[3].name).exists()
    monkeypatch.setitem(OFFICIAL, "mnist", right)
    first = open_images("mnist", valid=0)
    for file in files:
        file.unlink()
    assert open_images("mnist", valid=0, download=False).fingerprint == first.fingerprint


def test_a_failed_download_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(OFFICIAL, "cifar10", [Official((tmp_path / "nothing.tar.gz").as_uri(), 1, "")])
    with pytest.raises(MixerError, match="could not download .*nothing.tar.gz .* give its path as data.path"):
        open_images("cifar10")


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
    for name, pixels, words in (("c", values.astype(np.int32) * 2, "values from 0 to 131070"), ("d", values.astype(np.float32), "floating-point")):
        with pytest.raises(MixerError, match=f"{name}.tif holds {words}"):
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
    ("how", "words"), [("not an image", "not an"), ("truncated", "damaged or truncated"), ("empty", "not an"), ("link", "cannot be opened")]
)
def test_bad_files_are_refused_or_left_out(tmp_path, how, words, sizes):
    root = folder(tmp_path / "pets", each=5, suffix="jpg", size=lambda i: (16, 16 if sizes == "one size" else 16 + i))
    bad = spoil(root, how)
    with pytest.raises(MixerError, match=f"{bad} .*{words}.*skip_bad_files") as caught:
        open_images(str(root))
    assert "\n" not in str(caught.value)
    with pytest.warns(UserWarning, match="1 of 10 files of pets cannot be read and are left out; the first: dog/2.jpg") as warned:
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
        "empty": "empty holds no images",
        "flat": "flat/a.png lies in no class folder; expected CLASS",
        "one": r"one has one class only \(cat\)",
        "hole": "class folder .*hole/bird holds no images",
    }.items():
        with pytest.raises(MixerError, match=words):
            open_images(str(tmp_path / name))


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("cifar-10", {}, "no file, folder or set is called 'cifar-10'; did you mean 'cifar10'"),
        ("cifar10", {"path": "/nothing/here"}, "no file or folder '/nothing/here'; give the official files of cifar10"),
        ("digits", {"path": "x"}, "'digits' comes with scikit-learn"),
        ("/nothing", {"path": "x"}, "nothing to go with"),
        ("digits", {"channels": 4}, "channels=4 must be 1"),
        ("digits", {"valid": 0}, "valid=0 leaves nothing to score"),
    ],
)
def test_wrong_requests(source, options, words):
    with pytest.raises(MixerError, match=words):
        open_images(source, **options)


def test_an_unknown_split_is_refused():
    with pytest.raises(MixerError, match="images digits: no split is called 'val'; choose one of train, valid, test"):
        open_images("digits").split("val")


def test_a_file_that_is_no_set(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(MixerError, match="notes.txt is no set of images; give a folder"):
        open_images(str(tmp_path / "notes.txt"))
    for name, words in {"a.tar.gz": "not a readable tar", "b.zip": "not a readable zip", "c.npz": "not a readable .npz"}.items():
        (tmp_path / name).write_bytes(b"PK nothing")
        with pytest.raises(MixerError, match=f"{name} is {words}"):
            open_images(str(tmp_path / name))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x_train": noise(10, 4, 4).astype(np.float32)}, "x_train has dtype float32; images are uint8"),
        ({"x_train": noise(10, 16)}, r"x_train has shape \(10, 16\)"),
        ({"x_train": noise(10, 4, 4, 4)}, "1 or 3 channels"),
        ({"x_train": noise(0, 4, 4), "y_train": np.zeros(0, int)}, r"x_train has shape \(0, 1, 4, 4\)"),
        ({"x_test": noise(4, 5, 5)}, r"shapes \(1, 4, 4\) and \(1, 5, 5\)"),
        ({"y_train": np.arange(9)}, r"y_train has shape \(9,\) .*10 images need \(10,\) whole numbers"),
        ({"y_train": np.linspace(0, 1, 10)}, "dtype float64"),
        ({"y_train": np.arange(10) - 1}, "label -1 of image 0 is out of range"),
        ({"y_train": np.arange(10) * 1_000_000}, "label 9000000 is out of range"),
        ({"classes": np.array(["a", "b"])}, "label 2 of image 2 is out of range; 2 classes have labels 0 to 1"),
        ({"x_train": None}, "must hold x_train, y_train .* it holds y_train"),
        ({"y_train": np.array([{}] * 10)}, "not a readable .npz"),
    ],
)
def test_arrays_of_the_wrong_kind(tmp_path, change, words):
    arrays = {"x_train": noise(10, 4, 4), "y_train": np.arange(10) % 3, "x_test": noise(4, 4, 4), "y_test": np.arange(4) % 3, **change}
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
    with pytest.raises(MixerError, match="holds no data_batch_3.bin"):
        open_images(str(tmp_path / "c"))
    idx(tmp_path / "m", packed=False)
    labels = tmp_path / "m" / "train-labels-idx1-ubyte"
    raw = labels.read_bytes()
    cases = {"announces 9 bytes and holds 7": raw[:-2], "no idx file of bytes": b"\0\0\x0d" + raw[3:], "label 77 of image 0": raw[:8] + bytes([77] * 9)}
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
    import sys

    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MixerError, match=r"pip install 'tokenmix\[vision\]'"):
        open_images(str(root))


def test_an_image_in_memory():
    file = io.BytesIO()
    Image.fromarray(noise(3, 4)).save(file, "PNG")
    assert read_image(io.BytesIO(file.getvalue()), 1, "picture").size == (4, 3)
    with pytest.raises(MixerError, match="images: picture is not an image."):
        read_image(io.BytesIO(b"abc"), 1, "picture")
