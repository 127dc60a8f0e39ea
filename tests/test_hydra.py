"""Test what is special to Hydra and its relatives.

Identities, the paper's table of shares, and the defects of public copies that ours must not have.
"""

from __future__ import annotations

import pytest
import torch

from tokenmix import MixerError, build_mixer, functional, merge, reference, state_bytes
from tokenmix.functional.sums.kernel_attention import MAPS

FEATURES = [*MAPS, "sigmoid/softmax", "tanh/softmax", "tanh/elu"]


def qkv(T: int, D: int = 8, B: int = 2, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, T, D, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)]


def same(a: torch.Tensor, b: torch.Tensor, tol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
def test_as_many_heads_as_features_is_hydra(feature, causal):
    q, k, v = qkv(70)
    same(
        functional.multihead_linear(q, k, v, heads=8, feature=feature, causal=causal),
        functional.hydra(q, k, v, feature=feature, causal=causal),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
def test_blocks_of_the_causal_form_do_not_show(heads, feature, causal):
    """150 tokens span several blocks; the reference has none."""
    q, k, v = qkv(150)
    mask = torch.ones(2, 150, dtype=torch.bool)
    mask[0, :70], mask[1, 3::5] = False, False
    pairs = mask[:, None] & (torch.ones(150, 150, dtype=torch.bool).tril() if causal else True)
    want = reference.multihead_linear(q, k, v, heads=heads, feature=feature, mask=pairs.expand(2, 150, 150))
    same(functional.multihead_linear(q, k, v, heads=heads, feature=feature, causal=causal, key_mask=mask), want, 1e-10)


@pytest.mark.parametrize("causal", [False, True])
def test_sigmoid_and_softmax_are_aft_simple(causal):
    q, k, v = qkv(50)
    mask = torch.rand(2, 50, generator=torch.Generator().manual_seed(1)) < 0.7
    same(
        functional.hydra(q, k, v, feature="sigmoid/softmax", causal=causal, key_mask=mask),
        functional.aft_simple(q, k, v, causal=causal, key_mask=mask),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_polynl_is_the_written_formula_and_hydra_with_the_mean(causal):
    x = qkv(9)[0]
    mixer = build_mixer("polynl", 8, causal=causal, qkv_bias=False, out_bias=False).double()
    products = (x @ mixer.k_proj.weight.T) * (x @ mixer.v_proj.weight.T)
    mean = products.cumsum(1) / torch.arange(1, 10)[:, None] if causal else products.mean(1, keepdim=True)
    same(mixer(x), (x * mean) @ mixer.out_proj.weight.T)
    same(
        mixer(x),
        mixer.out_proj(
            functional.hydra(x, mixer.k_proj(x), mixer.v_proj(x), feature="identity", normalise=True, causal=causal)
        ),
    )


def test_one_head_is_the_product_of_matrices():
    q, k, v = qkv(11)
    unit = torch.nn.functional.normalize
    same(functional.multihead_linear(q, k, v, heads=1), unit(q, dim=-1) @ (unit(k, dim=-1).mT @ v), 1e-6)


def test_cosine_norm_is_that_of_the_whole_token():
    """A norm per head of one feature would leave only signs; the paper's listing takes the norm over all features."""
    q, k, v = qkv(5)
    scaled = [a * torch.tensor([3.0, 1, 1, 1, 1, 1, 1, 1], dtype=torch.float64) for a in (q, k)]
    want = (
        scaled[0]
        / scaled[0].norm(dim=-1, keepdim=True)
        * (scaled[1] / scaled[1].norm(dim=-1, keepdim=True) * v).sum(1, keepdim=True)
    )
    same(functional.hydra(*scaled, v), want, 1e-6)
    assert not torch.allclose(functional.hydra(*scaled, v), functional.hydra(q, k, v), rtol=1e-3)


@pytest.mark.parametrize("size", [1e15, 1e25, 3e38])
def test_a_token_whose_square_overflows_keeps_its_direction(size):
    q, k, v = (a / a.abs().max() for a in qkv(6, dtype=torch.float32))
    long = [(a * size).requires_grad_() for a in (q, k)]
    y = functional.hydra(*long, v)
    same(y, functional.hydra(q, k, v, eps=0.0), 1e-5)
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(y.sum(), long))


@pytest.mark.parametrize("causal", [False, True])
def test_without_eps_a_zero_or_masked_token_counts_as_nothing(causal):
    """eps=0 is the paper's equation; padding is a zero token, and must not make the sum NaN."""
    q, k, v = (a.requires_grad_() for a in qkv(6))
    mask = torch.tensor([[True] * 4 + [False] * 2, [False] * 3 + [True] * 3])
    with torch.no_grad():
        q[:, 1], k[:, 1] = 0, 0
    y = functional.hydra(q, k, v, eps=0.0, causal=causal, key_mask=mask)
    same(y, functional.hydra(q, k, v, eps=1e-20, causal=causal, key_mask=mask))
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(y.sum(), (q, k, v)))


def test_one_zero_token_does_not_spoil_the_rest():
    """Public copies divide by the norm: one zero token makes every row NaN."""
    for causal in (False, True):
        mixer = build_mixer("hydra", 8, causal=causal, qkv_bias=False).double()
        x = qkv(6)[0]
        x[:, 2] = 0.0
        x.requires_grad_()
        y = mixer(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        assert bool(y.isfinite().all())
        assert bool(grad.isfinite().all())
        kept = [0, 1, 3, 4, 5]
        same(y[:, kept], mixer(x[:, kept]))  # cosine of zero is zero: the token adds nothing
        mask = torch.ones(2, 6, dtype=torch.bool)
        mask[:, 2] = False
        assert bool(mixer(x, key_mask=mask).isfinite().all())


def test_normalised_output_does_not_grow_with_length():
    """Check that with normalise=True the output does not grow with T on inputs that have a mean.

    The plain sum does (0.29 -> 17.3 from 64 to 4096 in a public copy).
    """

    def size(T: int, normalise: bool) -> float:
        q, k, v = (a + 0.5 for a in qkv(T, 16, dtype=torch.float32))
        return float(functional.hydra(q, k, v, normalise=normalise).square().mean().sqrt())

    assert size(4096, False) > 30 * size(64, False)
    assert 0.5 < size(4096, True) / size(64, True) < 2


def test_half_precision_sums_do_not_stall():
    """4,096 equal terms: a bfloat16 running sum would stop growing at 256."""
    ones = torch.ones(1, 4096, 4, dtype=torch.bfloat16)
    for causal in (False, True):
        y = functional.hydra(ones, ones, ones, feature="identity", causal=causal)
        assert float(y[0, -1, 0]) == 4096.0


@pytest.mark.parametrize(
    ("name", "options", "numbers"),
    [("hydra", {}, 32), ("hydra", {"feature": "sigmoid/softmax"}, 96), ("polynl", {}, 32)],
)
def test_state_is_a_vector_and_merges(name, options, numbers):
    mixer = build_mixer(name, 32, causal=True, **options)
    x = torch.randn(1, 40, 32)
    _, state = mixer.extend(x, mixer.init_state(1))
    assert state_bytes(state) == 8 * numbers + (0 if "feature" in options else 8)
    (_, a), (_, b) = (mixer.extend(part, mixer.init_state(1)) for part in x.split([13, 27], 1))
    for got, want in zip(merge(a, b), state, strict=True):
        same(got, want, 1e-6)


def test_features_that_make_no_sense_are_refused():
    for name in ("hydra", "multihead_linear"):
        for wrong in (
            {"feature": "cos"},
            {"feature": "elu/elu/elu"},
            {"feature": "sigmoid/softmax", "normalise": True},
        ):
            with pytest.raises(MixerError, match="feature"):
                build_mixer(name, 8, **wrong)
    with pytest.raises(MixerError, match="heads=3"):
        build_mixer("multihead_linear", 8, heads=3)


TABLE = {  # T: totals in G multiply-accumulates and shares of mixing in percent, attention then Hydra, then the saving
    197: ("17.56", "4.07", "16.85", "0.0215", "4.05"),
    577: ("55.48", "11.06", "49.36", "0.0215", "11.0"),
    785: ("78.50", "14.5", "67.15", "0.0215", "14.5"),
    4097: ("659.8", "46.9", "350.5", "0.0215", "46.9"),
    3601: ("547.0", "43.7", "308.0", "0.0215", "43.7"),
    8161: ("1925.6", "63.8", "698.1", "0.0215", "63.8"),
}


@pytest.mark.parametrize("T", TABLE)
def test_shares_of_the_paper_table(T):
    """Count DeiT-B: 12 layers of 768, patches of 16 x 16 x 3, a class token, 1,000 classes.

    The mixers' part is what they say of themselves.
    """
    dim, layers = 768, 12
    around = (T - 1) * dim * 16 * 16 * 3 + layers * 8 * T * dim * dim + 1000 * dim
    found, totals = [], []
    for name in ("attention", "hydra"):
        with torch.device("meta"):
            cost = build_mixer(name, dim, **({"heads": 12} if name == "attention" else {})).cost(T)
        totals.append(around + layers * cost.flops / 2)
        found += [totals[-1] / 1e9, 100 * layers * cost.mixing / 2 / totals[-1]]
    found.append(100 * (1 - totals[1] / totals[0]))
    for got, printed in zip(found, TABLE[T], strict=True):
        places = len(printed.split(".")[1])
        assert abs(got - float(printed)) <= 0.6 * 10**-places, (got, printed)
