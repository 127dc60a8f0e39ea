"""Reproduce Table 4 of the AFT paper at small scale on enwik8: equal tokens, then equal wall-clock time.

Iterations per second and peak memory are reported beside bits per byte.

    python benchmarks/aft_table4_small.py --data enwik8.gz --out runs/table4 [--only transformer ...]
    python benchmarks/aft_table4_small.py --out runs/table4 --results benchmarks/results/aft_table4_small.json

Every run has 4 layers of 128 features at T = 64 (at 512, such short runs stay on the plateau of byte statistics),
sixteen sequences a step and AdamW at a constant rate after its warm-up. One run can therefore be read twice: after
STEPS and after SECONDS of training, whichever comes first; it then continues to the other. Each mixer has its own
process. Iterations per second are measured again when the results are written, with all models in one process taking
turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from side_by_side import train_rates
from tokenmix.models import LMConfig
from tokenmix.train import DataConfig, OptimConfig, RunConfig, TrainConfig, evaluate_run, resume, train

STEPS, SECONDS, SEQ_LEN, BATCH, TEST_BYTES = 800, 100.0, 64, 16, 100_000
ROWS: dict[str, tuple[dict[str, Any], str]] = {  # name -> spec, the paper's row
    "transformer": ({"name": "attention", "heads": 4}, "transformer_12x512"),
    "reformer": ({"name": "reformer", "heads": 4}, "reformer_12x512"),
    "synthesizer_dense": ({"name": "synthesizer_dense", "heads": 4}, "synthesizer_dense_12x512"),
    "linear": ({"name": "linear", "heads": 4}, "linear_transformer_12x512"),
    "performer": ({"name": "performer", "heads": 4}, "performer_12x512"),
    "aft_local_32": ({"name": "aft_local", "window": 32, "rank": 64}, "aft_local_32_12x512"),
    "aft_simple": ({"name": "aft_simple"}, "aft_simple_24x256"),
}


def config(mixer: dict[str, Any], data: str) -> RunConfig:
    """Return the config of one run; only the mixer ever differs."""
    model = LMConfig(dim=128, max_len=SEQ_LEN, mixers=(mixer,), layers=4, init_std=0.05)
    optim = OptimConfig(lr=4e-3, warmup=50, weight_decay=0.1, schedule="constant")
    often = {"log_every": 20, "eval_every": 10_000, "eval_bytes": 10_000, "save_every": 10_000, "keep": 2}
    loop = TrainConfig(steps=STEPS, max_seconds=SECONDS, batch_size=BATCH, threads=1, **often)
    return RunConfig(
        model, DataConfig(source="enwik8", path=data, seq_len=SEQ_LEN), optim, loop, recipe="aft_table4_small"
    )


def one(name: str, out: Path, data: str) -> None:
    """Train until tokens or time are spent and score the test split; then spend the other and score again."""
    folder = out / name
    first = train(config(ROWS[name][0], data), folder, verbose=False)
    scores = {_reached(first): _score(folder, first)}
    rest = {"train.max_seconds": None} if first["step"] < STEPS else {"train.steps": None}
    second = resume(folder, changes=rest, verbose=False)
    scores["tokens" if first["step"] < STEPS else "seconds"] = _score(folder, second)
    parameters = json.loads((folder / "env.json").read_text())["parameters"]
    (out / f"{name}.json").write_text(
        json.dumps({"spec": ROWS[name][0], "paper": ROWS[name][1], "parameters": parameters, **scores}, indent=1)
    )


def _reached(summary: dict[str, Any]) -> str:
    return "tokens" if summary["step"] >= STEPS else "seconds"


def _score(folder: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """Score the last checkpoint on the test split, with the speed and memory of training so far."""
    bits = evaluate_run(folder, split="test", max_bytes=TEST_BYTES, record=False).bits_per_byte
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    recent = [x["bpb"] for x in lines if x["kind"] == "train"][-5:]
    speed = {"iterations_per_s": round(summary["step"] / summary["seconds"], 3), "peak_mib": round(summary["peak_mib"])}
    return {
        "step": summary["step"],
        "seconds": summary["seconds"],
        "train": round(sum(recent) / len(recent), 4),
        "test": round(bits, 4),
        **speed,
    }


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the rows as Markdown, beside the figures that the paper prints."""
    from tokenmix.recipes.aft_enwik8 import OTHERS

    head = (
        "| method | test, equal tokens | test, equal time | train, equal tokens | it/s | peak MiB "
        "| paper: test | it/s | GB/GPU |"
    )
    lines = [head, "|---" * 9 + "|"]
    for name, r in rows.items():
        paper = OTHERS[r["paper"]]
        tokens, timed = r["tokens"], r["seconds"]
        mine = (
            f"{tokens['test']:.3f} | {timed['test']:.3f} | {tokens['train']:.3f} "
            f"| {r['iterations_per_s']:.2f} | {tokens['peak_mib']}"
        )
        lines.append(f"| {name} | {mine} | {paper[4]:.3f} | {paper[5]:.2f} | {paper[6]} |")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="enwik8", help="path of enwik8, raw or .gz")
    parser.add_argument("--out", type=Path, default=Path("runs/table4"))
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    if args.results:
        rows = {
            name: json.loads((args.out / f"{name}.json").read_text())
            for name in ROWS
            if (args.out / f"{name}.json").exists()
        }
        for name, rate in train_rates(
            {name: config(ROWS[name][0], "").model for name in rows}, batch=BATCH, seq_len=SEQ_LEN
        ).items():
            rows[name]["iterations_per_s"] = round(rate / (BATCH * SEQ_LEN), 3)
        args.results.write_text(json.dumps({"steps": STEPS, "seconds": SECONDS, "rows": rows}, indent=1) + "\n")
        print(table(rows))
    elif args.only is not None and len(args.only) == 1:
        args.out.mkdir(parents=True, exist_ok=True)
        one(args.only[0], args.out, args.data)
    else:
        for name in args.only or ROWS:
            if not (args.out / f"{name}.json").exists():
                print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
                subprocess.run(
                    [sys.executable, __file__, "--data", args.data, "--out", str(args.out), "--only", name], check=False
                )


if __name__ == "__main__":
    main()
