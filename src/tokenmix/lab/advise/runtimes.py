"""The runtimes in which a model can be measured: eager torch, torch.compile, ONNX Runtime.

Each takes the model, its own attention or a candidate, and returns a call that does one pass at a length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...export import OnnxModel, OnnxReport, export_onnx
from .inputs import Given, Inputs

RUNTIMES = {"eager": "eager torch", "compile": "torch.compile", "onnx": "ONNX Runtime"}
"""Runtimes by their name on the command line, as the page names them."""
PROGRAMS = 256
"""Programs that torch.compile may keep of one forward function; beyond its own 8 it would run eagerly."""
Call = Callable[[], object]


@dataclass(frozen=True)
class Prepared:
    """A pass that can be repeated, and what a user of the runtime should know about it."""

    call: Call
    note: str | None = None


@dataclass
class Runtime:
    """Prepare models for one runtime.

    Args:
        longest: the largest length that will be measured; a file is exported once, for all lengths up to it.
        folder: for the files.
        limit: seconds that preparing may take in all, once two models, the fewest to compare, were prepared.
        prepare_seconds: what preparing each model took, in order; running programs is not part of it.
    """

    name: str
    inputs: Inputs
    longest: int
    folder: Path
    limit: float = inf
    prepare_seconds: list[float] = field(default_factory=list)
    files: dict[str, tuple[OnnxModel, OnnxReport]] = field(default_factory=dict)

    def prepare(self, label: str, model: nn.Module, length: int, given: Given) -> Prepared:
        """Return a pass of a model with these arguments.

        Raises:
            MixerError: the exporter refuses the model, or its file serves no such input.
            RuntimeError: torch.compile fails.
        """
        began = time.perf_counter()
        prepared = {"eager": _prepare_eager, "compile": _prepare_compiled, "onnx": self._prepare_session}[self.name](
            label, model, length, given
        )
        self.prepare_seconds.append(time.perf_counter() - began)
        return prepared

    def refusal(self, length: int, labels: Sequence[str]) -> str | None:
        """Return why no time is left to prepare these models at a length, by the slowest so far; None where there is.

        Files that serve all lengths take none.
        """
        new = [name for name in labels if name not in self.files and f"{name} {length}" not in self.files]
        takes = max(self.prepare_seconds, default=0.0) * len(new)
        left = max(self.limit - sum(self.prepare_seconds), 0.0)
        if len(self.prepare_seconds) < 2 or takes <= left:
            return None
        what = f"{'compiling' if self.name == 'compile' else 'exporting'} {'both models' if len(new) > 1 else 'it'}"
        return f"{what} takes about {takes:.0f} s, and {left:.0f} s are left; give more --seconds"

    def _prepare_session(self, label: str, model: nn.Module, length: int, given: Given) -> Prepared:
        """Export once for all lengths; where no file can serve them all, once for each."""
        if self.inputs.patch is not None or self.inputs.only is not None:
            return _session_call(self._export(f"{label} {length}", model, length, True), given)
        known = self.files.get(label) or self._export(label, model, self.longest, False)
        low, high = known[1].sizes.length
        if low <= length and (high is None or length <= high) and (low < high if high else True):
            padded = f"its file pads every input to {high:,}, so each costs as much" if known[1].sizes.padded else None
            return _session_call(known, given, padded)
        alone = known if low == length == high else self._export(f"{label} {length}", model, length, True)
        return _session_call(alone, given, "a file for this length alone: none serves all lengths")

    def _export(self, name: str, model: nn.Module, length: int, fixed: bool) -> tuple[OnnxModel, OnnxReport]:
        path = self.folder / f"{len(self.files)}.onnx"
        inputs: Any = None if self.inputs.known_to_export and not fixed else self.inputs.make
        report = export_onnx(model, path, length=length, fixed=fixed, inputs=inputs)
        self.files[name] = OnnxModel(path, threads=torch.get_num_threads()), report
        path.unlink()  # the session holds its content
        return self.files[name]


def check_runtime(name: str, device: str) -> None:
    """Refuse a runtime that is unknown, not installed, or not on this device."""
    if name not in RUNTIMES:
        raise MixerError(f"advise: a runtime is one of {', '.join(RUNTIMES)}, got {name!r}.")
    missing = [package for package in ("onnx", "onnxscript", "onnxruntime") if find_spec(package) is None]
    if name == "onnx" and missing:
        raise MixerError(f"advise: the runtime onnx needs {', '.join(missing)}: pip install 'tokenmix[onnx]'.")
    if name == "onnx" and device != "cpu":
        raise MixerError(
            f"advise: the runtime onnx is measured on the CPU, got the device {device}; give --device cpu."
        )


def _prepare_eager(label: str, model: nn.Module, length: int, given: Given) -> Prepared:
    args, named = given
    return Prepared(lambda: model(*args, **named))


def _prepare_compiled(label: str, model: nn.Module, length: int, given: Given) -> Prepared:
    """Compile for this length and run once, so that the time of compiling is in no timing."""
    args, named = given
    compiled: Any = torch.compile(model, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=PROGRAMS, accumulated_recompile_limit=PROGRAMS):
        compiled(*args, **named)
    return Prepared(lambda: compiled(*args, **named))


def _session_call(file: tuple[OnnxModel, OnnxReport], given: Given, note: str | None = None) -> Prepared:
    session, names = file[0], list(file[1].inputs)
    args, named = given
    tensors = [value for value in (*args, *named.values()) if isinstance(value, Tensor)]
    values = [named[name] for name in names] if set(names) <= named.keys() else tensors[: len(names)]
    return Prepared(lambda: session(*values), note)
