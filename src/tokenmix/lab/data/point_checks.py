"""The check of all clouds of a folder before training: that they can be read, and a hash of each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ...errors import MixerError
from .cache import cache_dir, cache_write_error, read_note, sha256_of, write_note
from .image_cache import CHECK_BYTES, source_state
from .image_source import in_threads
from .point_files import read_cloud
from .progress import with_progress


@dataclass(frozen=True)
class Checked:
    """What was found in the files of a set.

    Args:
        hashes: sha256 of the bytes of each file.
        least: the table of fewest points and their number; None: there are only meshes, or too much was to be read.
    """

    hashes: dict[str, str]
    least: tuple[str, int] | None


def check_clouds(root: Path, splits: Mapping[str, Sequence[tuple[Path | int, int]]]) -> Checked:
    """Read every file once and hash it; of sets above ``CHECK_BYTES`` they are hashed alone.

    What was found is kept in the user's cache until a file changes.

    Raises:
        MixerError: a file is missing or broken.
    """
    files = sorted({file for items in splits.values() for file, _ in items if isinstance(file, Path)})
    names = [str(file.relative_to(root)) for file in files]
    state = json.dumps(["points-1", source_state(root), names])
    note = cache_dir() / "points" / f"{hashlib.sha256(state.encode()).hexdigest()[:32]}.json"
    known = read_note(note)
    if known is None:
        whole = sum(file.stat().st_size for file in files if file.is_file()) <= CHECK_BYTES

        def look(file: Path) -> tuple[str, int | None]:
            found = read_cloud(file) if whole else None
            try:
                return sha256_of(file), len(found) if isinstance(found, Tensor) else None
            except OSError as why:
                raise MixerError(f"data: there is no file {file} ({why.strerror}).") from None

        found = list(with_progress(in_threads(look, files), len(files), f"reading the clouds of {root.name}"))
        tables = [(n, name) for (_, n), name in zip(found, names, strict=True) if n is not None]
        known = {
            "hashes": dict(zip(names, (digest for digest, _ in found), strict=True)),
            "least": min(tables)[::-1] if tables else None,
        }
        try:
            write_note(note, known)
        except OSError as why:
            raise cache_write_error("data", note, why) from why
    least = known["least"]
    return Checked(known["hashes"], None if least is None else (least[0], least[1]))
