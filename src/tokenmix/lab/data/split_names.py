"""The words in the names of files and folders that say which split they hold."""

from __future__ import annotations

import re
from pathlib import Path

SPLIT_NAMES = {"train": ("train",), "valid": ("valid", "validation", "val", "dev"), "test": ("test",)}
"""The words in a file's name that say which split it holds."""
FURTHER = {"train": ("training",), "valid": (), "test": ("tests", "testing")}


def split_word(split: str) -> re.Pattern[str]:
    """Return the pattern that a name holds which says a split, such as sst2_dev.tsv."""
    return re.compile(rf"(^|[._-])({'|'.join(SPLIT_NAMES[split])})([._-]|$)")


def splits_named(folder: Path) -> dict[str, list[Path]]:
    """Return the entries of a folder whose names say a split: all folders, or files of one ending if there are none."""
    entries = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    files = [path for path in entries if path.is_file()]
    found = _by_split([path for path in entries if path.is_dir()]) or _by_split(files)
    return found if len({path.suffix for paths in found.values() for path in paths if path.is_file()}) < 2 else {}


def _by_split(entries: list[Path]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for split, words in SPLIT_NAMES.items():
        for path in entries:
            whole = path.name.lower() in (*words, *FURTHER[split])
            if whole if path.is_dir() else split_word(split).search(path.name.lower()):
                found.setdefault(split, []).append(path)
    return found
