"""A Python process of its own for Triton, whose interpreter and version are chosen before it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(*command: str, path: str = "", **env: str) -> str:
    """The output of a Python process, which must succeed; ``path`` comes before ours."""
    where = os.pathsep.join(p for p in (path, str(HERE.parent / "src"), str(HERE)) if p)
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": where, "OMP_NUM_THREADS": "1"} | env,
    )
    broken = "\n".join(row for row in done.stdout.splitlines() if "BROKEN" in row)
    assert done.returncode == 0, broken or done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout
