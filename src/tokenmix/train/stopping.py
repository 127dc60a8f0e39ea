"""Being asked to stop: SIGTERM, as schedulers and container hosts send it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Inside, SIGTERM waits for the end of a step: the function given says whether it came. A second one ends the process at once.

    A handler of the program around is left alone, and so is every thread but the main one, which alone may have handlers.
    """
    came, owner = threading.Event(), os.getpid()

    def heard(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() == owner:
            came.set()
        else:  # a worker, forked off with this handler: it has nothing to finish
            os.kill(os.getpid(), number)

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield came.is_set
        return
    signal.signal(signal.SIGTERM, heard)
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
