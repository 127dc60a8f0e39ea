"""Positions with gaps, and padding on any side, through generation and the cache: Llama's rules, for every mixer.

Weights are large, because at transformers' initialisation the mixers hardly show in the logits.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import transformers

from huggingface_checks import config
from perturb import perturb_mixers
from tokenmix import MixerError
from tokenmix.hosts.huggingface import TokenMixForCausalLM
from tokenmix.hosts.huggingface.cache import name_cache_output
from tokenmix.hosts.surgery import replace_mixers
from tokenmix.mixers import MIXERS

LENGTH = 40
STREAMING = sorted(name for name, cls in MIXERS.items() if cls.facts.causal and cls.facts.streaming)
SMALL = {"window": 4, "kernel_size": 3, "block": 4, "block_size": 4, "stride": 4}
SPECS = {name: {"name": name} for name in STREAMING} | {
    "rotary": {"name": "attention", "positions": {"name": "rotary"}},
    "learned": {"name": "attention", "positions": {"name": "learned"}, "max_len": LENGTH},
    "alibi": {"name": "attention", "bias": {"name": "alibi"}},
    "shaw": {"name": "attention", "bias": {"name": "shaw", "max_distance": 3}},
    "pooled": {"name": "local", "window": 4, "outside": "pool"},
    "decay": {"name": "aft_forget", "decay": "fixed"},
}


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def model_of(kind, **options):
    """Two layers of a mixer with a window far shorter than the text, where it has one."""
    spec = dict(SPECS[kind])
    cls = MIXERS[spec["name"]]
    example = cls.example_options(LENGTH, heads=2)
    known = {name for name in ("window", "kernel_size") if name in example}
    spec = {**example, **{name: SMALL[name] for name in known}, **spec}
    torch.manual_seed(0)
    return perturb_mixers(TokenMixForCausalLM(config([spec], num_hidden_layers=2, **options)))


def tokens(rows, length, seed=1):
    return torch.randint(1, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


def layouts():
    """Name -> (attention_mask, position_ids) of three rows of 12 tokens."""
    index, every = torch.arange(12), torch.ones(3, 12, dtype=torch.long)
    gapped = torch.stack([index, index + 5 * (index > 6), index + 3 * (index > 2) + 9 * (index > 7)])
    left = torch.stack([(index >= n).long() for n in (0, 3, 7)])
    right = torch.stack([(~((index >= n) & (index < 8))).long() for n in (8, 5, 7)])
    both = left * right
    counted = both.cumsum(1) - 1
    restarted = torch.where(both == 1, counted, 0)  # as generate() counts a prompt of 8 tokens, and 4 new ones
    restarted[1:, 8:] = torch.arange(1, 5)
    restarted[0, 8:] = index[8:]
    return {
        "gaps": (every, gapped),
        "left": (left, None),
        "left with gaps": (left, (gapped - gapped.gather(1, left.argmax(1, keepdim=True))).clamp_min(0)),
        "right": (right, None),
        "right, restarted": (both, restarted),
        "right, counted": (both, counted.clamp_min(0)),
    }


def read(model, x, mask, ids, cache=None, end=12):
    """Logits of the tokens that the cache has not seen."""
    seen = 0 if cache is None else cache.get_seq_length()
    given = {"attention_mask": mask[:, :end], "position_ids": None if ids is None else ids[:, seen:end]}
    return model(x[:, seen:end], cache=cache, use_cache=cache is not None, **given).logits


@pytest.mark.parametrize("kind", SPECS)
@torch.no_grad()
def test_a_cache_goes_on_after_a_cut_and_a_choice_of_rows(kind):
    """Chunks, tokens taken back within and across chunks, and rows picked, under any padding and positions."""
    model, x, order = model_of(kind), tokens(3, 12), torch.tensor([2, 1, 1])
    picks = {
        "reorder": (lambda c: c.reorder_cache(order), order),
        "select": (lambda c: c.batch_select_indices(order[1:]), order[1:]),
        "repeat": (lambda c: c.batch_repeat_interleave(2), torch.arange(3).repeat_interleave(2)),
    }
    for name, (mask, ids) in layouts().items():
        want, live = read(model, x, mask, ids), mask[:, 10:] == 1
        for back, (pick, rows) in zip((1, 3, 5), picks.values(), strict=True):
            cache = transformers.DynamicCache(config=model.config)
            read(model, x, mask, ids, cache, end=6)
            cache.activate_past_recording()
            for end in (7, 10, 12):
                read(model, x, mask, ids, cache, end=end)
            cache.crop(-back)
            pick(cache)
            got = read(model, x[rows], mask[rows], None if ids is None else ids[rows], cache)[:, -min(back, 2) :]
            keep = live[rows, -min(back, 2) :]
            assert (got - want[rows, -min(back, 2) :])[keep].abs().max() < 1e-4, (name, back)


@pytest.mark.parametrize("kind", SPECS)
@torch.no_grad()
def test_a_prompt_may_end_in_padding(kind):
    """The text goes on as that of the row alone, with a cache and without; on both sides, too."""
    model, x = model_of(kind), tokens(3, 7)
    x[1, -1] = 0
    x[2, -2:] = x[2, :2] = 0
    how = {"max_new_tokens": 6, "do_sample": False}
    written = model.generate(x, **how)
    if kind != "memory_compressed":  # the first new token is read at padding, where its numbers are unspecified
        assert torch.equal(model.generate(x, use_cache=False, **how), written)
    for row in range(3):
        assert torch.equal(model.generate(x[row : row + 1], **how), written[row : row + 1])
    assert torch.equal(model.generate(x[2:, 2:], **how), written[2:, 2:]), "padding on the left changes nothing"


def llama_of(model):
    """A Llama with the weights of our model."""
    ours, sizes = model.state_dict(), model.config
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=ours["model.layers.0.mlp.up.weight"].shape[0],
            num_hidden_layers=2,
            num_attention_heads=2,
            rms_norm_eps=sizes.layer_norm_eps,
            pad_token_id=0,
            eos_token_id=None,
            bos_token_id=None,
        )
    ).eval()
    names = {
        "mixer.q_proj": "self_attn.q_proj",
        "mixer.k_proj": "self_attn.k_proj",
        "mixer.v_proj": "self_attn.v_proj",
        "mixer.out_proj": "self_attn.o_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.down": "mlp.down_proj",
        "mixer_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    }
    renamed = {}
    for name, tensor in ours.items():
        for old, new in names.items():
            name = name.replace(f"{old}.", f"{new}.")
        renamed[name] = tensor
    theirs.load_state_dict(renamed)
    return theirs


@torch.no_grad()
def test_padding_and_positions_are_those_of_llama():
    """With its weights, ours writes what Llama writes, and gives its logits wherever tokens are valid."""
    llama_like = {"norm_type": "rms", "gated_mlp": True, "hidden_act": "silu", "mlp_bias": False}
    SPECS["llama"] = {**SPECS["rotary"], "qkv_bias": False, "out_bias": False}
    model = model_of("llama", positions=None, **llama_like)
    llama, x = llama_of(model), tokens(3, 12)
    for name, (mask, ids) in layouts().items():
        ids = (mask.cumsum(1) - 1).clamp_min(0) if ids is None else ids
        got, want = read(model, x, mask, ids), read(llama, x, mask, ids)
        assert (got - want)[mask == 1].abs().max() < 1e-4 * want.abs().max(), name
    x = tokens(3, 7)
    x[1, -1] = 0
    x[2, -2:] = x[2, :2] = 0
    how = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(x, **how), llama.generate(x, **how))
    assert torch.equal(
        model.generate(x[2:], prompt_lookup_num_tokens=2, **how),
        llama.generate(x[2:], prompt_lookup_num_tokens=2, **how),
    )


@pytest.mark.parametrize("kind", ["rotary", "aft_full", "aft_local", "decay"])
@torch.no_grad()
def test_an_assistant_writes_the_same_after_padding(kind):
    """Ten prompts with padding on the right, guessed at by a near copy and by a look into the prompt."""
    model, how = model_of(kind), {"max_new_tokens": 8, "do_sample": False}
    draft = copy.deepcopy(model)
    for p in draft.parameters():
        p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    for seed in range(10):
        x = tokens(1, 8, seed)
        x[:, -(1 + seed % 3) :] = 0
        wanted = model.generate(x, **how)
        assert torch.equal(model.generate(x, assistant_model=draft, **how), wanted), seed
        assert torch.equal(model.generate(x, prompt_lookup_num_tokens=2, **how), wanted), seed


@pytest.mark.parametrize("kind", ["rotary", "learned", "aft_full", "aft_local", "decay", "alibi"])
@torch.no_grad()
def test_usual_positions_after_given_ones(kind):
    """Chunks without position_ids go on from the last real token, and padding says nothing, a whole chunk of it too."""
    model, x = model_of(kind), tokens(2, 12)
    mask, ids = torch.ones(2, 12, dtype=torch.long), torch.arange(12).repeat(2, 1)
    mask[0, :5], mask[1, 3:5] = 0, 0
    ids[0] -= 5
    ids[1, 2:] += 4
    want = read(model, x, mask, ids)
    for garbage in (0, 9):
        cache = transformers.DynamicCache(config=model.config)
        read(model, x, mask, torch.where(mask == 1, ids, garbage), cache, end=5)
        got = [read(model, x, mask, None, cache, end=end) for end in (6, 12)]
        torch.testing.assert_close(torch.cat(got, 1), want[:, 5:], atol=1e-4, rtol=0)


def rope_model(kind, longest):
    """A small Llama with dynamic angles or Phi-3 with LongRoPE, whose first context is 16 tokens."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 40, "pad_token_id": 0, "initializer_range": 0.3}
    torch.manual_seed(0)
    if kind == "dynamic":
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
        given = transformers.LlamaConfig(**sizes, max_position_embeddings=16, rope_parameters=rope)
        return transformers.LlamaForCausalLM(given).eval()
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.5, 2.0, 3.0, 5.0]}
    rope = {"rope_type": "longrope", "rope_theta": 100.0, **factors, "original_max_position_embeddings": 16}
    given = {"original_max_position_embeddings": 16, "max_position_embeddings": longest, "rope_parameters": rope}
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes, **given)).eval()


@pytest.mark.parametrize("length", [12, 30])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@torch.no_grad()
def test_angles_that_depend_on_the_length_are_fixed_by_hand(kind, length):
    """As the refusal says, for one length: the host's logits for it, in a stream of any cuts too."""
    model, x = rope_model(kind, 64), tokens(2, length)
    with pytest.raises(MixerError, match=f"rope_type='{kind}' has no counterpart.*for one length L fix them") as told:
        replace_mixers(model, "attention")
    assert "\n" not in str(told.value)
    rope = model.config.rope_parameters
    if kind == "dynamic":
        scaling = None if length <= 16 else {"name": "ntk", "factor": 2.0 * length / 16 - 1.0}
    else:
        gain = math.sqrt(1 + math.log(64 / 16) / math.log(16))
        scaling = {"name": "factors", "factors": rope["short_factor" if length <= 16 else "long_factor"]}
        scaling |= {"attention_factor": gain}
    positions = {"name": "rotary", "base": 100.0, "scaling": scaling}
    ours, _ = replace_mixers(model, {"*": {"name": "attention", "positions": positions}})
    want = model(x, use_cache=False).logits
    torch.testing.assert_close(ours(x, use_cache=False).logits, want, atol=2e-4, rtol=0)
    cache, got = transformers.DynamicCache(config=ours.config), []
    for a, b in ((0, 5), (5, 6), (6, length)):
        got.append(ours(x[:, a:b], **name_cache_output(cache), use_cache=True).logits)
    torch.testing.assert_close(torch.cat(got, 1), want, atol=2e-4, rtol=0)
