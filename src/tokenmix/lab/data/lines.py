"""Lines of text files, plain or packed, with errors that name the file and the line."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

from ...errors import MixerError
from .packed import unpacked_chunks

WIDE = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
WIDE |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # UTF-32's first: it begins with UTF-16's
"""Encodings that are told by a file's first bytes."""


def wide_encoding(start: bytes) -> str | None:
    """Return UTF-16 or UTF-32 for a text that says by its first bytes that it is in one of them."""
    return next((name for mark, name in WIDE.items() if start.startswith(mark)), None)


def read_start(path: Path, count: int) -> bytes:
    """Return the first bytes of a file, unpacked if it is packed.

    Raises:
        MixerError: if the file cannot be read.
    """
    return next(unpacked_chunks(path, size=count))


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, packed or not, with their ends.

    The text is in UTF-8, or in UTF-16 or UTF-32 with their mark. A text whose lines end in carriage returns alone, as
    on old Macs, gets line feeds in their place.

    Raises:
        MixerError: if the file cannot be read, is not UTF-8, holds a NUL or unpacks to far more than texts do.
    """
    chunks = unpacked_chunks(path)
    first = next(chunks)
    wide = wide_encoding(first)
    lines = _wide_lines(path, first, chunks, wide) if wide else _utf8_lines(path, first, chunks)
    for i, line in enumerate(lines, 1):
        if "\0" in line:
            raise MixerError(
                f"data: line {i} of {path} holds a NUL, as no text does; if it is UTF-16, convert it with "
                + "`iconv -f utf-16 -t utf-8`."
            )
        if i == 1 and "\r" in line and "\n" not in line:
            yield from (part + "\n" for part in line.removesuffix("\r").split("\r"))
        else:
            yield line


def _utf8_lines(path: Path, first: bytes, chunks: Iterator[bytes]) -> Iterator[str]:
    at = 0
    for number, raw in enumerate(_raw_lines(first, chunks), 1):
        try:
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as why:
            # The codec that drops a mark counts from behind it.
            skipped = 3 * (number == 1 and raw.startswith(codecs.BOM_UTF8))
            where = at + why.start + skipped
            raise MixerError(
                f"data: {path} is not UTF-8: byte {where} in line {number} is {why.object[why.start]:#04x}; convert "
                + "it, for example with `iconv -f latin1 -t utf-8`."
            ) from None
        at += len(raw)


def _raw_lines(first: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield lines with their ends. A long line is put together once, and not anew with each chunk."""
    rest: list[bytes] = []
    chunk: bytes | None = first
    while chunk is not None:
        head, end, tail = chunk.partition(b"\n")
        if end:
            yield b"".join([*rest, head, end])
            *lines, last = tail.split(b"\n")
            rest = [last] if last else []
            yield from (line + b"\n" for line in lines)
        elif head:
            rest.append(head)
        chunk = next(chunks, None)
    if rest:
        yield b"".join(rest)


def _wide_lines(path: Path, first: bytes, chunks: Iterator[bytes], encoding: str) -> Iterator[str]:
    decoder, rest, number = codecs.getincrementaldecoder(encoding)(), "", 1
    chunk: bytes | None = first
    while chunk is not None:
        following = next(chunks, None)
        try:
            rest += decoder.decode(chunk, final=following is None)
        except UnicodeDecodeError as why:
            raise MixerError(
                f"data: {path} begins as {encoding.upper()} but is not, near line {number} ({why.reason})."
            ) from None
        *lines, rest = rest.split("\n")
        number += len(lines)
        yield from (line + "\n" for line in lines)
        chunk = following
    if rest:
        yield rest


def filled_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file up to the last one that holds anything; see ``text_lines``."""
    empty: list[str] = []
    for line in text_lines(path):
        if line.strip(" \r\n"):
            yield from empty
            empty = []
            yield line
        else:
            empty.append(line)


def read_text(path: Path) -> str:
    """Read a text file whole; see ``text_lines``."""
    return "".join(text_lines(path))


def read_lines(path: Path) -> list[str]:
    """Read the lines of a text file, of which none may be empty but those at its end.

    Raises:
        MixerError: for an empty line, with its number, and for a file without lines.
    """
    lines = []
    for i, line in enumerate(filled_lines(path), 1):
        lines.append(line.strip())
        if not lines[-1]:
            raise MixerError(f"data: line {i} of {path} is empty; every line must hold a text.")
    if not lines:
        raise MixerError(f"data: {path} is empty.")
    return lines
