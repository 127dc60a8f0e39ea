"""Files and folders that are written completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ..errors import MixerError
from ..types import Record

LEFT_BEHIND = 86400.0  # seconds without a change after which no process uses a temporary file any more


LETTERS = 40  # of a name that are used in another one, which may have 255 bytes


WRITING = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}  # errors that only writing raises
LOST = WRITING | {errno.EIO, errno.ENXIO, errno.ESTALE, errno.ENOMEM, errno.ENOTCONN, errno.ETIMEDOUT}
"""Errors of flushing that mean that what was written may be lost, as a disk or a server is gone. Any other (EINVAL,
ENOTSUP) means that the file system does not flush on request, as some of networks do not for folders."""
OS_ERROR = re.compile(r"\(os error (\d+)\)")
UNFLUSHED: set[int] = set()  # devices of which a warning has said so


def temporary_path(path: Path) -> Path:
    """Return a new, random name in the same folder.

    Process ids would not do: they can be equal in two containers that share a volume, and in two threads.
    """
    return path.with_name(
        f".{path.name[:LETTERS]}-{secrets.token_hex(8)}.tmp"
    )  # not mkstemp, whose files the group cannot read


def sweep_left(path: Path) -> None:
    """Delete temporary files of ``path`` that killed processes left long ago."""
    with contextlib.suppress(OSError):
        begin, now = f".{path.name[:LETTERS]}-", time.time()
        for entry in list(os.scandir(path.parent)):
            if (
                entry.name.startswith(begin)
                and entry.name.endswith(".tmp")
                and entry.is_file()
                and now - entry.stat().st_mtime > LEFT_BEHIND
            ):
                os.unlink(entry.path)


def is_own(path: Path, folder: Path) -> bool:
    """Return whether a path is a regular file inside of a folder, reached without a link that leads out of it.

    Folders of runs are passed on, and pages made from them: a link in one must not bring in another file.
    """
    try:
        mode = os.lstat(path).st_mode
        return stat.S_ISREG(mode) and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
    except (OSError, ValueError):
        return False


def check_own(path: Path, folder: Path) -> None:
    """Refuse what exists at a path and is no file of the folder itself.

    Raises:
        MixerError: for a link, a pipe, a device, or a file outside of the folder.
    """
    if os.path.lexists(path) and not is_own(path, folder):
        raise MixerError(f"{path.name} is a link or no regular file; nothing outside of {folder} is read for it.")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a binary file that appears under its name complete and on disk, or not at all.

    Anything but a regular file (/dev/stdout) is written to directly.

    Raises:
        OSError: names ``path``, when the disk refuses.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as f:
            yield f
        return
    path = Path(os.path.realpath(path))  # a link stays a link
    with _name_path(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep_left(path)
        temporary = temporary_path(path)
        opened = temporary.open("xb")
    try:
        with _name_path(path, temporary), opened as f:
            yield f
            f.flush()
            flush_to_disk(f.fileno(), path)
        with _name_path(path):
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def _name_path(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Give errors the name the user knows: all of them, or with ``temporary`` only those of writing into it."""
    try:
        yield
    except OSError as why:
        if temporary is not None and not (why.filename is None and why.errno in WRITING):
            raise
        raise OSError(why.errno, why.strerror, str(path)) from why


def readable_name(name: str) -> str:
    """Return a name as text for use in another file name.

    torch opens no file whose name is not UTF-8, and names have a maximum length.
    """
    return os.fsencode(name).decode("utf-8", "replace")[:LETTERS]


def check_writable(path: Path) -> None:
    """Raise the OSError of a file that could not be written, before time is spent on its contents."""
    if path.exists() and not path.is_file():
        return
    path = Path(os.path.realpath(path))
    with _name_path(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        trial = temporary_path(path)
        trial.open("xb").close()
        os.unlink(trial)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Make a new folder to write into, which takes its name at the end and is removed if anything fails.

    ``path`` may be an empty folder.
    """
    temporary = temporary_path(path)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_free(path: Path | str) -> None:
    """Refuse an output path that exists and is not empty, before time is spent."""
    path = Path(path)
    if (path / "config.json").exists():
        raise MixerError(
            f"{path} holds a run already; continue it with `tokenmix resume {path}`, or give another --out."
        )
    if path.is_dir() and any(path.iterdir()):
        raise MixerError(f"{path} exists and is not empty; give another --out.")
    if path.exists() and not path.is_dir():
        raise MixerError(f"{path} exists and is a file; give another --out.")
    parent = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise MixerError(
            f"{path} could not be created: {parent} is not a directory with write permission; give another --out."
        )


def read_json(path: Path) -> Record:
    """Read a JSON object from a file."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise MixerError(f"{path} is missing.") from None
    except (ValueError, RecursionError, OSError) as why:
        raise MixerError(f"{path} is not readable JSON ({' '.join(str(why).split())[:160]}).") from None
    if not isinstance(found, dict):
        raise MixerError(f"{path} holds no JSON object.")
    return found


def write_json(path: Path, value: object) -> None:
    """Write a JSON file completely or not at all."""
    with whole_file(path) as f:
        f.write((json.dumps(value, indent=2) + "\n").encode())


def flush_to_disk(handle: int, path: Path) -> None:
    """Flush an open file or folder to disk. Where its file system does not do that, a warning says so once.

    Raises:
        OSError: if what was written may be lost.
    """
    try:
        os.fsync(handle)
    except OSError as why:
        if why.errno in LOST:
            raise
        _warn_unflushed(path, why)


def _warn_unflushed(path: Path, why: OSError) -> None:
    device = os.stat(path.parent).st_dev
    if device not in UNFLUSHED:
        UNFLUSHED.add(device)
        warnings.warn(
            f"{path}: this file system does not flush to disk on request ({why.strerror or why}); what was written "
            + "last may be lost if the machine stops.",
            stacklevel=4,
        )


def write_file(path: Path, content: bytes) -> None:
    """Write one file and flush it to disk."""
    with path.open("wb") as f:
        f.write(content)
        f.flush()
        flush_to_disk(f.fileno(), path)


def sync_dir(path: Path) -> None:
    """Flush a directory's entries to disk; without this a power failure may undo a rename."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as why:  # a system that opens no folders
        if why.errno in LOST or why.errno == errno.ENOENT:
            raise
        _warn_unflushed(path, why)
        return
    try:
        flush_to_disk(handle, path)
    finally:
        os.close(handle)


def check_out(out: Path | str, instead: str = "--out") -> None:
    """Refuse an output path that holds anything, before time is spent. ``instead`` is the option that the message
    names.
    """
    if (Path(out) / "config.json").exists():
        raise MixerError(f"{out} holds a model or a run already; give another {instead}.")
    check_free(out)


@contextlib.contextmanager
def new_folder(out: Path, instead: str = "--out") -> Iterator[Path]:
    """Make a folder beside ``out`` to write into, which takes its name at the end and is removed if anything fails."""
    try:
        with whole_folder(out) as folder:
            yield folder
    except Exception as why:
        said = why.strerror or why if isinstance(why, OSError) else system_message(why)
        if not said or isinstance(why, MixerError):
            raise
        raise MixerError(f"{out} cannot be written ({said}); give another {instead}.") from why


def system_message(why: Exception) -> str | None:
    """Return what the operating system said where a library in Rust (safetensors, tokenizers) failed to write.

    Such libraries raise errors of their own, which are no OSError and end in "(os error 28)".
    """
    number = OS_ERROR.search(str(why))
    return os.strerror(int(number[1])) if number else None
