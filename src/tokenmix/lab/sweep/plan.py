"""The plan of a sweep as JSON, and the runs that follow from it."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ...errors import MixerError
from ...models import SHELLS, in_shell
from ...system.config import Json, dotted_fields, nearest
from ...types import Options
from ..recipes import amounts, experiment, find_recipe
from ..train import RunConfig, match_data
from ..train.config import MOST_THREADS, check_seed

Phase = Literal["tune", "final"]
RECIPE_ROW = "row"
"""The change of a row that names the recipe's row to start from, if its name differs."""

MIXERS_FIELD = "model.mixers"
LONGEST_NAME = 200
"""Bytes of the longest name of a folder, below what file systems hold."""


@dataclass(frozen=True)
class SweepPlan(Json):
    """An experiment: every row is tuned over the same rates and then repeated with the best of them over the seeds.

    Args:
        recipe: name of the recipe whose rows are compared, or a Python file with a RECIPE, relative to the working
            directory.
        rows: the rows by name, each with its changes to the config as dotted fields, such as
            ``{"model.mixers": [{"name": "aft_simple"}]}``. A row is that of the recipe with the same name, or the one
            named by the change "row". The first is the baseline of the comparisons.
        rates: values of ``optim.lr`` to try; at least one. Muon's rate changes with it in proportion.
        seeds: seeds of the final runs; at least one. The first is that of the tuning runs.
        size: size of the recipe: "smoke", "gpu" or "paper".
        shell: "paper" or "modern"; None: the blocks of the recipe.
        changes: changes to the config of every row.
        steps: updates of a final run; None: those of the recipe.
        tune: share of the final steps, in (0, 1], for which each rate is tried.
        confirm: number of rates, the best in tuning, that are each tried again over all steps with the first seed; the
            best of these is the row's rate. 1: the best in tuning is. Short runs favour high rates.
        equal: "tokens": the final runs of all rows have the same steps. "time": they have as many as fit into
            ``seconds`` of training at the speed of the row's tuning run.
        seconds: training time of a final run with ``equal="time"``.
        hopeless: a rate is given up half-way through its tuning run if its score is worse there than that of an earlier
            rate of the row by more than this share; None: never.
        test_bytes: leading bytes of the test split on which final language models are scored; None: no test.
        lengths: lengths beyond those of training at which final runs are scored too, which the table then shows:
            sizes of synthetic sequences, as by `tokenmix eval --lengths`, with the share of exact answers; for text,
            windows in bytes, with the bits per byte of what has more context than training had, from the next power
            of two on. Empty: none.
        init: whether every run starts from the weights of a final run of another sweep with the same rows, whose folder
            is given where the plan is carried out.
        modules: Python files that register mixers of your own (``register_mixer``), imported before anything else here
            and in every run; relative to the working directory.
    """

    recipe: str
    rows: dict[str, Options]
    rates: tuple[float, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    size: str = "smoke"
    shell: str | None = None
    changes: Options = field(default_factory=dict)
    steps: int | None = None
    tune: float = 0.2
    confirm: int = 1
    equal: str = "tokens"
    seconds: float | None = None
    hopeless: float | None = 0.1
    test_bytes: int | None = None
    lengths: tuple[int, ...] = ()
    init: bool = False
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("rates", "seeds", "lengths", "modules"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_types()
        if not all(0 < rate < sys.float_info.max for rate in self.rates):
            raise MixerError(f"sweep: rates must be positive, got {list(self.rates)}.")
        for name in ("rows", "rates", "seeds"):
            if not getattr(self, name):
                such = ", such as --rows attention aft_simple" if name == "rows" else ""
                raise MixerError(f"sweep: {name} is empty; give at least one{such}.")
            written = [f"{v:g}" if name == "rates" else v for v in getattr(self, name)]  # as the folders' names have it
            if len(set(written)) < len(written):
                raise MixerError(f"sweep: {name} holds the same value twice: {list(getattr(self, name))}.")
        for seed in self.seeds:
            check_seed(seed, "sweep: seed")
        if not 0 < self.tune <= 1 or (self.hopeless is not None and self.hopeless <= 0):
            raise MixerError(
                f"sweep: tune must be in (0, 1] and hopeless above 0 or null, got {self.tune} and {self.hopeless}."
            )
        if type(self.confirm) is not int or not 1 <= self.confirm <= len(self.rates):
            raise MixerError(
                f"sweep: confirm must be an integer from 1 to the number of rates, {len(self.rates)}, got "
                + f"{self.confirm!r}."
            )
        if self.equal not in ("tokens", "time") or (self.equal == "time") != (self.seconds is not None):
            raise MixerError(
                f"sweep: equal={self.equal!r} with seconds={self.seconds}; choose 'tokens', or 'time' and its seconds."
            )
        if self.shell is not None and self.shell not in SHELLS:
            raise MixerError(f"sweep: there is no shell {self.shell!r}; choose 'paper' or 'modern'.")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise MixerError(f"sweep: seconds must be positive, got {self.seconds}.")
        if self.test_bytes is not None and self.test_bytes < 2:
            raise MixerError(f"sweep: test_bytes must be at least 2 or null, got {self.test_bytes}.")
        for name in self.rows:
            if not name.strip(". ") or not name.isprintable() or len(folder_name(name).encode()) > LONGEST_NAME:
                raise MixerError(f"sweep: the name of a row becomes a folder, as {name[:80]!r} cannot; rename it.")

    def _check_types(self) -> None:
        """Refuse lists and objects that hold something else than they should."""
        for name, kind, what in (
            ("rates", (int, float), "numbers"),
            ("seeds", int, "integers"),
            ("lengths", int, "integers"),
            ("modules", str, "names"),
        ):
            for value in getattr(self, name):
                if not isinstance(value, kind) or isinstance(value, bool):
                    raise MixerError(f"sweep: {name} must be a list of {what}, got {value!r} in it.")
        for name, value in {"rows": self.rows, "changes": self.changes}.items():
            if not isinstance(value, dict):
                raise MixerError(f"sweep: {name} must be an object, got {value!r}.")
        for row, options in self.rows.items():
            if not isinstance(options, dict) or not isinstance(options.get(RECIPE_ROW, ""), str):
                raise MixerError(
                    f"sweep: row {row!r} must be an object of fields to change, with the name of a recipe's row as "
                    + f"{RECIPE_ROW!r} if at all, got {options!r}."
                )

    def select_rows(self, rows: Sequence[str]) -> SweepPlan:
        """Return the plan with these of its rows, in this order.

        Raises:
            MixerError: if it has no row of a name.
        """
        for row in rows:
            if row not in self.rows:
                raise MixerError(f"sweep: the plan has no row {row!r}; {nearest(row, self.rows)}.")
        return replace(self, rows={row: self.rows[row] for row in rows})

    def tries_rates(self) -> bool:
        """Return whether rates are tried at all: a single one needs no tuning runs, unless speeds are needed."""
        return len(self.rates) > 1 or self.equal == "time"

    def total(self) -> int:
        """Return the number of runs."""
        tuning = len(self.rates) if self.tries_rates() else 0
        return len(self.rows) * (tuning + self.confirm - 1 + len(self.seeds))

    def files(self) -> list[str]:
        """Return the Python files of the user's own that the runs need: the modules, and that of the recipe."""
        return [*self.modules, *([self.recipe] if self.recipe.endswith(".py") else [])]

    def row_fields(self, row: str) -> Options:
        """Return the dotted fields of a row as its recipe gives them, with the changes of plan and row.

        It opens no data files. For a row that the recipe does not have, it returns the changes alone.
        """
        changes = self.changes | self.rows[row]
        recipe, name = find_recipe(self.recipe), changes.get(RECIPE_ROW, row)
        start = dotted_fields(recipe.config(name, self.size).to_json()) if name in recipe.rows else {}
        return start | changes

    def original(self, row: str) -> RunConfig:
        """Return the config of a row's recipe at the paper's size, without the changes of the plan."""
        changes = self.changes | self.rows[row]
        return find_recipe(self.recipe).config(changes.get(RECIPE_ROW, row), "paper")

    def config(self, row: str) -> RunConfig:
        """Return the config of a row at its full length, with the first seed and the recipe's rate."""
        config = match_data(self.without_data(row))
        if config.train.steps is None:
            raise MixerError(f"sweep: row {row!r} has no train.steps; give steps.")
        return config

    def without_data(self, row: str) -> RunConfig:
        """Return the config of a row as plan and recipe give it, before classes and sizes follow from its data."""
        changes = self.changes | self.rows[row]
        config = find_recipe(self.recipe).config(changes.pop(RECIPE_ROW, row), self.size)
        mixers = {MIXERS_FIELD: changes.pop(MIXERS_FIELD)} if MIXERS_FIELD in changes else {}
        config = config.override(mixers)
        if self.shell is not None:
            config = replace(config, model=in_shell(config.model, self.shell))
        config = config.override(changes)  # after the shell, from which a row may deviate
        return config if self.steps is None else config.override({"train.steps": self.steps})


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Attributes:
        phase: "tune" or "final".
        row, rate, seed: what distinguishes it from the others.
        config: the config of the run.
    """

    phase: Phase
    row: str
    rate: float
    seed: int
    config: RunConfig

    @property
    def key(self) -> str:
        """Return the name of the run, which is its folder as well."""
        return run_key(self.phase, self.row, self.rate, self.seed)


def run_key(phase: Phase, row: str, rate: float, seed: int) -> str:
    """Return the name of a run of a sweep."""
    return f"{phase}/{folder_name(row)}/rate_{rate:g}_seed_{seed}"


def folder_name(row: str) -> str:
    """Return the name of a row's folder: a slash in its name would be a folder of its own."""
    return row.replace("%", "%25").replace("/", "%2F")


class Jobs:
    """Make the runs of a plan; the config of each row is built once, as it may have to read the data.

    Args:
        plan: the experiment.
        threads: CPU threads of each run.
        init: folder of the sweep from whose final runs these start; None: they start from random weights.

    Raises:
        MixerError: if the plan needs such a folder and there is none, or the other way round.
    """

    def __init__(self, plan: SweepPlan, threads: int, init: Path | None = None):
        if plan.init != (init is not None):
            starts = "the runs of another sweep; give its folder as" if plan.init else "random weights; leave out"
            raise MixerError(f"sweep: this plan starts from {starts} --init.")
        self.plan, self.threads, self.init = plan, threads, init
        self._configs: dict[str, RunConfig] = {}

    def config(self, row: str) -> RunConfig:
        """Return the config of a row, as the plan gives it."""
        if row not in self._configs:
            self._configs[row] = self.plan.config(row)
        return self._configs[row]

    def steps(self, row: str) -> int:
        """Return the steps of a row at its full length."""
        return self.config(row).train.steps or 1

    def tune(self, row: str, rate: float, steps: int | None = None) -> Job:
        """Return the tuning run of a row at a rate; None: with the plan's share of the steps."""
        steps = max(2, round(self.steps(row) * self.plan.tune)) if steps is None else steps
        return self._job("tune", row, rate, self.plan.seeds[0], steps)

    def final(self, row: str, rate: float, seed: int, steps: int) -> Job:
        """Return the final run of a row with a seed."""
        return self._job("final", row, rate, seed, steps)

    def init_of(self, row: str, seed: int, folder: Path) -> str:
        """Return the run that a run of this row and seed starts from: that of the same seed, or else of the first.

        Raises:
            MixerError: if the sweep in ``folder`` has no final run of the row.
        """
        runs = folder / "runs" / "final" / folder_name(row)
        for each in dict.fromkeys((seed, self.plan.seeds[0])):
            found = sorted(runs.glob(f"rate_*_seed_{each}"))
            if len(found) > 1:
                raise MixerError(f"sweep: {runs} has runs at several rates with seed {each}; keep one to start from.")
            if found:
                return str(found[0].resolve())
        raise MixerError(f"sweep: row {row!r} has no final run to start from in {folder}; finish that sweep first.")

    def _job(self, phase: Phase, row: str, rate: float, seed: int, steps: int) -> Job:
        """Return one run of the sweep, evaluated half-way (tuning) or eight times, and at its end."""
        config = self.config(row)
        scale = rate / config.optim.lr
        changes: Options = {
            "optim.lr": rate,
            "optim.muon_lr": config.optim.muon_lr * scale,
            "optim.warmup": min(config.optim.warmup, max(1, steps // 10)),
            "train.seed": seed,
            "train.steps": steps,
            "train.threads": self.threads,
            "train.eval_every": max(1, -(-steps // (2 if phase == "tune" else 8))),
            "train.save_every": max(1, steps // 4),
            "train.keep": 1,
            "train.sample_bytes": 0,
        }
        if self.init is not None:
            changes["train.init"] = self.init_of(row, seed, self.init)
        return Job(phase, row, rate, seed, config.override(changes))


def check_plan(jobs: Jobs, processes: int) -> None:
    """Build the config of every row, so that a wrong field is found before anything runs."""
    if processes < 1 or not 1 <= jobs.threads <= MOST_THREADS:
        raise MixerError(f"sweep: processes and threads must be positive, got {processes} and {jobs.threads}.")
    for row in jobs.plan.rows:
        try:
            jobs.config(row)
        except MixerError as why:
            raise MixerError(f"sweep: row {row!r}: {why}") from None
        jobs.tune(row, jobs.plan.rates[0], jobs.steps(row))
    check_rows_differ(jobs)


def check_rows_differ(jobs: Jobs) -> None:
    """Refuse rows that are one model trained in one way, which would be compared with itself.

    The message names what a size of the recipe made equal, where it did.
    """
    seen: dict[str, str] = {}
    for row in jobs.plan.rows:
        first = seen.setdefault(experiment(jobs.config(row)), row)
        if first == row:
            continue
        printed = [amounts(jobs.plan.original(each)) for each in (first, row)]
        now = amounts(jobs.config(row))
        why = [
            f"{name} is {now.get(name)} in both, for {one} and {other} at the paper's size"
            for name, one in printed[0].items()
            if one != (other := printed[1].get(name))
        ]
        raise MixerError(
            f"sweep: rows {first!r} and {row!r} are one model trained in one way "
            + f"({'; '.join(why) or 'no field of their configs differs'}); leave one of them out."
        )
