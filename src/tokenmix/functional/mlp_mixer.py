"""Token mixing of the MLP-Mixer (Tolstikhin et al. 2021): a two-layer perceptron across tokens, shared by channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact
from .sums.nonfinite import hides
from .sums.taps import silenced


@exact
@hides("x")
def mlp_mixer(
    x: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute Y = W2 gelu(W1 X + b1) + b2 in every channel (Tolstikhin et al. 2021, Eq. 1).

    The norm and the residual of the block are not included.

    Args:
        x: (B, T, D).
        w1: (F, T) or (B, F, T); column s reads token s. b1: (F,).
        w2: (T, F) or (B, T, F); row t makes token t. b2: (T,) or (B, T).

    Returns:
        (B, T, D); a row without any valid token is exactly 0. Time O(T F D). There is no causal form: each hidden unit
        reads every token.
    """
    choose("mlp_mixer", backend, x)
    if causal:
        raise MixerError(
            "mlp_mixer: there is no causal form, because every hidden unit reads every token; use causal=False."
        )
    v = silenced(x, key_mask)
    w1, b1, w2, b2 = (a.to(v.dtype) for a in (w1, b1, w2, b2))
    y = w2 @ F.gelu(w1 @ v + b1[:, None]) + b2[..., None]
    if key_mask is not None:
        y = torch.where(key_mask.any(1)[:, None, None], y, 0.0)
    return y.to(x.dtype)
