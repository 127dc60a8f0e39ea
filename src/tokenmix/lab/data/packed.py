"""Files as bytes, unpacked where they are packed: how is told by their first bytes, and not by their names alone."""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from ...errors import MixerError
from .bounds import Bounds, check_regular
from .progress import with_progress

if TYPE_CHECKING:
    from _typeshed import SupportsRead

CHUNK = 1 << 20
HEAD = 512  # bytes that tell what a file holds
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
UNREADABLE = (*BAD_ZIP, EOFError, OSError)


class Packing(NamedTuple):
    """A way of packing one file.

    Attributes:
        name: of the format.
        begins: first bytes of a packed file.
        endings: of its name.
        chunks: function that yields the unpacked bytes of an open file.
    """

    name: str
    begins: tuple[bytes, ...]
    endings: tuple[str, ...]
    chunks: Callable[[IO[bytes], Path, Bounds, int], Iterator[bytes]]


def read_chunks(f: SupportsRead[bytes], size: int = CHUNK) -> Iterator[bytes]:
    """Yield the rest of an open binary file in chunks."""
    while chunk := f.read(size):
        yield chunk


def _read_gzip(f: IO[bytes], file: Path, bounds: Bounds, size: int) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=f) as unpacked:
        yield from read_chunks(unpacked, size)


def _streams(new: Callable[[], Any]) -> Callable[[IO[bytes], Path, Bounds, int], Iterator[bytes]]:
    """Return a function that unpacks one stream after another. What follows the last one must be another or zeros.

    The modules' own files end in silence at whatever else follows, so that half of a damaged file would be lost.
    """

    def chunks(f: IO[bytes], file: Path, bounds: Bounds, size: int) -> Iterator[bytes]:
        unpack = new()
        for packed in read_chunks(f):
            while packed or not (unpack.eof or unpack.needs_input):
                if unpack.eof:
                    packed = packed.lstrip(b"\0")
                    if not packed:
                        break
                    unpack = new()
                unpacked = unpack.decompress(packed, size)
                packed = unpack.unused_data if unpack.eof else b""
                if unpacked:
                    yield unpacked
        if not unpack.eof:
            raise EOFError("it ends before its end marker")

    return chunks


def _read_zip(f: IO[bytes], file: Path, bounds: Bounds, size: int) -> Iterator[bytes]:
    with zipfile.ZipFile(f) as z:
        names = [n for n in z.namelist() if not n.endswith("/") and not n.startswith("__MACOSX/")]
        kind = next((kind for name, kind in INSIDE.items() if any(f"/{n}".endswith(f"/{name}") for n in names)), None)
        if kind is not None:
            raise kind_error("data", file, kind)
        if len(names) != 1:
            raise MixerError(f"data: {file} must contain exactly one file, but contains {len(names)}.")
        bounds.check(file, z.getinfo(names[0]).file_size)
        with z.open(names[0]) as content:
            yield from read_chunks(content, size)


PACKINGS = (
    Packing("gzip file", (b"\x1f\x8b",), (".gz", ".gzip", ".tgz"), _read_gzip),
    Packing(
        "bzip2 file",
        tuple(
            b"BZh%d%s" % (level, mark) for level in range(1, 10) for mark in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")
        ),
        (".bz2",),
        _streams(bz2.BZ2Decompressor),
    ),
    Packing("xz file", (b"\xfd7zXZ\0",), (".xz", ".txz"), _streams(lzma.LZMADecompressor)),
    Packing("zip archive", (b"PK\3\4", b"PK\5\6"), (".zip",), _read_zip),
)
FOREIGN = {
    b"\x28\xb5\x2f\xfd": "a Zstandard file",
    b"7z\xbc\xaf\x27\x1c": "a 7-Zip archive",
    b"Rar!\x1a\x07": "a RAR archive",
    b"\x04\x22\x4d\x18": "an LZ4 file",
    b"LZIP": "an lzip file",
    b"\x89LZO\0": "an lzop file",
    b"\x1f\x9d": "a file of compress (.Z)",
    b"\x5d\0\0": "an .lzma file",
    b"\xff\x06\0\0sNaPpY": "a Snappy file",
    b"MSCF": "a cabinet archive",
    b"%PDF-": "a PDF",
    b"{\\rtf": "a document in RTF",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "an old Office document",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"FEA1": "a Feather file",
    b"ORC": "an ORC file",
    b"Obj\x01": "an Avro file",
    b"SQLite format 3\0": "an SQLite database",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
    b"\x93NUMPY": "a NumPy array",
    b"\x89PNG\r\n\x1a\n": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"\x7fELF": "a program",
    b"x\x9c": "a zlib stream",
    b"x\xda": "a zlib stream",
    b"GGUF": "a model in GGUF",
}
"""What holds no plain text, by its first bytes."""
MAYBE_TEXT = (b"LZIP", b"MSCF", b"ORC", b"PAR1", b"FEA1", b"GIF8", b"GGUF")  # which a text may begin with too
INSIDE = {
    "[Content_Types].xml": "an Office document",
    "META-INF/manifest.xml": "an OpenDocument file",
    "META-INF/container.xml": "an EPUB",
    "data.pkl": "a file of torch.save",
}
"""What zip archives hold no plain text, by a file in them."""
FOREIGN_ENDINGS = {
    ".br": "a Brotli file",
    ".zst": "a Zstandard file",
    ".7z": "a 7-Zip archive",
    ".rar": "a RAR archive",
}
FOREIGN_ENDINGS |= {".lz4": "an LZ4 file", ".tar": "a tar archive", ".lzma": "an .lzma file"}
ENDINGS = tuple(ending for packing in PACKINGS for ending in packing.endings)


def plain_name(path: Path) -> str:
    """Return the name of a file without the ending that says how it is packed."""
    return path.stem if path.suffix.lower() in ENDINGS else path.name


def packing_of(start: bytes) -> Packing | None:
    """Return how a file is packed by its first bytes; None: it is not, or not in a way that is read here."""
    return next((packing for packing in PACKINGS if start.startswith(packing.begins)), None)


def foreign_kind(start: bytes, name: str = "") -> str | None:
    """Return what a file is that holds no plain text, by its first bytes; of packed ones without such, by its name."""
    for begin, kind in FOREIGN.items():
        if start.startswith(begin) and (begin not in MAYBE_TEXT or b"\0" in start or not is_utf8(start)):
            return kind
    if start[257:262] == b"ustar":
        return "a tar archive"
    if name.endswith(tuple(FOREIGN_ENDINGS)) and not is_utf8(start):
        return FOREIGN_ENDINGS["." + name.rpartition(".")[2]]
    return None


def is_utf8(start: bytes) -> bool:
    """Return whether bytes may begin a text of our times: UTF-8, which may be cut in a character, without NUL."""
    try:
        start[: max(len(start) - 3, 0)].decode()
    except UnicodeDecodeError as why:
        if why.start < len(start) - 6:
            return False
    return b"\0" not in start


def kind_error(who: str, file: Path, kind: str) -> MixerError:
    """Return the error that a file holds no plain text, with what would work."""
    known = ", ".join(packing.endings[0] for packing in PACKINGS)
    works = f"give plain text, or one file packed as {known}"
    if kind == FOREIGN[b"PAR1"]:
        works += "; columns of texts are read by recipes in subwords, such as `tokenmix train subwords`"
    return MixerError(f"{who}: {file} is {kind}, which is not read here; {works}.")


def check_content(who: str, file: Path, start: bytes) -> None:
    """Refuse what holds no plain text, or should be packed by its name and is not."""
    kind = foreign_kind(start, file.name)
    if kind is not None:
        raise kind_error(who, file, kind)
    named = next((p for p in PACKINGS if file.suffix.lower() in p.endings), None)
    if named is not None and start and packing_of(start) is None:
        raise MixerError(f"{who}: {file} cannot be read: by its first bytes it is not a readable {named.name}.")


def unpacked_chunks(file: Path, bounds: Bounds = Bounds(), who: str = "data", size: int = CHUNK) -> Iterator[bytes]:
    """Yield the bytes of a file in chunks, unpacked if it is packed, with a line of progress where it takes long.

    The first chunk is empty if the file is. No chunk has more than ``size`` bytes.

    Raises:
        MixerError: for what is no regular file, cannot be read, is damaged, unpacks to too much or holds no plain
            text.
    """
    check_regular(who, file)
    packing: Packing | None = None
    try:
        with file.open("rb") as f:
            start = f.read(HEAD)
            f.seek(0)
            packing = packing_of(start)
            if packing is None:
                check_content(who, file, start)
                chunks = read_chunks(f, size)
            else:
                chunks = bounds.stream(file, packing.chunks(f, file, bounds, size))
            chunks = with_progress(chunks, os.fstat(f.fileno()).st_size, f"reading {file}", f.tell)
            first = next(chunks, b"")
            if packing is not None and (within := packing_of(first) or foreign_kind(first[:HEAD])):
                kind = within if isinstance(within, str) else f"another {within.name}"
                raise MixerError(f"{who}: {file} holds {kind}; unpack it first, and give plain text.")
            yield first
            yield from chunks
    except UNREADABLE as why:
        # Other numbers are errors of the disk: bz2 sets none, and an offset before a zip's start gives EINVAL.
        if isinstance(why, OSError) and (packing is None or why.errno not in (None, errno.EINVAL)):
            raise MixerError(f"{who}: {file} cannot be read ({why.strerror or why}).") from None
        name = packing.name if packing is not None else "file"
        raise MixerError(f"{who}: {file} cannot be read: {file.name} is not a readable {name} ({why}).") from None
