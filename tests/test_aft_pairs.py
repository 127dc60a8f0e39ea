"""Test what is special to AFT-pairs and AFT-reach: the forms they contain or are, and their options."""

from __future__ import annotations

import math

import pytest
import torch

from tokenmix import MixerError, build_mixer, functional

H, R, D = 2, 3, 6


def drawn(T: int, B: int = 2) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(T)
    found = {name: torch.randn(B, T, D, generator=draw, dtype=torch.float64) for name in "qkv"}
    found |= {name: torch.randn(B, T, H, R, generator=draw, dtype=torch.float64) for name in "abg"}
    return {**found, "g": -torch.nn.functional.softplus(found["g"])}


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def by_head(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (H, -1)).transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("T", [1, 2, 16, 17, 40])
class TestIdentities:
    @pytest.mark.parametrize("causal", [False, True])
    def test_it_is_aft_full_with_a_bias_whose_exponential_is_a_sum_of_products(self, T, causal):
        x = drawn(T)
        past = x["g"].cumsum(1)
        between = -(past[:, :, None] - past[:, None]).abs()
        w = torch.logsumexp(x["a"][:, :, None] + x["b"][:, None] + between, -1)
        q, k, v = (by_head(x[name]) for name in "qkv")
        full = functional.aft_full(q, k, v, w.movedim(-1, 1).flatten(0, 1), causal=causal)
        same(by_head(functional.aft_pairs(**x, causal=causal)), full)

    @pytest.mark.parametrize("causal", [False, True])
    def test_with_parts_of_positions_it_is_aft_full_with_a_bias_of_rank_r(self, T, causal):
        x, draw = drawn(T), torch.Generator().manual_seed(0)
        left, right = (torch.randn(T, R, generator=draw, dtype=torch.float64) for _ in range(2))
        a, b = (part[None, :, None].expand(2, T, 1, R) for part in (left, right))
        q, k, v = (x[name] for name in "qkv")
        same(
            functional.aft_pairs(q, k, v, a, b, causal=causal),
            functional.aft_full(q, k, v, (left.exp() @ right.exp().T).log(), causal=causal),
        )

    def test_of_rank_1_it_is_aft_forget_with_a_decay_per_head(self, T):
        x = drawn(T)
        a, b, g = (x[name][..., :1] for name in "abg")
        q, k, v = (x[name] for name in "qkv")
        wide = [part[..., 0].repeat_interleave(D // H, -1) for part in (b, g)]
        same(
            functional.aft_pairs(q, k, v, a, b, g, causal=True, norm=True),
            functional.aft_forget(q, k + wide[0], v, wide[1], causal=True, heads=H),
        )

    def test_a_query_that_wants_one_reach_gets_its_decay(self, T):
        x, rates = drawn(T), torch.tensor([0.7, 0.1, 0.01], dtype=torch.float64)
        a = torch.tensor([-1e4, 0.0, -1e4], dtype=torch.float64).expand_as(x["a"])
        q, k, v = (x[name] for name in "qkv")
        same(
            functional.aft_pairs(q, k, v, a, None, -rates.expand_as(a), causal=True),
            functional.aft_forget(q, k, v, torch.full_like(k, -0.1), causal=True),
        )


def test_reach_measures_positions():
    """Two texts with a gap of positions between them decay over the gap."""
    torch.manual_seed(0)
    mixer = build_mixer("aft_reach", 8, causal=True, heads=2, kernel_size=1, half_lives=(1.0, 4.0))
    x = torch.randn(1, 6, 8)
    far = torch.tensor([[0, 1, 2, 1003, 1004, 1005]])
    y = mixer(x, positions=far)
    torch.testing.assert_close(y[:, :3], mixer(x)[:, :3])
    torch.testing.assert_close(y[:, 3:], mixer(x[:, 3:]))  # all before is forgotten


@pytest.mark.parametrize("name", ["aft_forget", "aft_pairs", "aft_reach"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_stream_of_no_rows(name, dtype):
    mixer = build_mixer(name, 8, causal=True).to(dtype)
    y, state = mixer.extend(torch.randn(0, 3, 8, dtype=dtype), mixer.init_state(0))
    assert y.shape == (0, 3, 8)
    assert state.m.shape[0] == 0


def test_the_state_is_three_vectors_per_product():
    for name, options in (("aft_pairs", {"rank": 5}), ("aft_reach", {"reaches": 5})):
        state = build_mixer(name, 16, causal=True, **options).init_state(3)
        assert all(part.shape == (3, 5, 16) and part.dtype == torch.float64 for part in (state.m, state.num, state.den))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("aft_pairs", {"rank": 0}, "AFTPairs: rank must be an integer >= 1, got 0"),
        ("aft_pairs", {"decay": "fixed"}, "AFTPairs: decay must be True or False"),
        ("aft_pairs", {"heads": 3}, "heads=3"),
        ("aft_pairs", {"norm": 1}, "norm must be True or False"),
        ("aft_pairs", {"kernel_size": 2}, "kernel_size must be odd unless causal=True"),
        ("aft_reach", {"reaches": 0}, "AFTReach: reaches must be an integer >= 1, got 0"),
        ("aft_reach", {"half_lives": (0.0, 1.0)}, "AFTReach: half_lives must be a positive number, got 0.0"),
        ("aft_reach", {"half_lives": (1.0, math.nan)}, "AFTReach: half_lives must be"),
    ],
)
def test_bad_options_are_refused(name, options, words):
    with pytest.raises(MixerError) as refusal:
        build_mixer(name, 8, **options)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_bad_arguments_are_refused():
    x = drawn(5)
    for changes, words in (
        ({"v": x["v"][:, :4]}, "expects q, k and v of one shape"),
        ({"b": x["b"][..., :2]}, "expects a, b and g of one shape"),
        ({"a": x["a"][:, :, :0]}, "expects a, b and g of one shape"),
        ({"norm": None}, "norm"),
        ({"eps": 0.0}, "eps must be a number > 0"),
        ({"backend": "cpu"}, "its kernel is causal"),
        ({"key_mask": torch.ones(2, 4, dtype=torch.bool)}, "expects a bool key_mask"),
    ):
        with pytest.raises(MixerError, match=words):
            functional.aft_pairs(**{**x, **changes})
