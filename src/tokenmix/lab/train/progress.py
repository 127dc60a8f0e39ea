"""The progress of a run: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...types import Record

EVERY = 15.0
"""Seconds between two lines of progress where there is no terminal."""


@contextmanager
def bar(verbose: bool | None = None) -> Iterator[Callable[[float, Record], None]]:
    """Yield a function (fraction done, metrics line) that shows the progress of a run on stderr.

    Args:
        verbose: show a bar; None: on a terminal, and plain lines elsewhere; False: nothing.
    """
    if verbose is None and not sys.stderr.isatty():
        yield _plain_lines()
        return
    if verbose is False:
        yield lambda fraction, line: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    text = TextColumn("step {task.fields[step]}  {task.fields[loss]}  {task.fields[rate]}  {task.fields[mib]:,.0f} MiB")
    with Progress(
        text, BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True)
    ) as shown:
        task = shown.add_task("train", total=1.0, step=0, loss="", rate="", mib=0.0)

        def show(fraction: float, line: Record) -> None:
            shown.update(
                task,
                completed=fraction,
                step=line["step"],
                loss=loss_text(line),
                rate=rate_text(line),
                mib=line["peak_mib"],
            )

        yield show


def _plain_lines() -> Callable[[float, Record], None]:
    due = [time.monotonic() + EVERY]

    def show(fraction: float, line: Record) -> None:
        if time.monotonic() < due[0]:
            return
        due[0] = time.monotonic() + EVERY
        left = f"  about {line['seconds'] * (1 - fraction) / fraction:,.0f} s left" if fraction else ""
        done = f"step {line['step']:,} ({fraction:.0%})"
        print(f"{done}  {loss_text(line)}  {rate_text(line)}{left}", file=sys.stderr, flush=True)

    return show


def loss_text(line: Record) -> str:
    """Format the loss of a line of training metrics in the unit of its task."""
    for field, unit in (("bpb", "bits/byte"), ("bpd", "bits/dim")):
        if field in line:
            return f"{line[field]:.3f} {unit}"
    return f"loss {line['loss']:.3f}"


def rate_text(line: Record) -> str:
    """Format the speed of a line of training metrics."""
    unit = next(name.removesuffix("_per_s") for name in line if name.endswith("_per_s"))
    return f"{line[f'{unit}_per_s']:,.0f} {unit}/s"
