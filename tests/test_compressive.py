"""Compressive attention: what is seen as it is and what compressed, its reconstruction loss, its state."""

from __future__ import annotations

import pytest
import torch

from tokenmix import aux_losses, build_mixer, state_bytes
from tokenmix.contrib.compressive_forms import Sizes, visible


def built(**options):
    torch.manual_seed(0)
    return build_mixer("compressive", 8, **{"heads": 2, **options}).double().eval()


@pytest.mark.parametrize(("memory", "rate"), [(1, 1), (4, 3), (5, 2), (3, 4)])
def test_every_position_is_seen_once(memory, rate):
    """The last n_m positions as they are, then n_cm whole groups, without a gap or an overlap."""
    sizes, place = Sizes(memory, 2, rate, "mean"), torch.arange(60)
    near, far = visible(place, place, torch.arange(60), sizes, True)
    for t in range(40, 60):
        tokens = [s for s in range(t + 1) if near[t, s]]
        compressed = [g * rate + i for g in range(60) if far[t, g] for i in range(rate)]
        assert tokens == list(range(tokens[0], t + 1))
        assert memory <= len(tokens) <= memory + rate - 1
        assert compressed == list(range(tokens[0] - 2 * rate, tokens[0]))


@pytest.mark.parametrize("pool", ["mean", "max"])
def test_at_rate_one_it_is_transformer_xl(pool):
    x = torch.randn(2, 30, 8, dtype=torch.float64)
    for causal in (True, False):
        mixer = built(memory=4, compressed=5, rate=1, pool=pool, causal=causal)
        plain = build_mixer("transformer_xl", 8, heads=2, memory=9, causal=causal).double()
        plain.load_state_dict(mixer.state_dict())
        torch.testing.assert_close(mixer(x), plain(x), rtol=1e-10, atol=1e-10)


def test_the_reconstruction_loss_teaches_the_compression_only():
    mixer, x = (
        built(memory=4, compressed=6, rate=3, pool="conv", causal=True),
        torch.randn(2, 40, 8, dtype=torch.float64),
    )
    with aux_losses() as losses:
        mixer(x)
    losses["compressive"].backward()
    assert {n for n, p in mixer.named_parameters() if p.grad is not None} == {"squeeze", "squeeze_bias"}
    optimiser, values = torch.optim.Adam([mixer.squeeze, mixer.squeeze_bias], 0.01), []
    for _ in range(40):
        with aux_losses() as losses:
            mixer(x)
        optimiser.zero_grad()
        losses["compressive"].backward()
        optimiser.step()
        values.append(float(losses["compressive"].detach()))
    assert values[-1] < 0.8 * values[0]


def test_nothing_is_lost_at_rate_one():
    with aux_losses() as losses:
        built(memory=2, compressed=4, rate=1, causal=True)(torch.randn(1, 20, 8, dtype=torch.float64))
    assert float(losses["compressive"]) < 1e-20


def test_the_state_does_not_grow():
    mixer, sizes = built(causal=True, memory=4, compressed=3, rate=2), []
    state = mixer.init_state(1)
    for n in (1, 50, 600):
        _, state = mixer.extend(torch.randn(1, n, 8, dtype=torch.float64), state)
        sizes.append(state_bytes(state))
    assert len(set(sizes)) == 1


def test_a_token_beyond_both_memories_is_forgotten():
    mixer, x = built(causal=True, memory=4, compressed=3, rate=2), torch.randn(1, 30, 8, dtype=torch.float64)
    changed = x.clone()
    changed[:, 10] += 1
    moved = (mixer(x) != mixer(changed)).any(-1)[0].nonzero()[:, 0].tolist()
    assert moved[0] == 10
    assert 19 <= moved[-1] <= 20


def test_parameters():
    D, shared = 8, 4 * (64 + 8) + 64 + 16
    assert built().cost(8).parameters == shared
    assert built(pool="conv", rate=3).cost(8).parameters == shared + 3 * D * D + D
