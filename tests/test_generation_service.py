"""The script that converts a small GPT-2 for generation, on a few steps of a text made here."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

import docs_hooks

transformers = pytest.importorskip("transformers", reason="transformers comes with the extra hf")
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    draw = random.Random(0)
    file.write_text(" ".join(draw.choices(["häuser", "and", "trees", "of", "the", "old"], k=2000)))
    return file


def call(*words: object) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/generation_service.py"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr


def test_a_gpt2_is_trained_converted_loaded_elsewhere_timed_and_drawn(text, tmp_path):
    original, more, out = (tmp_path / name for name in ("original", "more", "out"))
    sizes = ("--dim", 16, "--layers", 2, "--heads", 2, "--positions", 32, "--batch", 2)
    call("train", original, "--text", text, "--steps", 40, "--rate", 1e-2, *sizes)
    call("train", more, "--text", text, "--start", original / "model", "--steps", 4)
    mixer = ("--mixer", '{"name": "aft_simple"}', "--last", 1)
    call("teach", original, out, "--text", text, *mixer, "--layer-steps", 2, "--steps", 2)
    call("time", original, out, "--text", text, "--contexts", 3, 12, "--batches", 2, "--rounds", 2, "--threads", 1)
    record, picture = tmp_path / "record.json", tmp_path / "picture.png"
    call("record", original, more, out, "--to", record, "--picture", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(record.read_text())
    assert 1 < found["original"]["bits_per_byte"]["mean"] < 8, "it learned which letters there are"
    row = found["rows"][0]
    assert [(each["runtime"], each["context"]) for each in row["rows"]] == [
        ("torch", 3), ("torch", 12), ("ONNX Runtime", 3), ("ONNX Runtime", 12)
    ]  # fmt: skip
    assert row["difference_in_a_fresh_process"] <= 1e-6
    held = [each["cache_bytes"] for each in row["rows"] if each["runtime"] == "torch"]
    grown = {name: held[1][name] - held[0][name] for name in ("original", "new")}
    assert grown["original"] == 2 * grown["new"] > 0, "half of the layers keep keys and values"
    table = docs_hooks.generation_service(record)
    assert table.count("last 1: `aft_simple`") == 1 + len(row["rows"])  # one of quality, the others of times


def test_the_tokenizer_of_bytes_gives_bytes(tmp_path):
    from generation_service import byte_tokenizer

    byte_tokenizer().save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    said = "Häuser, and\n\ttrees: 木 \x00"
    assert again(said, add_special_tokens=False)["input_ids"] == list(said.encode())
    assert again.decode(list(said.encode())) == said


def test_the_page_shows_what_was_recorded():
    found = json.loads((ROOT / "benchmarks/results/generation_service.json").read_text())
    page = (ROOT / "docs/hosts/service.md").read_text()
    assert docs_hooks.GENERATION in page
    longest = max(
        (timed for timed in found["rows"][0]["rows"] if timed["runtime"] == "torch"),
        key=lambda timed: (timed["batch"], timed["context"]),
    )
    assert (
        f"For {longest['batch']} texts of {longest['context']} bytes it is {longest['ratio']:.1f} times as fast" in page
    )
    assert found["rows"][0]["difference_in_a_fresh_process"] <= 1e-6
