"""The tables and findings of a demo."""

from __future__ import annotations

import gzip
import lzma

from ...system.text import number, size
from ..data import open_corpus
from ..report import Run, Table
from .plan import SHELL, Measured, Plan

Scores = dict[str, float | None]
SPREAD = 0.15
"""Bits per byte within which a page does not tell two models apart.

With it twelve pages, four sets of three seeds on two machines, agree (LOG.md, 2026-11-25). The spread of seeds alone
would make it 0.06, but pages of one machine then differ wherever a true difference lies near that.
"""
ALONE = 0.05
"""The same beside a score that does not depend on a seed, as that of a compressor."""


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
        "training, s",
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
            number(run.largest("seconds"), 0),
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
    against = against_gzip(plan, scores, constant(plan, measured))
    return [
        f"Quality after equal time (bits per byte, best first): {rank_names(scores)}. {against}",
        f"Memory while generating: {states(plan, measured)}",
        f"Time for the next byte, fastest by the bytes before it: {fastest(decode_times(measured), lower=True)}.",
        f"Training speed, fastest by sequence length: {fastest(measured.rates, lower=False)}.",
        f"{len(runs)} byte language models in the {SHELL!r} shell, {plan.layers} layers of {plan.dim} features, each "
        f"trained for about {plan.seconds:.0f} s on {env.get('threads', '?')} of the cores, with sequences of "
        f"{plan.seq_len:,} bytes of the Python standard library's sources, on {env.get('cpu', 'an unnamed CPU')}. "
        "Attention has rotary positions and normalised queries and keys; aft_forget is AFT-simple with a short "
        "convolution, a decay and norms; in the hybrid, three layers are aft_local and one is attention. All models "
        "are trained with Muon. One seed: "
        f"differences of up to {SPREAD:.2f} bits between models, and of up to {ALONE:.2f} to a compressor, are called "
        "no difference.",
    ]


def against_gzip(plan: Plan, scores: Scores, streaming: list[str]) -> str:
    """State whether the best model predicts the text better than gzip compresses it, by more than ``ALONE``.

    The same is said of the best of ``streaming``, the models with a state of constant size. The others are in the
    table: one that stands near gzip would be called better with one seed and not with the next.
    """
    limit = yardsticks(plan)["gzip -9"]
    known = {name: score for name, score in scores.items() if score is not None}
    leader = min(known, key=lambda name: known[name], default=None)
    if leader is None or known[leader] >= limit - ALONE:
        return f"None is better than gzip -9 ({limit:.3f}), so nothing follows about which mixer learns more."
    first = min((name for name in streaming if name in known), key=lambda name: known[name], default=leader)
    if first == leader:
        return f"Better than gzip -9 ({limit:.3f}): {leader}."
    found = "also better" if known[first] < limit - ALONE else "not better"
    return (
        f"Better than gzip -9 ({limit:.3f}): {leader}. {first}, the best of those with a state of constant size, is "
        f"{found}."
    )


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


def fastest(values: dict[str, dict[int, float]], *, lower: bool, rival: str = "attention") -> str:
    """Say which models are fastest at which lengths, and how far the rival is behind at the longest.

    Models whose values are within 5 percent of the best are named together.
    """
    groups: list[tuple[list[int], list[str]]] = []
    for n in next(iter(values.values())):
        cost = {name: by[n] if lower else 1 / by[n] for name, by in values.items()}
        winners = sorted(best_names(cost, times=1.05))
        if groups and groups[-1][1] == winners:
            groups[-1][0].append(n)
        else:
            groups.append(([n], winners))
    said = [f"{' and '.join(winners)} at {', '.join(f'{n:,}' for n in lengths)}" for lengths, winners in groups]
    (*_, longest), winners = groups[-1]
    if rival not in winners:
        behind = values[rival][longest] / values[winners[0]][longest]
        said.append(f"{rival} needs {behind if lower else 1 / behind:.1f} times as long at {longest:,}")
    return "; ".join(said)


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
        parts.append(("" if not parts else ", no difference to " if tied else ", then ") + f"{name} ({score:.3f})")
    return "".join(parts)
