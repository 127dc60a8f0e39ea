"""Nyström attention (Xiong et al. 2021, Algorithm 1) as written, on the valid tokens of each row."""

from __future__ import annotations

import torch
from torch import Tensor


def nystrom(
    q, k, v, taps, *, heads: int, landmarks: int, iterations: int = 6, positions=None, mask: Tensor | None = None
) -> Tensor:
    """Compute softmax(Q K~^T) Z softmax(Q~ K^T) V + conv(V), row by row and head by head."""
    e, rows = q.shape[-1] // heads, []
    for b in range(q.shape[0]):
        valid = [s for s in range(q.shape[1]) if mask is None or bool(mask[b, 0, s])]
        if not valid:
            rows.append(torch.zeros_like(q[b]))
            continue
        position = [s - valid[0] if positions is None else int(positions[b, s]) for s in range(q.shape[1])]
        parts = []
        for h in range(heads):
            qh, kh, vh = (a[b, :, h * e : (h + 1) * e] for a in (q / e**0.5, k, v))
            q_mean, k_mean = _means(qh, kh, [(s, position[s]) for s in valid], landmarks)
            z = _pinv(torch.softmax(q_mean @ k_mean.T, -1), iterations)
            y = torch.softmax(qh @ k_mean.T, -1) @ z @ torch.softmax(q_mean @ kh[valid].T, -1) @ vh[valid]
            parts.append(y + _conv(vh, taps[h], valid, position))
        rows.append(torch.cat(parts, -1))
    return torch.stack(rows)


def _means(q: Tensor, k: Tensor, tokens: list[tuple[int, int]], m: int) -> tuple[Tensor, Tensor]:
    """Return the landmarks: means over the segments floor(p m / L) of positions that hold a token."""
    length = max(p for _, p in tokens) + 1
    groups: dict[int, list[int]] = {}
    for s, p in tokens:
        groups.setdefault(p * m // length, []).append(s)
    order = [groups[j] for j in sorted(groups)]
    return torch.stack([q[g].mean(0) for g in order]), torch.stack([k[g].mean(0) for g in order])


def _pinv(a: Tensor, iterations: int) -> Tensor:
    """Iterate Eq. 11 from Z_0 = A^T / (|A|_1 |A|_inf)."""
    z, one = a.T / (a.abs().sum(0).max() * a.abs().sum(1).max()), torch.eye(len(a), dtype=a.dtype)
    for _ in range(iterations):
        z = 0.25 * z @ (13 * one - a @ z @ (15 * one - a @ z @ (7 * one - a @ z)))
    return z


def _conv(v: Tensor, taps: Tensor, valid: list[int], position: list[int]) -> Tensor:
    """Compute the depthwise skip: sum over valid s of taps[p_s - p_t + size // 2] v_s."""
    rows, half = [], len(taps) // 2
    for t in range(len(v)):
        near = [s for s in valid if 0 <= position[s] - position[t] + half < len(taps)]
        rows.append(sum((taps[position[s] - position[t] + half] * v[s] for s in near), torch.zeros_like(v[0])))
    return torch.stack(rows)
