"""Where prepared corpora live, and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

CHUNK = 1 << 20


def cache_dir() -> Path:
    """The user's cache: ``$XDG_CACHE_HOME/tokenmix``, else ``~/.cache/tokenmix``."""
    base = os.environ.get("XDG_CACHE_HOME")
    path = Path(base) if base else Path.home() / ".cache"
    (path / "tokenmix").mkdir(parents=True, exist_ok=True)
    return path / "tokenmix"


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Any]:
    """A binary file that appears under its name complete and on disk, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{os.getpid()}.tmp")  # not mkstemp: its files are closed to the group
    try:
        with temporary.open("wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_chunks(path: Path, chunks: Iterable[bytes]) -> tuple[int, str]:
    """Write chunks as one whole file. Returns its size and sha256."""
    digest, size = hashlib.sha256(), 0
    with whole_file(path) as f:
        for chunk in chunks:
            f.write(chunk)
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def read_chunks(f: Any) -> Iterator[bytes]:
    """The rest of an open binary file in pieces."""
    while chunk := f.read(CHUNK):
        yield chunk


def sha256_of(path: Path) -> str:
    """The sha256 of a file's bytes, remembered in the cache under the file's path, size and time of change."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}".encode()).hexdigest()[:32]
    note = cache_dir() / "sha256" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        return json.loads(note.read_text())["sha256"]
    digest = hashlib.sha256()
    with path.open("rb") as f:
        for chunk in read_chunks(f):
            digest.update(chunk)
    with contextlib.suppress(OSError):  # a read-only cache costs time, not correctness
        write_chunks(note, [json.dumps({"sha256": digest.hexdigest()}).encode()])
    return digest.hexdigest()
