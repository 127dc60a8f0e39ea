"""Compile the C kernels into one shared library: ``python -m tokenmix.kernels.cpu``. Standard library only, so that the package's build can run it.

The kernels are compiled once per instruction set and the best one is chosen when the library is loaded, so one file serves every machine of a kind. The
library carries a hash of the sources and flags; one that does not match the sources beside it is refused when loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARY = Path(__file__).parent / "libtokenmix.so"
COMMAND = "python -m tokenmix.kernels.cpu"
FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wall"]
X86 = {"v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"], "v3": ["-march=x86-64-v3"], "base": []}
SECONDS = 600


class BuildError(RuntimeError):
    """The library could not be compiled; the message says why and what would help."""


def instruction_sets() -> dict[str, list[str]]:
    """Name -> flags of what the kernels are compiled for on this kind of machine, best first."""
    return X86 if platform.machine().lower() in ("x86_64", "amd64") else {"base": []}


def source_hash() -> str:
    """Changes with any source file or flag."""
    digest = hashlib.sha256(repr((FLAGS, sorted(instruction_sets().items()))).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compiler() -> str:
    """The C compiler: $CC, or cc, gcc or clang, whichever is there."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name.split()[0]):
            return name
    raise BuildError("no C compiler found (looked for $CC, cc, gcc, clang); install one, for example Debian's gcc.")


def build(target: Path = LIBRARY, extra: list[str] | None = None) -> Path:
    """Compile to ``target``, whole or not at all; ``extra`` flags are for sanitizers."""
    cc, flags = compiler().split(), [*FLAGS, *(extra or [])]
    if sys.platform == "win32":
        raise BuildError("the C kernels need gcc or clang on Linux or macOS.")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        jobs = [
            [*cc, *flags, *march, f"-DTM_ISA={isa}", "-c", str(SOURCES / "kernels.c"), "-o", f"{folder}/{isa}.o"] for isa, march in instruction_sets().items()
        ]
        jobs.append([*cc, *flags, f'-DTM_HASH="{source_hash()}"', "-c", str(SOURCES / "isa.c"), "-o", f"{folder}/isa.o"])
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, jobs))
        # no OpenMP runtime is linked in: the library uses the one torch has loaded, and so its threads
        shared = ["-dynamiclib", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
        _run([*cc, *(extra or []), *shared, *(job[-1] for job in jobs), "-lm", "-o", f"{folder}/library"])
        os.replace(f"{folder}/library", target)
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise BuildError(f"`{' '.join(command)}` failed:\n{done.stderr.strip()[-4000:]}")
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)


def main() -> None:
    """Compile, and say what came of it."""
    try:
        print(f"built {build()} ({source_hash()})")
    except BuildError as why:
        sys.exit(f"error: {why}")


if __name__ == "__main__":
    main()
