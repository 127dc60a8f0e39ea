"""Spatial-reduction attention (Pyramid Vision Transformer, Wang et al. 2021, Eqs. 1 to 3) as written, cell by cell."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor


def spatial_reduction(
    q,
    v,
    conv,
    norm,
    k_map,
    v_map,
    *,
    heads: int,
    grid=None,
    prefix: int = 0,
    positions=None,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute Attention(Q, SR(K), SR(V)), SR(x) = Norm(Reshape(x, R) W^S).

    Prefix tokens stay as they are; a cell at the edge of a grid lacks some of its tokens.
    """
    outputs = []
    for b in range(q.shape[0]):
        valid = [s for s in range(v.shape[1]) if mask is None or bool(mask[b, 0, s])]
        if not valid:
            outputs.append(torch.zeros_like(q[b]))
            continue
        first = 0 if grid is not None else valid[0]
        position = {s: (s - first if positions is None else int(positions[b, s])) for s in valid}
        rows = [v[b, s] for s in valid if position[s] < prefix or not conv]
        if conv:
            rows += _reduce_cells(v[b], {s: p - prefix for s, p in position.items() if p >= prefix}, conv, norm, grid)
        r = torch.stack(rows)
        outputs.append(_multihead(q[b], r @ k_map[0].T + sum(k_map[1:]), r @ v_map[0].T + sum(v_map[1:]), heads))
    return torch.stack(outputs)


def _reduce_cells(v: Tensor, position: dict[int, int], conv, norm, grid) -> list[Tensor]:
    """Return one normalised vector for each R x .. x R cell that holds a token."""
    weight, bias = conv
    R, spots = weight.shape[-1], None if grid is None else list(product(*(range(n) for n in grid)))
    cells: dict[tuple[int, ...], Tensor] = {}
    for s, p in position.items():
        at = (p,) if spots is None else spots[p]
        cell, tap = tuple(a // R for a in at), tuple(a % R for a in at)
        cells[cell] = cells.get(cell, bias) + weight[(slice(None), slice(None), *tap)] @ v[s]
    centred = [z - z.mean() for _, z in sorted(cells.items(), key=lambda item: item[0])]
    return [z / (z.square().mean() + 1e-5).sqrt() * norm[0] + norm[1] for z in centred]


def _multihead(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    d = q.shape[-1] // heads
    parts = [slice(i * d, (i + 1) * d) for i in range(heads)]
    return torch.cat([torch.softmax(q[:, p] @ k[:, p].T / d**0.5, -1) @ v[:, p] for p in parts], -1)
