"""Look for shapes at which `auto` is far slower than the better of its two paths, or than fused attention.

    python -m benchmarks.cliffs                          # every part, one thread
    python -m benchmarks.cliffs --record                 # and keep them in results/cliffs.json
    python -m benchmarks.cliffs --parts rows --budget 4  # one part, longer; with --record the others stay as they are

The parts are ``rows``, shapes at which it once was: few tokens, wide heads, or heads of one feature; ``half``, AFT-full
in bfloat16 over 1,024 and 4,096 tokens; and ``grid``, 240 others, drawn from 1 to 16,384 tokens, 8 to 2,048 features, 1
to 64 rows, heads of 8 to 256 features, float32 and bfloat16, causal or not, with and without the backward pass; a cell
is left out if its tensors or its work would be too large (``LARGEST``, ``MOST``). Each cell times `auto`,
the eager form and the C kernel by name in turns, in one process, by the thread's processor time, which other programs
disturb less. Which of the two `auto` takes is looked up, and its time is the less of both, so that one path is not
compared with itself; the share is the time of the better path over that. Fused attention takes its turns too; where it
takes longer than ``ATTENTION_SECONDS`` and needs more products, `auto` is compared with it as well.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix import functional
from tokenmix.lab.bench.correctness import _Seen
from tokenmix.lab.bench.roofline import machine
from tokenmix.testing.tolerances import BY_DTYPE

RECORD = Path(__file__).parent / "results" / "cliffs.json"
BACKENDS = ("auto", "eager", "cpu")
PARTS = ("rows", "half", "grid")
ROWS: dict[str, tuple[str, tuple[int, int, int, int], bool]] = {
    "linear, one token": ("linear", (64, 1, 512, 8), False),
    "linear, one token, causal": ("linear", (64, 1, 512, 8), True),
    "linear, 16 tokens": ("linear", (64, 16, 512, 8), False),
    "linear, one token, one wide head": ("linear", (16, 1, 2048, 1), False),
    "linear, heads of one feature": ("linear", (8, 64, 512, 512), False),
    "linear, heads of one feature, causal": ("linear", (8, 64, 512, 512), True),
    "linear, heads of one feature, long": ("linear", (1, 1024, 64, 64), False),
    "linear, one wide head": ("linear", (1, 256, 2048, 1), False),
    "linear, ordinary heads": ("linear", (4, 1024, 512, 8), False),
    "aft_full, one token": ("aft_full", (64, 1, 512, 1), False),
    "aft_full, two tokens": ("aft_full", (64, 2, 512, 1), False),
    "aft_full, 8 tokens": ("aft_full", (64, 8, 512, 1), False),
    "aft_conv 31, a filter per feature, causal": ("aft_conv", (8, 64, 512, 512), True),
}
"""Title -> operation; batch, tokens, features, heads; whether causal."""


CELLS, LARGEST, MOST = 240, 2**23, 2**34
"""Of the grid: how many cells, and the most numbers of a tensor and multiply-adds of the work that one may have."""
ATTENTION_SECONDS = 200e-6
LOW = 0.9
"""The share below which a cell is printed as slow."""
WINDOW = 32
OPS = ("aft_simple", "aft_local", "aft_conv", "aft_forget", "aft_full", "hydra", "linear")
LENGTHS = (1, 2, 7, 16, 50, 128, 333, 1024, 4096, 16384)
WIDTHS = (8, 24, 64, 192, 512, 1024, 2048)
BATCHES = (1, 3, 8, 64)

Call = Callable[[str], Tensor]


class Cell(NamedTuple):
    """An operation at one shape; ``sizes`` are batch, tokens, features and heads."""

    op: str
    sizes: tuple[int, int, int, int]
    causal: bool
    dtype: str
    backward: bool


def row(
    op: str, sizes: tuple[int, int, int, int], causal: bool, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], Call]:
    """Return the tensors of a row, and its call by name of the backend."""
    random = torch.Generator().manual_seed(0)
    B, T, D, heads = sizes

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    q, k, v = (draw(B, T, D) for _ in range(3))
    how: dict[str, Any] = {"causal": causal}
    if op == "attention":
        q, k, v = (a.view(B, T, heads, D // heads).transpose(1, 2) for a in (q, k, v))
        return [q, k, v], lambda _: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    if op == "linear":
        return [q, k, v], lambda backend: functional.linear_attention(q, k, v, heads=heads, **how, backend=backend)
    if op in ("aft_simple", "hydra"):
        return [q, k, v], lambda backend: getattr(functional, op)(q, k, v, **how, backend=backend)
    if op == "aft_forget":
        g = -draw(B, T, D).abs()
        return [q, k, v, g], lambda backend: functional.aft_forget(q, k, v, g, **how, backend=backend)
    if op == "aft_local":
        w = draw(WINDOW if causal else 2 * WINDOW - 1)
        return [q, k, v, w], lambda backend: functional.aft_local(q, k, v, w, window=WINDOW, **how, backend=backend)
    if op == "aft_full":
        w = draw(T, T)
        return [q, k, v, w], lambda backend: functional.aft_full(q, k, v, w, **how, backend=backend)
    k, w = k[..., :heads].contiguous(), draw(heads, 31)
    return [q, k, v, w], lambda backend: functional.aft_conv(q, k, v, w, **how, backend=backend)


def list_half() -> list[Cell]:
    """List AFT-full in bfloat16: batch, tokens, features and heads, causal or not, with and without backward."""
    sizes = [(1, 1024, 512, 8), (4, 1024, 512, 8), (1, 1024, 64, 1), (1, 4096, 512, 8), (1, 4096, 64, 1)]
    return [
        Cell("aft_full", size, causal, "bfloat16", b)
        for size in sizes
        for causal in (True, False)
        for b in (False, True)
    ]


def draw_cells(number: int) -> list[Cell]:
    """Draw the cells of the grid, each operation equally often."""
    drawn = Random(0)
    cells: list[Cell] = []
    while len(cells) < number:
        op = OPS[len(cells) % len(OPS)]
        T, D, B = drawn.choice(LENGTHS), drawn.choice(WIDTHS), drawn.choice(BATCHES)
        e = drawn.choice([e for e in (8, 32, 64, 128, 256) if e <= D])
        causal = op == "aft_forget" or drawn.random() < 0.5
        dtype = "bfloat16" if drawn.random() < 0.25 else "float32"
        cell = Cell(op, (B, T, D, D // e), causal, dtype, drawn.random() < 0.5)
        if B * T * D <= LARGEST and B * T * T * D <= MOST and cell not in cells:
            cells.append(cell)
    return cells


def prepare(cell: Cell, way: str) -> tuple[list[Tensor], Callable[[], Tensor]]:
    """Return the tensors of a cell, which ask for gradients if it has a backward pass, and its call by one way."""
    op = "attention" if way == "attention" else cell.op
    leaves, call = row(op, cell.sizes, cell.causal, getattr(torch, cell.dtype))
    for leaf in leaves:
        leaf.requires_grad_(cell.backward)
    return leaves, partial(call, way)


def measure(cell: Cell, budget: float, ways: tuple[str, ...] = BACKENDS) -> dict[str, float]:
    """Return the least milliseconds of each way, taking turns; the first call of each is not timed."""
    calls = {name: prepare(cell, name) for name in ways}
    least, drawn, start = dict.fromkeys(ways, float("inf")), Random(0), time.perf_counter()

    def run(name: str) -> float:
        leaves, call = calls[name]
        begin = time.thread_time()
        with torch.set_grad_enabled(cell.backward):
            y = call()
        if cell.backward:
            torch.autograd.grad(y, leaves, torch.ones_like(y))
        return 1e3 * (time.thread_time() - begin)

    slow = {name for name in ways if run(name) > 500 * budget}
    for name in slow:
        least[name] = run(name)
    quick = [name for name in ways if name not in slow]
    while quick and (time.perf_counter() - start < budget or max(least.values()) == float("inf")):
        # each is timed after each: a call leaves the caches to the next
        name, *before = drawn.choices(quick, k=1 + (len(quick) > 1))
        for other in before:
            run(other)
        least[name] = min(least[name], run(name))
    return least


def check_equal(cell: Cell) -> None:
    """Raise an error unless the ways compute the same numbers."""
    _, call = row(cell.op, cell.sizes, cell.causal, getattr(torch, cell.dtype))
    with torch.no_grad():
        outputs = [call(name).float() for name in BACKENDS]
    most = max(float((y - outputs[1]).abs().max()) for y in outputs) / max(float(outputs[1].abs().max()), 1e-30)
    if most > 2 * BY_DTYPE[getattr(torch, cell.dtype)]:  # both are wrong by as much
        raise SystemExit(f"{cell}: the ways differ by {most:.1e} of the largest output.")


def find_path(cell: Cell) -> str:
    """Return which of the two `auto` takes: "cpu" or "eager"."""
    seen = {}
    for backend in ("auto", "cpu"):
        _, call = prepare(cell, backend)
        with torch.set_grad_enabled(cell.backward), _Seen() as seen[backend]:
            call()
    return "cpu" if seen["auto"].path == seen["cpu"].path else "eager"


def count_products(cell: Cell, op: str) -> float:
    """Return about how many multiply-adds an operation takes, an exponential counted as ten."""
    B, T, D, heads = cell.sizes
    pairs = T / 2 if cell.causal else T
    taps = min(pairs, {"aft_local": WINDOW if cell.causal else 2 * WINDOW, "aft_conv": 31}.get(op, 0))
    each = {"linear": 2 * D / heads + 20, "attention": 2 * pairs + 10 * pairs * heads / D, "aft_full": 2 * pairs + 20}
    return B * T * D * each.get(op, 20 + (12 if op == "aft_local" else 2) * taps)


def compare(cell: Cell, budget: float, attention: bool) -> dict[str, Any]:
    """Time one cell, and say what share of the better way `auto` reaches."""
    least = measure(cell, budget, (*BACKENDS, "attention") if attention else BACKENDS)
    found: dict[str, Any] = {**cell._asdict(), **{name: round(ms, 5) for name, ms in least.items()}}
    return found | judge(cell, least, find_path(cell))


def judge(cell: Cell, ms: dict[str, float], path: str) -> dict[str, Any]:
    """Return the path of `auto`, its share of the better one, and of attention where that has more to do."""
    auto = min(ms["auto"], ms[path])
    found: dict[str, Any] = {"path": path, "share_of_better": round(min(ms["eager"], ms["cpu"], auto) / auto, 3)}
    slow = ms.get("attention", 0.0) > 1e3 * ATTENTION_SECONDS
    if slow and count_products(cell, cell.op) < count_products(cell, "attention"):
        found["share_of_attention"] = round(ms["attention"] / auto, 3)
    return found


def write_line(title: str, found: dict[str, Any]) -> str:
    """Return the line of a cell."""
    B, T, D, heads = found["sizes"]
    what = f"{B} x {T} x {D}, {heads} heads, {found['dtype']}" + ", causal" * found["causal"]
    what += ", with backward" if found["backward"] else ""
    numbers = "".join(f"{found[name]:10.3f}" for name in BACKENDS) + f"{found.get('attention', float('nan')):10.3f}"
    shares = f"{found['share_of_better']:7.2f}{found.get('share_of_attention', float('nan')):8.2f}"
    return f"{title:38}{what:62}{numbers}{shares}"


def main() -> int:
    """Measure the cells and print them, the slow ones once more at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--cells", type=int, default=CELLS, help="of the grid")
    parser.add_argument("--budget", type=float, default=1.5, help="seconds for each cell")
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts: dict[str, list[tuple[str, Cell]]] = {
        "rows": [
            (t, Cell(op, sizes, causal, "float32", b)) for t, (op, sizes, causal) in ROWS.items() for b in (False, True)
        ],
        "half": [(cell.op, cell) for cell in list_half()],
        "grid": [(cell.op, cell) for cell in draw_cells(args.cells)],
    }
    print(f"{'':100}{'auto':>10}{'eager':>10}{'kernel':>10}{'attention':>10}{'share':>7}{'of att.':>8}")
    found: dict[str, Any] = {"machine": machine(), "unit": "milliseconds of the thread, minimum"}
    if len(args.parts) < len(PARTS) and RECORD.is_file():
        kept = json.loads(RECORD.read_text())
        if args.record and kept["machine"]["device"] != found["machine"]["device"]:
            raise SystemExit(f"{RECORD.name} is of another machine, {kept['machine']['device']}: record all parts.")
        found = kept
    slow = []
    for part in args.parts:
        found[part] = []
        for title, cell in parts[part]:
            check_equal(cell)
            found[part].append({"row": title, **compare(cell, args.budget, part != "rows")})
            line = write_line(title, found[part][-1])
            print(line, flush=True)
            if min(found[part][-1]["share_of_better"], found[part][-1].get("share_of_attention", 1.0)) < LOW:
                slow.append(line)
        if args.record:
            RECORD.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{len(slow)} below {LOW}:", *slow, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
