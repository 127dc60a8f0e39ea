"""Routing attention (Roy et al. 2021, Alg. 1; the causal form of this library) with decisions made token by token."""

from __future__ import annotations

import torch
from torch import Tensor


def normalise_rows(q: Tensor) -> Tensor:
    """Apply LayerNorm without affine to each row of q (T, e)."""
    variance = q.var(-1, unbiased=False, keepdim=True)
    return (q - q.mean(-1, keepdim=True)) / (variance + 1e-6).sqrt()


def similarity(x: Tensor, centroids: Tensor) -> list[list[float]]:
    """Compute x_t . mu_c / |mu_c| for each token t, each centroid c."""
    return [[float(token @ mu / (mu @ mu + 1e-12).sqrt()) for mu in centroids.detach()] for token in x.detach()]


def softmax_over(x: Tensor, v: Tensor, t: int, keys: list[int]) -> Tensor:
    """Sum softmax(x_t . x_s / sqrt(e)) v_s over ``keys``."""
    return torch.softmax(x[keys] @ x[t] / x.shape[-1] ** 0.5, 0) @ v[keys]


def nearest_form(x: Tensor, v: Tensor, near: list[list[float]], mask: Tensor, window: int) -> list[Tensor]:
    """Attend from each token to the last ``window`` tokens of its nearest centroid's cluster, itself included."""
    cluster, seen = [row.index(max(row)) for row in near], mask.tolist()
    outputs = []
    for t in range(len(x)):
        keys = [s for s in range(t + 1) if seen[t][s] and cluster[s] == cluster[t]][-window:]
        outputs.append(softmax_over(x, v, t, keys) if seen[t][t] else 0 * v[t])
    return outputs


def balanced_form(x: Tensor, v: Tensor, near: list[list[float]], mask: Tensor, window: int) -> list[Tensor]:
    """Attend among the ``window`` tokens nearest to each centroid.

    A token gets the mean over the centroids that took it.
    """
    tokens = [t for t in range(len(x)) if mask[t, t]]
    found: list[list[Tensor]] = [[] for _ in x]
    for c in range(len(near[0])):
        taken = sorted(tokens, key=lambda t: (-near[t][c], t))[:window]
        for t in taken:
            found[t].append(softmax_over(x, v, t, [s for s in taken if mask[t, s]]))
    return [torch.stack(y).mean(0) if y else 0 * v[t] for t, y in enumerate(found)]


def routing(
    q: Tensor,
    v: Tensor,
    centroids: Tensor,
    *,
    heads: int,
    window: int,
    paper_form: bool = False,
    causal_taps: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Apply softmax attention on layer-normalised shared queries and keys among tokens of one cluster, head by head."""
    B, T, D = q.shape
    mask = torch.ones(B, T, T, dtype=torch.bool) if mask is None else mask
    form, rows = nearest_form if causal_taps and not paper_form else balanced_form, []
    for b in range(B):
        outputs = []
        for h in range(heads):
            mine = slice(h * D // heads, (h + 1) * D // heads)
            x = normalise_rows(q[b, :, mine])
            outputs.append(torch.stack(form(x, v[b, :, mine], similarity(x, centroids[h]), mask[b], window)))
        rows.append(torch.cat(outputs, -1))
    return torch.stack(rows)
