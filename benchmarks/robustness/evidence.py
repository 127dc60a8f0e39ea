"""Rows, floors and claims: whether a table compares what it says, and whether a verdict rests on something learned."""

from __future__ import annotations

import collections
import json
from pathlib import Path

from . import attempt, result_of_command

SLASHED = ("--rates", "1e-3", "--seeds", "0", "--steps", "2", "--out", "s")


@attempt("1", "Rows of recipes that a small size makes one model")
def rows_that_are_one_model() -> str:
    """Heads, kernels and layers were capped without a word."""
    from tokenmix import MixerError
    from tokenmix.lab.recipes import RECIPES

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
    return result_of_command("sweep", "plan.json", "--out", "s")


@attempt("2", "A sweep of rows with a slash in their names")
def slashes() -> str:
    """All rows of the papers' recipes have one."""
    return result_of_command(
        "sweep", "hydra_imagenet", "--rows", "fig2/softmax_4_heads", "fig2/softmax_12_heads", *SLASHED
    )


def _results(scores: dict[str, list[float]], floor: float, lengths: tuple[int, ...] = ()) -> object:
    """Return results of rows with these scores, higher is better, tuned over three rates."""
    from tokenmix.lab.sweep import Results, SweepPlan

    plan = SweepPlan("recall", {row: {} for row in scores}, rates=(0.1, 0.2, 0.4), shell="paper", lengths=lengths)
    found = Results(Path("none.json"), plan, yardsticks={"constant predictor": floor})
    for row, values in scores.items():
        one = {"row": row, "metric": "accuracy", "tokens": 1, "steps": 1, "seconds": 1.0, "peak_mib": 1.0, "curve": []}
        one |= {"higher": True, "stopped": False}
        for rate in plan.rates:
            found.runs[f"tune/{row}/{rate}"] = {**one, "phase": "tune", "rate": rate, "seed": 0, "score": rate}
        for seed, score in enumerate(values):
            record = {**one, "phase": "final", "rate": 0.4, "seed": seed, "score": score, "beyond": score / 2}
            found.runs[f"final/{row}/{seed}"] = record
    return found


@attempt("3", "Two rows of accuracies at chance, compared")
def at_chance() -> str:
    """Scores that are better the higher they are had no floor."""
    from tokenmix.lab.sweep import compare

    return compare(_results({"a": [0.1, 0.1005, 0.0995], "b": [0.1, 0.0995, 0.1005]}, 0.1), "a", "b").text()


@attempt("3", "A claim on longer sums of a row that has not learned those of its training")
def not_learned() -> str:
    """The ledger called it contradicted."""
    from tokenmix.lab.sweep import compare

    found = _results({"a": [0.87, 0.871, 0.887], "b": [0.99, 0.985, 0.98]}, 0.15, (4, 16))
    return compare(found, "a", "b").text()


@attempt("4", "Confirmed claims that no model is built for")
def confirmed() -> str:
    """Cost formulas, defaults and sums of printed rows counted as tests."""
    from tokenmix.lab.papers import PAPERS, recorded_values

    found = collections.Counter()
    for paper in PAPERS.values():
        found += paper.verdicts(recorded_values(paper))
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(found.items()))


@attempt("5", "The count of mixers in the README")
def count_in_readme() -> str:
    """It was written by hand."""
    from tokenmix import MIXERS

    said = (Path(__file__).parents[2] / "README.md").read_text().partition("It holds ")[2].partition(" ")[0]
    return f"the README says {said}, the library has {len(MIXERS)}"
