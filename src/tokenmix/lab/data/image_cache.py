"""Image sets in the user's cache: divided into splits and checked.

If all images have one size, they are decoded into one file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import MixerError
from ...system.files import readable_name
from ...types import Options, Record
from .bounds import walk_links
from .cache import cache_dir, cache_write_error, map_file, read_note, sha256_of, write_chunks, write_note
from .class_folders import tell_classes
from .image_archives import CIFAR_FILE, IDX_FILE, sklearn_version
from .image_source import LOOKAHEAD, Found, ImagePart, in_threads
from .inventory import Inventory
from .progress import with_progress
from .sampler import mix64

FORMAT = 3  # version of the cache format
CACHE_BYTES = 8 << 30  # image files that decode to more than this are not decoded into one file
CHECK_BYTES = 2 << 30  # files up to this total are all decoded once to find bad ones; beyond, only with skip_bad_files
WAITING_BYTES = 256 << 20  # limit on decoded images that wait for their turn
DEFAULT_VALID = 0.1
ImageRef = tuple[ImagePart, int]  # a part and the index of an image in it


@dataclass(frozen=True)
class Prepared:
    """The description of a cached set, written beside the pixels.

    Attributes:
        labels: class of each image, in the order train, valid, test.
        splits: start and end of each split in that order.
        shape: (C, H, W); empty if the images remain in files.
        files: paths of the image files, if they remain in files.
        contents: sha256 of the bytes of these files.
        skipped: names of the files left out because they could not be read.
        sha256: result of ``fingerprint`` when the set was prepared.
        file: path of the file of pixels.
        inventory: what was found and left out, as JSON.
    """

    classes: tuple[str, ...]
    channels: int
    labels: list[int]
    splits: dict[str, tuple[int, int]]
    shape: tuple[int, ...]
    files: list[str]
    contents: str
    skipped: tuple[str, ...]
    sha256: str
    file: str
    inventory: Record

    def fingerprint(self) -> str:
        """Compute the sha256 of pixels, labels, splits, classes and shape.

        Pixels are read as they are on disk now. For images of different sizes, the bytes of the files take their place,
        as they were when the set was prepared: a change of a file gives the set another name in the cache.
        """
        what = sha256_of(Path(self.file)) if self.shape else self.contents
        return hashlib.sha256(
            json.dumps([what, self.labels, self.splits, self.classes, self.shape]).encode()
        ).hexdigest()

    def pixels(self) -> Tensor | None:
        """Map the pixels into memory, uint8 (N, C, H, W); None if the images remain in files."""
        if not self.shape:
            return None
        n = len(self.labels)
        return map_file(Path(self.file), n * math.prod(self.shape)).view(n, *self.shape)


class _SizesDiffer(Exception):
    """Signal that the images do not fit into one array."""


def load_prepared(file: Path | None, name: str, options: Options, read: Callable[[], Found]) -> Prepared:
    """Return the set from the cache, after reading it and writing it there if necessary.

    That is so the first time, and when a file, its time of change or an option is different.
    """
    key = hashlib.sha256(json.dumps([FORMAT, options, source_state(file)]).encode()).hexdigest()[:16]
    base = cache_dir() / "images" / f"{readable_name(name)}-{key}"
    note, pixels = base.with_name(base.name + ".json"), base.with_name(base.name + ".pixels")
    if note.exists():
        ready = _read_if_intact(note, pixels)
        if ready is not None:
            return ready
        warnings.warn(
            f"images: the cached copy {base}.* is damaged (it has changed since it was written) and is created again.",
            stacklevel=3,
        )
    ready = _prepare(read(), pixels, options, name)
    try:
        write_note(note, asdict(ready))
    except OSError as why:
        raise cache_write_error("images", note, why) from why
    return ready


def _read_if_intact(note: Path, pixels: Path) -> Prepared | None:
    """Read the set from the cache; None unless note, pixels and fingerprint are as they were written."""
    content = read_note(note)
    if content is None:
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        splits = {k: (a, b) for k, (a, b) in content["splits"].items()}
        tuples = {k: tuple(content[k]) for k in ("classes", "skipped", "shape")}
        ready = Prepared(**{**content, **tuples, "splits": splits, "file": str(pixels)})
        if ready.fingerprint() == ready.sha256:
            return ready
    return None


def source_state(file: Path | None) -> list[object]:
    """Return the names, sizes and times of files, by which a change to them shows."""
    if file is None:
        return ["digits", sklearn_version()]
    if file.is_file():
        with_siblings = CIFAR_FILE.fullmatch(file.name) or IDX_FILE.fullmatch(file.name)
        return [str(file.resolve())] + [_stat(p) for p in (sorted(file.parent.iterdir()) if with_siblings else [file])]
    found = []
    for where, folders, names in walk_links(file):
        folders.sort()
        here = os.path.relpath(where, file)
        found += [[here, *_stat(os.path.join(where, n))] for n in sorted(names)]
    return [str(file.resolve()), found]


def _stat(file: Path | str) -> list[Any]:
    name = os.path.basename(file)
    try:
        stat = os.stat(file)
    except OSError:  # a dangling link, reported when it is read
        return [name, -1, -1]
    return [name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]  # no user can set ctime back


def _prepare(found: Found, file: Path, options: Options, name: str) -> Prepared:
    channels = options["channels"] or found.channels
    order, splits = divide(found, options["valid"], name)
    files = [part.files[i] for part, i in order if part.files]
    small = sum(_stat(f)[1] for f in files) <= CHECK_BYTES
    shape: tuple[int, ...] = ()
    kept = list(range(len(order)))
    skipped: list[str] = []
    try:
        if not small and not options["skip"]:
            raise _SizesDiffer
        kept, skipped, shape = _write_pixels(file, order, channels, options["skip"], name)
    except _SizesDiffer as why:
        if len(files) != len(order):
            raise MixerError(
                f"images: {name} has images of different sizes, which are supported in folders only; "
                + "unpack it and give the folder."
            ) from why
        if small or options["skip"]:
            kept, skipped = _readable_images(order, channels, options["skip"], name)
    if not kept:
        raise MixerError(f"images: none of the files of {name} can be read; the first is {skipped[0]}.")
    position = {s: (bisect_left(kept, a), bisect_left(kept, b)) for s, (a, b) in splits.items()}
    labels = [order[k][0].labels[order[k][1]] for k in kept]
    _check_splits(name, position)
    left = [] if shape else [str(order[k][0].files[order[k][1]]) for k in kept]
    ready = Prepared(
        found.classes,
        channels,
        labels,
        position,
        shape,
        left,
        "" if shape else _contents(left, name),
        tuple(skipped),
        "",
        str(file),
        _inventory(found, labels, position, skipped, name).to_json(),
    )
    return replace(ready, sha256=ready.fingerprint())


def _inventory(
    found: Found, labels: list[int], splits: dict[str, tuple[int, int]], skipped: list[str], name: str
) -> Inventory:
    """Complete what was found by the images, their classes and splits."""
    read = Inventory(name) if found.inventory is None else found.inventory
    read.count("images", len(labels))
    read.tell_counts("splits", {split: b - a for split, (a, b) in splits.items()})
    if splits["valid"] == splits["test"]:
        read.tell("note", "valid and test are the same images")
    tell_classes(read, found.classes, labels)
    if skipped:
        read.leave("unreadable", *skipped)
    return read


def _contents(files: list[str], name: str) -> str:
    """Compute a sha256 over the bytes of files."""
    digest = hashlib.sha256()
    for each in with_progress(in_threads(_sha256_of, files), len(files), f"hashing the files of {name}"):
        digest.update(each.encode())
    return digest.hexdigest()


def _sha256_of(file: str) -> str:
    try:
        return sha256_of(Path(file))
    except OSError as why:
        raise MixerError(f"images: {file} cannot be opened ({why.strerror}).") from why


def _check_splits(name: str, splits: dict[str, tuple[int, int]]) -> None:
    empty = [split for split, (a, b) in splits.items() if a == b]
    if empty:
        raise MixerError(
            f"images: {name} leaves no image for the split {empty[0]!r}; give more images, or another `valid`."
        )


def _load(ref: ImageRef, channels: int) -> Tensor | MixerError:
    try:
        return ref[0].load(ref[1], channels)
    except MixerError as why:
        return why


def _images(order: list[ImageRef], channels: int) -> Iterator[Tensor | MixerError | None]:
    """Yield the images in order; for a file, None if its shape is not that of the first.

    The size of decoded images that wait for their turn is bounded.
    """
    if not order[0][0].files:
        yield from (_load(ref, channels) for ref in order)
        return
    first = _load(order[0], channels)
    yield first

    def same(ref: ImageRef) -> Tensor | MixerError | None:
        image = _load(ref, channels)
        return (
            image
            if isinstance(image, MixerError) or isinstance(first, MixerError) or image.shape == first.shape
            else None
        )

    yield from in_threads(
        same, order[1:], 1 if isinstance(first, MixerError) else max(1, min(LOOKAHEAD, WAITING_BYTES // first.numel()))
    )


def _refuse(why: MixerError, skip: bool) -> None:
    if not skip:
        raise MixerError(
            f"{str(why).rstrip('.')}; repair or remove it, or leave out unreadable files with skip_bad_files=True "
            + "(--skip-bad-files)."
        )


def _write_pixels(
    file: Path, order: list[ImageRef], channels: int, skip: bool, name: str
) -> tuple[list[int], list[str], tuple[int, ...]]:
    """Decode everything into one file. Return the indices of its images, the files left out and (C, H, W)."""
    kept: list[int] = []
    skipped: list[str] = []
    shapes: set[tuple[int, ...]] = set()

    def chunks() -> Iterator[bytes]:
        images = with_progress(_images(order, channels), len(order), f"reading the images of {name}")
        for k, image in enumerate(images):
            if isinstance(image, MixerError):
                _refuse(image, skip)
                skipped.append(order[k][0].names[order[k][1]])
                continue
            if image is None:
                raise _SizesDiffer
            shapes.add(tuple(image.shape))
            if len(shapes) > 1 or (order[k][0].files and image.numel() * len(order) > CACHE_BYTES):
                raise _SizesDiffer
            kept.append(k)
            yield image.contiguous().numpy().tobytes()

    try:
        write_chunks(file, chunks())
    except OSError as why:
        raise cache_write_error("images", file, why) from why
    return kept, skipped, shapes.pop() if shapes else ()


def _readable_images(order: list[ImageRef], channels: int, skip: bool, name: str) -> tuple[list[int], list[str]]:
    """Decode everything once to find out which files can be read. Return their indices and the files left out."""
    kept, skipped = [], []

    def wrong(ref: ImageRef) -> MixerError | None:
        image = _load(ref, channels)
        return image if isinstance(image, MixerError) else None

    checked = with_progress(in_threads(wrong, order), len(order), f"checking the images of {name}")
    for k, why in enumerate(checked):
        if why is not None:
            _refuse(why, skip)
            skipped.append(order[k][0].names[order[k][1]])
        else:
            kept.append(k)
    return kept, skipped


def divide(found: Found, valid: float | None, name: str) -> tuple[list[ImageRef], dict[str, tuple[int, int]]]:
    """Order the images train, valid, test, and return them with start and end of each split.

    The rules are those of ``open_images``.
    """
    parts = {part: [(content, i) for i in range(len(content.labels))] for part, content in found.parts.items()}
    amount = DEFAULT_VALID if valid is None else valid
    if "all" in parts:
        if amount == 0:
            raise MixerError(
                f"images: {name} has no validation and no test images of its own; "
                + "valid=0 would leave nothing to score; give a fraction or a number."
            )
        rest, test = hold_out(parts["all"], amount, name)
        train, held = hold_out(rest, len(test), name)
    elif "valid" in parts and "test" in parts:
        if valid:
            raise MixerError(
                f"images: {name} has its own validation split of {len(parts['valid'])} images; "
                + f"leave valid={valid:g} out."
            )
        train, held, test = parts["train"], parts["valid"], parts["test"]
    elif "valid" in parts:
        train, held = hold_out(parts["train"], amount, name) if valid else (parts["train"], [])
        test = parts["valid"]
    else:
        train, held = hold_out(parts["train"], amount, name) if amount else (parts["train"], [])
        test = parts["test"]
    a, b, c = len(train), len(train) + len(held), len(train) + len(held) + len(test)
    return train + held + test, {"train": (0, a), "valid": (a, b) if held else (b, c), "test": (b, c)}


def hold_out(refs: list[ImageRef], amount: float, name: str) -> tuple[list[ImageRef], list[ImageRef]]:
    """Divide images into those that stay and those held out.

    Within a class, the hash of the names decides. The classes are held out in proportion, with at least one image of
    each class that has two or more.
    """
    by_class: dict[int, list[int]] = {}
    for at, (part, i) in enumerate(refs):
        by_class.setdefault(part.labels[i], []).append(at)
    total = round(amount * len(refs)) if amount < 1 else int(amount)
    turn: list[tuple[float, int]] = []
    least = 0
    for members in by_class.values():
        ranked = sorted(members, key=lambda at: _hash(refs[at][0].names[refs[at][1]]))
        turn += [
            (rank / len(ranked), at) for rank, at in enumerate(ranked[:-1])
        ]  # the first of each class come first; its last always stays
        least += len(ranked) > 1
    total = max(total, least)
    if total > len(turn):
        raise MixerError(
            f"images: {name} has {len(refs)} images in {len(by_class)} classes; "
            + f"holding out {total} would not leave one of each class."
        )
    out = {at for _, at in sorted(turn)[:total]}
    return [p for at, p in enumerate(refs) if at not in out], [refs[at] for at in sorted(out)]


def _hash(name: str) -> int:
    """Hash the name of a file without its folder, so that the result is the same on every machine."""
    tail = name.rsplit("/", 1)[-1]
    return mix64(int.from_bytes(hashlib.blake2b(os.fsencode(tail), digest_size=8).digest(), "big"))
