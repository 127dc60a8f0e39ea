"""Collect attempts to break the library, each a function that returns what happened in one line.

    python -m benchmarks.robustness                    # run all, print the table
    python -m benchmarks.robustness --only streaming   # those whose title or area holds the word
    python -m benchmarks.robustness --as before        # record under this column of results/robustness.json

Each module of this package is an area. Each attempt runs in its own process, so a crash or hang of one is only a line
of the table.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LIMIT = 100
"""Seconds after which a command counts as hanging."""
ALONE = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
"""Settings of the environment with which ranks need no network and no second core."""


@dataclass(frozen=True)
class Attempt:
    """Describe one attempt: a number within its area, a title, and the function that makes it."""

    number: str
    title: str
    run: Callable[[], str]


def attempt(number: str, title: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Mark a function as an attempt; it returns one line, and an exception it raises is reported as that line."""

    def mark(run: Callable[[], str]) -> Callable[[], str]:
        run.attempt = Attempt(number, title, run)
        return run

    return mark


def run_command(*args: str, ranks: int = 1, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``tokenmix`` with these arguments, by torchrun if on several ranks, and capture its output.

    Its cache is the folder ``cache`` of the attempt, not that of the user.

    Raises:
        subprocess.TimeoutExpired: after LIMIT seconds.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return subprocess.run(
        [sys.executable, *torchrun, "-m", "tokenmix", *args],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=LIMIT,
        env={
            **os.environ,
            "XDG_CACHE_HOME": str(Path("cache").resolve()),
            **(ALONE if ranks > 1 else {}),
            **(env or {}),
        },
    )


def result_of_command(*args: str, ranks: int = 1, env: dict[str, str] | None = None) -> str:
    """Run a command and return its exit code and last line, a mark if there was a traceback, or "hangs".

    Of several ranks the last line is that of an error, because torchrun adds a traceback of its own.
    """
    try:
        done = run_command(*args, ranks=ranks, env=env)
    except subprocess.TimeoutExpired:
        return "hangs"
    lines = (done.stderr if done.returncode else done.stdout or done.stderr).strip().splitlines() or ["nothing said"]
    errors = [line for line in lines if line.startswith("error: ")]
    last = errors[-1] if ranks > 1 and errors else lines[-1]
    traceback = "traceback: " if ranks == 1 and "Traceback" in done.stderr else ""
    return f"exit {done.returncode}: {traceback}{last[:200]!r}"
