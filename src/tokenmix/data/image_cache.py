"""A set of images as it is kept in the user's cache: divided into splits, checked, and decoded into one file where all images have one size."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import MixerError
from ..system.files import readable_name
from .bounds import walk_links
from .cache import cache_dir, mapped, no_room, read_note, sha256_of, write_chunks, write_note
from .image_archives import CIFAR_FILE, IDX_FILE, sklearn_version
from .image_source import LOOKAHEAD, Found, Part, in_threads
from .sampler import mix64

FORMAT = 2  # counts changes of what is written
CACHE_BYTES = 8 << 30  # sets of files that decode to more stay files
CHECK_BYTES = 2 << 30  # files up to this total are all decoded once, to find the bad ones; beyond only with skip_bad_files
WAITING_BYTES = 256 << 20  # of decoded images that wait for their turn
DEFAULT_VALID = 0.1
Place = tuple[Part, int]  # the image i of a part


@dataclass(frozen=True)
class Prepared:
    """What is written beside the pixels. ``splits`` gives start and end of each split in the order of ``labels``; ``shape`` (C, H, W) is empty for files.

    ``names`` are the relative names of the files, ``sha256`` is what ``fingerprint`` gives.
    """

    classes: tuple[str, ...]
    channels: int
    labels: list[int]
    splits: dict[str, tuple[int, int]]
    shape: tuple[int, ...]
    files: list[str]
    names: list[str]
    skipped: tuple[str, ...]
    sha256: str
    file: str

    def fingerprint(self) -> str:
        """The sha256 of the pixels as they are on disk now (of names and sizes of files, where the images have different sizes), labels, splits and classes."""
        what: Any = sha256_of(Path(self.file)) if self.shape else [[n, os.path.getsize(f)] for n, f in zip(self.names, self.files, strict=True)]
        return hashlib.sha256(json.dumps([what, self.labels, self.splits, self.classes, self.shape]).encode()).hexdigest()

    def pixels(self) -> Tensor | None:
        """uint8 (N, C, H, W), mapped."""
        if not self.shape:
            return None
        n = len(self.labels)
        return mapped(Path(self.file), n * math.prod(self.shape)).view(n, *self.shape)


class _SizesDiffer(Exception):
    """The images do not fit one array."""


def prepared(file: Path | None, name: str, options: dict[str, Any], read: Callable[[], Found]) -> Prepared:
    """The set in the cache, read and written there the first time and when a file, a time of change or an option is another."""
    key = hashlib.sha256(json.dumps([FORMAT, options, _stamp(file)]).encode()).hexdigest()[:16]
    base = cache_dir() / "images" / f"{readable_name(name)}-{key}"
    note, pixels = base.with_name(base.name + ".json"), base.with_name(base.name + ".pixels")
    if note.exists():
        ready = _as_written(note, pixels)
        if ready is not None:
            return ready
        warnings.warn(f"images: the cached copy {base}.* is damaged (it is not what was written) and is made again.", stacklevel=3)
    ready = _prepare(read(), pixels, options, name)
    try:
        write_note(note, asdict(ready))
    except OSError as why:
        raise no_room("images", note, why) from why
    return ready


def _as_written(note: Path, pixels: Path) -> Prepared | None:
    """The set in the cache; None unless the note, the pixels and what belongs to the fingerprint are as they were written."""
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


def _stamp(file: Path | None) -> list[Any]:
    """What tells that files have not changed: names, sizes and times."""
    if file is None:
        return ["digits", sklearn_version()]
    if file.is_file():
        with_siblings = CIFAR_FILE.fullmatch(file.name) or IDX_FILE.fullmatch(file.name)
        return [str(file.resolve())] + [_stat(p) for p in (sorted(file.parent.iterdir()) if with_siblings else [file])]
    found = []
    for where, folders, names in walk_links(file):
        folders.sort()
        found += [[os.path.relpath(where, file), *_stat(Path(where, n))] for n in sorted(names)]
    return [str(file.resolve()), found]


def _stat(file: Path) -> list[Any]:
    try:
        stat = file.stat()
    except OSError:  # a link that leads nowhere: reading it says so
        return [file.name, -1, -1]
    return [file.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]  # ctime: no user can set it back


def _prepare(found: Found, file: Path, options: dict[str, Any], name: str) -> Prepared:
    channels = options["channels"] or found.channels
    order, splits = divide(found, options["valid"], name)
    files = [str(part.files[i].resolve()) for part, i in order if part.files]
    small = sum(os.path.getsize(f) for f in files if os.path.exists(f)) <= CHECK_BYTES
    shape: tuple[int, ...] = ()
    kept = list(range(len(order)))
    skipped: list[str] = []
    try:
        if not small and not options["skip"]:
            raise _SizesDiffer
        kept, skipped, shape = _write_pixels(file, order, channels, options["skip"])
    except _SizesDiffer as why:
        if len(files) != len(order):
            raise MixerError(f"images: {name} holds images of different sizes, which are read from files only; unpack it and give the folder.") from why
        if small or options["skip"]:
            kept, skipped = _readable(order, channels, options["skip"])
    if not kept:
        raise MixerError(f"images: not one file of {name} can be read; the first: {skipped[0]}.")
    position = {split: tuple(sum(k < edge for k in kept) for edge in edges) for split, edges in splits.items()}
    labels = [order[k][0].labels[order[k][1]] for k in kept]
    _check_splits(name, {k: (a, b) for k, (a, b) in position.items()})
    places = [] if shape else [order[k] for k in kept]
    left, names = [str(part.files[i].resolve()) for part, i in places], [part.names[i] for part, i in places]
    ready = Prepared(found.classes, channels, labels, {k: (a, b) for k, (a, b) in position.items()}, shape, left, names, tuple(skipped), "", str(file))
    return replace(ready, sha256=ready.fingerprint())


def _check_splits(name: str, splits: dict[str, tuple[int, int]]) -> None:
    empty = [split for split, (a, b) in splits.items() if a == b]
    if empty:
        raise MixerError(f"images: {name} has no image left for the split {empty[0]!r}; give more images, or another `valid`.")


def _load(place: Place, channels: int) -> Tensor | MixerError:
    try:
        return place[0].load(place[1], channels)
    except MixerError as why:
        return why


def _images(order: list[Place], channels: int) -> Iterator[Tensor | MixerError | None]:
    """The images in order. Of files, None where the shape is not that of the first; what waits for its turn has a bounded size."""
    if not order[0][0].files:
        yield from (_load(place, channels) for place in order)
        return
    first = _load(order[0], channels)
    yield first

    def same(place: Place) -> Tensor | MixerError | None:
        image = _load(place, channels)
        return image if isinstance(image, MixerError) or isinstance(first, MixerError) or image.shape == first.shape else None

    yield from in_threads(same, order[1:], 1 if isinstance(first, MixerError) else max(1, min(LOOKAHEAD, WAITING_BYTES // first.numel())))


def _refuse(why: MixerError, skip: bool) -> None:
    if not skip:
        raise MixerError(f"{str(why).rstrip('.')}; repair or remove it, or leave out what cannot be read with skip_bad_files=True (--skip-bad-files).")


def _write_pixels(file: Path, order: list[Place], channels: int, skip: bool) -> tuple[list[int], list[str], tuple[int, ...]]:
    """Decode everything into one file. Returns which images are in it, the files left out and (C, H, W)."""
    kept: list[int] = []
    skipped: list[str] = []
    shapes: set[tuple[int, ...]] = set()

    def chunks() -> Iterator[bytes]:
        for k, image in enumerate(_images(order, channels)):
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
        raise no_room("images", file, why) from why
    return kept, skipped, shapes.pop() if shapes else ()


def _readable(order: list[Place], channels: int, skip: bool) -> tuple[list[int], list[str]]:
    """Decode everything once and keep nothing but which files can be read."""
    kept, skipped = [], []

    def wrong(place: Place) -> MixerError | None:
        image = _load(place, channels)
        return image if isinstance(image, MixerError) else None

    for k, why in enumerate(in_threads(wrong, order)):
        if why is not None:
            _refuse(why, skip)
            skipped.append(order[k][0].names[order[k][1]])
        else:
            kept.append(k)
    return kept, skipped


def divide(found: Found, valid: float | None, name: str) -> tuple[list[Place], dict[str, tuple[int, int]]]:
    """The images in the order train, valid, test, and where each split begins and ends. See ``open_images`` for the rules."""
    parts = {part: [(content, i) for i in range(len(content.labels))] for part, content in found.parts.items()}
    amount = DEFAULT_VALID if valid is None else valid
    if "all" in parts:
        if amount == 0:
            raise MixerError(f"images: {name} has no validation and no test images of its own; valid=0 leaves nothing to score, give a fraction or a number.")
        rest, test = hold_out(parts["all"], amount, name)
        train, held = hold_out(rest, len(test), name)
    elif "valid" in parts and "test" in parts:
        if valid:
            raise MixerError(f"images: {name} has its own validation split of {len(parts['valid'])} images; leave valid={valid:g} out.")
        train, held, test = parts["train"], parts["valid"], parts["test"]
    elif "valid" in parts:
        train, held = hold_out(parts["train"], amount, name) if valid else (parts["train"], [])
        test = parts["valid"]
    else:
        train, held = hold_out(parts["train"], amount, name) if amount else (parts["train"], [])
        test = parts["test"]
    a, b, c = len(train), len(train) + len(held), len(train) + len(held) + len(test)
    return train + held + test, {"train": (0, a), "valid": (a, b) if held else (b, c), "test": (b, c)}


def hold_out(places: list[Place], amount: float, name: str) -> tuple[list[Place], list[Place]]:
    """Divide into what stays and what is held out: in each class by the hash of the names, the classes in proportion, at least one of each with two images."""
    by_class: dict[int, list[int]] = {}
    for at, (part, i) in enumerate(places):
        by_class.setdefault(part.labels[i], []).append(at)
    total = round(amount * len(places)) if amount < 1 else int(amount)
    turn: list[tuple[float, int]] = []
    least = 0
    for members in by_class.values():
        ranked = sorted(members, key=lambda at: _hash(places[at][0].names[places[at][1]]))
        turn += [(rank / len(ranked), at) for rank, at in enumerate(ranked[:-1])]  # every class's first come first; its last always stays
        least += len(ranked) > 1
    total = max(total, least)
    if total > len(turn):
        raise MixerError(f"images: {name} has {len(places)} images in {len(by_class)} classes; {total} cannot be held out with one of each class staying.")
    out = {at for _, at in sorted(turn)[:total]}
    return [p for at, p in enumerate(places) if at not in out], [places[at] for at in sorted(out)]


def _hash(name: str) -> int:
    """Of the name without the folder of the machine it lies on."""
    tail = name.rsplit("/", 1)[-1]
    return mix64(int.from_bytes(hashlib.blake2b(os.fsencode(tail), digest_size=8).digest(), "big"))
