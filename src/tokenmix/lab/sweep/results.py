"""The results of a sweep: one JSON file, to which every finished run adds a record, and the table made from it."""

from __future__ import annotations

import json
import math
from collections.abc import Container
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev

from ...errors import MixerError
from ...system.files import whole_file
from ...system.lock import enter_alone
from ...system.text import Table, number
from ...types import Record
from .plan import Job, SweepPlan, run_key


@dataclass
class Results:
    """What a sweep has found so far.

    Attributes:
        path: the JSON file; it is rewritten whole after every run.
        plan: the plan.
        machine: the machine that the first run ran on.
        runs: a record of every finished run by ``Job.key``.
        yardsticks: scores that need no model, such as that of gzip.
        shared: other sweeps write to the file too, with other rows or seeds of the plan; what they add is kept.
    """

    path: Path
    plan: SweepPlan
    machine: Record = field(default_factory=dict)
    runs: dict[str, Record] = field(default_factory=dict)
    yardsticks: dict[str, float] = field(default_factory=dict)
    shared: bool = False

    @classmethod
    def open(cls, path: Path, plan: SweepPlan | None = None, *, shared: bool = False) -> Results:
        """Read the file, or start with none.

        A plan that differs from the file's is refused, except that rows, rates and seeds may have been added; of a
        shared file it may also have only some of the rows and seeds.
        """
        if not path.exists():
            if plan is None:
                raise MixerError(f"sweep: {path} does not exist; give the rows and rates of a new sweep.")
            return cls(path, plan, shared=shared)
        try:
            data = json.loads(path.read_text(), parse_constant=_refuse_constant)
            then = SweepPlan.from_json(data["plan"])
            runs = {key: _check_record(key, record) for key, record in data["runs"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as why:
            raise MixerError(f"sweep: {path} cannot be read as the results of a sweep ({why}).") from None
        if plan is not None:
            _check_continues(path, plan, then, shared)
        return cls(path, plan or then, data.get("machine", {}), runs, data.get("yardsticks", {}), shared)

    def save(self) -> None:
        """Write the file, whole or not at all; of a shared one, what others have added to it stays."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with enter_alone(self.path.parent):
            plan = self.plan
            if self.shared and self.path.exists():
                found = Results.open(self.path)
                _check_continues(self.path, plan, found.plan, True)
                plan, self.runs = _join_plans(found.plan, plan), found.runs | self.runs
            content = {
                "plan": portable(plan),
                "machine": self.machine,
                "yardsticks": self.yardsticks,
                "runs": {key: self.runs[key] for key in sorted(self.runs)},
            }
            with whole_file(self.path) as file:
                file.write((json.dumps(content, indent=1) + "\n").encode())

    def add(self, job: Job, record: Record) -> None:
        """Add the record of a finished run and save."""
        self.runs[job.key] = {"phase": job.phase, "row": job.row, "rate": job.rate, "seed": job.seed, **record}
        self.save()

    def of(self, phase: str, row: str) -> list[Record]:
        """Return the records of a row in a phase, by rate and seed."""
        found = [r for r in self.runs.values() if r["phase"] == phase and r["row"] == row]
        return sorted(found, key=lambda r: (r["rate"], r["seed"]))

    def finals(self, row: str) -> list[Record]:
        """Return the final runs of a row that count, by seed: with a rate added later, those at a better rate do."""
        found = self.of("final", row)
        tuned = {r["rate"] for r in self.of("tune", row)} == set(self.plan.rates)
        best = self._best_rate(row, self.plan.rates if tuned else {r["rate"] for r in found})
        return [r for r in found if best is None or r["rate"] == best]

    def done(self) -> int:
        """Return how many runs of the plan have ended."""
        return sum(len(self.of("tune", row)) + len(self._counted_runs(row)) for row in self.plan.rows)

    def _counted_runs(self, row: str) -> set[tuple[float, int]]:
        """Return rate and seed of the final runs of a row that count, and of those that its rate was chosen by."""
        counted = {(r["rate"], r["seed"]) for r in self.finals(row)}
        return counted | {(rate, self.plan.seeds[0]) for rate in self.leading_rates(row) if self._final_run(row, rate)}

    def higher_is_better(self) -> bool:
        """Return whether a higher score is better, as for accuracy."""
        return any(r.get("higher") for r in self.runs.values())

    def metric(self) -> str:
        """Return the name of the score; "score" while no run has ended with one."""
        found = (r["metric"] for r in self.runs.values() if r["score"] is not None)
        return str(next(found, "score")).replace("_", " ")

    def unit(self) -> str:
        """Return what the runs have seen: "tokens", "images" or "clouds"."""
        recorded = next((r["unit"] for r in self.runs.values() if "unit" in r), None)
        if recorded is not None:
            return str(recorded)
        return "images" if self.metric() in ("top1", "bits per dim") else "tokens"

    def leading_rates(self, row: str) -> list[float]:
        """Return the rates of a row that are tried over all steps: the best of the plan's in tuning, best first."""
        return self._leading_rates(row, self.plan.rates)

    def is_confirmed(self, row: str) -> bool:
        """Return whether each of these rates has had its run over all steps."""
        return all(self._final_run(row, rate) for rate in self.leading_rates(row))

    def _final_run(self, row: str, rate: float) -> Record | None:
        """Return the final run of a row at a rate with the first seed, if it has ended."""
        return self.runs.get(run_key("final", row, rate, self.plan.seeds[0]))

    def best_rate(self, row: str) -> float | None:
        """Return the best rate of a row by tuning, and by the runs over all steps that ``confirm`` asks for.

        None while a rate has not been tried.
        """
        tried = {r["rate"]: r["score"] for r in self.of("tune", row)}
        if set(tried) != set(self.plan.rates):
            return None
        if self.all_diverged(row):
            raise MixerError(f"sweep: every rate of row {row!r} diverged; give lower rates.")
        return self._best_rate(row, tried)

    def _leading_rates(self, row: str, rates: Container[float]) -> list[float]:
        """Return the best of these rates in tuning, as many as the plan confirms, best first."""
        good = {r["rate"]: r["score"] for r in self.of("tune", row) if r["score"] is not None and r["rate"] in rates}
        return sorted(good, key=lambda rate: good[rate], reverse=self.higher_is_better())[: self.plan.confirm]

    def _best_rate(self, row: str, rates: Container[float]) -> float | None:
        """Return the best of these rates, by the runs over all steps that were made; None if none has a score."""
        leading = self._leading_rates(row, rates)
        runs = [(rate, self._final_run(row, rate)) for rate in leading]
        full = {rate: run["score"] for rate, run in runs if run is not None and run["score"] is not None}
        if len(leading) > 1 and full:
            return (max if self.higher_is_better() else min)(full, key=lambda rate: full[rate])
        return leading[0] if leading else None

    def all_diverged(self, row: str) -> bool:
        """Return whether every rate of a row was tried, and none of them ended with a score."""
        tried = {r["rate"]: r["score"] for r in self.of("tune", row)}
        return set(tried) == set(self.plan.rates) and not any(score is not None for score in tried.values())

    def scores(self, row: str) -> dict[int, float]:
        """Return the final scores of a row by seed; runs that diverged are left out.

        With ``lengths`` in the plan they are those beyond the lengths of training, which rows are compared by.
        """
        name = "beyond" if self.plan.lengths else "score"
        return {r["seed"]: r[name] for r in self.finals(row) if r.get(name) is not None}


def portable(plan: SweepPlan) -> Record:
    """Return the plan as JSON without the place of the data, which differs from machine to machine."""
    data = plan.to_json()
    data["changes"] = {name: value for name, value in data["changes"].items() if name != "data.path"}
    return data


def _difference(name: str, before: object, now: object) -> str:
    """Say how one field of a plan was changed; of rows and changes only those that differ."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return f"{name} was {before!r}, is {now!r}"
    said = [f"{name} lack {', '.join(gone)}"] if (gone := [k for k in before if k not in now]) else []
    said += [f"{name} have {', '.join(new)} too"] if (new := [k for k in now if k not in before]) else []
    differing = (k for k in now if k in before and now[k] != before[k])
    return "; ".join([*said, *(_difference(f"{name}.{k}", before[k], now[k]) for k in differing)])


def _refuse_constant(name: str) -> None:
    """Refuse NaN and the infinities, which no run writes: a NaN compares as neither better nor worse."""
    raise ValueError(f"it holds {name}")


def _check_record(key: str, record: Record) -> Record:
    """Return a run's record, which has to hold what is read from every one."""
    number = (int, float)
    shapes: dict[str, type | tuple[type, ...]] = {
        "phase": str,
        "row": str,
        "rate": number,
        "seed": int,
        "score": (*number, type(None)),
    }
    shapes |= {"metric": str, "tokens": int, "steps": int, "seconds": number, "peak_mib": number, "curve": list}
    for name, shape in shapes.items():
        if not isinstance(record[name], shape):
            raise ValueError(f"run {key!r} has {name} {record[name]!r}")
    return record


def _check_continues(path: Path, plan: SweepPlan, before: SweepPlan, shared: bool) -> None:
    """Refuse a plan that does not go on with the one whose results the file holds, and say in what it differs."""
    if _continues(plan, before, part=shared):
        return
    now, then = portable(_join_plans(before, plan) if shared else plan), portable(before)
    changed = "; ".join(_difference(k, then[k], now[k]) for k in now if now[k] != then[k])
    if plan.seeds[0] != before.seeds[0]:
        changed = f"the first seed, that of the tuning runs, was {before.seeds[0]}, is {plan.seeds[0]}"
    other = "--results" if shared else "--out"
    raise MixerError(f"sweep: {path} holds the results of another plan ({changed}); give another {other}.")


def _continues(plan: SweepPlan, before: SweepPlan, *, part: bool = False) -> bool:
    """Return whether a plan is the one before, or that with more rows, rates or seeds; ``part``: or with fewer rows and
    seeds.
    """
    rows = all(plan.rows[row] == options if row in plan.rows else part for row, options in before.rows.items())
    more = plan.seeds[0] == before.seeds[0]  # that of all tuning runs
    more = more and (part or set(before.seeds) <= set(plan.seeds)) and set(before.rates) <= set(plan.rates)
    more = more and plan.confirm >= before.confirm
    smaller = replace(
        plan,
        rows=before.rows,
        confirm=before.confirm,
        rates=before.rates,
        seeds=before.seeds,
        modules=before.modules,
    )
    return rows and more and portable(smaller) == portable(before)


def _join_plans(before: SweepPlan, plan: SweepPlan) -> SweepPlan:
    """Return the plan with the rows and seeds of the one before, in its order unless ``plan`` has all of them."""
    rows = plan.rows if set(before.rows) <= set(plan.rows) else before.rows | plan.rows
    seeds = plan.seeds if set(before.seeds) <= set(plan.seeds) else tuple(dict.fromkeys((*before.seeds, *plan.seeds)))
    return replace(plan, rows=rows, seeds=seeds)


def spread(values: list[float]) -> float | None:
    """Return the standard deviation of a sample; None of fewer than two values."""
    return stdev(values) if len(values) > 1 else None


WRITTEN = {"bleu": "BLEU", "chrf": "chrF", "rouge_l": "ROUGE-L"}
CLASSIFIED = {
    "test_top1": "test %",
    "test_top1_many": "many %",
    "test_top1_medium": "medium %",
    "test_top1_few": "few %",
    "test_accuracy": "test %",
}
MEASURES = WRITTEN | CLASSIFIED
"""Measures on the test split, by their names in a record: of what encoder-decoders write, and of classifiers."""


def results_table(results: Results) -> Table:
    """Return one line per row: the best rate, mean and spread of the final scores, and the cost of a run."""
    plan = results.plan
    columns = ["row", "score", "spread", "n", "best rate", "parameters", results.unit(), "seconds", "peak MiB"]
    stated = any("state_bytes" in r for r in results.runs.values())  # of language models, since they are recorded
    columns += ["state bytes"] * stated + ["beyond", "spread beyond"] * bool(plan.lengths)
    measures = [name for name in MEASURES if any(name in r for r in results.runs.values())]
    columns += [title for name in measures for title in (MEASURES[name], f"spread {MEASURES[name]}")]
    sign = -1 if results.higher_is_better() else 1
    compared = {row: list(results.scores(row).values()) for row in plan.rows}
    means = {row: mean(found) if found else sign * math.inf for row, found in compared.items()}
    lines = []
    for row in sorted(plan.rows, key=lambda row: sign * means[row]):
        final = results.finals(row)
        scores = [r["score"] for r in final if r["score"] is not None]
        tuned = len(plan.rates) > 1
        diverged = tuned and results.all_diverged(row)
        rate = None if diverged else results.best_rate(row) if tuned else plan.rates[0]
        edge = tuned and rate in (min(plan.rates), max(plan.rates))
        line = [row, number(mean(scores) if scores else None), number(spread(scores)) if len(scores) > 1 else "-"]
        chosen = "all diverged" if diverged else "not tuned yet" if rate is None else f"{rate:g}"
        chosen += "" if tuned else ", not tuned"
        chosen += "+" if tuned and rate is not None and plan.confirm > 1 and not results.is_confirmed(row) else ""
        line += [str(len(scores)), chosen + ("*" if edge else "")]
        line += [number(final[-1].get(key) if final else None, 0) for key in ("parameters", "tokens")]
        line += [number(mean(r["seconds"] for r in final) if final else None, 0)]
        line += [number(max(r["peak_mib"] for r in final) if final else None, 0)]
        line += [number(final[-1].get("state_bytes") if final else None, 0)] * stated
        if plan.lengths:
            beyond = compared[row]
            line += [number(mean(beyond) if beyond else None), number(spread(beyond)) if len(beyond) > 1 else "-"]
        for name in measures:
            found = [r[name] for r in final if name in r]
            line += [number(mean(found) if found else None, 2), number(spread(found), 2) if len(found) > 1 else "-"]
        lines.append(line)
    notes = [f"score: {results.metric()} on validation, mean over the seeds; spread: standard deviation over them."]
    notes += [f"{name}: {value:.3f} on the same bytes" for name, value in results.yardsticks.items()]
    machines = sorted({_machine(r, results) for r in results.runs.values()})
    notes += [f"seconds and peak MiB: of runs on different machines ({', '.join(machines)})"] * (len(machines) > 1)
    notes += ["*: the best rate is the lowest or the highest that was tried"] * any("*" in line[4] for line in lines)
    notes += ["+: another rate that led in tuning has no run over all steps yet"] * any(
        "+" in line[4] for line in lines
    )
    notes += ["state bytes: what a model holds after one sequence; not measured where a mixer cannot stream"] * stated
    for of, how in (
        (WRITTEN, "of the test split, written with 5 beams"),
        (CLASSIFIED, "right on the test split"),
    ):
        named = [title for name, title in of.items() if name in measures]
        notes += [f"{', '.join(named)}: {how}"] * bool(named)
    if plan.lengths and results.higher_is_better():
        notes += [f"beyond: share of answers right throughout at sizes {', '.join(map(str, plan.lengths))}"]
        notes[-1] += " and their pairs, where the largest is beyond those of training"
    elif plan.lengths:
        what = "beyond: bits per byte of bytes with more context than training had, from the next power of two up to"
        notes += [f"{what} {max(plan.lengths):,}"]
    shell, tuning = plan.shell or "the recipe's", f"not tuned: one rate, {plan.rates[0]:g}"
    if len(plan.rates) > 1:
        again = f", the best {plan.confirm} again over all of them" if plan.confirm > 1 else ""
        tuning = f"tuned over {len(plan.rates)} rates x {plan.tune:g} of the steps each{again}, seed {plan.seeds[0]}"
    return Table(f"{plan.recipe}, shell: {shell}, equal {plan.equal}; {tuning}", columns, lines, notes)


def _machine(record: Record, results: Results) -> str:
    """Return the name of the device that a run was trained on: a GPU's, or the CPU's."""
    device = record.get("device", "cpu")
    return device if device != "cpu" else record.get("cpu", results.machine.get("cpu")) or ""


def markdown(table: Table) -> str:
    """Return a table as Markdown."""
    head = ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in table.rows]
    return "\n".join([f"**{table.title}**", "", *head, *body, "", *(f"- {note}" for note in table.notes)]) + "\n"
