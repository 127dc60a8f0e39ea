"""Bad input to the surgery: one clear line each, and the model that was passed is as it was."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from surgery_models import make, padded, shared
from tokenmix import MixerError
from tokenmix.hosts.surgery import find_attention, load_converted, open_host, replace_mixers, restore

BAD = [
    (
        "bert",
        {"encoder.block.*": "hydra"},
        {},
        r"pattern 'encoder.block.\*' matches no attention module; there are encoder.layer.0.attention, encoder.layer.1",
    ),
    ("bert", {"*": "hydar"}, {}, r"encoder.layer.0.attention: build_mixer: no mixer is called 'hydar'; nearest: hydra"),
    ("bert", {"*": {"name": "hydra", "windw": 3}}, {}, r"hydra has no option 'windw'"),
    ("bert", {"*": {"name": "hydra", "causal": True}}, {}, r"attention here is not causal; leave causal=True out"),
    ("bert", {"*": {"name": "hydra", "dim": 8}}, {}, r"dim is the model's; leave it out"),
    ("bert", {"*": 3}, {}, r"'\*' expects a spec such as .*, got 3"),
    ("bert", {"*": []}, {}, r"list of specs for '\*' is empty"),
    ("bert", 7, {}, r"expects a spec such as .*got 7"),
    ("bert", "hydra", {"last": 3}, r"last must be in 0..2, because '\*' matches 2 modules, got 3"),
    ("bert", "hydra", {"every": 0}, r"every must be in 1..2"),
    ("bert", "hydra", {"every": 1, "last": 1}, r"give last or every"),
    ("bert", "hydra", {"keep": "*"}, r"nothing is left to replace"),
    ("bert", "hydra", {"keep": "head.*"}, r"pattern 'head.\*' matches no attention"),
    ("bert", "hydra", {"init": "cpy"}, r"init must be 'copy' or 'random', got 'cpy'"),
    (
        "gpt2",
        "fourier",
        {},
        r"transformer.h.0.attn: fourier has no causal form, and attention here is causal; "
        r"these have one: attention, aft_full",
    ),
    (
        "gpt2",
        {"*": {"name": "hydra", "causal": False}},
        {},
        r"attention here is causal, and another mixer would read the future",
    ),
    (
        "bert_decoder",
        "external",
        {},
        r"bert.encoder.layer.0.crossattention: external mixes a sequence with itself.*these can: attention",
    ),
    (
        "llama",
        {"*1.self_attn": {"name": "attention", "kv_heads": 1}},
        {},
        r"layers.1.self_attn: k_proj.weight has the shape \(16, 32\), k_proj.weight of the mixer \(8, 32\)",
    ),
    ("transformer", "aft_full", {}, r"encoder.layers.0.self_attn: build_mixer: aft_full needs the option 'max_len'"),
]


@pytest.mark.parametrize(("name", "mixers", "options", "message"), BAD)
@pytest.mark.parametrize("inplace", [False, True])
def test_bad_input_is_one_line_and_the_model_is_untouched(name, mixers, options, message, inplace):
    model = shared(name)
    before, state = dict(model.named_modules()), {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(MixerError, match=message) as why:
        replace_mixers(model, mixers, inplace=inplace, **options)
    assert "\n" not in str(why.value)
    assert dict(model.named_modules()) == before
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


def test_shapes_that_cannot_be_mapped_are_named():
    with pytest.raises(
        MixerError,
        match=r"q_proj.weight has the shape \(64, 32\), q_proj.weight of the mixer \(32, 32\); they cannot be mapped",
    ):
        replace_mixers(make("llama", head_dim=16), "hydra")


@pytest.mark.parametrize("name", ["phi", "stablelm"])
def test_norms_of_another_kind_are_refused(name):
    with pytest.raises(
        MixerError,
        match=r"layers.0.self_attn: it normalises queries and keys with qk_layernorm, which mixers do not support",
    ):
        replace_mixers(make(name, qk_layernorm=True), "attention")


def test_what_the_mixers_have_no_place_for():
    with pytest.raises(MixerError, match=r"blocks.0.attn: it was built with scale_norm"):
        replace_mixers(make("timm", scale_attn_norm=True), "hydra")


def test_a_model_of_no_known_family():
    class OwnAttention(nn.MultiheadAttention):
        def forward(self, *args, **options):
            return super().forward(*args, **options)

    with pytest.raises(
        MixerError,
        match=r"Sequential has no attention of a known family; it has OwnAttention, whose computation is unknown; "
        r"known are the families bert,",
    ):
        replace_mixers(nn.Sequential(OwnAttention(4, 2)), "hydra")


def test_a_bias_nobody_could_hold_is_refused_before_it_is_built():
    model = make("llama", max_position_embeddings=200_000)
    with pytest.raises(
        MixerError,
        match=r"synthesizer_random with max_len=200000 would have 160,000,\d+,\d+ parameters here; give a smaller",
    ):
        replace_mixers(model, "synthesizer_random")


def test_masks_that_cannot_be_read():
    new, _ = replace_mixers(shared("bert"), "hydra", seed=0)
    ids = padded("left")[0]
    with pytest.raises(MixerError, match="adds numbers other than 0 and -inf to logits"):
        new(ids, attention_mask=torch.rand(3, 1, 9, 9))
    with pytest.raises(MixerError, match="one map per head"):
        new(ids, attention_mask=torch.ones(3, 4, 9, 9, dtype=torch.bool))


def test_restore_of_what_is_gone():
    with pytest.raises(MixerError, match="matches no replaced attention; there are none at all"):
        restore(shared("bert"))
    new, _ = replace_mixers(shared("bert"), {"*.0.*": "hydra", "*.1.*": "synthesizer_random"}, seed=0)
    with pytest.raises(
        MixerError,
        match="encoder.layer.1.attention: synthesizer_random has no q_proj, k_proj of attention; "
        "its softmax weights are lost",
    ):
        restore(new)
    back, _ = restore(new, "*.0.*")
    assert [s.name for s in find_attention(back)] == ["encoder.layer.0.attention"]


def test_a_missing_host_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MixerError, match=r"pip install 'tokenmix\[hf\]'"):
        open_host(str(tmp_path))


def test_folders_that_are_no_models(tmp_path):
    with pytest.raises(MixerError, match=r"config.json is missing"):
        load_converted(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModl"]}')
    with pytest.raises(MixerError, match=r"has no class 'BertModl'"):
        open_host(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    with pytest.raises(MixerError, match=r"transformers cannot read it"):
        open_host(str(tmp_path))
    shared("bert").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(MixerError, match=r"lacks \d+ of \d+ weights of its \w+, such as encoder.layer.2"):
        open_host(str(tmp_path))
