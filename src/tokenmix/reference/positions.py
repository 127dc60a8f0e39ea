"""Biases for pairs of positions as written in their papers, added to the logits of softmax attention or w of AFT.

t (B, T) and s (B, S) are the positions of queries and keys, H the number of heads, e the features of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor


def alibi(t: Tensor, s: Tensor, *, slopes: Tensor) -> Tensor:
    """Compute -m_h |t - s| (Press et al. 2021, arXiv 2108.12409), slopes (H,) m_h: (B, H, T, S)."""
    return -slopes.view(-1, 1, 1) * _distance(t, s).abs()


def kerple(t: Tensor, s: Tensor, *, r1: Tensor, r2: Tensor, kind: str = "log") -> Tensor:
    """Compute -r1 log(1 + r2 |t - s|), or -r1 |t - s|^r2 (Chi et al. 2022, arXiv 2205.09921), r1 and r2 (H,)."""
    r1, r2, n = r1.view(-1, 1, 1), r2.view(-1, 1, 1), _distance(t, s).abs()
    return -r1 * ((1 + r2 * n).log() if kind == "log" else n**r2)


def sandwich(t: Tensor, s: Tensor, *, heads: int, dim: int = 128) -> Tensor:
    """Compute c_h times the product of sinusoids, less that at distance 0 (Chi et al. 2023, arXiv 2212.10356).

    c_h = 8 h / (H dim) is our factor of head h = 1 .. H.
    """
    waves = torch.zeros_like(_distance(t, s))
    for i in range(1, dim // 2 + 1):
        waves = waves + (_distance(t, s) * 10_000 ** (-2 * i / dim)).cos() - 1
    return (
        torch.tensor([8 * h / (heads * dim) for h in range(1, heads + 1)], dtype=torch.float64).view(-1, 1, 1) * waves
    )


def fire(
    t: Tensor,
    s: Tensor,
    *,
    c: Tensor,
    limit: Tensor,
    up: Tensor,
    up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
) -> Tensor:
    """Compute f(psi(t - s) / psi(max(L, t))), psi(x) = log(c x + 1) (Li et al. 2023, arXiv 2310.04418).

    f is an MLP with ReLU, up and up_bias (hidden,), down (H, hidden), down_bias (H,); L is ``limit``. As in the
    authors' code, 1e-6 is added to the denominator.
    """
    reach = torch.maximum(t.double(), limit.abs())[:, None, :, None]
    ratio = (c.abs() * _distance(t, s).abs() + 1).log() / ((c.abs() * reach + 1).log() + 1e-6)
    hidden = (ratio[..., None] * up + up_bias).clamp_min(0)
    return (hidden @ down.T + down_bias)[:, 0].movedim(-1, 1)


def shaw(q: Tensor, t: Tensor, s: Tensor, *, vectors: Tensor) -> Tensor:
    """Compute q_t a_r, r = clip(t - s, -n, n) (Shaw et al. 2018, arXiv 1803.02155), vectors (2 n + 1, e) a.

    q (B, H, T, e) are the queries times the scale of the logits.
    """
    n = len(vectors) // 2
    far = (t[:, :, None] - s[:, None]).clamp(-n, n) + n
    return torch.einsum("bhte,btse->bhts", q, vectors[far].expand(len(q), -1, -1, -1))


def cope(q: Tensor, k: Tensor, seen: Tensor, *, vectors: Tensor) -> Tensor:
    """Compute q_t e(p_ts), p_ts = sum_{j = s}^t sigma(q_t k_j) (Golovneva et al. 2024, arXiv 2405.18719).

    q (B, H, T, e) times the scale, k (B, H, S, e), seen (B, T, S): the pairs that are attended. e(p) interpolates
    vectors (n, e), of which the last serves all larger p.
    """
    gates = (q @ k.mT).sigmoid() * seen[:, None]
    p = torch.stack([gates[..., j:].sum(-1) for j in range(gates.shape[-1])], -1).clamp_max(len(vectors) - 1)
    hats = (1 - (p[..., None] - torch.arange(len(vectors))).abs()).clamp_min(0)
    return torch.einsum("bhte,ne,bhtsn->bhts", q, vectors, hats)


def cape(q: Tensor, k: Tensor, bias: Tensor, *, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    """Compute b + f(q k, b) (Zheng et al. 2024, arXiv 2405.14722), bias (B, H, T, S) b.

    f is an MLP with leaky ReLU over the logits and biases of all heads, up (hidden, 2 H), down (H, hidden).
    """
    logits = q @ k.mT
    hidden = torch.cat([logits, bias.expand_as(logits)], 1).movedim(1, -1) @ up.T + up_bias
    hidden = torch.where(hidden > 0, hidden, 0.01 * hidden)
    return bias + (hidden @ down.T + down_bias).movedim(-1, 1)


def _distance(t: Tensor, s: Tensor) -> Tensor:
    """Return t - s in float64, (B, 1, T, S)."""
    return (t[:, :, None] - s[:, None])[:, None].double()
