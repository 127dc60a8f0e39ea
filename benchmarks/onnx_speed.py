"""Time ONNX files of mixers in ONNX Runtime beside attention's, causal and not, at four lengths.

    python -m benchmarks.onnx_speed --files FOLDER --prepare
    python -m benchmarks.onnx_speed --files FOLDER [--lengths 32 128 ...] [--ways causal ...]

The first call writes the files into FOLDER, and leaves those that it holds. The second times them: each file is equal
to torch within 1e-4 on the input that is timed, or nothing is. The mixers of one table take turns in one process on one
thread; batch 4, 512 features. benchmarks/results/onnx_speed.json has milliseconds, median and quartiles, and keeps what
it holds of other lengths; docs/hosts/onnx.md shows it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from tokenmix import Mixer, build_mixer
from tokenmix.export import OnnxModel, export_onnx
from tokenmix.export.onnx_model import difference
from tokenmix.lab.bench.roofline import machine

RESULTS = Path(__file__).parent / "results"
LENGTHS, BATCH, DIM, TOLERANCE = (32, 128, 512, 1024), 4, 512, 1e-4
WAYS = {"causal": True, "bidirectional": False}
ROWS: dict[str, dict[str, Any]] = {
    "attention": {"heads": 8},
    "aft_simple": {},
    "aft_local": {"window": 32, "max_len": 1024},
    "aft_conv": {"heads": 8, "kernel_size": 11},
    "aft_full": {"max_len": 1024},
    "hydra": {},
    "linear": {"heads": 8},
    "aft_forget": {},
}
LEAST, MOST = 5, 200
"""Calls of each file at one length, at least and at most."""


def built(name: str, way: str) -> Mixer:
    """Return a mixer with the weights of its file."""
    torch.manual_seed(0)
    return build_mixer(name, DIM, causal=WAYS[way], **ROWS[name]).eval()


def rows(way: str) -> list[str]:
    """Return the mixers of one table: AFT-forget is causal only."""
    return [name for name in ROWS if WAYS[way] or name != "aft_forget"]


def place(folder: Path, name: str, way: str) -> Path:
    """Return where the file of a mixer lies."""
    return folder / f"{name}-{way}.onnx"


@torch.no_grad()
def timed(folder: Path, way: str, length: int, seconds: float) -> dict[str, Any]:
    """Return milliseconds of each file, in turns."""
    x = torch.randn(BATCH, length, DIM, generator=torch.Generator().manual_seed(length))
    files = {name: OnnxModel(place(folder, name, way)) for name in rows(way)}
    for name, file in files.items():
        apart = difference(file(x), built(name, way)(x))
        if not apart <= TOLERANCE:
            raise SystemExit(f"{name} at {length} tokens differs from torch by {apart:.1e}; nothing was timed.")
    taken: dict[str, list[float]] = {name: [] for name in files}
    until = time.perf_counter() + seconds
    for turn in range(MOST):
        if turn >= LEAST and time.perf_counter() > until:
            break
        for name, file in files.items():
            began = time.perf_counter()
            file(x)
            taken[name].append(1e3 * (time.perf_counter() - began))
    quartiles = {name: statistics.quantiles(ms, n=4) for name, ms in taken.items()}
    return {
        name: dict(zip(("low", "median", "high"), (round(q, 2) for q in qs), strict=True))
        for name, qs in quartiles.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=Path, required=True)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--lengths", nargs="*", type=int, choices=LENGTHS, default=LENGTHS)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=10.0, help="for one length and direction")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.prepare:
        given.files.mkdir(exist_ok=True)
        for way in given.ways:
            for name in rows(way):
                if not (path := place(given.files, name, way)).exists():
                    print(export_onnx(built(name, way), path), flush=True)
        return
    path = RESULTS / "onnx_speed.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {way: {} for way in WAYS}
    found |= {"machine": machine(), "batch": BATCH, "dim": DIM}
    for length in given.lengths:
        for way in given.ways:
            found[way][str(length)] = timed(given.files, way, length, given.seconds)
            found[way] = {str(n): found[way][str(n)] for n in LENGTHS if str(n) in found[way]}
            print(way, length, found[way][str(length)], flush=True)
        path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
