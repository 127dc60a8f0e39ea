"""The advice as one self-contained HTML page, with its curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import MixerError
from ...system.files import whole_file
from ...system.text import Table
from .advice import Advice
from .candidates import OWN, Candidate
from .text import about, candidate_tables, comparison_tables, describe_setting, findings, shares_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..report.figures import Picture


def write_page(advice: Advice, out: Path | str) -> Path:
    """Write the page: the answer, the tables, shares and times by length, the machine."""
    try:
        import matplotlib  # noqa: F401  (figures need it; checked before any work)

        from ..report.page import environment
    except ImportError as why:
        raise MixerError(f"advise: --out needs the extra 'plot' ({why}): pip install 'tokenmix[plot]'.") from None
    template = environment("tokenmix.lab.advise").get_template("advice.html")
    page = template.render(
        title=f"Should the attention of {advice.host.name} be replaced?",
        lead=[*findings(advice), about(advice)],
        tables=[shares_table(advice), *candidate_tables(advice), *comparison_tables(advice)],
        curves=curves(advice),
        facts=_facts(advice),
        notes=[
            describe_setting(advice) + ".",
            "Shares, times and memory hold for this machine, this load and this number of threads.",
        ],
    )
    out = Path(out)
    with whole_file(out) as f:
        f.write(page.encode("utf-8", "backslashreplace"))
    return out


def curves(advice: Advice) -> list[Picture]:
    """Draw the parts of the time by length; the bound and the candidates' speed-ups; times; generation."""
    at = [s.length for s in advice.shares]
    unit = "image side, pixels" if advice.host.inputs.patch else "tokens"
    parts = {
        "in attention": [100 * s.attention_share for s in advice.shares],
        "mixing alone": [100 * s.mixing_share for s in advice.shares],
    }
    if all(s.memory_share is not None for s in advice.shares):
        parts["of the peak memory"] = [100 * (s.memory_share or 0.0) for s in advice.shares]
    drawn = [
        _lines(
            at, parts, unit, "part of the whole, %", "Attention's part of time and peak memory, by length.", zero=True
        )
    ]
    reached = {m: _by_length(advice, m, "speedup", at) for m in _mixers(advice) if m != OWN}
    bounds: dict[str, Sequence[float | None]] = {
        "bound: mixing takes no time": [s.bound for s in advice.shares],
        **reached,
    }
    drawn.append(
        _lines(
            at,
            bounds,
            unit,
            "times as fast",
            "How many times as fast the model can become, and what candidates reach.",
            zero=False,
        )
    )
    times = {m: [None if v is None else 1e3 * v for v in _by_length(advice, m, "seconds", at)] for m in _mixers(advice)}
    times = times or {OWN: [1e3 * s.seconds for s in advice.shares]}
    drawn.append(_lines(at, times, unit, "milliseconds per pass", "Time of a forward pass, by length.", log=True))
    tokens = {
        m: [r.decoded.ms_per_token if (r := _row(advice, m, n)) and r.decoded else None for n in at]
        for m in _mixers(advice)
    }
    if any(v is not None for values in tokens.values() for v in values):
        drawn.append(
            _lines(
                at, tokens, unit, "milliseconds per generated token", "Time of one more token, by context.", log=True
            )
        )
    return drawn


def _mixers(advice: Advice) -> list[str]:
    return list(dict.fromkeys(r.mixer for r in advice.rows if r.seconds is not None))


def _row(advice: Advice, mixer: str, n: int) -> Candidate | None:
    return next((r for r in advice.rows if r.mixer == mixer and r.length == n), None)


def _by_length(advice: Advice, mixer: str, what: str, lengths: Sequence[int]) -> list[float | None]:
    return [getattr(_row(advice, mixer, n), what, None) for n in lengths]


def _lines(
    at: list[int],
    lines: Mapping[str, Sequence[float | None]],
    x: str,
    y: str,
    caption: str,
    *,
    log: bool = False,
    zero: bool = False,
) -> Picture:
    """Draw a line chart with lengths in octaves."""
    from ..report.figures import COLOURS, STYLES, Picture, render_both

    def draw(ax: Axes) -> None:
        for i, (name, values) in enumerate(lines.items()):
            known = [(n, v) for n, v in zip(at, values, strict=True) if v is not None]
            style = STYLES[i // len(COLOURS) % len(STYLES)]
            if known:
                ax.plot(
                    *zip(*known, strict=True),
                    style,
                    marker="o",
                    markersize=4,
                    linewidth=1.6,
                    color=COLOURS[i % len(COLOURS)],
                    label=name,
                )
        ax.set_xscale("log", base=2)
        ax.set_xticks(at, [f"{n:,}" for n in at])
        ax.minorticks_off()
        if log:
            ax.set_yscale("log")
        if zero:
            ax.set_ylim(0, 100)
        ax.set_xlabel(x)
        ax.set_ylabel(y)
        ax.grid(alpha=0.25, linewidth=0.6)
        ax.legend(frameon=False, labelcolor="linecolor", fontsize=9)

    ends = "; ".join(
        f"{name}: {', '.join('not measured' if v is None else f'{v:.3g}' for v in values)}"
        for name, values in lines.items()
    )
    return Picture(
        *render_both(draw, (6.4, 4.2)),
        alt=f"Line chart of {y} at lengths {', '.join(map(str, at))}. {ends}.",
        caption=caption,
    )


def _facts(advice: Advice) -> Table:
    flat = {k: v for k, v in advice.machine.items() if not isinstance(v, dict) and v is not None}
    flat |= {f"kernels, {k}": v for k, v in advice.machine["kernels"].items()}
    return Table("Machine", ["fact", "value"], [[k, str(v)] for k, v in flat.items()])
