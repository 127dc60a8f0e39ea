"""Mixers without parameters in the attention layers of transformers' own models."""

from __future__ import annotations

import pytest
import torch

from tokenmix import MixerError, reference
from tokenmix.hosts.huggingface import register_attention
from tokenmix.hosts.huggingface.attention_interface import candidates

import transformers  # isort: skip  (after the adapter, which repairs torchvision)

REFERENCES = {
    "hydra": lambda q, k, v, heads, **given: reference.hydra(q, k, v, **given),
    "aft_simple": lambda q, k, v, heads, **given: reference.aft_simple(q, k, v, **given),
    "multihead_linear": lambda q, k, v, heads, **given: reference.multihead_linear(q, k, v, heads=heads, **given),
    "linear": lambda q, k, v, heads, **given: reference.linear_attention(q, k, v, heads=heads, **given),
}
SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(mixer: str, **options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES, num_key_value_heads=2, initializer_range=0.3, eos_token_id=None, pad_token_id=0, **options
    )
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=f"tokenmix_{mixer}").eval()


def tokens(length: int = 9) -> torch.Tensor:
    return torch.randint(1, 60, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mixer", candidates())
@torch.no_grad()
def test_the_layer_computes_the_reference(mixer):
    """Between a Llama layer's projections, with grouped keys and padding on the left."""
    model, found = llama(mixer), {}
    attention = model.model.layers[0].self_attn
    attention.o_proj.register_forward_pre_hook(lambda module, args: found.update(y=args[0]))
    kept = {}
    mask = torch.stack([torch.arange(9) >= 4, torch.arange(9) >= 0]).long()
    interface = transformers.AttentionInterface()
    name, plain = f"tokenmix_{mixer}", interface[f"tokenmix_{mixer}"]

    def watched(module, query, key, value, attention_mask, **given):
        kept.setdefault("qkv", (query, key, value, attention_mask))
        return plain(module, query, key, value, attention_mask, **given)

    interface.register(name, watched)
    try:
        model(tokens() * mask, attention_mask=mask, use_cache=False)
    finally:
        interface.register(name, plain)
    query, key, value, padding = kept["qkv"]
    assert torch.equal(padding, mask.bool())
    wide = [a.repeat_interleave(4 // a.shape[1], 1).transpose(1, 2).flatten(2).double() for a in (query, key, value)]
    wanted = wanted_of(mixer, wide, mask.bool())
    real = mask.bool()
    torch.testing.assert_close(found["y"][real].double(), wanted[real], rtol=0, atol=1e-5)


def wanted_of(mixer, wide, mask):
    ok = mask[:, None] & torch.ones(9, 9, dtype=torch.bool).tril()
    return REFERENCES[mixer](*wide, heads=4, mask=ok)


@pytest.mark.parametrize("mixer", candidates())
@torch.no_grad()
def test_generation_and_padding(mixer):
    model, x = llama(mixer), tokens()
    options = {"max_new_tokens": 6, "do_sample": False}
    written = model.generate(x, **options)
    assert torch.equal(written, model.generate(x, use_cache=False, **options))
    assert torch.equal(written, model.generate(x, prefill_chunk_size=4, **options))
    mask = torch.stack([torch.arange(9) >= 4, torch.arange(9) >= 0]).long()
    places = (mask.cumsum(1) - 1).clamp_min(
        0
    )  # what generate() gives; these mixers see absolute positions in rotated queries and keys
    logits = model(x * mask, attention_mask=mask, position_ids=places).logits
    for row, n in enumerate((4, 0)):
        torch.testing.assert_close(logits[row, n:], model(x[row : row + 1, n:]).logits[0], rtol=0, atol=2e-5)


@torch.no_grad()
def test_encoders_are_not_causal():
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, initializer_range=0.3)
    model = transformers.BertModel._from_config(config, attn_implementation="tokenmix_hydra").eval()
    x = tokens()
    mask = torch.stack([torch.arange(9) < 5, torch.arange(9) < 9]).long()
    got = model(x * mask, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(got[0, :5], model(x[:1, :5]).last_hidden_state[0], rtol=0, atol=2e-5)
    y = x.clone()
    y[:, -1] = (y[:, -1] % 59) + 1
    assert (model(x).last_hidden_state - model(y).last_hidden_state)[:, 0].abs().max() > 1e-3


def test_options_make_another_name():
    assert register_attention("hydra", "hydra_averaged", normalise=True) == "hydra_averaged"
    model, x = llama("hydra"), tokens()
    before = model(x).logits
    model.set_attn_implementation("hydra_averaged")
    assert (model(x).logits - before).abs().max() > 1e-3


@torch.no_grad()
def test_masks_that_are_no_padding_are_refused():
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=3)
    model = transformers.MistralForCausalLM._from_config(config, attn_implementation="tokenmix_hydra")
    with pytest.raises(MixerError, match="more than causal order and padding"):
        model(tokens())
    with pytest.raises(MixerError, match="more than causal order and padding"):
        llama("hydra")(tokens(), position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]), use_cache=False)
    with pytest.raises(MixerError, match="cannot honour a mask of pairs"):
        llama("hydra")(tokens(), attention_mask=torch.ones(2, 1, 9, 9, dtype=torch.bool))
    with pytest.raises(MixerError, match="a cache that grows"):
        llama("hydra").generate(tokens(), cache_implementation="static", max_new_tokens=3)
