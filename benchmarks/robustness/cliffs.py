"""Try shapes at which `auto` took a path several times slower than another one available.

The attempts tell which path is taken, not the time; `benchmarks/cliffs.py` measures that.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tokenmix import functional

from . import attempt


class _Kernels(TorchDispatchMode):
    """Record which of our kernels run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith("tokenmix::"):
            self.names.add(func.name().removeprefix("tokenmix::").split(".")[0])
        return func(*args, **(kwargs or {}))


def _tokens(*shape: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=random) for _ in range(3)]


def _path(call) -> str:
    with torch.no_grad(), _Kernels() as seen:
        call()
    return f"the kernel of {', '.join(sorted(seen.names))}" if seen.names else "plain torch"


@attempt("c", "Linear attention over one token with a head of 2,048 features, 666 ms on its kernel")
def one_token() -> str:
    """The output is the token's value: no sums of 2,048 x 2,048 are needed."""
    return _path(lambda: functional.linear_attention(*_tokens(16, 1, 2048), heads=1))


@attempt("c", "Linear attention with one feature a head, twice as slow on its kernel as in torch")
def one_feature() -> str:
    """The query cancels: AFT-simple with another key."""
    return _path(lambda: functional.linear_attention(*_tokens(1, 1024, 64), heads=64))


@attempt("c", "Linear attention over 256 tokens with a head of 2,048 features, twice as slow on its kernel as in torch")
def wide_head() -> str:
    """Fewer tokens than features: weights of pairs take fewer products than sums of features."""
    return _path(lambda: functional.linear_attention(*_tokens(1, 256, 2048), heads=1))


@attempt("c", "AFT-full both ways over one token, four times as slow on its kernel as in torch")
def full_one_token() -> str:
    """The output is the gated value."""
    return _path(lambda: functional.aft_full(*_tokens(64, 1, 512), torch.zeros(1, 1)))
