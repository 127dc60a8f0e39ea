"""States of streams are saved and loaded like weights."""

from __future__ import annotations

import pytest
import torch

from tokenmix import MIXERS, build_mixer


@pytest.mark.parametrize("name", [name for name, cls in MIXERS.items() if cls.facts.streaming])
def test_states_are_saved_and_loaded_as_weights_are(name, tmp_path):
    mixer = build_mixer(name, 16, causal=True, **MIXERS[name].example_options(8))
    with torch.no_grad():
        _, state = mixer.extend(torch.randn(1, 5, 16), mixer.init_state(1))
        torch.save(state, tmp_path / "state.pt")
        loaded = torch.load(tmp_path / "state.pt")
        assert type(loaded) is type(state)
        x = torch.randn(1, 2, 16)
        assert torch.equal(mixer.extend(x, loaded)[0], mixer.extend(x, state)[0])
