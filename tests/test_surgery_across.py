"""Test a decoder that reads an encoder through mixers.

What the cache keeps of the context, and where the next query stands.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

import tokenmix.hosts.surgery.cache as caches
from perturb import perturb_mixers
from surgery_models import make, padded, shared
from tokenmix import MIXERS, Mixer
from tokenmix.hosts.huggingface.cache import TokenMixStateLayer, name_cache_output
from tokenmix.hosts.surgery import replace_mixers
from tokenmix.mixers import state_bytes

ACROSS = [name for name, cls in MIXERS.items() if cls.facts.context]
NEEDS: dict[str, dict[str, Any]] = {"aft_local": {"window": 3}, "local": {"window": 4}}
WHERE = {
    "bart": "*encoder_attn",
    "marian": "*encoder_attn",
    "whisper": "*encoder_attn",
    "bert_decoder": "*crossattention",
    "gpt2_decoder": "*crossattention",
}
HOW = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}


def replaced(name: str, mixer: str) -> Any:
    """The decoder reads its context through this mixer; where a query stands shows in the logits."""
    return perturb_mixers(
        replace_mixers(shared(name, 0.3), {WHERE[name]: {"name": mixer, **NEEDS.get(mixer, {})}}, seed=0)[0]
    )


def inputs(name: str) -> dict[str, Any]:
    """What the decoder reads: rows of different lengths, padded on the left."""
    ids, mask = padded("left")
    torch.manual_seed(3)
    if name == "whisper":
        return {"input_features": torch.randn(3, 8, 24)}
    if name in ("bert_decoder", "gpt2_decoder"):
        return {"encoder_hidden_states": torch.randn(3, 9, 32), "encoder_attention_mask": mask}
    return {"input_ids": ids, "attention_mask": mask}


def logits(name: str, model: Any, ids: Tensor, cache: Any = None) -> Tensor:
    """Of the next tokens."""
    given = {"input_ids" if "decoder" in name else "decoder_input_ids": ids}
    return model(**inputs(name), **given, **name_cache_output(cache), use_cache=cache is not None).logits


def new_cache() -> EncoderDecoderCache:
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def in_chunks(name: str, model: Any, ids: Tensor, cache: Any) -> Tensor:
    return torch.cat([logits(name, model, chunk, cache) for chunk in ids.split([3, 1, 1, 2, 1], 1)], 1)


IDS = torch.arange(24).reshape(3, 8) * 7 % 57 + 3
CASES = [("bart", mixer) for mixer in ACROSS] + [
    (name, mixer) for name in WHERE for mixer in ("attention", "aft_full", "hydra") if name != "bart"
]


@pytest.mark.parametrize(("name", "mixer"), CASES)
@torch.no_grad()
def test_in_chunks_with_a_cache_as_at_once(name, mixer):
    new = replaced(name, mixer)
    whole = logits(name, new, IDS)
    assert (in_chunks(name, new, IDS, new_cache()) - whole).abs().max() <= 1e-5 * whole.abs().max()


@pytest.mark.parametrize("mixer", ACROSS)
@torch.no_grad()
def test_generate_with_a_cache_is_generate_without(mixer):
    new, given = replaced("bart", mixer), inputs("bart")
    for beams in (1, 3):
        assert torch.equal(
            new.generate(**given, **HOW, num_beams=beams),
            new.generate(**given, **HOW, num_beams=beams, use_cache=False),
        )


@pytest.mark.parametrize("mixer", ["attention", "aft_simple", "linear"])
@torch.no_grad()
def test_the_context_is_projected_once(mixer):
    new, calls = replaced("bart", mixer), []
    for name, module in new.named_modules():
        if name.endswith("encoder_attn.mixer.k_proj"):
            module.register_forward_hook(lambda m, args, y: calls.append(args[0].shape))
    in_chunks("bart", new, IDS, cache := new_cache())
    assert calls == [(3, 9, 32)] * 2
    assert cache.is_updated == {0: True, 1: True}
    if mixer == "aft_simple":  # three numbers for each feature, whatever the context's length
        assert state_bytes(cache.cross_attention_cache.layers[0].state) < 3 * (3 * 32 * 8 + 8) + 1


@torch.no_grad()
def test_tokens_taken_back_are_taken_back_across_too():
    """What assisted decoding does with tokens that were guessed wrong."""
    new, cache = replaced("bart", "aft_full"), new_cache()
    logits("bart", new, IDS[:, :6], cache)
    cache.crop(-2)
    assert (logits("bart", new, IDS[:, 4:], cache) - logits("bart", new, IDS)[:, 4:]).abs().max() < 1e-4
    one = {k: v[:1] for k, v in inputs("bart").items()}
    assert torch.equal(new.generate(**one, **HOW, prompt_lookup_num_tokens=2), new.generate(**one, **HOW))


@torch.no_grad()
def test_rows_are_picked_and_repeated():
    new, cache = replaced("bart", "aft_full"), new_cache()
    whole, given = logits("bart", new, IDS), inputs("bart")
    logits("bart", new, IDS[:, :6], cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    rows = torch.tensor([2, 2, 0, 0])
    given = {k: v[rows] for k, v in given.items()}
    assert (
        new(**given, decoder_input_ids=IDS[rows, 6:], **name_cache_output(cache)).logits - whole[rows, 6:]
    ).abs().max() < 1e-4


@torch.no_grad()
def test_a_cache_begins_anew_with_another_context():
    new = perturb_mixers(replace_mixers(shared("bart", 0.3), {"*decoder*": "aft_full"}, seed=0)[0])
    logits("bart", new, IDS, cache := new_cache())
    cache.reset()
    given = {k: v[1:] for k, v in inputs("bart").items()} | {"decoder_input_ids": IDS[1:]}
    assert (new(**given, **name_cache_output(cache)).logits - new(**given, use_cache=False).logits).abs().max() < 1e-5


@torch.no_grad()
def test_a_static_cache_keeps_what_the_host_keeps():
    new, given = replaced("bart", "aft_full"), inputs("bart")
    assert torch.equal(new.generate(**given, **HOW, cache_implementation="static"), new.generate(**given, **HOW))


@pytest.mark.parametrize("bug", ["misplaced", "halved", "whole"])
@torch.no_grad()
def test_planted_bugs_are_seen(bug, monkeypatch):
    put, init = TokenMixStateLayer.store, Mixer.init_state
    if bug == "misplaced":
        monkeypatch.setattr(caches, "tokens_before", lambda *args: 1)
    elif bug == "halved":
        spoilt = lambda state: type(state)(*(t * 0.5 if t.is_floating_point() else t for t in state))  # noqa: E731  (short enough to stand here)
        monkeypatch.setattr(TokenMixStateLayer, "store", lambda self, state, tokens: put(self, spoilt(state), tokens))
    else:  # padding of the context is taken in
        monkeypatch.setattr(
            Mixer, "init_state", lambda self, rows, context=None, context_mask=None: init(self, rows, context=context)
        )
    new = replaced("bart", "aft_full")
    whole = logits("bart", new, IDS)
    assert (in_chunks("bart", new, IDS, new_cache()) - whole).abs().max() > 1e-2 * whole.abs().max()


def test_what_is_kept_of_the_context_learns():
    new, cache = make("bart", 0.3), new_cache()
    new, _ = replace_mixers(new, {"*encoder_attn": "aft_simple"}, seed=0)
    in_chunks("bart", new, IDS, cache).square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for n, p in new.named_parameters() if ".mixer." in n)
