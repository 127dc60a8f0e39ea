"""The tables and findings of a demo."""

from __future__ import annotations

import gzip
import lzma

from ...system.text import number, size
from ..data import open_corpus
from ..report import Run, Table
from .plan import SHELL, Measured, Plan

Scores = dict[str, float | None]
RIVAL = "attention"
"""The model beside which those of constant state are put."""
SPREAD = 0.12
"""Bits per byte within which a page does not tell two models apart.

From seed to seed the difference between two of these models has a standard deviation of 0.027 (LOG.md, 2026-11-24). At
equal text AFT-forget stood 0.011 behind attention, AFT-local 0.191, and the hybrid 0.055 behind AFT-local (LOG.md,
2026-11-30): each of them is at least two standard deviations away from this bound, so another seed or another machine
seldom changes a sentence.
"""
GROWS = 2.0
"""If a byte takes more than so many times as long after the longest text as after the shortest, its time grows.

Measured: 17 and 21 times for attention (LOG.md, 2026-11-30).
"""
STAYS = 1.5
"""If it takes at most so many times as long, its time stays; between the two, nothing is said.

Measured: 0.7 to 1.04 times for models of constant state (LOG.md, 2026-11-30).
"""


def yardsticks(plan: Plan) -> dict[str, float]:
    """Compute the bits per byte of two compressors on the bytes that the models are evaluated on."""
    data = bytes(open_corpus("stdlib").split("valid")[: plan.eval_bytes].tolist())
    return {
        "gzip -9": 8 * len(gzip.compress(data, 9)) / len(data),
        "xz -9e": 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data),
    }


def shown_contexts(plan: Plan) -> tuple[int, int]:
    """Return the two contexts of the main table: 1,024 if measured, and the longest."""
    low = 1024 if 1024 in plan.contexts else min(plan.contexts)
    return low, max(plan.contexts)


def main_table(plan: Plan, runs: dict[str, Run], measured: Measured) -> Table:
    """Return the table with one row per model, then the compressors."""
    low, high = shown_contexts(plan)
    columns = [
        "model",
        "parameters",
        f"bits/byte after {plan.tokens:,} bytes",
        "training, s",
        "peak memory",
    ]
    columns += [f"state at {low:,}", f"state at {high:,}", f"ms/token at {low:,}", f"ms/token at {high:,}"]
    rows = []
    for name, run in runs.items():
        peak, decode = run.largest("peak_mib"), measured.decode[name]
        row = [name, number(run.env.get("parameters"), 0), number(run.last_eval("valid"))]
        row += [
            number(run.largest("seconds"), 0),
            size(None if peak is None else peak * 2**20),
        ]
        row += [size(decode[n].state_bytes) for n in (low, high)] + [
            number(decode[n].ms_per_token, 2) for n in (low, high)
        ]
        rows.append(row)
    rows += [[name, "n/a", number(bits), *["n/a"] * (len(columns) - 3)] for name, bits in yardsticks(plan).items()]
    notes = [
        f"Bits per byte: on the first {plan.eval_bytes:,} bytes of the validation split, each scored once; "
        + "the compressors read only these bytes.",
        "Peak memory: the whole process while training, Python and torch included. State and ms/token: "
        + "one sequence, random weights.",
    ]
    return Table("At equal text", columns, rows, notes)


def by_length(title: str, values: dict[str, dict[int, float]], digits: int) -> Table:
    """Return a table with one row per model and one column per length."""
    lengths = list(next(iter(values.values())))
    return Table(
        title,
        ["model", *(f"{n:,}" for n in lengths)],
        [[name, *(number(v[n], digits) for n in lengths)] for name, v in values.items()],
    )


def decode_table(measured: Measured) -> Table:
    """Return the table of milliseconds per generated token by context."""
    return by_length("Generation by context, milliseconds per token", decode_times(measured), 2)


def decode_times(measured: Measured) -> dict[str, dict[int, float]]:
    """Return the milliseconds per generated token, by model and context."""
    return {name: {n: d.ms_per_token for n, d in by.items()} for name, by in measured.decode.items()}


def findings(plan: Plan, runs: dict[str, Run], measured: Measured) -> list[str]:
    """State in sentences what follows from the numbers: what to take away, then memory, time and quality.

    None of them depends on how fast a machine is; what does stands in the tables.
    """
    scores = {name: run.last_eval("valid") for name, run in runs.items()}
    return [
        take_away(plan, scores, measured),
        f"Memory while generating: {states(plan, measured)}",
        f"Time for the next byte: {growth(plan, measured)}",
        f"Quality at equal text ({plan.tokens:,} bytes each): {rank_names(scores)}. One seed: differences of up to "
        f"{SPREAD:.2f} bits per byte are called no difference.",
        f"{len(runs)} byte language models in the {SHELL!r} shell, {plan.layers} layers of {plan.dim} features, "
        f"trained on sequences of {plan.seq_len:,} bytes of the Python standard library's sources. "
        "Attention has rotary positions and normalised queries and keys; aft_forget is AFT-simple with a short "
        "convolution, a decay and norms; in the hybrid, three layers are aft_local and one is attention. All are "
        "trained with Muon. For your own model and lengths: `tokenmix advise`.",
    ]


def take_away(plan: Plan, scores: Scores, measured: Measured) -> str:
    """Say in one sentence what a reader may take away: of the models of constant state, beside the rival."""
    alike = [name for name in constant(plan, measured) if scores.get(name) is not None]
    first = scores.get(RIVAL)
    if not alike or first is None:
        return "To take away: nothing; no model here has a state of constant size."
    behind = {name: scores[name] - first for name in alike}  # type: ignore[operator]  # not None
    ahead = [name for name in alike if behind[name] < -SPREAD]
    near = [name for name in alike if abs(behind[name]) <= SPREAD]
    cheap = {name for name in alike if grows(plan, measured, name) is False} if grows(plan, measured, RIVAL) else set()
    what = "keeps the same memory however long the text is"
    what += f", and takes the same time for each byte, while {RIVAL} takes ever longer" if cheap >= set(alike) else ""
    quality = [f"{' and '.join(ahead)} learned more than {RIVAL}"] * bool(ahead)
    quality += [f"no difference between {' and '.join(near)} and {RIVAL} can be told"] * bool(near)
    learned = ", and ".join(quality) or f"all of them learned less than {RIVAL}"
    return (
        f"To take away: a mixer of constant state ({', '.join(alike)}) {what}; from the same text, at this size and "
        f"with one seed, {learned}. Larger models and longer training may differ: docs/quality.md has seeds of both."
    )


def grows(plan: Plan, measured: Measured, name: str) -> bool | None:
    """Return whether a model's time per byte grows from the shortest to the longest text; None: neither is certain."""
    by = measured.decode[name]
    ratio = by[max(plan.contexts)].ms_per_token / by[min(plan.contexts)].ms_per_token
    return True if ratio > GROWS else False if ratio <= STAYS else None


def growth(plan: Plan, measured: Measured) -> str:
    """Say whether the time per byte grows with the text before it, for the rival and the models of constant state."""
    found = {name: grows(plan, measured, name) for name in (RIVAL, *constant(plan, measured))}
    after = f"after {max(plan.contexts):,} bytes as after {min(plan.contexts):,}"
    said = [
        f"{what} {after} for {', '.join(names)}"
        for kind, what in ((True, f"more than {GROWS:g} times as long"), (False, "about as long"))
        if (names := [name for name, grown in found.items() if grown is kind])
    ]
    return ("; ".join(said) or "no model differs enough to say so") + "."


def constant(plan: Plan, measured: Measured) -> list[str]:
    """Return the models that keep as much of the longer context of the main table as of the shorter."""
    low, high = shown_contexts(plan)
    kept = measured.decode.items()
    return [name for name, by in kept if low < high and by[low].state_bytes == by[high].state_bytes]


def states(plan: Plan, measured: Measured) -> str:
    """State how much each model keeps of the contexts of the main table, and which keep the same of both."""
    low, high = shown_contexts(plan)
    kept = {name: by[high].state_bytes for name, by in measured.decode.items()}
    listed = ", ".join(f"{name} {size(n)}" for name, n in sorted(kept.items(), key=lambda item: item[1]))
    alike = constant(plan, measured)
    same = f" It is the same after {low:,} bytes for {', '.join(alike)}." if alike else ""
    return f"after {high:,} bytes {listed}.{same}"


def best_names(values: dict[str, float], *, plus: float = 0.0, times: float = 1.0) -> set[str]:
    """Return the names with the least value, and those within ``plus`` or the factor ``times`` of it."""
    limit = min(values.values(), default=0.0) * times + plus
    return {name for name, value in values.items() if value <= limit}


def rank_names(scores: Scores) -> str:
    """List names from the fewest bits per byte to the most.

    Models within ``SPREAD`` of the first of a group are one group, within which there is no difference.
    """
    known = sorted((s, name) for name, s in scores.items() if s is not None)
    parts: list[str] = []
    first = 0.0
    for score, name in known:
        tied = bool(parts) and score - first <= SPREAD
        first = first if tied else score
        parts.append(("" if not parts else ", no difference to " if tied else ", then ") + name)
    return "".join(parts)
