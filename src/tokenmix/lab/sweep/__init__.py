"""Sweeps: rows x rates x seeds as one experiment, which tunes every row alike and can be stopped at any time."""

from .evidence import Comparison, compare, shortcomings
from .plan import Job, SweepPlan
from .results import Results, results_table
from .run import sweep

__all__ = [
    "Comparison",
    "Job",
    "Results",
    "SweepPlan",
    "compare",
    "results_table",
    "shortcomings",
    "sweep",
]
