"""Corpora by name or path: enwik8, the standard library's sources, any text file or folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from ...errors import MixerError
from ...system.files import readable_name
from .bounds import Bounds, check_regular
from .cache import SMALL, cache_dir, cache_write_error, cached_file, download_file, sha256_of, write_chunks
from .corpus import SPLITS, Corpus, cut
from .inventory import Inventory
from .lines import wide_encoding
from .packed import HEAD, check_content, is_utf8, packing_of, unpacked_chunks
from .text_folders import START, split_text_files, walk_folder

ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
ENWIK8_SIZE = 100_000_000
ENWIK8_SHA256 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
ENWIK8_BOUNDS = (90_000_000, 95_000_000, 100_000_000)
DEFAULT_SPLIT = (90.0, 5.0, 5.0)
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def open_corpus(
    source: str,
    *,
    path: str | None = None,
    split: tuple[float, ...] | None = None,
    download: bool = True,
    bounds: Bounds = Bounds(),
) -> Corpus:
    """Open a corpus; the first time, it is prepared in the user's cache.

    Args:
        source: "enwik8", "stdlib", or the path of a text file or of a folder of text files, raw or packed (.gz, .bz2,
            .xz, a .zip of one file). A folder with one file or folder for each of train, valid and test is split so.
        path: for enwik8, a local copy (raw, .gz or .zip) to read instead of downloading.
        split: proportions of train, valid and test; default 90/5/5. enwik8 always has its official 90M/5M/5M.
        download: whether enwik8 may be downloaded.
        bounds: limits; ``max_unpacked`` is the number of bytes that a packed file may unpack to.
    """
    if source in CORPORA:
        if path is not None and source != "enwik8":
            raise MixerError(
                f"data.path={path!r} is only for data.source='enwik8'; for your own text give its path as data.source."
            )
        return (
            enwik8(path, download=download, bounds=bounds)
            if source == "enwik8"
            else _split_corpus(source, stdlib_file(), split)
        )
    if path is not None:
        raise MixerError(f"data.source={source!r} is already a path; leave data.path out.")
    given = Path(source).expanduser()
    if not given.exists():
        raise MixerError(
            f"data: there is no file, folder or corpus {source!r}; give a path, or one of {', '.join(CORPORA)}."
        )
    if not given.is_dir():
        check_regular("data", given)
    corpus = _folder_corpus(given, split, bounds) if given.is_dir() else _file_corpus(given, split, bounds)
    if split is None and (corpus.size, corpus.sha256) == (ENWIK8_SIZE, ENWIK8_SHA256):
        return replace(corpus, name="enwik8", bounds=ENWIK8_BOUNDS)
    return corpus


def _file_corpus(file: Path, split: tuple[float, ...] | None, bounds: Bounds) -> Corpus:
    inventory = Inventory(str(file))
    inventory.count("files")
    plain = _unpacked_file(file, bounds)
    with plain.open("rb") as f:
        if not is_utf8(f.read(START)):
            inventory.tell("content", "no text in UTF-8, read as the bytes that it is")
    return _split_corpus(file.name, plain, split, inventory)


def _folder_corpus(folder: Path, split: tuple[float, ...] | None, bounds: Bounds) -> Corpus:
    """Open the texts of a folder, in the splits that it has or else one after the other."""
    inventory = Inventory(str(folder))
    parts = split_text_files(folder, inventory, by_name=split is None)
    files = [file for part in parts.values() for file in part]
    joined = _joined_file(folder.name, folder, files, bounds)
    if "" in parts:
        return _split_corpus(folder.name, joined, split, inventory)
    sizes = [sum(_unpacked_size(file, bounds) for file in parts[name]) for name in SPLITS]
    return _corpus(folder.name, joined, sizes, inventory)


def enwik8(path: str | None = None, *, download: bool = True, bounds: Bounds = Bounds()) -> Corpus:
    """Open the first 10^8 bytes of an English Wikipedia dump, split 90M/5M/5M.

    Size and sha256 are checked. An archive given once stays unpacked in the cache, where later calls find it.
    """
    if path is not None:
        given = Path(path).expanduser()
        if not given.is_file():
            raise MixerError(f"enwik8: there is no file {path!r}; give the path of enwik8, enwik8.gz or enwik8.zip.")
        file = _unpacked_file(given, bounds)
    else:
        file = cache_dir() / "enwik8"
        if not file.exists():
            _download_enwik8(file, download)
    size, digest = file.stat().st_size, sha256_of(file)
    if (size, digest) != (ENWIK8_SIZE, ENWIK8_SHA256):
        again = "" if path is not None else "; delete it to download it again"
        raise MixerError(
            f"enwik8: {path or file} is not enwik8: {size} bytes with sha256 {digest}, expected {ENWIK8_SIZE} with "
            + f"{ENWIK8_SHA256}{again}."
        )
    if cache_dir() in file.parents:  # unpacked there: from now on it is found without a path, too
        with contextlib.suppress(OSError):
            os.link(file, cache_dir() / "enwik8")
    return Corpus("enwik8", file, size, digest, ENWIK8_BOUNDS)


def _download_enwik8(file: Path, download: bool) -> None:
    if not download:
        raise MixerError(
            f"enwik8: it is not in the cache ({file}); give a local copy as data.path, or fetch {ENWIK8_URL}."
        )
    archive = file.with_suffix(".zip")
    download_file("enwik8", ENWIK8_URL, archive)
    try:
        write_chunks(file, unpacked_chunks(archive))
    except OSError as why:
        raise cache_write_error("enwik8", file, why) from why
    archive.unlink()


def _unpacked_file(file: Path, bounds: Bounds) -> Path:
    """Return a plain file with the bytes of ``file``.

    That is the file itself, or in the cache what is packed in it. A file whose name torch cannot open is copied to the
    cache, too.
    """
    try:
        with file.open("rb") as f:
            start = f.read(HEAD)
    except OSError as why:
        raise MixerError(f"data: {file} cannot be read ({why.strerror or why}).") from None
    if packing_of(start) is None:
        check_content("data", file, start)
        wide = wide_encoding(start)
        if wide is not None:
            raise MixerError(
                f"data: {file} is in {wide.upper()}, and a corpus is read as bytes; convert it with "
                + f"`iconv -f {wide} -t utf-8`."
            )
        if _is_utf8_name(str(file)):
            return file
    return _cache_corpus(file.stem, _content_key(file.parent, [file]), lambda: unpacked_chunks(file, bounds))


def _unpacked_size(file: Path, bounds: Bounds) -> int:
    with file.open("rb") as f:
        packed = packing_of(f.read(HEAD)) is not None
    return sum(map(len, unpacked_chunks(file, bounds))) if packed else file.stat().st_size


def _is_utf8_name(name: str) -> bool:
    return os.fsencode(name) == name.encode("utf-8", "replace")


def stdlib_files() -> list[Path]:
    """List the .py sources of the running interpreter's standard library, sorted by path.

    Its tests are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    # _sysconfigdata is written by the build and differs between machines.
    return [
        p
        for p in walk_folder(root, skipped=SKIPPED_FOLDERS)
        if p.suffix == ".py" and not p.name.startswith("_sysconfigdata")
    ]


def stdlib_file() -> Path:
    """Return a cached file of those sources, concatenated."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = stdlib_files()
    if not files:
        raise MixerError(
            f"data: there are no .py sources of the standard library in {root}; give a text file or folder instead: "
            + "--data PATH."
        )
    return _joined_file(
        f"stdlib-{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}", root, files
    )


def _joined_file(name: str, root: Path, files: list[Path], bounds: Bounds = Bounds()) -> Path:
    return _cache_corpus(
        name, _content_key(root, files), lambda: (chunk for p in files for chunk in unpacked_chunks(p, bounds))
    )


def _content_key(root: Path, files: list[Path]) -> str:
    """Return a key that changes when the files change.

    It is a hash of their bytes or, if they are many, of folder, names, sizes and times of change.
    """
    stats = [p.stat() for p in files]
    small = sum(s.st_size for s in stats) <= SMALL
    digest = hashlib.sha256(b"" if small else os.fsencode(root.resolve()))
    for p, s in zip(files, stats, strict=True):
        digest.update(b"\0%s %d " % (os.fsencode(p.relative_to(root).as_posix()), s.st_size))
        # No user can set ctime back.
        digest.update(bytes.fromhex(sha256_of(p)) if small else b"%d %d" % (s.st_mtime_ns, s.st_ctime_ns))
    return digest.hexdigest()[:16]


def _cache_corpus(name: str, key: str, chunks: Callable[[], Iterable[bytes]]) -> Path:
    return cached_file(cache_dir() / f"{readable_name(name)}-{key}.bin", "data", chunks)


def _split_corpus(name: str, file: Path, split: tuple[float, ...] | None, inventory: Inventory | None = None) -> Corpus:
    parts = DEFAULT_SPLIT if split is None else split
    if len(parts) != 3:
        raise MixerError(f"data.split must be three proportions like [90, 5, 5], got {list(parts)}.")
    ends = cut(file.stat().st_size, (parts[0], parts[1], parts[2]))
    return _corpus(name, file, [ends[0], ends[1] - ends[0], ends[2] - ends[1]], inventory)


def _corpus(name: str, file: Path, sizes: list[int], inventory: Inventory | None) -> Corpus:
    """Return the corpus of a file whose splits have these sizes."""
    size = sum(sizes)
    if size == 0:
        raise MixerError(f"corpus {name} ({file}) is empty.")
    if inventory is not None:
        inventory.count("bytes", size)
        by_name = f" ({inventory.found['splits']})" if "splits" in inventory.found else ""
        inventory.tell_counts("splits", dict(zip(SPLITS, sizes, strict=True)))
        inventory.found["splits"] = f"{inventory.found['splits']}{by_name}"
    return Corpus(name, file, size, sha256_of(file), (sizes[0], sizes[0] + sizes[1], size), inventory)


CORPORA = {
    "enwik8": "the first 10^8 bytes of an English Wikipedia dump (downloaded, or a local copy)",
    "stdlib": "the Python standard library's own sources, already on this machine",
}
