"""Memory-compressed attention (Liu et al. 2018, section 4.2.3) as written, query by query."""

from __future__ import annotations

import torch
from torch import Tensor


def memory_compressed(
    q,
    k,
    v,
    conv=(),
    *,
    heads: int,
    block: int,
    mode: str = "compressed",
    causal_taps: bool = False,
    positions=None,
    mask=None,
) -> Tensor:
    """Attend to few keys.

    Local: the tokens of the own block. Compressed: a strided convolution of all tokens; causal: of the blocks before,
    and the own block's tokens.
    """
    B, T, _ = q.shape
    rows = []
    for b in range(B):
        valid = [s for s in range(T) if mask is None or bool(mask[b, :, s].any())]
        first = valid[0] if valid else 0
        cell = [(s - first if positions is None else int(positions[b, s])) // block for s in range(T)]
        offset = [(s - first if positions is None else int(positions[b, s])) % block for s in range(T)]
        short = (
            {
                j: _convolve_block(k[b], v[b], conv, [(s, offset[s]) for s in valid if cell[s] == j])
                for j in {cell[s] for s in valid}
            }
            if conv
            else {}
        )
        for t in range(T):
            own = [s for s in valid if cell[s] == cell[t] and (mask is None or bool(mask[b, t, s]))]
            seen: list[tuple[Tensor, ...]] = [(k[b, s], v[b, s]) for s in own] if mode == "local" or causal_taps else []
            seen += [short[j] for j in sorted(short) if not causal_taps or j < cell[t]]
            rows.append(_attend(q[b, t], seen if positions is not None or t >= first else [], heads))
    return torch.stack(rows).view_as(q)


def _convolve_block(
    k: Tensor, v: Tensor, conv: tuple[Tensor, ...], tokens: list[tuple[int, int]]
) -> tuple[Tensor, ...]:
    """Compute sum_i W_i x_i + b over the tokens of one block (kernel = stride)."""
    return tuple(
        sum((w[:, :, i] @ a[s] for s, i in tokens), bias) for a, w, bias in zip((k, v), conv[:2], conv[2:], strict=True)
    )


def _attend(q: Tensor, seen: list[tuple[Tensor, ...]], heads: int) -> Tensor:
    """Compute softmax(q . k / sqrt(e)) v, head by head; 0 over nothing."""
    if not seen:
        return torch.zeros_like(q)
    keys, values = (torch.stack(a).unflatten(-1, (heads, -1)) for a in zip(*seen, strict=True))
    q = q.unflatten(-1, (heads, -1))
    weights = torch.softmax((keys * q).sum(-1) / q.shape[-1] ** 0.5, 0)
    return (weights[..., None] * values).sum(0).flatten()
