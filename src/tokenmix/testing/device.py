"""Run the contract suite on another device than the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import MixerError


@contextmanager
def on_device(name: str) -> Iterator[None]:
    """Create tensors on a device inside the block; numbers are still drawn on the CPU, so that a seed means the same.

    Args:
        name: "cpu", "cuda", "cuda:1" and so on.

    Raises:
        MixerError: torch does not find the device, or it holds no numbers.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as why:
        raise MixerError(f"check: device {name!r} cannot be used: {str(why).splitlines()[0]}") from why
    if device.type == "meta":
        raise MixerError("check: device 'meta' holds no numbers; choose 'cpu' or 'cuda'.")
    with device:
        yield
