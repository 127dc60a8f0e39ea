"""The demo's processes side by side: shared cores, results by name, and nothing left running."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch

from tokenmix.errors import MixerError
from tokenmix.lab.data import open_corpus
from tokenmix.lab.demo.lanes import Lanes, lanes_for, side_by_side

FOREVER = (time.sleep, (600.0,))


@pytest.mark.parametrize(
    ("tasks", "cores", "count", "threads"),
    [(4, 1, 1, 1), (4, 2, 2, 1), (4, 3, 2, 1), (5, 3, 3, 1), (4, 4, 4, 1), (4, 7, 4, 1), (4, 16, 4, 4)],
)
def test_cores_are_shared_in_as_few_rounds_as_possible(tasks, cores, count, threads):
    assert lanes_for(tasks, cores) == Lanes(count, threads)


def test_each_task_runs_in_a_process_of_its_own_that_ctrl_c_does_not_reach():
    tasks = {"pid": (os.getpid, ()), "threads": (torch.get_num_threads, ()), "mask": (signal.pthread_sigmask, (0, []))}
    found = side_by_side(Lanes(2, 3), tasks)
    assert list(found) == list(tasks)
    assert found["pid"] != os.getpid()
    assert found["threads"] == 3
    assert signal.SIGINT in found["mask"]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ((open_corpus, ("no such corpus",)), "no such corpus"),
        ((os._exit, (3,)), "the process for 'bad' ended with exit code 3"),
    ],
)
def test_an_error_in_one_task_ends_the_others(task, said):
    with pytest.raises(MixerError, match=said):
        side_by_side(Lanes(2, 1), {"bad": task, "long": FOREVER})
    assert multiprocessing.active_children() == []


def test_an_interrupt_ends_all_tasks():
    seen = []

    def stop(names):
        seen.extend(names)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        side_by_side(Lanes(2, 1), {"a": FOREVER, "b": FOREVER, "c": FOREVER}, watch=stop, every=0.1)
    assert seen == ["a", "b"]
    assert multiprocessing.active_children() == []
