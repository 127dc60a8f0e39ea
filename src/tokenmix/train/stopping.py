"""Stopping on request: SIGTERM, as sent by schedulers and container hosts."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Defer SIGTERM to the end of a step inside the block; the function yielded returns whether it was received.

    A second SIGTERM ends the process at once. A handler that the surrounding program has installed is left alone. So is
    every thread but the main one, as only that may install handlers.
    """
    came, owner = threading.Event(), os.getpid()

    def heard(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == owner:
            came.set()
        else:  # a worker that inherited this handler has nothing to finish
            os.kill(os.getpid(), number)

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield came.is_set
        return
    signal.signal(signal.SIGTERM, heard)
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
