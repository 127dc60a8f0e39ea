"""Append to tensors that grow by a token at a time, without copying what they hold."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...kernels.backend import steps
from ...kernels.cpu import empty_result
from ...kernels.recording import recorder

LEAST = 256
"""The number of tokens from which a tensor gets spare memory."""
SPARE = 8
"""The tokens held for each token of spare memory."""


class _Room(NamedTuple):
    """The memory that a tensor is the beginning of, and how many tokens have been written to it."""

    memory: Tensor
    written: list[int]


_rooms = WeakTensorKeyDictionary()
_lock = threading.Lock()


def join_tokens(a: Tensor, b: Tensor) -> Tensor:
    """Return ``torch.cat([a, b], 1)`` of tensors (B, R, .) and (B, L, .).

    Large results request huge pages, as the outputs of kernels do.
    """
    if not steps((a, b), ()) or a.ndim != 3:
        return torch.cat([a, b], 1)
    return torch.cat([a, b], 1, out=empty_result((a.shape[0], a.shape[1] + b.shape[1], a.shape[2]), a.dtype))


def append_tokens(a: Tensor, b: Tensor) -> Tensor:
    """Return ``join_tokens(a, b)``; of one row, usually without copying a.

    From ``LEAST`` tokens on the result is the beginning of memory for an eighth more. Appending to it writes behind it,
    where nothing has been written, so no tensor ever changes; a tensor that has been appended to is copied when it is
    appended to again, and so is one in memory of its own. Rows, gradients and traced programs are always copied.
    """
    R, L = a.shape[1], b.shape[1]
    if a.shape[0] != 1 or R < LEAST or recorder() is not None or not steps((a, b), ()):
        return join_tokens(a, b)
    with _lock:
        room: _Room | None = _rooms.get(a)
        if room is not None and room.written[0] == R and room.memory.shape[1] >= R + L and not _is_sealed(room.memory):
            room.written[0] = R + L
        else:
            room = None
    if room is None:
        room = _Room(empty_result((1, R + L + (R + L) // SPARE, *a.shape[2:]), a.dtype), [R + L])
        room.memory[:, :R] = a
    room.memory.data[:, R : R + L] = b  # of a version of its own: what a graph has saved of the beginning is the same
    longer = room.memory[:, : R + L]
    with _lock:
        _rooms[longer] = room
    return longer


def _is_sealed(memory: Tensor) -> bool:
    """Return whether torch forbids to write here what inference mode has made."""
    return memory.is_inference() and not torch.is_inference_mode_enabled()
