"""Norms: batch normalisation over the valid tokens of a batch, alone and after a linear layer; RMS norm of a token."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.precision import at_least_float32
from ...kernels.recompute import is_recomputing, remembers_settings
from ...kernels.tokenwise import rms_norm


class RMSNorm(nn.RMSNorm):
    """Divide each token by its root mean square, as ``torch.nn.RMSNorm`` does, in one pass over memory on the CPU.

    Args:
        dim: features of a token.
        eps: added to the mean square.
    """

    def __init__(self, dim: int, *, eps: float = 1e-5):
        super().__init__(dim, eps=eps)
        self.eps: float = eps

    @remembers_settings
    def forward(self, x: Tensor) -> Tensor:
        """Map (..., dim) to the same shape and dtype; see ``kernels.tokenwise.rms_norm``."""
        return rms_norm(x, self.weight.to(x.dtype), eps=self.eps)  # under autocast the weight is wider than x


class Moments(NamedTuple):
    """The number of valid tokens, a scalar, and the mean and the biased variance (features,) of their features."""

    n: Tensor
    mean: Tensor
    var: Tensor


def masked_moments(x: Tensor, valid: Tensor) -> Moments:
    """Return the moments of the valid tokens of x (B, T, features); valid is (B, T, 1) bool."""
    n = valid.sum().to(x.dtype)
    count = n.clamp_min(1.0)
    mean = torch.where(valid, x, 0.0).sum((0, 1)) / count
    return Moments(n, mean, torch.where(valid, x - mean, 0.0).square().sum((0, 1)) / count)


def move_statistics(running_mean: Tensor, running_var: Tensor, moments: Moments, step: Tensor | float) -> None:
    """Move running statistics by the share ``step`` towards the mean and the unbiased variance of a batch."""
    n, mean, var = moments
    with torch.no_grad():
        for running, now in ((running_mean, mean), (running_var, var * n / (n - 1).clamp_min(1.0))):
            share = step.to(running.dtype) if isinstance(step, Tensor) else step
            running += share * (now - running).to(running.dtype)


class TokenBatchNorm(nn.Module):
    """BatchNorm1d over (rows, tokens) that ignores masked tokens.

    In train mode it couples the rows and tokens of a batch.

    Args:
        features: number of features.
        momentum: share of the new statistics in the running ones.
        eps: added to the variance.
    """

    running_mean: Tensor
    running_var: Tensor
    measure = staticmethod(masked_moments)
    """What returns the moments of a batch; ranks that share one replace it."""

    def __init__(self, features: int, *, momentum: float = 0.1, eps: float = 1e-5):
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight, self.bias = nn.Parameter(torch.empty(features)), nn.Parameter(torch.empty(features))
        self.register_buffer("running_mean", torch.empty(features))
        self.register_buffer("running_var", torch.empty(features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset to the identity, with running statistics of mean 0 and variance 1."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        with torch.no_grad():
            self.running_mean.zero_()
            self.running_var.fill_(1.0)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Normalise x (B, T, features).

        Train mode uses the statistics of the valid tokens, eval mode the running ones.
        """
        wide = at_least_float32(x)
        mean, var = (
            self._measure_batch(wide, key_mask)
            if self.training
            else (self.running_mean.to(wide.dtype), self.running_var.to(wide.dtype))
        )
        y = (wide - mean) * torch.rsqrt(var + self.eps) * self.weight.to(wide.dtype) + self.bias.to(wide.dtype)
        return y.to(x.dtype)

    def _measure_batch(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        valid = torch.ones_like(x[..., :1], dtype=torch.bool) if key_mask is None else key_mask[..., None]
        moments = self.measure(x, valid)
        if not is_recomputing():
            step = self.momentum * moments.n.clamp_max(1.0)  # a batch without valid tokens changes nothing
            move_statistics(self.running_mean, self.running_var, moments, step)
        return moments.mean, moments.var


class LBR(nn.Module):
    """Linear layer, batch normalisation over the valid tokens, and relu (PCT, Guo et al. 2020, arXiv 2012.09688).

    Args:
        features: number of features read.
        out_features: number of features written.
        bias: whether the linear layer has a bias.
        slope: of the relu below 0.
    """

    def __init__(self, features: int, out_features: int, *, bias: bool = True, slope: float = 0.0):
        super().__init__()
        self.slope = slope
        self.linear, self.norm = nn.Linear(features, out_features, bias=bias), TokenBatchNorm(out_features)

    def reset_parameters(self) -> None:
        """Initialise both parts again."""
        self.linear.reset_parameters()
        self.norm.reset_parameters()

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Map (B, T, features) to (B, T, out_features); masked tokens do not enter the statistics."""
        return F.leaky_relu(self.norm(self.linear(x), key_mask), self.slope)
