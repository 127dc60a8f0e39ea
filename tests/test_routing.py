"""Test what the contract cannot see of routing.

The published form looks ahead and ours does not; centroids, the auxiliary loss, who is taken.
"""

from __future__ import annotations

import pytest
import torch

from test_reformer import past_change
from tokenmix import MixerError, aux_losses, build_mixer, contrib, functional
from tokenmix.contrib.routing import nearest_clusters, on_sphere
from tokenmix.testing import check_mixer, masking, subject

SMALL = {"heads": 2, "clusters": 3, "window": 4, "seed": 3}


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_the_strict_form_does_not_look_ahead(size):
    mixer = build_mixer("routing", 16, causal=True, **SMALL)
    assert max(past_change(mixer, 100, p, size) for p in (1, 7, 50, 99)) <= 1e-6


def test_the_paper_form_looks_ahead():
    """Check that the paper's form looks ahead, as routing-transformer does.

    Later tokens push earlier ones out of a centroid's choice (measured there: as large as the output).
    """
    mixer = build_mixer("routing", 16, causal=True, paper_form=True, **SMALL)
    assert past_change(mixer, 100, 50, 1.0) > 0.1


def test_the_paper_form_keeps_every_other_promise():
    some = [
        "equals_reference",
        "accurate_on_adversarial_keys",
        "masked_keys_have_no_influence",
        "padded_equals_shorter",
        "subset_equals_masked",
    ]
    some += ["rows_are_independent", "nothing_to_attend", "differentiable_twice", "refuses_what_it_cannot"]
    check_mixer("routing", {**SMALL, "paper_form": True, "causal": True}, promises=some)


def test_the_paper_form_does_not_stream():
    mixer = build_mixer("routing", 16, causal=True, paper_form=True, **SMALL)
    assert not mixer.capabilities.streaming
    with pytest.raises(MixerError, match="looks ahead"):
        mixer.init_state(1)


@pytest.mark.parametrize("seed", [1, 2])
def test_past_and_present_reach(seed):
    """Check that the promise that is waived in general is kept where every token has company.

    With two clusters and two heads every token here has.
    """
    masking.past_reaches_present(
        subject("routing", {"heads": 2, "clusters": 2, "window": 3, "seed": seed, "causal": True})
    )


@pytest.mark.parametrize("causal", [False, True])
def test_one_cluster_that_holds_all_is_softmax_attention(causal):
    torch.manual_seed(0)
    q, v = torch.randn(2, 20, 8).double(), torch.randn(2, 20, 8).double()
    x = on_sphere(q, 2).transpose(1, 2).flatten(2)
    want = functional.attention(x, x, v, heads=2, causal=causal)
    y = contrib.routing(q, v, torch.ones(2, 1, 4).double(), heads=2, window=20, causal=causal)
    torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12)


def test_a_token_that_no_centroid_takes_gives_zero():
    torch.manual_seed(0)
    q, v, mu = torch.randn(1, 20, 8), torch.randn(1, 20, 8), torch.randn(1, 2, 8)
    y = contrib.routing(q, v, mu, heads=1, window=3)
    silent = (y == 0).all(-1).sum()
    assert 14 <= int(silent) <= 17  # two centroids take three each, at most six tokens in all


def test_centroids_move_in_train_mode_only():
    mixer, x = build_mixer("routing", 8, causal=True, decay=0.9, **SMALL), torch.randn(2, 12, 8)
    before = mixer.centroids.clone()
    mixer.eval()(x)
    mixer.train().extend(x, mixer.init_state(2))
    assert torch.equal(mixer.centroids, before)
    near = nearest_clusters(mixer.q_proj(x), before, heads=2)
    points = on_sphere(mixer.q_proj(x), 2)
    mixer(x)
    for h in range(2):
        for c in range(3):
            mine = points[:, h][near[:, h] == c]
            want = before[h, c].double() if len(mine) == 0 else 0.9 * before[h, c].double() + 0.1 * mine.mean(0)
            torch.testing.assert_close(mixer.centroids[h, c].double(), want.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_masked_tokens_do_not_move_centroids(causal):
    mask = torch.arange(12) < torch.tensor([[12], [5]])
    found = []
    for size in (1.0, 1e4):
        mixer = build_mixer("routing", 8, causal=causal, **SMALL, qkv_bias=False).train()
        torch.manual_seed(0)
        torch.nn.init.normal_(mixer.q_proj.weight)
        x = torch.randn(2, 12, 8)
        mixer(torch.where(mask[..., None], x, size * x.flip(0)), key_mask=mask)
        found.append(mixer.centroids.clone())
    assert torch.equal(*found)


def test_the_auxiliary_loss_is_the_distance_to_the_centroids():
    mixer, x = build_mixer("routing", 8, causal=True, **SMALL), torch.randn(2, 12, 8)
    mask = torch.arange(12) < torch.tensor([[12], [5]])
    with aux_losses() as losses:
        mixer.eval()(x, key_mask=mask)
    points, near = on_sphere(mixer.q_proj(x), 2), nearest_clusters(mixer.q_proj(x), mixer.centroids, heads=2)
    far = [
        (points[b, h, t] - mixer.centroids[h, near[b, h, t]]).square().mean()
        for b in range(2)
        for h in range(2)
        for t in range(12)
        if mask[b, t]
    ]
    torch.testing.assert_close(losses["routing"].double(), torch.stack(far).mean(), rtol=1e-5, atol=1e-6)
    assert torch.autograd.grad(losses["routing"], mixer.q_proj.weight)[0].abs().max() > 0


def test_centroids_follow_the_tokens():
    """k-means works: the loss falls by the moving average alone."""
    torch.manual_seed(0)
    mixer, kinds = (
        build_mixer("routing", 8, causal=True, heads=1, clusters=3, window=4, decay=0.5, seed=1).train(),
        torch.randn(3, 8),
    )
    x = kinds[torch.randint(3, (4, 30))] + 0.05 * torch.randn(4, 30, 8)
    with aux_losses() as losses:
        for _ in range(12):
            mixer(x)
    assert losses["routing.11"] < 0.5 * losses["routing"]


def test_train_mode_compiles():
    torch._dynamo.reset()
    x = torch.randn(2, 12, 8)
    plain, fast = (build_mixer("routing", 8, causal=True, **SMALL).train() for _ in range(2))
    fast.load_state_dict(plain.state_dict())
    want, got = plain(x), torch.compile(fast, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(fast.centroids, plain.centroids)
    assert not torch.equal(fast.centroids, build_mixer("routing", 8, causal=True, **SMALL).centroids)


@pytest.mark.parametrize("wrong", [{"heads": 3}, {"clusters": 0}, {"window": 0}, {"decay": 1.5}])
def test_refuses(wrong):
    with pytest.raises(MixerError, match=next(iter(wrong))):
        build_mixer("routing", 16, **{**SMALL, **wrong})
