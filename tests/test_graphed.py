"""Test decoding as a CUDA graph.

Without a GPU the capture is left out: what is replayed is then the same step, in the same memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenmix.export.graphed as graphed
from cases import CASES, GRIDS
from perturb import perturb_mixers
from tokenmix import MIXERS, MixerError, build_mixer
from tokenmix.export import GraphedDecoder
from tokenmix.mixers.state import reorder
from tokenmix.models import LM, ImageDensity, ImageDensityConfig, LMConfig

AVAILABLE = torch.cuda.is_available()
HYBRID = (
    {"name": "pooling", "window": 3},
    {"name": "aft_local", "window": 3},
    {"name": "hydra"},
    {"name": "aft_simple"},
    {"name": "aft_conv", "heads": 4, "kernel_size": 3},
)


@pytest.fixture(autouse=True)
def device(monkeypatch) -> str:
    if AVAILABLE:
        return "cuda"
    monkeypatch.setattr(graphed, "DEVICE", "cpu")
    monkeypatch.setattr(graphed, "capture_graph", lambda call: (call(), call)[1])  # a call at capture, as there
    return "cpu"


def lm(device: str, mixers: tuple[dict[str, Any], ...] = HYBRID, **options: Any) -> Any:
    torch.manual_seed(0)
    return (
        perturb_mixers(LM(LMConfig(**{"dim": 16, "max_len": 24, "mixers": mixers, "vocab": 32} | options)))
        .eval()
        .to(device)
    )


def kept(mixer: str) -> bool:
    cls = MIXERS[mixer]
    return cls.facts.streaming and cls.facts.causal


STREAMS = [
    name for name, (mixer, _) in CASES.items() if kept(mixer) and name not in GRIDS and mixer != "pooling"
]  # which alone has no device


@pytest.mark.parametrize("name", STREAMS)
@torch.no_grad()
def test_equals_extend_for_every_mixer_or_names_what_grows(name, device):
    mixer, options = CASES[name]
    torch.manual_seed(0)
    model = perturb_mixers(build_mixer(mixer, dim=16, **options | {"causal": True})).eval().to(device)
    x = torch.randn(3, 6, 16, device=device)
    _, state = model.extend(x[:, :2], model.init_state(3))
    if model.mixing_cost(10).state != model.mixing_cost(20).state:
        with pytest.raises(MixerError, match=f"the state of {type(model).__name__} grows with each token"):
            GraphedDecoder(model, 3)
        return
    decoder, own = GraphedDecoder(model, 3), state
    for t in range(2, 6):
        y, own = decoder.extend(x[:, t : t + 1], own)
        wanted, state = model.extend(x[:, t : t + 1], state)
        torch.testing.assert_close(y, wanted, atol=1e-5, rtol=0)


@torch.no_grad()
def test_generation_is_that_of_the_model(device):
    model = lm(device)
    decoder = GraphedDecoder(model, 3)
    for prompt in (
        torch.randint(32, (3, 5), device=device),
        torch.randint(32, (3, 2), device=device),
    ):  # the second begins anew
        assert torch.equal(model.generate(prompt, 12, seed=1, decoder=decoder), model.generate(prompt, 12, seed=1))
    mask = torch.ones(3, 5, dtype=torch.bool, device=device)
    mask[1, :3] = False
    prompt = torch.randint(32, (3, 5), device=device)
    padded = {"temperature": 0, "key_mask": mask}
    assert torch.equal(model.generate(prompt, 9, decoder=decoder, **padded), model.generate(prompt, 9, **padded))


@torch.no_grad()
def test_rows_may_be_reordered_between_steps(device):
    model = lm(device)
    decoder, tokens, order = (
        GraphedDecoder(model, 3),
        torch.randint(32, (3, 4), device=device),
        torch.tensor([2, 0, 0], device=device),
    )
    _, state = model.prefill(tokens)
    _, own = decoder.extend(tokens[:, :1], state)
    _, state = model.extend(tokens[:, :1], state)
    own, state = reorder(own, order), reorder(state, order)
    torch.testing.assert_close(
        decoder.extend(tokens[:, 1:2], own)[0], model.extend(tokens[:, 1:2], state)[0], atol=1e-5, rtol=0
    )


@torch.no_grad()
def test_densities_of_images(device):
    torch.manual_seed(0)
    model: Any = (
        perturb_mixers(
            ImageDensity(ImageDensityConfig(size=(3, 3), dim=16, layers=2, mixers=({"name": "aft_simple"},), values=16))
        )
        .eval()
        .to(device)
    )
    decoder, state = GraphedDecoder(model, 2), model.init_state(2)
    own, tokens = state, torch.randint(16, (2, model.max_len), device=device)
    for token in tokens.split(1, 1):
        logits, own = decoder.extend(token, own)
        wanted, state = model.extend(token, state)
        torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=0)
    with pytest.raises(MixerError, match="built with max_len=27 and has read as many tokens"):
        decoder.extend(token, own)


def test_a_state_that_is_not_taken_over_is_seen(device, monkeypatch):
    """Planted: the capture's own steps left in the state, and a step that keeps the old state."""
    model, prompt = lm(device), torch.randint(32, (3, 5), device=device)
    wanted = model.generate(prompt, 12, temperature=0)
    for bug in ("_load", "_step"):
        broken = GraphedDecoder(model, 3)
        if bug == "_load":
            monkeypatch.setattr(broken, "_load", lambda state: None)
        else:
            broken._replay = lambda broken=broken: broken._program(broken._token, broken.state)[0]
            broken._left = None
        assert not torch.equal(model.generate(prompt, 12, temperature=0, decoder=broken), wanted)


@torch.no_grad()
def test_what_cannot_be_is_refused_in_one_line(device, monkeypatch):
    model = lm(device)
    with pytest.raises(MixerError, match="the state of Attention grows with each token"):
        GraphedDecoder(lm(device, (*HYBRID, {"name": "attention", "heads": 4})))
    with pytest.raises(MixerError, match="in training"):
        GraphedDecoder(lm(device).train())
    with pytest.raises(MixerError, match="expects an LM, an ImageDensity or a streaming mixer, got Linear"):
        GraphedDecoder(torch.nn.Linear(2, 2))
    with pytest.raises(MixerError, match="batch_size must be an integer >= 1, got 0"):
        GraphedDecoder(model, 0)
    decoder, tokens = GraphedDecoder(model, 2), torch.zeros(2, 1, dtype=torch.long, device=device)
    with pytest.raises(MixerError, match=r"tokens of shape \(2, 1\), got \(3, 1\)"):
        decoder.extend(torch.zeros(3, 1, dtype=torch.long), decoder.state)
    with pytest.raises(MixerError, match="built for a state of 2 rows"):
        decoder.extend(tokens, model.init_state(3))
    state = decoder.state
    for _ in range(24):
        _, state = decoder.extend(tokens, state)
    with pytest.raises(MixerError, match="built with max_len=24 and has read as many tokens; stop here"):
        decoder.extend(tokens, state)
    with pytest.raises(MixerError, match="belongs to another model"):
        lm(device).generate(tokens, 2, decoder=decoder)
    monkeypatch.setattr(graphed, "DEVICE", "elsewhere")
    with pytest.raises(MixerError, match="CUDA graphs need 'elsewhere'. Call model.extend there"):
        GraphedDecoder(model)
