"""What is special to induced set attention: order does not matter, pooling, and the paper's blocks written out."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import layer_norm

from tokenmix import MixerError, build_mixer, contrib, functional
from tokenmix.contrib.set import PMA

MASK = torch.tensor([[1, 1, 0, 1, 0, 1, 1], [0, 1, 1, 1, 1, 0, 1]]).bool()


def sets() -> torch.Tensor:
    return torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("inner", ["attention", "mab"])
@pytest.mark.parametrize("mask", [None, MASK])
def test_induced_attention_is_permutation_equivariant(inner, mask):
    torch.manual_seed(0)
    mixer, x, order = build_mixer("set", 8, points=3, heads=2, inner=inner).double(), sets(), torch.randperm(7)
    moved = mixer(x[:, order], key_mask=None if mask is None else mask[:, order])
    torch.testing.assert_close(moved, mixer(x, key_mask=mask)[:, order], rtol=1e-10, atol=1e-10)


def test_attention_the_sab_row_is_permutation_equivariant():
    torch.manual_seed(0)
    mixer, x, order = build_mixer("attention", 8, heads=2).double(), sets(), torch.randperm(7)
    torch.testing.assert_close(mixer(x[:, order]), mixer(x)[:, order], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mask", [None, MASK])
def test_pooling_is_permutation_invariant(mask):
    torch.manual_seed(0)
    pool, x, order = PMA(8, seeds=3, heads=2).double(), sets(), torch.randperm(7)
    moved = pool(x[:, order], key_mask=None if mask is None else mask[:, order])
    assert moved.shape == (2, 3, 8)
    torch.testing.assert_close(moved, pool(x, key_mask=mask), rtol=1e-10, atol=1e-10)


def test_pooling_ignores_what_is_masked_and_survives_an_empty_set():
    torch.manual_seed(0)
    pool, x = PMA(8, seeds=2, heads=2).double(), sets()
    short = torch.stack([x[0, :4], x[1, :4]])
    mask = (torch.arange(7) < 4).expand(2, 7)
    other = torch.where(mask[..., None], x, 1e4 * torch.randn_like(x)).requires_grad_()
    y = pool(other, key_mask=mask)
    torch.testing.assert_close(y, pool(short), rtol=1e-10, atol=1e-10)
    (grad,) = torch.autograd.grad(y.square().sum(), other)
    assert (grad[:, 4:] == 0).all()
    assert torch.isfinite(pool(x, key_mask=torch.zeros_like(mask))).all()


def test_pooling_is_the_papers_block_written_out():
    torch.manual_seed(0)
    pool, x = PMA(8, seeds=3, heads=2).double(), sets()
    z = pool.feed_in(x).relu()
    h = pool.seeds + functional.attention(pool.seeds.expand(2, -1, -1), pool.k_proj(z), pool.v_proj(z), heads=2)
    h = layer_norm(h, (8,), pool.norm_1.weight, pool.norm_1.bias)
    want = layer_norm(h + pool.feed_out(h).relu(), (8,), pool.norm_2.weight, pool.norm_2.bias)
    torch.testing.assert_close(pool(x), want, rtol=1e-12, atol=1e-12)


def test_pooling_builds_again_and_refuses_wrong_shapes():
    torch.manual_seed(3)
    direct = PMA(8, seeds=2, heads=2)
    with torch.device("meta"):
        late = PMA(8, seeds=2, heads=2)
    late = late.to_empty(device="cpu")
    torch.manual_seed(3)
    late.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(direct.parameters(), late.parameters(), strict=True))
    for call in (
        lambda: direct(torch.randn(2, 7, 9)),
        lambda: direct(torch.randn(2, 7, 8), key_mask=torch.ones(2, 6, dtype=torch.bool)),
        lambda: PMA(8, heads=3),
    ):
        with pytest.raises(MixerError, match="PMA"):
            call()


def test_the_inner_block_is_mab_of_the_points():
    """H = MAB(I, X), I as its own queries; then the tokens attend H."""
    torch.manual_seed(0)
    mixer, x = build_mixer("set", 8, points=3, heads=2, inner="mab").double(), sets()
    a = mixer.norm_1(
        mixer.points + functional.attention(mixer.points.expand(2, -1, -1), mixer.k_proj(x), mixer.v_proj(x), heads=2)
    )
    h = mixer.norm_2(a + mixer.feed(a).relu())
    want = mixer.out_proj(functional.attention(mixer.q_proj(x), mixer.point_k_proj(h), mixer.point_v_proj(h), heads=2))
    torch.testing.assert_close(mixer(x), want, rtol=1e-10, atol=1e-10)


def test_the_operator_on_the_values_has_rank_m():
    q, k, points = (
        torch.randn(*s, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        for i, s in enumerate(((1, 8), (1, 8), (3,)))
    )
    one = torch.eye(8, dtype=torch.float64)
    operator = contrib.induced_set(q, k, one[None], points, (one, one), heads=1)[0]
    assert torch.linalg.matrix_rank(operator, rtol=1e-9) == 3


def test_parameters():
    D, m = 16, 5
    assert sum(p.numel() for p in build_mixer("set", D, points=m).parameters()) == 6 * (D * D + D) + m * D
    assert (
        sum(p.numel() for p in build_mixer("set", D, points=m, inner="mab").parameters())
        == 7 * (D * D + D) + 4 * D + m * D
    )
    assert sum(p.numel() for p in PMA(D, seeds=4).parameters()) == 4 * (D * D + D) + 4 * D + 4 * D
