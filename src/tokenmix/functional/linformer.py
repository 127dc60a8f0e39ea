"""Linformer (Wang et al. 2020, Eq. 7): keys and values shortened along time by learned matrices. Bidirectional only."""

from __future__ import annotations

from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend
from ..kernels.precision import at_least_float32, exact
from .attention import finite_attention
from .layout.heads import by_head
from .layout.masks import zero_masked
from .layout.positions import default_positions
from .sums.nonfinite import hides


@exact
@hides("k", "v", asks="q")
def linformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    e: Tensor,
    f: Tensor,
    *,
    heads: int,
    positions: Tensor | None = None,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = softmax(q_t (E K)^T / sqrt(d)) (F V) in each head of width d.

    Args:
        q: (B, T, D). k, v: (B, S, D).
        e, f: (heads or 1, K, N), one column for each position of a key.
        positions: (B, S), the column of each key, below N. Default: index minus the index of the row's first True key.

    Masked keys add nothing to E K and F V; with no key at all both are 0, and so is the result. E K and F V are summed
    in float64. Time O((T + S) K D).
    """
    if e.shape[0] not in (1, heads) or f.shape[0] not in (1, heads) or q.shape[-1] % heads:
        given = f"D={q.shape[-1]}, e {tuple(e.shape)} and f {tuple(f.shape)}"
        raise MixerError(
            f"linformer: heads={heads} must divide D and needs e and f of 1 or {heads} matrices, got {given}."
        )
    if k.shape[1] > e.shape[-1]:
        raise MixerError(f"linformer: e has {e.shape[-1]} columns, one per position, got {k.shape[1]} keys.")
    kc, vc = shortened(k, e, heads, positions, key_mask), shortened(v, f, heads, positions, key_mask)
    wide = at_least_float32(q)
    return finite_attention(wide, kc.to(wide.dtype), vc.to(wide.dtype), heads=heads, backend=backend).to(q.dtype)


@exact
def shortened(k: Tensor, e: Tensor, heads: int, positions: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """Compute E K: (B, S, D) and (heads or 1, K, N) -> (B, K, D), float64."""
    B, S, D = k.shape
    k = zero_masked(k, key_mask).double()
    if positions is None and key_mask is None:
        e = e[..., :S]
    else:
        positions = default_positions(B, S, key_mask, k.device) if positions is None else positions
        k = k.new_zeros(B, e.shape[-1], D).scatter_add(1, positions.long()[..., None].expand(-1, -1, D), k)
    if e.shape[0] == 1:
        return e[0].double() @ k
    return (e.double() @ by_head(k, heads)).transpose(1, 2).flatten(2)
