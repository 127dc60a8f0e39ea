"""Run the rows of the experiments on images.

Each row trains in its own process and run directory with one thread; the results of all go into one JSON file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tokenmix.lab.train import RunConfig, resume, train


def finish(folder: Path, config: RunConfig) -> dict[str, Any]:
    """Train a row to its end, from wherever it stood. Returns the run's summary."""
    torch.set_num_threads(1)
    return resume(folder, verbose=False) if (folder / "config.json").exists() else train(config, folder, verbose=False)


def keep_result(folder: Path, summary: dict[str, Any], **more: Any) -> None:
    """Write the results of a row."""
    named = {key: value for key, value in summary.items() if key != "run" and not key.startswith("best_")}
    (folder / "result.json").write_text(json.dumps({**named, **more}, indent=1))


def run_rows(script: str, doc: str, parts: dict[str, list[str]], run_row: Callable[[str, str, Path], None]) -> None:
    """Run the command line of an experiment: train what is missing, or with ``--results`` write what has finished.

    Args:
        parts: rows by part, in the order in which they depend on each other.
        run_row: (row, data, out): trains one row and keeps its result.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(parts), choices=list(parts))
    parser.add_argument("--rows", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--row", help="one row, in this process")
    parser.add_argument("--results", type=Path, help="the JSON to write")
    args = parser.parse_args()
    rows = args.rows or [row for part in args.only for row in parts[part]]
    if args.row:
        run_row(args.row, args.data, args.out)
    elif args.results:
        args.results.write_text(json.dumps(collected(args.out, rows), indent=1) + "\n")
    else:
        todo = [row for row in rows if not (args.out / row / "result.json").exists()]
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda row: _in_a_process(script, row, args), todo))


def collected(out: Path, rows: list[str]) -> dict[str, Any]:
    """Collect the results of the finished rows, with the config and the machine of the first."""
    ended = [row for row in rows if (out / row / "result.json").exists()]
    first = out / ended[0]
    env = json.loads((first / "env.json").read_text())
    config = json.loads((first / "config.json").read_text())
    common = {
        "optim": config["optim"],
        "train": config["train"],
        "augment": config["data"]["augment"],
        "model": config["model"],
    }
    machine = {key: env[key] for key in ("torch", "python", "cpu", "cores", "threads", "device")}
    found = {row: json.loads((out / row / "result.json").read_text()) for row in ended}
    return {"machine": machine, "images": env["images"], "config": common, "rows": found}


def data_source(data: str) -> dict[str, Any]:
    """Return the fields of the data's config for a set's name or a path."""
    return {"source": data} if not Path(data).exists() else {"source": str(Path(data).resolve())}


def _in_a_process(script: str, row: str, args: argparse.Namespace) -> None:
    command = [sys.executable, script, "--data", args.data, "--out", str(args.out), "--row", row]
    done = subprocess.run(command, capture_output=True, text=True)
    print(row, "done" if done.returncode == 0 else done.stderr.strip().splitlines()[-1], flush=True)
