"""Sparse Sinkhorn attention (Tay et al. 2020, Sec. 3) as written, block by block and token by token."""

from __future__ import annotations

import torch
from torch import Tensor

Blocks = list[dict[int, int]]  # for each block that exists, offset -> token


def blocks_of(valid: list[bool], positions: list[int], block: int) -> Blocks:
    """Group valid tokens by position // block, in order; offset = position mod block."""
    found: dict[int, dict[int, int]] = {}
    for t, p in enumerate(positions):
        if valid[t]:
            found.setdefault(p // block, {})[p % block] = t
    return [found[key] for key in sorted(found)]


def log_normalised(X: Tensor, ok: Tensor, *, causal: bool) -> Tensor:
    """Apply F_r, then F_c: subtract from each row its log-sum, then from each column.

    Causal columns are summed up to the current row.
    """
    some = ok.any(1, keepdim=True)
    X = X - torch.where(some, X.masked_fill(~ok, float("-inf")), 0.0).logsumexp(1, keepdim=True)
    sums = []
    for i in range(len(X)):
        rows = slice(0, i + 1) if causal else slice(0, len(X))
        some = ok[rows].any(0, keepdim=True)
        sums.append(torch.where(some, X[rows].masked_fill(~ok[rows], float("-inf")), 0.0).logsumexp(0))
    return X - torch.stack(sums)


def permutation(
    q: Tensor, k: Tensor, sorting: Tensor, blocks: Blocks, *, iterations: int, temperature: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Compute the soft permutation P (N, N) and where it may be non-zero."""
    N = len(blocks)
    gives = torch.stack([k[list(b.values())].mean(0) for b in blocks])
    before = [[t for b in blocks[:i] for t in b.values()] if causal else list(blocks[i].values()) for i in range(N)]
    asks = torch.stack([q[tokens].mean(0) if tokens else 0 * q[0] for tokens in before])
    ok = torch.ones(N, N, dtype=torch.bool).tril(-1) if causal else torch.ones(N, N, dtype=torch.bool)
    X = asks @ sorting @ gives.T / (q.shape[-1] ** 0.5 * temperature)
    for _ in range(iterations):
        X = log_normalised(X, ok, causal=causal)
    return torch.where(ok, torch.where(ok, X, 0.0).exp(), 0.0), ok


def brought_to(i: int, P: Tensor, ok: list[list[bool]], a: Tensor, blocks: Blocks, block: int) -> list[Tensor]:
    """Return the rows of sum_j P_ij A_j that some token fills."""
    rows = []
    for u in range(block):
        there = [j for j in range(len(blocks)) if ok[i][j] and u in blocks[j]]
        if there:
            rows.append(P[i, there] @ a[[blocks[j][u] for j in there]])
    return rows


def one_head(q, k, v, sorting, mask, blocks, *, block, sortcut, iterations, temperature, causal) -> Tensor:
    """Attend to the own block and the sorted block of each token; with ``sortcut`` only to the first sorted blocks."""
    y, seen = [0 * row for row in v], mask.tolist()
    if not blocks:
        return torch.stack(y)
    P, ok = permutation(q, k, sorting, blocks, iterations=iterations, temperature=temperature, causal=causal)
    allowed = ok.tolist()
    K, V = ([brought_to(i, P, allowed, a, blocks, block) for i in range(len(blocks))] for a in (k, v))
    for i, tokens in enumerate(blocks):
        for t in tokens.values():
            own = [s for s in tokens.values() if seen[t][s]] if sortcut is None else []
            rows = [i] if sortcut is None else range(min(sortcut, len(blocks)))
            keys = torch.stack([*k[own], *(key for n in rows for key in K[n])])
            values = torch.stack([*v[own], *(value for n in rows for value in V[n])])
            y[t] = torch.softmax(keys @ q[t] / len(q[t]) ** 0.5, 0) @ values
    return torch.stack(y)


def sinkhorn(
    q,
    k,
    v,
    sorting,
    *,
    heads: int,
    block: int,
    iterations: int,
    temperature: float,
    sortcut=None,
    positions=None,
    causal_taps: bool = False,
    mask=None,
) -> Tensor:
    """Compute softmax(Q_i [K_i; (P K)_i]^T / sqrt(e)) [V_i; (P V)_i] for each block i, head by head."""
    B, T, D = q.shape
    mask, e, rows = torch.ones(B, T, T, dtype=torch.bool) if mask is None else mask, D // heads, []
    for b in range(B):
        valid = mask[b].diagonal().tolist()
        first = valid.index(True) if any(valid) else 0
        row_positions = [t - first for t in range(T)] if positions is None else positions[b].tolist()
        blocks = blocks_of(valid, row_positions, block)
        shape = {
            "block": block,
            "sortcut": sortcut,
            "iterations": iterations,
            "temperature": temperature,
            "causal": causal_taps,
        }
        cut = [slice(h * e, (h + 1) * e) for h in range(heads)]
        rows.append(
            torch.cat(
                [
                    one_head(q[b, :, c], k[b, :, c], v[b, :, c], sorting[h], mask[b], blocks, **shape)
                    for h, c in enumerate(cut)
                ],
                -1,
            )
        )
    return torch.stack(rows)
