"""Batch norms whose moments are those of the rows of all ranks, by one exchange forward and one backward.

Torch's ``SyncBatchNorm`` computes the same on GPUs only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..kernels.precision import at_least_float32
from ..kernels.recompute import is_recomputing
from ..mixers.parts.token_norm import Moments, TokenBatchNorm, masked_moments, move_statistics
from .messages import Group, gather_trees
from .sharing import Method, replace_methods

BATCH_NORMS = (_BatchNorm, TokenBatchNorm)


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the batch norms of a model by name."""
    return {name: each for name, each in model.named_modules() if isinstance(each, BATCH_NORMS)}


@contextlib.contextmanager
def shared_moments(model: nn.Module, group: Group = None) -> Iterator[None]:
    """Within this block, batch norms in training mode normalise by the moments of the rows of all ranks.

    Running statistics move by the same moments, so they stay equal on all ranks. Every rank calls the model, be it on
    no rows, and calls ``backward``.

    Args:
        model: the same on every rank, with batch norms of torch or ``TokenBatchNorm``.
        group: a process group; None: all processes.
    """
    norms, methods = batch_norms(model).values(), list[Method]()
    if norms:
        measure = torch.compiler.disable(_moments_over(group))  # dynamo traces no exchange
        for norm in norms:
            ours = isinstance(norm, TokenBatchNorm)
            methods.append((norm, "measure", measure) if ours else (norm, "forward", _forward_of(norm, measure)))
    with replace_methods(methods):
        yield


def _moments_over(group: Group) -> Callable[[Tensor, Tensor], Moments]:
    def measure(x: Tensor, valid: Tensor) -> Moments:
        """Merge the moments of all ranks: M = sum n m / N, V = sum n (v + (m - M)^2) / N (Chan et al. 1979)."""
        every, _ = gather_trees(group, tuple(masked_moments(x, valid)), x.new_zeros(()))
        n, means, variances = (torch.stack(each) for each in zip(*every, strict=True))
        n = n[:, None]
        count = n.sum(0).clamp_min(1.0)
        mean = (n * means).sum(0) / count
        return Moments(n.sum(), mean, (n * (variances + (means - mean).square())).sum(0) / count)

    return measure


def _forward_of(norm: Any, measure: Callable[[Tensor, Tensor], Moments]) -> Callable[[Tensor], Tensor]:
    """Return the ``forward`` of a batch norm of torch, (N, C, ...), with the moments that ``measure`` gives."""
    whole = norm.forward

    def forward(x: Tensor) -> Tensor:
        if not norm.training:
            return whole(x)  # type: ignore[no-any-return]  # a batch norm returns a tensor
        norm._check_input_dim(x)
        wide = at_least_float32(x).movedim(1, -1)
        flat = wide.reshape(-1, 1, norm.num_features)
        moments = measure(flat, torch.ones_like(flat[..., :1], dtype=torch.bool))
        if norm.running_mean is not None and not is_recomputing():
            norm.num_batches_tracked += 1
            step = 1 / norm.num_batches_tracked if norm.momentum is None else norm.momentum
            move_statistics(norm.running_mean, norm.running_var, moments, step)
        y = (wide - moments.mean) * torch.rsqrt(moments.var + norm.eps)
        y = y if norm.weight is None else y * norm.weight + norm.bias
        return y.movedim(-1, 1).to(x.dtype)

    return forward
