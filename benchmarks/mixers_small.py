"""Train every causal mixer in the same small language model on the same bytes, and on associative recall.

The results are one table and two pictures.

    python benchmarks/mixers_small.py --out runs/mixers_small [--only hydra linear ...]
    python benchmarks/mixers_small.py --out runs/mixers_small --results benchmarks/results/mixers_small

Each mixer runs in its own process, so that its peak memory is its own; one that has finished is not run again. Speeds
are measured again when the results are written, with all models in one process taking turns.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from side_by_side import train_rates
from tokenmix import MIXERS, build_mixer, state_bytes
from tokenmix.data import recall_batch
from tokenmix.models import LM, LMConfig
from tokenmix.models.blocks import complete_spec
from tokenmix.train import DataConfig, OptimConfig, RunConfig, TrainConfig, train

DIM, LAYERS, SEQ_LEN, STEPS, BATCH, LR, INIT_STD = (
    64,
    2,
    64,
    800,
    8,
    4e-3,
    0.05,
)  # longer sequences stay on the plateau of byte statistics in so few bytes
RECALL = {"seq_len": 36, "pairs": 6, "vocab": 64}
RECALL_DIM, RECALL_STEPS, RECALL_BATCH, RECALL_INIT_STD = 64, 600, 64, 0.1  # 0.02 learns nothing in so few steps

TASKS = ("language", "recall")
OPTIONS: dict[str, dict[str, Any]] = {  # where the defaults do not suit so small a model
    "attention": {"heads": 4},
    "aft_full": {"rank": 32},
    "aft_local": {"window": 32, "rank": 32},
    "aft_conv": {"heads": 8, "kernel_size": 31},
    "hydra": {},
    "multihead_linear": {"heads": 4},
    "external": {},
    "external_multihead": {"heads": 4, "coef": 2, "slots": 16},
    **{
        name: {"heads": 4}
        for name in (
            "linear",
            "performer",
            "rfa",
            "memory_compressed",
            "transformer_xl",
            "compressive",
            "lambda",
            "reformer",
            "routing",
        )
    },
    **{
        f"synthesizer_{kind}": {"heads": 4}
        for kind in ("dense", "random", "factorized_dense", "factorized_random", "mixture")
    },
    **{name: {"heads": 4, "window": 32} for name in ("local", "longformer")},
    **{name: {"heads": 4, "stride": 16} for name in ("strided", "fixed")},
    "axial": {"heads": 4, "width": 16},
    "image_local": {"heads": 4},
    "bigbird": {"heads": 4, "block": 16},
    "sinkhorn": {"heads": 4, "block": 16},
    **{name: {"heads": 4, "kernel_size": 15} for name in ("lightconv", "dynamicconv")},
    "pooling": {"window": 3},
}


def causal_mixers() -> list[str]:
    """Return the rows of the table that can be a language model."""
    return [name for name, cls in MIXERS.items() if cls.supports_causal]


def spec(name: str) -> dict[str, Any]:
    """Return the mixer as JSON."""
    return {"name": name, **OPTIONS.get(name, {})}


def model_of(name: str) -> LMConfig:
    """Build the language model with this mixer in every layer."""
    return LMConfig(dim=DIM, max_len=SEQ_LEN, mixers=(spec(name),), layers=LAYERS, init_std=INIT_STD)


def language(name: str, folder: Path) -> dict[str, Any]:
    """Train the language model on the sources of the Python standard library."""
    model = model_of(name)
    loop = TrainConfig(
        steps=STEPS,
        batch_size=BATCH,
        threads=1,
        log_every=20,
        eval_every=STEPS,
        eval_bytes=40_000,
        save_every=STEPS,
        keep=1,
    )
    config = RunConfig(
        model,
        DataConfig(source="stdlib", seq_len=SEQ_LEN),
        OptimConfig(lr=LR, warmup=50, weight_decay=0.1),
        loop,
        recipe="mixers_small",
    )
    end = train(config, folder, verbose=False)
    kept = {key: end[key] for key in ("tokens", "tokens_per_s", "peak_mib", "valid_bits_per_byte")}
    return {**kept, "parameters": sum(p.numel() for p in LM(model).parameters())}


def recall(name: str) -> dict[str, Any]:
    """Train on associative recall.

    Returns the accuracy on fresh rows and the bytes of one row's state after the whole sequence.
    """
    torch.manual_seed(0)
    model = LM(
        LMConfig(
            dim=RECALL_DIM,
            max_len=RECALL["seq_len"],
            mixers=(spec(name),),
            layers=2,
            vocab=RECALL["vocab"],
            init_std=RECALL_INIT_STD,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    draw = torch.Generator().manual_seed(0)
    start = time.perf_counter()
    for step in range(RECALL_STEPS):
        optimizer.param_groups[0]["lr"] = (
            2e-3 * min(1.0, (step + 1) / 100) * min(1.0, 0.1 + 2 * (1 - step / RECALL_STEPS))
        )
        tokens, targets = recall_batch(RECALL_BATCH, **RECALL, generator=draw)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - start
    model.eval()
    tokens, targets = recall_batch(500, **RECALL, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        right = (model(tokens).argmax(-1) == targets)[targets >= 0]
    return {
        "recall_accuracy": round(float(right.float().mean()), 4),
        "recall_seconds": round(seconds, 1),
        "recall_state_bytes": _state(name, RECALL["seq_len"]),
    }


def _state(name: str, T: int) -> int | None:
    """Return the bytes of one layer's state after T tokens; None where the mixer does not stream."""
    mixer = build_mixer(dim=RECALL_DIM, causal=True, **complete_spec(spec(name), T)).eval()
    if not mixer.capabilities.streaming:
        return None
    return state_bytes(mixer.extend(torch.randn(1, T, RECALL_DIM), mixer.init_state(1))[1])


def one(name: str, task: str, out: Path) -> None:
    """Run one task for one mixer; the result is written when it has finished."""
    torch.set_num_threads(1)
    found = {"spec": spec(name), **(language(name, out / name) if task == "language" else recall(name))}
    (out / f"{name}.{task}.json").write_text(json.dumps(found, indent=1))


def results_of(out: Path) -> dict[str, dict[str, Any]]:
    """Collect both tasks of every mixer that has finished them."""
    rows = {}
    for name in causal_mixers():
        parts = [out / f"{name}.{task}.json" for task in TASKS]
        if all(p.exists() for p in parts):
            rows[name] = {key: value for p in parts for key, value in json.loads(p.read_text()).items()}
    return rows


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the rows as Markdown, best language model first."""
    lines = [
        "| mixer | bits per byte | tokens/s | peak MiB | parameters | recall | state bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, r in sorted(rows.items(), key=lambda item: item[1]["valid_bits_per_byte"]):
        state = f"{r['recall_state_bytes']:,}" if r["recall_state_bytes"] is not None else "does not stream"
        speed = f"{r['tokens_per_s']:,.0f} | {r['peak_mib']:,.0f} | {r['parameters']:,}"
        lines.append(
            f"| {name} | {r['valid_bits_per_byte']:.3f} | {speed} | {100 * r['recall_accuracy']:.1f} % | {state} |"
        )
    return "\n".join(lines)


def picture(rows: dict[str, dict[str, Any]], x: str, y: str, labels: tuple[str, str], path: Path, *, log: bool) -> None:
    """Draw a scatter plot with every mixer named."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), dpi=130, layout="constrained")
    ax = figure.add_subplot()
    shown = {n: r for n, r in sorted(rows.items(), key=lambda item: item[1][y]) if r[x] is not None}
    number = {name: i + 1 for i, name in enumerate(shown)}
    ax.plot(
        [r[x] for r in shown.values()], [r[y] for r in shown.values()], "o", color="#0072B2", markersize=5, alpha=0.7
    )
    for names in crowds({n: (r[x], r[y]) for n, r in shown.items()}):
        r = shown[names[-1]]
        ax.annotate(
            ", ".join(str(number[n]) for n in names),
            (r[x], r[y]),
            xytext=(4, 4),
            textcoords="offset points",
            fontsize=8,
        )
    ax.text(
        1.02,
        1.0,
        "\n".join(f"{i:2d}  {name}" for name, i in number.items()),
        transform=ax.transAxes,
        fontsize=8,
        va="top",
        family="monospace",
    )
    if log:
        ax.set_xscale("log")
    ax.set_xlabel(labels[0])
    ax.set_ylabel(labels[1])
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def crowds(points: dict[str, tuple[float, float]]) -> list[list[str]]:
    """Group mixers whose points are so close that their numbers would overlap; x is compared by its logarithm."""
    height = max(y for _, y in points.values()) - min(y for _, y in points.values())
    width = math.log(max(x for x, _ in points.values()) / min(x for x, _ in points.values()))
    groups: list[list[str]] = []
    for name, (x, y) in sorted(points.items(), key=lambda item: item[1]):
        others = (
            g
            for g in groups
            if abs(math.log(x / points[g[-1]][0])) < 0.035 * width and abs(y - points[g[-1]][1]) < 0.02 * height
        )
        found = next(others, None)
        if found is None:
            groups.append([name])
        else:
            found.append(name)
    return groups


def collect(out: Path, results: Path) -> None:
    """Write the results of everything that has finished: JSON, table and pictures."""
    rows = results_of(out)
    for name, rate in train_rates({name: model_of(name) for name in rows}, batch=BATCH, seq_len=SEQ_LEN).items():
        rows[name]["tokens_per_s"] = rate
    env = {"cpu": _cpu(), "threads": 1, "torch": torch.__version__, "python": platform.python_version()}
    setup = {
        "dim": DIM,
        "layers": LAYERS,
        "seq_len": SEQ_LEN,
        "steps": STEPS,
        "batch": BATCH,
        "recall": {**RECALL, "dim": RECALL_DIM, "steps": RECALL_STEPS},
    }
    results.parent.mkdir(parents=True, exist_ok=True)
    results.with_suffix(".json").write_text(json.dumps({"machine": env, "setup": setup, "rows": rows}, indent=1) + "\n")
    labels = ("training tokens per second, one thread", "bits per byte on held-out Python sources")
    picture(
        rows, "tokens_per_s", "valid_bits_per_byte", labels, results.with_name(results.name + "_speed.png"), log=True
    )
    labels = ("bytes of one layer's state", "accuracy on multi-query associative recall")
    picture(
        rows, "recall_state_bytes", "recall_accuracy", labels, results.with_name(results.name + "_recall.png"), log=True
    )
    print(table(rows))


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/mixers_small"))
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    if args.results:
        return collect(args.out, args.results)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.task:
        return one(args.only[0], args.task, args.out)
    for name in args.only or causal_mixers():
        for task in TASKS:
            if _claimed(args.out / f"{name}.{task}"):
                print(f"{time.strftime('%H:%M:%S')} {name} {task}", flush=True)
                subprocess.run(
                    [sys.executable, __file__, "--out", str(args.out), "--only", name, "--task", task], check=False
                )
    return None


def _claimed(stem: Path) -> bool:
    """Claim a task for this process: True if it is not done and no other process is working on it.

    Several processes may run side by side.
    """
    if stem.with_name(stem.name + ".json").exists():
        return False
    try:
        stem.with_name(stem.name + ".claim").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    main()
