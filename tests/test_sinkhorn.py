"""Sinkhorn: what the contract cannot see. SortCut, the permutation itself, its causal form, Gumbel noise."""

from __future__ import annotations

import pytest
import torch

from test_reformer import past_change
from tokenmix import MixerError, build_mixer, contrib, functional
from tokenmix.contrib.sinkhorn import lay_out, permutation
from tokenmix.testing import PROMISES, check_mixer

SMALL = {"heads": 2, "block": 4, "iterations": 4}


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_the_causal_form_does_not_look_ahead(size):
    mixer = build_mixer("sinkhorn", 16, causal=True, **SMALL)
    assert max(past_change(mixer, 60, p, size) for p in (1, 3, 4, 5, 30, 59)) <= 1e-6


def test_sortcut_keeps_every_promise():
    cut = {**SMALL, "block": 3, "iterations": 2, "sortcut": 2}
    check_mixer("sinkhorn", cut, promises=[p for p in PROMISES if p not in ("compiles", "exports", "exports_to_onnx")])


def test_sortcut_has_no_causal_form():
    with pytest.raises(MixerError, match="sortcut"):
        build_mixer("sinkhorn", 16, causal=True, sortcut=1)


def test_sortcut_attends_the_first_sorted_blocks_only():
    """With block 0 sorted to itself by a large A, SortCut 1 sees the first block and nothing else."""
    torch.manual_seed(0)
    q = k = torch.eye(8)[torch.arange(4).repeat_interleave(2)][None].double()
    v = torch.randn(1, 8, 8).double()
    A = 1e4 * torch.eye(8)[None].double()
    y = contrib.sinkhorn(q, k, v, A, heads=1, block=2, iterations=3, temperature=1.0, sortcut=1)
    weights = torch.softmax(q @ k[:, :2].mT / 8**0.5, -1)
    torch.testing.assert_close(y, weights @ v[:, :2])


def permutation_of(x: torch.Tensor, causal: bool, iterations: int) -> torch.Tensor:
    positions = torch.arange(x.shape[2]).expand(x.shape[0], -1)
    layout = lay_out(positions, torch.ones_like(positions, dtype=torch.bool), block=2, count=x.shape[2] // 2)
    A = torch.eye(x.shape[-1])[None]
    return permutation(
        layout.arrange(x),
        layout.arrange(x.flip(2)),
        A,
        layout.there,
        iterations=iterations,
        temperature=0.5,
        gumbel=False,
        causal=causal,
    )[0]


def test_the_permutation_is_doubly_stochastic():
    torch.manual_seed(0)
    P = permutation_of(torch.randn(2, 1, 12, 4), causal=False, iterations=60)
    torch.testing.assert_close(P.sum(-1), torch.ones(2, 1, 6).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(P.sum(-2), torch.ones(2, 1, 6).double(), rtol=0, atol=1e-6)


def test_the_causal_permutation_hangs_on_earlier_blocks_alone():
    torch.manual_seed(0)
    x = torch.randn(2, 1, 12, 4)
    P = permutation_of(x, causal=True, iterations=5)
    assert bool((P.triu() == 0).all())
    assert bool((P.tril(-1)[..., 1:, :].sum(-1) > 0).all())
    for i in range(1, 6):
        q, k = x.clone(), x.flip(2)
        q[:, :, 2 * i :], k[:, :, 2 * i :] = 1e4, -1e4
        other = permutation_of_pair(q, k)
        torch.testing.assert_close(other[:, :, : i + 1], P[:, :, : i + 1], rtol=0, atol=0)


def permutation_of_pair(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(q.shape[2]).expand(q.shape[0], -1)
    layout = lay_out(positions, torch.ones_like(positions, dtype=torch.bool), block=2, count=q.shape[2] // 2)
    A = torch.eye(q.shape[-1])[None]
    return permutation(
        layout.arrange(q), layout.arrange(k), A, layout.there, iterations=5, temperature=0.5, gumbel=False, causal=True
    )[0]


@pytest.mark.parametrize("causal", [False, True])
def test_one_block_is_softmax_attention(causal):
    """Sorted to itself it counts twice, which softmax does not see; causal, nothing is brought to it."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 7, 8).double()
    y = contrib.sinkhorn(
        q, k, v, torch.randn(2, 4, 4).double(), heads=2, block=9, iterations=3, temperature=0.7, causal=causal
    )
    torch.testing.assert_close(y, functional.attention(q, k, v, heads=2, causal=causal), rtol=1e-12, atol=1e-12)


def test_a_hard_permutation_brings_one_block():
    """Blocks that ask for their neighbour, sharply, attend themselves and that neighbour."""
    torch.manual_seed(0)
    k, v = torch.eye(8)[torch.arange(4).repeat_interleave(2)][None].double(), torch.randn(1, 8, 8).double()
    q = k.roll(2, 1)
    y = contrib.sinkhorn(q, k, v, 1e4 * torch.eye(8)[None].double(), heads=1, block=2, iterations=3, temperature=1.0)
    pair = [4, 5, 2, 3]  # queries of block 2 ask for block 1
    want = torch.softmax(q[:, 4:6] @ k[:, pair].mT / 8**0.5, -1) @ v[:, pair]
    torch.testing.assert_close(y[:, 4:6], want)


def test_gumbel_noise_is_for_training_only():
    mixer, x = build_mixer("sinkhorn", 16, gumbel=True, **SMALL), torch.randn(2, 20, 16)
    assert torch.equal(mixer.eval()(x), mixer(x))
    assert not torch.equal(mixer.train()(x), mixer(x))
    without = build_mixer("sinkhorn", 16, **SMALL).train()
    assert torch.equal(without(x), without(x))


def test_nothing_depends_on_the_length():
    """Check that no parameter depends on the length: ours has e x e numbers per head.

    The paper's sorting net gives one logit per block and so fixes the longest sequence.
    """
    mixer = build_mixer("sinkhorn", 16, **SMALL)
    assert sum(p.numel() for p in mixer.parameters()) == 4 * (16 * 16 + 16) + 2 * 8 * 8
    for T in (1, 3, 4, 5, 37):
        assert mixer(torch.randn(1, T, 16)).shape == (1, T, 16)


def test_positions_far_apart_stream():
    """Explicit positions open blocks of their own, also in a stream."""
    torch.manual_seed(0)
    mixer, x = build_mixer("sinkhorn", 16, causal=True, **SMALL), torch.randn(1, 9, 16)
    places = torch.tensor([[0, 9, 10, 40, 41, 90, 200, 201, 1000]])
    state, outputs = mixer.init_state(1), []
    for a, b in ((0, 3), (3, 4), (4, 9)):
        y, state = mixer.extend(x[:, a:b], state, positions=places[:, a:b])
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), mixer(x, positions=places), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "wrong", [{"heads": 3}, {"block": 0}, {"iterations": -1}, {"temperature": 0.0}, {"sortcut": 0}]
)
def test_refuses(wrong):
    with pytest.raises(MixerError, match=next(iter(wrong))):
        build_mixer("sinkhorn", 16, **{**SMALL, **wrong})
