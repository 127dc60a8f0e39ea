"""Corpora and the sampler."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import socketserver
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tokenmix import MixerError
from tokenmix.lab.data import Bounds, Corpus, Sampler, cache, corpora, open_corpus
from tokenmix.lab.data.cache import write_chunks
from tokenmix.lab.data.sampler import mix64, permute_index, permuted_ranks
from tokenmix.system.files import whole_file


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenmix"


@pytest.fixture
def small_enwik8(monkeypatch) -> bytes:
    """enwik8 replaced by a thousand bytes, so that its path through the code can be run without 36 MB."""
    content = bytes(i * 7 % 251 for i in range(1000))
    monkeypatch.setattr(corpora, "ENWIK8_SIZE", 1000)
    monkeypatch.setattr(corpora, "ENWIK8_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(corpora, "ENWIK8_BOUNDS", (900, 950, 1000))
    return content


def read(corpus: Corpus, split: str) -> bytes:
    return bytes(corpus.split(split).tolist())


def test_a_file_is_split_and_hashed(tmp_path):
    content = bytes(range(200))
    (tmp_path / "a.txt").write_bytes(content)
    corpus = open_corpus(str(tmp_path / "a.txt"))
    assert (corpus.size, corpus.sha256) == (200, hashlib.sha256(content).hexdigest())
    assert b"".join(read(corpus, s) for s in ("train", "valid", "test")) == content
    assert corpus.bounds == (180, 190, 200)
    assert open_corpus(str(tmp_path / "a.txt"), split=(50, 25, 25)).bounds == (100, 150, 200)


def test_a_changed_file_gets_a_new_hash(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"x" * 100)
    first = open_corpus(str(file)).sha256
    file.write_bytes(b"y" * 100)
    assert open_corpus(str(file)).sha256 == hashlib.sha256(b"y" * 100).hexdigest() != first


def test_a_folder_is_its_text_files_in_order(tmp_path):
    folder = tmp_path / "texts"
    for name, content in {
        "b.txt": b"bb",
        "a/z.txt": b"az",
        "a.txt": b"a",
        ".hidden": b"no",
        "picture": b"\0no",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    corpus = open_corpus(str(folder))
    assert bytes(corpus.bytes().tolist()) == b"a" + b"az" + b"bb"
    (folder / "b.txt").write_bytes(b"cc!")
    assert bytes(open_corpus(str(folder)).bytes().tolist()) == b"aazcc!"


def test_the_standard_library_is_a_corpus():
    a, b = open_corpus("stdlib"), open_corpus("stdlib")
    assert (a.sha256, a.path) == (b.sha256, b.path)
    assert a.size > 3_000_000
    files = corpora.stdlib_files()
    assert a.size == sum(p.stat().st_size for p in files)
    assert not any({"test", "tests", "site-packages"} & set(p.parts) for p in files)
    assert {"argparse.py", "dataclasses.py"} <= {p.name for p in files}


@pytest.mark.parametrize("form", ["raw", "gz", "zip"])
def test_enwik8_from_a_local_copy(tmp_path, small_enwik8, form):
    path = tmp_path / {"raw": "enwik8", "gz": "enwik8.gz", "zip": "enwik8.zip"}[form]
    if form == "raw":
        path.write_bytes(small_enwik8)
    elif form == "gz":
        path.write_bytes(gzip.compress(small_enwik8))
    else:
        with zipfile.ZipFile(path, "w") as z:
            z.writestr("enwik8", small_enwik8)
    corpus = open_corpus("enwik8", path=str(path))
    assert read(corpus, "train") == small_enwik8[:900]
    assert read(corpus, "valid") == small_enwik8[900:950]
    assert read(corpus, "test") == small_enwik8[950:]
    assert open_corpus(str(path)).name == "enwik8"  # known by its content too, with its official split
    if form != "raw":
        path.unlink()
        assert read(open_corpus("enwik8", download=False), "train") == small_enwik8[:900]


def test_enwik8_is_downloaded_once(tmp_path, small_enwik8, monkeypatch, own_cache):
    archive = tmp_path / "there.zip"
    with zipfile.ZipFile(archive, "w") as z:
        z.writestr("enwik8", small_enwik8)
    monkeypatch.setattr(corpora, "ENWIK8_URL", archive.as_uri())
    assert read(open_corpus("enwik8"), "train") == small_enwik8[:900]
    archive.unlink()
    assert open_corpus("enwik8").size == 1000
    assert not (own_cache / "enwik8.zip").exists()


def test_enwik8_that_is_not_enwik8_is_refused(tmp_path, small_enwik8):
    path = tmp_path / "enwik8"
    path.write_bytes(small_enwik8[:-1] + b"!")
    with pytest.raises(MixerError, match="is not enwik8: 1000 bytes with sha256"):
        open_corpus("enwik8", path=str(path))


def test_a_failed_download_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "ENWIK8_URL", (tmp_path / "nothing.zip").as_uri())
    with pytest.raises(MixerError, match="could not download .* give its path"):
        open_corpus("enwik8")


@pytest.mark.parametrize("header", [b"Content-Length: 1000", b"Transfer-Encoding: chunked"])
def test_a_connection_that_breaks_leaves_nothing(monkeypatch, own_cache, header):
    class HalfAnswer(socketserver.StreamRequestHandler):
        def handle(self):
            self.rfile.readline()
            self.wfile.write(b"HTTP/1.1 200 OK\r\n" + header + b"\r\n\r\n3e8\r\n" + bytes(500))

    with socketserver.TCPServer(("127.0.0.1", 0), HalfAnswer) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setattr(corpora, "ENWIK8_URL", f"http://127.0.0.1:{server.server_address[1]}/enwik8.zip")
        with pytest.raises(MixerError, match="could not download .* give its path"):
            open_corpus("enwik8")
    assert [p for p in own_cache.rglob("*") if p.is_file()] == []


def test_broken_archives_are_refused_and_leave_nothing(tmp_path, own_cache):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"x" * 10_000)[:-20])
    (tmp_path / "b.zip").write_bytes(b"PK not a zip")
    for name, words in (("a.gz", "not a readable gzip"), ("b.zip", "not a readable zip")):
        with pytest.raises(MixerError, match=words):
            open_corpus(str(tmp_path / name))
    assert [p for p in own_cache.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("stdlb", {}, "there is no file, folder or corpus 'stdlb'"),
        ("stdlib", {"path": "x"}, "only for data.source='enwik8'"),
        ("enwik8", {"path": "/nothing/here"}, "no file '/nothing/here'"),
        ("stdlib", {"split": (90.0, 10.0)}, "three proportions"),
        ("stdlib", {"split": (90.0, -5.0, 5.0)}, "three proportions"),
        ("stdlib", {"split": (float("inf"), 1.0, 1.0)}, "three proportions"),
        ("stdlib", {"split": (float("nan"), 1.0, 1.0)}, "three proportions"),
    ],
)
def test_wrong_sources_are_refused(source, options, words):
    with pytest.raises(MixerError, match=words):
        open_corpus(source, **options)


def test_empty_and_short_corpora_are_refused(tmp_path):
    for name, content in {"empty": b"", "short": b"x" * 100}.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(MixerError, match="is empty"):
        open_corpus(str(tmp_path / "empty"))
    corpus = open_corpus(str(tmp_path / "short"))
    corpus.check_length(89)
    with pytest.raises(MixerError, match="training split has 90 bytes, one sequence of seq_len=90 needs 91"):
        corpus.check_length(90)
    with pytest.raises(MixerError, match="there is no split 'val'"):
        corpus.split("val")
    (tmp_path / "folder").mkdir()
    with pytest.raises(MixerError, match="contains no text files"):
        open_corpus(str(tmp_path / "folder"))


def resident() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["VmRSS"].split()[0]) * 1024


def test_a_corpus_is_mapped_not_read(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as f:
        f.truncate(1 << 31)
    before = resident()
    corpus = Corpus("sparse", path, 1 << 31, "", ((1 << 31) - 20, (1 << 31) - 10, 1 << 31))
    x, _ = Sampler(corpus.split("train"), seq_len=64, batch_size=8).batch(3)
    assert x.shape == (8, 64)
    assert resident() - before < 50 << 20


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    def half():
        yield b"half"
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        write_chunks(tmp_path / "a", half())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 65, 1000])
def test_the_order_of_an_epoch_is_a_permutation(n):
    orders = [[permute_index(i, n, key) for i in range(n)] for key in (1, 2)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert n < 7 or (orders[0] != orders[1] and orders[0] != list(range(n)))


@pytest.mark.parametrize("n", [1, 2, 3, 64, 65, 50_000])
def test_ranks_together_are_permuted_as_each_alone(n):
    ranks = torch.arange(min(n, 300)).flip(0)
    for key in (0, mix64(5), (1 << 64) - 1):
        assert permuted_ranks(ranks, n, key).tolist() == [permute_index(i, n, key) for i in ranks.tolist()]
    assert permuted_ranks(ranks[:0], n, 1).tolist() == []


def test_the_sampler_is_a_function_of_seed_and_step():
    data = torch.arange(5000).remainder(251).to(torch.uint8)
    a, b, other = (Sampler(data, seq_len=32, batch_size=4, seed=s) for s in (0, 0, 1))
    b.batch(17)
    for step in (0, 3, 100):
        x, y = a.batch(step)
        assert torch.equal(x, b.batch(step)[0])
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert not torch.equal(x, other.batch(step)[0])
        assert x.dtype == torch.int64


def test_an_epoch_reads_every_window_once_and_the_next_cuts_elsewhere():
    sampler = Sampler(torch.zeros(1000, dtype=torch.uint8), seq_len=10, batch_size=1, seed=3)
    epochs = [sorted(sampler.starts(e * sampler.windows + i)[0] for i in range(sampler.windows)) for e in range(3)]
    for starts in epochs:
        assert {b - a for a, b in zip(starts, starts[1:], strict=False)} == {10}
        assert starts[0] < 10
        assert starts[-1] + 11 <= 1000
    assert len({starts[0] for starts in epochs}) > 1


@pytest.mark.parametrize("size", [11, 12, 20, 21, 22, 35])
def test_tiny_corpora_can_be_sampled(size):
    sampler = Sampler(torch.zeros(size, dtype=torch.uint8), seq_len=10, batch_size=5)
    assert all(sampler.batch(step)[0].shape == (5, 10) for step in range(20))
    with pytest.raises(MixerError, match="too short for one sequence"):
        Sampler(torch.zeros(10, dtype=torch.uint8), seq_len=10, batch_size=1)


# --- the cache


def test_two_writers_of_one_process_write_two_files(tmp_path):
    with whole_file(tmp_path / "a") as first:
        first.write(b"a" * 5000)
        first.flush()
        with whole_file(tmp_path / "a") as second:
            second.write(b"b" * 100)
        assert (tmp_path / "a").read_bytes() == b"b" * 100
        first.write(b"a" * 5000)
    assert (tmp_path / "a").read_bytes() == b"a" * 10_000
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_threads_that_open_a_corpus_first_all_open_it(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"the cat sat " * 100_000))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: open_corpus(str(tmp_path / "a.gz")).sha256, range(8)))
    assert found == [hashlib.sha256(b"the cat sat " * 100_000).hexdigest()] * 8


def test_what_a_killed_writer_left_goes_after_a_day(tmp_path):
    for name, age in {".a-0123.tmp": 2 * 86400, ".a-4567.tmp": 60}.items():
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    write_chunks(tmp_path / "a", [b"whole"])
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a-4567.tmp", "a"]


def test_a_long_name_can_be_written(tmp_path):
    name = "é" * 127
    write_chunks(tmp_path / name, [b"whole"])
    (tmp_path / f"{name[:120]}.gz").write_bytes(gzip.compress(b"x" * 100))
    assert open_corpus(str(tmp_path / f"{name[:120]}.gz")).size == 100


def test_a_file_through_a_link_and_a_pipe(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_chunks(tmp_path / "link", [b"whole"])
    assert (tmp_path / "real").read_bytes() == b"whole"
    assert (tmp_path / "link").is_symlink()
    write_chunks(Path("/dev/null"), [b"whole"])
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize("damage", ["cut", "emptied", "changed", "note edited", "note cut", "note gone", "file gone"])
def test_a_damaged_copy_in_the_cache_is_made_again(tmp_path, damage):
    content = b"the cat sat on the mat. " * 100
    (tmp_path / "a.gz").write_bytes(gzip.compress(content))
    file = open_corpus(str(tmp_path / "a.gz")).path
    note = file.with_name(file.name + ".json")
    stat = file.stat()
    if damage in ("cut", "emptied"):
        os.truncate(file, 1000 if damage == "cut" else 0)
    elif damage == "changed":
        file.write_bytes(b"T" + content[1:])
    elif damage.startswith("note"):
        {
            "edited": lambda: note.write_text(note.read_text().replace("2400", "2401")),
            "cut": lambda: os.truncate(note, 30),
            "gone": note.unlink,
        }[damage[5:]]()
    else:
        file.unlink()
    if file.exists():
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    said = (
        pytest.warns(UserWarning, match=f"cached copy {file} is damaged")
        if damage in ("cut", "emptied", "changed")
        else contextlib.nullcontext()
    )
    with said:
        corpus = open_corpus(str(tmp_path / "a.gz"))
    assert bytes(corpus.bytes().tolist()) == content
    assert open_corpus(str(tmp_path / "a.gz")).sha256 == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("form", ["a.txt", "a.gz", "folder"])
def test_bytes_that_change_under_a_kept_time_are_seen(tmp_path, monkeypatch, large, form):
    if large:
        monkeypatch.setattr(cache, "SMALL", 0)
        monkeypatch.setattr(corpora, "SMALL", 0)
        monkeypatch.setattr(cache, "SETTLED", -1.0)  # remembered at once
    file = tmp_path / form if form != "folder" else tmp_path / "folder" / "a.txt"
    file.parent.mkdir(exist_ok=True)

    def hashed(content: bytes) -> bool:
        file.write_bytes(gzip.compress(content, mtime=0) if form == "a.gz" else content)
        os.utime(file, (1e9, 1e9))
        time.sleep(0.02)  # more than a tick of the file system's clock
        return all(open_corpus(str(tmp_path / form)).sha256 == hashlib.sha256(content).hexdigest() for _ in range(2))

    assert hashed(b"x" * 100)
    assert hashed(b"y" * 100)


def test_a_large_file_is_read_once(tmp_path, monkeypatch, own_cache):
    monkeypatch.setattr(cache, "SMALL", 10)
    read, real = [], cache._digest
    monkeypatch.setattr(cache, "_digest", lambda path: read.append(path) or real(path))
    file = tmp_path / "a"
    file.write_bytes(b"x" * 100)
    assert cache.sha256_of(file) == cache.sha256_of(file)
    assert len(read) == 2, "what changed moments ago is not remembered"
    monkeypatch.setattr(cache, "SETTLED", -1.0)
    assert cache.sha256_of(file) == cache.sha256_of(file)
    assert len(read) == 3
    note = next((own_cache / "sha256").iterdir())
    note.write_text(note.read_text().replace(real(file)[:8], "00000000"))
    assert cache.sha256_of(file) == real(file), "a damaged note is not believed"


def test_a_plain_file_needs_no_cache(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"x" * 100))
    (tmp_path / "cache").write_text("a file, so that nobody can make a folder of it")
    for small in (cache.SMALL, 0):
        monkeypatch.setattr(cache, "SMALL", small)
        assert open_corpus(str(tmp_path / "a.txt")).size == 100
    with pytest.raises(
        MixerError, match="data: cannot write .*cache/tokenmix/b-.* set XDG_CACHE_HOME to another folder"
    ):
        open_corpus(str(tmp_path / "b.gz"))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    with pytest.raises(MixerError, match="XDG_CACHE_HOME='cache' is not an absolute path"):
        open_corpus(str(tmp_path / "b.gz"))


@pytest.mark.parametrize("form", ["gz", "zip"])
def test_what_unpacks_to_too_much_is_refused(tmp_path, own_cache, form):
    file = tmp_path / f"a.{form}"
    if form == "gz":
        file.write_bytes(gzip.compress(bytes(70 << 20), 1))
    else:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as z:
            z.writestr("a", bytes(70 << 20))
    with pytest.raises(
        MixerError,
        match=rf"a.{form} of .* bytes unpacks to .*, but only 67108864 are allowed; "
        r".* raise max_unpacked .--data.max_unpacked",
    ):
        open_corpus(str(file))
    assert [p for p in own_cache.rglob("*") if p.is_file()] == []
    assert open_corpus(str(file), bounds=Bounds(max_unpacked=70 << 20)).size == 70 << 20


def test_a_zip_with_a_password_is_refused(tmp_path):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as z:
        z.writestr("a", b"x" * 100)
    raw = bytearray(content.getvalue())
    raw[6] |= 1
    raw[raw.index(b"PK\1\2") + 8] |= 1
    (tmp_path / "a.zip").write_bytes(raw)
    with pytest.raises(MixerError, match="not a readable zip archive .*password"):
        open_corpus(str(tmp_path / "a.zip"))


def test_pipes_and_devices_are_no_corpus(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(MixerError, match=f"data: {path} is not a regular file"):
            open_corpus(path)


def test_a_name_that_is_no_text(tmp_path):
    name = os.fsdecode(b"a\xff")
    for file, content in ((f"{name}.txt", b"x" * 100), (f"{name}.gz", gzip.compress(b"x" * 100))):
        (tmp_path / file).write_bytes(content)
        assert bytes(open_corpus(str(tmp_path / file)).bytes().tolist()) == b"x" * 100
    (tmp_path / name).mkdir()
    (tmp_path / name / name).write_bytes(b"y" * 100)
    assert bytes(open_corpus(str(tmp_path / name)).bytes().tolist()) == b"y" * 100


@pytest.mark.parametrize("method", [9, 12, 14, 99])
def test_a_zip_of_another_or_a_false_method_is_refused(tmp_path, method):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("a", b"x" * 100)
    raw = bytearray(content.getvalue())
    raw[8:10] = raw[raw.index(b"PK\1\2") + 10 : raw.index(b"PK\1\2") + 12] = method.to_bytes(2, "little")
    (tmp_path / "a.zip").write_bytes(raw)
    with pytest.raises(MixerError, match="a.zip is not a readable zip archive"):
        open_corpus(str(tmp_path / "a.zip"))
