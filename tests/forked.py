"""Run Python in forks of one process that has imported torch, torchvision and pytest, but not tokenmix.

A planted bug needs a process of its own, which imports a copy of the library that holds the bug. A fork need not import
everything else again.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
LIBRARY = HERE.parent / "src" / "tokenmix"
HEAVY = (
    "numpy",
    "scipy.special",
    "pytest",
    "hypothesis.strategies",
    "jaxtyping",
    "anyio.pytest_plugin",
    "torch._dynamo",
)
LONGEST = 250
"""Seconds that a fork may take."""


class Done(NamedTuple):
    """Exit status of a fork, negative for a signal, and all that it printed."""

    status: int
    printed: str


def copied(place: Path) -> Path:
    """Copy the library into ``place``, with its bytecode and without the C kernels."""
    return Path(shutil.copytree(LIBRARY, place / "tokenmix", ignore=shutil.ignore_patterns("*.so")))


def plant(source: Path, old: str, new: str, times: int = 1) -> None:
    """Replace ``old``, which ``source`` must hold ``times`` times."""
    text = source.read_text()
    found = text.count(old)
    assert found == times, f"{source.name} holds {old!r} {found} times, not {times}; bring the patch up to date"
    source.write_text(text.replace(old, new))


def run_pytest(place: Path, *arguments: str) -> Done:
    """Run pytest on the copy of the library in ``place``, without the kernels."""
    plain = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=")
    return run("pytest", (*plain, *arguments), place, TOKENMIX_NO_KERNELS="1")


def run(module: str, arguments: Sequence[str], place: Path | None = None, **environment: str) -> Done:
    """Call ``main`` of a module in a fork; with ``place`` on the copy of the library there."""
    paths = [str(p) for p in (place, HERE, *sys.path) if p]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.NamedTemporaryFile(prefix="forked-") as printed:
        asked = {"module": module, "arguments": arguments, "paths": paths, "environment": environment}
        server = _server()
        print(json.dumps(asked | {"printed": printed.name}), file=server.stdin, flush=True)
        status = server.stdout.readline()
        assert status, f"the process that forks ended with {server.wait()}"
        return Done(int(status), Path(printed.name).read_text(errors="replace"))


@functools.cache
def _server() -> Any:
    command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    atexit.register(server.kill)
    return server


def main() -> None:
    """Read one request a line and answer with the exit status of a fork that has met it."""
    for name in HEAVY:
        importlib.import_module(name)
    repair = importlib.util.spec_from_file_location("repair", LIBRARY / "system" / "torchvision.py")
    assert repair is not None
    assert repair.loader is not None
    module = importlib.util.module_from_spec(repair)
    repair.loader.exec_module(module)
    module.ensure_torchvision()
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _meet(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _meet(asked: dict[str, Any]) -> None:
    signal.alarm(LONGEST)
    with open(asked["printed"], "wb", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(asked["environment"])
    sys.path[:], sys.argv, sys.dont_write_bytecode = asked["paths"], [asked["module"], *asked["arguments"]], True
    assert "tokenmix" not in sys.modules
    sys.modules["torch"].set_num_threads(1)
    status = importlib.import_module(asked["module"]).main()
    sys.exit(int(status or 0))


if __name__ == "__main__":
    main()
