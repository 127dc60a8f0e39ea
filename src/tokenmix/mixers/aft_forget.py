"""AFT-forget: AFT-simple with a short convolution, normalised keys and a decay per feature."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functional.aft_forget import aft_forget_chunk
from ..functional.sums.gates import Gate
from ..kernels.precision import at_least_float32
from .base import About, Facts, Kernels
from .cost import MixingCost
from .parts.convolved import EPS, ConvolvedAFT
from .parts.options import check_heads, one_of

Decay = Literal["learned", "fixed"]


class AFTForget(ConvolvedAFT):
    """AFT-forget: y_t = W_o [sigma(q_t) * n_t / z_t], n_t = exp(g_t) n_{t-1} + exp(k_t) v_t, z_t likewise.

    A form of this library: AFT-simple (Zhai et al. 2021, arXiv:2105.14103, Eq. 5) with what has helped other mixers
    since. q, k and v pass a short convolution (Canon layers, arXiv:2512.17351); keys are RMS-normalised with a gain per
    feature; the sums decay by exp(g_t), g_t = -softplus(W_g x_t + b) per feature (RWKV-4, arXiv:2305.13048; FoX,
    arXiv:2503.02130; GLA, arXiv:2312.06635). With ``norm_heads`` the ratio is RMS-normalised per head. Maps (B, T, D)
    to (B, T, D). Not causal: every pair of tokens decays by the log-decays of the tokens after the earlier one, up to
    the later one.

    Args:
        norm_heads: groups of features whose ratio is normalised together; must divide dim. None (default): no norm.
        kernel_size: taps of the convolution, the identity at the start. None (default): 4, or 3 with causal=False;
            1: no convolution. Odd unless causal.
        key_norm: normalise the keys. Default True.
        decay: "learned" (default) as above; "fixed": g = -softplus(b) times the distance in positions, which must
            rise along the row, b learned; None: no decay.
        half_lives: shortest and longest half-life of the features at the start, in tokens, log-spaced between; the
            default is (1, 4096).
        gate: as in AFTSimple.

    Parameters: q_proj, k_proj, v_proj, out_proj, g_proj (without bias), rate (D), conv (3 D x kernel_size), k_norm.
    Time and memory O(T D). The streaming state is kernel_size - 1 tokens and three vectors of D numbers. With
    ``kernel_size=1, key_norm=False, decay=None`` it is AFT-simple.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        about=About(
            "tokenmix; after Zhai et al. 2021, arXiv 2105.14103",
            "attention free",
            "T D",
            "T D",
            idea="AFT-simple with a short convolution, a decay per feature and normalised keys",
            tier="core",
        ),
        form="aft_forget",
        conditioned={"heads": None},
        kernels=Kernels(("aft_forget",)),
    )
    chunk = staticmethod(aft_forget_chunk)

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        norm_heads: int | None = None,
        kernel_size: int | None = None,
        key_norm: bool = True,
        decay: Decay | None = "learned",
        half_lives: tuple[float, float] = (1.0, 4096.0),
        gate: Gate | None = "sigmoid",
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        options: dict[str, Any] = {"key_norm": key_norm, "gate": gate, "qkv_bias": qkv_bias, "out_bias": out_bias}
        if norm_heads is not None:
            check_heads(self, norm_heads, name="norm_heads")
        self.norm_heads = norm_heads
        self._set_up(kernel_size=kernel_size, **options)
        one_of(self, ("learned", "fixed", None), decay=decay)
        self.half_lives, self.by_distance = self._pair(half_lives), decay == "fixed"
        self.g_proj = nn.Linear(dim, dim, bias=False) if decay == "learned" else None
        self.rate = nn.Parameter(torch.empty(dim)) if decay is not None else None
        self.init_parameters()

    def init_parameters(self) -> None:
        if self.rate is None:
            return
        self.start_of(self.rate, self.half_lives)
        if self.g_proj is not None:
            nn.init.normal_(self.g_proj.weight, std=0.02)

    def options(self) -> dict[str, Any]:
        return {"heads": self.norm_heads, "eps": EPS, "gate": self.gate}

    def weights(self, x: Tensor, gaps: Tensor | None) -> tuple[Tensor]:
        if self.rate is None:
            return (torch.zeros_like(x),)
        rate = self.rate.to(torch.promote_types(self.rate.dtype, torch.float32))
        if self.g_proj is not None:
            g = self.g_proj(x)
            return (-F.softplus((g if g.dtype is rate.dtype else at_least_float32(g)) + rate).to(x.dtype),)
        fixed = -F.softplus(rate)
        each = fixed.expand(*x.shape[:2], self.dim) if gaps is None else gaps[..., None].to(rate.dtype) * fixed
        return (each.to(x.dtype),)

    def mixing_cost(self, T: int) -> MixingCost:
        flops = 10 * T * self.dim + 2 * T * self.width * self.kernel_size
        return MixingCost(flops=flops, counted=None, activations=700 * T * self.dim, state=self.state_size())
