"""Recipes: named rows, each of which is a RunConfig at three sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import MixerError
from ...models import in_shell
from ...system.config import nearest
from ...system.modules import import_file
from ...types import Spec
from ..train.config import OptimConfig, RunConfig
from .sizes import describe_changes, reduced_amounts
from .tuned import TUNED

FILE = ".py"
"""How the name of a recipe ends that a Python file of the user's own holds."""
SIZES = ("smoke", "gpu", "paper")
MUON = OptimConfig(
    name="muon", betas=(0.9, 0.95), weight_decay=0.01, schedule="wsd", decay=0.6, min_lr_ratio=0.0, warmup=20
)
"""What recipes on synthetic sequences train with, beside their rates."""


@dataclass(frozen=True)
class Row:
    """One experiment.

    Args:
        about: description of the row.
        mixers: specs at the paper's size, one per layer or fewer to be repeated.
        layers: number of layers at the paper's size.
        dim: features per token at the paper's size.
        seq_len: bytes per sequence at the paper's size.
        printed: the paper's own numbers, for reports.
        keeps: sizes that the row's name states (``sizes.amounts``); where a size changes one, the row does not run.
    """

    about: str
    mixers: tuple[Spec, ...]
    layers: int
    dim: int
    seq_len: int
    printed: dict[str, float] = field(default_factory=dict)
    keeps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """An experiment of a paper.

    Args:
        name: name on the command line.
        about: description of the recipe.
        rows: rows by name, each with ``about`` and ``printed``.
        default: name of the default row.
        build: function that returns the config of a row at a size.
        repeats: rows that stand in two tables of the paper and are one model: the later by the earlier one.
    """

    name: str
    about: str
    rows: Mapping[str, Any]
    default: str
    build: Callable[[Any, str], RunConfig]
    repeats: Mapping[str, str] = field(default_factory=dict)

    def config(self, row: str | None = None, size: str = "smoke", shell: str | None = None) -> RunConfig:
        """Return the RunConfig of a row at a size, in the recipe's own blocks or in those of a shell.

        In a shell for which rates were tuned (``recipes/tuned.py``), it has that optimiser and the row's rate.

        Raises:
            MixerError: if there is no such row or size, or if the row is not what its name says at this size.
        """
        row = row or self.default
        if row not in self.rows:
            raise MixerError(f"recipe {self.name} has no row {row!r}; {nearest(row, self.rows)}.")
        if size not in SIZES:
            raise MixerError(f"recipe {self.name} has no size {size!r}; choose one of {', '.join(SIZES)}.")
        config = replace(self.build(self.rows[row], size), recipe=self.name, row=row, size=size)
        if lost := self._changed_sizes(row, config):
            least = next(each for each in SIZES if not self._changed_sizes(row, self.build(self.rows[row], each)))
            raise MixerError(
                f"recipe {self.name}: row {row} does not run at size {size}, where it would not be what it says "
                + f"({describe_changes(lost)}); the smallest size at which it does is {least} (--size {least})."
            )
        if shell is None:
            return config
        config = replace(config, model=in_shell(config.model, shell))
        tuned = TUNED.get((self.name, size, shell))
        return config if tuned is None else config.override(tuned.changes(row))

    def reduced_amounts(self, config: RunConfig) -> dict[str, tuple[object, object]]:
        """Return what a config of this recipe has less of than its row at the paper's size: both amounts by name."""
        return reduced_amounts(config, self.build(self.rows[config.row or self.default], "paper"))

    def _changed_sizes(self, row: str, config: RunConfig) -> dict[str, tuple[object, object]]:
        """Return what a config changes of the sizes that its row's name states."""
        keeps = getattr(self.rows[row], "keeps", ())
        changes = reduced_amounts(config, self.build(self.rows[row], "paper")) if keeps else {}
        return {name: change for name, change in changes.items() if name in keeps}


def find_recipe(name: str, recipes: dict[str, Recipe]) -> Recipe:
    """Look up a recipe by name, or that of a Python file which has been imported (``import_recipe``)."""
    if name.endswith(FILE):
        module = sys.modules.get(Path(name).stem)
        if module is None or Path(getattr(module, "__file__", None) or "").resolve() != Path(name).resolve():
            raise MixerError(f"the recipe of {name} is not imported; call import_recipe({name!r}) if you trust it.")
        return recipe_of(module, name)
    if name not in recipes:
        raise MixerError(
            f"there is no recipe {name!r}; {nearest(name, recipes)}; `tokenmix list` says what each is for."
        )
    return recipes[name]


def import_recipe(name: str) -> None:
    """Import the Python file of a recipe, where the name is one of a file.

    Raises:
        MixerError: if the file cannot be imported, or has no recipe.
    """
    if name.endswith(FILE):
        recipe_of(import_file(name, "recipe"), name)


def recipe_of(module: ModuleType, name: str) -> Recipe:
    """Return the ``RECIPE`` of a module; ``name`` is that of its file, for the error where there is none."""
    found = getattr(module, "RECIPE", None)
    if not isinstance(found, Recipe):
        raise MixerError(
            f"{name} has no recipe to train; give it one: RECIPE = Recipe(name, about, rows, default, build)."
        )
    return found


def shrink_spec(spec: Spec, *, seq_len: int, heads: int, rank: int | None) -> Spec:
    """Adapt a mixer spec to a smaller model: shorter windows, fewer heads, a lower rank."""
    small = dict(spec)
    if "window" in small:
        small["window"] = min(small["window"], seq_len)
    if "heads" in small:
        small["heads"] = min(small["heads"], heads)
    if small.get("rank") is not None and rank is not None:
        small["rank"] = min(small["rank"], rank)
    return small
