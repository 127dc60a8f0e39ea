"""Test what is special to Nyström attention.

It becomes softmax attention, its inverse is a matrix's own, its segments are a row's own.
"""

from __future__ import annotations

import pytest
import torch

from tokenmix import build_mixer, contrib, functional
from tokenmix.contrib.nystrom import inverse, segments


def qkv(T: int, D: int = 8, B: int = 2, size: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(B, T, D, generator=generator, dtype=torch.float64) for _ in range(3))
    return [size * q, size * k, v]


NONE = torch.zeros(2, 0, dtype=torch.float64)


@pytest.mark.parametrize("m", [9, 20])
def test_with_a_landmark_per_token_it_approaches_softmax_attention(m):
    q, k, v = qkv(9, size=2.0)
    want = functional.attention(q, k, v, heads=2)
    errors = [
        float((contrib.nystrom(q, k, v, NONE, heads=2, landmarks=m, iterations=n) - want).abs().max())
        for n in (2, 6, 12, 30)
    ]
    assert errors[-1] < 1e-9
    assert errors[0] > errors[1] > errors[2] > errors[3]


def test_a_row_shorter_than_the_landmarks_gets_one_for_each_token():
    q, k, v = qkv(9, size=2.0)
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    y = contrib.nystrom(q, k, v, NONE, heads=2, landmarks=9, iterations=30, key_mask=mask)
    torch.testing.assert_close(
        y[1, :4], functional.attention(q[1:, :4], k[1:, :4], v[1:, :4], heads=2)[0], rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize(("T", "m"), [(10, 4), (12, 4), (3, 4), (64, 64), (7, 1), (100, 33)])
def test_segments_part_the_row_evenly(T, m):
    member = segments(1, T, m, None, None, torch.device("cpu"))[0]
    assert (member.sum(0) == 1).all(), "each position stands in one segment"
    sizes = member.sum(1)
    assert sizes.max() - sizes.min() <= 1
    owner = member.double().argmax(0)
    assert owner.tolist() == [p * m // T for p in range(T)]


def test_segments_follow_the_rows_own_length():
    """nystrom-attention pads in front to a multiple of the landmarks, so that segments depend on the batch's length."""
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 8:], mask[1, :4] = False, False
    member = segments(2, 12, 4, None, mask, torch.device("cpu"))
    assert [member[0, j].nonzero().flatten().tolist() for j in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [member[1, j].nonzero().flatten().tolist() for j in range(4)] == [[4, 5], [6, 7], [8, 9], [10, 11]]


def test_the_inverse_is_the_pseudo_inverse_and_each_matrix_has_its_own_start():
    """The paper's code divides by the largest norm in the batch: a row's inverse then depends on the other rows."""
    a = (3.0 * torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).softmax(-1)
    torch.testing.assert_close(inverse(a, 40), torch.linalg.pinv(a), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(inverse(a, 3)[1, 2], inverse(a[1, 2], 3), rtol=1e-12, atol=1e-12)
    shared = torch.linalg.pinv(torch.diag_embed(torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)))
    torch.testing.assert_close(inverse(torch.diag(torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)), 12), shared)


def test_the_skip_is_a_depthwise_convolution_of_the_values():
    q, k, v = qkv(11)
    taps = torch.randn(2, 5, dtype=torch.float64)
    plain, more = (contrib.nystrom(q, k, v, t, heads=2, landmarks=3) for t in (NONE, taps))
    want = torch.nn.functional.conv1d(v.mT, taps.repeat_interleave(4, 0)[:, None], padding=2, groups=8).mT
    torch.testing.assert_close(more - plain, want, rtol=1e-10, atol=1e-10)


def test_parameters():
    four = 4 * (64 * 64 + 64)
    assert sum(p.numel() for p in build_mixer("nystrom", 64).parameters()) == four
    assert sum(p.numel() for p in build_mixer("nystrom", 64, conv_kernel=33).parameters()) == four + 8 * 33
