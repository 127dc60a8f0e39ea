"""AFT-reach: AFT whose queries choose how far they look, by weighing a few fixed decays."""

from __future__ import annotations

from math import log
from typing import Any

import torch
from torch import Tensor, nn

from ..functional.aft_pairs import aft_pairs_chunk
from ..functional.sums.gates import Gate
from .base import About, Facts, Kernels
from .cost import MixingCost
from .parts.convolved import EPS, ConvolvedAFT
from .parts.options import at_least, check_heads


class AFTReach(ConvolvedAFT):
    """AFT-reach: AFT-full with w_ts = log sum_r exp(a_tr - lambda_r |t - s|), where the query chooses a_t.

    A form of this library: y_t = W_o [sigma(q_t) * norm(sum_s exp(k_s + w_ts) v_s / sum_s exp(k_s + w_ts))] (AFT, Zhai
    et al. 2021, arXiv:2105.14103, Eq. 2) with R fixed rates lambda_r, log-spaced, and a = W_a x, R per head. The other
    parts are those of AFTForget. Maps (B, T, D) to (B, T, D).

    Args:
        reaches: R, at least 1; 8 by default.
        half_lives: the shortest and the longest half-life, log(2) / lambda, in tokens; the default is (1, 4096).
        heads: heads with logits of their own, whose ratios are normalised; must divide dim. Default 8.
        norm: normalise the ratio of each head. Default True.
        kernel_size: taps of the convolution, the identity at the start. None (default): 4, or 3 with causal=False;
            1: no convolution. Odd unless causal.
        key_norm: normalise the keys. Default True.
        gate: as in AFTSimple.

    Parameters: q_proj, k_proj, v_proj, out_proj, a_proj (without bias, H R features), conv (3 D x kernel_size), k_norm.
    Time and memory O(T D R). The streaming state is kernel_size - 1 tokens and 3 R vectors of D numbers. Distances are
    measured in positions, which must rise along the row.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        about=About(
            "tokenmix; after Zhai et al. 2021, arXiv 2105.14103",
            "attention free",
            "T D R",
            "T D R",
            idea="AFT whose queries weigh R fixed decays, and so choose how far they look",
            tier="core",
        ),
        form="aft_pairs",
        kernels=Kernels(("aft_pairs",)),
        conditioned={"norm": False},
    )
    chunk = staticmethod(aft_pairs_chunk)
    by_distance = True

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        reaches: int = 8,
        half_lives: tuple[float, float] = (1.0, 4096.0),
        heads: int = 8,
        norm: bool = True,
        kernel_size: int | None = None,
        key_norm: bool = True,
        gate: Gate | None = "sigmoid",
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        at_least(self, 1, reaches=reaches)
        self.reaches, self.norm, self.sums, self.half_lives = reaches, norm, (reaches,), self._pair(half_lives)
        options: dict[str, Any] = {"key_norm": key_norm, "gate": gate, "qkv_bias": qkv_bias, "out_bias": out_bias}
        check_heads(self, heads)
        self.heads = heads
        self._set_up(kernel_size=kernel_size, **options)
        self.a_proj = nn.Linear(dim, heads * reaches, bias=False)
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.normal_(self.a_proj.weight, std=0.02)

    def options(self) -> dict[str, Any]:
        return {"norm": self.norm, "eps": EPS, "gate": self.gate}

    def weights(self, x: Tensor, gaps: Tensor | None) -> tuple[Tensor | None, ...]:
        a = self.a_proj(x).unflatten(-1, (self.heads, self.reaches))
        short, long = (log(log(2.0) / life) for life in self.half_lives)
        rates = torch.linspace(short, long, self.reaches, dtype=torch.float64, device=x.device).exp()
        between = torch.ones_like(x[..., 0]) if gaps is None else gaps
        return a, None, -(between.double()[..., None, None] * rates).expand_as(a)

    def mixing_cost(self, T: int) -> MixingCost:
        flops = 14 * T * self.dim * self.reaches + 2 * T * self.width * self.kernel_size
        return MixingCost(
            flops=flops, counted=None, activations=700 * T * self.dim * self.reaches, state=self.state_size()
        )
