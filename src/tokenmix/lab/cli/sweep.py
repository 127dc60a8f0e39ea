"""The verb that runs experiments of many runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from ...errors import MixerError
from ...types import Options, Record
from .output import say

if TYPE_CHECKING:
    from ..sweep import SweepPlan


@dataclass(frozen=True)
class Sweep:
    """Compare rows of a recipe: tune the learning rate of each alike, repeat the best with several seeds, tabulate.

    Any field of the config can be set for all rows: --model.dim 64 --optim.name muon. The sweep can be stopped at any
    time; the same command goes on with it.
    """

    what: Positional[Annotated[str, arg(metavar="RECIPE|FILE.py|PLAN.json")]]
    """Name of a recipe, a Python file with one of your own, or a JSON file with a whole plan (rows, rates, seeds and
    changes of each row)."""

    out: Path
    """Folder of the sweep: runs, results.json, table.md, curves.png, and the page sweep.html, which shows all."""

    rows: list[str] = field(default_factory=list)
    """Rows of the recipe to compare, or of a plan, which then runs without its other rows; the first is the baseline.
    """

    rates: list[float] = field(default_factory=list)
    """Learning rates (optim.lr) to try for each row. Muon's rate changes in proportion."""

    seeds: list[int] = field(default_factory=list)
    """Seeds of the final runs; the first one is that of the tuning runs. Default: those of the plan, or 0 1 2."""

    shell: Literal["paper", "modern"] | None = None
    """Blocks around the mixers: as in the papers, or as trained today. Default: those of the recipe."""

    size: Literal["smoke", "gpu", "paper"] = "smoke"
    """Size of the recipe's rows."""

    steps: int | None = None
    """Updates of a final run. Default: those of the recipe."""

    tune: float = 0.2
    """Share of these steps for which each rate is tried."""

    equal: Literal["tokens", "time"] = "tokens"
    """What the final runs have in common: tokens, or training time (--seconds)."""

    seconds: float | None = None
    """Training time of a final run with --equal time."""

    modules: list[str] = field(default_factory=list)
    """Python files that register mixers of your own, which rows may then name."""

    data: str | None = None
    """Data to train on, as for `tokenmix train`: a named set, or a path. Of data that is downloaded, such
    as enwik8.gz, a path is a local copy and no part of the plan."""

    processes: int = 1
    """Runs at a time."""

    threads: int = 1
    """CPU threads of each run. With several --processes each has cores of its own."""

    results: Path | None = None
    """File of the results. Several sweeps may share one, each with some of the rows and seeds of a plan. Default:
    results.json in the folder of the sweep."""

    init: Path | None = None
    """Folder of another sweep with the same rows, for a plan whose runs start from the final runs of one ("init")."""

    json: bool = False
    """Print the results as JSON instead of the table."""

    def run(self, changes: Options) -> int:
        """Carry out the sweep and print its table."""
        from ..sweep import sweep
        from ..sweep.results import results_table
        from ..train.tasks import task_of
        from .output import say_error

        plan = self._plan(changes)
        if self.data is not None:
            config = plan.without_data(next(iter(plan.rows)))
            plan = replace(plan, changes=plan.changes | task_of(config).fields_of(config.data, self.data))
        found = sweep(
            plan,
            self.out,
            processes=self.processes,
            threads=self.threads,
            results=self.results,
            init=self.init,
            tell=say_error,
        )
        say(found.path.read_text() if self.json else results_table(found).text())
        if not self.json:
            from ..sweep import shortcomings
            from ..sweep.sweep_page import verdict_lines

            lacking = shortcomings(found)
            for line in [*verdict_lines(found), *(["Missing for a verdict:"] if lacking else []), *lacking]:
                say(line)
            say(f"The page of the sweep: {self.out / 'sweep.html'}")
        return 0

    def _plan(self, changes: Options) -> SweepPlan:
        from ..sweep import SweepPlan

        if self.what.endswith(".json"):
            default = Sweep(self.what, self.out, seeds=self.seeds)._of_plan()
            beside = [*(name for name, value in self._of_plan().items() if value != default[name]), *changes]
            if beside:
                given = ", ".join(f"--{name}" for name in beside)
                raise MixerError(f"sweep: {self.what} is a plan, which holds {given}; change it there.")
            try:
                data = json.loads(Path(self.what).read_text(), object_pairs_hook=_without_twins)
            except (OSError, ValueError, RecursionError) as why:
                raise MixerError(f"sweep: {self.what} cannot be read as JSON ({why}).") from None
            plan = SweepPlan.from_json(data)
            plan = replace(plan, seeds=tuple(self.seeds)) if self.seeds else plan
            return plan.select_rows(self.rows) if self.rows else plan
        return SweepPlan(self.what, rows={name: {} for name in self.rows}, changes=changes, **self._of_plan())

    def _of_plan(self) -> Options:
        """Return the options that are fields of a plan, by name, but for its rows."""
        names = ("rates", "seeds", "size", "shell", "steps", "tune", "equal", "seconds", "modules")
        return {name: getattr(self, name) for name in names} | {"seeds": self.seeds or [0, 1, 2]}


def _without_twins(pairs: list[tuple[str, object]]) -> Record:
    """Return an object of JSON; a name that it has twice, of which one would be lost, is refused."""
    names = [name for name, _ in pairs]
    if twins := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"it names {', '.join(map(repr, twins))} twice in one object")
    return dict(pairs)
