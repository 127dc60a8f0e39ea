"""Run operations in Triton kernels on CUDA.

With TRITON_INTERPRET=1 set before the first import they run on CPU tensors, which is how they are tested without a GPU.
"""

from __future__ import annotations

import importlib.util
import os

import torch

__all__ = [
    "INTERPRETED",
    "available",
    "why_not",
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_installed = importlib.util.find_spec("triton") is not None


def available() -> bool:
    """Say whether the Triton kernels can be used."""
    return why_not() is None


def why_not() -> str | None:
    """Say why the Triton kernels cannot be used; None if they can."""
    if not _installed:
        return "the package triton is not installed"
    if not INTERPRETED and not torch.cuda.is_available():
        return "there is no CUDA device"
    return None
