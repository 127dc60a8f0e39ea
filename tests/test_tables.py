"""Tables of texts: columns by name, rows held to the header, quotes that join nothing in silence."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
import tracemalloc
import zipfile

import pyarrow.parquet
import pytest

from tokenmix import MixerError
from tokenmix.lab.data import open_documents, open_labelled, open_parallel, progress
from tokenmix.lab.data.inventory import Inventory
from tokenmix.lab.data.tables import column_names, read_columns

PAIRS = [(f"cat {i}", f"Katze {i}") for i in range(200)]


def table(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


def rows_of(text):
    return sorted(pair for rows in text.splits.values() for pair in rows)


# --- columns ---


@pytest.mark.parametrize(
    ("name", "header", "row"),
    [
        ("a.tsv", "\ten\tde\n", "{i}\t{en}\t{de}\n"),  # pandas' to_csv(sep="\t"): an index without a name
        ("a.csv", ",en,de\r\n", "{i},{en},{de}\r\n"),
        ("a.csv", "id;de ; en\n", "{i};{de};{en}\n"),
        ("a.csv", '"en","note","de"\n', '"{en}","a, b","{de}"\n'),
        ("a.tsv", '"en"\t"de"\n', '"{en}"\t"{de}"\n'),
        ("a.csv", "en|de\n", "{en}|{de}\n"),
    ],
)
def test_columns_are_read_by_name(tmp_path, name, header, row):
    text = header + "".join(row.format(i=i, en=en, de=de) for i, (en, de) in enumerate(PAIRS))
    found = open_parallel(str(table(tmp_path / name, text)), languages=("en", "de"))
    assert rows_of(found) == sorted(PAIRS)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path, encoding):
    text = "en\tde\n" + "".join(f"{en} ä\t{de}\n" for en, de in PAIRS)
    found = open_parallel(str(table(tmp_path / "a.tsv", text, encoding)), languages=("en", "de"))
    assert rows_of(found) == sorted((en + " ä", de) for en, de in PAIRS)


@pytest.mark.parametrize("pack", ["gz", "bz2", "xz", "zip", "no ending"])
def test_packed_tables_are_known_by_their_content(tmp_path, pack):
    content = ("source\ttarget\n" + "".join(f"{a}\t{b}\n" for a, b in PAIRS)).encode()
    file = tmp_path / ("a.tsv" if pack == "no ending" else f"a.tsv.{pack}")
    if pack == "zip":
        with zipfile.ZipFile(file, "w") as z:
            z.writestr("a.tsv", content)
    else:
        file.write_bytes({"gz": gzip, "bz2": bz2, "xz": lzma, "no ending": gzip}[pack].compress(content))
    assert rows_of(open_parallel(str(file))) == sorted(PAIRS)


def test_an_array_of_json_and_parquet_hold_the_same_pairs(tmp_path):
    records = [{"n": i, "target": de, "source": en} for i, (en, de) in enumerate(PAIRS)]
    (tmp_path / "a.json").write_text(json.dumps(records, indent=1))
    (tmp_path / "b.ndjson").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "c.json").write_text((tmp_path / "b.ndjson").read_text())
    for name in ("a.json", "b.ndjson", "c.json"):
        assert rows_of(open_parallel(str(tmp_path / name))) == sorted(PAIRS)


def test_parquet_is_read_by_name_or_says_what_it_needs(tmp_path, monkeypatch):
    columns = {"label": [i % 2 for i in range(200)], "extra": [0.5] * 200, "text": [en for en, _ in PAIRS]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    rows, labels = open_labelled(str(tmp_path / "a.parquet"))
    assert labels == ["0", "1"]
    assert rows_of(rows) == sorted((en, str(i % 2)) for i, (en, _) in enumerate(PAIRS))
    with pytest.raises(MixerError, match="has no column 'stars', but label, extra, text"):
        open_labelled(str(tmp_path / "a.parquet"), label="stars")
    with pytest.raises(MixerError, match="row 1 of .*'extra' must be a text, got 0.5"):
        open_labelled(str(tmp_path / "a.parquet"), label="extra")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(MixerError, match="is not a readable Parquet file"):
        open_labelled(str(tmp_path / "a.parquet"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MixerError, match="a.parquet needs the extra 'tables' .*: pip install"):
        open_labelled(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("name", "text", "options", "words"),
    [
        ("a.tsv", "id\tenglish\tgerman\n1\ta\tb\n", {"languages": ("en", "de")}, "'en' in line 1, but 'id', 'english'"),
        ("a.tsv", "id\tenglish\tgerman\n1\ta\tb\n", {}, "line 1 of .* holds 'id', 'english', 'german', not 'source'"),
        ("a.tsv", "en\tde\na\tb\n", {}, "name the columns to read .--data.languages."),
        ("a.tsv", "source\ttarget\tsource\na\tb\tc\n", {}, "two columns with the name 'source'"),
        ("a.csv", "source,target\na,b,c\n", {}, "line 2 of .* has 3 cells between commas, line 1 has 2"),
        ("a.csv", "source,target\na,b\nc\n", {}, "line 3 of .* has 1 cell between commas, line 1 has 2"),
        ("a.csv", "source,target\na,b\n\nc,d\n", {}, "line 3 of .* has 1 cell"),
        ("a.csv", "source,target\na,\n", {}, "line 2 of .* none of them empty; target is"),
        ("a.csv", 'source,target\n"a,b\nc,d\n', {}, "row that begins in line 2 of .* is not closed"),
        ("a.csv", 'source,target\n"a" b,c\n', {}, "line 2 of .* stands inside of its cell"),
        ("a.csv", 'source,target\n"no,pos\nthe 12",neg\nx,y\n', {}, "a quote joins lines 2 to 3 to one row"),
        ("a.tsv", "source\ttarget\na\tb\tc\n", {}, "line 2 of .* has 3 cells between tabs"),
        ("a.tsv", 'source\ttarget\n"a\tb\tc\nd\te\n', {}, "line 2 of .* has 3 cells between tabs"),
        ("a.tsv", 'source\ttarget\n"a"\t"b"\n"c\td"\n"e"\t"f"\n"g"\t"h"\n', {}, "line 3 of .* has 1 cell between tabs"),
        ("a.csv", "source,target\na\0,b\n", {}, "line 2 of .* holds a NUL"),
        ("a.csv", "", {}, "is empty"),
        ("a.csv", "source,target\n", {}, "has a header and no rows"),
        ("a.jsonl", '{"source": "a", "target": "b", "source": "c"}\n', {}, "line 1 of .* names 'source' twice"),
        ("a.jsonl", '{"source": "a", "target": null}\n', {}, "'target' must be a text, got null"),
        ("a.jsonl", '{"source": "a", "target": 1.5}\n', {}, "'target' must be a text, got 1.5"),
        ("a.jsonl", '{"source": "a", "target": "\\u0000"}\n', {}, "line 1 of .* holds a NUL"),
        ("a.jsonl", '{"source": "a", "target": "\\ud83d"}\n', {}, r"line 1 of .*'target' holds .ud83d, half of"),
        ("a.json", '[{"source": "a", "target": "b"}, 3]', {}, "entry 2 of .* must be an object"),
        ("a.json", '[{"source": "a", "tgt": "b"}]', {}, "entry 1 of .* it has no 'target', but 'source', 'tgt'"),
        ("a.json", '[{"source": ', {}, "is not readable JSON"),
        ("a.json", '{"source": ["a"],\n "target": ["b"]}', {}, "or an array the whole file"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(tmp_path, name, text, options, words):
    with pytest.raises(MixerError, match=words) as caught:
        open_parallel(str(table(tmp_path / name, text)), **options)
    assert "\n" not in str(caught.value)


def test_a_header_in_one_split_only_is_refused(tmp_path):
    for name in ("train", "valid", "test"):
        table(tmp_path / f"{name}.tsv", "source\ttarget\n" * (name != "valid") + "a\tb\nc\td\n")
    with pytest.raises(
        MixerError, match=r"line 1 of .*train.tsv names source and target, that of .*valid.tsv does not"
    ):
        open_parallel(str(tmp_path))
    table(tmp_path / "valid.tsv", "target\tn\tsource\nb\t1\ta\n")  # another order
    assert open_parallel(str(tmp_path)).split("valid") == [("a", "b")]
    labelled = tmp_path / "labelled"
    labelled.mkdir()
    for name in ("train", "valid", "test"):
        table(labelled / f"{name}.csv", "text,label\n" * (name != "test") + "a,1\nb,2\n")
    with pytest.raises(MixerError, match="test.csv has no column 'text' in line 1, but 'a', '1'"):
        open_labelled(str(labelled))


# --- quotes ---


def test_quotes_around_cells_and_quotes_in_texts(tmp_path):
    rest = [(f"t{i}", "pos" if i % 2 else "neg") for i in range(4)]

    def read(name, text):
        return read_columns(table(tmp_path / name, text), ("text", "label"), found)

    lines = "".join(f"{a}\t{b}\n" for a, b in rest)
    found = Inventory("a")
    assert read("a.tsv", f'text\tlabel\n"no\tyes"\tpos\n{lines}') == [("no\tyes", "pos"), *rest]  # a tab in its cell
    assert read("a.tsv", f'text\tlabel\n"no" way\tpos\n{lines}') == [('"no" way', "pos"), *rest]
    assert found.found["quotes"] == "kept as part of the text"
    assert read("a.tsv", f'text\tlabel\n"no way\tpos\n{lines}he said so"\tneg\n') == [
        ('"no way', "pos"),
        *rest,
        ('he said so"', "neg"),
    ]
    assert read("a.tsv", f'text\tlabel\n"a whole one"\tpos\n{lines}') == [('"a whole one"', "pos"), *rest]
    assert read("a.tsv", f'text\tlabel\n"say ""no"""\tpos\n{lines}') == [('say "no"', "pos"), *rest]
    lines = "".join(f'"{a}, b"\t{b}\n' for a, b in rest)  # quotes around all of a column
    assert read("a.tsv", f"text\tlabel\n{lines}") == [(f"{a}, b", b) for a, b in rest]
    lines = "".join(f"{a},{b}\n" for a, b in rest)
    found = Inventory("a")
    assert read("a.csv", f'text,label\n"no, and\n\nmore",pos\n{lines}') == [("no, and\n\nmore", "pos"), *rest]
    assert found.found["rows over several lines"] == "1, the longest in lines 2 to 4"
    lines = "".join(f'"{a}, and\n{a}",{b}\n' for a, b in rest)  # each line has two cells, were quotes text
    assert read("a.csv", f"text,label\n{lines}") == [(f"{a}, and\n{a}", b) for a, b in rest]
    lines = "".join(f"{a},{b}\n" for a, b in rest)
    assert read("a.csv", f'text,label\nmy 12" pipe,pos\n{lines}')[0] == ('my 12" pipe', "pos")


def test_a_cell_may_be_longer_than_csv_allows_by_default(tmp_path):
    long = "word " * 60_000
    text = "text,label\n" + "".join(f'"{long}{i}",{i % 2}\n' for i in range(30))
    rows, _ = open_labelled(str(table(tmp_path / "a.csv", text)), split=(80, 10, 10))
    assert {len(text) for text, _ in rows.split("train")} <= {300_001, 300_002}


def test_line_ends_of_old_macs(tmp_path):
    assert read_columns(table(tmp_path / "a.csv", "text,label\ra,1\rb,2\r"), ("label",)) == [("1",), ("2",)]
    assert column_names(tmp_path / "a.csv") == ["text", "label"]


# --- what was found ---


def test_a_reader_says_what_it_found_and_what_it_left_out(tmp_path):
    for name, n in (("train", 30), ("dev", 2), ("test", 3)):
        table(tmp_path / f"x_{name}.csv", "id,text,label\n" + "".join(f"{i},t{i},{i % 2}\n" for i in range(n)))
    (tmp_path / "readme.md").write_text("what it is")
    (tmp_path / ".hidden").write_text("x")
    rows, _ = open_labelled(str(tmp_path))
    assert rows.inventory is not None
    assert rows.inventory.lines() == [
        f"data: {tmp_path}: 3 files, 35 rows; columns: text, label (not 'id'); splits: train 30, valid 2, test 3; "
        "labels in training: 0 15, 1 15.",
        f"data: {tmp_path}: left out: 1 hidden (.hidden); 1 other files (readme.md).",
    ]


def test_a_table_without_a_header_is_told(tmp_path):
    found = open_parallel(str(table(tmp_path / "a.tsv", "".join(f"{a}\t{b}\n" for a, b in PAIRS))))
    assert "by place, as line 1 names none (cat 0 | Katze 0)" in found.inventory.lines()[0]


def test_files_of_two_languages_belong_together_by_name(tmp_path):
    for stem in ("train", "valid", "test_2016", "test_2017"):
        for language in ("en", "de"):
            table(tmp_path / f"{stem}.{language}", f"{stem} {language} a\n{stem} {language} b\n")
    (tmp_path / "test_2016.de").unlink()
    found = open_parallel(str(tmp_path), languages=("en", "de"))
    assert found.split("test")[0] == ("test_2017 en a", "test_2017 de a")
    assert found.inventory.left_out == {"other files": (1, ["test_2016.en"])}
    (tmp_path / "test_2017.en").unlink()
    with pytest.raises(MixerError, match="test_2016.en and test_2017.de, but no two test files whose names differ in"):
        open_parallel(str(tmp_path), languages=("en", "de"))


def test_documents_of_a_csv(tmp_path):
    rows = open_documents(str(table(tmp_path / "a.csv", "n,text\n" + "".join(f"{i},t{i}\n" for i in range(100)))))
    assert rows_of(rows) == sorted((f"t{i}",) for i in range(100))


# --- large files ---


@pytest.mark.parametrize("ending", ["tsv", "csv", "jsonl"])
def test_a_large_table_is_held_a_line_at_a_time(tmp_path, ending):
    """One narrow column of 16 MB is read in the memory of that column."""
    filler, n = "x " * 2000, 4000
    row = {"tsv": "{i}\t{filler}\n", "csv": '{i},"{filler}"\n', "jsonl": '{{"text": "{i}", "other": "{filler}"}}\n'}
    header = {"tsv": "text\tother\n", "csv": "text,other\n", "jsonl": ""}[ending]
    file = tmp_path / f"a.{ending}"
    file.write_text(header + "".join(row[ending].format(i=i, filler=filler) for i in range(n)))
    assert file.stat().st_size > 16_000_000
    tracemalloc.start()
    try:
        rows = open_documents(str(file), column="text")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(len(rows.split(name)) for name in rows.splits) == n
    assert most < 6_000_000


def test_reading_says_how_far_it_is_only_where_it_takes_long(tmp_path, monkeypatch, capfd):
    file = table(tmp_path / "a.tsv", "".join(f"{a}\t{b}\n" for a, b in PAIRS * 10))
    open_parallel(str(file))
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    open_parallel(str(file))
    assert f"data: reading {file}: 100%, done\n" in capfd.readouterr().err
