"""Train the detector of ``examples/detector.py`` on two backbones, and record how much each finds.

    python -m benchmarks.detector_small --out runs/detector

A backbone is tried at four rates with the first seed, over all steps, as a share of them tells nothing yet; the best
rate is trained with two more seeds. A backbone that the file of results holds is not trained again; a run that was
stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from tokenmix.lab.bench.roofline import machine

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import detector  # noqa: E402  # beside this folder, and no package

RECORD = ROOT / "benchmarks/results/detector_small.json"
RATES, SEEDS, STEPS = (5e-4, 1e-3, 2e-3, 4e-3), (0, 1, 2), 1500


def measure_backbone(name: str, out: Path) -> dict[str, object]:
    """Tune a backbone, train it with each seed and return its precisions."""
    times: list[float] = []

    def train(rate: float, seed: int) -> float:
        began = time.process_time()
        precision: float = detector.run(name, out / name / f"{rate:g}-{seed}", STEPS, rate, seed)["ap50"]
        times.append(round(time.process_time() - began, 1))
        print(f"{name} at {rate:g}, seed {seed}: {precision:.4f}, {times[-1]:.0f} s", flush=True)
        return precision

    tuned = {rate: train(rate, SEEDS[0]) for rate in RATES}
    best = max(RATES, key=tuned.__getitem__)
    found = [tuned[best], *(train(best, seed) for seed in SEEDS[1:])]
    parameters = sum(p.numel() for p in detector.Detector(name).parameters())
    tried = {f"{rate:g}": precision for rate, precision in tuned.items()}
    return {"AP": found, "rate": best, "tuned": tried, "parameters": parameters, "cpu_seconds": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", choices=detector.BACKBONES, default=["pvt", "resnet"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    facts = {"machine": machine(), "metric": "AP", "scenes": 25 * len(detector.VALID), "steps": STEPS}
    rows = json.loads(RECORD.read_text())["rows"] if RECORD.is_file() else {}
    for name in given.rows:
        if name not in rows:
            rows[name] = measure_backbone(name, given.out)
            RECORD.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
