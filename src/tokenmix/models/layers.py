"""The layers of a block beside its mixer: norms, MLPs and stochastic depth."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from ..kernels.recompute import is_recomputing, remembers_settings
from ..kernels.tokenwise import silu_gate
from ..mixers.parts.token_norm import RMSNorm

NormType = Literal["layer", "rms"]
MLPKind = Literal["gelu", "swiglu", "relu2"]

NORM_LAYERS: dict[str, type[nn.LayerNorm] | type[RMSNorm]] = {"layer": nn.LayerNorm, "rms": RMSNorm}
GATED_MULTIPLE = 8
"""The hidden width of a gated MLP is rounded up to a multiple of this number, which suits matrix products."""


def check_layer_kinds(who: str, norm_type: str, mlp: str) -> None:
    """Refuse an unknown kind of norm or MLP; ``who`` is named in the error."""
    for name, given, known in (("norm_type", norm_type, get_args(NormType)), ("mlp", mlp, get_args(MLPKind))):
        if given not in known:
            raise MixerError(f"{who}: {name}={given!r} is unknown; choose one of {', '.join(map(repr, known))}.")


def build_norm(norm_type: str, dim: int, eps: float) -> nn.LayerNorm | RMSNorm:
    """Build the norm of that kind: LayerNorm, or RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    return NORM_LAYERS[norm_type](dim, eps=eps)


def hidden_width(dim: int, ratio: float, kind: str = "gelu") -> int:
    """Return the width of an MLP's hidden layer, which is dim * ratio.

    That of a gated MLP is 2/3 of it, rounded up to a multiple of 8: three matrices then hold about as many weights as
    the two of the others.
    """
    if kind != "swiglu":
        return int(dim * ratio)
    return -(-int(dim * ratio * 2 / 3) // GATED_MULTIPLE) * GATED_MULTIPLE


class BatchNorm2d(nn.BatchNorm2d):
    """Torch's BatchNorm2d, whose running statistics a pass that checkpointing computes again leaves alone."""

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and is_recomputing()):
            return super().forward(x)
        mean, var = (None if a is None else a.clone() for a in (self.running_mean, self.running_var))
        return F.batch_norm(x, mean, var, self.weight, self.bias, True, self.momentum or 0.0, self.eps)


class MLP(nn.Module):
    """Map each token by two linear layers, or by three with a gate.

    gelu: W_2 gelu(W_1 x). relu2: W_2 relu(W_1 x)^2 (So et al. 2021, arXiv 2109.08668). swiglu: W_2 (silu(W_g x) * W_1
    x) (Shazeer 2020, arXiv 2002.05202).

    Args:
        dim: features of a token, D.
        ratio: width of the hidden layer as a multiple of D; see ``hidden_width`` for that of swiglu.
        kind: "gelu", "swiglu" or "relu2".
        bias: whether the layers have biases.
    """

    def __init__(self, dim: int, ratio: float = 4.0, kind: MLPKind = "gelu", *, bias: bool = True):
        super().__init__()
        check_layer_kinds("MLP", "layer", kind)
        width = hidden_width(dim, ratio, kind)
        self.kind = kind
        self.up = nn.Linear(dim, width, bias=bias)
        self.gate = nn.Linear(dim, width, bias=bias) if kind == "swiglu" else None
        self.down = nn.Linear(width, dim, bias=bias)

    @remembers_settings
    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        h = self.up(x)
        if self.gate is not None:
            return self.down(silu_gate(self.gate(x), h))
        return self.down(F.gelu(h) if self.kind == "gelu" else F.relu(h).square())

    def reset_parameters(self, std: float, residual_std: float) -> None:
        """Draw the weights from N(0, std), those of the last layer from N(0, residual_std); biases are 0."""
        init_linear(self.up, std)
        if self.gate is not None:
            init_linear(self.gate, std)
        init_linear(self.down, residual_std)


class DropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016, arXiv 1603.09382).

    In training, the whole branch of a row is 0 with probability ``rate``, else divided by 1 - rate.
    """

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, ...) to the same shape."""
        if not self.training or self.rate == 0:
            return x
        kept = torch.rand(x.shape[0], *[1] * (x.ndim - 1), dtype=torch.float32, device=x.device) >= self.rate
        return x * kept.to(x.dtype) / (1 - self.rate)


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap * tanh(logits / cap), or the logits as they are if there is no cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def init_linear(layer: nn.Linear | nn.Conv2d, std: float) -> None:
    """Draw the weight from N(0, std) and set the bias to 0."""
    nn.init.normal_(layer.weight, std=std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
