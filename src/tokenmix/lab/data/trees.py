"""The files of a folder or of an archive by their names, with what is not read of it; nothing is unpacked."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import IO, Any

from ...errors import MixerError
from .bounds import Bounds, check_names, check_regular, walk_links
from .cache import cache_dir, read_chunks
from .packed import BAD_ZIP

PACKED: dict[bytes, ModuleType] = {b"\x1f\x8b": gzip, b"BZh": bz2, b"\xfd7zXZ\0": lzma}
BAD_TAR = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError, ValueError, OverflowError)


@dataclass(frozen=True)
class Tree:
    """The files of a folder or of an archive by their relative names, sorted.

    Args:
        root: the folder or the archive.
        names: files that are not hidden.
        folders: folders that are not hidden, as far as they are known.
        left: names of what is left out, by the reason.
        content: returns the bytes of a file of an archive; None: the files lie in a folder.
        bounds: limits on what is read.
    """

    root: Path
    names: list[str]
    folders: frozenset[str] = frozenset()
    left: dict[str, list[str]] = field(default_factory=dict)
    content: Callable[[str], bytes] | None = None
    bounds: Bounds = Bounds()

    def open(self, name: str) -> Path | IO[bytes]:
        """Return the path of a file, or its bytes as an open file."""
        return self.root / name if self.content is None else io.BytesIO(self.content(name))

    def bytes(self, name: str) -> bytes:
        """Return the bytes of a file."""
        if self.content is not None:
            return self.content(name)
        check_regular("images", self.root / name)
        return (self.root / name).read_bytes()

    def subtree(self, folder: str) -> Tree:
        """Return the tree of a folder in this one."""
        begin, inner = f"{folder}/", self.content
        return replace(
            self,
            root=self.root / folder,
            names=[n.removeprefix(begin) for n in self.names if n.startswith(begin)],
            folders=frozenset(f.removeprefix(begin) for f in self.folders if f.startswith(begin)),
            content=None if inner is None else lambda name: inner(begin + name),
        )


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is hidden, or a folder of notes that an operating system adds."""
    return name.startswith((".", "__"))


def folder_tree(root: Path, bounds: Bounds) -> Tree:
    """List the files in a folder and the folders in it, without hidden ones."""
    found: list[str] = []
    inner: set[str] = set()
    hidden: list[str] = []
    for folder, folders, names in walk_links(root):
        here = "" if Path(folder) == root else Path(folder).relative_to(root).as_posix() + "/"
        hidden += [f"{here}{f}/" for f in folders if is_hidden(f)] + [here + n for n in names if n.startswith(".")]
        folders[:] = [f for f in folders if not is_hidden(f)]
        inner.update(here + f for f in folders)
        found += [here + n for n in names if not n.startswith(".")]
    return Tree(root, sorted(found), frozenset(inner), {"hidden": hidden}, bounds=bounds)


def zip_tree(file: Path, bounds: Bounds) -> Tree:
    """List the files in a .zip."""
    try:
        archive = zipfile.ZipFile(file)
    except (*BAD_ZIP, OSError) as why:
        raise MixerError(f"images: {file} is not a readable zip archive ({why}).") from why
    bounds.check(file, sum(info.file_size for info in archive.infolist()))
    stored = archive.namelist()
    written = "/" if any("/" in n for n in stored) else "\\"  # some programs of Windows write it
    listed = [n.replace(written, "/") for n in stored]
    names, stored_as = [n for n in listed if not n.endswith("/")], dict(zip(listed, stored, strict=True))
    return _archive_tree(file, names, listed, lambda name: archive.read(stored_as[name]), bounds)


def tar_tree(file: Path, bounds: Bounds) -> Tree:
    """List the files in a .tar, plain or packed with gzip, bzip2 or xz.

    A packed one is unpacked into a file without a name in the user's cache.
    """
    members: dict[str, tarfile.TarInfo] = {}
    names: list[str] = []
    folders: list[str] = []
    links: list[str] = []
    try:
        plain = _plain_tar(file, bounds)
        tar = tarfile.TarFile(fileobj=plain)
        for member in tar:
            name = member.name.removeprefix("./")
            if member.isfile():
                members[name] = member
                names.append(name)
            elif member.isdir():
                folders.append(f"{name}/")
            else:
                links.append(name)
        bounds.check(file, sum(member.size for member in members.values()))
    except BAD_TAR as why:
        if isinstance(why, MixerError):
            raise
        raise MixerError(f"images: {file} is not a readable tar archive ({why}).") from why

    lock = Lock()  # a tar has one place in its file, which reading moves, and images are decoded in threads

    def content(name: str) -> bytes:
        with lock:
            handle: Any = tar.extractfile(members[name])
            return handle.read()

    weakref.finalize(content, plain.close)  # the trees of its folders read by it as well
    tree = _archive_tree(file, names, [*names, *folders], content, bounds)
    tree.left["links or devices"] = links
    return tree


def _plain_tar(file: Path, bounds: Bounds) -> IO[bytes]:
    """Open the bytes of a tar archive, unpacked."""
    with file.open("rb") as raw:
        begin = raw.read(6)
    module = next((module for magic, module in PACKED.items() if begin.startswith(magic)), None)
    if module is None:
        return file.open("rb")
    plain = _nameless_file(cache_dir())
    with module.open(file, "rb") as packed:
        for chunk in bounds.stream(file, read_chunks(packed)):
            plain.write(chunk)
    plain.seek(0)
    return plain


def _nameless_file(folder: Path) -> IO[bytes]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryFile(dir=folder)
    except OSError as why:
        raise MixerError(
            f"images: cannot unpack into {folder} ({why.strerror or why}); make room, or set XDG_CACHE_HOME to another "
            + "folder."
        ) from why


def _archive_tree(
    file: Path, names: list[str], listed: list[str], content: Callable[[str], bytes], bounds: Bounds
) -> Tree:
    check_names(file, names)
    seen = [n for n in names if not any(map(is_hidden, n.split("/")))]
    folders = {f for n in listed for f in _parent_folders(n) if not any(map(is_hidden, f.split("/")))}
    hidden = [n for n in names if any(map(is_hidden, n.split("/")))]
    return Tree(file, sorted(seen), frozenset(folders), {"hidden": hidden}, content, bounds)


def _parent_folders(name: str) -> Iterator[str]:
    """Yield the folders that a name lies in; a name that ends in "/" is itself one."""
    parts = name.split("/")
    yield from ("/".join(parts[:i]) for i in range(1, len(parts)))
