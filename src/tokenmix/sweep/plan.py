"""The plan of a sweep as JSON, and the runs that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..errors import MixerError
from ..models import SHELLS, in_shell
from ..recipes import find_recipe
from ..system.config import Json
from ..train import RunConfig, match_data
from ..train.config import MOST_THREADS, check_seed

Phase = Literal["tune", "final"]
RECIPE_ROW = "row"
"""The change of a row that names the recipe's row to start from, if its name differs."""

MIXERS_FIELD = "model.mixers"


@dataclass(frozen=True)
class SweepPlan(Json):
    """An experiment: every row is tuned over the same rates and then repeated with the best of them over the seeds.

    Args:
        recipe: name of the recipe whose rows are compared.
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
        equal: "tokens": the final runs of all rows have the same steps. "time": they have as many as fit into
            ``seconds`` of training at the speed of the row's tuning run.
        seconds: training time of a final run with ``equal="time"``.
        hopeless: a rate is given up half-way through its tuning run if its score is worse there than that of an earlier
            rate of the row by more than this share; None: never.
        test_bytes: leading bytes of the test split on which final language models are scored; None: no test.
    """

    recipe: str
    rows: dict[str, dict[str, Any]]
    rates: tuple[float, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    size: str = "smoke"
    shell: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    tune: float = 0.2
    equal: str = "tokens"
    seconds: float | None = None
    hopeless: float | None = 0.1
    test_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("rates", "seeds"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("rows", "rates", "seeds"):
            if not getattr(self, name):
                raise MixerError(f"sweep: {name} is empty; give at least one.")
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise MixerError(f"sweep: {name} holds the same value twice: {list(getattr(self, name))}.")
        for seed in self.seeds:
            check_seed(seed, "sweep: seed")
        if min(self.rates) <= 0:
            raise MixerError(f"sweep: rates must be positive, got {list(self.rates)}.")
        if not 0 < self.tune <= 1 or (self.hopeless is not None and self.hopeless <= 0):
            raise MixerError(
                f"sweep: tune must be in (0, 1] and hopeless above 0 or null, got {self.tune} and {self.hopeless}."
            )
        if self.equal not in ("tokens", "time") or (self.equal == "time") != (self.seconds is not None):
            raise MixerError(
                f"sweep: equal={self.equal!r} with seconds={self.seconds}; choose 'tokens', or 'time' and its seconds."
            )
        if self.shell is not None and self.shell not in SHELLS:
            raise MixerError(f"sweep: there is no shell {self.shell!r}; choose 'paper' or 'modern'.")
        if any("/" in name or not name.strip(". ") for name in self.rows):
            raise MixerError(f"sweep: the names of rows become folders; rename {', '.join(map(repr, self.rows))}.")

    def config(self, row: str) -> RunConfig:
        """Return the config of a row at its full length, with the first seed and the recipe's rate."""
        changes = self.changes | self.rows[row]
        config = find_recipe(self.recipe).config(changes.pop(RECIPE_ROW, row), self.size)
        mixers = {MIXERS_FIELD: changes.pop(MIXERS_FIELD)} if MIXERS_FIELD in changes else {}
        config = config.override(mixers)
        if self.shell is not None:
            config = replace(config, model=in_shell(config.model, self.shell))
        config = config.override(changes)  # after the shell, from which a row may deviate
        if config.data.kind == "images":
            config = match_data(config)
        if self.steps is not None:
            config = config.override({"train.steps": self.steps})
        if config.train.steps is None:
            raise MixerError(f"sweep: row {row!r} has no train.steps; give steps.")
        return config

    def tuning_steps(self, row: str) -> int:
        """Return the steps of a row's tuning runs."""
        return max(2, round((self.config(row).train.steps or 0) * self.tune))

    def job(self, phase: Phase, row: str, rate: float, seed: int, steps: int, threads: int) -> Job:
        """Return one run of the sweep, evaluated half-way and at its end."""
        config = self.config(row)
        scale = rate / config.optim.lr
        changes = {
            "optim.lr": rate,
            "optim.muon_lr": config.optim.muon_lr * scale,
            "optim.warmup": min(config.optim.warmup, max(1, steps // 10)),
            "train.seed": seed,
            "train.steps": steps,
            "train.threads": threads,
            "train.eval_every": max(1, -(-steps // (2 if phase == "tune" else 8))),
            "train.save_every": max(1, steps // 4),
            "train.keep": 1,
            "train.sample_bytes": 0,
        }
        return Job(phase, row, rate, seed, config.override(changes))


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
    return f"{phase}/{row}/rate_{rate:g}_seed_{seed}"


def check_plan(plan: SweepPlan, processes: int, threads: int) -> None:
    """Build the config of every row, so that a wrong field is found before anything runs."""
    if processes < 1 or not 1 <= threads <= MOST_THREADS:
        raise MixerError(f"sweep: processes and threads must be positive, got {processes} and {threads}.")
    for row in plan.rows:
        try:
            config = plan.config(row)
        except MixerError as why:
            raise MixerError(f"sweep: row {row!r}: {why}") from None
        plan.job("tune", row, plan.rates[0], plan.seeds[0], config.train.steps or 2, threads)
