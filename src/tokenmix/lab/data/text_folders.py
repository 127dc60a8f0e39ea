"""The text files of a folder, with word of everything in it that is not read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ...errors import MixerError
from .corpus import SPLITS
from .inventory import Inventory
from .lines import read_start, wide_encoding
from .packed import HEAD, foreign_kind, packing_of
from .split_names import splits_named

START = 8192  # bytes in which a file that is no text has a NUL


def walk_folder(root: Path, inventory: Inventory | None = None, skipped: Iterable[str] = ()) -> list[Path]:
    """List the files of a folder and the folders in it, sorted by path, without hidden ones and links to folders.

    Args:
        inventory: what is left out is added to it.
        skipped: names of folders that are left out too, without a word.

    Raises:
        MixerError: for a folder that cannot be read.
    """
    inventory = Inventory(str(root)) if inventory is None else inventory
    found: list[Path] = []
    for where, folders, names in os.walk(root, onerror=_refuse):
        for name in sorted(folders):
            if name.startswith("."):
                inventory.leave("hidden", _from(root, where, name) + "/")
            elif os.path.islink(os.path.join(where, name)):
                inventory.leave("links to folders", _from(root, where, name))
        folders[:] = [f for f in folders if f not in skipped and not f.startswith(".")]
        for name in sorted(names):
            file = Path(where, name)
            if name.startswith("."):
                inventory.leave("hidden", _from(root, where, name))
            elif file.is_file():
                found.append(file)
            else:
                inventory.leave("broken links" if file.is_symlink() else "special files", _from(root, where, name))
    return sorted(found, key=lambda p: p.relative_to(root).as_posix())


def _from(root: Path, where: str, name: str) -> str:
    return Path(where, name).relative_to(root).as_posix()


def _refuse(why: OSError) -> None:
    raise MixerError(f"data: {why.filename} cannot be read ({why.strerror or why}).")


def text_files(folder: Path, inventory: Inventory | None = None) -> list[Path]:
    """List the text files of a folder and the folders in it, sorted by path; packed ones count by their content.

    Raises:
        MixerError: if there are none.
    """
    inventory = Inventory(str(folder)) if inventory is None else inventory
    files = []
    for file in walk_folder(folder, inventory):
        why = _no_text(file)
        if why is None:
            files.append(file)
        else:
            inventory.leave(why, _from(folder, str(file.parent), file.name))
    if not files:
        left = "".join(f"; {line.partition(': left out: ')[2]}" for line in inventory.lines()[1:])
        raise MixerError(f"data: the folder {folder} contains no text files{left.removesuffix('.')}.")
    inventory.count("files", len(files))
    return files


def _no_text(file: Path) -> str | None:
    """Return why a file is left out; None: it is a text."""
    try:
        with file.open("rb") as f:
            start = f.read(START)
    except OSError as why:
        raise MixerError(f"data: {file} cannot be read ({why.strerror or why}).") from None
    packing = packing_of(start)
    if packing is not None and packing.name == "zip archive":
        return "zip archives"
    if packing is not None:
        start = read_start(file, START)
    if not start:
        return "empty"
    if wide_encoding(start):
        return "in UTF-16 or UTF-32"
    return "no plain text" if b"\0" in start or foreign_kind(start[:HEAD], file.name) else None


def split_text_files(folder: Path, inventory: Inventory, *, by_name: bool = True) -> dict[str, list[Path]]:
    """List the text files of a folder by split, where it has one file or folder for each; else all of them under "".

    Args:
        by_name: whether names of splits count; otherwise, and where one of them is missing, the inventory says so.
    """
    parts = splits_named(folder)
    named = sorted({path.name for paths in parts.values() for path in paths})
    if not by_name or sorted(parts) != sorted(SPLITS) or any(len(paths) != 1 for paths in parts.values()):
        if len(parts) > 1:
            inventory.tell("splits", f"by proportion, not by the names {', '.join(named)}")
        return {"": text_files(folder, inventory)}
    found = {}
    for split in SPLITS:
        (part,) = parts[split]
        within = Inventory(str(part))
        found[split] = text_files(part, within) if part.is_dir() else [part]
        within.found.setdefault("files", 1)
        inventory.merge(within)
    inventory.tell("splits", f"by name: {', '.join(named)}")
    leave_rest(inventory, folder, [path for paths in parts.values() for path in paths])
    return found


def leave_rest(inventory: Inventory, folder: Path, used: Iterable[Path]) -> None:
    """Record what lies in a folder and is not read."""
    read = set(used)
    for entry in sorted(folder.iterdir()):
        if entry not in read:
            why = "hidden" if entry.name.startswith(".") else "folders" if entry.is_dir() else "other files"
            inventory.leave(why, entry.name)
