"""The progress bar of a run: speed, loss, memory, time left. Silent where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def bar(verbose: bool | None = None) -> Iterator[Callable[[float, dict[str, Any]], None]]:
    """A function (fraction done, metrics line) that moves the bar; ``verbose`` None means only on a terminal."""
    if not (sys.stderr.isatty() if verbose is None else verbose):
        yield lambda fraction, line: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    text = TextColumn("step {task.fields[step]}  {task.fields[bpb]:.3f} bits/byte  {task.fields[rate]:,.0f} tokens/s  {task.fields[mib]:,.0f} MiB")
    with Progress(text, BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True)) as shown:
        task = shown.add_task("train", total=1.0, step=0, bpb=8.0, rate=0.0, mib=0.0)

        def show(fraction: float, line: dict[str, Any]) -> None:
            shown.update(task, completed=fraction, step=line["step"], bpb=line["bpb"], rate=line["tokens_per_s"], mib=line["peak_mib"])

        yield show
