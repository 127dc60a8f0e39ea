"""The one place that chooses how a function runs: the eager form in plain torch, or a faster path.

Rule of ``auto``: the fastest path that supports the device, dtype and option at hand. In this version every AFT function has the eager form only;
softmax attention runs on torch's fused SDPA, and in float64 on plain matrix products, which can be differentiated twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import MixerError

BACKENDS = ("auto", "eager", "cpu", "triton")
RULE = "auto: softmax attention on torch SDPA (plain matrix products in float64 and on export), everything else on its eager torch form"
_default = os.environ.get("TOKENMIX_BACKEND", "auto")  # a plain global: torch.compile can guard on it


def check_backend(name: str) -> str:
    """Return ``name`` if it is a backend this version has, else raise."""
    if name not in BACKENDS:
        raise MixerError(f"backend={name!r} is unknown; choose one of {', '.join(BACKENDS)}.")
    if name in ("cpu", "triton"):
        raise MixerError(f"backend={name!r}: this version of tokenmix has no {name} kernels; use 'auto' or 'eager'.")
    return name


def pick(backend: str, tensor: torch.Tensor) -> str:
    """'fused' or 'eager' for a call that asked for ``backend``; ``use_backend`` and TOKENMIX_BACKEND set what 'auto' means."""
    backend = check_backend(_default if backend == "auto" else backend)
    if backend == "eager" or tensor.dtype == torch.float64 or torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export():
        return "eager"
    return "fused"


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Set the default backend of this process inside a ``with`` block."""
    global _default
    before, _default = _default, check_backend(name)
    try:
        yield
    finally:
        _default = before
