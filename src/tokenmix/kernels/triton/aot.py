"""Compile every configuration the launchers can choose, ahead of time and without a GPU.

    python -m tokenmix.kernels.triton.aot --arch 80 90

Each kernel module lists calls on meta tensors (``samples``). What they would launch is compiled to a cubin, and its
machine code is read with the cuobjdump of the triton package. Rules: no stack frame, no spills, shared memory within
the architecture's limit, tensor core instructions wherever the kernel multiplies matrices in half precision.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ...types import Options
from .launch import Launch, record_launches

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
POINTERS |= {torch.uint8: "*u8", torch.int8: "*i8", torch.bool: "*i1"}
COUNTS = {
    "HGMMA": r"\bHGMMA",
    "HMMA": r"\bHMMA",
    "EX2": r"MUFU\.EX2",
    "MUFU": r"\bMUFU\.",
    "LDG.128": r"LDG\.E\S*\.128",
    "STG.128": r"STG\.E\S*\.128",
}
COUNTS |= {
    "LDG": r"\bLDG\.",
    "LDGSTS": r"\bLDGSTS",
    "LDGSTS.128": r"LDGSTS\.E\S*\.128",
    "UTMALDG": r"\bUTMALDG",
    "SHFL": r"\bSHFL",
    "LDL": r"\bLDL",
    "STL": r"\bSTL",
    "SASS": r"\n\s+/\*[0-9a-f]{4,}\*/",
}


class Configuration(NamedTuple):
    """Hold a kernel with the types and constants of one launch."""

    label: str
    kernel: triton.JITFunction
    signature: dict[str, str]
    constants: Options
    aligned: tuple[str, ...]
    options: dict[str, int]


class Compiled(NamedTuple):
    """Hold what the compiler made of a configuration on one architecture."""

    label: str
    arch: int
    registers: int
    stack: int
    shared: int
    counts: dict[str, int]
    broken: tuple[str, ...]
    ttir: str = ""
    ttgir: str = ""


def stems() -> list[str]:
    """Return the modules that hold kernels: every one here that lists ``samples``."""
    here = Path(__file__).parent
    return sorted(p.stem for p in here.glob("*.py") if not p.stem.startswith("_") and "\ndef samples(" in p.read_text())


@cache
def configurations(only: tuple[str, ...] = ()) -> tuple[Configuration, ...]:
    """Return every different configuration chosen for the samples of the kernel modules, or of those in ``only``."""
    found: dict[tuple[object, ...], Configuration] = {}
    for stem in only or stems():
        for label, call in importlib.import_module(f"{__package__}.{stem}").samples():
            with record_launches() as launches:
                call()
            for one in filter(is_compiled, launches):
                c = configuration(f"{stem} {label}: {one.kernel.__name__}", one)
                found.setdefault((one.kernel, *(str(x) for x in c[2:])), c)
    return tuple(found.values())


@cache
def fullest_configurations(only: tuple[str, ...] = ()) -> tuple[Configuration, ...]:
    """Return the configuration with the most arguments, causal first, of each kernel and element size without float16.

    It needs the most registers.
    """
    found: dict[tuple[object, ...], Configuration] = {}
    for c in configurations(only):
        wide = not {"*bf16", "*fp16"} & set(c.signature.values())
        key = c.kernel, wide
        if "*fp16" not in c.signature.values() and (
            key not in found or _count_arguments(c) > _count_arguments(found[key])
        ):
            found[key] = c
    return tuple(found.values())


def _count_arguments(c: Configuration) -> int:
    return sum(c.constants.get(name, 0) is not None for name in c.signature) + bool(c.constants.get("CAUSAL"))


def is_compiled(one: Launch) -> bool:
    """Return whether a launch is of a kernel, not of a function of torch."""
    return isinstance(one.kernel, triton.JITFunction)


def configuration(label: str, one: Launch) -> Configuration:
    """Describe a launch's types as triton's own launcher specialises them.

    Constants, None and 1 are specialised by value, addresses and integers by divisibility by 16.
    """
    assert isinstance(one.kernel, triton.JITFunction)
    constants, signature, aligned = {}, {}, []
    fixed = {one.kernel.arg_names[i] for i in one.kernel.constexprs}
    for name in one.kernel.arg_names:
        value = one.args[name]
        if name in fixed or value is None or (type(value) is int and value == 1):
            constants[name], signature[name] = value, "constexpr"
            continue
        signature[name] = _type(value)
        if isinstance(value, Tensor) or (type(value) is int and value % 16 == 0):
            aligned.append(name)
    return Configuration(label, one.kernel, signature, constants, tuple(aligned), one.options)


def _type(value: Tensor | float) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, bool):
        return "u1"
    return "fp32" if isinstance(value, float) else "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_configuration(c: Configuration, arch: int) -> Compiled:
    """Compile one configuration and read the result."""
    names = c.kernel.arg_names
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in c.aligned}
    source = ASTSource(
        fn=c.kernel,
        signature=c.signature,
        constexprs={(names.index(n),): v for n, v in c.constants.items()},
        attrs=attrs,
    )
    try:
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=c.options)
    except Exception as why:  # a kernel that the compiler rejects becomes a row of the report and does not end it
        return Compiled(c.label, arch, 0, 0, 0, {}, (f"does not compile: {str(why).strip().splitlines()[-1]}",))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "k.cubin")
        file.write_bytes(built.asm["cubin"])
        usage, code = (
            subprocess.run([TOOLS / "cuobjdump", flag, file], capture_output=True, text=True).stdout
            for flag in ("--dump-resource-usage", "--dump-sass")
        )
    counts = {name: len(re.findall(pattern, code)) for name, pattern in COUNTS.items()}
    said = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    registers, stack = (int(n) for n in said.groups())  # type: ignore[union-attr]  # it always names both
    row = Compiled(
        c.label, arch, registers, stack, built.metadata.shared, counts, (), built.asm["ttir"], built.asm["ttgir"]
    )
    return row._replace(broken=tuple(_broken_rules(row)))


def _broken_rules(row: Compiled) -> list[str]:
    """List the rules this row breaks."""
    n, found = row.counts, []
    if row.stack:
        found.append(f"stack of {row.stack} bytes")
    if n["LDL"] or n["STL"]:
        found.append(f"{n['LDL'] + n['STL']} spill instructions")
    if row.shared > SHARED_LIMIT.get(row.arch, SHARED_LIMIT[80]):
        found.append(f"{row.shared} bytes of shared memory")
    if re.search(r"tt\.dot .*x(bf16|f16)>.* ->", row.ttir) and not (n["HGMMA"] if row.arch == 90 else n["HMMA"]):
        found.append("no tensor core instructions")
    if not n["SASS"]:
        found.append("no machine code found")
    return found


def _nth(task: tuple[int, int, tuple[str, ...], bool]) -> Compiled:
    index, arch, only, few = task
    return compile_configuration((fullest_configurations if few else configurations)(only)[index], arch)


def compile_report(
    arch: int, *, only: tuple[str, ...] = (), jobs: int = 2, keep: str = "", few: bool = False
) -> Iterator[Compiled]:
    """Yield a row for each configuration (of the fullest if ``few``) whose label matches the pattern ``keep``."""
    tasks = [
        (i, arch, only, few)
        for i, c in enumerate((fullest_configurations if few else configurations)(only))
        if re.search(keep, c.label)
    ]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        yield from pool.map(_nth, tasks)


HEAD = f"{'kernel':<60} sm  regs stack shared " + " ".join(f"{name:>7}" for name in COUNTS)


def line(r: Compiled) -> str:
    """Return a row as text."""
    counts = " ".join(f"{r.counts.get(name, 0):>7}" for name in COUNTS)
    return f"{r.label:<60} {r.arch} {r.registers:>5} {r.stack:>5} {r.shared:>6} {counts}" + "".join(
        f"  BROKEN: {why}" for why in r.broken
    )


def main(argv: list[str] | None = None) -> int:
    """Print the report, and return 1 if a rule is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--only", nargs="+", default=[], help=f"kernel modules: {', '.join(stems())}")
    parser.add_argument(
        "--keep", default="", help="compile only configurations whose label matches this regular expression"
    )
    parser.add_argument(
        "--fullest",
        action="store_true",
        help="compile only the configuration with the most arguments of each kernel and element size",
    )
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args(argv)
    print(f"triton {triton.__version__}\n{HEAD}")
    right = []
    for arch in args.arch:
        for row in compile_report(arch, only=tuple(args.only), jobs=args.jobs, keep=args.keep, few=args.fullest):
            print(line(row), flush=True)
            right.append(not row.broken)
    return int(not (right and all(right)))


if __name__ == "__main__":
    sys.exit(main())
