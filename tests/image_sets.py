"""Tiny image sets on disk, in the layouts and formats of the real ones."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tokenmix.lab.data import ImageSplit


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


def pixels_split(n: int = 10, channels: int = 3, size=(8, 8)) -> ImageSplit:
    g = torch.Generator().manual_seed(1)
    return ImageSplit(
        "train",
        torch.arange(n) % 4,
        channels,
        torch.randint(0, 256, (n, channels, *size), generator=g, dtype=torch.uint8),
    )


def smooth_files(folder: Path) -> ImageSplit:
    """A split of eight smooth images of different sizes, as files."""
    files = []
    for i in range(8):
        small = np.random.default_rng(i).integers(0, 256, (5, 5, 3), dtype=np.uint8)
        files.append(folder / f"{i}.png")
        Image.fromarray(small).resize((40 + 3 * i, 52 - 2 * i), Image.Resampling.BICUBIC).save(files[-1])
    return ImageSplit("train", torch.arange(8) % 4, 3, files=tuple(files))
