"""Auxiliary losses, which routing and compressive mixers ask the trainer to add to its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

_open: list[dict[str, Tensor]] = []  # a plain global, which torch.compile can guard on


@contextmanager
def aux_losses() -> Iterator[dict[str, Tensor]]:
    """Collect the auxiliary losses of every forward pass inside the block, as a dict name -> scalar.

    Outside of such a block nothing is computed or stored. A second layer of the same kind adds its loss as "name.1", a
    third as "name.2". A nested block collects for itself alone.
    """
    losses: dict[str, Tensor] = {}
    _open.append(losses)
    try:
        yield losses
    finally:
        _open.pop()


def add_aux_loss(name: str, compute: Callable[[], Tensor]) -> None:
    """Add ``compute()``, a scalar, to the innermost open ``aux_losses`` block.

    Without an open block, ``compute`` is not called.
    """
    if not _open:
        return
    losses, count = _open[-1], 1
    key = name
    while key in losses:
        key, count = f"{name}.{count}", count + 1
    losses[key] = compute()
