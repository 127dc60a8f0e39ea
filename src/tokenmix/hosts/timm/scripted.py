"""Hold the module that TorchScript compiles; its annotations must be types, not strings."""

from typing import Optional

import torch
from torch import nn


class ScriptedAttention(nn.Module):
    """A traced mixer with the signature of timm's ``Attention``.

    Args:
        mixed: the trace.
        drop: dropout of the outputs.
        replaced: the layer that this one replaces. ``torch.jit.script`` remembers the modules it has prepared by their
            ``id``, so a layer that was freed could lend its id to another block's trace, which would then be replaced
            by this layer; held here, it keeps its id until the whole model is prepared.
    """

    def __init__(self, mixed: nn.Module, drop: nn.Module, replaced: nn.Module):
        super().__init__()
        self.mixed, self.drop = mixed, drop
        self.replaced = (replaced,)  # in a tuple, so that it is no submodule

    def forward(
        self,
        x: torch.Tensor,
        attn_mask: Optional[torch.Tensor] = None,  # noqa: UP045  (TorchScript reads it)
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Mix (B, N, C) -> (B, N, C), without masks."""
        if attn_mask is not None or is_causal:
            raise ValueError("a scripted mixer takes no attn_mask and no is_causal")
        return self.drop(self.mixed(x))


class ScriptedModel(nn.Module):
    """A traced model as a module that ``torch.jit.script`` takes."""

    def __init__(self, traced: nn.Module):
        super().__init__()
        self.traced = traced

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images to the model's output."""
        return self.traced(x)
