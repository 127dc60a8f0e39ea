"""Which layers keep attention: the choice by costs and savings, and what was predicted and measured of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, isfinite

from ...errors import MixerError
from ...system.text import Table, number
from ...types import Record, Spec

EXHAUSTIVE = 12
"""Up to this many layers all subsets are compared: 4096 at most."""


@dataclass(frozen=True)
class Layer:
    """One attention module: the seconds of a pass that replacing it saves, and what replacing it alone costs."""

    name: str
    saves: float
    cost: float


@dataclass(frozen=True)
class LayerPlan:
    """The layers to replace for a budget, with what was predicted and measured.

    Args:
        budget: how many times as fast the whole model must be.
        seconds: of a pass with attention in all layers.
        logits: a cost is the KL divergence of the predictions from the model's, in nats for each token or row; else the
            squared distance of the last hidden states, over the square of the model's.
        chosen: the layers to replace; where the budget cannot be reached, all that save time.
        ratio: lower quartile, median and upper quartile of the measured speed-up with the chosen layers replaced; None:
            no layer saves time.
        cost: of the chosen layers together, measured.
    """

    budget: float
    spec: Spec
    where: str
    seconds: float
    layers: tuple[Layer, ...]
    logits: bool
    chosen: tuple[Layer, ...]
    reachable: bool
    ratio: tuple[float, float, float] | None
    cost: float
    data: bool = False

    @property
    def predicted_speed(self) -> float:
        """How many times as fast the model is with the chosen layers replaced, by the seconds that each saves."""
        return self.seconds / (self.seconds - sum(layer.saves for layer in self.chosen))

    @property
    def mixers(self) -> dict[str, Spec]:
        """What ``replace_mixers`` takes."""
        return {layer.name: self.spec for layer in self.chosen}

    def table(self) -> Table:
        """Build the table: a row for each layer, in the model's order."""
        replaced = ["yes" if x in self.chosen else "no" for x in self.layers]
        rows = [[x.name, f"{1e3 * x.saves:.2f}", _cost(x.cost), y] for x, y in zip(self.layers, replaced, strict=True)]
        unit = "KL divergence of the predictions, nats" if self.logits else "squared change of the output, relative"
        inputs = "on the text" if self.data else "on random inputs, which say little of real ones"
        notes = [f"Costs: {unit}, with this layer alone replaced by {self.spec['name']}, untrained; {inputs}."]
        title = f"What replacing each layer saves and costs, {self.where}; a pass takes {1e3 * self.seconds:.2f} ms"
        return Table(title, ["layer", "saves ms", "costs", "replace"], rows, notes)

    def sentences(self) -> list[str]:
        """Say whether the budget is reached, and what ``replace_mixers`` takes."""
        name, many = self.spec["name"], f"{len(self.chosen)} of {len(self.layers)} layers"
        never = f"Budget: {self.budget:g}x cannot be reached with {name}, {self.where}"
        if self.ratio is None:
            return [f"{never}: it is not faster than attention in any layer. Give a longer input or another mixer."]
        low, middle, high = self.ratio
        speed = f"{self.predicted_speed:.2f}x as fast predicted, {middle:.2f}x ({low:.2f} to {high:.2f}) measured"
        spread = "the budget lies within the spread; measure again on a quiet machine"
        if not self.reachable:
            told = spread if high >= self.budget else "this is what is reachable"
            return [f"{never}: with the {many} in which it saves time replaced, {speed}; {told}."]
        missed = "measured below the budget; ask for more, and measure again"
        told = "" if low >= self.budget else f"; {missed if high < self.budget else spread}"
        total = (
            f"together they cost {_cost(self.cost)}, the sum of each alone is {_cost(sum(x.cost for x in self.chosen))}"
        )
        return [
            f"Budget: {self.budget:g}x, {self.where}: {name} in {many}, {speed}{told}; {total}.",
            f"Plan: replace_mixers(model, {self.mixers}, seed=0)",
        ]

    def to_json(self) -> Record:
        """Return plain JSON values."""
        kept = {k: v for k, v in vars(self).items() if k not in ("layers", "chosen", "cost")}
        layers = [{"name": x.name, "saves": x.saves, "cost": _finite(x.cost)} for x in self.layers]
        found = {"layers": layers, "mixers": self.mixers, "predicted": self.predicted_speed, "cost": _finite(self.cost)}
        return {**kept, **found, "text": self.sentences()}


def parse_budget(given: str) -> float:
    """Parse "1.5x" or "1.5": how many times as fast the whole model must be."""
    if not re.fullmatch(r"\d+(\.\d+)?x?", given) or not 1 < (value := float(given.rstrip("x"))) < inf:
        wanted = "how many times as fast the model must be, above 1, such as 1.5x"
        raise MixerError(f"advise: --budget takes {wanted}, got {given!r}.")
    return value


def choose_layers(costs: Sequence[float], savings: Sequence[float], target: float) -> tuple[int, ...] | None:
    """Choose the layers to replace: the least sum of costs with a sum of savings of at least ``target``.

    Costs and savings of layers are taken to add up. Up to ``EXHAUSTIVE`` layers that save something, all subsets are
    compared; beyond, ``choose_greedily`` chooses.

    Returns:
        The indices, ascending; None where all layers together save less.
    """
    useful = [i for i, saved in enumerate(savings) if saved > 0]
    if sum(savings[i] for i in useful) < target:
        return None
    if len(useful) > EXHAUSTIVE:
        return choose_greedily(costs, savings, target)
    subsets = (chosen for n in range(len(useful) + 1) for chosen in combinations(useful, n))
    enough = (chosen for chosen in subsets if sum(savings[i] for i in chosen) >= target)
    return min(enough, key=lambda chosen: sum(costs[i] for i in chosen))


def choose_greedily(costs: Sequence[float], savings: Sequence[float], target: float) -> tuple[int, ...]:
    """Take the layers of the least cost per saving until these suffice, then drop the costliest that are not needed.

    It is a heuristic for the knapsack problem, and may cost more than the best subset.
    """
    useful = [i for i, saved in enumerate(savings) if saved > 0]
    taken: list[int] = []
    for i in sorted(useful, key=lambda i: costs[i] / savings[i]):
        if sum(savings[j] for j in taken) < target:
            taken.append(i)
    for i in sorted(taken, key=lambda i: -costs[i]):
        if sum(savings[j] for j in taken if j != i) >= target:
            taken.remove(i)
    return tuple(sorted(taken))


def _cost(value: float) -> str:
    return f"{value:.2e}" if isfinite(value) else number(value)


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
