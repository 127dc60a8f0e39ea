"""A run goes on with the data it began with: any change of contents stops it, for every kind of text."""

from __future__ import annotations

import json
import os
import shutil
import time
from types import SimpleNamespace

import pytest

from tokenmix import MixerError
from tokenmix.lab.data import open_corpus, open_documents, open_labelled, open_parallel
from tokenmix.lab.train.subword_task import SubwordTask
from tokenmix.lab.train.text_task import TextTask


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def lines(form):
    return "".join(form.format(i=i) + "\n" for i in range(300)).encode()


def split_in_three(form, ending):
    return {f"{name}.{ending}": lines(name + form) for name in ("train", "valid", "test")}


DIALOGUE = "1 your persona: i am {i} .\n2 hi {i} ?\tfine {i} .\n3 and ?\tno {i} ."
KINDS = {
    "corpus": (open_corpus, "a.txt", {"a.txt": lines("text {i}")}),
    "packed corpus": (open_corpus, "a.txt", {"a.txt": lines("text {i}")}),
    "folder": (open_corpus, "", {"b.txt": lines("b {i}"), "c/d.txt": lines("d {i}")}),
    "folder of splits": (open_corpus, "", {f"{n}/a.txt": lines(n + " {i}") for n in ("train", "valid", "test")}),
    "documents": (open_documents, "a.jsonl", {"a.jsonl": lines('{{"text": "text {i}"}}')}),
    "folder of documents": (open_documents, "", {f"{i}.txt": b"document %d" % i for i in range(300)}),
    "parallel table": (open_parallel, "a.tsv", {"a.tsv": b"source\ttarget\n" + lines("a {i}\tb {i}")}),
    "parallel folder": (open_parallel, "", split_in_three(" a {i}", "en") | split_in_three(" b {i}", "de")),
    "dialogues": (open_parallel, "a.txt", {"a.txt": lines(DIALOGUE)}),
    "labelled": (open_labelled, "a.csv", {"a.csv": b"text,label\n" + lines("text {i},1") + b"other,0\nanother,0\n"}),
}


def check(kind, root):
    """Open data as a task does, and compare it with what env.json recorded before."""
    open_it, source, _ = KINDS[kind]
    opened = open_it(str(root / source))
    if open_it is open_corpus:
        task = SimpleNamespace(corpus=opened)
        return TextTask.facts(task), lambda env: TextTask.check_same(task, env)
    text = opened[0] if isinstance(opened, tuple) else opened
    task = SimpleNamespace(text=text, subwords=SimpleNamespace(vocab=300, sha256="0"))
    return {"texts": SubwordTask.same(task)}, lambda env: SubwordTask.check_same(task, env)


@pytest.mark.parametrize("kind", KINDS)
def test_one_byte_stops_a_run_and_a_new_time_does_not(tmp_path, kind):
    root = tmp_path / "data"
    for name, content in KINDS[kind][2].items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    env = json.loads(json.dumps(check(kind, root)[0]))
    moved = tmp_path / "moved"
    shutil.copytree(root, moved)
    for file in moved.rglob("*"):
        os.utime(file, (1e9, 1e9))
    check(kind, moved)[1](env)  # the same content elsewhere, with other times
    file = sorted(p for p in root.rglob("*") if p.is_file())[0]
    stat, content = file.stat(), file.read_bytes()
    at = content.rindex(b"9" if b"9" in content else b"0")
    file.write_bytes(content[:at] + b"7" + content[at + 1 :])  # one byte, the size and the time are kept
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(MixerError, match="changed since this run began"):
        check(kind, root)[1](env)
    file.write_bytes(content)
    check(kind, root)[1](env)


@pytest.mark.parametrize("kind", ["folder", "folder of documents"])
def test_files_that_come_go_or_change_places_stop_a_run(tmp_path, kind):
    root = tmp_path / "data"
    for name, content in KINDS[kind][2].items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    env = json.loads(json.dumps(check(kind, root)[0]))
    files = sorted(p for p in root.rglob("*") if p.is_file())
    first, second = files[0], files[-1]
    contents = first.read_bytes(), second.read_bytes()

    def swap():
        first.write_bytes(contents[1])
        second.write_bytes(contents[0])

    for spoil in (lambda: (root / "new.txt").write_bytes(b"more 7"), first.unlink, swap):
        spoil()
        time.sleep(0.02)  # more than a tick of the file system's clock
        with pytest.raises(MixerError, match="changed since this run began"):
            check(kind, root)[1](env)
        (root / "new.txt").unlink(missing_ok=True)
        first.write_bytes(contents[0])
        second.write_bytes(contents[1])
        check(kind, root)[1](env)


def test_a_line_that_moves_to_another_split_stops_a_run(tmp_path):
    """The bytes of all splits together stay what they were."""
    root = tmp_path / "data"
    root.mkdir()
    for name, content in {"train.txt": b"a" * 500, "valid.txt": b"v" * 100, "test.txt": b"t" * 100}.items():
        (root / name).write_bytes(content)
    kind = "folder of splits"
    env = json.loads(json.dumps(check(kind, root)[0]))
    (root / "train.txt").write_bytes(b"a" * 490)
    (root / "valid.txt").write_bytes(b"a" * 10 + b"v" * 100)
    with pytest.raises(MixerError, match="the splits of data .* changed since this run began"):
        check(kind, root)[1](env)
