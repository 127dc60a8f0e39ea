"""Run another revision of this repository in its own process, timed in turns with this one: ``--base``.

The revision is checked out into a temporary git worktree, its C library is built where it has one, and this benchmark
is copied over it, so that the same code measures both trees. Where the copy cannot be imported, because files moved
since, the revision runs its own benchmark; both speak the same protocol.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from ...errors import MixerError
from ...types import Record
from .cases import BenchSubject
from .flops import Setting
from .timing import Sampler

HERE = Path(__file__).resolve().parent
BUILD = "src/tokenmix/kernels/cpu/build.py"
MEASURE = "src/tokenmix/testing/measure.py"  # what the gate judges by
WORKERS = [
    (name, "src/" + name.replace(".", "/") + ".py") for name in ("tokenmix.lab.bench.worker", "tokenmix.bench.worker")
]
"""The module of the worker and its file, now and in older trees."""
SECONDS = 900


class Revision:
    """A context manager: inside it a worker process of the revision answers. The verdict of each subject at the gate is
    kept.
    """

    def __init__(self, revision: str, tell: Callable[[str], None]):
        self.revision, self.tell = revision, tell
        self.why: dict[str, str] = {}
        self.commit, self.module = "", WORKERS[0][0]

    def __enter__(self) -> Revision:
        self.root, self.commit = find(self.revision)
        self.folder = tempfile.mkdtemp(prefix="tokenmix-base-")
        self.tree = Path(self.folder) / "tree"
        try:
            self.tell(f"checking out {self.revision} ({self.commit[:12]})")
            _git(self.root, "worktree", "add", "--quiet", "--detach", str(self.tree), self.commit)
            self._build()
            self._copy()
            command = [sys.executable, "-W", "ignore", "-m", self.module]
            self.worker = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self._environment(),
                cwd=self.tree,
            )
            self.ask({"do": "threads", "n": torch.get_num_threads()})
        except BaseException:
            self.__exit__()
            raise
        return self

    def _environment(self) -> dict[str, str]:
        paths = {"PYTHONPATH": str(self.tree / "src"), "OMP_NUM_THREADS": str(torch.get_num_threads())}
        return {**os.environ, **paths}

    def _copy(self) -> None:
        """Copy this benchmark over the one of the revision, or leave that one where the copy cannot be imported."""
        if (self.tree / MEASURE).parent.is_dir():
            shutil.copy(HERE.parents[3] / MEASURE, self.tree / MEASURE)
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(HERE, self.tree / "src/tokenmix/lab/bench", dirs_exist_ok=True, ignore=ignore)
        (self.tree / "src/tokenmix/lab/__init__.py").touch()
        trial = [sys.executable, "-W", "ignore", "-c", f"import {self.module}"]
        if subprocess.run(trial, env=self._environment(), cwd=self.tree, capture_output=True).returncode:
            self.tell(f"{self.revision} is laid out differently: it runs its own benchmark")
            for command in (("clean", "-fdq", "src"), ("checkout", "--quiet", "--", "src")):
                _git(self.tree, *command)
            self.module = next(name for name, file in WORKERS if (self.tree / file).is_file())

    def _build(self) -> None:
        if not (self.tree / BUILD).is_file():
            return
        self.tell(f"building the C library of {self.revision}")
        done = subprocess.run([sys.executable, BUILD], cwd=self.tree, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise MixerError(f"bench: the C library of {self.revision} could not be built: {said}")

    def __exit__(self, *error: object) -> None:
        worker = getattr(self, "worker", None)
        if worker is not None:
            with contextlib.suppress(OSError):
                worker.stdin.close()
            try:
                worker.wait(10)
            except subprocess.TimeoutExpired:
                worker.kill()
        if getattr(self, "folder", None):
            subprocess.run(
                ["git", "-C", self.root, "worktree", "remove", "--force", str(self.tree)], capture_output=True
            )
            shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, request: Record) -> Record:
        """Send one request to the worker and return its answer."""
        assert self.worker.stdin is not None
        assert self.worker.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.worker.stdin.write(json.dumps(request) + "\n")
            self.worker.stdin.flush()
        line = self.worker.stdout.readline()
        if not line:
            raise MixerError(
                f"bench: revision {self.revision} cannot run this benchmark; its process ended; its message is above."
            )
        return json.loads(line)

    def sampler(self, subject: BenchSubject, s: Setting) -> Sampler | None:
        """Return a sampler of the same subject in the other revision.

        It is None where the subject cannot run or fails the gate; the reason is kept.
        """
        key = subject.label
        found = self.ask({"do": "prepare", "subject": asdict(subject), "setting": asdict(s)})
        if "why" in found:
            self.why[key] = found["why"]
            return None
        name = found["name"]

        def sample(n: int) -> tuple[float, float]:
            wall, cpu = self.ask({"do": "sample", "name": name, "n": n})["sample"]
            return wall, cpu

        return sample

    def check_all_measured(self, rows: list[Record]) -> None:
        """Write beside each row why the other revision has no time for it."""
        for row in rows:
            if "wall_s" in row and "x_base" not in row:
                row["base_why"] = self.why.get(row["subject"], "not measured")

    def about(self) -> Record:
        """Return which revision was compared with."""
        return {"revision": self.revision, "commit": self.commit}


def find(revision: str) -> tuple[str, str]:
    """Return the folder of this repository and the full name of a commit in it."""
    root = _git(HERE, "rev-parse", "--show-toplevel")
    return root, _git(root, "rev-parse", "--verify", f"{revision}^{{commit}}")


def _git(where: Path | str, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(where), *arguments], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["failed"])[-1]
        failed = f"git {' '.join(arguments[:2])}: {said}"
        raise MixerError(f"bench: --base needs a git checkout of tokenmix and a revision in it: {failed}")
    return done.stdout.strip()
