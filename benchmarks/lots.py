"""Draw ten verdicts of the papers' claims by lot, and train both rows of each again with three new seeds.

    python -m benchmarks.lots --out DIR [--data enwik8=FILE cifar10=FILE] [--processes 2]

The lots are drawn among the trials of ``src/tokenmix/lab/papers/sources`` that have a verdict and whose runs take at
most ``LONGEST`` seconds of processor time each. A row keeps the rate that its tuning chose. What each verdict was, what
it is with the new seeds alone, and the scores go into ``benchmarks/results/lots.json``; a command that is given again
goes on with the lots that the file holds.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median

from tokenmix.lab.papers import PAPERS
from tokenmix.lab.papers.claim import CONFIRMED, CONTRADICTED, NO_DIFFERENCE, Trial
from tokenmix.lab.papers.ours import decide_trial, measured_sweep
from tokenmix.lab.sweep import Results, sweep
from tokenmix.lab.sweep.evidence import Comparison, compare
from tokenmix.system.files import write_json
from tokenmix.types import Record

RESULTS = Path(__file__).parent / "results" / "lots.json"
LOTS, DRAW = 10, 20261130
"""How many are drawn, and the seed of the draw."""
SEEDS = (3, 4, 5)
LONGEST = 200.0
LONG = ("curve", "by_context", "by_context_beyond", "grid")
"""What is left out of the records of the new runs."""


def list_decided_trials() -> list[Trial]:
    """Return the trials that can be drawn, in the order of the papers, none twice."""
    found: dict[tuple[str, ...], Trial] = {}
    for paper in PAPERS.values():
        for trial in (trial for claim in paper.claims for trial in claim.trials if trial.after == 1):
            outcome, results = decide_trial(trial), measured_sweep(trial.sweep)
            if outcome is None or results is None or outcome.verdict not in (CONFIRMED, CONTRADICTED, NO_DIFFERENCE):
                continue
            if max(seconds(trial.sweep, row) for row in (trial.row, trial.against)) <= LONGEST:
                found.setdefault((trial.sweep, *sorted((trial.row, trial.against))), trial)
    return list(found.values())


def seconds(name: str, row: str) -> float:
    """Return the processor time that a final run of a row took."""
    results = measured_sweep(name)
    assert results is not None
    return median(run["cpu_seconds"] for run in results.finals(row))


def repeat_row(name: str, row: str, out: Path, data: dict[str, str], processes: int) -> list[Record]:
    """Train a row of a plan with the new seeds at its best rate, and return the records."""
    results = measured_sweep(name)
    assert results is not None
    plan, best = results.plan, results.finals(row)[0]["rate"]
    place = {"data.path": data[source]} if (source := plan.row_fields(row).get("data.source")) in data else {}
    plan = replace(plan.select_rows([row]), rates=(best,), seeds=SEEDS, confirm=1, changes=plan.changes | place)
    tell = partial(print, f"{name}:", flush=True)
    done = sweep(plan, out / name / row, processes=processes, tell=tell)
    return done.of("final", row)


def compare_again(trial: Trial, records: dict[str, list[Record]]) -> Comparison:
    """Compare the rows of a trial over the new seeds alone, tuned and floored as before."""
    before = measured_sweep(trial.sweep)
    assert before is not None
    runs = {key: run for key, run in before.runs.items() if run["phase"] == "tune"}
    for run in (run for row in (trial.row, trial.against) for run in records[f"{trial.sweep}: {row}"]):
        runs[f"final/{run['row']}/{run['seed']}"] = run
    plan = replace(before.plan, seeds=SEEDS, confirm=1)
    found = Results(RESULTS, plan, before.machine, runs, before.yardsticks)
    return compare(found, trial.row, trial.against)


def judge(before: str, now: str) -> str:
    """Say whether a verdict of the first row ("better", "worse", "no difference") was found again with new seeds."""
    if now == before:
        return "kept"
    if "no difference" in (before, now):
        return "not found again" if now == "no difference" else "a difference now"
    return "turned" if {before, now} == {"better", "worse"} else now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", nargs="*", default=[], metavar="SOURCE=FILE")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    data = dict(each.split("=", 1) for each in given.data)
    if RESULTS.exists():
        kept = json.loads(RESULTS.read_text())
        lots = [Trial(**lot["trial"]) for lot in kept["lots"]]
    else:
        urn = list_decided_trials()
        lots = random.Random(DRAW).sample(urn, min(LOTS, len(urn)))
        kept = {"draw": DRAW, "urn": len(urn), "longest": LONGEST, "seeds": SEEDS, "lots": [], "runs": {}}
        for lot in lots:
            results = measured_sweep(lot.sweep)
            assert results is not None
            found = compare(results, lot.row, lot.against)
            kept["lots"].append({"trial": asdict(lot), "metric": results.metric(), "before": asdict(found)})
        write_json(RESULTS, kept)  # what was drawn is known before anything is trained
    rows = sorted({(lot.sweep, row) for lot in lots for row in (lot.row, lot.against)}, key=lambda each: seconds(*each))
    for name, row in rows:
        key = f"{name}: {row}"
        if key in kept["runs"]:
            continue
        records = repeat_row(name, row, given.out, data, given.processes)
        kept["runs"][key] = [{k: v for k, v in r.items() if k not in LONG} for r in records]
        for lot, entry in zip(lots, kept["lots"], strict=True):
            if {f"{lot.sweep}: {lot.row}", f"{lot.sweep}: {lot.against}"} <= kept["runs"].keys():
                found = compare_again(lot, kept["runs"])
                entry |= {"now": asdict(found), "word": judge(entry["before"]["verdict"], found.verdict)}
        write_json(RESULTS, kept)  # a row that is done stays done
    for entry in kept["lots"]:
        trial = Trial(**entry["trial"])
        before, now = (Comparison(**entry[when]).text() for when in ("before", "now"))
        print(f"{trial.text()}: {before}; now {now}: {entry['word']}")


if __name__ == "__main__":
    main()
