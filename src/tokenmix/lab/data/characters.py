"""Tasks on strings of characters whose size can grow: arithmetic, sorting, copying, parity, finding a key.

A row reads PROMPT=ANSWER; and only the answer, with the semicolon that ends it, is to be predicted. Numbers are written
with the least significant digit first, as in McLeish et al. 2024 (arXiv 2405.17399), so that a digit of a sum depends
on what was read and on one carry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CHARACTERS = "0123456789+x=,;_abcdefghijklmnopqrstuvwxyzABCD"
"""The characters, each at the index that is its token; copying has further symbols behind them."""
PLUS, TIMES, EQUALS, COMMA, END, FILL, LETTERS = 10, 11, 12, 13, 14, 15, 16
KEY_DIGITS = 5

Piece = tuple[Tensor, Tensor]
"""Part of a row: tokens (B, W) and how many of them each row has (B,)."""


@dataclass(frozen=True)
class Options:
    """Options of the tasks: operands of one length (``pad``), number of different ``symbols`` in a string."""

    pad: bool = False
    symbols: int = 10


@dataclass(frozen=True)
class CharacterTask:
    """One task.

    Args:
        about: what a row says.
        sizes: names of its sizes, one or two.
        draw: function of sizes (B, n), options and generator that returns the pieces of the prompt and of the answer.
        length: function of one row's sizes and options that returns the most tokens such a row has.
        limits: largest value of each size; None: none.
    """

    about: str
    sizes: tuple[str, ...]
    draw: Callable[[Tensor, Options, torch.Generator], tuple[list[Piece], list[Piece]]]
    length: Callable[[tuple[int, ...], Options], int]
    limits: tuple[int | None, ...] = (None, None)


def rows_of(task: CharacterTask, sizes: Tensor, options: Options, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw rows of the given sizes (B, n): tokens (B, L), filled up on the right, and the answer's mask (B, L) bool."""
    prompt, answer = task.draw(sizes, options, generator)
    rows, b = torch.arange(len(sizes)), len(sizes)
    pieces = [*prompt, _constant(b, EQUALS), *answer, _constant(b, END)]
    ends = torch.stack([length for _, length in pieces]).cumsum(0)
    tokens = torch.full((b, int(ends[-1].max()) if b else 0), FILL)
    for (part, length), end in zip(pieces, ends, strict=True):
        row, column = (torch.arange(part.shape[1]) < length[:, None]).nonzero(as_tuple=True)
        tokens[row, (end - length)[row] + column] = part[row, column]
    at, begin = torch.arange(tokens.shape[1]), ends[len(prompt)]
    return tokens, (at >= begin[rows, None]) & (at < ends[-1][:, None])


def text_of(tokens: Tensor) -> str:
    """Write tokens (T,) as characters; symbols beyond them in angle brackets."""
    return "".join(CHARACTERS[t] if t < len(CHARACTERS) else f"<{t}>" for t in tokens.tolist())


def _constant(batch: int, token: int) -> Piece:
    return torch.full((batch, 1), token), torch.ones(batch, dtype=torch.long)


def _number(lengths: Tensor, generator: torch.Generator) -> Tensor:
    """Draw numbers with the given lengths (B,) as digits (B, W), least significant first, with zeros behind the last.

    The most significant digit is not 0, except in numbers of one digit.
    """
    width = int(lengths.max()) if len(lengths) else 0
    digits = torch.randint(0, 10, (len(lengths), width), generator=generator)
    first = torch.randint(1, 10, (len(lengths), 1), generator=generator)
    at = torch.arange(width)
    top = (at == lengths[:, None] - 1) & (lengths[:, None] > 1)
    return torch.where(top, first, digits) * (at < lengths[:, None])


def _carry_tens(sums: Tensor) -> Tensor:
    """Carry tens from each column (B, W) to the next; the last must end below ten."""
    out, carry = torch.empty_like(sums), torch.zeros_like(sums[:, 0])
    for column in range(sums.shape[1]):
        total = sums[:, column] + carry
        out[:, column], carry = total % 10, total // 10
    return out


def _significant(digits: Tensor) -> Tensor:
    """Count the digits (B,) of numbers (B, W) up to the last that is not 0, and one at least."""
    return ((digits != 0) * torch.arange(1, digits.shape[1] + 1)).amax(1).clamp_min(1)


def _pad_columns(a: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(a, (0, width - a.shape[1]))


def _addition(sizes: Tensor, options: Options, generator: torch.Generator) -> tuple[list[Piece], list[Piece]]:
    width = int(sizes.max()) if len(sizes) else 1
    a, b = (_pad_columns(_number(sizes[:, i], generator), width) for i in (0, 1))
    total = _carry_tens(_pad_columns(a + b, width + 1))
    most = sizes.amax(1)
    first, second, result = (most, most, most + 1) if options.pad else (sizes[:, 0], sizes[:, 1], _significant(total))
    return [(a, first), _constant(len(sizes), PLUS), (b, second)], [(total, result)]


def _multiplication(sizes: Tensor, options: Options, generator: torch.Generator) -> tuple[list[Piece], list[Piece]]:
    a, b = (_number(sizes[:, i], generator) for i in (0, 1))
    product = a.new_zeros(len(sizes), a.shape[1] + b.shape[1])
    for column in range(b.shape[1]):
        product[:, column : column + a.shape[1]] += b[:, column, None] * a
    product = _carry_tens(product)
    result = sizes.sum(1) if options.pad else _significant(product)
    return [(a, sizes[:, 0]), _constant(len(sizes), TIMES), (b, sizes[:, 1])], [(product, result)]


def _sorting_task(sizes: Tensor, options: Options, generator: torch.Generator) -> tuple[list[Piece], list[Piece]]:
    batch, most = len(sizes), int(sizes[:, 0].max()) if len(sizes) else 1
    digits = torch.stack([_number(sizes[:, 1], generator) for _ in range(most)], 1)  # (B, numbers, W)
    there = torch.arange(most) < sizes[:, :1]
    order = torch.arange(most).expand(batch, -1)
    for column in range(digits.shape[2]):  # stable, from the least significant digit on
        key = digits[:, :, column].gather(1, order)
        order = order.gather(1, key.argsort(dim=1, stable=True))
    absent = (~there).gather(1, order).long()
    order = order.gather(1, absent.argsort(dim=1, stable=True))  # numbers that a row does not have come last
    prompt: list[Piece] = []
    for i in range(most):
        one = there[:, i].long()
        comma = [(_constant(batch, COMMA)[0], one)] if i else []
        prompt += [*comma, (_constant(batch, LETTERS + i)[0], one), (digits[:, i], sizes[:, 1] * one)]
    return prompt, [(LETTERS + order, sizes[:, 0])]


def _draw_string(lengths: Tensor, symbols: int, generator: torch.Generator) -> Tensor:
    """Draw symbols (B, W): digits, and beyond ten of them the tokens from the letters on."""
    drawn = torch.randint(0, symbols, (len(lengths), int(lengths.max()) if len(lengths) else 0), generator=generator)
    return torch.where(drawn < 10, drawn, drawn - 10 + LETTERS)


def _copy(sizes: Tensor, options: Options, generator: torch.Generator) -> tuple[list[Piece], list[Piece]]:
    lengths = sizes[:, 0]
    string = _draw_string(lengths, options.symbols, generator), lengths
    return [string], [string]


def _reverse(sizes: Tensor, options: Options, generator: torch.Generator) -> tuple[list[Piece], list[Piece]]:
    lengths = sizes[:, 0]
    string = _draw_string(lengths, options.symbols, generator)
    back = (lengths[:, None] - 1 - torch.arange(string.shape[1])).clamp_min(0)
    return [(string, lengths)], [(string.gather(1, back), lengths)]


def _parity(sizes: Tensor, options: Options, generator: torch.Generator) -> tuple[list[Piece], list[Piece]]:
    lengths = sizes[:, 0]
    bits = _draw_string(lengths, 2, generator) * (
        torch.arange(int(lengths.max()) if len(sizes) else 0) < lengths[:, None]
    )
    return [(bits, lengths)], [(bits.sum(1, keepdim=True) % 2, torch.ones_like(lengths))]


def _selective_copy(sizes: Tensor, options: Options, generator: torch.Generator) -> tuple[list[Piece], list[Piece]]:
    n = sizes[:, 0]
    string = _draw_string(n, options.symbols, generator)
    places = torch.rand(len(n), 4 * string.shape[1], generator=generator)
    outside = torch.arange(places.shape[1]) >= 4 * n[:, None]
    chosen = places.masked_fill(outside, 2.0).argsort(1)[:, : string.shape[1]]
    chosen = chosen.masked_fill(torch.arange(string.shape[1]) >= n[:, None], places.shape[1]).sort(1).values
    prompt = torch.full((len(n), places.shape[1] + 1), COMMA).scatter_(1, chosen, string)
    return [(prompt[:, :-1], 4 * n)], [(string, n)]


def _passkey(sizes: Tensor, options: Options, generator: torch.Generator) -> tuple[list[Piece], list[Piece]]:
    n, batch = sizes[:, 0], len(sizes)
    width = int(n.max()) if batch else 0
    noise = torch.randint(LETTERS, len(CHARACTERS), (batch, width), generator=generator)
    before = (torch.rand(batch, generator=generator) * (n + 1)).long()
    after = noise.gather(1, (before[:, None] + torch.arange(width)).clamp_max(max(width - 1, 0)))
    key = torch.randint(0, 10, (batch, KEY_DIGITS), generator=generator), torch.full_like(n, KEY_DIGITS)
    return [(noise, before), key, (after, n - before)], [key]


def _pair(sizes: tuple[int, ...], options: Options) -> int:
    a, b = (max(sizes), max(sizes)) if options.pad else sizes
    return a + b + max(sizes) + 4


CHARACTER_TASKS = {
    "addition": CharacterTask("a+b=sum", ("digits of a", "digits of b"), _addition, _pair),
    "multiplication": CharacterTask(
        "axb=product", ("digits of a", "digits of b"), _multiplication, lambda n, options: 2 * (n[0] + n[1]) + 3
    ),
    "sort": CharacterTask(
        "a12,b3=ba: the letters of the numbers in ascending order",
        ("numbers", "digits"),
        _sorting_task,
        lambda n, options: n[0] * (n[1] + 3) + 1,
        (len(CHARACTERS) - LETTERS, None),
    ),
    "copy": CharacterTask("a string, and the string", ("symbols",), _copy, lambda n, options: 2 * n[0] + 2),
    "reverse": CharacterTask(
        "a string, and the string backwards", ("symbols",), _reverse, lambda n, options: 2 * n[0] + 2
    ),
    "parity": CharacterTask("bits, and whether their sum is odd", ("bits",), _parity, lambda n, options: n[0] + 3),
    "selective_copy": CharacterTask(
        "n symbols among 3 n commas, and the symbols", ("symbols",), _selective_copy, lambda n, options: 5 * n[0] + 2
    ),
    "passkey": CharacterTask(
        "a number of five digits among n letters, and the number",
        ("letters",),
        _passkey,
        lambda n, options: n[0] + 2 * KEY_DIGITS + 2,
    ),
}
