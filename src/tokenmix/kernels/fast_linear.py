"""Choose the faster of two routes for float32 matrix products on CPUs.

Around a mixer that is linear in length, the projections take most of the time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import MixerError

EXACT = 4.0
"""The other route counts as exact if its error is at most this many times that of the usual one, which a different
order of summation stays within and shorter numbers do not."""
ROUNDS = 9


class LinearRoutes(NamedTuple):
    """Hold the measurements on this machine: rates in FLOP/s, errors over the largest output, and the route in use."""

    usual: float
    other: float
    usual_error: float
    other_error: float
    used: str
    why: str

    def __str__(self) -> str:
        rates = f"{self.usual / 1e9:.0f} GFLOP/s usual, {self.other / 1e9:.0f} oneDNN"
        return f"{self.used} ({self.why}; {rates}; errors {self.usual_error:.1e} and {self.other_error:.1e})"


_lock = threading.Lock()
_routes: list[list[str]] = []
"""The setting outside all blocks, then the routes of the open blocks, distinguished by identity."""


@contextmanager
def fast_linear(*, allow_rounding: bool = False, tokens: int = 2048, features: int = 512) -> Iterator[LinearRoutes]:
    """Let oneDNN compute torch's float32 matrix products on the CPU inside a ``with`` block, if it is faster here.

    torch computes them with its BLAS. oneDNN is selected through ``torch.backends.mkldnn.matmul.fp32_precision``, which
    permits bfloat16 inside a product; processors without matrix units for bfloat16 still compute in float32, only
    faster. Both routes are tried on a linear layer, forward and backward, for about 0.2 s. oneDNN is used only if it is
    faster, and if its error is that of float32 or rounding is allowed.

    Args:
        allow_rounding: use oneDNN even where it rounds factors to bfloat16 (relative error about 4e-3).
        tokens, features: the size to try, a linear layer of features x features.

    Yields:
        What was found, and which route is in use.

    Raises:
        MixerError: if a size is not positive.
    """
    if tokens < 1 or features < 1:
        raise MixerError(f"fast_linear: tokens and features must be positive, got {tokens} and {features}.")
    setting = _matmul_setting()
    if setting is None:
        yield LinearRoutes(0.0, 0.0, 0.0, 0.0, "usual", "this build of torch has no oneDNN, or no switch for it")
        return
    with _lock:
        usual = _routes[0][0] if _routes else setting.fp32_precision
        try:
            found = _try(setting, usual, tokens, features, allow_rounding)
        finally:
            setting.fp32_precision = _routes[-1][0] if _routes else usual
        route = ["bf16" if found.used == "oneDNN" else usual]
        _routes.extend([route] if _routes else [[usual], route])
        setting.fp32_precision = route[0]
    try:
        yield found
    finally:
        with _lock:  # the setting is the process's; blocks of threads may end in any order
            _routes[:] = [each for each in _routes if each is not route]
            setting.fp32_precision = _routes[-1][0]
            if len(_routes) == 1:
                _routes.clear()


def _matmul_setting() -> Any:
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    return matmul if torch.backends.mkldnn.is_available() and hasattr(matmul, "fp32_precision") else None


def _try(setting: Any, before: str, tokens: int, features: int, allow_rounding: bool) -> LinearRoutes:
    random = torch.Generator().manual_seed(0)
    x, w, g = (
        torch.randn(n, features, generator=random, dtype=torch.float32, device="cpu")
        for n in (tokens, features, tokens)
    )
    exact = _products(x.double(), w.double(), g.double())
    seconds: dict[str, list[float]] = {before: [], "bf16": []}
    error = {}
    for _ in range(ROUNDS):  # in turns, so that other load on the machine falls on both
        for route, taken in seconds.items():
            setting.fp32_precision = route
            start = time.perf_counter()
            got = _products(x, w, g)
            taken.append(time.perf_counter() - start)
            error[route] = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, exact, strict=True))
    work = 6.0 * tokens * features * features
    usual, other = (work / sorted(taken)[ROUNDS // 4] for taken in seconds.values())
    if other <= usual:
        used, why = "usual", "oneDNN is not faster here"
    elif error["bf16"] > EXACT * error[before] and not allow_rounding:
        used, why = "usual", "oneDNN would round to bfloat16 here, which allow_rounding=True permits"
    else:
        used, why = "oneDNN", f"{other / usual:.2f} times as fast"
    return LinearRoutes(usual, other, error[before], error["bf16"], used, why)


def _products(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a linear layer's output and its gradients."""
    return x @ w.mT, g @ w, g.mT @ x
