"""Sample far beyond any training length with constant state, and exactly.

The streamed logits are the parallel ones at every position.
"""

from __future__ import annotations

import pytest
import torch

from tokenmix import state_bytes
from tokenmix.models import LM, LMConfig


def sampled(mixers: tuple, n: int) -> tuple[LM, torch.Tensor, torch.Tensor, set[int]]:
    """Sample n bytes one by one from a model with visible weights.

    Return the model, the bytes, the logits met on the way, and the sizes its state had.
    """
    torch.manual_seed(0)
    model = LM(LMConfig(dim=32, max_len=8192, mixers=mixers, layers=2)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    generator = torch.Generator().manual_seed(1)
    token, state, tokens, logits, sizes = torch.tensor([[65]]), model.init_state(1), [], [], set()
    with torch.no_grad():
        for _ in range(n):
            tokens.append(token)
            step, state = model.extend(token, state)
            logits.append(step)
            sizes.add(state_bytes(state))
            token = torch.multinomial(step[:, -1].softmax(-1), 1, generator=generator)
    return model, torch.cat(tokens, 1), torch.cat(logits, 1), sizes


@pytest.mark.slow
def test_5000_bytes_from_aft_local():
    model, tokens, streamed, sizes = sampled(({"name": "aft_local", "window": 32, "rank": 16},), 5000)
    assert len(sizes) == 1
    with torch.no_grad():
        parallel = model(tokens)
    error = float((streamed - parallel).abs().max())
    print(
        f"5000 bytes, state of {sizes.pop()} bytes throughout, "
        f"largest difference of a logit {error:.1e}, largest logit {float(parallel.abs().max()):.1f}"
    )
    assert error <= 1e-5


@pytest.mark.parametrize("mixer", [
    {"name": "aft_simple"}, {"name": "aft_conv", "heads": 4, "kernel_size": 9},
    {"name": "aft_local", "window": 16, "outside": "none"},
])  # fmt: skip
def test_300_bytes_from_the_others(mixer):
    model, tokens, streamed, sizes = sampled((mixer,), 300)
    assert len(sizes) == 1
    with torch.no_grad():
        assert float((streamed - model(tokens)).abs().max()) <= 1e-5
