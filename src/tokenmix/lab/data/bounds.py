"""Limits on files that come from strangers.

They concern the unpacked size of archives, the pixels of images, files that are not regular files, and links that form
a loop.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import MixerError

if TYPE_CHECKING:
    from _typeshed import SupportsRead

# An archive may unpack to MIN_UNPACKED bytes or to UNPACK_RATIO times its own size, whichever is more.
# Text and images stay far below.
MIN_UNPACKED, UNPACK_RATIO = 64 << 20, 100
MAX_PIXELS = 89_478_485  # where Pillow begins to warn


@dataclass(frozen=True)
class Bounds:
    """Limits on how much is read.

    Args:
        max_unpacked: bytes that an archive may unpack to; None: 64 MiB or 100 times its size, whichever is more.
        max_pixels: pixels that one image file may have.
    """

    max_unpacked: int | None = None
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        for name in ("max_unpacked", "max_pixels"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise MixerError(f"data: {name} must be an integer of at least 1, got {value!r}.")

    def max_bytes(self, archive: Path) -> int:
        """Return how many bytes an archive may unpack to."""
        return (
            max(MIN_UNPACKED, UNPACK_RATIO * archive.stat().st_size) if self.max_unpacked is None else self.max_unpacked
        )

    def check(self, archive: Path, size: int) -> None:
        """Refuse an archive that unpacks to at least ``size`` bytes, if that is too much."""
        most = self.max_bytes(archive)
        if size > most:
            raise MixerError(
                f"data: {archive} of {archive.stat().st_size} bytes unpacks to {size} or more, but only {most} are "
                "allowed; "
                "if you trust it, raise max_unpacked (--data.max_unpacked)."
            )

    def stream(self, archive: Path, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the chunks that an archive unpacks to, and refuse it when they become too many."""
        size = 0
        for chunk in chunks:
            size += len(chunk)
            self.check(archive, size)
            yield chunk


class BoundedReader:
    """A file that refuses an ``archive`` which unpacks to too much, before it is read.

    It is for readers that request as many bytes as the archive tells them to.
    """

    def __init__(self, file: SupportsRead[bytes], archive: Path, bounds: Bounds):
        self.file, self.archive, self.bounds, self.size = file, archive, bounds, 0

    def read(self, n: int = -1) -> bytes:
        most = self.bounds.max_bytes(self.archive) - self.size + 1
        content = self.file.read(most if n < 0 else min(n, most))
        self.size += len(content)
        self.bounds.check(self.archive, self.size)
        return content


def check_regular(who: str, file: Path) -> None:
    """Refuse devices, sockets and pipes, which never end. A missing file is left to the reader's own message."""
    if file.exists() and not file.is_file():
        raise MixerError(f"{who}: {file} is not a regular file{' but a folder' if file.is_dir() else ''}.")


def check_names(archive: Path, names: list[str]) -> None:
    """Refuse names in an archive that are not paths below it or that occur twice."""
    seen: set[str] = set()
    for name in names:
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise MixerError(f"images: {archive} contains {name!r}, which is not a path inside it; pack it again.")
        if name in seen:
            raise MixerError(f"images: {archive} contains {name!r} twice; pack it again.")
        seen.add(name)


def walk_links(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk a folder top down as ``os.walk`` does, through links.

    A link back to a folder that contains it is refused: it would show every image again, in another class.
    """
    above: dict[str, tuple[tuple[int, int], ...]] = {}

    def refuse(why: OSError) -> None:
        raise MixerError(f"images: the folder {why.filename} cannot be read ({why.strerror}).") from why

    for where, folders, names in os.walk(root, followlinks=True, onerror=refuse):
        stat, chain = os.stat(where), above.pop(where, ())
        here = stat.st_dev, stat.st_ino
        if here in chain:
            raise MixerError(f"images: {where} is a link to a folder that contains it; remove it.")
        for folder in folders:
            above[os.path.join(where, folder)] = (*chain, here)
        yield where, folders, names
