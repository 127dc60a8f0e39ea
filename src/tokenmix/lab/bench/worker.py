"""The worker of ``revision``: requests on stdin, answers on stdout, one JSON value a line.

It runs inside the tree of the other revision.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from ...types import Record
from .cases import BenchSubject, prepare
from .correctness import gate
from .flops import Setting
from .run import one_line
from .timing import Sampler, sampler


class Worker:
    """The calls prepared for the current setting, and the verdicts so far."""

    def __init__(self) -> None:
        self.samplers: dict[str, Sampler] = {}
        self.verdicts: dict[str, str | None] = {}
        self.setting: Setting | None = None

    def answer(self, request: Record) -> Record:
        """Answer one request."""
        if request["do"] == "threads":
            torch.set_num_threads(request["n"])
            return {}
        if request["do"] == "sample":
            return {"sample": self.samplers[request["name"]](request["n"])}
        try:
            return self._prepare(BenchSubject(**request["subject"]), request["setting"])
        except Exception as why:  # whatever it is, the other side has to hear of it
            return {"why": one_line(why)}

    def _prepare(self, subject: BenchSubject, given: Record) -> Record:
        s = Setting(**{**given, "grid": tuple(given["grid"]) if given["grid"] else None})
        if s != self.setting:
            self.samplers, self.setting = {}, s
        name = subject.label
        key = f"{name} {s.backward}"
        if key not in self.verdicts:
            verdict = gate(subject, s)
            self.verdicts[key] = (
                None if verdict.passed else f"failed the gate: error {verdict.error:.2g} ({verdict.case})"
            )
        if self.verdicts[key]:
            return {"why": self.verdicts[key]}
        with subject.scope():
            prepared = prepare(subject, s)
        self.samplers[name] = sampler(prepared.call, device=s.device, scope=subject.scope)
        self.samplers[name](1)
        return {"name": name}


def main() -> None:
    """Answer until stdin ends; anything libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
