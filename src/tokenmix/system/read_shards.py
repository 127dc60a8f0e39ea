"""Tensors that many ranks wrote, read whole or as each rank holds them now. Nothing is unpickled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import MixerError

Like = Callable[[str], Tensor | None]
"""Which tensor another one is placed like, by its name; None: it stays whole."""


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is this rank's part of a larger one; builds of torch without distributed have none."""
    return hasattr(tensor, "device_mesh")


def take_share(tensor: Tensor, like: Tensor | None) -> Tensor:
    """Return this rank's part of a whole tensor, if ``like`` is sharded and of its shape; else the whole."""
    if like is None or not is_sharded(like) or like.shape != tensor.shape:
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def read_shards(folder: Path, like: Like | None = None) -> dict[str, Tensor]:
    """Read a folder of safetensors files, each with parts of tensors and the offsets of these parts.

    Args:
        like: as in ``take_share``; every rank of the group then reads its own parts. None: one process reads all.

    Raises:
        MixerError: if the files cannot be read.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load
    from torch.distributed.checkpoint.api import CheckpointException

    reader = HuggingFaceStorageReader(str(folder))
    try:
        known: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
        found = {
            name: take_share(torch.zeros(a.size, dtype=a.properties.dtype), like and like(name))
            for name, a in known.items()
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process was meant
            load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=like is None)
    except (CheckpointException, RuntimeError, ValueError, KeyError) as why:
        raise MixerError(f"{folder}: its parts cannot be read ({' '.join(str(why).split())[:300]}).") from None
    return found
