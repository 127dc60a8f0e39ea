"""The tables and findings of a demo."""

from __future__ import annotations

import gzip
import lzma

from ..bench import stops_winning
from ..data import open_corpus
from ..report import Run, Table
from ..system.text import number, size
from .plan import SHELL, Measured, Plan

Scores = dict[str, float | None]
SPREAD = 0.05
"""Bits per byte within which the order of two models may be another with another seed."""


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
        f"bits/byte after about {plan.seconds:.0f} s",
        "tokens trained",
        "tokens/s",
        "peak memory",
    ]
    columns += [f"state at {low:,}", f"state at {high:,}", f"ms/token at {low:,}", f"ms/token at {high:,}"]
    rows = []
    for name, run in runs.items():
        peak, decode = run.largest("peak_mib"), measured.decode[name]
        row = [name, number(run.env.get("parameters"), 0), number(run.last_eval("valid"))]
        row += [
            number(run.largest("tokens"), 0),
            number(run.median("tokens_per_s"), 0),
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
    return Table("At equal training time", columns, rows, notes)


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
    """State in sentences what follows from the numbers, the most important first."""
    env = next(iter(runs.values())).env
    scores = {name: run.last_eval("valid") for name, run in runs.items()}
    rivals = [name for name in runs if name != "attention"]
    ms = decode_times(measured)
    training = "; ".join(
        stops_winning("attention", measured.rates["attention"], name, measured.rates[name], lower=False)
        for name in rivals
    )
    decode = "; ".join(stops_winning("attention", ms["attention"], name, ms[name], lower=True) for name in rivals)
    setting = (
        f"{len(runs)} byte language models in the {SHELL!r} shell, {plan.layers} layers of {plan.dim} features, each "
        f"trained for about {plan.seconds:.0f} s on sequences of {plan.seq_len:,} bytes of the Python standard "
        f"library's sources, on {env.get('cpu', 'an unnamed CPU')} with {env.get('threads', '?')} threads. Attention "
        "has rotary positions and normalised queries and keys; all models are trained with Muon. One seed: differences "
        f"of up to {SPREAD:.2f} bits are called no difference."
    )
    return [
        f"Quality (bits per byte, best first): {ranking(scores)}. {against_gzip(plan, scores)}",
        f"Time per generated token by context: {decode}. {states(plan, measured)}",
        f"Training speed by sequence length: {training}.",
        setting,
    ]


def against_gzip(plan: Plan, scores: Scores) -> str:
    """State which models predict the text better than gzip compresses it."""
    limit = yardsticks(plan)["gzip -9"]
    better = [name for name, score in scores.items() if score is not None and score < limit]
    if not better:
        return f"None is better than gzip -9 ({limit:.3f}), so nothing follows about which mixer learns more."
    return f"Better than gzip -9 ({limit:.3f}): {', '.join(better)}."


def states(plan: Plan, measured: Measured) -> str:
    """State how much each model keeps of the longest context."""
    high = shown_contexts(plan)[1]
    kept = {name: by[high].state_bytes for name, by in measured.decode.items()}
    listed = ", ".join(f"{name} {size(n)}" for name, n in sorted(kept.items(), key=lambda item: item[1]))
    return f"State after {high:,} bytes: {listed}."


def ranking(scores: Scores) -> str:
    """List names from the fewest bits per byte to the most; those within ``SPREAD`` of the one before are tied."""
    known = sorted((s, name) for name, s in scores.items() if s is not None)
    parts = []
    for i, (score, name) in enumerate(known):
        tied = i and score - known[i - 1][0] <= SPREAD
        parts.append(("" if not i else ", no difference to " if tied else ", then ") + f"{name} ({score:.3f})")
    return "".join(parts)
