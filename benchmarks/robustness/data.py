"""Corpora and image sets that are damaged, shared, hostile, or kept where nothing can be written."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
import warnings
import zipfile
from pathlib import Path
from typing import Any

from tokenmix.lab.data import open_corpus, open_images
from tokenmix.system.files import whole_file

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
        return (
            f"{type(why).__name__}; what is left under the name begins {left[:3]!r}, "
            f"{len(left)} bytes, {left.count(0)} zeros"
        )
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
    pixels = open_images("digits").split("train").pixels
    warned = "warned, " if "warning" in told else ""
    return f"{warned}trains on {'the right pixels' if pixels.any() else 'zeros'}"


@attempt("5", "Labels in the cached note of an image set are edited")
def edited_labels() -> str:
    """Every 1 becomes a 7."""
    cache = _own_cache()
    before = open_images("digits").split("train").labels
    note = next(cache.glob("images/*.json"))
    note.write_text(note.read_text().replace(" 1,", " 7,"))
    told = _told(lambda: open_images("digits"))
    after = open_images("digits").split("train").labels
    warned = "warned, " if "warning" in told else ""
    return f"{warned}{int((before != after).sum())} of {len(before)} training labels differ"


@attempt("6", "An unpacked corpus in the cache is cut in half")
def cut_corpus() -> str:
    """The packed source is fine."""
    cache = _own_cache()
    Path("a.txt.gz").write_bytes(gzip.compress(TEXT))
    file = open_corpus("a.txt.gz").path
    os.truncate(file, len(TEXT) // 2)
    told = _told(lambda: open_corpus("a.txt.gz"))
    warned = "warned, " if "warning" in told else ""
    size = open_corpus("a.txt.gz").size
    return f"{warned}a corpus of {size} of {len(TEXT)} bytes ({len(list(cache.glob('*.bin')))} file)"


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


def _in_a_while(code: str, seconds: float = 20.0) -> str:
    """The last line that a process of its own prints, or that it hangs."""
    ask = f"from tokenmix.lab.data import open_images\n{code}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", ask],
            capture_output=True,
            text=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return (said[-1] if said else "no word").replace(str(Path.cwd()), ".")[:200]


def _pictures(*names: str) -> None:
    from PIL import Image

    for i, name in enumerate(names):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), i).save(name)


@attempt("12", "A file name in a folder of images is not UTF-8")
def odd_name() -> str:
    """Latin-1, as old archives have it."""
    _own_cache()
    _pictures(*(f"set/{c}/{i}.png" for c in "ab" for i in range(3)), os.fsdecode(b"set/a/n\xe9.png"))
    return _told(lambda: open_images("set"))


@attempt("16", "A pipe is called x.png")
def pipe() -> str:
    """Nothing is ever written to it."""
    _own_cache()
    _pictures(*(f"set/{c}/{i}.png" for c in "ab" for i in range(3)))
    os.mkfifo("set/a/x.png")
    return _in_a_while("open_images('set')")


@attempt("16", "A 200 KB corpus.gz unpacks to 200 MiB of zeros")
def bomb() -> str:
    """The disk, not the memory, is what it fills."""
    cache = _own_cache()
    with gzip.open("a.gz", "wb", compresslevel=9) as f:
        for _ in range(200):
            f.write(bytes(1 << 20))
    told = _told(lambda: open_corpus("a.gz"))
    return f"{told[:120]}; {sum(p.stat().st_size for p in cache.rglob('*') if p.is_file()) >> 20} MiB in the cache"


@attempt("16", "An unused member of an .npz unpacks to 200 MiB")
def unused_member() -> str:
    """How much memory opening it takes."""
    import resource

    import numpy

    _own_cache()
    with zipfile.ZipFile("a.npz", "w", zipfile.ZIP_DEFLATED) as z:
        for name, array in (("images", numpy.zeros((20, 4, 4), numpy.uint8)), ("labels", numpy.arange(20) % 2)):
            with z.open(f"{name}.npy", "w") as f:
                numpy.lib.format.write_array(f, array)
        with z.open("unused.npy", "w", force_zip64=True) as f:
            numpy.lib.format.write_array_header_1_0(f, {"descr": "|u1", "fortran_order": False, "shape": (200 << 20,)})
            for _ in range(200):
                f.write(bytes(1 << 20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = _told(lambda: open_images("a.npz"))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    return f"{told}, memory grows by {'more' if grown > 150 else 'less'} than 150 MiB"


@attempt("16", "A picture of 13,000 x 13,000 pixels among small ones")
def large_picture() -> str:
    """Half a gigabyte once decoded."""
    from PIL import Image

    _own_cache()
    _pictures(*(f"set/{c}/{i}.png" for c in "ab" for i in range(3)))
    Image.new("1", (13_000, 13_000)).save("set/a/9.png")
    return _told(lambda: open_images("set"))[-150:]


@attempt("m", "A plain text file where the cache cannot be written")
def no_cache() -> str:
    """And a packed one, which needs it."""
    os.environ["XDG_CACHE_HOME"] = str(Path("a.txt").resolve())  # a file, where no folder can be made, by root neither
    Path("a.txt").write_bytes(TEXT)
    Path("b.gz").write_bytes(gzip.compress(TEXT))
    return f"plain: {_told(lambda: open_corpus('a.txt'))[:60]}; packed: {_told(lambda: open_corpus('b.gz'))[:150]}"


@attempt("m", "/dev/zero as a corpus")
def device() -> str:
    """It never ends."""
    _own_cache()
    return _told(lambda: open_corpus("/dev/zero"))


@attempt("m", "XDG_CACHE_HOME is a relative path")
def relative_cache() -> str:
    """The standard forbids it: each folder would have a cache of its own."""
    os.environ["XDG_CACHE_HOME"] = "mine"
    Path("b.gz").write_bytes(gzip.compress(TEXT))
    return _told(lambda: open_corpus("b.gz"))


@attempt("m", "A .zip of images holds '/etc/x.png'")
def absolute_entry() -> str:
    """As a class of its own, without a name."""
    _own_cache()
    _pictures(*(f"set/{c}/{i}.png" for c in "ab" for i in range(3)))
    with zipfile.ZipFile("a.zip", "w") as z:
        for c in "ab":
            for i in range(3):
                z.write(f"set/{c}/{i}.png", f"{c}/{i}.png")
                z.writestr(f"/etc/x{i}{c}.png", Path("set/a/0.png").read_bytes())
    told = _told(lambda: open_images("a.zip"))
    return told if told != "it goes on" else f"classes {open_images('a.zip').classes}"


@attempt("m", "A link in a class folder leads back to the set")
def link_round() -> str:
    """How many images six files become."""
    _own_cache()
    _pictures(*(f"set/{c}/{i}.png" for c in "ab" for i in range(3)))
    os.symlink("..", "set/a/again")
    told = _told(lambda: open_images("set"))
    return told if told != "it goes on" else f"{sum(open_images('set').describe()['images'])} images"
