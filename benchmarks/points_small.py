"""Train the recipes on point clouds at their smoke size, on clouds made here, and score them on the test split.

    python benchmarks/points_small.py --out runs/points [--rows points_classify/pct points_parts/external ...]
    python benchmarks/points_small.py --out runs/points --results benchmarks/results/points_small.json

A row that has finished is not trained again; one that was stopped continues. One thread, one seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from image_rows import finish, keep_result
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.train import evaluate_run

NAMES = ("points_classify", "points_parts")
ROWS = [f"{name}/{row}" for name in NAMES for row in RECIPES[name].rows]
FACTS = ("torch", "python", "cpu", "cores", "threads", "device")


def run_row(label: str, out: Path) -> None:
    """Train a row to its end and score it on the test split."""
    name, row = label.split("/")
    summary = finish(out / label, RECIPES[name].config(row, "smoke").override({"train.threads": 1}))
    score = evaluate_run(out / label, split="test", device="cpu")
    env = json.loads((out / label / "env.json").read_text())
    scored = {f"test_{key}": value for key, value in vars(score).items()}
    keep_result(out / label, summary, parameters=env["parameters"], **scored)


def collected(out: Path) -> dict[str, object]:
    """Return the results of the rows that have finished, and the machine of the first."""
    ended = [label for label in ROWS if (out / label / "result.json").exists()]
    env = json.loads((out / ended[0] / "env.json").read_text())
    found = {label: json.loads((out / label / "result.json").read_text()) for label in ended}
    return {"machine": {key: env[key] for key in FACTS}, "rows": found}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", nargs="*", default=ROWS, choices=ROWS)
    parser.add_argument("--results", type=Path, help="the JSON to write of what has finished")
    args = parser.parse_args()
    if args.results:
        args.results.write_text(json.dumps(collected(args.out), indent=1) + "\n")
        return
    for label in args.rows:
        if not (args.out / label / "result.json").exists():
            run_row(label, args.out)
            print(label, "done", flush=True)


if __name__ == "__main__":
    main()
