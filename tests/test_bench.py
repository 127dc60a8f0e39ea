"""Measurements and the sentence made from them."""

from __future__ import annotations

import pytest
import torch

from tokenmix import state_bytes
from tokenmix.lab.bench import decoding, state_after, stops_winning, training_rate
from tokenmix.models import LM, LMConfig


def model(*specs):
    return LM(LMConfig(dim=8, max_len=600, mixers=specs))


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({1: 1.0, 2: 2.0, 4: 4.0}, {1: 3.0, 2: 3.0, 4: 3.0}, "a beats b up to 2 and stops winning at 4"),
        ({1: 1.0, 2: 1.0}, {1: 3.0, 2: 3.0}, "a beats b at every length measured (1 to 2)"),
        ({1: 9.0, 2: 9.0}, {1: 3.0, 2: 3.0}, "a beats b at no length measured (1 to 2)"),
        ({1: 2.99}, {1: 3.0}, "a beats b at no length measured (1)"),
        ({1: 9.0, 2: 1.0}, {1: 3.0, 2: 3.0}, "a beats b at 2, the longest measured among them, but not at 1"),
        (
            {1: 1.0, 2: 9.0, 4: 1.0, 8: 9.0},
            {1: 3.0, 2: 3.0, 4: 3.0, 8: 3.0},
            "a beats b at 1, 4 and no longer from 8 on",
        ),
        ({1: 1.0}, {2: 1.0}, "a and b were not measured at a common length"),
    ],
)
def test_the_sentence_follows_from_the_numbers(ours, theirs, said):
    assert stops_winning("a", ours, "b", theirs, lower=True) == said


def test_higher_is_better_turns_it_round():
    assert stops_winning("a", {1: 9.0}, "b", {1: 3.0}, lower=False) == "a beats b at every length measured (1)"


def test_state_is_that_of_reading_the_context_at_once():
    m = model({"name": "attention", "heads": 2}, {"name": "aft_local", "window": 4, "rank": 2}).eval()
    tokens = torch.arange(300)[None] % 256
    with torch.no_grad():
        _, at_once = m.extend(tokens, m.init_state(1))
        next_at_once, _ = m.extend(tokens[:, :1], at_once)
        next_in_chunks, _ = m.extend(tokens[:, :1], state_after(m, 300))
    torch.testing.assert_close(next_in_chunks, next_at_once, rtol=1e-4, atol=1e-5)


def test_decoding_reports_growing_and_constant_states():
    growing, constant = model({"name": "attention", "heads": 2}), model({"name": "aft_simple"})
    short, long = decoding(growing, 64, tokens=3), decoding(growing, 512, tokens=3)
    assert long.state_bytes - short.state_bytes == (512 - 64) * (2 * 8 * 4 + 1)
    assert (
        decoding(constant, 64, tokens=3).state_bytes
        == decoding(constant, 512, tokens=3).state_bytes
        == state_bytes(constant.init_state(1))
    )
    assert long.ms_per_token > 0
    assert growing.training


def test_training_rate_is_tokens_over_time_and_leaves_no_gradients():
    m = model({"name": "aft_simple"})
    assert 1 < training_rate(m, 32, batch_size=2, repeats=1) < 1e9
    assert all(p.grad is None for p in m.parameters())
