"""Count the Python calls of this library on the ways through its core: build, forward, and one token of a stream.

Run: ``python -m benchmarks.trace_calls``, and in another tree with its ``src`` on PYTHONPATH.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import tokenmix

ROOT = str(Path(tokenmix.__file__).parent)
OPTIONS: dict[str, dict[str, Any]] = {
    "aft_simple": {},
    "hydra": {},
    "linear": {},
    "aft_local": {"window": 8, "max_len": 64},
    "aft_forget": {},
    "aft_full": {"max_len": 64},
    "aft_conv": {"heads": 4, "kernel_size": 5},
    "attention": {"heads": 4},
}


def count_calls(run: Callable[[], Any]) -> tuple[int, int, int]:
    """Return how many functions of the library a warm call enters, in how many files, and the changes of file."""
    for _ in range(3):
        run()
    files: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(files), len(set(files)), sum(a != b for a, b in pairwise(files))


def main() -> None:
    """Print a table: calls / files / changes of file."""
    torch.manual_seed(0)
    print("| mixer | build | forward | one token | one token, gradients |\n|---|---|---|---|---|")
    for name, options in OPTIONS.items():

        def build(name: str = name, options: dict[str, Any] = options) -> Any:
            return tokenmix.build_mixer(name, 32, causal=True, **options)

        mixer, x = build(), torch.randn(1, 33, 32)
        state = mixer.extend(x[:, :32], mixer.init_state(1))[1]
        ways: list[tuple[int, int, int]] = [count_calls(build), count_calls(lambda m=mixer, x=x: m(x))]
        for graph in (False, True):
            with torch.set_grad_enabled(graph):
                ways.append(count_calls(lambda m=mixer, x=x, s=state: m.extend(x[:, 32:], s)))
        print(f"| {name} | " + " | ".join("{} / {} / {}".format(*way) for way in ways) + " |")


if __name__ == "__main__":
    main()
