"""Run the contract suite on another device than the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import MixerError


@contextmanager
def on_device(name: str) -> Iterator[None]:
    """Create tensors on a device inside the block; numbers are still drawn on the CPU, so that a seed means the same.

    Where that is the default device already, nothing is changed: torch.compile refuses some calls under a mode.

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
    if device == torch.get_default_device():
        yield
        return
    with device:
        yield


@contextmanager
def leave_device() -> Iterator[None]:
    """Suspend the innermost mode inside the block, as that of ``on_device``, because torch.compile traces its calls.

    What runs inside must take devices from its inputs.
    """
    if not torch._C._len_torch_function_stack():
        yield
        return
    with torch.overrides._pop_mode_temporarily():
        yield
