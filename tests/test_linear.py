"""Test what the contract suite cannot see of Linear attention, Performer and RFA.

Identities, statistics of random features, faults of other versions.
"""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

from tokenmix import MixerError, build_mixer, functional, reference
from tokenmix.functional.linear import LOG_FEATURES
from tokenmix.functional.performer import orthogonal_features
from tokenmix.functional.sums.features import SCAN
from tokenmix.testing import PROMISES, run_promise, subject

NEEDED = [
    "equals_reference",
    "accurate_on_adversarial_keys",
    "finite_at_large_keys",
    "nothing_to_attend",
    "future_cannot_reach_past",
]


def noise(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seeded(seed, *args, **options):
    torch.manual_seed(seed)
    return orthogonal_features(*args, **options)


def softmax_attention(q, k, v):
    return functional.attention(q, k, v, heads=1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", ["relu", "squared_relu"])
@pytest.mark.parametrize("promise", [*NEEDED, "streaming_equals_parallel", "merge_joins_stretches"])
def test_sparse_features_keep_the_contract(feature, causal, promise):
    """A relu pair may weigh exactly 0, so the token before need not reach an output; the rest holds."""
    s = subject("linear", {"heads": 1, "feature": feature, "causal": causal})
    result = run_promise(s, promise, PROMISES[promise])
    assert result.status in ("kept", "not applicable"), str(result)


@pytest.mark.parametrize("feature", ["relu", "squared_relu"])
@pytest.mark.parametrize("causal", [False, True])
def test_features_that_are_all_zero_give_zero(feature, causal):
    q, k, v = noise(1, 40, 8), noise(1, 40, 8, seed=1), noise(1, 40, 8, seed=2)
    for which in (0, 1):
        args = [a.clone().requires_grad_() for a in (q, k, v)]
        with torch.no_grad():
            args[which].copy_(-args[which].abs())
        y = functional.linear_attention(*args, heads=2, feature=feature, causal=causal)
        assert (y == 0).all()
        assert all(torch.isfinite(g).all() for g in torch.autograd.grad(y.sum(), args))


@pytest.mark.parametrize("T", [1, SCAN - 1, SCAN, SCAN + 1, SCAN**2, SCAN**2 + 1, 2 * SCAN**2 + 7])
def test_blocks_and_groups_of_blocks(T):
    """Every border of the blocked causal form, at keys whose maxima rise and fall by hundreds."""
    q, k, v = noise(1, T, 4), noise(1, T, 4, seed=1, scale=200.0), noise(1, T, 4, seed=2)
    W, sigma, gate = noise(2, 3, 2, seed=3), noise(2, 2, seed=4), noise(1, T, 2, seed=5)
    past = torch.ones(1, T, T, dtype=torch.bool).tril()
    pairs = [
        (functional.linear_attention, reference.linear_attention, (q, k, v), 1e-12),
        (functional.performer, reference.performer, (q, k, v, W), 1e-9),  # logits of 1e5 leave this much of float64
        (functional.rfa, reference.rfa, (q, k, v, W, sigma, gate), 1e-9),
    ]
    for ours, theirs, args, tol in pairs:
        torch.testing.assert_close(
            ours(*args, heads=2, causal=True), theirs(*args, heads=2, mask=past), rtol=tol, atol=tol
        )


def test_linear_attention_is_exact_where_float32_features_vanish():
    """Check that the weights are those of softmax where float32 features vanish.

    Computed as written, elu(-100) + 1 is 0 in float32, and every weight with it; here it is exp(-100).
    """
    q, k, v = (
        torch.zeros(1, 6, 1),
        torch.tensor([-1000.0, -1001, -1002, -1003, -1004, -2000])[None, :, None],
        torch.arange(6.0)[None, :, None],
    )
    assert float((F.elu(k) + 1).abs().max()) == 0
    want = torch.softmax(k[0, :, 0].double(), 0) @ v[0].double()
    torch.testing.assert_close(functional.linear_attention(q, k, v, heads=1)[0, -1].double(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        functional.linear_attention(q, k, v, heads=1, causal=True)[0, -1].double(), want, rtol=1e-6, atol=0
    )


def test_exp_features_of_width_one_are_aft_simple_without_a_gate():
    """With one feature per head phi(q) cancels: what is left is AFT-simple's softmax along time."""
    q, k, v = (noise(2, 50, 8, seed=i) for i in range(3))
    for causal in (False, True):
        got = functional.linear_attention(q, k, v, heads=8, feature="exp", causal=causal)
        torch.testing.assert_close(
            got, functional.aft_simple(q, k, v, gate=None, causal=causal), rtol=1e-12, atol=1e-12
        )


def test_performer_approaches_softmax_attention():
    """The error falls like 1 / sqrt(M): from M = 16 to 1024 by 8, give or take a half."""
    q, k, v = (noise(1, 64, 16, seed=i, scale=0.3) for i in range(3))
    want = softmax_attention(q, k, v)
    errors = {}
    for M in (16, 64, 256, 1024):
        found = [functional.performer(q, k, v, seeded(s, 1, M, 16), heads=1) for s in range(20)]
        errors[M] = float(torch.stack([(y - want).square().mean() for y in found]).mean().sqrt())
    assert errors[16] > errors[64] > errors[256] > errors[1024]
    assert 6 < errors[16] / errors[1024] < 12, errors


@pytest.mark.parametrize("orthogonal", [True, False])
def test_performer_features_are_unbiased(orthogonal):
    """The mean over many draws of phi(q) . phi(k) is exp(q . k / sqrt(e)), within four standard errors."""
    q, k = noise(4, seed=1, scale=0.6), noise(4, seed=2, scale=0.6)
    W = seeded(0, 20000, 4, 4, orthogonal=orthogonal)
    x, y = (a / 4**0.25 for a in (q, k))
    draws = torch.exp(W @ (x + y) - (x.square().sum() + y.square().sum()) / 2).mean(-1)
    assert abs(float(draws.mean()) - float(torch.exp(q @ k / 2))) < 4 * float(draws.std()) / 20000**0.5


def test_orthogonal_features_vary_less_and_are_orthogonal():
    W = seeded(0, 3, 10, 4)
    assert W.shape == (3, 10, 4)
    gram = W @ W.transpose(-1, -2)
    for block in (slice(0, 4), slice(4, 8), slice(8, 10)):
        inside = gram[:, block, block]
        assert float((inside - torch.diag_embed(inside.diagonal(dim1=-2, dim2=-1))).abs().max()) < 1e-12
    assert float(gram[:, :4, 4:8].abs().max()) > 0.1
    many = seeded(1, 4000, 4, 4)
    assert abs(float(many.norm(dim=-1).square().mean()) - 4) < 0.1  # chi norms, not sqrt(e)
    assert float(many.norm(dim=-1).std()) > 0.5
    x = noise(4, seed=1, scale=0.8)
    spread = {o: float(torch.exp(seeded(2, 4000, 4, 4, orthogonal=o) @ x).mean(-1).var()) for o in (True, False)}
    assert spread[True] < spread[False]


@pytest.mark.parametrize(
    ("name", "options"),
    [("linear", {}), ("performer", {}), ("performer", {"feature": "relu"}), ("rfa", {}), ("rfa", {"gate": True})],
)
def test_future_keys_do_not_change_the_past(name, options):
    """Check that future keys do not change the past.

    performer-pytorch subtracts one maximum over all of time and then adds an eps: future keys times 10 change its past
    by a quarter.
    """
    mixer = build_mixer(name, 16, heads=2, causal=True, **options)
    x = torch.randn(1, 120, 16, generator=torch.Generator().manual_seed(0))
    for size in (10.0, 1e4):
        other = x.clone()
        other[:, 60:] *= size
        with torch.no_grad():
            change = (mixer(other) - mixer(x))[:, :60].norm() / mixer(x)[:, :60].norm()
        assert float(change) <= 1e-6


def test_nothing_is_added_to_softmax_features():
    """Check that no eps stands beside the features.

    The output is a convex combination of the values, however little the keys weigh.
    """
    q, v, W = noise(1, 30, 4), noise(1, 30, 4, seed=2).abs(), seeded(0, 1, 8, 4)
    k = noise(1, 30, 4, seed=1) + 100.0  # exp(-|x|^2 / 2) is 1e-8000 here
    for causal in (False, True):
        ones = functional.performer(q, k, torch.ones_like(v), W, heads=1, causal=causal)
        torch.testing.assert_close(ones, torch.ones_like(ones), rtol=1e-13, atol=0)


def test_redraw():
    """Redraw every ``redraw_interval`` forward passes in train mode, never in eval mode, by hand at any time.

    The draw is kept in checkpoints; backward keeps the old draw.
    """
    torch.manual_seed(0)
    mixer, x = build_mixer("performer", 8, heads=2, redraw_interval=3), torch.randn(1, 5, 8)
    seen = []
    for _ in range(7):
        mixer(x)
        seen.append(mixer.projection.clone())
    changes = [not torch.equal(a, b) for a, b in zip(seen, seen[1:], strict=False)]
    assert changes == [False, False, True, False, False, True]
    other = build_mixer("performer", 8, heads=2, redraw_interval=3)
    other.load_state_dict(mixer.state_dict())
    assert torch.equal(other.projection, mixer.projection)
    assert int(other.forwards) == 7
    mixer.eval()
    for _ in range(4):
        mixer(x)
    assert torch.equal(mixer.projection, seen[-1])
    y = mixer(x)
    mixer.redraw()
    y.sum().backward()
    assert not torch.equal(mixer.projection, seen[-1])
    assert mixer.projection.dtype == torch.float32


def test_generalised_features_need_an_eps():
    """Check that relu features are at least eps.

    Where all of a query's are at it, every key weighs by the sum of its features alone.
    """
    with pytest.raises(MixerError, match="eps must be a number > 0"):
        build_mixer("performer", 8, heads=1, feature="relu", eps=0.0)
    W = noise(1, 5, 4).abs()
    q, k, v = -noise(1, 6, 4).abs(), noise(1, 6, 4, seed=1), noise(1, 6, 4, seed=2)
    weights = ((k @ W[0].T).relu() / 5**0.5 + 0.001).sum(-1)
    want = (weights[..., None] * v).sum(1, keepdim=True) / weights.sum()
    got = functional.performer(q, k, v, W, heads=1, feature="relu")
    torch.testing.assert_close(got, want.expand_as(got))


def test_rfa_estimates_the_gaussian_kernel():
    """Check that with M large RFA is attention with the weights exp(-|q - k|^2 / 2) of unit q and k.

    These are exp(q . k) up to a constant factor: softmax attention at scale 1.
    """
    q, k, v = (noise(1, 40, 8, seed=i) for i in range(3))
    want = functional.attention(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, heads=1, scale=1.0)
    errors = {}
    for M in (32, 512, 8192):
        W = seeded(1, 1, M, 8, orthogonal=False)
        errors[M] = float((functional.rfa(q, k, v, W, torch.ones(1, 8), heads=1) - want).square().mean().sqrt())
    assert errors[32] > 2 * errors[512] > 4 * errors[8192]
    assert errors[8192] < 0.02


def test_rfa_arccos_features_estimate_the_arc_cosine_kernel():
    x, y = (F.normalize(noise(4, seed=i), dim=0) for i in range(2))
    W = seeded(0, 1, 200000, 4, orthogonal=False)
    f, g = (
        import_module("tokenmix.functional.rfa").features(a[None, None], W, torch.ones(1, 4), "arccos")[0, 0, 0]
        for a in (x, y)
    )
    angle = torch.arccos(x @ y)
    want = (torch.sin(angle) + (torch.pi - angle) * torch.cos(angle)) / torch.pi
    assert abs(float(f @ g) - float(want)) < 0.02


def test_rfa_denominator_is_at_least_eps_of_the_weight():
    """Check that the output stays bounded, though estimated weights may be negative.

    Where their mean is below eps the denominator is eps times the number of keys.
    """
    W = noise(1, 1, 2, seed=3)
    angle = torch.pi / float(W.norm())  # sigma that turns q . w and k . w half a turn apart: cos is -1, the weight -1
    w = W[0, 0] / W.norm()
    q, k, v = w.expand(1, 3, 2), -w.expand(1, 3, 2), noise(1, 3, 2, seed=4)
    sigma = torch.full((1, 2), angle / 2)
    got = functional.rfa(q, k, v, W, sigma, heads=1, eps=0.25)
    torch.testing.assert_close(got, -v.mean(1, keepdim=True).expand_as(got) / 0.25)
    raw = functional.rfa(
        noise(1, 9, 8),
        noise(1, 9, 8, seed=1),
        noise(1, 9, 8, seed=2),
        noise(1, 400, 8, seed=3),
        torch.ones(1, 8),
        heads=1,
    )
    free = functional.rfa(
        noise(1, 9, 8),
        noise(1, 9, 8, seed=1),
        noise(1, 9, 8, seed=2),
        noise(1, 400, 8, seed=3),
        torch.ones(1, 8),
        heads=1,
        eps=1e-9,
    )
    assert torch.equal(raw, free), "with enough features the bound never binds: exp(-2) > eps"


def test_rfa_gate_is_the_recurrence():
    """S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t, and a masked token passes the state on."""
    T, W, sigma = 70, noise(1, 6, 4, seed=3), torch.ones(1, 4, dtype=torch.float64)
    q, k, v, gate = noise(1, T, 4), noise(1, T, 4, seed=1), noise(1, T, 4, seed=2), noise(1, T, 1, seed=4, scale=3.0)
    live = torch.rand(1, T, generator=torch.Generator().manual_seed(5)) < 0.7
    phi = import_module("tokenmix.functional.rfa").features
    fq, fk, g = phi(q, W, sigma, "gaussian")[0, 0], phi(k, W, sigma, "gaussian")[0, 0], torch.sigmoid(gate[0, :, 0])
    S, z, n, want = torch.zeros(12, 4, dtype=torch.float64), torch.zeros(12, dtype=torch.float64), 0.0, []
    for t in range(T):
        if live[0, t]:
            S, z, n = (
                g[t] * S + (1 - g[t]) * fk[t, :, None] * v[0, t],
                g[t] * z + (1 - g[t]) * fk[t],
                g[t] * n + (1 - g[t]),
            )
        want.append(
            fq[t] @ S / max(float(fq[t] @ z), 0.01 * float(n)) if float(n) else torch.zeros(4, dtype=torch.float64)
        )
    got = functional.rfa(q, k, v, W, sigma, gate, heads=1, causal=True, key_mask=live)[0]
    torch.testing.assert_close(got, torch.stack(want), rtol=1e-10, atol=1e-10)


def test_a_gate_that_forgets_at_once_gives_the_last_value():
    q, k, v, gate = noise(1, 50, 4), noise(1, 50, 4, seed=1), noise(1, 50, 4, seed=2), torch.full((1, 50, 2), -1e4)
    W = noise(2, 300, 2, seed=3)
    y = functional.rfa(q, k, v, W, torch.full((2, 2), 1e-3), gate, heads=2, causal=True)
    torch.testing.assert_close(y, v, rtol=1e-9, atol=1e-9)


def test_parameters_and_states_are_those_of_the_paper():
    """Four projections; RFA adds sigma and, gated, one row per head. The state is constant in T."""
    counts = {
        n: sum(p.numel() for p in build_mixer(n, 16, heads=2).parameters()) for n in ("linear", "performer", "rfa")
    }
    assert counts == {"linear": 4 * (16 * 16 + 16), "performer": 4 * (16 * 16 + 16), "rfa": 4 * (16 * 16 + 16) + 16}
    assert sum(p.numel() for p in build_mixer("rfa", 16, heads=2, gate=True).parameters()) == counts["rfa"] + 2 * 17
    assert build_mixer("performer", 128, heads=2).num_features == 267  # ceil(64 ln 64)
    for name in counts:
        mixer = build_mixer(name, 16, heads=2, causal=True)
        assert mixer.cost(10).state == mixer.cost(1000).state


def test_a_seed_draws_the_same_features_whatever_the_device_of_construction():
    for name in ("performer", "rfa"):
        torch.manual_seed(3)
        plain = build_mixer(name, 8, heads=2)
        with torch.device("meta"):
            other = build_mixer(name, 8, heads=2)
        other = other.to_empty(device="cpu")
        torch.manual_seed(3)
        other.reset_parameters()
        assert torch.equal(plain.projection, other.projection)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: build_mixer("linear", 8, heads=3), "must divide"),
        (lambda: build_mixer("linear", 8, heads=2, feature="cosine"), "choose one of elu"),
        (lambda: build_mixer("performer", 8, heads=2, num_features=0), "num_features must be an integer >= 1"),
        (lambda: build_mixer("performer", 8, heads=2, feature="elu"), "choose one of softmax"),
        (lambda: build_mixer("rfa", 8, heads=2, feature="relu"), "choose one of gaussian"),
        (lambda: functional.performer(*[noise(1, 3, 4)] * 3, noise(1, 3, 2), heads=2), r"\(2, M, 2\)"),
        (
            lambda: functional.rfa(*[noise(1, 3, 4)] * 3, noise(2, 3, 2), noise(2, 2), noise(1, 3, 4), heads=2),
            "gate of shape",
        ),
        (
            lambda: functional.linear_attention(noise(1, 2, 4), *[noise(1, 3, 4)] * 2, heads=2, causal=True),
            "as many queries",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(call, says):
    with pytest.raises(MixerError, match=says):
        call()


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
def test_softmax_features_of_large_tokens_are_exact_in_float32(shift):
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0)) + shift
    got, want = (LOG_FEATURES["softmax"](a) for a in (x, x.double()))
    assert float((got - want).abs().max()) < 2e-6
