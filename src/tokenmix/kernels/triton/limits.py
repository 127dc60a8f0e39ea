"""State what each kernel moves and multiplies at the benchmark's shape, and check six rules of its code there.

    python -m tokenmix.kernels.triton.limits --out benchmarks/results/triton_limits.json

The shape is that of ``benchmarks/gpu_minutes.py``: 65,536 tokens of 2,048 features in rows of T, 16 heads, causal,
bfloat16.
Launches are recorded on meta tensors and compiled for sm_90, without a GPU. The rules:

    wide        a kernel that loads (stores) blocks of two dimensions has 128-bit loads (stores)
    room        registers, threads and shared memory leave room for two programs on a multiprocessor
    products    matrix products take bfloat16, never float32 as tf32 or as ieee
    copies      loops around matrix products load their blocks by asynchronous copies alone
    grid        at least two programs for each multiprocessor
    marks       a kernel that works on marked tiles alone has few programs, each of which looks through many tiles

Functions of torch between the kernels (products of cuBLAS) are stated, and are free of the rules. A kernel that only
looks for marks and where it finds one is free of ``wide``, ``copies`` and ``grid``.

A kernel module may except a kernel from a rule by ``EXCEPTIONS``, kernel -> rule -> reason; an exception that is not
needed is an error too. ``IDLE`` names arguments that are touched only where a tile is marked. The limit of a kernel is
the larger of two times: of its tensors, each moved once, at the measured copy bandwidth, and of its products at the
measured rate of bfloat16 products.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ...system.files import write_json
from .aot import Compiled, Configuration, compile_configuration, configuration, is_compiled, stems
from .launch import Launch, record_launches

TOKENS, DIM, HEADS, LENGTHS = 65536, 2048, 16, (1024, 4096)
PROCESSORS, REGISTERS, SHARED, THREADS, BLOCKS = 132, 65536, 228 * 1024, 2048, 32  # of an H200, each multiprocessor's
COPY, PRODUCTS = 4.22e12, 6.97e14  # bytes/s and FLOP/s, measured: benchmarks/results/nvidia_h200.json
FEW = 4 * PROCESSORS  # the most programs that may look for marks
RULES = ("wide", "room", "products", "copies", "grid", "marks")


class Work(NamedTuple):
    """Hold one launch at the benchmark's shape: its form, its kernel, and what it has to do."""

    form: str
    kernel: str
    module: str
    programs: int
    bytes: int
    flops: float
    launch: Launch

    @property
    def limit(self) -> float:
        """Return the least seconds that its bytes and its products take."""
        return max(self.bytes / COPY, self.flops / PRODUCTS)


@cache
def benchmark_work(T: int) -> tuple[Work, ...]:
    """Return every launch of the forms at the benchmark's shape, forward and backward, in rows of T tokens."""
    found = []
    for stem in stems():
        module = importlib.import_module(f"{__package__}.{stem}")
        for form, call in module.benchmark(TOKENS // T, T, DIM, HEADS):
            with record_launches() as launches:
                call()
            for one in launches:
                name, programs = one.kernel.__name__, prod(one.grid) if one.grid else 0
                found.append(Work(form, name, stem, programs, _bytes(one, stem), one.flops, one))
    return tuple(found)


def _bytes(one: Launch, stem: str) -> int:
    """Return the bytes of the tensors of a launch, each counted once; of a kernel that looks for marks, the marks."""
    looks, idle = "LOOK" in one.args, _of_module(stem, "IDLE").get(one.kernel.__name__, ())
    used = {name: a for name, a in one.args.items() if isinstance(a, Tensor) and name not in idle}
    return sum(
        min(a.nbytes, a.untyped_storage().nbytes())
        for name, a in used.items()
        if not looks or name in ("FLAG", "MARKS")
    )


def _of_module(stem: str, name: str) -> dict[str, Any]:
    """Return a table of a kernel module by the names of its kernels."""
    found: dict[str, Any] = getattr(importlib.import_module(f"{__package__}.{stem}"), name, {})
    return found


def _operations(ttir: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each line of a kernel with the operations that enclose it, outermost first."""
    inside: list[str] = []
    for row in ttir.splitlines():
        text = row.strip()
        if text.startswith("}") and inside:
            inside.pop()
        yield text, tuple(inside)
        if text.endswith(("{", "({")):
            inside.append("scf.for" if "scf.for" in text else "scf.if" if "scf.if" in text else text[:12])


def broken_rules(row: Compiled, programs: int, threads: int, *, half: bool) -> list[str]:
    """List the rules that a compiled kernel breaks.

    Args:
        programs: of its grid.
        threads: of each program.
        half: whether it reads or writes bfloat16.
    """
    n, lines = row.counts, list(_operations(row.ttir))
    dots = [(text, inside) for text, inside in lines if text.startswith("%") and "= tt.dot " in text]
    stores = [inside for text, inside in lines if text.startswith("tt.store ")]
    block = r"tensor<\d+x\d+x!tt\.ptr"
    loads, kept = (any(op in text and re.search(block, text) for text, _ in lines) for op in ("tt.load ", "tt.store "))
    found = []
    marked = bool(stores) and all("scf.if" in inside for inside in stores)
    narrow = loads and not n["LDG.128"] + n["LDGSTS.128"] + n["UTMALDG"] or kept and not n["STG.128"]
    if narrow and not marked:
        found.append("wide")
    if blocks_at_once(row, threads) < 2:
        found.append("room")
    if half and any(re.search(r": tensor<[^>]*xf32>", text) for text, _ in dots):
        found.append("products")
    if _loads_in_turn(row.ttgir) and not marked:
        found.append("copies")
    if programs < 2 * PROCESSORS and not marked:
        found.append("grid")
    if marked and programs > FEW:
        found.append("marks")
    return found


def _loads_in_turn(ttgir: str) -> bool:
    """Return whether a loop with matrix products waits for a load of a block that is not copied ahead."""
    loops: list[dict[str, bool]] = []
    inside: list[bool] = []
    for text in map(str.strip, ttgir.splitlines()):
        if text.startswith("}") and inside and inside.pop() and all(loops.pop().values()):
            return True
        if loops:
            loops[-1]["dot"] |= "warp_group_dot " in text or "tt.dot " in text
            sizes = re.search(r"= tt\.load .*tensor<(\d+)x(\d+)x", text)
            loops[-1]["load"] |= sizes is not None and "1" not in sizes.groups()
        if text.endswith(("{", "({")):
            inside.append("scf.for" in text)
            if inside[-1]:
                loops.append({"dot": False, "load": False})
    return False


def blocks_at_once(row: Compiled, threads: int) -> int:
    """Return how many programs a multiprocessor holds at once."""
    registers = -(-row.registers // 8) * 8 * threads  # handed out by eights
    return min(REGISTERS // registers, SHARED // (row.shared + 1024), THREADS // threads, BLOCKS)


def _configure(w: Work) -> Configuration:
    return configuration(f"{w.form}: {w.kernel}", w.launch)


def _compile(index: int) -> Compiled:
    return compile_configuration(_configure(benchmark_work(LENGTHS[0])[index]), 90)


def report(keep: str = "", jobs: int = 2) -> Iterator[dict[str, Any]]:
    """Yield a row for each launch whose 'form: kernel' matches ``keep``: limits, waves, rules at the first length."""
    work = [(i, w) for i, w in enumerate(benchmark_work(LENGTHS[0])) if re.search(keep, f"{w.form}: {w.kernel}")]
    known: dict[str, int] = {}
    for i, w in ((i, w) for i, w in work if is_compiled(w.launch)):  # launches of one configuration are compiled once
        known.setdefault(_identity(w), i)
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        made = {name: pool.submit(_compile, i) for name, i in known.items()}
        rows = [_row(w, made[_identity(w)].result()) if is_compiled(w.launch) else _torch_row(w) for _, w in work]
    needed = {(row["form"], row["kernel"], rule) for row in rows for rule in row["excepted"]}
    for row, (_, w) in zip(rows, work, strict=True):
        given = _of_module(w.module, "EXCEPTIONS").get(w.kernel, {})
        idle = [rule for rule in given if all((form, w.kernel, rule) not in needed for form in _forms_of(w, work))]
        yield row | {"wrong": [*row["wrong"], *(f"needs no exception from {rule}" for rule in idle)]}


def _forms_of(w: Work, work: list[tuple[int, Work]]) -> set[str]:
    """Return the forms whose kernels are in the same module."""
    return {other.form for _, other in work if other.module == w.module}


def _identity(w: Work) -> str:
    c = _configure(w)
    return f"{w.module} {w.kernel} {[str(x) for x in c[2:]]}"


def _row(w: Work, row: Compiled) -> dict[str, Any]:
    threads = 32 * w.launch.options["num_warps"]
    half = "*bf16" in _configure(w).signature.values()
    broken = broken_rules(row, w.programs, threads, half=half) if row.counts else []
    excepted = _of_module(w.module, "EXCEPTIONS").get(w.kernel, {})
    blocks = blocks_at_once(row, threads) if row.counts else 0
    return {
        **describe(w),
        "registers": row.registers,
        "threads": threads,
        "shared": row.shared,
        "blocks": blocks,
        "waves": round(w.programs / (PROCESSORS * blocks), 2) if blocks else None,
        "broken": [rule for rule in broken if rule not in excepted],
        "excepted": {rule: why for rule, why in excepted.items() if rule in broken},
        "wrong": list(row.broken),
    }


def _torch_row(w: Work) -> dict[str, Any]:
    """Return the row of a function of torch, of whose code nothing is known."""
    unknown = dict.fromkeys(("registers", "threads", "shared", "blocks", "waves"))
    return {**describe(w), **unknown, "broken": [], "excepted": {}, "wrong": []}


def describe(w: Work) -> dict[str, Any]:
    """Return what is known of a launch without compiling it."""
    known = {"form": w.form, "kernel": w.kernel, "programs": w.programs, "bytes": w.bytes, "flops": w.flops}
    return known | {"limit_us": round(w.limit * 1e6, 1)}


def _shape(row: dict[str, Any]) -> str:
    """Return the grid of a kernel and what its programs take, as text."""
    if row["threads"] is None:
        return "  by torch"
    per = f"{row['threads']:>3} x {row['registers']:>3} registers, {row['shared']:>6} B, {row['blocks']} at once"
    return f"{row['programs']:>8} programs of {per}"


def main(argv: list[str] | None = None) -> int:
    """Print a line for each kernel, write them with ``--out``, and return 1 if a rule is broken without exception."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", default="", help="only kernels whose 'form: kernel' matches this regular expression")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows = []
    for row in report(args.keep, args.jobs):
        rows.append(row)
        said = [f"BROKEN {rule}" for rule in row["broken"]] + [f"WRONG {why}" for why in row["wrong"]]
        said += [f"excepted {rule}" for rule in row["excepted"]]
        print(
            f"{row['form'] + ': ' + row['kernel']:<44}{row['bytes'] / 1e6:>8.0f} MB{row['flops'] / 1e9:>7.0f} GFLOP"
            f"{row['limit_us']:>7.0f} us{_shape(row)}  {', '.join(said)}",
            flush=True,
        )
    if args.out:
        write_json(args.out, {"shape": [TOKENS, DIM, HEADS, LENGTHS[0]], "rows": rows})
    return int(not rows or any(row["broken"] or row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
