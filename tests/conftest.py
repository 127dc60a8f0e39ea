"""One torch thread per test process, and a seed, so that runs repeat and workers do not fight for cores."""

from __future__ import annotations

import logging

import pytest
import torch

torch.set_num_threads(1)
logging.getLogger("torch.__trace").propagate = False  # thousands of empty lines under any failing test


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
