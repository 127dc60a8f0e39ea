"""Test what is special to spatial-reduction attention.

PVT's own layer, its parameter counts and its multiply-accumulates.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tokenmix import MixerError, build_mixer, functional, use_backend

DIMS, HEADS, RATIOS, MLP, SIDES, PATCH = (
    (64, 128, 320, 512),
    (1, 2, 5, 8),
    (8, 4, 2, 1),
    (8, 8, 4, 4),
    (56, 28, 14, 7),
    (4, 2, 2, 2),
)
DEPTHS = {"tiny": (2, 2, 2, 2), "small": (3, 4, 6, 3), "medium": (3, 4, 18, 3), "large": (3, 8, 27, 3)}
PARAMETERS = {"tiny": 13_229_288, "small": 24_485_864, "medium": 44_208_104, "large": 61_369_320}
GIGA_MACS = {"tiny": 1.933, "small": 3.816, "medium": 6.659, "large": 9.814}


def stages():
    """(mixer, width, MLP width, tokens, input features of the patch embedding) of each stage."""
    for i, (D, heads, ratio) in enumerate(zip(DIMS, HEADS, RATIOS, strict=True)):
        mixer = build_mixer("spatial_reduction", D, heads=heads, ratio=ratio, ndim=2)
        yield mixer, D, MLP[i] * D, SIDES[i] ** 2 + (i == 3), PATCH[i] ** 2 * (DIMS[i - 1] if i else 3)


@pytest.mark.parametrize("model", DEPTHS)
def test_parameters_of_pvt(model):
    total = 512 + 2 * 512 + 512 * 1000 + 1000  # class token, last norm, head
    for (mixer, D, wide, tokens, taken), depth in zip(stages(), DEPTHS[model], strict=True):
        block = sum(p.numel() for p in mixer.parameters()) + 4 * D + D * wide + wide + wide * D + D
        total += depth * block + taken * D + D + 2 * D + tokens * D
    assert total == PARAMETERS[model]


@pytest.mark.parametrize("model", DEPTHS)
def test_multiply_accumulates_of_pvt(model):
    total = 512 * 1000
    for (mixer, D, wide, tokens, taken), depth in zip(stages(), DEPTHS[model], strict=True):
        grid = tokens - (tokens == 50)
        total += depth * (mixer.cost(tokens).flops // 2 + 2 * tokens * D * wide) + taken * D * grid
    assert total / 1e9 == pytest.approx(GIGA_MACS[model], abs=6e-4)


@pytest.mark.parametrize(("ratio", "grid"), [(2, (8, 4)), (4, (8, 8)), (1, (3, 5))])
def test_cost_on_a_grid_is_what_torch_counts(ratio, grid):
    mixer = build_mixer("spatial_reduction", 16, heads=2, ratio=ratio, ndim=2)
    T = grid[0] * grid[1]
    with FlopCounterMode(display=False) as counter, use_backend("eager"), torch.no_grad():
        mixer(torch.randn(1, T, 16), grid=grid)
    assert counter.get_total_flops() == mixer.cost(T).flops


def pvt(mixer, x, grid):
    """The layer as PVT writes it, with torch's own convolution, norm and attention."""
    B, T, D = x.shape
    short = x.mT.reshape(B, D, *grid)
    short = mixer.norm(mixer.conv(short).flatten(2).mT)
    q, k, v = (
        a.unflatten(-1, (mixer.heads, -1)).transpose(1, 2)
        for a in (mixer.q_proj(x), mixer.k_proj(short), mixer.v_proj(short))
    )
    y = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
    return mixer.out_proj(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("ratio", "grid"), [(2, (4, 6)), (3, (3, 6))])
def test_it_is_the_layer_of_pvt_where_the_ratio_divides_the_grid(ratio, grid):
    torch.manual_seed(0)
    mixer = build_mixer("spatial_reduction", 8, heads=2, ratio=ratio, ndim=2).double()
    x = torch.randn(2, grid[0] * grid[1], 8, dtype=torch.float64)
    torch.testing.assert_close(mixer(x, grid=grid), pvt(mixer, x, grid), rtol=1e-10, atol=1e-10)


def test_a_grid_the_ratio_does_not_divide_is_filled_with_zeros():
    """PVT's convolution drops the last lines; here no token is lost."""
    torch.manual_seed(0)
    mixer = build_mixer("spatial_reduction", 8, heads=2, ratio=2, ndim=2).double()
    x = torch.randn(1, 3, 5, 8, dtype=torch.float64)
    y = mixer(x.flatten(1, 2), grid=(3, 5)).view(1, 3, 5, 8)
    full = torch.nn.functional.pad(x, (0, 0, 0, 1, 0, 1))
    torch.testing.assert_close(
        y, pvt(mixer, full.flatten(1, 2), (4, 6)).view(1, 4, 6, 8)[:, :3, :5], rtol=1e-10, atol=1e-10
    )
    other = x.clone()
    other[:, -1, -1] += 1.0
    assert (mixer(other.flatten(1, 2), grid=(3, 5))[:, 0] - y[:, 0, 0]).abs().max() > 1e-3


def test_prefix_tokens_are_keys_as_they_are():
    torch.manual_seed(0)
    mixer = build_mixer("spatial_reduction", 8, heads=2, ratio=2, ndim=2).double()
    x = torch.randn(2, 1 + 8, 8, dtype=torch.float64)
    short = mixer.norm(mixer.conv(x[:, 1:].mT.reshape(2, 8, 2, 4)).flatten(2).mT)
    rows = torch.cat([x[:, :1], short], 1)
    want = mixer.out_proj(functional.attention(mixer.q_proj(x), mixer.k_proj(rows), mixer.v_proj(rows), heads=2))
    torch.testing.assert_close(mixer(x, grid=(2, 4), prefix=1), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ndim", [1, 2])
def test_without_reduction_it_is_softmax_attention(ndim):
    torch.manual_seed(0)
    mixer, attention = (
        build_mixer("spatial_reduction", 8, heads=2, ratio=1, ndim=ndim).double(),
        build_mixer("attention", 8, heads=2).double(),
    )
    attention.load_state_dict(mixer.state_dict())
    x, mask = torch.randn(2, 6, 8, dtype=torch.float64), torch.tensor([[1, 1, 1, 0, 1, 0], [0, 1, 1, 1, 1, 1]]).bool()
    place = {} if ndim == 1 else {"grid": (2, 3)}
    for given in ({}, {"key_mask": mask}):
        torch.testing.assert_close(mixer(x, **given, **place), attention(x, **given), rtol=1e-12, atol=1e-12)


def test_in_three_dimensions_it_is_a_three_dimensional_convolution():
    torch.manual_seed(0)
    mixer = build_mixer("spatial_reduction", 8, heads=2, ratio=2, ndim=3).double()
    x = torch.randn(2, 16, 8, dtype=torch.float64)
    want = pvt(mixer, x, (2, 4, 2))
    torch.testing.assert_close(mixer(x, grid=(2, 4, 2)), want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        mixer(x, grid=(2, 4, 2), positions=torch.arange(16).expand(2, 16)), want, rtol=1e-10, atol=1e-10
    )


def test_a_missing_grid_is_refused_in_words():
    with pytest.raises(MixerError, match="needs grid="):
        build_mixer("spatial_reduction", 8, heads=2, ndim=2)(torch.randn(1, 4, 8))
