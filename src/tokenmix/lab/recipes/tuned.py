"""Optimisers and learning rates that sweeps have tuned, and the files that hold their runs.

A recipe trained in a shell that stands here takes them as its defaults. A rate enters this file only from a sweep whose
results are kept; ``tests/test_recipes.py`` compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...types import Options


@dataclass(frozen=True)
class Tuned:
    """The optimiser of a recipe in one shell.

    Args:
        optim: fields of ``OptimConfig`` that all rows share; its ``lr`` is for rows without a rate of their own.
        source: results of the sweep, from the root of the repository.
        rates: ``lr`` by row, as tuned; Muon's rate changes with it in proportion.
    """

    optim: Options
    source: str
    rates: dict[str, float] = field(default_factory=dict)

    def changes(self, row: str) -> Options:
        """Return the fields of a row's config to change, dotted."""
        scale = self.rates.get(row, self.optim["lr"]) / self.optim["lr"]
        scaled = {name: self.optim[name] * scale for name in ("lr", "muon_lr")}
        return {f"optim.{name}": value for name, value in (self.optim | scaled).items()}


TUNED: dict[tuple[str, str, str], Tuned] = {
    ("text", "smoke", "modern"): Tuned(
        optim={
            "name": "muon",
            "lr": 0.012,
            "muon_lr": 0.02,
            "betas": [0.9, 0.95],
            "weight_decay": 0.01,
            "schedule": "wsd",
            "decay": 0.6,
            "min_lr_ratio": 0.0,
            "warmup": 20,
        },
        source="benchmarks/results/enwik8_modern.json",
        rates={"attention": 0.006, "aft_local": 0.024},
    )
}
"""By recipe, size and shell."""
