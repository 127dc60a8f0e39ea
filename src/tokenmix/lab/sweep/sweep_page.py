"""The page of a sweep: its table, comparisons, curves and what is still to run; whole at any time."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...system.text import Table
from ...types import Record
from ..report.page import write_page
from ..report.tables import flatten, without_empty_columns
from .curves import final_pictures, tuning_pictures
from .evidence import compare, plural
from .plan import Job, SweepPlan
from .results import Results, portable, results_table

NOTES = (
    "Scores are those on the validation split; training times hold for this machine and its load.",
    "A model that was trained for minutes says little about a large one that was trained for days.",
)


def write_sweep_page(results: Results, running: Sequence[Job], out: Path, *, refresh: int | None) -> Path:
    """Write one self-contained HTML page about a sweep.

    Args:
        running: the runs in progress.
        out: the file to write.
        refresh: seconds after which a browser loads the page again; None: the sweep has ended or was stopped.
    """
    plan, done = results.plan, results.done()
    rows = without_empty_columns(results_table(results))
    rows = replace(rows, title="Rows", notes=[f"Sweep of {rows.title}.", *rows.notes])
    tables = [rows, comparison_table(results), remaining_table(results, running)]
    return write_page(
        out,
        title=f"Which is best on {Path(plan.recipe).stem}: {', '.join(plan.rows)}?",
        lead=[*verdict_lines(results), progress(done, plan.total(), len(running), refresh)],
        tables=[table for table in tables if table.rows],
        curves=[("Final runs", final_pictures(results)), ("Tuning runs", tuning_pictures(results))],
        facts=facts_table(results),
        notes=NOTES,
        refresh=refresh,
    )


def progress(done: int, total: int, running: int, refresh: int | None) -> str:
    """Say how far the sweep is, and when this was written."""
    at = time.strftime("%Y-%m-%d %H:%M:%S")
    if done >= total:
        return f"All {total} runs have ended ({at})."
    said = f"{done} of {total} runs have ended"
    if refresh is None:
        return f"{said}. The sweep was stopped ({at}); the same command goes on from here."
    waiting = total - done - running
    return f"{said}, {running} in progress, {waiting} to come ({at}). This page loads itself again every {refresh} s."


def comparison_table(results: Results) -> Table:
    """Return how each row compares with the first, by the protocol; no lines if there is no other row."""
    first, *others = results.plan.rows
    lines, lacks = [], []
    for row in others:
        if not results.scores(first).keys() & results.scores(row).keys():
            lines.append([row, "not yet", "-", "-", "0"])
            continue
        found = compare(results, row, first)
        margin = "one seed" if found.margin is None else f"+- {found.margin:.3f}"
        lines.append([row, found.verdict, f"{found.difference:+.3f}", margin, str(found.n)])
        lacks += [why for why in found.why if why not in lacks]
    better = "above" if results.higher_is_better() else "below"
    notes = [f"Difference: score less that of {first}, mean over paired seeds; {better} 0 is better than {first}."]
    notes += [f"Missing for a verdict: {'; '.join(lacks)}."] if lacks else []
    return Table(f"Against {first}", ["row", "verdict", "difference", "95 % interval", "paired seeds"], lines, notes)


def remaining_table(results: Results, running: Sequence[Job]) -> Table:
    """Return the runs in progress and those to come, one line per row that has any."""
    plan, lines = results.plan, []
    for row in plan.rows:
        now = [job for job in running if job.row == row]
        tried = {r["rate"] for r in results.of("tune", row)} | {job.rate for job in now if job.phase == "tune"}
        ended = {r["seed"] for r in results.finals(row)} | {job.seed for job in now if job.phase == "final"}
        doing = [f"rate {job.rate:g}" if job.phase == "tune" else f"seed {job.seed}" for job in now]
        rates = [f"{rate:g}" for rate in plan.rates if plan.tries_rates() and rate not in tried]
        seeds = [str(seed) for seed in plan.seeds if seed not in ended]
        if doing or rates or seeds:
            lines.append([row, *(", ".join(each) or "-" for each in (doing, rates, seeds))])
    return Table("Still to run", ["row", "in progress", "rates to try", "seeds to run"], lines)


def verdict_lines(results: Results) -> list[str]:
    """Say how the rows compare with the first, one sentence for each verdict, which names all rows that have it."""
    first, *others = results.plan.rows
    groups: dict[str, list[str]] = {}
    for row in others:
        if not results.scores(first).keys() & results.scores(row).keys():
            continue
        found = compare(results, row, first)
        margin = "" if found.margin is None else f" +- {found.margin:.3f}"
        said = f"{row} ({found.difference:+.3f}{margin}, {plural(found.n, 'seed')})"
        groups.setdefault(found.verdict, []).append(said)
    texts = {
        "better": f"Better than {first}",
        "worse": f"Worse than {first}",
        "no difference": f"No difference from {first} beyond that between seeds",
        "cannot be tested": f"Not decided against {first}",
    }
    lines = [f"{text}: {', '.join(groups[verdict])}." for verdict, text in texts.items() if verdict in groups]
    counts = [len(results.scores(row)) for row in results.plan.rows if results.scores(row)]
    if counts and min(counts) == 1:
        lines.append("Caution: rows with one seed are ordered by chance as much as by their mixers.")
    return lines


def plan_sentences(plan: SweepPlan) -> list[str]:
    """Say what a plan does, in sentences."""
    shell = f" in the {plan.shell} shell" if plan.shell else ""
    found = [f"Recipe {plan.recipe} at size {plan.size}{shell}."]
    rates, seeds = ", ".join(f"{rate:g}" for rate in plan.rates), ", ".join(map(str, plan.seeds))
    with_seeds = f"{plural(len(plan.seeds), 'seed')}: {seeds}"
    length = f"{plan.steps:,} steps" if plan.steps else "as many steps as the recipe says"
    length = f"{plan.seconds:g} seconds of training" if plan.equal == "time" else length
    if plan.tries_rates():
        found.append(f"Each row was tried at the rates {rates}, for {100 * plan.tune:g} % of the steps.")
        again = f" (the best {plan.confirm} at full length)" if plan.confirm > 1 else ""
        found.append(f"The best rate{again} was trained for {length} with {with_seeds}.")
    else:
        found.append(f"Each row was trained at the rate {rates} for {length} with {with_seeds}.")
    if plan.hopeless is not None and plan.tries_rates():
        found.append(f"A rate was given up if it was worse than an earlier one by {100 * plan.hopeless:g} % half-way.")
    if plan.init:
        found.append("Each run started from a final run of another sweep.")
    changes = portable(plan)["changes"]
    if changes:
        found.append(f"Changed in all rows: {_fields_text(changes)}.")
    found += [f"Changed in {row}: {_fields_text(given)}." for row, given in plan.rows.items() if given]
    return found


def _fields_text(changes: Record) -> str:
    shown = {name: value if isinstance(value, str) else json.dumps(value) for name, value in changes.items()}
    return ", ".join(f"{name} to {value}" for name, value in shown.items())


def facts_table(results: Results) -> Table:
    """Return the machine, one line per fact, and below it the plan in sentences."""
    facts = flatten("machine", results.machine)
    rows = [["recipe", results.plan.recipe], *([name.removeprefix("machine."), value] for name, value in facts.items())]
    return Table("Recipe and machine", ["fact", "value"], rows, plan_sentences(results.plan))
