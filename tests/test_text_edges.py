"""Texts at the edges of what people send: blank ends, capital names, columns given twice, endless digits, no text."""

from __future__ import annotations

import re
import zlib

import pytest

from tokenmix import MixerError
from tokenmix.lab.data import open_corpus, open_documents, open_labelled, open_parallel, progress, subwords
from tokenmix.lab.data.inventory import Inventory
from tokenmix.lab.data.mask_legend import read_names
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.train import label_task, match_data
from tokenmix.lab.train.config import parse_value
from tokenmix.lab.train.tasks import open_task

ROWS = "".join(f"text {i}\t{'pos' if i % 2 else 'neg'}\n" for i in range(200))
TABLE = f"text\tlabel\n{ROWS}"
DIGITS = "9" * 5000
"""More than Python turns into a number."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def refusal(call, *args, **options):
    with pytest.raises(MixerError) as found:
        call(*args, **options)
    assert "\n" not in str(found.value)
    return str(found.value)


# --- empty lines at the end ---


@pytest.mark.parametrize("end", ["\n", "\n\n\n", "\r\n", "  \n"])
def test_empty_lines_at_the_end_of_a_table_are_no_rows(tmp_path, end):
    rows, _ = open_labelled(written(tmp_path / "a.tsv", TABLE + end))
    assert sum(map(len, rows.splits.values())) == 200
    lines = "".join(f'{{"text": "text {i}"}}\n' for i in range(200))
    assert sum(map(len, open_documents(written(tmp_path / "a.jsonl", lines + end)).splits.values())) == 200


def test_empty_lines_at_the_end_of_parallel_files_are_no_pairs(tmp_path):
    source = written(tmp_path / "a.en", "".join(f"cat {i}\n" for i in range(100)) + "\n")
    target = written(tmp_path / "a.de", "".join(f"Katze {i}\n" for i in range(100)))
    assert sum(map(len, open_parallel(source, target=target).splits.values())) == 100


def test_an_empty_line_before_the_last_row_is_refused(tmp_path):
    assert "line 202 of" in refusal(open_labelled, written(tmp_path / "a.tsv", f"{TABLE}\nmore\tpos\n"))


def test_empty_cells_at_the_end_are_a_row_that_is_refused(tmp_path):
    assert "line 202 of" in refusal(open_labelled, written(tmp_path / "a.tsv", f"{TABLE}\t\n"))


# --- names ---


def test_names_of_splits_may_be_in_capitals(tmp_path):
    for name in ("Train", "DEV", "Test"):
        written(tmp_path / "a" / f"{name}.tsv", TABLE)
        written(tmp_path / "b" / f"{name}.en", "one\ntwo\n")
        written(tmp_path / "b" / f"{name}.de", "eins\nzwei\n")
        written(tmp_path / "c" / f"{name}.tsv", "source\ttarget\none\teins\n")
    assert len(open_labelled(str(tmp_path / "a"))[0].split("valid")) == 200
    assert open_parallel(str(tmp_path / "b"), languages=("en", "de")).split("test") == [
        ("one", "eins"),
        ("two", "zwei"),
    ]
    assert open_parallel(str(tmp_path / "c")).split("valid") == [("one", "eins")]


@pytest.mark.parametrize("columns", [("label",), ("text", "label"), ("text", "text")])
def test_a_column_is_not_read_twice(tmp_path, columns):
    said = refusal(open_labelled, written(tmp_path / "a.tsv", TABLE), columns=columns)
    assert f"data.columns={list(columns)}" in said


def test_source_and_target_are_two_languages(tmp_path):
    table = written(tmp_path / "a.tsv", "en\tde\n" + "".join(f"cat {i}\tKatze {i}\n" for i in range(100)))
    assert "two names that differ" in refusal(open_parallel, table, languages=("en", "en"))


@pytest.mark.parametrize("header", ["eng\tdeu", "Italian\tPolish"])
def test_names_of_languages_are_a_header_and_no_pair(tmp_path, header):
    table = written(tmp_path / "a.tsv", f"{header}\n" + "".join(f"cat {i}\tKatze {i}\n" for i in range(100)))
    assert "--data.languages" in refusal(open_parallel, table)


def test_rows_with_one_text_say_why_no_split_has_any(tmp_path):
    table = written(tmp_path / "a.tsv", "text\tlabel\n" + "same\tpos\n" * 1500)
    assert "1,500 rows of 1 different first texts, which leave none for" in refusal(open_labelled, table)


# --- digits without end ---


def test_labels_of_endless_digits_are_names(tmp_path):
    table = written(tmp_path / "a.tsv", "text\tlabel\n" + "".join(f"t {i}\t{(DIGITS, 1)[i % 2]}\n" for i in range(90)))
    rows, labels = open_labelled(table)
    assert labels == ["1", DIGITS]
    assert len(rows.inventory.lines()[0]) < 400


def test_a_dialogue_of_endless_digits_is_refused_in_one_line(tmp_path):
    said = refusal(open_parallel, written(tmp_path / "a.txt", f"1 hi\tho\n{DIGITS} hi\tho\n"))
    assert "line 2 of" in said


def test_colours_of_endless_digits_are_part_of_a_name(tmp_path):
    written(tmp_path / "classes.txt", f"cat 1 2 {DIGITS}\n")
    assert read_names(tmp_path / "classes.txt") == [(f"cat 1 2 {DIGITS}", None)]


def test_options_of_endless_digits_or_brackets_are_refused_in_one_line():
    assert parse_value("1_000") == 1000
    for value in (DIGITS, "[" * 100_000):
        text = parse_value(value)
        assert text == value
        refusal(RECIPES["text"].config().override, {"train.steps": text})
    refusal(RECIPES["text"].config().override, {f"model.mixers.{DIGITS}.window": 3})


# --- what is no text ---


@pytest.mark.parametrize("level", [6, 9])
def test_a_stream_of_zlib_is_no_corpus(tmp_path, level):
    packed = zlib.compress(b"to be or not to be. " * 400, level)
    assert "is a zlib stream" in refusal(open_corpus, written(tmp_path / "a.txt", packed))


def test_a_model_is_no_corpus(tmp_path):
    assert "is a model in GGUF" in refusal(open_corpus, written(tmp_path / "a.txt", b"GGUF\3\0\0\0" + bytes(5000)))
    corpus = open_corpus(written(tmp_path / "b.txt", b"GGUF is a format of files. " * 100))
    assert "content" not in corpus.inventory.found


@pytest.mark.parametrize(
    "content", ["caf\xe9\n".encode("latin1") * 500, "cat\n".encode("utf-16-le") * 500, bytes(4000)]
)
def test_bytes_that_are_no_text_are_told(tmp_path, content):
    corpus = open_corpus(written(tmp_path / "a.txt", content))
    assert "content: no text in UTF-8, read as the bytes that it is" in corpus.inventory.lines()[0]


def test_a_character_cut_by_the_part_that_is_looked_at_is_text(tmp_path):
    corpus = open_corpus(written(tmp_path / "a.txt", "x" + "é" * 9000))
    assert "content" not in corpus.inventory.found


def test_names_of_files_give_a_terminal_no_orders():
    inventory = Inventory("a\x1b[2Jb\nc.txt")
    inventory.leave("hidden", "\x1b]0;title\x07")
    assert all(re.fullmatch(r"[ -~]+", line) for line in inventory.lines())
    assert r"a\x1b[2Jb\nc.txt" in inventory.lines()[0]


# --- many rows ---


def test_a_table_is_read_once_before_the_first_step(tmp_path, monkeypatch):
    table = written(tmp_path / "a.tsv", TABLE)
    reads = []
    usual = label_task.open_labelled
    monkeypatch.setattr(label_task, "open_labelled", lambda *a, **k: reads.append(a) or usual(*a, **k))
    config = match_data(RECIPES["sentences"].config().override({"data.source": table}))
    task = open_task(config)
    assert len(reads) == 1
    written(tmp_path / "a.tsv", TABLE + "another\tpos\n")  # what changes in the meantime is read anew
    assert len(open_task(config).text.split("train")) + 1 >= len(task.text.split("train"))
    assert len(reads) == 2
    match_data(config)
    written(tmp_path / "a.tsv", TABLE.replace("text 7\t", "text seven\t"))
    rows = open_task(config).text.splits.values()
    assert any("text seven" in row for split in rows for row in split)


def test_long_work_on_subwords_shows_its_progress(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    subwords.Subwords.train(["one two"] * 3, 260).encode_all(["one"] * 5)
    said = capsys.readouterr().err
    assert "counting the words of texts for a tokenizer: 1 of 3" in said
    assert "cutting 5 texts into subwords, part: 1 of 1, done" in said
