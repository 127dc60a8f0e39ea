"""The tables and findings of a demo."""

from __future__ import annotations

import gzip
import lzma

from ..bench import stops_winning
from ..data import open_corpus
from ..report import Run, Table
from ..system.text import number, size
from .plan import Measured, Plan


def equal_tokens(runs: dict[str, Run]) -> tuple[int | None, dict[str, float]]:
    """Return the largest step at which every model was evaluated, and the bits per byte there.

    All models read the same number of tokens per step.
    """
    scores = {
        name: {e["step"]: e["bits_per_byte"] for e in run.evals if e["split"] == "valid"} for name, run in runs.items()
    }
    common = set.intersection(*(set(s) for s in scores.values()))
    if not common:
        return None, {}
    return max(common), {name: s[max(common)] for name, s in scores.items()}


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


def main_table(
    plan: Plan, runs: dict[str, Run], equal: tuple[int | None, dict[str, float]], measured: Measured
) -> Table:
    """Return the table with one row per model, then the compressors."""
    low, high = shown_contexts(plan)
    tokens = "at equal tokens" if equal[0] is None else f"after {equal[0] * plan.batch_size * plan.seq_len:,} tokens"
    columns = [
        "model",
        "parameters",
        f"bits/byte after {plan.seconds:.0f} s",
        f"bits/byte {tokens}",
        "tokens trained",
        "tokens/s",
        "peak memory",
    ]
    columns += [f"state at {low:,}", f"state at {high:,}", f"ms/token at {low:,}", f"ms/token at {high:,}"]
    rows = []
    for name, run in runs.items():
        peak, decode = run.largest("peak_mib"), measured.decode[name]
        row = [name, number(run.env.get("parameters"), 0), number(run.last_eval("valid")), number(equal[1].get(name))]
        row += [
            number(run.largest("tokens"), 0),
            number(run.median("tokens_per_s"), 0),
            size(None if peak is None else peak * 2**20),
        ]
        row += [size(decode[n].state_bytes) for n in (low, high)] + [
            number(decode[n].ms_per_token, 2) for n in (low, high)
        ]
        rows.append(row)
    rows += [
        [name, "n/a", number(bits), number(bits), *["n/a"] * (len(columns) - 4)]
        for name, bits in yardsticks(plan).items()
    ]
    notes = [
        f"Bits per byte: on the first {plan.eval_bytes:,} bytes of the validation split, each scored once; "
        + "the compressors read only these bytes.",
        "Peak memory: the whole process while training, Python and torch included. State and ms/token: "
        + "one sequence, random weights.",
    ]
    return Table("At equal wall-clock and at equal tokens", columns, rows, notes)


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


def findings(
    plan: Plan, runs: dict[str, Run], equal: tuple[int | None, dict[str, float]], measured: Measured
) -> list[str]:
    """State in sentences what follows from the numbers."""
    env = next(iter(runs.values())).env
    setting = (
        f"{len(runs)} byte language models, {plan.layers} layers of {plan.dim} features, each trained for "
        f"{plan.seconds:.0f} s on sequences of "
        f"{plan.seq_len:,} bytes of the Python standard library's sources, on {env.get('cpu', 'an unnamed CPU')} with "
        f"{env.get('threads', '?')} threads. "
        "They are tiny and barely trained: read this as a check that everything works and as a measurement of speed, "
        "not as a verdict on quality."
    )
    quality = [
        "Bits per byte at equal wall-clock, best first: "
        + f"{ranking({name: r.last_eval('valid') for name, r in runs.items()})}."
    ]
    if equal[0] is not None:
        quality.append(f"At equal tokens: {ranking(equal[1])}.")
    rivals = [name for name in runs if name != "attention"]
    ms = decode_times(measured)
    training = "; ".join(
        stops_winning("attention", measured.rates["attention"], name, measured.rates[name], lower=False)
        for name in rivals
    )
    decode = "; ".join(stops_winning("attention", ms["attention"], name, ms[name], lower=True) for name in rivals)
    return [
        setting,
        " ".join(quality),
        f"Training speed by sequence length: {training}.",
        f"Time per generated token by context: {decode}.",
    ]


def ranking(scores: dict[str, float | None] | dict[str, float]) -> str:
    """List names from the fewest bits per byte to the most."""
    known = sorted((s, name) for name, s in scores.items() if s is not None)
    return ", then ".join(f"{name} ({s:.3f})" for s, name in known)
