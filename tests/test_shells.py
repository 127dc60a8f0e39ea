"""The blocks that models can have, and the two shells that name them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cases import CASES, DIM, FIRST, forms
from tokenmix import MIXERS, MixerError, build_mixer
from tokenmix.models import (
    MLP,
    ImageDensity,
    ImageDensityConfig,
    LMConfig,
    ViTConfig,
    build_model,
    find_model,
    in_shell,
    macs,
    shell_of,
)
from tokenmix.models.layers import hidden_width
from tokenmix.positions import SinusoidalPositions, SmoothPositions

LOCAL, SIMPLE, ATTENTION = {"name": "aft_local", "window": 8}, {"name": "aft_simple"}, {"name": "attention", "heads": 2}
LANGUAGE = LMConfig(dim=16, max_len=24, mixers=(LOCAL, ATTENTION))
VISION = ViTConfig(dim=16, layers=1, mixers=(SIMPLE,), image_size=(8, 8), patch=4, classes=3)


def test_a_shell_sets_blocks_and_positions():
    modern = in_shell(LANGUAGE, "modern")
    assert (modern.norm_type, modern.mlp, modern.positions) == ("rms", "swiglu", None)
    assert modern.mixers == (LOCAL, {**ATTENTION, "positions": {"name": "rotary"}, "qk_norm": "rms"})
    assert in_shell(replace(LANGUAGE, mixers=(SIMPLE,)), "modern").positions == "learned"
    assert in_shell(modern, "paper").norm_type == "layer"
    assert [shell_of(c) for c in (LANGUAGE, modern, replace(modern, mlp="relu2"))] == ["paper", "modern", "custom"]
    assert [shell_of(in_shell(VISION, shell)) for shell in ("paper", "modern")] == ["paper", "modern"]
    assert in_shell(find_model("pvt_tiny"), "paper") == find_model("pvt_tiny")


def test_what_a_spec_sets_itself_stays():
    plain = {**ATTENTION, "qk_norm": None}
    (spec,) = in_shell(replace(LANGUAGE, mixers=(plain,)), "modern").mixers
    assert spec == {**plain, "positions": {"name": "rotary"}}


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (lambda: in_shell(LANGUAGE, "post"), "no shell 'post'; choose 'paper' or 'modern'"),
        (lambda: in_shell(find_model("pvt_tiny"), "modern"), "has the blocks of its paper"),
        (lambda: replace(LANGUAGE, mlp="silu"), "LMConfig: mlp='silu' is unknown; choose one of 'gelu', 'swiglu'"),
        (lambda: replace(VISION, norm_type="batch"), "ViTConfig: norm_type='batch' is unknown"),
        (lambda: replace(LANGUAGE, logit_cap=-1.0), "logit_cap must be a positive number or null, got -1"),
        (lambda: replace(LANGUAGE, positions="rotary"), "one of learned, sinusoidal, abacus, coupled"),
        (lambda: SinusoidalPositions(7), "dim must be an even number, got 7"),
        (lambda: SmoothPositions(4, waves=0), "waves must be an integer of at least 1, got 0"),
        (lambda: SmoothPositions(4, shortest=9, longest=8), "2 <= shortest <= longest, got shortest=9, longest=8"),
    ],
)
def test_bad_choices_are_refused(attempt, words):
    with pytest.raises(MixerError, match=words):
        attempt()


@pytest.mark.parametrize("kind", ["gelu", "swiglu", "relu2"])
def test_mlps_compute_their_equations(kind):
    mlp, x = MLP(12, 4.0, kind).double(), torch.randn(2, 3, 12, dtype=torch.float64)
    h = x @ mlp.up.weight.T + mlp.up.bias
    if kind == "gelu":
        h = 0.5 * h * (1 + torch.erf(h / 2**0.5))
    elif kind == "relu2":
        h = h.clamp(min=0) ** 2
    else:
        gate = x @ mlp.gate.weight.T + mlp.gate.bias
        h = gate / (1 + torch.exp(-gate)) * h
    torch.testing.assert_close(mlp(x), h @ mlp.down.weight.T + mlp.down.bias)
    assert mlp.up.out_features == (32 if kind == "swiglu" else 48)


def test_counts_are_exact():
    """A ViT of 192 features: SwiGLU has three matrices of 192 x 512 in place of two of 192 x 768."""
    assert hidden_width(192, 4.0, "swiglu") == 512
    assert hidden_width(128, 4.0, "swiglu") == 344  # 341.3, rounded up to a multiple of 8
    plain, gated = (build_model("deit_tiny", mlp=mlp) for mlp in ("gelu", "swiglu"))
    grown = 12 * ((3 * 192 * 512 + 2 * 512 + 192) - (2 * 192 * 768 + 768 + 192))
    assert sum(p.numel() for p in gated.parameters()) - sum(p.numel() for p in plain.parameters()) == grown
    assert macs(gated) == macs(plain)
    rms = build_model("deit_tiny", norm_type="rms")
    assert sum(p.numel() for p in plain.parameters()) - sum(p.numel() for p in rms.parameters()) == 25 * 192


def test_smooth_positions_are_sums_of_waves_and_change_little_from_one_to_the_next():
    built = SmoothPositions(6, waves=3, shortest=8, longest=128)
    assert built.weight.shape == (6, 6)
    lengths, (a, b) = (8, 32, 128), built.weight.detach().double().split(3)
    at = torch.tensor([[0, 1, 777]])
    for row, t in zip(built(at)[0], (0, 1, 777), strict=True):
        angles = [2 * math.pi * t / length for length in lengths]
        wanted = sum(a[m] * math.cos(x) + b[m] * math.sin(x) for m, x in enumerate(angles))
        torch.testing.assert_close(row, wanted)
    steps = built(torch.arange(400)[None])[0].diff(dim=0).norm(dim=1)
    bound = sum(2 * math.pi / length * (a[m].norm() + b[m].norm()) for m, length in enumerate(lengths))
    assert steps.max() <= bound
    sharp = SmoothPositions(6, waves=3, shortest=2, longest=2)(torch.arange(400)[None])[0].diff(dim=0).norm(dim=1)
    assert sharp.max() > 2 * steps.max()
    torch.testing.assert_close(
        SmoothPositions(2, waves=1)(torch.tensor([[0, 8]]))[0].diff(dim=0).abs().max().item(), 0.0
    )
    large = SmoothPositions(64, waves=32)(torch.arange(2000)[None])
    assert 0.015 < float(large.detach().std()) < 0.025  # init_std
    torch.nn.init.zeros_(built.weight)
    built.reset_parameters()
    assert bool(built.weight.any())


def test_sinusoids_are_those_of_the_paper():
    at = torch.tensor([[0, 1, 777]])
    found = SinusoidalPositions(6, scale=1.0)(at)[0]
    for row, t in zip(found, (0, 1, 777), strict=True):
        rates = torch.tensor([10_000 ** (-2 * i / 6) for i in range(3)], dtype=torch.float64)
        torch.testing.assert_close(row[0::2], (t * rates).sin())
        torch.testing.assert_close(row[1::2], (t * rates).cos())


@pytest.mark.parametrize("shell", ["paper", "modern", "sinusoidal"])
@torch.no_grad()
def test_streaming_equals_forward_in_each_shell(shell):
    config = in_shell(LANGUAGE, shell) if shell != "sinusoidal" else replace(LANGUAGE, positions=shell, logit_cap=2.0)
    model = build_model(config).double().eval()
    x = torch.randint(256, (2, 20))
    logits, state = model(x), model.init_state(2)
    parts = []
    for piece in x.split([1, 7, 12], 1):
        out, state = model.extend(piece, state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), logits)
    assert shell != "sinusoidal" or logits.abs().max() <= 2


def test_a_density_model_takes_a_shell():
    config = ImageDensityConfig(dim=8, size=(2, 2), mixers=(SIMPLE,), layers=1, values=4)
    model = ImageDensity(in_shell(config, "modern"))
    assert model(torch.randint(4, (2, 12))).shape == (2, 12, 4)


TWO_SIDED = dict(CASES[case] for case, causal in forms() if not causal and case in FIRST.values())


@torch.no_grad()
def where_one_token_stands(name: str) -> float:
    """Return how much the outputs of equal tokens differ by their place beside one that is not equal."""
    mixer = build_mixer(name, dim=DIM, **(MIXERS[name].facts.modern_options | TWO_SIDED[name])).double().eval()
    for p in mixer.parameters():  # some weights of pairs begin at 0
        p += 0.1 * torch.randn_like(p)
    x = torch.randn(DIM, dtype=torch.float64).repeat(1, 8, 1)
    x[:, 3] += 1.0
    y = mixer(x)[0]
    return float((y[[0, 1, 2, 5, 6, 7]] - y[4]).abs().max())


@pytest.mark.parametrize("name", [name for name in TWO_SIDED if MIXERS[name].facts.knows_positions])
def test_a_mixer_that_needs_no_added_positions_tells_where_a_token_stands(name):
    assert where_one_token_stands(name) > 1e-6


@pytest.mark.parametrize("name", ["synthesizer_dense", "synthesizer_factorized_dense", "aft_simple", "hydra", "linear"])
def test_one_that_does_not_tell_has_learned_positions_in_the_modern_shell(name):
    assert where_one_token_stands(name) < 1e-12
    spec = {"name": name, **TWO_SIDED[name]}
    assert in_shell(replace(LANGUAGE, mixers=(spec,)), "modern").positions == "learned"
