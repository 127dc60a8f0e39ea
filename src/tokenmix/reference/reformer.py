"""Reformer (Kitaev et al. 2020, Sec. 2) as written, over the sets P_i."""

from __future__ import annotations

import torch
from torch import Tensor


def hash_of(x: Tensor, rotation: Tensor) -> list[int]:
    """Compute h(x) = argmax([xR; -xR]) for each token of x (T, e)."""
    return [int(torch.cat([row @ rotation, -(row @ rotation)]).argmax()) for row in x.detach()]


def chunks_of(buckets: list[int], valid: list[bool], chunk: int, paper_form: bool) -> dict[int, tuple[int, int]]:
    """Return (bucket, chunk) of every valid token.

    The chunk is counted inside the bucket, or along the sort of all valid tokens by (bucket, position).
    """
    tokens = [t for t in range(len(valid)) if valid[t]]
    if paper_form:
        return {t: (buckets[t], rank // chunk) for rank, t in enumerate(sorted(tokens, key=lambda t: (buckets[t], t)))}
    return {t: (buckets[t], sum(buckets[s] == buckets[t] for s in tokens if s < t) // chunk) for t in tokens}


def attended_pairs(x: Tensor, rotations: Tensor, valid: list[bool], chunk: int, paper_form: bool) -> Tensor:
    """Return P (T, T): s in P_t where some round has both in one bucket, s in t's chunk or in the one before it."""
    ok = torch.zeros(len(valid), len(valid), dtype=torch.bool)
    for rotation in rotations:
        where = chunks_of(hash_of(x, rotation), valid, chunk, paper_form)
        tokens = torch.tensor(list(where), dtype=torch.long)
        bucket, number = torch.tensor(list(where.values()), dtype=torch.long).reshape(-1, 2).unbind(1)
        ahead = number[:, None] - number
        ok[tokens[:, None], tokens] |= (bucket[:, None] == bucket) & ((ahead == 0) | (ahead == 1))
    return ok


def reformer(
    q: Tensor,
    v: Tensor,
    rotations: Tensor,
    *,
    heads: int,
    chunk: int,
    paper_form: bool = False,
    causal_taps: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute softmax over P_t of q_t . k_s / sqrt(e), k_s = q_s / |q_s|.

    t itself is attended only where P_t holds nothing else.
    """
    B, T, D = q.shape
    e, rows = D // heads, []
    mask = torch.ones(B, T, T, dtype=torch.bool) if mask is None else mask
    for b in range(B):
        valid, outputs = mask[b].diagonal().tolist(), []
        for h in range(heads):
            mine = slice(h * e, (h + 1) * e)
            x = torch.where(torch.tensor(valid)[:, None], q[b, :, mine], 0.0)
            ok = (
                attended_pairs(x, rotations[:, h], valid, chunk, paper_form) & mask[b] & ~torch.eye(T, dtype=torch.bool)
            )
            ok = torch.where(ok.any(-1, keepdim=True), ok, torch.eye(T, dtype=torch.bool) & mask[b])
            logits = x @ (x / (x.square().sum(-1, keepdim=True) + 1e-12).sqrt()).T / e**0.5
            weights = torch.softmax(
                torch.where(ok.any(-1, keepdim=True), logits.masked_fill(~ok, float("-inf")), 0.0), -1
            )
            outputs.append(torch.where(ok.any(-1, keepdim=True), weights, 0.0) @ v[b, :, mine])
        rows.append(torch.cat(outputs, -1))
    return torch.stack(rows)
