"""Attempts on the doctor, the extras, and sets of images, masks and clouds, made on the merged tree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from . import attempt


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    os.environ["XDG_CACHE_HOME"] = str(Path("cache").resolve())
    return subprocess.run([sys.executable, "-m", "tokenmix", *words], capture_output=True, text=True)


@attempt("D1", "The doctor beside a torchvision that tokenmix mends: exit code, processes' CPU time")
def doctor_of_a_mended_torchvision() -> str:
    before = os.times()
    ended = _run("doctor")
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return f"exit {ended.returncode}, {used:.0f} s; {ended.stdout.strip().splitlines()[-1]}"
