"""Weights that are elsewhere: offloaded, and fetched by hooks for each call."""

from __future__ import annotations

import torch

import tokenmix
from tokenmix.models import LM, LMConfig

from . import attempt


def _offloaded(*specs: dict) -> tuple[LM, LM, torch.Tensor]:
    from accelerate import cpu_offload

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = LM(LMConfig(vocab=31, dim=16, layers=len(specs), mixers=list(specs), max_len=32)).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.3)
        models.append(model)
    cpu_offload(models[1], execution_device=torch.device("cpu"))
    return models[0], models[1], torch.randint(0, 31, (2, 12))


def _off(*specs: dict) -> str:
    here, away, x = _offloaded(*specs)
    with torch.no_grad():
        try:
            return f"logits off by {float((away(x) - here(x)).abs().max()):.1e}"
        except RuntimeError as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"


@attempt("h1", "Logits of AFT-local under accelerate's cpu_offload")
def aft_local() -> str:
    """Its bias was read past the hooks."""
    return _off({"name": "aft_local", "window": 4, "rank": None})


@attempt("h1", "Logits of AFT-full, External and attention under accelerate's cpu_offload")
def hybrid() -> str:
    """The same in a hybrid."""
    return _off({"name": "aft_full", "rank": 3}, {"name": "external", "slots": 4}, {"name": "attention", "heads": 2})


@attempt("h1", "Streaming of AFT-conv with offloaded weights")
def streaming() -> str:
    """Extend passed hooks by."""
    here, away, x = _offloaded({"name": "aft_conv", "heads": 2, "kernel_size": 3})
    with torch.no_grad():
        try:
            same = torch.equal(here.generate(x, 5, temperature=0), away.generate(x, 5, temperature=0))
            return f"the same tokens: {same}"
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"


@attempt("h1", "Forward hooks on a mixer that streams")
def hooks() -> str:
    """How often a hook runs in three chunks."""
    mixer, seen = tokenmix.build_mixer("aft_simple", 8, causal=True), []
    mixer.register_forward_hook(lambda *call: seen.append(call))
    state = mixer.init_state(1)
    for _ in range(3):
        _, state = mixer.extend(torch.randn(1, 2, 8), state)
    return f"{len(seen)} calls seen of 3"


@attempt("h1", "Memories on the meta device, x on the CPU")
def meta() -> str:
    """A product with a meta tensor gives numbers."""
    mixer = tokenmix.build_mixer("external", 8, slots=4)
    mixer.memory_k = torch.nn.Parameter(mixer.memory_k.to("meta"))
    try:
        y = mixer(torch.randn(1, 5, 8))
    except ValueError as error:
        return str(error)
    return f"gives {'numbers' if y.device.type == 'cpu' else 'a meta tensor'} without an error"
