"""Corpora by name or path: enwik8, the standard library's sources, any text file or folder."""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import lzma
import os
import struct
import sys
import sysconfig
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..errors import MixerError
from ..system.files import readable_name
from .bounds import Bounds, check_regular
from .cache import SMALL, cache_dir, cache_write_error, cached_file, read_chunks, sha256_of, write_chunks
from .corpus import Corpus, cut

ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
ENWIK8_SIZE = 100_000_000
ENWIK8_SHA256 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
ENWIK8_BOUNDS = (90_000_000, 95_000_000, 100_000_000)
BAD_ZIP = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    NotImplementedError,
    RuntimeError,
    UnicodeDecodeError,
    struct.error,
)
"""What zipfile raises for a damaged archive, one of an unsupported method or version, or one with a password."""
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
        source: "enwik8", "stdlib", or the path of a text file (raw or .gz) or of a folder of text files.
        path: for enwik8, a local copy (raw, .gz or .zip) to read instead of downloading.
        split: proportions of train, valid and test; default 90/5/5. enwik8 always has its official 90M/5M/5M.
        download: whether enwik8 may be downloaded.
        bounds: limits; ``max_unpacked`` is the number of bytes that a .gz or .zip may unpack to.
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
    corpus = _split_corpus(given.name, _folder_file(given) if given.is_dir() else _unpacked_file(given, bounds), split)
    if split is None and (corpus.size, corpus.sha256) == (ENWIK8_SIZE, ENWIK8_SHA256):
        return Corpus("enwik8", corpus.path, corpus.size, corpus.sha256, ENWIK8_BOUNDS)
    return corpus


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
    import urllib.request

    archive = file.with_suffix(".zip")
    try:
        with urllib.request.urlopen(ENWIK8_URL, timeout=60) as answer:
            write_chunks(archive, read_chunks(answer))
    except OSError as why:
        if why.filename == os.path.realpath(archive):
            raise cache_write_error("enwik8", archive, why) from why
        raise MixerError(
            f"enwik8: could not download {ENWIK8_URL} ({why}); fetch it elsewhere and give its path: "
            + "--data /path/to/enwik8.gz."
        ) from why
    try:
        write_chunks(file, _unzipped(archive, Bounds()))
    except OSError as why:
        raise cache_write_error("enwik8", file, why) from why
    archive.unlink()


def _unzipped(archive: Path, bounds: Bounds) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(archive) as z:
            names = [n for n in z.namelist() if not n.endswith("/")]
            if len(names) != 1:
                raise MixerError(f"data: {archive} must contain exactly one file, but contains {len(names)}.")
            bounds.check(archive, z.getinfo(names[0]).file_size)
            with z.open(names[0]) as f:
                yield from bounds.stream(archive, read_chunks(f))
    except (*BAD_ZIP, EOFError, OSError) as why:
        # Other numbers are errors of the disk: bz2 sets none, and an offset before the file's start gives EINVAL.
        if isinstance(why, OSError) and why.errno not in (None, errno.EINVAL):
            raise
        raise MixerError(f"data: {archive} is not a readable zip archive ({why}).") from why


def _gunzipped(file: Path, bounds: Bounds) -> Iterator[bytes]:
    try:
        with gzip.open(file) as f:
            yield from bounds.stream(file, read_chunks(f))
    except (EOFError, zlib.error, gzip.BadGzipFile) as why:
        raise MixerError(f"data: {file} is not a readable gzip file ({why}).") from why


def _file_chunks(file: Path, bounds: Bounds) -> Iterator[bytes]:
    with file.open("rb") as f:
        yield from read_chunks(f)


def _unpacked_file(file: Path, bounds: Bounds) -> Path:
    """Return a plain file with the bytes of ``file``.

    That is the file itself, or the unpacked content of a .gz or .zip in the cache. A file whose name torch cannot open
    is copied to the cache, too.
    """
    unpack = {".gz": _gunzipped, ".zip": _unzipped}.get(file.suffix)
    if unpack is None and _is_utf8_name(str(file)):
        return file
    return _cached(file.stem, _content_key(file.parent, [file]), lambda: (unpack or _file_chunks)(file, bounds))


def _is_utf8_name(name: str) -> bool:
    return os.fsencode(name) == name.encode("utf-8", "replace")


def text_files(folder: Path) -> list[Path]:
    """List the text files of a folder and the folders in it, sorted by path, without hidden ones.

    Raises:
        MixerError: if there are none.
    """
    files = [p for p in _walk(folder) if not _is_binary(p)]
    if not files:
        raise MixerError(f"data: the folder {folder} contains no text files.")
    return files


def _folder_file(folder: Path) -> Path:
    return _joined_file(folder.name, folder, text_files(folder))


def stdlib_files() -> list[Path]:
    """List the .py sources of the running interpreter's standard library, sorted by path.

    Its tests are left out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    # _sysconfigdata is written by the build and differs between machines.
    return [p for p in _walk(root) if p.suffix == ".py" and not p.name.startswith("_sysconfigdata")]


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


def _walk(root: Path) -> list[Path]:
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith(".")]
        found += [Path(folder, n) for n in names if not n.startswith(".") and Path(folder, n).is_file()]
    return sorted(found, key=lambda p: p.relative_to(root).as_posix())


def _is_binary(file: Path) -> bool:
    with file.open("rb") as f:
        return b"\0" in f.read(8192)


def _joined_file(name: str, root: Path, files: list[Path]) -> Path:
    return _cached(name, _content_key(root, files), lambda: (p.read_bytes() for p in files))


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
        digest.update(p.read_bytes() if small else b"%d %d" % (s.st_mtime_ns, s.st_ctime_ns))
    return digest.hexdigest()[:16]


def _cached(name: str, key: str, chunks: Callable[[], Iterable[bytes]]) -> Path:
    return cached_file(cache_dir() / f"{readable_name(name)}-{key}.bin", "data", chunks)


def _split_corpus(name: str, file: Path, split: tuple[float, ...] | None) -> Corpus:
    size = file.stat().st_size
    parts = DEFAULT_SPLIT if split is None else split
    if len(parts) != 3:
        raise MixerError(f"data.split must be three proportions like [90, 5, 5], got {list(parts)}.")
    if size == 0:
        raise MixerError(f"corpus {name} ({file}) is empty.")
    return Corpus(name, file, size, sha256_of(file), cut(size, (parts[0], parts[1], parts[2])))


CORPORA = {
    "enwik8": "the first 10^8 bytes of an English Wikipedia dump (downloaded, or a local copy)",
    "stdlib": "the Python standard library's own sources, already on this machine",
}
