"""Image sets: readers, splits, the cache, and files that are not what they should be."""

from __future__ import annotations

import json
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

from image_sets import cifar, folder, idx, noise, save, tiny_imagenet
from tokenmix import MixerError
from tokenmix.lab.data import cache, open_images
from tokenmix.lab.data.image_downloads import OFFICIAL, Official
from tokenmix.lab.data.images import shrink_images


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenmix"


def content(data, *splits: str) -> list[tuple[int, bytes]]:
    """Label and bytes of every image of some splits, sorted."""
    return sorted(
        (int(y), bytes(s.image(i).flatten().tolist())) for s in map(data.split, splits) for i, y in enumerate(s.labels)
    )


# --- sets that come as arrays


def test_the_digits_are_there_without_download(own_cache):
    data = open_images("digits")
    assert (data.classes, data.channels, data.split("train").size) == (tuple("0123456789"), 1, (8, 8))
    assert data.describe() == {"name": "digits", "images": [1437, 180, 180], "classes": 10, "sha256": data.fingerprint}
    assert len(data.fingerprint) == 64
    from sklearn.datasets import load_digits

    theirs = load_digits()
    expected = sorted(
        (int(y), bytes((x * 255 / 16).round().astype(np.uint8).ravel()))
        for x, y in zip(theirs.images, theirs.target, strict=True)
    )
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
    assert content(found, "train", "valid") == sorted(
        (y, x.tobytes()) for x, y in zip(data[:20], labels[:20], strict=True)
    )
    assert torch.equal(found.split("test").pixels, torch.from_numpy(data[20:]).view(4, 3, 32, 32))
    assert found.split("test").labels.tolist() == labels[20:]
    assert open_images(str(path), valid=0.5).fingerprint == found.fingerprint


@pytest.mark.parametrize("form", ["binary", "pickle"])
def test_cifar100_has_fine_labels(tmp_path, form):
    for part, n in (("train", 6), ("test", 3)):
        x, fine, coarse = noise(n, 3072, seed=n), list(range(90, 90 + n)), [3] * n
        if form == "binary":
            (tmp_path / f"{part}.bin").write_bytes(
                np.concatenate([np.array([coarse, fine], np.uint8).T, x], 1).tobytes()
            )
        else:
            (tmp_path / part).write_bytes(pickle.dumps({"data": x, "fine_labels": fine, "coarse_labels": coarse}))
    data = open_images("cifar100", path=str(tmp_path), valid=0)
    assert len(data.classes) == 100
    assert data.split("train").labels.tolist() == [90, 91, 92, 93, 94, 95]
    assert torch.equal(data.split("test").pixels.flatten(1), torch.from_numpy(noise(3, 3072, seed=3)))
    assert data.describe()["images"] == [6, 3, 3]  # nothing held out: valid is the test split


def test_a_pickle_of_python_2(tmp_path):
    """As the official files are: byte strings for text, numpy's old module names."""
    raw, labels = noise(2, 3072).tobytes(), "](K\x01K\x08e"
    head = "\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
    head += "K\x00\x85U\x01b\x87R(K\x01K\x02M\x00\x0c\x86"
    dtype = "cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
    stream = (
        (head + dtype).encode("latin1")
        + struct.pack("<i", len(raw))
        + raw
        + ("tbU\x06labels" + labels + "u.").encode("latin1")
    )
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        (tmp_path / name).write_bytes(stream)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        test = open_images("cifar10", path=str(tmp_path), valid=0).split("test")
    assert test.labels.tolist() == [1, 8]
    assert bytes(test.pixels.flatten().tolist()) == raw


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    cifar(tmp_path / "c", "pickle")
    flag = tmp_path / "ran"
    (tmp_path / "c" / "data_batch_2").write_bytes(b"cos\nsystem\n(S'touch " + str(flag).encode() + b"'\ntR.")
    with pytest.raises(MixerError, match=r"data_batch_2 is not a CIFAR pickle \(it asks for os.system\)"):
        open_images(str(tmp_path / "c"))
    assert not flag.exists()


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
    everything = sorted(
        (c, noise(6, 7, 3, seed=100 * c + i).transpose(2, 0, 1).tobytes()) for c in (0, 1) for i in range(20)
    )
    assert content(data, "train", "valid", "test") == everything
    moved = root.rename(tmp_path / "elsewhere")
    assert open_images(str(moved)).fingerprint == data.fingerprint, (
        "the split belongs to the names, not to where they lie"
    )


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
    with pytest.raises(MixerError, match="val/cow/0.png belongs to a class that is not among the 2 in train/"):
        open_images(str(tmp_path / "i"))


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
    with pytest.raises(MixerError, match="different sizes, which are supported in folders only; unpack it"):
        open_images(str(tmp_path / "pets.zip"))


# --- splits and the cache


def test_shrinking_averages_squares_of_every_split(tmp_path):
    pixels, labels = noise(30, 8, 12, 3), np.arange(30) % 3
    np.savez(tmp_path / "s.npz", x_train=pixels, y_train=labels, x_test=pixels[:6], y_test=labels[:6])
    whole = open_images(str(tmp_path / "s.npz"))
    small = shrink_images(whole, 4)
    means = pixels[:6].astype(np.float64).reshape(6, 2, 4, 3, 4, 3).mean((2, 4)).round()
    assert np.array_equal(small.split("test").pixels.permute(0, 2, 3, 1).numpy(), means)
    assert [small.split(name).size for name in ("train", "valid", "test")] == [(2, 3)] * 3
    assert torch.equal(small.split("train").labels, whole.split("train").labels)
    assert len({whole.fingerprint, small.fingerprint, shrink_images(whole, 2).fingerprint}) == 3
    with pytest.raises(MixerError, match=r"shrink: the images of s are 8 x 12, no multiples of 5"):
        shrink_images(whole, 5)
    with pytest.raises(MixerError, match="has images of different sizes"):
        shrink_images(open_images(str(folder(tmp_path / "f", size=lambda i: (6 + i, 7)))), 2)


def test_what_is_held_out_is_fixed_and_even(tmp_path):
    y = np.repeat(np.arange(4), [40, 40, 16, 4])
    np.savez(tmp_path / "a.npz", x_train=noise(100, 4, 4), y_train=y, x_test=noise(4, 4, 4), y_test=np.arange(4))
    held = {
        v: open_images(str(tmp_path / "a.npz"), valid=v).split("valid").labels.bincount(minlength=4).tolist()
        for v in (None, 0.25, 30, 1)
    }
    assert sum(held[None]) == 10
    assert min(held[None]) >= 1
    assert held[0.25] == [10, 10, 4, 1]
    assert sum(held[30]) == 30
    assert held[1] == [1, 1, 1, 1], "at least one of each class"
    a, b = (open_images(str(tmp_path / "a.npz"), valid=0.25) for _ in range(2))
    assert torch.equal(a.split("valid").pixels, b.split("valid").pixels)
    everything = open_images(str(tmp_path / "a.npz"), valid=0)
    assert content(everything, "train") == content(a, "train", "valid")


def test_the_fingerprint_knows_pixels_labels_and_classes(tmp_path):
    def fingerprint(name: str, **change) -> str:
        arrays = {
            "x_train": noise(4, 4, 4),
            "y_train": [0, 1, 0, 1],
            "x_test": noise(2, 4, 4),
            "y_test": [0, 1],
            "classes": ["a", "b"],
            **change,
        }
        np.savez(tmp_path / f"{name}.npz", **arrays)
        return open_images(str(tmp_path / f"{name}.npz"), valid=0).fingerprint

    other = noise(4, 4, 4)
    other[3, 3, 3] ^= 1
    changes = [{}, {"y_train": [0, 1, 1, 0]}, {"classes": ["a", "c"]}, {"x_train": other}]
    assert len({fingerprint(f"s{i}", **c) for i, c in enumerate(changes)}) == 4
    assert fingerprint("copy") == fingerprint("s0")


@pytest.mark.parametrize(
    ("valid", "words"),
    [(-0.1, "fraction in"), (2.5, "integer number"), (99, "would not leave one"), (float("nan"), "fraction in")],
)
def test_a_validation_share_that_makes_no_sense(tmp_path, valid, words):
    np.savez(
        tmp_path / "a.npz",
        x_train=noise(20, 4, 4),
        y_train=np.arange(20) % 2,
        x_test=noise(4, 4, 4),
        y_test=np.arange(4) % 2,
    )
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


@pytest.mark.parametrize("sizes", ["one size", "different sizes"])
@pytest.mark.parametrize("damage", ["cut", "zeros", "labels", "names", "note cut"])
def test_a_damaged_cache_is_made_again(tmp_path, own_cache, damage, sizes):
    root = folder(tmp_path / "pets", size=lambda i: (6, 7 if sizes == "one size" else 7 + i))
    before = open_images(str(root))
    images = content(before, "train", "valid", "test")
    pixels, note = (next((own_cache / "images").glob(pattern), None) for pattern in ("*.pixels", "*.json"))
    if damage in ("cut", "zeros"):
        if sizes != "one size":
            return
        os.truncate(pixels, 10) if damage == "cut" else pixels.write_bytes(bytes(pixels.stat().st_size))
    elif damage == "note cut":
        os.truncate(note, 40)
    else:
        written = json.loads(note.read_text())
        if damage == "labels":
            written["labels"] = [1 - y for y in written["labels"]]
        else:
            written["classes"] = written["classes"][::-1]
        note.write_text(json.dumps(written))
    with pytest.warns(UserWarning, match="the cached copy .*pets-.* is damaged .* and is created again"):
        after = open_images(str(root))
    assert (after.fingerprint, after.classes) == (before.fingerprint, before.classes)
    assert content(after, "train", "valid", "test") == images
    assert open_images(str(root)).fingerprint == before.fingerprint


def test_the_fingerprint_is_that_of_what_is_read(tmp_path, own_cache):
    """Check that a note that was edited with care gives another fingerprint or is made again.

    The edit includes the note's own check: what a run compares is not read from the note.
    """
    root = folder(tmp_path / "pets")
    before, note = open_images(str(root)).fingerprint, next((own_cache / "images").glob("*.json"))
    written = cache.read_note(note)
    cache.write_note(note, {**written, "labels": [1 - y for y in written["labels"]]})
    with pytest.warns(UserWarning, match="damaged"):
        assert open_images(str(root)).fingerprint == before


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
    with pytest.raises(
        MixerError, match=r"mnist is not in the cache .*train-images-idx3-ubyte.gz\); give a local copy"
    ):
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
    with pytest.raises(MixerError, match="could not download .*nothing.tar.gz .* give its path: --data PATH"):
        open_images("cifar10")
