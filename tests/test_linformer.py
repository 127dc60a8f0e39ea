"""What is special to Linformer: identity projections, the rank of its weights, how projections are shared."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tokenmix import MixerError, build_mixer, contrib, functional


def qkv(T: int, D: int = 8, B: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, T, D, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("heads", [1, 4])
def test_with_identity_projections_it_is_softmax_attention(heads):
    q, k, v = qkv(9)
    one = torch.eye(9, dtype=torch.float64)[None]
    torch.testing.assert_close(
        contrib.linformer(q, k, v, one, one.expand(heads, -1, -1), heads=heads),
        functional.attention(q, k, v, heads=heads),
        rtol=1e-12,
        atol=1e-12,
    )


def test_the_operator_on_the_values_has_rank_k():
    q, k, _ = qkv(12, B=1)
    e, f = (torch.randn(1, 3, 12, dtype=torch.float64) for _ in range(2))
    v = torch.eye(12, dtype=torch.float64)[None]
    operator = contrib.linformer(
        torch.cat([q, torch.zeros(1, 12, 4, dtype=torch.float64)], -1), torch.cat([k, k[..., :4]], -1), v, e, f, heads=1
    )[0]
    assert torch.linalg.matrix_rank(operator, rtol=1e-9) == 3


def test_sharing_decides_the_number_of_projections():
    own = {
        s: sum(
            p.numel()
            for n, p in build_mixer("linformer", 8, max_len=20, rank=5, heads=4, sharing=s).named_parameters()
            if "projection" in n
        )
        for s in ("none", "headwise", "key_value", "layerwise")
    }
    assert own == {"none": 2 * 4 * 100, "headwise": 2 * 100, "key_value": 100, "layerwise": 100}


def test_layers_share_one_projection_through_tie():
    torch.manual_seed(0)
    layers = nn.ModuleList(
        build_mixer("linformer", 8, max_len=12, rank=3, heads=2, sharing="layerwise") for _ in range(3)
    )
    alone = sum(p.numel() for p in layers.parameters())
    for layer in layers[1:]:
        layer.tie(layers[0])
    assert sum(p.numel() for p in layers.parameters()) == alone - 2 * 36
    x = torch.randn(2, 10, 8)
    optimiser = torch.optim.SGD(layers.parameters(), lr=0.1)
    layers[2](layers[1](x)).square().sum().backward()
    assert layers[0].projection_e.grad.abs().max() > 0, "the first layer's projection learns from the later ones"
    optimiser.step()
    assert all(layer.projection_e is layers[0].projection_e for layer in layers)


def test_tie_refuses_what_cannot_be_shared():
    one = build_mixer("linformer", 8, max_len=12, rank=3, heads=2, sharing="layerwise")
    for other in (
        build_mixer("linformer", 8, max_len=12, rank=3, heads=2, sharing="key_value"),
        build_mixer("linformer", 8, max_len=13, rank=3, heads=2, sharing="layerwise"),
    ):
        with pytest.raises(MixerError, match="tie"):
            one.tie(other)


def test_any_length_up_to_max_len_and_an_error_beyond():
    """linformer and its copies insist on one length, fixed when built."""
    mixer = build_mixer("linformer", 8, max_len=16, rank=3, heads=2)
    for T in (1, 7, 16):
        assert mixer(torch.randn(2, T, 8)).shape == (2, T, 8)
    with pytest.raises(MixerError, match="max_len=16"):
        mixer(torch.randn(2, 17, 8))
    mixer.resize(17)
    assert mixer(torch.randn(2, 17, 8)).shape == (2, 17, 8)


def test_causal_is_refused_in_words():
    with pytest.raises(MixerError, match="no causal form"):
        build_mixer("linformer", 8, max_len=16, causal=True)


def test_projections_start_with_variance_one_over_k():
    torch.manual_seed(0)
    mixer = build_mixer("linformer", 8, max_len=400, rank=25, heads=2)
    for e in (mixer.projection_e, mixer.projection_f):
        assert abs(float(e.detach().std()) - 0.2) < 0.01
