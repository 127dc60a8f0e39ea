"""Auxiliary losses of routing and compressive mixers, which the trainer adds to its loss."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from ...kernels.recompute import SETTINGS, Setting


class _Blocks(threading.local):
    """The open blocks of a thread, outermost first, of which None collects nothing; whether the innermost collects.

    ``torch.compile`` guards on both.
    """

    def __init__(self) -> None:
        self.open: list[dict[str, Tensor] | None] = []
        self.collects = False


_blocks = _Blocks()


@contextmanager
def aux_losses() -> Iterator[dict[str, Tensor]]:
    """Collect the auxiliary losses of every forward pass of this thread inside the block, as a dict name -> scalar.

    Outside of such a block nothing is computed or stored. A second layer of the same kind adds its loss as "name.1", a
    third as "name.2". A nested block collects for itself alone. A pass that checkpointing computes again adds nothing.
    """
    losses: dict[str, Tensor] = {}
    with _open_block(losses):
        yield losses


@contextmanager
def _open_block(losses: dict[str, Tensor] | None) -> Iterator[None]:
    _set_open([*_blocks.open, losses])
    try:
        yield
    finally:  # blocks of generators may end in any order
        _set_open([each for each in _blocks.open if each is not losses])


def _set_open(blocks: list[dict[str, Tensor] | None]) -> None:
    _blocks.open, _blocks.collects = blocks, bool(blocks) and blocks[-1] is not None


@contextmanager
def _collect_losses(collects: bool) -> Iterator[None]:
    """Compute the losses inside the block, or not, without handing them out."""
    with _open_block({} if collects else None):
        yield


SETTINGS.append(Setting(partial(getattr, _blocks, "collects"), _collect_losses))  # read for every token: no frame


def add_aux_loss(name: str, compute: Callable[[], Tensor]) -> None:
    """Add ``compute()``, a scalar, to the innermost open ``aux_losses`` block.

    Without an open block, ``compute`` is not called.
    """
    losses, count = _blocks.open[-1] if _blocks.open else None, 1
    if losses is None:
        return
    key = name
    while key in losses:
        key, count = f"{name}.{count}", count + 1
    losses[key] = compute()
