"""Compile the C kernels into one shared library: ``python -m tokenmix.kernels.cpu``.

This file uses the standard library only, so that the package's build can run it by path. The kernels are compiled once
per instruction set and the best one is selected when the library is loaded, so one file serves every machine of an
architecture. The library carries a hash of the sources and flags; a library that does not match the sources next to it
is refused when loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

SOURCES = Path(__file__).parent / "src"
LIBRARY = Path(__file__).parent / "libtokenmix.so"
COMMAND = "python -m tokenmix.kernels.cpu"
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wall",
]
X86 = {"v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"], "v3": ["-march=x86-64-v3"], "base": []}
SECONDS = 600


class BuildError(RuntimeError):
    """The library could not be compiled; the message says why and what would help."""


def instruction_sets() -> dict[str, list[str]]:
    """Return the instruction sets to compile for on this architecture, name -> flags, best first."""
    return X86 if platform.machine().lower() in ("x86_64", "amd64") else {"base": []}


def source_hash() -> str:
    """Return a hash that changes with any source file, any flag and the architecture."""
    digest = hashlib.sha256(
        repr((FLAGS, sorted(instruction_sets().items()), platform.machine().lower(), sys.platform)).encode()
    )
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compiler() -> str:
    """Return the C compiler: the first of $CC, cc, gcc and clang that is installed."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name.split()[0]):
            return name
    raise BuildError("no C compiler found (looked for $CC, cc, gcc, clang); install one, for example Debian's gcc.")


def current(library: Path = LIBRARY) -> bool:
    """Say whether this file is complete and was built from the sources next to this module.

    The library is not loaded: outside torch's process it has no OpenMP.
    """
    return library.is_file() and is_complete(library) and source_hash().encode() in library.read_bytes()


def is_complete(library: Path) -> bool:
    """Say whether an ELF file holds all that its header announces; loading a truncated one would kill the process.

    Files of other formats pass, because their loaders check this themselves.
    """
    with library.open("rb") as file:
        head = file.read(64)
    if head[:4] != b"\x7fELF":
        return len(head) == 64
    if len(head) < 64 or head[4] != 2:  # every architecture we build for has 64 bits
        return False
    order: Literal["little", "big"] = "little" if head[5] == 1 else "big"
    sections, size, count = (int.from_bytes(head[a:b], order) for a, b in ((40, 48), (58, 60), (60, 62)))
    return library.stat().st_size >= sections + size * count


def openmp(cc: list[str]) -> tuple[list[str], list[str]]:
    """Return the flags that enable OpenMP, for compiling and for linking.

    No OpenMP runtime is linked in where torch's own can serve, so that the library shares its threads: GNU's on Linux
    with gcc, LLVM's on macOS with clang, whose Apple build hides the flag. clang on Linux needs LLVM's runtime, which
    torch does not ship there.
    """
    clang = "clang" in subprocess.run([*cc, "--version"], capture_output=True, text=True, timeout=SECONDS).stdout
    if sys.platform == "darwin":
        return (["-Xclang", "-fopenmp"], []) if clang else (["-fopenmp"], ["-fopenmp"])
    return ["-fopenmp"], ["-fopenmp"] if clang else []


def build(
    target: Path = LIBRARY, *, sources: Path = SOURCES, only: str | None = None, extra: Sequence[str] = ()
) -> Path:
    """Compile to ``target``, completely or not at all.

    Tests also pass other ``sources``, one instruction set ``only``, and ``extra`` flags.
    """
    if sys.platform == "win32":
        raise BuildError("the C kernels need gcc or clang on Linux or macOS.")
    cc, machine = compiler().split(), instruction_sets()
    wanted = machine if only is None else {only: machine[only]}
    compiling, linking = openmp(cc)
    flags = [*FLAGS, *compiling, *extra]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        jobs = [
            [*cc, *flags, *march, f"-DTM_ISA={isa}", "-c", str(sources / "kernels.c"), "-o", f"{folder}/{isa}.o"]
            for isa, march in wanted.items()
        ]
        jobs.append(
            [*cc, *flags, f'-DTM_HASH="{source_hash()}"', "-c", str(sources / "isa.c"), "-o", f"{folder}/isa.o"]
        )
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, jobs))
        shared = ["-dynamiclib", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
        _run([*cc, *extra, *shared, *(job[-1] for job in jobs), "-lm", *linking, "-o", f"{folder}/library"])
        os.replace(f"{folder}/library", target)
    return target


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as why:
        raise BuildError(f"`{' '.join(command)}` failed: {why}") from None
    if done.returncode:
        raise BuildError(f"`{' '.join(command)}` failed:\n{done.stderr.strip()[-4000:]}")
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)


def main() -> None:
    """Compile, and report the result.

    With ``--if-needed``, as make calls it, compile only if the library is not current, and do not treat failure as an
    error.
    """
    lazy = "--if-needed" in sys.argv[1:]
    if lazy and os.environ.get("TOKENMIX_BUILD_KERNELS") == "0":
        print("the C kernels were not built: TOKENMIX_BUILD_KERNELS=0")
        return
    if lazy and current():
        os.utime(LIBRARY)  # for make, which compares modification times
        return
    try:
        print(f"built {build()} ({source_hash()})")
    except BuildError as why:
        if not lazy:
            sys.exit(f"error: {why}")
        print(
            f"warning: the C kernels were not built; everything works without them, but slower: {why}", file=sys.stderr
        )


if __name__ == "__main__":
    main()
