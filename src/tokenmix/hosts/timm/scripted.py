"""Hold what TorchScript compiles; its annotations must be types, not strings."""

from collections.abc import Callable
from typing import Optional, Tuple  # noqa: UP035  (TorchScript reads it)

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


class ScriptedBlock(nn.Module):
    """A traced block with the signature of a pyramid's.

    Args:
        mixed: the trace.
        grid: (rows, columns) that it was traced for.
        replaced: the block that this one replaces, held as in ``ScriptedAttention``.
    """

    def __init__(self, mixed: nn.Module, grid: Tuple[int, int], replaced: nn.Module):  # noqa: UP006  (TorchScript)
        super().__init__()
        self.mixed, self.rows, self.columns = mixed, grid[0], grid[1]
        self.replaced = (replaced,)

    def forward(self, x: torch.Tensor, grid: Tuple[int, int], prefix: int) -> torch.Tensor:  # noqa: UP006
        """Map (B, N, C) to (B, N, C)."""
        if grid[0] != self.rows or grid[1] != self.columns:
            raise ValueError("a scripted block was traced for one grid of tokens, and is given another")
        return self.mixed(x)


class ScriptedModel(nn.Module):
    """A traced model as a module that ``torch.jit.script`` takes."""

    def __init__(self, traced: nn.Module):
        super().__init__()
        self.traced = traced

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images to the model's output."""
        return self.traced(x)


class TypedForward(nn.Module):
    """The forward pass of a timm model; the graphs of torch.fx copy its annotations."""

    forward_features: Callable[[torch.Tensor], torch.Tensor]
    forward_head: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (B, C, H, W) to logits (B, classes)."""
        return self.forward_head(self.forward_features(images))
