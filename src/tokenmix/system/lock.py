"""A lock on a folder, with a note of how the process that held it ended.

The operating system releases the lock when the process ends, however it ends. A process that is killed leaves the note
that it is running.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ..errors import MixerError
from .files import LOST, is_own

try:
    import fcntl
except ImportError:  # this system has no such lock
    fcntl = None  # type: ignore[assignment]  # not on Windows

NAME = ".lock"
PATIENCE = (0.02, 0.08, 0.0)
"""Seconds to wait after each attempt: readers hold the lock only briefly."""
HELD = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
"""Errors that mean that another process holds a lock. Other errors (ENOLCK, ENOTSUP), except those of a lost disk
(``LOST``), mean that the file system offers no locks, as some network file systems do not."""


@contextlib.contextmanager
def hold_lock(folder: Path, busy: str) -> Iterator[None]:
    """Hold the lock of a folder; ``busy`` is the error where another process holds it.

    If the operating system has no locks, nothing is checked; if only the file system lacks them, a warning is given.
    """
    with (folder / NAME).open("a+b") as f:
        taken = None if fcntl is None else _take_lock(f, fcntl.LOCK_EX)
        if taken is False:
            raise MixerError(busy)
        if isinstance(taken, OSError):
            warnings.warn(
                f"{folder}: this file system gives no locks ({taken.strerror or taken}), so a second process that "
                + "writes there is not noticed; start only one.",
                stacklevel=3,
            )
        _note(f, "running")
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            _note(f, "stopped")
            raise
        except BaseException as why:
            _note(f, "failed", " ".join(str(why).split()) or type(why).__name__)
            raise
        _note(f, "ended")


@contextlib.contextmanager
def enter_alone(folder: Path) -> Iterator[None]:
    """Wait until no other process is inside this function for the folder; nothing is written there.

    Where the system has no such lock, it does not wait.
    """
    if fcntl is None:
        yield
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def read_lock(folder: Path) -> tuple[bool | None, dict[str, str]]:
    """Return whether a process holds the lock of a folder (None if unknown) and the last note.

    The note has the fields ``state`` (running, stopped, failed or ended; "" if there is none) and ``why``.
    """
    note: dict[str, str] = {"state": "", "why": ""}
    if os.path.lexists(folder / NAME) and not is_own(folder / NAME, folder):  # a pipe would never answer
        return None, note
    try:
        with (folder / NAME).open("rb") as f:
            taken = None if fcntl is None else _take_lock(f, fcntl.LOCK_SH, (0.0,))
            held = not taken if isinstance(taken, bool) else None
            content = f.read()
    except FileNotFoundError:
        return False, note
    except OSError:
        return None, note
    with contextlib.suppress(ValueError):
        found = json.loads(content)
        note |= {k: str(v) for k, v in found.items() if k in note} if isinstance(found, dict) else {}
    return held, note


def _take_lock(f: IO[bytes], how: int, patience: tuple[float, ...] = PATIENCE) -> bool | OSError:
    """Return whether the lock was taken, or why there is none."""
    for pause in patience:
        try:
            fcntl.flock(f, how | fcntl.LOCK_NB)
            return True
        except OSError as why:
            if why.errno in LOST:
                raise
            if why.errno not in HELD:
                return why
            time.sleep(pause)
    return False


def _note(f: IO[bytes], state: str, why: str = "") -> None:
    with contextlib.suppress(OSError):  # a full disk must not hide the error that it caused
        f.truncate(0)
        os.write(f.fileno(), json.dumps({"state": state, "why": why}).encode())
