"""Hybrids of transformers take tokens back: assisted decoding, which it refuses for them, writes the same text."""

from __future__ import annotations

import pytest
import torch

from tokenmix import MixerError
from tokenmix.hosts import replace_mixers
from tokenmix.hosts.huggingface import croppable_states

import transformers  # isort: skip  (after the adapter, which repairs torchvision)
from transformers.cache_utils import LinearAttentionLayer  # isort: skip

pytestmark = pytest.mark.skipif(
    not hasattr(LinearAttentionLayer, "activate_past_recording"), reason="needs transformers 5.24"
)
SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 4}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
FAMILIES = {
    "Qwen3Next": DELTA
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "FalconH1": MAMBA | {"mamba_d_ssm": 64},  # a Mamba beside attention in one cache layer
}


def build(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **FAMILIES[name])
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def test_a_model_that_forgets_at_each_chunk_is_refused():
    options = {"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts": 2}
    torch.manual_seed(0)
    model = transformers.JambaForCausalLM(transformers.JambaConfig(**SIZES, **options))
    refused = pytest.raises(MixerError, match="JambaForCausalLM reads a chunk after a cache otherwise than at once")
    with refused, croppable_states(model):
        pass
    assert model._is_stateful
    assert model.training


def test_a_replaced_mixer_takes_no_tokens_back():
    """Only the recurrent layers of transformers do."""
    torch.manual_seed(0)
    model, _ = replace_mixers(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), "aft_simple")
    with croppable_states(model), pytest.raises(ValueError, match="requires a cache that can be cropped"):
        model.generate(prompt(), max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=2)


def prompt():
    return torch.randint(2, 9, (1, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_guesses_change_only_the_speed(name):
    model, draft, calls, how = build(name), build(name), [], {"max_new_tokens": 16, "do_sample": False}
    for p in draft.parameters():
        p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    expected = model.generate(prompt(), **how)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(prompt(), **how, assistant_model=draft)
    model.register_forward_hook(lambda *given: calls.append(1))
    with croppable_states(model), croppable_states(draft):
        assert torch.equal(model.generate(prompt(), **how, assistant_model=draft), expected)
        assert 1 < len(calls) < 16
        look_up = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}
        assert torch.equal(model.generate(prompt(), **how, **look_up), expected)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(prompt(), **how, assistant_model=draft)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model.generate(prompt(), **how), expected)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_cropped_cache_is_that_of_the_tokens_that_stay(name):
    model, x = build(name), torch.randint(2, 60, (2, 20), generator=torch.Generator().manual_seed(1))
    expected, cache = model(x[:, :12]).logits, transformers.DynamicCache(config=model.config)
    with croppable_states(model):
        model(x[:, :6], cache=cache)
        cache.activate_past_recording()
        for begin, end, left in ((6, 13, 5), (8, 9, 0), (9, 10, 1), (9, 12, 3), (9, 11, 0)):
            model(x[:, begin:end], cache=cache)
            cache.crop(-left)
        for token in (15, 16, 17):
            model(x[:, token : token + 1], cache=cache)
        cache.crop(-3)
        found = model(x[:, 11:12], cache=cache).logits
        with pytest.raises(MixerError, match="can take back the 1 tokens since the last crop, not 2"):
            cache.crop(-2)
    torch.testing.assert_close(found[:, 0], expected[:, 11], rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
