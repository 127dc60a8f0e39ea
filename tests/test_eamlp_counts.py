"""Parameters of EAMLP (External attention in the T2T-ViT shell) to the digit: the shell by formula, the mixing layer as we build it."""

from __future__ import annotations

import pytest
import torch

from tokenmix import build_mixer

MODELS = {  # name: (width, layers, heads, MLP ratio, parameters of the official code)
    "EAMLP-7": (256, 7, 4, 2, 6_146_638),
    "EAMLP-10": (256, 10, 4, 2, 8_540_110),
    "EAMLP-12": (256, 12, 4, 2, 10_135_758),
    "EAMLP-14": (384, 14, 6, 3, 29_877_070),
    "EAMLP-19": (448, 19, 7, 3, 54_559_054),
    "EAMLP-24": (512, 24, 8, 3, 89_456_590),
}
TOKEN, TOKEN_SLOTS, CLASSES, POSITIONS = 64, 128, 1000, 14 * 14 + 1


def linear(inside: int, outside: int, bias: bool = True) -> int:
    return inside * outside + (outside if bias else 0)


def norm(width: int) -> int:
    return 2 * width


def mlp(width: int, hidden: int) -> int:
    return linear(width, hidden) + linear(hidden, width)


def token_stage(patch: int) -> int:
    """One tokens-to-token stage: single-head External attention from a soft-split patch to 64 features, its memories untied, only the second with a bias."""
    attention = linear(patch, TOKEN) + linear(TOKEN, TOKEN_SLOTS, bias=False) + linear(TOKEN_SLOTS, TOKEN) + linear(TOKEN, TOKEN)
    return norm(patch) + attention + norm(TOKEN) + mlp(TOKEN, TOKEN)


def shell(width: int, layers: int, ratio: int) -> int:
    """Everything but the mixing layers; the sinusoidal position table is fixed but counted, as torch counts it."""
    patches = token_stage(7 * 7 * 3) + token_stage(3 * 3 * TOKEN) + linear(3 * 3 * TOKEN, width)
    blocks = layers * (2 * norm(width) + mlp(width, ratio * width))
    return patches + width + POSITIONS * width + blocks + norm(width) + linear(width, CLASSES)


@pytest.mark.parametrize("name", MODELS)
def test_parameters(name):
    width, layers, heads, ratio, printed = MODELS[name]
    with torch.device("meta"):
        layer = build_mixer("external_multihead", width, heads=heads).cost(POSITIONS).parameters
    assert shell(width, layers, ratio) + layers * layer == printed


def test_the_token_stage_is_our_single_head_layer_but_for_its_input():
    """Our layer maps 64 features to 64; the stage reads a patch of another width and adds the bias of the second memory."""
    with torch.device("meta"):
        ours = build_mixer("external", TOKEN, slots=TOKEN_SLOTS).cost(1).parameters
    for patch in (147, 576):
        rest = norm(patch) + norm(TOKEN) + mlp(TOKEN, TOKEN)
        assert token_stage(patch) - rest == ours - linear(TOKEN, TOKEN) + linear(patch, TOKEN) + TOKEN
