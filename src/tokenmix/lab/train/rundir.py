"""The run directory: config.json, env.json, metrics.jsonl, checkpoints/, samples/."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import warnings
from pathlib import Path
from typing import Any

import torch

from ...errors import MixerError
from ...system.files import check_free, check_own, flush_to_disk, whole_file, whole_folder, write_json
from ...system.lock import hold_lock
from ...system.machine import cpu_name
from ...system.version import __version__
from ...types import Record
from ..data.records import bad_text, parse_records, read_records
from .config import MOST_THREADS, RunConfig

COMPARED = ("torch", "python", "threads", "machine", "cpu", "device")


class RunDir:
    """Paths of a run and the rules for changing them."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.samples = self.path / "samples"
        self.metrics = self.path / "metrics.jsonl"
        self.csv = self.path / "metrics.csv"

    @classmethod
    def create(cls, path: Path | str, config: RunConfig, env: Record, files: dict[str, str] | None = None) -> RunDir:
        """Create the directory with its config, environment and other files, completely or not at all.

        A path that already holds something is refused.
        """
        check_free(path)
        path = Path(path)
        try:
            with whole_folder(path) as temporary:
                run = cls(temporary)
                run.checkpoints.mkdir()
                run.samples.mkdir()
                write_json(temporary / "config.json", config.to_json())
                write_json(temporary / "env.json", env)
                for name, text in (files or {}).items():
                    (temporary / name).write_text(text, encoding="utf-8")
                run.metrics.touch()
        except OSError as why:
            raise MixerError(
                f"the run directory {path} could not be created ({why.strerror or why}); give another --out."
            ) from why
        return cls(path)

    @classmethod
    def open(cls, path: Path | str) -> RunDir:
        """Open the directory of an existing run."""
        run = cls(path)
        if not (run.path / "config.json").is_file():
            if (run.path / "sweep.html").is_file():
                page, runs = run.path / "sweep.html", run.path / "runs"
                raise MixerError(f"{path} is the folder of a sweep; its page is {page}, its runs are in {runs}.")
            raise MixerError(
                f"{path} is not a run directory (no config.json in it); "
                + f"`tokenmix train RECIPE --out {path}` creates one."
            )
        return run

    def config(self) -> RunConfig:
        """Read the run's config.

        Raises:
            MixerError: for the folder of a host, which is no run.
        """
        found = self.read("config.json")
        if isinstance(found, dict) and ("model_type" in found or found.get("kind") == "surgery"):
            verbs = "advise, convert, eval, look tokens, sample and export to ONNX"
            raise MixerError(f"{self.path} is no run but a host's folder, which {verbs} take.")
        return RunConfig.from_json(found)

    def env(self) -> Record:
        """Read the software, machine and data that the run was made with."""
        env = self.read("env.json")
        wrong = _wrong_env(env)
        if wrong:
            raise MixerError(f"{self.path / 'env.json'} was edited or damaged: {wrong}.")
        return env

    def read(self, name: str) -> Any:
        """Read one of the run's JSON files."""
        check_own(self.path / name, self.path)
        try:
            return json.loads((self.path / name).read_text())
        except FileNotFoundError:
            raise MixerError(f"{self.path / name} is missing.") from None
        except (ValueError, RecursionError) as why:
            raise MixerError(f"{self.path / name} is not readable JSON ({why}).") from None

    def append(self, line: Record) -> None:
        """Append one line to metrics.jsonl, after ending a line that a kill cut short.

        Raises:
            MixerError: for a line that ``read_metrics`` would skip.
        """
        new = json.dumps(line).encode() + b"\n"
        if not parse_records(new)[0]:
            raise MixerError(f"metrics.jsonl: no reader knows such a line: {new[:200]!r}.")
        with self.metrics.open("ab+") as f:
            end = f.seek(0, os.SEEK_END)
            f.seek(max(end - 1, 0))
            torn = f.read(1) not in (b"", b"\n")
            f.write(b"\n" * torn + new)

    def sync_metrics(self) -> None:
        """Flush metrics.jsonl to the disk, so that no checkpoint is ahead of it."""
        with self.metrics.open("a") as f:
            flush_to_disk(f.fileno(), self.metrics)

    def read_metrics(self) -> list[Record]:
        """Read the lines of metrics.jsonl, skipping those cut short by a kill or damaged."""
        check_own(self.metrics, self.path)
        return read_records(self.metrics)[0]

    def cut_metrics(self, step: int) -> None:
        """Drop the lines after ``step``, which the run will write again.

        Unreadable lines move to metrics.damaged, with a warning.
        """
        lines, bad = read_records(self.metrics)
        if bad:
            aside = self.path / "metrics.damaged"
            with aside.open("ab") as f:
                f.write(b"".join(raw + b"\n" for _, raw in bad))
            warnings.warn(f"{self.metrics}: {bad_text(bad)}; moved to {aside.name}.", stacklevel=3)
        kept = [line for line in lines if line["step"] <= step]
        with whole_file(self.metrics) as f:
            f.write("".join(json.dumps(line) + "\n" for line in kept).encode())

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Refuse a second process that would train in the same directory."""
        return hold_lock(
            self.path,
            f"{self.path}: another process is training in this directory; wait until it ends, or stop it.",
        )


def plain_numbers(given: Record) -> Record:
    """Return a line of metrics with numbers in place of tensors and arrays of one number."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in given.items()}


def _wrong_env(env: object) -> str | None:
    """Describe the first field of an env.json, among those read again, that is not as it was written."""
    if not isinstance(env, dict):
        return f"it must hold an object, got {type(env).__name__}"
    threads = env.get("threads", 1)
    if type(threads) is not int or not 1 <= threads <= MOST_THREADS:
        return f"threads must be an integer from 1 to {MOST_THREADS}, got {threads!r}"
    objects = ("corpus", "images", "clouds", "synthetic", "texts", "inventory", "score")
    shapes = {"resumed": (list, "a list"), "config": (str, "a string")} | dict.fromkeys(objects, (dict, "an object"))
    for name, (shape, said) in shapes.items():
        if not isinstance(env.get(name, shape()), shape):
            return f"{name} must be {said}, got {env[name]!r}"
    missing = {"bytes", "sha256"} - env["corpus"].keys() if "corpus" in env else None
    return f"corpus has no {min(missing)!r}" if missing else None


def environment(data: Record, device: torch.device) -> Record:
    """Collect what a run's numbers depend on besides its config; ``data`` holds the facts of its task."""
    return {
        "tokenmix": __version__,
        "git": git_revision(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        **data,
    }


def differences(then: Record, now: Record) -> list[str]:
    """Describe what differs between two environments, among the things that can change the numbers."""
    return [f"{key} was {then.get(key)}, is {now.get(key)}" for key in COMPARED if then.get(key) != now.get(key)]


def git_revision() -> str | None:
    """Return the revision of the checkout this package runs from; None for an installed copy."""
    package = Path(__file__).resolve().parents[2]
    try:
        asked = subprocess.run(
            ["git", "rev-parse", "--show-toplevel", "HEAD"],
            cwd=package,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        found = asked.stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return None
    return found[1] if Path(found[0]) / "src" / "tokenmix" == package else None
