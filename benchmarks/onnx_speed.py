"""Time ONNX files of mixers in ONNX Runtime beside attention's, causal and not, at four lengths.

    python -m benchmarks.onnx_speed [--rows hydra ...] [--times 9]

Each file is equal to torch within 1e-4 before it is timed, on the input that is timed, or it is not timed. The mixers
of one table take turns in one process on one thread; batch 4, 512 features. The results are written to
benchmarks/results/onnx_speed.json: milliseconds, median and range.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tokenmix import build_mixer
from tokenmix.export import OnnxModel, export_onnx
from tokenmix.export.onnx_model import difference
from tokenmix.lab.bench.roofline import machine

RESULTS = Path(__file__).parent / "results"
LENGTHS, BATCH, DIM, TOLERANCE = (32, 128, 512, 1024), 4, 512, 1e-4
ROWS: dict[str, dict[str, Any]] = {
    "attention": {"heads": 8},
    "aft_simple": {},
    "aft_local": {"window": 32, "max_len": 1024},
    "aft_conv": {"heads": 8, "kernel_size": 11},
    "aft_full": {"max_len": 1024},
    "hydra": {},
    "linear": {"heads": 8},
}


def exported(name: str, causal: bool, folder: Path) -> tuple[Any, OnnxModel]:
    """Return a mixer and its file, opened."""
    torch.manual_seed(0)
    mixer = build_mixer(name, DIM, causal=causal, **ROWS[name]).eval()
    path = folder / f"{name}-{causal}.onnx"
    export_onnx(mixer, path, length=max(LENGTHS))
    return mixer, OnnxModel(path)


@torch.no_grad()
def timed(pairs: dict[str, tuple[Any, OnnxModel]], length: int, times: int) -> dict[str, Any]:
    """Return milliseconds of each file, in turns."""
    x = torch.randn(BATCH, length, DIM, generator=torch.Generator().manual_seed(length))
    for name, (mixer, file) in pairs.items():
        apart = difference(file(x), mixer(x))
        if not apart <= TOLERANCE:
            raise SystemExit(f"{name} at {length} tokens differs from torch by {apart:.1e}; nothing was timed.")
    taken: dict[str, list[float]] = {name: [] for name in pairs}
    for _ in range(times):
        for name, (_, file) in pairs.items():
            began = time.perf_counter()
            file(x)
            taken[name].append(1e3 * (time.perf_counter() - began))
    return {
        name: {"median": round(statistics.median(ms), 2), "low": round(min(ms), 2), "high": round(max(ms), 2)}
        for name, ms in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=[name for name in ROWS if name != "attention"], default=list(ROWS))
    parser.add_argument("--times", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"machine": machine(), "batch": BATCH, "dim": DIM, "causal": {}, "both ways": {}}
    for way, causal in (("causal", True), ("both ways", False)):
        with tempfile.TemporaryDirectory() as folder:
            names = dict.fromkeys(["attention", *given.rows])
            pairs = {name: exported(name, causal, Path(folder)) for name in names}
            for length in LENGTHS:
                found[way][str(length)] = timed(pairs, length, given.times)
                print(way, length, found[way][str(length)], flush=True)
    (RESULTS / "onnx_speed.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
