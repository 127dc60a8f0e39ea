"""Image sets stored as arrays: CIFAR-10/100 (binary or pickled), MNIST-style idx files, .npz, scikit-learn's digits."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import re
import struct
import zlib
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import MixerError
from .bounds import BoundedReader, Bounds
from .image_source import Found, array_part, check_labels
from .inventory import Inventory
from .packed import BAD_ZIP
from .trees import Tree

if TYPE_CHECKING:
    from numpy import ndarray


CIFAR_FILE = re.compile(
    r"(data_batch_[1-5]|test_batch|train|test)(\.bin)?|batches\.meta(\.txt)?|meta|fine_label_names\.txt"
)
CIFAR_MAIN = {"data_batch_1", "data_batch_1.bin", "train", "train.bin"}  # one of these must be there
IDX_FILE = re.compile(r"(train|t10k|test)-(images|labels)[.-]idx\d-ubyte(\.gz)?")
NPZ_KEYS = (
    ("train", "x_train", "y_train"),
    ("valid", "x_valid", "y_valid"),
    ("test", "x_test", "y_test"),
    ("all", "images", "labels"),
)
NPZ_USED = {"classes", *(name for _, x, y in NPZ_KEYS for name in (x, y))}
SAFE = {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
SAFE |= {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")} | {
    (f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")
}


class _SafeUnpickler(pickle.Unpickler):
    """An unpickler of arrays, lists and dicts of plain values that refuses to import anything else."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in SAFE:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return super().find_class(module, name)


def unpickle(raw: bytes, name: str) -> dict[str, Any]:
    """Load a pickled dict as CIFAR's authors wrote it, with keys as str."""
    try:
        value = _SafeUnpickler(io.BytesIO(raw), encoding="bytes").load()
        return {k.decode() if isinstance(k, bytes) else str(k): v for k, v in value.items()}
    except Exception as why:  # a broken pickle may raise anything
        raise MixerError(f"images: {name} is not a CIFAR pickle ({why}).") from why


def read_cifar(source: Path | Tree) -> Found:
    """Read CIFAR-10 or CIFAR-100 from a folder or an archive.

    Both the official binary files and the official pickles are supported.
    """
    path = source if isinstance(source, Path) else source.root
    files = _folder_files(source) if isinstance(source, Path) else _tree_files(source)
    if files.keys() & {"train", "train.bin"}:
        groups, label, width, classes = {"train": ["train"], "test": ["test"]}, "fine_labels", 2, 100
    else:
        groups, label, width, classes = (
            {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]},
            "labels",
            1,
            10,
        )
    binary = any(name.endswith(".bin") for name in files)
    parts = {}
    for part, stems in groups.items():
        images, labels = [], []
        for stem in stems:
            name = f"{stem}.bin" if binary else stem
            if name not in files:
                raise MixerError(f"images: {path} has no {name}; it has {', '.join(sorted(files)) or 'no CIFAR file'}.")
            x, y = (
                _cifar_binary(files[name], width, f"{path}/{name}")
                if binary
                else _cifar_pickle(files[name], label, f"{path}/{name}")
            )
            check_labels(y, classes, f"{path}/{name}")
            images.append(x)
            labels += y
        parts[part] = array_part(torch.cat(images), labels)
    return Found(_cifar_names(files, classes), 3, parts)


def _folder_files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and CIFAR_FILE.fullmatch(p.name)}


def _tree_files(tree: Tree) -> dict[str, bytes]:
    """Read the files of CIFAR in an archive, in whatever folder."""
    files: dict[str, bytes] = {}
    for inner in tree.names:
        name = inner.split("/")[-1]
        if CIFAR_FILE.fullmatch(name):
            if name in files:
                raise MixerError(f"images: {tree.root} contains {name} twice; pack it again.")
            files[name] = tree.bytes(inner)
    return files


def _cifar_binary(raw: bytes, width: int, name: str) -> tuple[Tensor, list[int]]:
    record = width + 3072
    if not raw or len(raw) % record:
        raise MixerError(
            f"images: {name} has {len(raw)} bytes, not a multiple of {record} (a label and 3 x 32 x 32 bytes); "
            + "it is truncated or not CIFAR."
        )
    rows = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, record)
    return rows[:, width:].reshape(-1, 3, 32, 32), rows[:, width - 1].tolist()


def _cifar_pickle(raw: bytes, label: str, name: str) -> tuple[Tensor, list[int]]:
    import numpy

    content = unpickle(raw, name)
    data, labels = content.get("data"), content.get(label)
    if (
        not isinstance(data, numpy.ndarray)
        or data.dtype != numpy.uint8
        or data.ndim != 2
        or data.shape[1] != 3072
        or not isinstance(labels, list)
    ):
        raise MixerError(
            f"images: {name} must contain 'data' (N, 3072) uint8 and a list {label!r}; "
            + f"it contains {', '.join(content)}."
        )
    if len(labels) != len(data):
        raise MixerError(f"images: {name} has {len(data)} images but {len(labels)} labels.")
    return torch.from_numpy(data.copy()).view(-1, 3, 32, 32), [int(y) for y in labels]


def _cifar_names(files: dict[str, bytes], classes: int) -> tuple[str, ...]:
    names: list[str] = []
    for file, key in (("batches.meta", "label_names"), ("meta", "fine_label_names")):
        if file in files:
            names = [n.decode() if isinstance(n, bytes) else str(n) for n in unpickle(files[file], file).get(key, [])]
    for file in ("batches.meta.txt", "fine_label_names.txt"):
        if file in files:
            names = files[file].decode().split()
    return tuple(names) if len(names) == classes else number_names(classes)


def number_names(classes: int) -> tuple[str, ...]:
    """Return numbers as the names of unnamed classes."""
    return tuple(str(i) for i in range(classes))


def read_idx(folder: Path, bounds: Bounds) -> Found:
    """Read the four files of MNIST and similar sets.

    They are called train-images-idx3-ubyte and so on; each may be a .gz.
    """
    files = {
        match[1].replace("t10k", "test") + match[2]: p
        for p in sorted(folder.iterdir())
        if p.is_file() and (match := IDX_FILE.fullmatch(p.name))
    }
    arrays = {}
    for part in ("train", "test"):
        for kind in ("images", "labels"):
            if part + kind not in files:
                raise MixerError(
                    f"images: {folder} has no idx file {part.replace('test', 't10k')}-{kind} beside the others."
                )
        images, labels = idx(files[part + "images"], 3, bounds), idx(files[part + "labels"], 1, bounds).tolist()
        if len(images) != len(labels):
            raise MixerError(
                f"images: {files[part + 'images']} has {len(images)} images, but {files[part + 'labels']} has "
                + f"{len(labels)} labels."
            )
        arrays[part] = array_part(images.unsqueeze(1), labels)
    classes = 1 + max(y for part in arrays.values() for y in part.labels)
    return Found(number_names(classes), 1, arrays)


def idx(file: Path, dims: int, bounds: Bounds) -> Tensor:
    """Read an idx file of bytes.

    It holds 0, 0, 8 (unsigned byte), the number of dimensions, each dimension as a big-endian int32, then the values.
    """
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as f:
            raw = BoundedReader(f, file, bounds).read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as why:
        raise MixerError(f"images: {file} is not a readable gzip file ({why}).") from why
    start = 4 + 4 * dims
    if raw[:4] != bytes([0, 0, 8, dims]) or len(raw) < start:
        raise MixerError(
            f"images: {file} is not an idx file of bytes with {dims} dimensions; "
            + f"it begins with {raw[:4].hex(' ') or 'nothing'}."
        )
    shape = struct.unpack(f">{dims}i", raw[4:start])
    if min(shape) < 1 or len(raw) - start != math.prod(shape):
        raise MixerError(
            f"images: {file} announces {' x '.join(map(str, shape))} bytes but has {len(raw) - start}; "
            + "it is truncated or damaged."
        )
    return torch.frombuffer(bytearray(raw[start:]), dtype=torch.uint8).view(shape)


def read_npz(file: Path, bounds: Bounds) -> Found:
    """Read x_train, y_train, x_test, y_test (and x_valid, y_valid) as written by Keras, or images and labels.

    Class names may be in ``classes``.
    """
    import numpy

    read = Inventory(str(file))
    try:
        with numpy.load(file, allow_pickle=False) as content:
            names = [k for k in content.files if k in NPZ_USED]
            if other := [k for k in content.files if k not in NPZ_USED]:
                read.leave("arrays of other names", *other)
            bounds.check(
                file,
                sum(info.file_size for info in content.zip.infolist() if info.filename.removesuffix(".npy") in names),
            )
            arrays = {k: content[k] for k in names}
    except MixerError:
        raise
    except (
        ValueError,
        TypeError,
        AttributeError,
        MemoryError,
        OSError,
        EOFError,
        KeyError,
        SyntaxError,
        TokenError,
        *BAD_ZIP,
    ) as why:
        raise MixerError(f"images: {file} is not a readable .npz of arrays ({' '.join(str(why).split())}).") from why
    pairs = {part: (arrays[x], arrays[y], x, y) for part, x, y in NPZ_KEYS if x in arrays and y in arrays}
    used = {"classes", *(name for pair in pairs.values() for name in pair[2:])}
    if alone := [name for name in arrays if name not in used]:
        read.leave("arrays without their partner", *alone)
    if not pairs.keys() & {"train", "all"} or {"train", "all"} <= pairs.keys():
        raise MixerError(
            f"images: {file} must contain x_train, y_train (x_test, y_test), or images and labels; "
            + f"it contains {', '.join(arrays) or 'nothing'}."
        )
    if set(pairs) == {"train"}:
        pairs = {"all": pairs["train"]}
    images = {part: npz_images(a, f"{file}: {x}") for part, (a, _, x, _) in pairs.items()}
    labels = {part: npz_labels(b, len(a), f"{file}: {y}") for part, (a, b, _, y) in pairs.items()}
    if len(shapes := {tuple(a.shape[1:]) for a in images.values()}) > 1:
        raise MixerError(
            f"images: {file} has images of the shapes {' and '.join(map(str, sorted(shapes)))}; "
            + "all must have the same shape."
        )
    top = max(map(max, labels.values()))
    if "classes" not in arrays and top >= max(1000, sum(map(len, labels.values()))):
        raise MixerError(f"images: {file}: label {top} is out of range for so few images; number the classes from 0.")
    classes = tuple(str(c) for c in arrays["classes"].ravel()) if "classes" in arrays else number_names(top + 1)
    for part, (_, _, _, y) in pairs.items():
        check_labels(labels[part], len(classes), f"{file}: {y}")
    return Found(classes, shapes.pop()[0], {part: array_part(images[part], labels[part]) for part in pairs}, read)


def npz_images(array: ndarray, name: str) -> Tensor:
    """Convert an array (N, H, W), (N, H, W, C) or (N, C, H, W) to uint8 (N, C, H, W).

    16-bit values are scaled to 8 bits.
    """
    import numpy

    if array.dtype not in (numpy.uint8, numpy.uint16):
        raise MixerError(
            f"images: {name} has dtype {array.dtype}; images must be uint8 (0..255) or uint16 (0..65535); "
            + "scale and convert the array."
        )
    if array.dtype == numpy.uint16:
        array = ((array.astype(numpy.int64) + 128) // 257).astype(numpy.uint8)
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[-1] in (1, 3):
        array = array.transpose(0, 3, 1, 2)
    if array.ndim != 4 or array.shape[1] not in (1, 3) or 0 in array.shape:
        raise MixerError(
            f"images: {name} has shape {tuple(array.shape)}; images must be (N, H, W), (N, H, W, C) or (N, C, H, W) "
            + "with 1 or 3 channels."
        )
    return torch.from_numpy(numpy.ascontiguousarray(array))


def npz_labels(array: ndarray, images: int, name: str) -> list[int]:
    """Convert an array (N,) or (N, 1) to N class numbers."""
    if array.dtype.kind not in "iu" or array.size != images or array.ndim > 2:
        raise MixerError(
            f"images: {name} has shape {tuple(array.shape)} and dtype {array.dtype}; "
            + f"{images} images need ({images},) integers."
        )
    labels = array.ravel().tolist()
    if min(labels) < 0:
        raise MixerError(
            f"images: {name}: label {min(labels)} of image {labels.index(min(labels))} is out of range; "
            + "classes are numbered from 0."
        )
    return labels


def read_digits() -> Found:
    """Read scikit-learn's 1,797 handwritten digits, 8x8.

    Their 17 grey levels become 0..255 (levels * 255 / 16, rounded).
    """
    sklearn_version()
    from sklearn.datasets import load_digits

    content: Any = load_digits()
    levels = torch.from_numpy(content.images)
    images = (levels * 255 / 16).round().to(torch.uint8).unsqueeze(1)
    return Found(number_names(10), 1, {"all": array_part(images, [int(y) for y in content.target])})


def sklearn_version() -> str:
    try:
        import sklearn
    except ImportError as why:
        raise MixerError(
            "images: the set 'digits' comes with scikit-learn; "
            + "pip install 'tokenmix[vision]', or give a path of images."
        ) from why
    return sklearn.__version__
