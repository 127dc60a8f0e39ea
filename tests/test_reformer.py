"""Reformer: what the contract cannot see. The published form looks ahead and ours does not; rounds, chunks, lengths."""

from __future__ import annotations

import pytest
import torch

from tokenmix import MixerError, build_mixer, contrib
from tokenmix.contrib.reformer import hash_buckets
from tokenmix.testing import check_mixer, masking, subject

SMALL = {"heads": 2, "buckets": 4, "chunk": 2, "rounds": 2, "seed": 3}


def past_change(mixer, T: int, p: int, size: float) -> float:
    """How far outputs before p move, of their largest, when the tokens from p on are replaced."""
    mixer.eval()
    torch.manual_seed(p)
    x = torch.randn(2, T, mixer.dim)
    other = x.clone()
    other[:, p:] = size * torch.randn(2, T - p, mixer.dim)
    with torch.no_grad():
        a, b = mixer(x)[:, :p], mixer(other)[:, :p]
    return float((a - b).abs().max() / a.abs().max())


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_the_strict_form_does_not_look_ahead(size):
    mixer = build_mixer("reformer", 16, causal=True, **SMALL)
    assert max(past_change(mixer, 100, p, size) for p in (1, 7, 50, 99)) <= 1e-6


def test_the_paper_form_looks_ahead():
    """Check that the paper's form looks ahead, as reformer-pytorch and the Hugging Face decoder do.

    Later tokens move the borders of the chunks (measured there: as large as the output).
    """
    mixer = build_mixer("reformer", 16, causal=True, paper_form=True, **SMALL)
    assert past_change(mixer, 100, 50, 1.0) > 0.1


@pytest.mark.parametrize("causal", [False, True])
def test_the_paper_form_keeps_every_other_promise(causal):
    some = [
        "equals_reference",
        "masked_keys_have_no_influence",
        "padded_equals_shorter",
        "subset_equals_masked",
    ]
    some += ["rows_are_independent", "nothing_to_attend", "differentiable_twice", "refuses_what_it_cannot"]
    check_mixer("reformer", {**SMALL, "paper_form": True, "causal": causal}, promises=some)


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_paper_form_is_accurate(causal):
    """Compare with the reference, whose loops take 25 s."""
    check_mixer("reformer", {**SMALL, "paper_form": True, "causal": causal}, promises=["accurate_on_adversarial_keys"])


def test_the_paper_form_does_not_stream():
    mixer = build_mixer("reformer", 16, causal=True, paper_form=True, **SMALL)
    assert not mixer.capabilities.streaming
    with pytest.raises(MixerError, match="looks ahead"):
        mixer.init_state(1)


@pytest.mark.parametrize("seed", [8, 9])
def test_past_and_present_reach(seed):
    """Where tokens have company in some round, the promise that is waived in general is kept."""
    masking.past_reaches_present(
        subject("reformer", {"heads": 2, "buckets": 2, "chunk": 2, "rounds": 3, "seed": seed, "causal": True})
    )


@pytest.mark.parametrize("causal", [False, True])
def test_a_round_twice_is_a_round_once(causal):
    torch.manual_seed(0)
    q, v, r = torch.randn(2, 30, 8).double(), torch.randn(2, 30, 8).double(), torch.randn(1, 2, 4, 2).double()
    shape = {"heads": 2, "chunk": 3, "causal": causal}
    once = contrib.reformer(q, v, r, **shape)
    torch.testing.assert_close(contrib.reformer(q, v, r.expand(3, -1, -1, -1), **shape), once, rtol=1e-12, atol=1e-12)


def test_itself_only_without_company():
    """With others to attend, a token's own value has no part in its output; alone, it is its output."""
    torch.manual_seed(0)
    q, v = torch.randn(1, 1, 8).double().expand(1, 5, 8), torch.randn(1, 5, 8).double()
    y = contrib.reformer(q, v, torch.randn(1, 2, 4, 2).double(), heads=2, chunk=9, causal=True)
    torch.testing.assert_close(y[0, 0], v[0, 0])
    torch.testing.assert_close(y[0, 4], v[0, :4].mean(0))


def test_chunks_are_counted_inside_the_bucket():
    """Equal tokens fill one bucket: token t of chunk t // m attends from the start of the chunk before."""
    torch.manual_seed(0)
    q, v = torch.ones(1, 9, 4).double(), torch.randn(1, 9, 4).double()
    y = contrib.reformer(q, v, torch.randn(1, 1, 4, 1).double(), heads=1, chunk=3, causal=True)
    torch.testing.assert_close(y[0, 7], v[0, 3:7].mean(0))
    both = contrib.reformer(q, v, torch.randn(1, 1, 4, 1).double(), heads=1, chunk=3)
    torch.testing.assert_close(both[0, 4], v[0, [0, 1, 2, 3, 5]].mean(0))


def test_any_length_works():
    """The public versions ask for a multiple of twice the chunk, and pad with tokens that are attended."""
    mixer = build_mixer("reformer", 16, causal=True, **SMALL)
    x = torch.randn(1, 23, 16)
    whole = mixer(x)
    for T in range(1, 23):
        torch.testing.assert_close(mixer(x[:, :T]), whole[:, :T], rtol=1e-5, atol=1e-6)


def test_every_dtype_hashes_alike():
    mixer = build_mixer("reformer", 16, **SMALL)
    x = torch.randn(2, 50, 16).bfloat16()
    want = hash_buckets(x.double(), mixer.rotations.double(), heads=2)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(hash_buckets(x.to(dtype), mixer.rotations.to(dtype), heads=2), want)


def test_a_seed_fixes_the_rotations():
    torch.manual_seed(1)
    a = build_mixer("reformer", 16, **SMALL)
    torch.manual_seed(2)
    b = build_mixer("reformer", 16, **SMALL)
    c, d = (build_mixer("reformer", 16, **{**SMALL, "seed": None}) for _ in range(2))
    assert torch.equal(a.rotations, b.rotations)
    assert not torch.equal(c.rotations, d.rotations)


@pytest.mark.parametrize("wrong", [{"heads": 3}, {"buckets": 3}, {"buckets": 0}, {"chunk": 0}, {"rounds": 0}])
def test_refuses(wrong):
    with pytest.raises(MixerError, match=next(iter(wrong))):
        build_mixer("reformer", 16, **{**SMALL, **wrong})
