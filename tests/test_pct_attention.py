"""Offset attention: the paper's equation written out, and what the contract suite does not cover."""

from __future__ import annotations

import math

import torch

import tokenmix
from tokenmix.contrib import pct_attention


def literal(q, k, v, x, scale=1.0):
    """Compute the paper's Eqs. 7 to 9 for one row, by loops over lists of floats."""
    T = len(q)
    e = [[math.exp(scale * sum(a * b for a, b in zip(q[t], k[s], strict=True))) for s in range(T)] for t in range(T)]
    shares = [[e[t][s] / sum(e[u][s] for u in range(T)) for s in range(T)] for t in range(T)]
    weights = [[b / sum(row) for b in row] for row in shares]
    return [[x[t][d] - sum(weights[t][s] * v[s][d] for s in range(T)) for d in range(len(x[0]))] for t in range(T)]


def tensors(T=6, d=2, D=4, dtype=torch.float64):
    torch.manual_seed(0)
    return tuple(torch.randn(1, T, n, dtype=dtype) for n in (d, d, D, D))


def test_equals_the_papers_equations_written_out():
    given = tensors()
    want = torch.tensor(literal(*(a[0].tolist() for a in given), scale=0.7), dtype=torch.float64)
    assert torch.allclose(pct_attention(*given, scale=0.7)[0], want, atol=1e-13)


def test_each_key_is_shared_out_and_each_query_has_weights_of_sum_one():
    q, k, v, x = tensors()
    weights = -pct_attention(q, k, torch.eye(6, dtype=torch.float64)[None], torch.zeros(1, 6, 6, dtype=torch.float64))
    assert torch.allclose(weights.sum(-1), torch.ones(1, 6, dtype=torch.float64))
    shares = torch.softmax(q @ k.mT, 1)
    assert torch.allclose(weights, shares / shares.sum(-1, keepdim=True))


def test_a_query_that_loses_every_key_still_has_weights():
    q, k, v, x = tensors(dtype=torch.float32)
    q[:, 0], k = -300.0, k.abs() + 1
    y = pct_attention(q, k, v, x)
    assert (torch.softmax(q @ k.mT, 1)[:, 0] == 0).all()
    want = pct_attention(*(a.double() for a in (q, k, v, x)))
    assert torch.allclose(y.double(), want, atol=1e-4)


def test_masked_points_do_not_enter_the_statistics():
    mixer, x = tokenmix.build_mixer("pct_attention", dim=8).double(), torch.randn(2, 7, 8, dtype=torch.float64)
    mask = torch.arange(7).expand(2, 7) < 5
    found = []
    for given, masks in ((x, {"key_mask": mask}), (x[:, :5], {})):
        mixer.out_proj.norm.reset_parameters()
        mixer(given, **masks)
        found.append(mixer.out_proj.norm.running_mean.clone())
    assert torch.allclose(*found)
    assert found[0].abs().min() > 0


def test_tied_queries_and_keys_are_one_projection():
    names = [name for name, _ in tokenmix.build_mixer("pct_attention", dim=8, tied=True).named_parameters()]
    assert "q_proj.weight" in names
    assert not any(name.startswith("k_proj") for name in names)
    assert tokenmix.build_mixer("pct_attention", dim=8).q_proj.out_features == 2
