"""New folders, whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import MixerError
from ..train.rundir import check_free


def check_out(out: Path | str, instead: str = "--out") -> None:
    """Refuse an output path that holds anything, before time is spent. ``instead`` is what the message asks another of."""
    if (Path(out) / "config.json").exists():
        raise MixerError(f"{out} holds a model or a run already; give another {instead}.")
    check_free(out)


@contextmanager
def new_folder(out: Path, instead: str = "--out") -> Iterator[Path]:
    """A folder beside ``out`` to write into, which takes its name at the end; where anything fails it is gone."""
    temporary = out.with_name(f".{out.name}-{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        yield temporary
        os.rename(temporary, out)
    except OSError as why:
        shutil.rmtree(temporary, ignore_errors=True)
        raise MixerError(f"{out} cannot be written ({why.strerror or why}); give another {instead}.") from why
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
