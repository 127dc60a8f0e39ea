"""A penalty that leaves AFT-conv one tap per head (the sparse variant in the appendix of the AFT paper).

The paper does not print its penalty; this one is ours.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...mixers.aft_conv import AFTConv

EPS = 1e-3


def one_hot_penalty(model: nn.Module, *, eps: float = EPS) -> Tensor:
    """Compute the mean over all heads of all AFT-conv layers of (1 / |p|_2 - 1) / (sqrt(n) - 1).

    Here p = |w| / sum |w| over the n log-weights w of a head's filter. exp(w) - 1 is 0 exactly where w is. 1 / |p|_2 =
    L1 / L2: the penalty is 1 minus Hoyer's sparsity (2004), 1 for a flat filter and 0 exactly when one tap is left,
    whatever its size. It is computed from w, not from exp(w) - 1, whose largest tap it would increase exponentially.

    ``eps`` is spread over the taps first, p = (|w| + eps / n) / (sum |w| + eps), so that filters that are still 0, as
    in a new ``AFTConv``, have the penalty 1 and a gradient of 0 instead of 0/0. A one-hot filter with w = a then has a
    penalty of about eps / |a|.

    Add ``strength * one_hot_penalty(model)`` to the loss; ``tokenmix.models.one_hot.to_gather`` then reads the
    remaining taps by index.

    Returns:
        A differentiable scalar in [0, 1], in float32 or better.

    Raises:
        MixerError: if the model has no AFT-conv with more than one tap, or if eps is not positive.
    """
    if not eps > 0:
        raise MixerError(f"one_hot_penalty: eps must be positive, got {eps!r}.")
    filters = [m.kernel() for m in model.modules() if isinstance(m, AFTConv) and m.kernel_size > 1]
    if not filters:
        raise MixerError(
            f"one_hot_penalty: {type(model).__name__} has no AFT-conv with more than one tap; "
            + "it needs mixers like {'name': 'aft_conv', ...}."
        )
    return torch.cat([head_penalties(w, eps) for w in filters]).mean()


def head_penalties(kernel: Tensor, eps: float = EPS) -> Tensor:
    """Compute the penalty of each head (h,) from log-weights (h, s, ...)."""
    size = kernel.to(torch.promote_types(kernel.dtype, torch.float32)).flatten(1).abs()
    n = size.shape[1]
    share = (size + eps / n) / (size.sum(1, keepdim=True) + eps)
    return (share.square().sum(1).rsqrt() - 1) / (n**0.5 - 1)
