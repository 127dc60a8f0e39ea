"""Rows, floors and claims: whether a table compares what it says, and whether a verdict rests on something learned."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
from pathlib import Path

from . import attempt

SLASHED = ("--rates", "1e-3", "--seeds", "0", "--steps", "2", "--out", "s")


def _told(*args: str) -> str:
    """Return how a command ends: its code and its last line."""
    found = subprocess.run([sys.executable, "-m", "tokenmix", *args], capture_output=True, text=True, timeout=220)
    said = (found.stderr if found.returncode else found.stdout or found.stderr).strip().splitlines()
    return f"exit {found.returncode}: {said[-1][:200] if said else 'nothing said'}"


@attempt("1", "Rows of recipes that a small size makes one model")
def rows_that_are_one_model() -> str:
    """Heads, kernels and layers were capped without a word."""
    from tokenmix import MixerError
    from tokenmix.recipes import RECIPES

    rows, refused, models, declared = 0, 0, 0, 0
    for recipe in RECIPES.values():
        found = collections.Counter()
        for row in recipe.rows:
            rows += 1
            try:
                config = recipe.config(row).to_json()
            except MixerError:
                refused += 1
                continue
            found[json.dumps({k: v for k, v in config.items() if k not in ("recipe", "row", "size")})] += 1
        models += len(found)
        declared += len(getattr(recipe, "repeats", ()))
    return f"{rows} rows at smoke: {models} models, {refused} refused, {declared} declared to repeat another"


@attempt("1", "A plan of two rows that are one model")
def plan_of_one_model() -> str:
    """It ended in "no difference"."""
    rows = {"a": {"row": "attention"}, "b": {"row": "attention"}}
    Path("plan.json").write_text(
        json.dumps({"recipe": "recall", "rows": rows, "rates": [0.001], "seeds": [0]} | {"steps": 2})
    )
    return _told("sweep", "plan.json", "--out", "s")


@attempt("2", "A sweep of rows with a slash in their names")
def slashes() -> str:
    """All rows of the papers' recipes have one."""
    return _told("sweep", "hydra_imagenet", "--rows", "fig2/softmax_4_heads", "fig2/softmax_12_heads", *SLASHED)
