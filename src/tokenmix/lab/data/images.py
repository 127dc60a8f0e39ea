"""Image sets by name or path, divided into train, valid and test, decoded once into a memory-mapped cache."""

from __future__ import annotations

import difflib
import hashlib
import os
import tarfile
import warnings
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import MixerError
from ...types import Record
from .bounds import MAX_PIXELS, Bounds, check_regular
from .cache import cache_dir
from .corpus import SPLITS, check_split
from .image_archives import CIFAR_FILE, CIFAR_MAIN, IDX_FILE, number_names, read_cifar, read_digits, read_idx, read_npz
from .image_cache import Prepared, load_prepared
from .image_downloads import fetch
from .image_files import read_tree
from .image_source import Found, check_labels, pil_to_tensor, read_image, tensor_to_pil
from .inventory import Inventory
from .trees import folder_tree, tar_tree, zip_tree

if TYPE_CHECKING:
    from PIL.Image import Image


IMAGE_SETS = {
    "digits": "1,797 handwritten digits, 8x8 grey, 10 classes; comes with scikit-learn, no download",
    "mnist": "70,000 handwritten digits, 28x28 grey, 10 classes (LeCun et al. 1998)",
    "fashion_mnist": "70,000 pieces of clothing, 28x28 grey, 10 classes (Xiao et al. 2017)",
    "cifar10": "60,000 photographs, 32x32 colour, 10 classes (Krizhevsky 2009)",
    "cifar100": "60,000 photographs, 32x32 colour, 100 classes (Krizhevsky 2009)",
    "tiny_imagenet": "110,000 photographs, 64x64 colour, 200 classes of ImageNet",
}
CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
CLASSES = {"mnist": number_names(10), "fashion_mnist": CLOTHES}
TARS = (".gz", ".tgz", ".tar", ".xz", ".txz", ".bz2", ".tbz2", ".tbz")
COUNTS = {"digits": 10, "mnist": 10, "fashion_mnist": 10, "cifar10": 10, "cifar100": 100, "tiny_imagenet": 200}


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """One split of a set. Images of one size are in ``pixels``; others are in ``files`` and decoded on access.

    Args:
        labels: (N,) int64.
        pixels: uint8 (N, C, H, W), a map of a file, read-only by convention, or None.
    """

    name: str
    labels: Tensor
    channels: int
    pixels: Tensor | None = field(default=None, repr=False)
    files: tuple[Path, ...] = field(default=(), repr=False)
    max_pixels: int = field(default=MAX_PIXELS, repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, places: list[int]) -> ImageSplit:
        """Return the images at these places, in this order."""
        pixels = None if self.pixels is None else self.pixels[places]
        files = tuple(self.files[i] for i in places) if self.files else ()
        return replace(self, labels=self.labels[places], pixels=pixels, files=files)

    @property
    def size(self) -> tuple[int, int] | None:
        """Return (H, W), or None if the images are files of different sizes."""
        return None if self.pixels is None else (self.pixels.shape[2], self.pixels.shape[3])

    def image(self, i: int) -> Tensor:
        """Return image i, uint8 (C, H, W)."""
        return self.pixels[i].clone() if self.pixels is not None else pil_to_tensor(self.pil(i))

    def pil(self, i: int) -> Image:
        """Return image i as a PIL image of mode "L" or "RGB"."""
        return (
            tensor_to_pil(self.pixels[i])
            if self.pixels is not None
            else read_image(self.files[i], self.channels, max_pixels=self.max_pixels)
        )


@dataclass(frozen=True, eq=False)
class ImageData:
    """A set of images with its three splits.

    Args:
        fingerprint: sha256 of pixels, labels, classes and splits; for images of different sizes, the bytes of the files
            take the place of pixels.
        skipped: files left out because they could not be read.
        inventory: what was found and what was left out.
    """

    name: str
    path: str
    classes: tuple[str, ...]
    channels: int
    fingerprint: str
    skipped: tuple[str, ...]
    splits: dict[str, ImageSplit] = field(repr=False)
    inventory: Inventory | None = field(default=None, repr=False)

    def split(self, name: str) -> ImageSplit:
        check_split(f"images {self.name}", name, self.splits)
        return self.splits[name]

    def describe(self) -> Record:
        """Return what env.json records."""
        return {
            "name": self.name,
            "images": [len(self.splits[s]) for s in SPLITS],
            "classes": len(self.classes),
            "sha256": self.fingerprint,
        }


def shrink_images(data: ImageData, side: int) -> ImageData:
    """Average the images of a set over squares of side x side pixels, rounded to whole values; kept in memory.

    Raises:
        MixerError: for files of different sizes, and for images whose sides are no multiples of ``side``.
    """
    splits = {name: _shrink_split(data.name, split, side) for name, split in data.splits.items()}
    print_of = hashlib.sha256(f"{data.fingerprint} shrunk by {side}".encode()).hexdigest()
    return replace(data, fingerprint=print_of, splits=splits)


def _shrink_split(name: str, split: ImageSplit, side: int) -> ImageSplit:
    if split.pixels is None or split.size is None:
        raise MixerError(f"shrink: {name} has images of different sizes; shrinking takes images of one size.")
    if any(n % side for n in split.size):
        sides = " x ".join(map(str, split.size))
        raise MixerError(
            f"shrink: the images of {name} are {sides}, no multiples of {side}; choose another data.shrink."
        )
    parts = [F.avg_pool2d(part.float(), side).round_().to(torch.uint8) for part in split.pixels.split(1024)]
    return replace(split, pixels=torch.cat(parts) if parts else split.pixels)


def open_images(
    source: str,
    *,
    path: str | None = None,
    valid: float | None = None,
    download: bool = True,
    skip_bad_files: bool = False,
    channels: int | None = None,
    layout: str | None = None,
    bounds: Bounds = Bounds(),
) -> ImageData:
    """Open a set of images; the first time, it is prepared in the user's cache.

    Args:
        source: a name from ``IMAGE_SETS``, or the path of a folder of images (CLASS/*.jpg, CLASS/train/*.jpg, or
            train/CLASS/*.jpg beside val/CLASS/*.jpg), of an ``.npz``, of the files of CIFAR or MNIST, or of a ``.zip``
            or ``.tar`` (also packed) of images.
        path: for a name, a local copy to read instead of downloading.
        valid: how much of train is held out for validation, a fraction below 1 or a number of images, drawn evenly from
            the classes (default 0.1, at least one per class). 0 holds nothing out: valid is then the test split. In a
            set with its own validation images but no test images, these are both valid and test; if ``valid`` is given,
            valid is held out of train instead. In a set without parts, test is held out as well, with as many images as
            valid.
        download: whether a named set may be downloaded.
        skip_bad_files: leave out files that cannot be read, with a warning, instead of refusing the set.
        channels: 1 or 3, to convert to; default those of the set, 3 for image files.
        layout: "classes": the first folders are classes, whatever their names; "splits": they are splits, and others
            are left out; None: told by the names, and refused where these can be understood in two ways.
        bounds: limits on what is read: ``max_unpacked`` bytes from an archive, ``max_pixels`` from an image file.

    Raises:
        MixerError: in one line that names the file or the option.
    """
    if channels not in (None, 1, 3):
        raise MixerError(f"open_images: channels={channels} must be 1 (grey) or 3 (colour).")
    if valid is not None and not (0 <= valid < 1 or (valid >= 1 and float(valid).is_integer())):
        raise MixerError(f"open_images: valid={valid} must be a fraction in [0, 1) or an integer number of images.")
    file = _locate(source, path, download)
    name = source if source in IMAGE_SETS else _stem(file)
    options = {
        "name": source if source in IMAGE_SETS else "",
        "valid": valid,
        "channels": channels,
        "skip": skip_bad_files,
        "layout": layout,
    }
    ready = load_prepared(file, name, options, lambda: _read(source, file, layout, bounds))
    if ready.skipped:
        total = len(ready.labels) + len(ready.skipped)
        warnings.warn(
            f"images: {len(ready.skipped)} of {total} files of {name} cannot be read and are left out; "
            + f"the first is {ready.skipped[0]}",
            stacklevel=2,
        )
    return _open_prepared(name, file, ready, bounds)


def _stem(file: Path | None) -> str:
    return "images" if file is None else file.resolve().name.split(".")[0]


def _locate(source: str, path: str | None, download: bool) -> Path | None:
    """Return the file or folder to read; None for the digits, which need none."""
    if source not in IMAGE_SETS:
        if path is not None:
            raise MixerError(
                f"data.source={source!r} is not the name of an image set, so data.path={path!r} cannot be used; "
                + f"{_names(source)}"
            )
        given = Path(source).expanduser()
        if not given.exists():
            raise MixerError(f"images: there is no file, folder or image set {source!r}; {_names(source)}")
        if not given.is_dir():
            check_regular("images", given)
        return given
    if path is None:
        return None if source == "digits" else fetch(source, download)
    if source == "digits":
        raise MixerError(
            f"data.path={path!r}: the set 'digits' comes with scikit-learn and reads no file; "
            + "give a path of your own as data.source."
        )
    if not Path(path).expanduser().exists():
        raise MixerError(f"images: there is no file or folder {path!r}; give the official files of {source}.")
    if not Path(path).expanduser().is_dir():
        check_regular("images", Path(path).expanduser())
    return Path(path).expanduser()


def _names(source: str) -> str:
    near = difflib.get_close_matches(source, IMAGE_SETS, 1)
    return "".join(f"did you mean {n!r}? " for n in near) + f"give a path, or one of {', '.join(IMAGE_SETS)}."


def _read(source: str, file: Path | None, layout: str | None, bounds: Bounds) -> Found:
    """Read a file or folder by what it contains, then check its classes against those of the named set."""
    found = read_digits() if file is None else _read_path(file, layout, bounds)
    if source not in IMAGE_SETS:
        return found
    expected = COUNTS[source]
    for part, content in found.parts.items():
        check_labels(content.labels, expected, f"{file} ({part}), read as {source}")
    if len(found.classes) != expected and not all(c.isdigit() for c in found.classes):
        raise MixerError(
            f"images: {file} has {len(found.classes)} classes, but {source} has {expected}; "
            + "for a set of your own give its path as data.source."
        )
    names = CLASSES.get(source) or (found.classes if len(found.classes) == expected else number_names(expected))
    return Found(names, found.channels, found.parts, found.inventory)


def _read_path(file: Path, layout: str | None, bounds: Bounds) -> Found:
    try:
        if file.is_dir():
            return _read_folder(file, layout, bounds)
        if IDX_FILE.fullmatch(file.name):
            return read_idx(file.parent, bounds)
        if CIFAR_FILE.fullmatch(file.name):
            return read_cifar(file.parent)
        if file.suffix.lower() == ".npz":
            return read_npz(file, bounds)
        if file.suffix.lower() == ".zip" or zipfile.is_zipfile(file):
            return read_tree(zip_tree(file, bounds), layout)
        if file.suffix.lower() in TARS or (os.path.getsize(file) and tarfile.is_tarfile(file)):
            tree = tar_tree(file, bounds)
            cifar = CIFAR_MAIN & {name.split("/")[-1] for name in tree.names}
            return read_cifar(tree) if cifar else read_tree(tree, layout)
    except OSError as why:
        if why.filename is None or cache_dir() in Path(why.filename).parents:
            raise
        raise MixerError(f"images: {why.filename} cannot be read ({why.strerror}).") from why
    raise MixerError(
        f"images: {file} is not a set of images; give a folder of images, an .npz, a .zip or .tar of images, or the "
        + "files of CIFAR or MNIST."
    )


def _read_folder(file: Path, layout: str | None, bounds: Bounds) -> Found:
    inner = [p for p in file.iterdir() if p.is_dir() and p.name.startswith("cifar-10")]
    folder = inner[0] if len(inner) == 1 else file
    names = [p.name for p in folder.iterdir() if p.is_file()]
    if CIFAR_MAIN & set(names):
        return read_cifar(folder)
    return (
        read_idx(folder, bounds)
        if any(IDX_FILE.fullmatch(n) for n in names)
        else read_tree(folder_tree(folder, bounds), layout)
    )


def _open_prepared(name: str, file: Path | None, ready: Prepared, bounds: Bounds) -> ImageData:
    labels = torch.tensor(ready.labels, dtype=torch.int64)
    pixels = ready.pixels()
    splits = {}
    for split, (start, end) in ready.splits.items():
        files = tuple(Path(f) for f in ready.files[start:end])
        splits[split] = ImageSplit(
            split,
            labels[start:end],
            ready.channels,
            None if pixels is None else pixels[start:end],
            files,
            bounds.max_pixels,
        )
    return ImageData(
        name,
        "" if file is None else str(file),
        ready.classes,
        ready.channels,
        ready.sha256,
        ready.skipped,
        splits,
        Inventory.from_json(ready.inventory),
    )
