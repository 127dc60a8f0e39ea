"""Texts and tables of users, packed, damaged or with odd headers, and file systems that refuse a call."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

from tokenmix.lab.data import open_corpus, open_documents, open_labelled, open_parallel

from . import attempt, run_command

TEXT = b"to be or not to be, that is the question. " * 4000
PAIRS = [(f"cat {i}", f"Katze {i}") for i in range(200)]


def _own_cache() -> None:
    os.environ["XDG_CACHE_HOME"] = str(Path("cache").resolve())


def _said(work: Any) -> str:
    """What a call returns or raises, in one line."""
    _own_cache()
    try:
        return str(work())
    except Exception as why:
        return f"{type(why).__name__}: {why}"


def _first_pair(name: str, text: str, **options: Any) -> str:
    Path(name).write_text(text)
    return _said(lambda: f"the first pair is {open_parallel(name, **options).split('train')[0]}")


@attempt("F01", "A .tsv of pandas with an index column without a name")
def index_column() -> str:
    """As ``DataFrame.to_csv(sep="\\t")`` writes it; the columns are named."""
    text = "\ten\tde\n" + "".join(f"{i}\t{a}\t{b}\n" for i, (a, b) in enumerate(PAIRS))
    return _first_pair("a.tsv", text, languages=("en", "de"))


@attempt("F02", "A named column that the table does not have")
def missing_column() -> str:
    """The table has others."""
    text = "id\tenglish\tgerman\n" + "".join(f"{i}\t{a}\t{b}\n" for i, (a, b) in enumerate(PAIRS))
    return _first_pair("b.tsv", text, languages=("en", "de"))


@attempt("F02", "A table without a header in one split only")
def missing_header() -> str:
    """The validation table begins with a row."""
    for name in ("train", "valid", "test"):
        rows = "".join(f"{i}\t{a}\t{b}\n" for i, (a, b) in enumerate(PAIRS))
        Path(f"{name}.tsv").write_text(("id\tsource\ttarget\n" if name != "valid" else "") + rows)
    return _said(lambda: f"the first pair of valid is {open_parallel('.').split('valid')[0]}")


@attempt("F03", "A tab inside of quotes in a labelled .tsv")
def quoted_tab() -> str:
    """Every tenth row."""
    rows = (f'"no\tyes {i % 3}"\tpos\n' if i % 10 == 0 else f"t{i}\t{'pos' if i % 2 else 'neg'}\n" for i in range(200))
    Path("c.tsv").write_text("text\tlabel\n" + "".join(rows))
    return _said(lambda: f"labels {', '.join(open_labelled('c.tsv')[1])}")


@attempt("F03", "Two stray quotes that swallow a row of a .csv")
def stray_quotes() -> str:
    """One at the beginning of a cell, one at the end of another."""
    rows = "".join(f"t{i},{'pos' if i % 2 else 'neg'}\n" for i in range(200))
    Path("c.csv").write_text('text,label\n"no,pos\nthe 12",neg\n' + rows)
    return _said(lambda: f"labels {', '.join(open_labelled('c.csv')[1])}")


@attempt("F03", "A row with a cell too many")
def cell_too_many() -> str:
    """In the middle of a table."""
    rows = "".join(f"{a}\t{b}{chr(9) + 'more' if i == 100 else ''}\n" for i, (a, b) in enumerate(PAIRS))
    return _first_pair("d.tsv", "source\ttarget\n" + rows)


@attempt("F05", "Corpora packed by xz, bzip2, and gzip under the name of a text")
def packed_corpora() -> str:
    """What is trained on is the text, or there is an error."""
    found = []
    for name, content in {
        "t.txt.xz": lzma.compress(TEXT),
        "t.txt.bz2": bz2.compress(TEXT),
        "t.txt": gzip.compress(TEXT),
    }.items():
        Path(name).write_bytes(content)
        found.append(
            _said(lambda name=name: "text" if bytes(open_corpus(name).bytes().tolist()) == TEXT else "packed bytes")
        )
    return ", ".join(found)


@attempt("F05", "A Zstandard file, a PDF and UTF-16 as corpora")
def foreign_corpora() -> str:
    """None of them is text."""
    found = []
    for name, content in {
        "t.zst": b"\x28\xb5\x2f\xfd" + os.urandom(5000),
        "t.txt": b"%PDF-1.7\n" + os.urandom(5000),
        "u.txt": TEXT.decode().encode("utf-16"),
    }.items():
        Path(name).write_bytes(content)
        found.append(_said(lambda name=name: f"{open_corpus(name).size} bytes are trained on")[:80])
    return "; ".join(found)


@attempt("F05", "Half of a bzip2 file of two parts is damaged")
def damaged_second_part() -> str:
    """The second part begins with other bytes."""
    Path("t.bz2").write_bytes(bz2.compress(TEXT) + b"#" + bz2.compress(TEXT)[1:])
    return _said(lambda: f"{open_corpus('t.bz2').size} of {2 * len(TEXT)} bytes")


@attempt("F07", "A folder of texts with the folders train, test and tests")
def folders_for_tests() -> str:
    """They are the user's."""
    for name in ("train", "test", "tests"):
        Path("v", name).mkdir(parents=True)
        Path("v", name, "a.txt").write_text(name * 100)

    def read() -> str:
        corpus = open_corpus("v")
        told = getattr(corpus, "inventory", None)
        return f"{corpus.size} of 1400 bytes{'; ' + told.found['splits'] if told else ''}"

    return _said(read)


@attempt("F07", "A folder with train, dev and test")
def folder_of_splits() -> str:
    """Is the text for the test trained on?"""
    for name in ("train", "dev", "test"):
        Path("v", name).mkdir(parents=True)
        Path("v", name, "a.txt").write_text(name[0] * 1000)
    return _said(lambda: f"train holds the letters {sorted(set(map(chr, open_corpus('v').split('train').tolist())))}")


@attempt("F08", "Half of an emoji in a .jsonl")
def lone_surrogate() -> str:
    """As UTF-16 that was cut gives it."""
    Path("s.jsonl").write_text("".join(json.dumps({"text": f"hi \ud83d {i}"}) + "\n" for i in range(100)))
    return _said(lambda: f"{len(open_documents('s.jsonl').split('train'))} documents")


@attempt("F24", "A labelled table in the form .csv, with commas and line ends in quotes")
def labelled_csv() -> str:
    """As any spreadsheet saves it."""
    rows = "".join(f'"text {i}, and\nmore",{i % 2}\r\n' for i in range(200))
    Path("a.csv").write_text("\ufefftext,label\r\n" + rows, newline="")
    return _said(lambda: f"labels {open_labelled('a.csv')[1]}, {open_labelled('a.csv')[0].split('train')[0]!r}")


def _train(patch: str) -> str:
    """What a training run of two steps says where a call of the system refuses."""
    Path("corpus.txt").write_bytes(TEXT)
    Path("patched").mkdir()
    Path("patched/sitecustomize.py").write_text(patch)
    path = os.pathsep.join(["patched", os.environ.get("PYTHONPATH", "")])
    argv = "train text --data corpus.txt --size smoke --train.steps 2 --optim.warmup 1 --out run"
    done = run_command(*argv.split(), env={"PYTHONPATH": path})
    lines = [line for line in done.stderr.splitlines() if line.startswith(("warning", "error"))]
    return f"exit {done.returncode}; {' '.join(lines)}"


@attempt("F18", "Training where the file system has no locks (ENOLCK, as on NFS)")
def no_locks() -> str:
    """No other process trains there."""
    return _train("import fcntl\ndef no(*a): raise OSError(37, 'No locks available')\nfcntl.flock = no\n")


@attempt("F19", "Training where folders cannot be flushed (EINVAL, as on CIFS)")
def no_flush() -> str:
    """The files are written all the same."""
    return _train(
        "import os, stat\nf = os.fsync\ndef no(d):\n"
        "    if stat.S_ISDIR(os.fstat(d).st_mode): raise OSError(22, 'Invalid argument')\n"
        "    return f(d)\nos.fsync = no\n"
    )


@attempt("-", "A warm-up of 100 steps in a run of 20")
def long_warmup() -> str:
    """Is there a word of it?"""
    Path("corpus.txt").write_bytes(TEXT)
    argv = "train text --data corpus.txt --size smoke --train.steps 20 --optim.warmup 100 --train.eval_every 20 "
    argv += "--train.save_every 20 --out run"
    done = run_command(*argv.split())
    said = [line for line in done.stderr.splitlines() if "warm" in line and "warning" in line]
    return said[0] if said else "no word"
