"""Train the mixers of ``examples/video.py`` and record how many directions each gets right.

    python -m benchmarks.video_small --out runs/video

One seed and one rate that was tuned for no row: the numbers show that each learns, not which is better.
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
import video  # noqa: E402  # beside this folder, and no package

RECORD = ROOT / "benchmarks/results/video_small.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = {"machine": machine(), "grid": video.GRID, "clips": 100 * len(video.VALID), "rows": {}}
    for mixer in video.MIXERS:
        began = time.process_time()
        line = video.run(mixer, given.out / mixer)
        found["rows"][mixer] = {**line, "cpu_seconds": round(time.process_time() - began, 1)}
        print(mixer, found["rows"][mixer], flush=True)
    RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
