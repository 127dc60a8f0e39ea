"""Modules that return their weights when called without input.

Their owner reads the weights through such a call, so that module hooks, which may fetch weights from elsewhere, see it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..base import Mixer


class WeightsOnCall(nn.Module):
    """A mix-in: called without input, a module returns ``weights_on_call()``; called with input, its usual output."""

    def forward(self, *given: Any) -> Any:
        """Return the weights, or the output of the class that this is mixed into."""
        return super().forward(*given) if given else self.weights_on_call()

    def weights_on_call(self) -> tuple[Tensor | None, ...]:
        """Return weight and bias."""
        return self.weight, self.bias  # type: ignore[return-value]  # of the class this is mixed into


class ReadLinear(WeightsOnCall, nn.Linear):
    """torch's Linear, with weights that its owner can read."""


class ReadLayerNorm(WeightsOnCall, nn.LayerNorm):
    """torch's LayerNorm, with weights that its owner can read."""


class ReadConv1d(WeightsOnCall, nn.Conv1d):
    """torch's Conv1d, with weights that its owner can read."""


class ReadConv2d(WeightsOnCall, nn.Conv2d):
    """torch's Conv2d, with weights that its owner can read."""


class ReadConv3d(WeightsOnCall, nn.Conv3d):
    """torch's Conv3d, with weights that its owner can read."""


class ReadEmbedding(WeightsOnCall, nn.Embedding):
    """torch's Embedding, with a table that its owner can read."""

    def weights_on_call(self) -> tuple[Tensor]:
        """Return the table."""
        return (self.weight,)


def child_weights(mixer: Mixer, child: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Return the weights of a child module of a mixer as tensors, on the device of x.

    The child is called without input and returns its weights, so that module hooks, which may fetch weights, see the
    call.

    Raises:
        MixerError: for a child that an adapter wraps or that is quantised, whose ``weight`` is not what it computes
            with.
    """
    if not isinstance(child, WeightsOnCall) and (
        next(child.children(), None) is not None or not isinstance(child.weight, Tensor)
    ):
        name = next((name for name, each in mixer.named_modules() if each is child), "a child")
        kind = f"{type(child).__module__.split('.')[0]}'s {type(child).__name__}"
        mixer.refuse(f"reads the weights of its {name}, which is now {kind}; leave this layer as it was")
    given: Any = child() if isinstance(child, WeightsOnCall) else (child.weight, child.bias)
    weights = tuple(a for a in given if a is not None)
    for a in weights:
        if a.device != x.device:
            mixer.refuse(f"has weights on {a.device} and x on {x.device}; move one to the other")
    return weights
