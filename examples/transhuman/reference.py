"""The equations of TransHuman as the paper writes them, in loops, for tests in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def encode_place(place: list[float], frequencies: int, *, raw: bool, pi: bool) -> list[float]:
    """[x; sin(2^k x), cos(2^k x) for k < frequencies], with pi x in place of x where wanted."""
    found = list(place) if raw else []
    for k in range(frequencies):
        scale = 2.0**k * (math.pi if pi else 1.0)
        found += [math.sin(scale * x) for x in place]
        found += [math.cos(scale * x) for x in place]
    return found


def paint_clusters(painted: Tensor, visible: Tensor, labels: Tensor, clusters: int) -> Tensor:
    """t_c = 1 / |c| sum_{i in c} visible_i F_i."""
    tokens = torch.zeros(clusters, painted.shape[-1], dtype=painted.dtype)
    for c in range(clusters):
        members = [i for i in range(len(labels)) if labels[i] == c]
        for i in members:
            if visible[i]:
                tokens[c] += painted[i] / len(members)
    return tokens


def read_fields(
    point: Tensor, centres: Tensor, turns: Tensor, tokens: Tensor, *, neighbours: int, temperature: float
) -> Tensor:
    """h(p) = sum_{k in K nearest} w_k [t_k; PE((p - c_k)^T R_k)], w = softmax_k(-|p - c_k| / temperature)."""
    away = [math.sqrt(sum(float(d) ** 2 for d in point - c)) for c in centres]
    nearest = sorted(range(len(away)), key=lambda k: away[k])[:neighbours]
    total = sum(math.exp(-away[k] / temperature) for k in nearest)
    found = torch.zeros(tokens.shape[-1] + 63, dtype=tokens.dtype)
    for k in nearest:
        local = [sum(float((point - centres[k])[a] * turns[k, a, b]) for a in range(3)) for b in range(3)]
        place = torch.tensor(encode_place(local, 10, raw=True, pi=False), dtype=tokens.dtype)
        found += math.exp(-away[k] / temperature) / total * torch.cat([tokens[k], place])
    return found


def integrate(queries: Tensor, keys: Tensor, own: Tensor, values: Tensor) -> Tensor:
    """y_u = own_u + sum_v softmax_v(q_u . k_v / sqrt(e)) values_v, for the views u of one point."""
    found = own.clone()
    for u in range(len(queries)):
        scores = [float(queries[u] @ keys[v]) / math.sqrt(queries.shape[1]) for v in range(len(keys))]
        total = sum(math.exp(s - max(scores)) for s in scores)
        for v in range(len(keys)):
            found[u] += math.exp(scores[v] - max(scores)) / total * values[v]
    return found


def march(density: list[float], colours: Tensor, step: float) -> Tensor:
    """C = sum_i T_i (1 - exp(-s_i d)) c_i, T_i = exp(-sum_{j < i} s_j d)."""
    found, passed = torch.zeros(3, dtype=colours.dtype), 0.0
    for s, colour in zip(density, colours, strict=True):
        found += math.exp(-passed) * (1 - math.exp(-s * step)) * colour
        passed += s * step
    return found
