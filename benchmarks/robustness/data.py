"""Corpora and image sets that are damaged, shared, hostile, or kept where nothing can be written."""

from __future__ import annotations

import gzip
import os
import threading
import warnings
from pathlib import Path
from typing import Any

from tokenmix.data import open_corpus, open_images
from tokenmix.data.cache import whole_file

from . import attempt

TEXT = b"the cat sat on the mat. " * 4000


def _own_cache() -> Path:
    os.environ["XDG_CACHE_HOME"] = str(Path("cache").resolve())
    return Path("cache/tokenmix")


def _told(work: Any) -> str:
    """What a call says: its warnings, then its error or that it went on."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            work()
            end = "it goes on"
        except Exception as why:
            end = f"{type(why).__name__}: {why}"
    return " ".join([*(f"warning: {w.message};" for w in heard), end]).replace(str(Path.cwd()), ".")


def _keep_times(path: Path, content: bytes) -> None:
    """Change bytes in place, and set the time of change back."""
    stat = path.stat()
    with path.open("r+b") as f:
        f.write(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@attempt("4", "Two writers of one process id write the same file at once")
def two_writers() -> str:
    """As two containers that share a cache do; the second begins while the first is half way."""
    path = Path("corpus.bin")
    try:
        with whole_file(path) as first:
            first.write(b"a" * 5000)
            first.flush()
            with whole_file(path) as second:
                second.write(b"b" * 100)
            first.write(b"a" * 5000)
    except OSError as why:
        left = path.read_bytes()
        return f"{type(why).__name__}; what is left under the name begins {left[:3]!r}, {len(left)} bytes, {left.count(0)} zeros"
    return f"the name holds one of them whole: {path.read_bytes() in (b'a' * 10000, b'b' * 100)}"


@attempt("4", "Eight threads open one packed corpus for the first time")
def threads_open_a_corpus() -> str:
    """Each unpacks it."""
    _own_cache()
    Path("a.txt.gz").write_bytes(gzip.compress(TEXT * 40))
    failed: list[str] = []
    ready = threading.Barrier(8)

    def work() -> None:
        ready.wait()
        try:
            open_corpus("a.txt.gz")
        except Exception as why:
            failed.append(type(why).__name__)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return f"some fail: {', '.join(sorted(set(failed)))}" if failed else "all open it"


@attempt("5", "The cached pixels of an image set are overwritten with zeros")
def zeroed_pixels() -> str:
    """The size stays."""
    cache = _own_cache()
    open_images("digits")
    file = next(cache.glob("images/*.pixels"))
    _keep_times(file, bytes(file.stat().st_size))
    told = _told(lambda: open_images("digits"))
    return f"{'warned, ' if 'warning' in told else ''}trains on {'zeros' if not open_images('digits').split('train').pixels.any() else 'the right pixels'}"


@attempt("5", "Labels in the cached note of an image set are edited")
def edited_labels() -> str:
    """Every 1 becomes a 7."""
    cache = _own_cache()
    before = open_images("digits").split("train").labels
    note = next(cache.glob("images/*.json"))
    note.write_text(note.read_text().replace(" 1,", " 7,"))
    told = _told(lambda: open_images("digits"))
    after = open_images("digits").split("train").labels
    return f"{'warned, ' if 'warning' in told else ''}{int((before != after).sum())} of {len(before)} training labels differ"


@attempt("6", "An unpacked corpus in the cache is cut in half")
def cut_corpus() -> str:
    """The packed source is fine."""
    cache = _own_cache()
    Path("a.txt.gz").write_bytes(gzip.compress(TEXT))
    file = open_corpus("a.txt.gz").path
    os.truncate(file, len(TEXT) // 2)
    told = _told(lambda: open_corpus("a.txt.gz"))
    return f"{'warned, ' if 'warning' in told else ''}a corpus of {open_corpus('a.txt.gz').size} of {len(TEXT)} bytes ({len(list(cache.glob('*.bin')))} file)"


@attempt("6", "An unpacked corpus in the cache is emptied")
def emptied_corpus() -> str:
    """The same."""
    _own_cache()
    Path("a.txt.gz").write_bytes(gzip.compress(TEXT))
    os.truncate(open_corpus("a.txt.gz").path, 0)
    return _told(lambda: open_corpus("a.txt.gz"))[-60:]


@attempt("6", "Bytes of a corpus change, its time of change does not")
def kept_mtime() -> str:
    """As rsync and tar leave it."""
    _own_cache()
    file = Path("a.txt")
    file.write_bytes(TEXT)
    before = open_corpus("a.txt").sha256
    _keep_times(file, b"THE CAT")
    return "the hash notices" if open_corpus("a.txt").sha256 != before else "the old hash is given"
