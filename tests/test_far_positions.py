"""Test that positions which float64 rounds are refused, and those which it holds are right."""

from __future__ import annotations

import pytest
import torch

import tokenmix
from tokenmix import MixerError
from tokenmix.positions.pair import ALiBi
from tokenmix.positions.rotary import RotaryPositions
from tokenmix.positions.sinusoidal import SinusoidalPositions
from tokenmix.positions.smooth import SmoothPositions
from tokenmix.positions.xpos import XPositions

FAR = (2**53 + 2, 2**62, 2**63 - 1, -(2**53) - 2, -(2**63))
ROWS = [
    {"positions": {"name": "rotary"}},
    {"positions": {"name": "xpos"}},
    {"bias": {"name": "alibi"}},
    {"bias": {"name": "t5"}},
    {"bias": {"name": "kerple"}},
    {"bias": {"name": "shaw", "max_distance": 3}},
]


@pytest.mark.parametrize("options", ROWS, ids=lambda o: next(iter(o.values()))["name"])
@pytest.mark.parametrize("far", FAR)
def test_far_positions_are_refused(options, far):
    mixer, x = tokenmix.build_mixer("attention", 16, heads=2, causal=True, **options), torch.randn(1, 2, 16)
    at = torch.tensor([[0, far] if far > 0 else [far, 0]])
    with pytest.raises(MixerError, match="2\\^53") as said:
        mixer(x, positions=at)
    assert "\n" not in str(said.value)
    with pytest.raises(MixerError, match="2\\^53"):
        mixer.extend(x[:, :1], mixer.init_state(1), positions=torch.tensor([[far]]))


@pytest.mark.parametrize("far", FAR)
def test_far_positions_are_refused_by_each_method(far):
    at, x = torch.tensor([[far]]), torch.randn(1, 1, 16)
    for call in (
        lambda: RotaryPositions(8)(at, x),
        lambda: XPositions(8)(at, x),
        lambda: SinusoidalPositions(8)(at),
        lambda: SmoothPositions(8)(at),
        lambda: ALiBi(2)(at, at, torch.float32),
    ):
        with pytest.raises(MixerError, match="2\\^53"):
            call()


def test_positions_up_to_the_limit_are_told_apart():
    """Their neighbours too: what a pair of tokens sees is their distance."""
    mixer, x = (
        tokenmix.build_mixer("attention", 16, heads=2, causal=True, bias={"name": "alibi"}),
        torch.randn(1, 6, 16),
    )
    near = torch.arange(6)[None]
    for start in (2**53 - 5, -(2**53)):
        torch.testing.assert_close(mixer(x, positions=near + start), mixer(x, positions=near))
