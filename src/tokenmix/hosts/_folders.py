"""New folders, whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..data.cache import whole_folder
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
    try:
        with whole_folder(out) as folder:
            yield folder
    except OSError as why:
        raise MixerError(f"{out} cannot be written ({why.strerror or why}); give another {instead}.") from why
