"""AFT-pairs: AFT whose position biases are sums of R products of positive parts, of the query and of the key."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functional.aft_pairs import aft_pairs_chunk
from ..functional.sums.gates import Gate
from ..kernels.precision import at_least_float32
from .base import About, Facts, Kernels
from .cost import MixingCost
from .parts.convolved import EPS, ConvolvedAFT
from .parts.options import at_least, check_heads


class AFTPairs(ConvolvedAFT):
    """AFT-pairs: AFT-full with exp(w_ts) = sum_r exp(a_tr + b_sr + G_tr - G_sr), where a, b and G come from the tokens.

    A form of this library: y_t = W_o [sigma(q_t) * norm(sum_s exp(k_s + w_ts) v_s / sum_s exp(k_s + w_ts))] (AFT, Zhai
    et al. 2021, arXiv:2105.14103, Eq. 2), with a = W_a x, b = W_b x and log-decays -softplus(W_g x + c), G their
    running sum, R per head. R is a dial from AFT, R = 1, to linear attention (Katharopoulos et al. 2020,
    arXiv:2006.16236), whose weights are also sums of products of positive features; here keys weigh each feature as
    well. The other parts are those of AFTForget. Maps (B, T, D) to (B, T, D). Not causal: two tokens decay by the
    log-decays of those after the earlier one, up to the later one.

    Args:
        rank: R, at least 1; 4 by default.
        heads: heads with weights of their own, whose ratios are normalised; must divide dim. Default 8.
        norm: normalise the ratio of each head. Default True.
        kernel_size: taps of the convolution, the identity at the start. None (default): 4, or 3 with causal=False;
            1: no convolution. Odd unless causal.
        key_norm: normalise the keys. Default True.
        decay: multiply sums by exp(g). Default True.
        half_lives: shortest and longest half-life at the start, in tokens, log-spaced over the R; the default is
            (1, 4096).
        gate: as in AFTSimple.

    Parameters: q_proj, k_proj, v_proj, out_proj, a_proj, b_proj, g_proj (without bias; H R features each), rate
    (H x R), conv (3 D x kernel_size), k_norm. Time and memory O(T D R). The streaming state is kernel_size - 1 tokens
    and 3 R vectors of D numbers.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        about=About(
            "tokenmix; after Zhai et al. 2021, arXiv 2105.14103",
            "attention free",
            "T D R",
            "T D R",
            idea="AFT-full with weights exp(w) that are sums of R products, in linear time",
            tier="core",
        ),
        form="aft_pairs",
        kernels=Kernels(("aft_pairs",)),
        conditioned={"norm": False},
    )
    chunk = staticmethod(aft_pairs_chunk)

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        rank: int = 4,
        heads: int = 8,
        norm: bool = True,
        kernel_size: int | None = None,
        key_norm: bool = True,
        decay: bool = True,
        half_lives: tuple[float, float] = (1.0, 4096.0),
        gate: Gate | None = "sigmoid",
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        at_least(self, 1, rank=rank)
        self.rank, self.norm, self.sums, self.half_lives = rank, norm, (rank,), self._pair(half_lives)
        options: dict[str, Any] = {"key_norm": key_norm, "gate": gate, "qkv_bias": qkv_bias, "out_bias": out_bias}
        check_heads(self, heads)
        self.heads = heads
        self._set_up(kernel_size=kernel_size, **options)
        self.a_proj, self.b_proj = (nn.Linear(dim, heads * rank, bias=False) for _ in range(2))
        self.g_proj = nn.Linear(dim, heads * rank, bias=False) if decay else None
        self.rate = nn.Parameter(torch.empty(heads, rank)) if decay else None
        self.init_parameters()

    def init_parameters(self) -> None:
        for layer in (self.a_proj, self.b_proj, self.g_proj):
            if layer is not None:
                nn.init.normal_(layer.weight, std=0.02)
        if self.rate is not None:
            self.start_of(self.rate, self.half_lives)

    def options(self) -> dict[str, Any]:
        return {"norm": self.norm, "eps": EPS, "gate": self.gate}

    def weights(self, x: Tensor, gaps: Tensor | None) -> tuple[Tensor | None, ...]:
        a, b = (layer(x).unflatten(-1, (self.heads, self.rank)) for layer in (self.a_proj, self.b_proj))
        if self.g_proj is None or self.rate is None:
            return a, b, None
        logits = self.g_proj(x).unflatten(-1, (self.heads, self.rank))
        return a, b, -F.softplus(at_least_float32(logits) + at_least_float32(self.rate))

    def mixing_cost(self, T: int) -> MixingCost:
        flops = 14 * T * self.dim * self.rank + 2 * T * self.width * self.kernel_size
        return MixingCost(
            flops=flops, counted=None, activations=700 * T * self.dim * self.rank, state=self.state_size()
        )
