"""Run the paper's enwik8 tables at small scale on a CPU.

A window sweep, a context sweep, plain against factorised bias, and AFT-local against attention.

    python benchmarks/enwik8_small.py --data enwik8.gz --out runs/enwik8_small [--only window_32 ...]
    python benchmarks/enwik8_small.py --summary runs/enwik8_small --results benchmarks/results/enwik8_small.json

Every run has 4 layers of 128 features, 1024 bytes a step, AdamW and a cosine schedule. Runs are resumable: start the
same command again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenmix.models import LMConfig
from tokenmix.train import DataConfig, OptimConfig, RunConfig, TrainConfig, evaluate_run, resume, train

STEPS, TOKENS, TEST_BYTES = 2000, 1024, 200_000
ATTENTION = {"name": "attention", "heads": 4}


def local(window: int, rank: int | None = 64) -> dict:
    """Return the spec of AFT-local with a factorised or plain bias."""
    return {"name": "aft_local", "window": window, "rank": rank}


def config(mixer: dict, *, seq_len: int = 512, seed: int = 0, data: str = "enwik8") -> RunConfig:
    """Return the config of one run; only the mixer, the length and the seed ever differ."""
    model = LMConfig(dim=128, max_len=seq_len, mixers=(mixer,), layers=4)
    loop = TrainConfig(
        steps=STEPS,
        batch_size=TOKENS // seq_len,
        seed=seed,
        threads=1,
        log_every=50,
        eval_every=500,
        eval_bytes=50_000,
        save_every=250,
        keep=1,
    )
    optim = OptimConfig(lr=2e-3, warmup=100, weight_decay=0.1)
    return RunConfig(model, DataConfig(source="enwik8", path=data, seq_len=seq_len), optim, loop, recipe="enwik8_small")


RUNS = {
    "window_0": lambda d: config({"name": "aft_simple"}, data=d),
    "window_1": lambda d: config(local(1), data=d),
    "window_8": lambda d: config(local(8), data=d),
    "window_32": lambda d: config(local(32), data=d),
    "window_128": lambda d: config(local(128), data=d),
    "length_256": lambda d: config(local(32), seq_len=256, data=d),
    "length_1024": lambda d: config(local(32), seq_len=1024, data=d),
    "plain_32": lambda d: config(local(32, rank=None), data=d),
    "attention": lambda d: config(ATTENTION, data=d),
    "window_32_seed1": lambda d: config(local(32), seed=1, data=d),
    "attention_seed1": lambda d: config(ATTENTION, seed=1, data=d),
}


def run(name: str, out: Path, data: str) -> None:
    """Train one run to its end, from wherever it stands, and score the test split."""
    folder = out / name
    if folder.exists():
        resume(folder)
    else:
        train(RUNS[name](data), folder)
    evaluate_run(folder, split="test", max_bytes=TEST_BYTES)


def summary(out: Path) -> dict:
    """Collect the figures of all finished runs, and the machine they ran on."""
    rows, machine = {}, {}
    for folder in sorted(out.iterdir()):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        test = [x for x in lines if x["kind"] == "eval" and x["split"] == "test"]
        steps = [x for x in lines if x["kind"] == "train"]
        if not test:
            continue
        env, made = (json.loads((folder / name).read_text()) for name in ("env.json", "config.json"))
        machine = {key: env.get(key) for key in ("cpu", "machine", "threads", "torch", "python")}
        rows[folder.name] = {
            "mixer": made["model"]["mixers"][0],
            "seq_len": made["data"]["seq_len"],
            "steps": steps[-1]["step"],
            "seed": made["train"]["seed"],
            "parameters": env["parameters"],
            "train_bits_per_byte_last_250_steps": round(sum(x["bpb"] for x in steps[-5:]) / 5, 4),
            "test_bits_per_byte": round(test[-1]["bits_per_byte"], 4),
            "test_bytes": TEST_BYTES,
            "train_seconds": round(steps[-1]["seconds"], 1),
        }
    return {"machine": machine, "runs": rows}


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="enwik8", help="path of enwik8, raw or .gz")
    parser.add_argument("--out", type=Path, default=Path("runs/enwik8_small"))
    parser.add_argument("--only", nargs="*", default=list(RUNS))
    parser.add_argument("--summary", type=Path)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    if args.summary:
        rows = json.dumps(summary(args.summary), indent=1)
        args.results.write_text(rows + "\n") if args.results else print(rows)
        return
    for name in args.only:
        run(name, args.out, args.data)


if __name__ == "__main__":
    main()
