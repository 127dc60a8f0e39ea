"""Hold the module that TorchScript compiles; its annotations must be types, not strings."""

from typing import Optional

import torch
from torch import nn


class ScriptedAttention(nn.Module):
    """A traced mixer with the signature of timm's ``Attention``."""

    def __init__(self, mixed: nn.Module, drop: nn.Module):
        super().__init__()
        self.mixed, self.drop = mixed, drop

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
