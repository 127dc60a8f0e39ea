"""Train the rows of an experiment on one thread, each to its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tokenmix.lab.train import RunConfig, resume, train


def finish(folder: Path, config: RunConfig) -> dict[str, Any]:
    """Train a row to its end, from wherever it stood. Returns the run's summary."""
    torch.set_num_threads(1)
    return resume(folder, verbose=False) if (folder / "config.json").exists() else train(config, folder, verbose=False)
