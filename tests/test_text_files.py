"""Files of texts: packed ones, folders with splits of their own, what is no text, and what is left out."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import signal
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile

import pytest

from tokenmix import MixerError
from tokenmix.lab.data import open_corpus, open_documents
from tokenmix.lab.data.lines import read_text, text_lines
from tokenmix.lab.data.packed import unpacked_chunks

TEXT = b"to be or not to be. " * 400
PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenmix"


def content(corpus, split=None):
    return bytes((corpus.bytes() if split is None else corpus.split(split)).tolist())


# --- packed files ---


@pytest.mark.parametrize("pack", PACK)
@pytest.mark.parametrize("name", ["a.txt", "a.txt.{}", "a.{}"])
def test_a_packed_corpus_is_its_text_whatever_its_name(tmp_path, pack, name):
    file = tmp_path / name.format(pack)
    file.write_bytes(PACK[pack](TEXT))
    assert content(open_corpus(str(file))) == TEXT
    file.write_bytes(PACK[pack](TEXT) + PACK[pack](b"more"))  # two streams, one after the other
    assert content(open_corpus(str(file))) == TEXT + b"more"


@pytest.mark.parametrize("pack", PACK)
def test_damaged_packed_files_are_refused_and_nothing_is_left(tmp_path, own_cache, pack):
    packed, file = PACK[pack](os.urandom(3000)), tmp_path / "a.txt"
    for damaged in (packed[:-30], packed[:100], packed + b"rest", packed[:500] + b"#" * 40 + packed[540:]):
        file.write_bytes(damaged)
        with pytest.raises(MixerError, match="cannot be read: a.txt is not a readable") as caught:
            open_corpus(str(file))
        assert "\n" not in str(caught.value)
    file.write_bytes(PACK[pack](bytes(70 << 20)))
    with pytest.raises(MixerError, match="only 67108864 are allowed"):
        open_corpus(str(file))
    assert [p for p in own_cache.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize("pack", PACK)
def test_packed_files_within_packed_ones_are_refused(tmp_path, pack):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    for inner, kind in ((PACK[pack](TEXT), "holds another"), (made.getvalue(), "holds a tar archive")):
        (tmp_path / "a").write_bytes(PACK[pack](inner))
        with pytest.raises(MixerError, match=kind):
            open_corpus(str(tmp_path / "a"))
    (tmp_path / "a").write_bytes(made.getvalue())
    with pytest.raises(MixerError, match="is a tar archive, which is not read here"):
        open_corpus(str(tmp_path / "a"))


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (b"\x28\xb5\x2f\xfd\x04\x00", "a Zstandard file"),
        (b"7z\xbc\xaf\x27\x1c\0\4", "a 7-Zip archive"),
        (b"Rar!\x1a\x07\x01\0", "a RAR archive"),
        (b"\x04\x22\x4d\x18\x64", "an LZ4 file"),
        (b"%PDF-1.7\n", "a PDF"),
        (b"PAR1\x15\x04", "a Parquet file.*columns of texts are read by .*`tokenmix train subwords`"),
        (b"FEA1", "a Feather file"),
        (b"\x89PNG\r\n\x1a\n", "a PNG image"),
        (b"SQLite format 3\0", "an SQLite database"),
        (b"\xff\xfeh\0i\0", "in UTF-16"),
    ],
)
def test_what_is_no_plain_text_is_refused_by_its_content(tmp_path, start, kind):
    (tmp_path / "a.txt").write_bytes(start + b"\0\xff" + TEXT)
    with pytest.raises(MixerError, match=kind):
        open_corpus(str(tmp_path / "a.txt"))


@pytest.mark.parametrize(
    ("within", "kind"),
    [
        ("[Content_Types].xml", "an Office document"),
        ("META-INF/manifest.xml", "an OpenDocument file"),
        ("archive/data.pkl", "a file of torch.save"),
    ],
)
def test_a_document_that_is_a_zip_archive_is_named(tmp_path, within, kind):
    """It was said to have too many files in it."""
    with zipfile.ZipFile(tmp_path / "a.dat", "w") as z:
        z.writestr(within, "<x/>")
        z.writestr("more.xml", TEXT)
    with pytest.raises(MixerError, match=f"a.dat is {kind}, which is not read here; give plain text"):
        open_corpus(str(tmp_path / "a.dat"))


def test_names_promise_and_texts_are_taken_at_their_word(tmp_path):
    (tmp_path / "a.gz").write_bytes(TEXT)
    with pytest.raises(MixerError, match="by its first bytes it is not a readable gzip file"):
        open_corpus(str(tmp_path / "a.gz"))
    (tmp_path / "a.br").write_bytes(b"\x8b\xff\xfe\0" * 300)
    with pytest.raises(MixerError, match="a.br is a Brotli file"):
        open_corpus(str(tmp_path / "a.br"))
    for start in (b"BZh is a word. ", b"LZIP, ORC, PAR1. ", b"GIF8 "):
        (tmp_path / "a.txt").write_bytes(start + TEXT)
        assert content(open_corpus(str(tmp_path / "a.txt"))) == start + TEXT


def test_lines_of_texts(tmp_path):
    file = tmp_path / "a.txt"
    for raw, lines in (
        ("\ufeffä\nb\r\nc".encode(), ["ä\n", "b\r\n", "c"]),
        ("ä\u2028b\x85\nc\n".encode("utf-16"), ["ä\u2028b\x85\n", "c\n"]),
        (b"a\rb\r", ["a\n", "b\n"]),
        (b"a\n\nb", ["a\n", "\n", "b"]),
        (b"", []),
    ):
        file.write_bytes(raw)
        assert list(text_lines(file)) == lines
        got = list(unpacked_chunks(file, size=1))
        assert b"".join(got) == raw
    file.write_bytes(("x" * 3_000_000 + "\n" + "ä" * 700_000 + "\ny").encode())  # lines longer than chunks
    assert [len(line) for line in text_lines(file)] == [3_000_001, 700_001, 1]
    for raw, words in (
        (b"\xef\xbb\xbfab\xff\n", "not UTF-8: byte 5 in line 1 is 0xff"),
        (b"ab\nc\xe9d", "not UTF-8: byte 4 in line 2 is 0xe9"),
        (b"ab\nc\xc3", "not UTF-8: byte 4 in line 2 is 0xc3"),
        (b"\xff\xfea\0b", "begins as UTF-16 but is not"),
        (b"a\nb\0", "line 2 of .* holds a NUL"),
    ):
        file.write_bytes(raw)
        with pytest.raises(MixerError, match=words):
            read_text(file)


# --- folders ---


def folder(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text)
    return root


def test_folders_for_tests_of_a_user_are_read(tmp_path):
    root = folder(tmp_path / "v", {f"{name}/a.txt": name.encode() * 100 for name in ("train", "test", "tests")})
    corpus = open_corpus(str(root))
    assert corpus.size == 1400
    assert "splits: train 1,260, valid 70, test 70 (by proportion, not by the names test, tests, train)" in str(
        corpus.inventory.lines()
    )


@pytest.mark.parametrize(
    "names",
    [("train/a.txt", "dev/a.txt", "test/a.txt"), ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")],
)
def test_a_folder_with_three_splits_is_split_so(tmp_path, names):
    texts = dict(zip(("train", "valid", "test"), (b"t" * 500, b"v" * 200, b"e" * 300), strict=True))
    root = folder(tmp_path / "v", {**dict(zip(names, texts.values(), strict=True)), "readme": b"no"})
    corpus = open_corpus(str(root))
    assert {split: content(corpus, split) for split in texts} == texts
    assert corpus.inventory.left_out == {"other files": (1, ["readme"])}
    whole = open_corpus(str(root), split=(90.0, 5.0, 5.0))  # given proportions come first
    assert whole.size == 1002
    assert whole.bounds == (901, 951, 1002)
    for name in names:
        (root / name).write_bytes(gzip.compress((root / name).read_bytes()))
    assert {split: content(open_corpus(str(root)), split) for split in texts} == texts
    rows = open_documents(str(root))
    assert {split: rows.split(split) for split in texts} == {split: [(t.decode(),)] for split, t in texts.items()}


def test_what_a_folder_leaves_out_is_counted(tmp_path):
    root = folder(
        tmp_path / "v",
        {
            "a.txt": b"a" * 100,
            "b.txt.gz": gzip.compress(b"b" * 100),
            ".hidden": b"x",
            ".git/config": b"x",
            "empty.txt": b"",
            "picture.png": b"\x89PNG\r\n\x1a\n\0",
            "wide.txt": "wide".encode("utf-16"),
            "book.pdf": b"%PDF-1.7 text alone",
        },
    )
    folder(tmp_path / "elsewhere", {"c.txt": b"c"})
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (root / "gone").symlink_to(tmp_path / "nothing")
    (root / "file_link.txt").symlink_to(tmp_path / "elsewhere" / "c.txt")
    os.mkfifo(root / "pipe")
    corpus = open_corpus(str(root))
    assert content(corpus) == b"a" * 100 + b"b" * 100 + b"c"
    assert corpus.inventory.left_out == {
        "hidden": (2, [".git/", ".hidden"]),
        "links to folders": (1, ["link"]),
        "broken links": (1, ["gone"]),
        "special files": (1, ["pipe"]),
        "no plain text": (2, ["book.pdf", "picture.png"]),
        "empty": (1, ["empty.txt"]),
        "in UTF-16 or UTF-32": (1, ["wide.txt"]),
    }
    for file in ("a.txt", "b.txt.gz", "file_link.txt"):
        (root / file).unlink()
    with pytest.raises(MixerError, match="contains no text files; 2 hidden"):
        open_corpus(str(root))


# --- killed while reading ---

READ = """
import sys, time
from tokenmix.lab.data import open_corpus, packed
real = packed.read_chunks
def slow(f, size=packed.CHUNK):
    for chunk in real(f, 1000):
        print("chunk", flush=True)
        time.sleep(0.05)
        yield chunk
packed.read_chunks = slow
open_corpus(sys.argv[1])
"""


def test_a_reader_that_is_killed_leaves_nothing_half_written(tmp_path, own_cache):
    file = tmp_path / "a.txt.gz"
    file.write_bytes(gzip.compress(TEXT * 20))
    with subprocess.Popen([sys.executable, "-c", READ, str(file)], stdout=subprocess.PIPE, text=True) as reading:
        for _ in range(3):
            reading.stdout.readline()
        reading.send_signal(signal.SIGKILL)
    assert [p.name for p in own_cache.iterdir() if not p.name.endswith(".tmp")] == []
    assert content(open_corpus(str(file))) == TEXT * 20


@pytest.mark.parametrize("pack", [None, *PACK])
def test_a_large_file_is_unpacked_and_joined_in_chunks(tmp_path, pack):
    """The memory does not grow with the text."""
    text = TEXT * 2500  # 20 MB
    root = folder(tmp_path / "v", {"a.txt": PACK[pack](text) if pack else text, "b.txt": b"end"})
    tracemalloc.start()
    try:
        corpus = open_corpus(str(root))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert corpus.size == len(text) + 3
    assert most < 16_000_000  # of which xz's dictionary has 8
