"""Run tasks side by side, each in its own process, as many at a time as the machine has cores for."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch

from ...errors import MixerError

CONTEXT = multiprocessing.get_context("spawn")

T = TypeVar("T")
Task = tuple[Callable[..., object], tuple[object, ...]]


@dataclass(frozen=True)
class Lanes:
    """How many processes run at a time, and the threads of each."""

    count: int
    threads: int


def lanes_for(tasks: int, cores: int) -> Lanes:
    """Share the cores between tasks that take equally long: as few rounds as possible, and as few lanes as these need.

    One thread each, as many at a time as there are cores, does more work than one task with all threads.
    """
    rounds = -(-tasks // cores)
    count = -(-tasks // rounds)
    return Lanes(count, cores // count)


def run_alone(task: Callable[..., T], *args: object) -> T:
    """Run a task in a new process with all threads, and return its result."""
    return side_by_side(Lanes(1, torch.get_num_threads()), {task.__name__: (task, args)})[task.__name__]


def side_by_side(
    lanes: Lanes,
    tasks: Mapping[str, Task],
    *,
    watch: Callable[[list[str]], None] = lambda names: None,
    every: float = 10.0,
) -> dict[str, Any]:
    """Run named tasks, each in a new process, and return their results.

    A process of its own keeps the memory of one model from counting for another.

    Args:
        watch: called every ``every`` seconds with the names of the running tasks.

    Raises:
        MixerError: the first one that a task raises, or if a process ends without a result. The others are ended then,
            as they are by any other exception here, such as that of Ctrl-C.
    """
    waiting, running, found = list(tasks), dict[str, Running](), dict[str, Any]()
    last = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < lanes.count:
                running[waiting[0]] = Running(waiting[0], tasks[waiting[0]], lanes.threads)
                del waiting[0]
            wait([each.results for each in running.values()], timeout=max(0.0, last + every - time.monotonic()))
            for name in [name for name, each in running.items() if each.results.poll()]:
                found[name] = running.pop(name).result()
            if time.monotonic() >= last + every:
                last = time.monotonic()
                watch(list(running))
    finally:
        for each in running.values():
            each.process.kill()  # a training run answers SIGTERM with a checkpoint, which nobody would use
        for each in running.values():
            each.end()
    return {name: found[name] for name in tasks}


class Running:
    """A task in a process of its own, which begins at once."""

    def __init__(self, name: str, task: Task, threads: int):
        self.name = name
        self.results, sender = CONTEXT.Pipe(duplex=False)
        # Threads sleep while they wait: on a machine busy with other work, spinning ones made attention ten times
        # slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self.process = CONTEXT.Process(target=_work, args=(sender, threads, *task))
        with interrupts_later():
            self.process.start()
        sender.close()

    def result(self) -> Any:
        """Return what the task returned, once there is something to receive."""
        try:
            error, value = self.results.recv()
        except EOFError:
            self.process.join()
            raise MixerError(
                f"the process for {self.name!r} ended with exit code {self.process.exitcode} and without a result. "
                + "A negative code is a signal; -9 is often a lack of memory."
            ) from None
        self.end()
        if error is not None:
            raise MixerError(error)
        return value

    def end(self) -> None:
        """Wait for the end of the process."""
        self.process.join()
        self.results.close()


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Hold Ctrl-C back inside the block; processes that start there never see it, so that only the parent answers.

    Those processes inherit the mask. In this one it covers a single thread: another may still take the signal, for
    which Python interrupts the main thread, so that the handler waits too.
    """
    held: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, frame: held.append(number)) if main else None
    masks = hasattr(signal, "pthread_sigmask")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if masks else set()
    try:
        yield
    finally:
        if masks:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if main:
            signal.signal(signal.SIGINT, handler)
        if held:
            signal.raise_signal(signal.SIGINT)


def _work(sender: Connection, threads: int, task: Callable[..., object], args: tuple[object, ...]) -> None:
    """Carry out a task and send what comes of it: an error's text, or None and the result."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        sender.send((None, task(*args)))
    except MixerError as why:
        sender.send((str(why), None))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
