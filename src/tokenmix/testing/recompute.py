"""The promise on gradient checkpointing, which computes a forward pass again inside the backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..mixers.parts.aux_losses import aux_losses
from . import inputs
from .batching import _output_of
from .report import fail, same
from .subject import Subject


def checkpointing_changes_nothing(s: Subject) -> None:
    """In train mode, checkpointing of either kind gives the same outputs, gradients, losses and buffers.

    Whatever a pass does beside its outputs happens once, whether a backward pass follows or not.
    """
    mixer, x = s.build().train(), s.x()
    want = _train_once(s, copy.deepcopy(mixer), x, lambda call, x: call(x))
    for name, how in WAYS.items():
        got = _train_once(s, copy.deepcopy(mixer), x, how)
        if got.keys() != want.keys():
            fail(f"{name} gives {sorted(got.keys() ^ want.keys())} at one side only", seed=s.seed)
        for what, expected in want.items():
            same(got[what], expected, f"{what} with {name} differs", seed=s.seed)


def _checkpoint_once(call: Callable[[Tensor], Tensor], x: Tensor, *, use_reentrant: bool) -> Tensor:
    return checkpoint(call, x, use_reentrant=use_reentrant)


def _nest_checkpoints(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(lambda x: checkpoint(call, x, use_reentrant=False), x, use_reentrant=False)


WAYS: dict[str, Callable[..., Tensor]] = {
    "checkpoint(use_reentrant=False)": partial(_checkpoint_once, use_reentrant=False),
    "checkpoint(use_reentrant=True)": partial(_checkpoint_once, use_reentrant=True),
    "a checkpoint inside another": _nest_checkpoints,
}
"""What a call goes through, by name."""


def _train_once(s: Subject, mixer: Any, x: Tensor, how: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Return everything that one step of training leaves, by name."""
    x = x.clone().requires_grad_()
    torch.manual_seed(s.seed)
    with aux_losses() as losses:
        y = _output_of(how(partial(s.call, mixer), x))
        found = {f"the buffer {name} after forward": a.clone() for name, a in mixer.named_buffers()}
        (y * inputs.noise(*y.shape, seed=5)).sum().backward()
    found |= {f"the buffer {name}": a.clone() for name, a in mixer.named_buffers()}
    found |= {f"the gradient of {name}": p.grad for name, p in mixer.named_parameters() if p.grad is not None}
    return (
        {"the output": y.detach(), "the gradient of x": x.grad}
        | found
        | {  # type: ignore[dict-item]  # it has one
            f"the loss {name}": a.detach() for name, a in losses.items()
        }
    )
