"""The cache of prepared data: files that are written completely or not at all, and hashes of what is on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from ...errors import MixerError
from ...system.files import whole_file
from ...types import Record
from .packed import read_chunks
from .progress import with_progress

SMALL = 64 << 20  # bytes; smaller files are hashed each time, the hashes of larger ones are cached
SETTLED = 2.0  # seconds, the slowest tick of a file system's clock; a second change within a tick leaves no trace


def cache_dir() -> Path:
    """Return the user's cache: ``$XDG_CACHE_HOME/tokenmix``, else ``~/.cache/tokenmix``.

    It is created by whatever first writes into it.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        if not os.path.isabs(base):
            raise MixerError(
                f"cache: XDG_CACHE_HOME={base!r} is not an absolute path; give one, or unset it for ~/.cache."
            )
        return Path(base) / "tokenmix"
    try:
        return Path.home() / ".cache" / "tokenmix"
    except RuntimeError:  # the user has no home folder
        raise MixerError("cache: this user has no home folder; set XDG_CACHE_HOME to a writable folder.") from None


def map_file(path: Path, size: int) -> Tensor:
    """Map a file's bytes into memory, uint8 (size,); they are read-only by convention."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise MixerError(
            f"data: torch cannot open {str(path)!r}, whose name is not UTF-8; "
            + "rename it, or set XDG_CACHE_HOME to another folder."
        ) from None
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def write_chunks(path: Path, chunks: Iterable[bytes]) -> tuple[int, str]:
    """Write chunks to a file, completely or not at all. Return its size and sha256."""
    digest, size = hashlib.sha256(), 0
    with whole_file(path) as f:
        for chunk in chunks:
            f.write(chunk)
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def cache_write_error(who: str, file: Path, why: OSError) -> Exception:
    """Return the error to raise for an ``OSError`` met while ``file`` of the cache was written.

    It states the problem and the way out in one line; an ``OSError`` about another file is returned unchanged.
    """
    if why.filename != os.path.realpath(file):
        return why
    return MixerError(
        f"{who}: cannot write {file} ({why.strerror or why}); make room, or set XDG_CACHE_HOME to another folder."
    )


def download_file(who: str, url: str, file: Path, known: tuple[int, str] | None = None) -> None:
    """Download a file into the cache, completely or not at all.

    Args:
        known: the size in bytes and the MD5 of the right file; None: its reader checks it.

    Raises:
        MixerError: the connection fails or breaks, the file is not the right one, or it cannot be written.
    """
    import http.client
    import urllib.request

    def chunks(answer: IO[bytes]) -> Iterator[bytes]:
        digest, size = hashlib.md5(usedforsecurity=False), 0
        for chunk in read_chunks(answer):
            digest.update(chunk)
            size += len(chunk)
            yield chunk
        if missing := getattr(answer, "length", 0):  # http.client raises no error here
            raise OSError(f"the connection broke {missing} bytes before the end")
        if known is not None and known != (size, digest.hexdigest()):
            raise MixerError(
                f"{who}: {url} gave {size} bytes with md5 {digest.hexdigest()}, expected {known[0]} with {known[1]}."
            )

    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            write_chunks(file, chunks(answer))
    except (OSError, http.client.HTTPException) as why:
        if isinstance(why, OSError) and why.filename == os.path.realpath(file):
            raise cache_write_error(who, file, why) from why
        raise MixerError(
            f"{who}: could not download {url} ({why}); fetch it elsewhere and give its path: --data PATH."
        ) from why


def cached_file(file: Path, who: str, chunks: Callable[[], Iterable[bytes]]) -> Path:
    """Return a file of the cache whose bytes are as they were written.

    It is written the first time, and again if its bytes have changed since.
    """
    note = file.with_name(file.name + ".json")
    written = read_note(note)
    if written is not None and file.is_file():
        with contextlib.suppress(FileNotFoundError):  # deleted in the meantime
            if (file.stat().st_size, sha256_of(file)) == (written.get("bytes"), written.get("sha256")):
                return file
            warnings.warn(
                f"{who}: the cached copy {file} is damaged (its bytes have changed since it was written) and is "
                + "created again.",
                stacklevel=3,
            )
    try:
        size, digest = write_chunks(file, chunks())
        write_note(note, {"bytes": size, "sha256": digest})
    except OSError as why:
        raise cache_write_error(who, note if why.filename == os.path.realpath(note) else file, why) from why
    return file


def sha256_of(path: Path) -> str:
    """Compute the sha256 of a file's bytes; that of a large file is cached until the file changes.

    A change shows in the change time of the file's inode (ctime), which no user can set, unlike the modification time.
    The hash of a file that changed moments ago is not cached: the file may change again within one tick of the file
    system's clock.
    """
    began, before = time.time(), _identity(path)
    if before[1] <= SMALL:
        return _digest(path)
    note = cache_dir() / "sha256" / f"{hashlib.sha256(repr(before).encode()).hexdigest()[:32]}.json"
    known = read_note(note)
    if known is not None:
        return known["sha256"]
    digest = _digest(path)
    if _identity(path) == before and began - max(before[2:4]) / 1e9 > SETTLED:
        with contextlib.suppress(OSError):  # a read-only cache costs time, not correctness
            write_note(note, {"sha256": digest})
    return digest


def _identity(path: Path) -> tuple[str, int, int, int, int, int]:
    stat = path.stat()
    return str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        for chunk in with_progress(read_chunks(f), path.stat().st_size, f"reading {path}", f.tell):
            digest.update(chunk)
    return digest.hexdigest()


def _check(note: Path, content: Record) -> str:
    """Compute the checksum in a note, which depends on the note's name too."""
    return hashlib.sha256(json.dumps([note.name, content], sort_keys=True).encode()).hexdigest()[:32]


def write_note(note: Path, content: Record) -> None:
    """Write a JSON object with a checksum, by which ``read_note`` detects any change."""
    write_chunks(note, [json.dumps({**content, "check": _check(note, content)}).encode()])


def read_note(note: Path) -> Record | None:
    """Read what ``write_note`` wrote; None if it is missing or any byte has changed."""
    try:
        content = json.loads(note.read_bytes())
        return content if content.pop("check") == _check(note, content) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
