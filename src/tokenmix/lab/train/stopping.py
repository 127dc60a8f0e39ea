"""Stopping on request: SIGTERM, as sent by schedulers and container hosts, and Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from ...system.checkpoint import list_steps
from ...system.memory import in_memory

LESS = "It needs less with a smaller train.batch_size, a larger train.accumulate, or a smaller model."
NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


@contextlib.contextmanager
def asked_to_stop(*, interrupts: bool = False) -> Iterator[Callable[[], int]]:
    """Defer SIGTERM to the end of a step inside the block; the function yielded returns which signal came, 0 for none.

    A second one ends the process at once. A handler that the surrounding program has installed is left alone. So is
    every thread but the main one, as only that may install handlers.

    Args:
        interrupts: defer Ctrl-C too; a second one raises KeyboardInterrupt at once.
    """
    came, owner = [0], os.getpid()
    usual = {signal.SIGTERM: signal.SIG_DFL} | ({signal.SIGINT: signal.default_int_handler} if interrupts else {})

    def stop_after_step(number: int, _: FrameType | None) -> None:
        if os.getpid() == owner:
            came[0] = number
            signal.signal(number, usual[signal.Signals(number)])
            if number == signal.SIGINT:
                os.write(2, b"\nCtrl-C: this step is finished and saved first; Ctrl-C again ends at once.\n")
        elif number == signal.SIGTERM:  # a worker that inherited this handler has nothing to finish
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)  # Ctrl-C reaches workers too, whose batches the step may still need

    main = threading.current_thread() is threading.main_thread()
    ours = [number for number, handler in usual.items() if main and signal.getsignal(number) is handler]
    for number in ours:
        signal.signal(number, stop_after_step)
    try:
        yield lambda: came[0]
    finally:
        for number in ours:
            signal.signal(number, usual[number])


@contextlib.contextmanager
def explain_interrupt(path: Path) -> Iterator[None]:
    """Make a KeyboardInterrupt, and an error of memory, inside the block say what is saved of a run."""
    try:
        with in_memory(lambda why: f"{path}: {why}; {what_is_left(path)}. {LESS}"):
            yield
    except KeyboardInterrupt as why:
        if why.args:
            raise
        raise KeyboardInterrupt(f"{path}: stopped by Ctrl-C; {what_is_left(path)}.") from None


def what_is_left(path: Path) -> str:
    """Say from where `tokenmix resume` would continue a run."""
    if not (path / "config.json").is_file():
        return "nothing of this run was written yet, so the same command starts it again"
    steps = list_steps(path / "checkpoints")
    if not steps:
        return f"nothing was saved yet, so `{resume_command(path)}` starts it from the beginning"
    return f"step {steps[-1]} is saved, and `{resume_command(path)}` continues from it"


def resume_command(path: Path) -> str:
    """Return the command that continues a run, as it is typed."""
    return f"tokenmix resume {shlex.quote(str(path))}"
