"""Plant bugs, each of which breaks one step of the surgery: what the other tests compare sees it.

Replaced models also compile whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tokenmix.hosts.surgery.adapters as adapters
import tokenmix.hosts.surgery.build as build
import tokenmix.hosts.surgery.sites as sites
import tokenmix.hosts.surgery.weights as weights
from surgery_models import make, padded, shared
from test_surgery import TIGHT, final, outputs
from tokenmix import MixerError
from tokenmix.hosts.huggingface.cache import TokenMixStateLayer, as_output
from tokenmix.hosts.surgery import replace_mixers
from tokenmix.hosts.surgery.masks import Read
from tokenmix.hosts.surgery.probe import Proofs


def no_mask(patch: Any) -> None:
    patch.setattr(adapters, "read_mask", lambda *args, **options: Read(None, None))


def keys_for_values(patch: Any) -> None:
    slots = weights.slots
    patch.setattr(
        weights, "slots", lambda *at: {**(found := slots(*at)), "k_proj": found["v_proj"], "v_proj": found["k_proj"]}
    )


def no_rotation(patch: Any) -> None:
    patch.setattr(build, "rotary_spec", lambda *args, **options: None)


def no_norms(patch: Any) -> None:
    patch.setattr(sites, "_norm_of", lambda module: None)


def norms_as_they_are(patch: Any) -> None:
    def without_shift(*at):
        return {part: replace(slot, shift=0.0) for part, slot in slots(*at).items()}

    slots = weights.slots
    patch.setattr(weights, "slots", without_shift)


def one_rope(patch: Any) -> None:
    patch.setattr(build, "_rope", lambda module: module.config.rope_parameters["full_attention"])


def no_window(patch: Any) -> None:
    read, pairs = adapters.read_mask, adapters.within
    patch.setattr(adapters, "read_mask", lambda *args, **options: Read(read(*args, **options).key_mask, None))
    patch.setattr(adapters, "within", lambda queries, causal, window, device: pairs(queries, causal, None, device))


def not_causal(patch: Any) -> None:
    described = sites._clip
    patch.setattr(sites, "_clip", lambda module: described(module) | {"causal": False})


BUGS = [
    ("bert", no_mask),
    ("llama", no_mask),
    ("bart", no_mask),
    ("detr", no_mask),
    ("bert", keys_for_values),
    ("timm", keys_for_values),
    ("gpt_neox", keys_for_values),
]
BUGS += [("llama", no_rotation), ("qwen3", no_norms), ("clip_text", not_causal), ("gemma3", norms_as_they_are)]
BUGS += [("gemma3", one_rope), ("modernbert", one_rope), ("modernbert", no_window), ("embedding_gemma", no_window)]


@pytest.mark.parametrize(("name", "bug"), BUGS)
@torch.no_grad()
def test_softmax_into_softmax_sees_it(name, bug, monkeypatch):
    model = make(name)
    bug(monkeypatch)
    if bug is not not_causal and (name, bug) != ("llama", no_mask):  # the probe believes the site, and pads no decoder
        with pytest.raises(MixerError, match="is not softmax attention with its weights"):
            replace_mixers(model, "attention")
    monkeypatch.setattr(Proofs, "prove", lambda self, site: None)
    new, _ = replace_mixers(model, "attention")
    assert (
        max((outputs(name, new, side) - outputs(name, model, side)).abs().max() for side in ("left", "none"))
        > 100 * TIGHT
    )


@pytest.mark.parametrize("bug", ["halved", "forgotten"])
@torch.no_grad()
def test_generation_with_a_cache_sees_it(bug, monkeypatch):
    put = TokenMixStateLayer.put
    spoilt = {
        "halved": lambda state: type(state)(*(t * 0.5 if t.is_floating_point() else t for t in state)),
        "forgotten": lambda state: None,
    }[bug]
    monkeypatch.setattr(TokenMixStateLayer, "put", lambda self, state, tokens: put(self, spoilt(state), tokens))
    new, _ = replace_mixers(shared("llama"), "hydra", seed=0)
    ids = padded("left")[0][:1]
    whole, first = new(ids).logits, new(ids[:, :5], use_cache=True)
    second = new(ids[:, 5:], use_cache=True, **as_output(first.past_key_values))
    assert (second.logits - whole[:, 5:]).abs().max() > 100 * TIGHT


@pytest.mark.parametrize("spec", ["attention", "aft_simple"])
@pytest.mark.parametrize("name", ["bert", "qwen3", "gpt2", "bart", "clip_vision", "timm"])
@torch.no_grad()
def test_replaced_models_compile_whole(name, spec):
    torch._dynamo.reset()
    new, _ = replace_mixers(make(name, 0.1), spec, seed=0)
    ids, mask = padded("right")
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask} | (
        {"use_cache": False} if name in ("qwen3", "gpt2", "bart") else {}
    )
    given |= {"decoder_input_ids": ids} if name == "bart" else {}
    if name in ("clip_vision", "timm"):
        given = {"x" if name == "timm" else "pixel_values": torch.randn(2, 3, 32, 32)}
    compiled = torch.compile(new, backend="aot_eager", fullgraph=True)
    assert (final(compiled(**given)) - final(new(**given))).abs().max() <= TIGHT


@pytest.mark.parametrize("name", ["llama", "bert"])
@torch.no_grad()
def test_compiled_code_stops_at_a_mask_it_cannot_look_into(name):
    torch._dynamo.reset()
    new, _ = replace_mixers(make(name, 0.1), "attention")
    ids, pairs = padded("right")[0][:1], torch.ones(9, 9, dtype=torch.bool)
    pairs[4:, :4] = pairs[:4, 4:] = False  # two sequences
    whole = torch.ones(9, 9, dtype=torch.bool)
    if name == "llama":
        pairs, whole = pairs.tril(), whole.tril()
    options = {"use_cache": False} if name == "llama" else {}
    compiled = torch.compile(new, backend="aot_eager", fullgraph=True)
    assert (
        final(compiled(ids, attention_mask=whole[None, None], **options))
        - final(new(ids, attention_mask=whole[None, None], **options))
    ).abs().max() <= TIGHT
    assert (
        final(new(ids, attention_mask=pairs[None, None], **options))
        - final(new(ids, attention_mask=whole[None, None], **options))
    ).abs().max() > 0.01
    with pytest.raises(
        RuntimeError, match=r"att.*: gets a mask beyond padding, order and window, which compiled code cannot inspect"
    ):
        compiled(ids, attention_mask=pairs[None, None], **options)
