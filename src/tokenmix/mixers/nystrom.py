"""Nyström attention (Xiong et al. 2021, "Nyströmformer", arXiv:2102.03902) as a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .base import QKVO, About, Arguments, Mixer
from .cost import MixingCost
from .parts.options import at_least
from .parts.shared import add_projections, check_positions, largest_dot


class Nystrom(Mixer):
    """Nyström attention: y_t = W_o [softmax(q_t K~^T) A^+ softmax(Q~ K^T) V] in each head.

    Q~ and K~ are ``landmarks`` segment means and A = softmax(Q~ K~^T). Xiong et al. 2021, arXiv:2102.03902, Eqs. 13,
    14. Maps (B, T, D) to (B, T, D). There is no causal form: a landmark is the mean of a segment of the whole sequence,
    and A^+ combines every landmark with every other.

    Args:
        landmarks: m, the number of segments of a row, 64 by default; each row is cut by its own length. With m >= T it
            approaches softmax attention.
        heads: number of heads, 8 by default; must divide dim.
        iterations: number of steps of the iterative pseudo-inverse, 6 by default.
        conv_kernel: number of taps, odd, of a depthwise convolution of V that is added, one filter per head (33 in the
            paper's code). None (default): no convolution.

    Everything between the projections is computed in float64.

    Parameters: q_proj, k_proj, v_proj, out_proj, taps (heads, conv_kernel). Time O(T m D + m^3 H).

    Raises:
        MixerError: if an option is out of its range.
    """

    about = About("Xiong et al. 2021, arXiv 2102.03902", "low rank", "T m D + m^3 H", "T (m H + D)")
    form = "nystrom"
    carries = QKVO

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        landmarks: int = 64,
        heads: int = 8,
        iterations: int = 6,
        conv_kernel: int | None = None,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.landmarks, self.heads, self.iterations, self.conv_kernel = landmarks, heads, iterations, conv_kernel
        at_least(self, 1, landmarks=landmarks)
        at_least(self, 0, iterations=iterations)
        if conv_kernel is not None and (
            not isinstance(conv_kernel, int) or isinstance(conv_kernel, bool) or conv_kernel < 1 or conv_kernel % 2 == 0
        ):
            self.refuse(f"conv_kernel must be odd and positive, or None, got {conv_kernel!r}")
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        self.taps = None if conv_kernel is None else nn.Parameter(torch.empty(heads, conv_kernel))
        self.init_parameters()

    def init_parameters(self) -> None:
        if self.taps is not None:
            nn.init.uniform_(self.taps, -(self.taps.shape[1] ** -0.5), self.taps.shape[1] ** -0.5)

    def functional_args(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        grid: tuple[int, ...] | None = None,
        prefix: int = 0,
    ) -> Arguments:
        """Return the arguments of ``functional.nystrom`` for this input: (positional, keyword)."""
        check_positions(self, positions, key_mask)
        taps = x.new_zeros(self.heads, 0) if self.taps is None else self.taps
        args = self.q_proj(x), self.k_proj(x), self.v_proj(x), taps
        options = {
            "heads": self.heads,
            "landmarks": self.landmarks,
            "iterations": self.iterations,
            "positions": positions,
        }
        return args, {**options, "key_mask": key_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        D, m, H = self.dim, self.landmarks, self.heads
        skip = 2 * T * D * (self.conv_kernel or 0)
        flops = 12 * T * m * D + 4 * m * m * D + 8 * self.iterations * m**3 * H + skip
        kept = 8 * (2 * T * m * H + 5 * T * D + (2 + 6 * self.iterations) * m * m * H)
        return MixingCost(flops=flops, counted=flops, activations=kept + 4 * 3 * T * D)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        return largest_dot(args[0], args[1], options["heads"])
