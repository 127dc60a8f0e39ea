"""The tasks on characters: every row says what is true, at every size, whatever else is in its batch."""

from __future__ import annotations

import pytest
import torch

from tokenmix import MixerError
from tokenmix.lab.data import CHARACTER_TASKS, CHARACTERS, Synthetic, text_of

SIZES = {
    name: [(7, 2), (1, 1), (3, 12)] if len(task.sizes) == 2 else [(1,), (7,), (30,)]
    for name, task in CHARACTER_TASKS.items()
}


def number(text: str) -> int:
    """Read a number whose least significant digit comes first."""
    assert len(text) == 1 or not text.endswith("0")
    return int(text[::-1])


def check(task: str, prompt: str, answer: str) -> tuple[int, ...]:
    """Check one row by Python's own arithmetic, and return its sizes."""
    if task in ("addition", "multiplication"):
        a, b = prompt.split("+" if task == "addition" else "x")
        assert number(answer) == (number(a) + number(b) if task == "addition" else number(a) * number(b))
        return len(a), len(b)
    if task == "sort":
        items = prompt.split(",")
        assert [item[0] for item in items] == list(CHARACTERS[16 : 16 + len(items)])
        assert "".join(item[0] for item in sorted(items, key=lambda item: number(item[1:]))) == answer
        (width,) = {len(item) - 1 for item in items}
        return len(items), width
    if task == "parity":
        assert answer == str(prompt.count("1") % 2)
    elif task == "selective_copy":
        assert (prompt.replace(",", ""), len(prompt)) == (answer, 4 * len(answer))
        return (len(answer),)
    elif task == "passkey":
        assert "".join(c for c in prompt if c.isdigit()) == answer
        assert answer in prompt
        return (len(prompt) - len(answer),)
    else:
        assert (prompt[::-1] if task == "reverse" else prompt) == answer
    return (len(prompt),)


def halves(tokens: torch.Tensor, targets: torch.Tensor) -> tuple[str, str]:
    """Return prompt and answer of a row, after checking that the targets are the answer and its end."""
    prompt, rest = text_of(tokens).split("=")
    asked = text_of(targets[targets >= 0])
    assert (asked[-1], rest.rstrip("_")[: len(asked) - 1]) == (";", asked[:-1])
    assert targets.tolist().index(targets[targets >= 0][0]) == len(prompt)
    return prompt, asked[:-1]


@pytest.mark.parametrize(("task", "sizes"), [(task, sizes) for task, found in SIZES.items() for sizes in found])
def test_rows_of_a_size_say_what_is_true(task, sizes):
    drawn = Synthetic(task, seq_len=200, vocab=64)
    tokens, targets = drawn.of_sizes(sizes, "test", 40)
    assert tokens.shape == (40, drawn.tokens(sizes))
    for row, asked in zip(tokens, targets, strict=True):
        assert check(task, *halves(row, asked)) == sizes


@pytest.mark.parametrize("task", CHARACTER_TASKS)
def test_a_batch_mixes_all_sizes(task):
    drawn = Synthetic(task, seq_len=60, vocab=64, shortest=2, longest=5)
    tokens, targets = drawn.batch(600, seed=3, step=8)
    assert tokens.shape == (600, drawn.longest_row())
    found = [check(task, *halves(row, asked)) for row, asked in zip(tokens, targets, strict=True)]
    wanted = 4 ** len(drawn.sizes)
    assert len(set(found)) == wanted
    assert max(found.count(sizes) for sizes in set(found)) < 2 * 600 / wanted


def test_padded_operands_have_one_length():
    drawn = Synthetic("addition", seq_len=60, vocab=64, longest=5, pad=True)
    for sizes in ((3, 5), (5, 1), (1, 1)):
        for row, asked in zip(*drawn.of_sizes(sizes, "valid", 20), strict=True):
            prompt, answer = halves(row, asked)
            a, b = prompt.split("+")
            assert len(a) == len(b) == max(sizes)
            assert len(answer) == max(sizes) + 1
            assert int(a[::-1]) + int(b[::-1]) == int(answer[::-1])


def test_carries_run_through_the_whole_number():
    """999 + 1: draws hardly ever hold a long carry, so it is put in by hand."""
    from tokenmix.lab.data.characters import _carry_tens

    assert _carry_tens(torch.tensor([[10, 9, 9, 0]])).tolist() == [[0, 0, 0, 1]]
    assert _carry_tens(torch.tensor([[81 * 4, 81 * 3, 0, 0]])).tolist() == [[4, 5, 7, 2]]


def test_more_symbols_than_digits():
    drawn = Synthetic("copy", seq_len=60, vocab=64, shortest=20, longest=20, symbols=50)
    tokens, targets = drawn.batch(50, seed=0, step=0)
    assert set(tokens[:, :20].flatten().tolist()) == {*range(10), *range(16, 56)}
    assert torch.equal(targets[:, 20:40], tokens[:, :20])


def test_splits_and_sizes_are_drawn_apart():
    drawn = Synthetic("copy", seq_len=60, vocab=64)
    a, b, c = (
        drawn.of_sizes((9,), "valid", 5)[0],
        drawn.of_sizes((9,), "test", 5)[0],
        drawn.of_sizes((9,), "test", 5)[0],
    )
    assert torch.equal(b, c)
    assert not torch.equal(a, b)
    assert not torch.equal(drawn.of_sizes((10,), "test", 5)[0][:, :9], b[:, :9])


@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        ("addition", {"seq_len": 26}, "addition: sizes of up to 8 need seq_len >= 27, got 26"),
        ("addition", {"shortest": 9}, "needs 1 <= shortest <= longest and symbols >= 2, got 9, 8 and 10"),
        ("copy", {"symbols": 1}, "symbols >= 2, got 1, 8 and 1"),
        ("copy", {"vocab": 45}, "copy: its characters need vocab >= 46, got 45"),
        ("copy", {"symbols": 59}, "copy: its characters need vocab >= 65, got 64"),
        ("sort", {"longest": 31, "seq_len": 2000}, "sort: at most 30 numbers, got 31"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(task, options, words):
    with pytest.raises(MixerError, match=words):
        Synthetic(task, **{"seq_len": 60, "vocab": 64, **options})


@pytest.mark.parametrize("sizes", [(), (3,), (3, 0), (3, 2, 1)])
def test_wrong_sizes_are_refused(sizes):
    with pytest.raises(MixerError, match=r"addition: needs sizes of at least 1 \(digits of a, digits of b\)"):
        Synthetic("addition", seq_len=60, vocab=64).of_sizes(sizes, "test", 2)
