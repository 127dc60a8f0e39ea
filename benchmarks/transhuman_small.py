"""Compare mixers, baselines and ablations of examples/transhuman on bodies of 64 x 64 pixels.

    python -m benchmarks.transhuman_small --out runs/transhuman_small [--rows attention ...] [--seeds 0 1] [--jobs 2]
    python -m benchmarks.transhuman_small --out runs/transhuman_small --collect     # writes the results
    python -m benchmarks.transhuman_small --page docs/bodies.md                     # renews its tables from them

The rows of ``TUNED`` try each rate once on a fifth of the steps; the best by the loss of the last hundred steps is the
row's rate. Other rows take that of attention. A run has one thread; one that has finished is not run again, and one
that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from examples.transhuman.model import PAPER, PLACE, build_on_meta, count_parameters
from examples.transhuman.training import read_log

from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.sweep.evidence import student

RESULTS = Path(__file__).parent / "results" / "transhuman_small.json"
TUNED = ("attention", "aft_simple", "convolution", "appearance")
RATES = (2e-3, 4e-3, 8e-3)
STEPS = 2400
VARIANTS: dict[str, tuple[str, tuple[object, ...]]] = {
    "one_view": ("attention", ("--views", 1)),
    "attention_long": ("attention", ("--steps", 3 * STEPS)),
    "appearance_long": ("appearance", ("--steps", 3 * STEPS)),
}
"""Rows that are another one with other settings of training."""
SCENES = 16
"""Scenes of each kind that a run is scored on, with three target views each."""
MARKED = re.compile(r"(<!-- bodies: (\w+) -->\n).*?(<!-- /bodies -->)", re.DOTALL)


def call(*words: object) -> bool:
    """Run a command of the example in a process of its own, and return whether it succeeded."""
    command = [sys.executable, "-m", "examples.transhuman", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    print(" ".join(map(str, words)), done.stderr.strip() if done.returncode else "done", flush=True)
    return done.returncode == 0


def run(row: str, out: Path, seed: int, rate: float, steps: int) -> None:
    """Train and score one run, unless it is there."""
    if not (out / "scores.json").exists():
        name, more = VARIANTS.get(row, (row, ()))
        given = ("--data", out.parent.parent, "--seed", seed, "--rate", rate, "--steps", steps)
        trained = call("train", "--row", name, "--out", out, *given, *more)
        if trained and steps == STEPS:
            call("score", out, "--scenes", SCENES)


def last_loss(run: Path, steps: int = 100) -> float:
    """Return the mean loss of the last steps of a run."""
    lines = read_log(run)
    return mean(line["loss"] for line in lines if line["step"] > lines[-1]["step"] - steps)


def tune(out: Path, row: str) -> dict[float, float]:
    """Return the last loss of a row by rate."""
    tried = {rate: out / "tuning" / f"{row}-{rate:g}" for rate in RATES}
    return {rate: last_loss(run) for rate, run in tried.items() if (run / "state.pt").exists()}


def best_rate(out: Path, row: str) -> float:
    """Return the rate of a row, or of attention where the row was not tuned."""
    found = tune(out, row if row in TUNED else "attention")
    return min(found, key=found.__getitem__)


def train_all(out: Path, rows: list[str], seeds: list[int], jobs: int) -> None:
    """Tune the rows that are tuned, then train and score every row with every seed."""
    with ThreadPoolExecutor(jobs) as pool:
        trials = [(row, rate) for row in TUNED for rate in RATES]
        list(pool.map(lambda t: run(t[0], out / "tuning" / f"{t[0]}-{t[1]:g}", 0, t[1], STEPS // 5), trials))
        runs = [(row, seed) for seed in seeds for row in rows]
        list(pool.map(lambda r: run(r[0], out / "runs" / f"{r[0]}-{r[1]}", r[1], best_rate(out, r[0]), STEPS), runs))


def collect(out: Path) -> dict[str, Any]:
    """Collect what has finished."""
    rows: dict[str, Any] = {}
    floors, training = {}, {}
    for folder in sorted((out / "runs").glob("*-*")):
        if (folder / "scores.json").exists():
            row, _, seed = folder.name.rpartition("-")
            scores = json.loads((folder / "scores.json").read_text())
            log = read_log(folder)[-1]
            config = json.loads((folder / "config.json").read_text())
            training = config["training"]
            entry = rows.setdefault(row, {"rate": config["training"]["rate"], "runs": {}})
            entry["runs"][seed] = {
                "cpu_seconds": log["cpu_seconds"],
                "scores": {k.removesuffix(", model"): v for k, v in scores.items() if k.endswith(", model")},
            }
            floors = {k: v for k, v in scores.items() if not k.endswith(", model")}
    return {
        "machine": machine(),
        "training": training,
        "tuning": {row: {f"{rate:g}": loss for rate, loss in tune(out, row).items()} for row in TUNED},
        "floors": floors,
        "rows": rows,
        **describe_paper(),
    }


def describe_paper() -> dict[str, Any]:
    """Return the sizes of the paper's model, and what a model of these sizes has on the meta device."""
    return {
        "paper": asdict(PAPER) | {"place": PLACE},
        "counts": count_parameters(PAPER),
        "point_features": build_on_meta(PAPER).body.in_features,
    }


def spread(values: list[float], form: str) -> str:
    """Write a mean with the standard deviation of at least three seeds, or one seed marked so."""
    if len(values) < 3:
        return f"{format(mean(values), form)} ({len(values)} seed{'s' * (len(values) > 1)})"
    return f"{format(mean(values), form)} ± {format(stdev(values), form)}"


def values_of(results: dict[str, Any], row: str, kind: str, field: str) -> list[float]:
    """Return the scores of a row, by seed."""
    runs = results["rows"][row]["runs"]
    return [runs[seed]["scores"][kind][field] for seed in sorted(runs)]


def write_scores(results: dict[str, Any]) -> str:
    """Write the table of scores: rows by their error at unseen vertices, then the floors."""
    head = ("row", "seeds", *(f"{kind}: PSNR / SSIM" for kind in ("new poses", "new people", "one view")))
    lines = ["| " + " | ".join((*head, "error unseen", "seen")) + " |", "|---|---|---|---|---|---|---|"]

    def pair(row: str, kind: str) -> str:
        return " / ".join(
            f"{mean(values_of(results, row, kind, f)):{form}}" for f, form in (("psnr", ".2f"), ("ssim", ".3f"))
        )

    order = sorted(results["rows"], key=lambda row: mean(values_of(results, row, "identity", "unseen")))
    for row in order:
        cells = [pair(row, kind) for kind in ("pose", "identity", "one view")]
        cells += [spread(values_of(results, row, "identity", f), ".3f").split(" (")[0] for f in ("unseen", "seen")]
        lines.append(f"| {row} | {len(results['rows'][row]['runs'])} | " + " | ".join(cells) + " |")
    for floor in ("mean colour", "nearest view"):
        given = {kind: results["floors"][f"{kind}, {floor}"] for kind in ("pose", "identity", "one view")}
        cells = [f"{s['psnr']:.2f} / {s['ssim']:.3f}" for s in given.values()]
        cells += [f"{given['identity'][f]:.3f}" for f in ("unseen", "seen")]
        lines.append(f"| *{floor}* | | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_differences(results: dict[str, Any]) -> str:
    """Write each row of three seeds against appearance alone and against attention, with 95 % intervals."""
    lines = ["| row | against | error unseen, new people | PSNR, new people |", "|---|---|---|---|"]
    full = [row for row in results["rows"] if len(results["rows"][row]["runs"]) >= 3]
    for other in ("appearance", "attention"):
        for row in full:
            if row != other and other in full and not (other == "attention" and row == "appearance"):
                cells = []
                for field, form in (("unseen", "+.3f"), ("psnr", "+.2f")):
                    pairs = zip(*(values_of(results, r, "identity", field) for r in (row, other)), strict=True)
                    gaps = [a - b for a, b in pairs]
                    wide = student(len(gaps)) * stdev(gaps) / len(gaps) ** 0.5
                    share = mean(gaps) / mean(values_of(results, other, "identity", field))
                    percent = f", {share:+.0%}" if field == "unseen" else ""
                    cells.append(f"{mean(gaps):{form}} ± {wide:{form[1:]}}{percent}")
                lines.append(f"| {row} | {other} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_counts(results: dict[str, Any]) -> str:
    """Write the table of parameters at the paper's sizes."""
    counts = results["counts"]
    lines = ["| part | parameters |", "|---|---|", *(f"| {name} | {n:,} |" for name, n in counts.items())]
    return "\n".join([*lines, f"| sum | {sum(counts.values()):,} |"])


TABLES = {"scores": write_scores, "differences": write_differences, "counts": write_counts}


def renew(markdown: str, results: dict[str, Any]) -> str:
    """Return a page with its tables built from the results."""
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]](results) + "\n" + found[3], markdown)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/transhuman_small"))
    parser.add_argument("--rows", nargs="*", default=list(TUNED))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--collect", action="store_true", help="write the results of what has finished")
    parser.add_argument("--page", type=Path, help="renew the tables of a page")
    given = parser.parse_args()
    if given.collect:
        RESULTS.write_text(json.dumps(collect(given.out), indent=1) + "\n")
    elif given.page:
        given.page.write_text(renew(given.page.read_text(), json.loads(RESULTS.read_text())))
    else:
        train_all(given.out, given.rows, given.seeds, given.jobs)


if __name__ == "__main__":
    main()
