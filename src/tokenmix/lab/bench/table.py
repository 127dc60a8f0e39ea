"""The results as text: the machine, its limits, and a table per length and pass."""

from __future__ import annotations

from ...kernels.fast_linear import LinearRoutes
from ...system.text import seconds, size
from ...types import Record

KINDS = ("read", "write", "copy")
HEAD = ("subject", "p25", "min", "cpu", "x sdpa", "in cpu", "x base", "peak", "limit", "error", "runs on")


def text(found: Record) -> str:
    """Format the whole report."""
    return "\n".join([*_machine(found), *_tables(found), *_exponents_table(found), *NOTES])


NOTES = (
    "p25, min, cpu: time per call, lower quartile and minimum of wall clock, lower quartile of CPU time of all threads",
    "peak: memory of one call",
    "x: how many times as fast, by p25; in cpu: by CPU time, which other processes disturb less",
    "limit: the least time for the bytes or FLOPs on this machine (copy, gemm) over the time taken",
    "error: the largest on adversarial inputs, in this dtype and on this backend, against float64",
)


def _machine(found: Record) -> list[str]:
    m, limits, s = found["machine"], found["limits"], found["setting"]
    memory = [
        f"{kind:5} {', '.join(f'{rate / 1e9:.0f} GB/s at {n}' for n, rate in limits[f'{kind}_bytes_per_s'].items())}"
        for kind in KINDS
    ]
    gemm = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in limits["gemm_flop_per_s"].items())
    form = "causal" if s["causal"] else "bidirectional"
    size = f"B={s['batch']}, dim={s['dim']}, heads={s['heads']}, {s['dtype']}, {form}"
    linear = [f"linear   {LinearRoutes(**s['fast_linear'])}"] if s.get("fast_linear") else []
    base = [f"base     {found['base']['revision']}, commit {found['base']['commit'][:12]}"] if "base" in found else []
    return [
        f"tokenmix {m['tokenmix']}, torch {m['torch']}, python {m['python']}; C kernels: {m['kernels']['cpu']}",
        f"machine  {m['device']}, {m['cores']} cores, {m['threads']} threads"
        + (f", load {m['load']:.1f}" if m["load"] is not None else ""),
        f"memory   {m['allocator']}",
        *(f"{head:8} {line}" for head, line in zip(("limits", "", ""), memory, strict=True)),
        f"         GFLOP/s {gemm}; {limits['exp_per_s'] / 1e9:.1f} G exp/s",
        f"size     level {s['level']}, {size}" + (f", {s['layers']} layers" if s["level"] == "model" else ""),
        *linear,
        *base,
        *(
            [f"WARNING  load {m['load']:.1f} on {m['cores']} cores: other processes ran; CPU time is more reliable"]
            if is_busy(m)
            else []
        ),
    ]


def is_busy(m: Record) -> bool:
    """Return whether more processes are runnable than this one uses threads, so that times are unreliable."""
    return m["load"] is not None and m["load"] > max(m["threads"], m["cores"] or 1) + 1


def _tables(found: Record) -> list[str]:
    lines: list[str] = []
    points = dict.fromkeys((r["length"], r["pass"]) for r in found["rows"])
    for point in points:
        rows = [r for r in found["rows"] if (r["length"], r["pass"]) == point]
        label = "context" if rows[0]["level"] == "decode" else "T"
        lines += [
            "",
            f"{label} = {point[0]}, {'one token' if label == 'context' else _pass(rows[0])}",
            *_table(rows, found),
        ]
    return lines


def _pass(row: Record) -> str:
    return "a training step" if row["level"] == "model" and row["pass"] != "forward" else row["pass"]


def _table(rows: list[Record], found: Record) -> list[str]:
    heads = list(HEAD)
    heads[6] = (
        f"x {found['base']['revision'][:12]}"
        if "base" in found
        else f"x {found['setting']['baseline']}"
        if found["setting"]["baseline"]
        else ""
    )
    body = [_cells(r, "x_base" if "base" in found else "x_baseline") for r in rows if "wall_s" in r]
    kept = [i for i, head in enumerate(heads) if head]
    widths = [max(len(line[i]) for line in [heads, *body]) for i in range(len(heads))]
    lines = [
        "  ".join(f"{line[i]:{'<' if i in (0, 10) else '>'}{widths[i]}}" for i in kept).rstrip()
        for line in ([heads, *body] if body else [])
    ]
    lines += [
        f"{r['subject']}  {r['status'].upper() if r['status'] == 'wrong' else r['status']}: {r['why']}"
        for r in rows
        if r["why"]
    ]
    lines += [f"{r['subject']}  not at the base: {r['base_why']}" for r in rows if "base_why" in r]
    return lines


def _cells(r: Record, against: str) -> list[str]:
    error = f"{r['gate']['error']:.1g}" if r["gate"] and r["gate"]["tolerance"] else "-"
    peak = "-" if r.get("peak_bytes") is None else size(r["peak_bytes"])
    kind = "" if r["causal"] else " (bidirectional)"
    wrong = " WRONG" if r["status"] == "wrong" else ""
    times = [seconds(r[k]) for k in ("wall_s", "wall_min_s", "cpu_s")]
    if r["level"] == "model":
        times[0] += f" ({1 / r['wall_s']:.2f} it/s)"
    return [
        r["subject"] + kind,
        *times,
        _ratio(r.get("x_sdpa")),
        _ratio(r.get("x_sdpa_cpu")),
        _ratio(r.get(against)),
        peak,
        f"{r['share']:.0%} {r['bound']}",
        error + wrong,
        r["path"] or "",
    ]


def _exponents_table(found: Record) -> list[str]:
    lines = ["", "time grows with length to the power of"] if found["fits"] else [""]
    for fit in found["fits"]:
        first, last = fit["lengths"][0], fit["lengths"][-1]
        lines.append(f"  {fit['exponent']:5.2f}  {fit['subject']}, {fit['pass']}, {first:,} to {last:,}")
    return [*lines, ""] if found["fits"] else lines


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
