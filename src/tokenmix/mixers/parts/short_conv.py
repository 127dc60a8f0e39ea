"""A short convolution along the tokens, as a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...functional.short_conv import short_conv, short_conv_chunk
from ...functional.sums.taps import centre_of


class ShortConv(nn.Module):
    """Mix each feature of a few neighbouring tokens: y_t = sum_j w_j x_{t + j - s // 2}, or x_{t + j - (s - 1)}.

    It starts as the identity, w = 1 at the token itself. See ``functional.short_conv``.

    Args:
        dim: number of features.
        kernel_size: s, the number of taps.
        causal: use tokens up to t only.
        bias: add a learned number to each feature, 0 at the start.

    Parameters: weight (dim, s), bias (dim). To stream it, keep the last s - 1 inputs (``history.RingState``).
    """

    bias: Tensor | None

    def __init__(self, dim: int, kernel_size: int = 4, *, causal: bool = True, bias: bool = False):
        super().__init__()
        self.kernel_size, self.causal = kernel_size, causal
        self.weight = nn.Parameter(torch.empty(dim, kernel_size))
        self.register_parameter("bias", nn.Parameter(torch.empty(dim)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset to the identity."""
        with torch.no_grad():
            self.weight.zero_()
            self.weight[:, centre_of(self.kernel_size, self.causal)] = 1.0
            if self.bias is not None:
                self.bias.zero_()

    def forward(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        state: Any = None,
        holes: bool = False,
    ) -> Any:
        """Map (B, T, dim) to the same shape.

        Args:
            positions: (B, T), of the tokens; None: their indices.
            key_mask: bool (B, T), False = the token counts as 0.
            state: a state with ``values``, ``valid`` and ``positions`` of the last s - 1 tokens; the result is then a
                pair: the outputs, and the state with the last s - 1 of all tokens.
            holes: with a state, whether masked tokens may follow valid ones.
        """
        if state is None:
            y = short_conv(x, self.weight, causal=self.causal, key_mask=key_mask, positions=positions)
            return y if self.bias is None else y + self.bias.to(y.dtype)
        if positions is None or key_mask is None:
            raise MixerError("ShortConv: streaming needs the positions and the key_mask of the new tokens.")
        past = state.values, state.valid, state.positions
        y, (values, valid, at) = short_conv_chunk(x, self.weight, key_mask, positions, past, holes=holes)
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y, state._replace(values=values, valid=valid, positions=at)
