"""Recipes: named rows, each of which is a RunConfig at three sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import MixerError
from ..models import in_shell
from ..system.config import nearest
from ..train.config import OptimConfig, RunConfig
from .tuned import TUNED

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
    """

    about: str
    mixers: tuple[dict[str, Any], ...]
    layers: int
    dim: int
    seq_len: int
    printed: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """An experiment of a paper.

    Args:
        name: name on the command line.
        about: description of the recipe.
        rows: rows by name, each with ``about`` and ``printed``.
        default: name of the default row.
        build: function that returns the config of a row at a size.
    """

    name: str
    about: str
    rows: Mapping[str, Any]
    default: str
    build: Callable[[Any, str], RunConfig]

    def config(self, row: str | None = None, size: str = "smoke", shell: str | None = None) -> RunConfig:
        """Return the RunConfig of a row at a size, in the recipe's own blocks or in those of a shell.

        In a shell for which rates were tuned (``recipes/tuned.py``), it has that optimiser and the row's rate.
        """
        row = row or self.default
        if row not in self.rows:
            raise MixerError(f"recipe {self.name} has no row {row!r}; {nearest(row, self.rows)}.")
        if size not in SIZES:
            raise MixerError(f"recipe {self.name} has no size {size!r}; choose one of {', '.join(SIZES)}.")
        config = self.build(self.rows[row], size)
        config = replace(config, recipe=self.name, row=row, size=size)
        if shell is None:
            return config
        config = replace(config, model=in_shell(config.model, shell))
        tuned = TUNED.get((self.name, size, shell))
        return config if tuned is None else config.override(tuned.changes(row))


def find_recipe(name: str, recipes: dict[str, Recipe]) -> Recipe:
    """Look up a recipe by name."""
    if name not in recipes:
        raise MixerError(f"there is no recipe {name!r}; {nearest(name, recipes)}.")
    return recipes[name]


def shrink_spec(spec: dict[str, Any], *, seq_len: int, heads: int, rank: int | None) -> dict[str, Any]:
    """Adapt a mixer spec to a smaller model: shorter windows, fewer heads, a lower rank."""
    small = dict(spec)
    if "window" in small:
        small["window"] = min(small["window"], seq_len)
    if "heads" in small:
        small["heads"] = min(small["heads"], heads)
    if small.get("rank") is not None and rank is not None:
        small["rank"] = min(small["rank"], rank)
    return small
