"""Finding attention: each family described rightly, what is not known left out."""

from __future__ import annotations

import pytest
from torch import nn
from transformers.models.dinov2 import modeling_dinov2

from surgery_models import MAKERS, TRANSLATORS, make
from tokenmix import MixerError
from tokenmix.hosts.surgery import find_attention
from tokenmix.hosts.surgery.sites import unknown_attention

DINOV2 = "dinov2" if hasattr(modeling_dinov2, "Dinov2SelfAttention") else "vit"  # the first in transformers 5.16
FACTS = {
    "bert": ("encoder.layer.1.attention", "bert", 4, False, False, False, 40),
    "roberta": ("encoder.layer.1.attention", "bert", 4, False, False, False, 41),
    "xlm_roberta": ("encoder.layer.1.attention", "bert", 4, False, False, False, 41),
    "camembert": ("encoder.layer.1.attention", "bert", 4, False, False, False, 41),
    "electra": ("encoder.layer.1.attention", "bert", 4, False, False, False, 40),
    "bert_decoder": ("bert.encoder.layer.1.crossattention", "bert", 4, False, True, False, 40),
    "gpt2_decoder": ("transformer.h.1.crossattention", "gpt2", 4, False, True, False, 48),
    "gpt2": ("transformer.h.1.attn", "gpt2", 4, True, False, False, 48),
    "llama": ("model.layers.1.self_attn", "llama", 2, True, False, True, 64),
    "mistral": ("model.layers.1.self_attn", "llama", 2, True, False, True, 64),
    "qwen2": ("model.layers.1.self_attn", "llama", 2, True, False, True, 64),
    "gemma3": ("model.layers.1.self_attn", "llama", 2, True, False, True, 64),
    "deberta_v2": ("encoder.layer.1.attention", "deberta", 4, False, False, False, 40),
    "gemma2": ("model.layers.1.self_attn", "gemma2", 2, True, False, True, 64),
    "jamba": ("model.layers.3.self_attn", "jamba", 2, True, False, False, None),
    "bamba": ("model.layers.3.self_attn", "llama", 2, True, False, True, 64),
    "falcon_h1": ("model.layers.1.self_attn", "falcon_h1", 2, True, False, True, 64),
    "t5": ("decoder.block.1.layer.1.EncDecAttention", "t5", 4, False, True, False, None),
    "mt5": ("decoder.block.1.layer.1.EncDecAttention", "t5", 4, False, True, False, None),
    "smollm3": ("model.layers.1.self_attn", "llama", 2, True, False, False, 64),
    "arcee": ("model.layers.1.self_attn", "llama", 2, True, False, True, 64),
    "granite_moe": ("model.layers.1.self_attn", "llama", 2, True, False, True, 64),
    "eurobert": ("layers.1.self_attn", "llama", 2, False, False, True, 64),
    "embedding_gemma": ("layers.1.self_attn", "llama", 2, False, False, True, 64),
    "modernbert": ("layers.1.attn", "modernbert", 4, False, False, True, 64),
    "biogpt": ("biogpt.layers.1.self_attn", "bart", 4, True, False, False, 48),
    "plbart": ("model.decoder.layers.1.encoder_attn", "bart", 4, False, True, False, 40),
    "blenderbot": ("model.decoder.layers.1.encoder_attn", "bart", 4, False, True, False, 40),
    "blenderbot_small": ("model.decoder.layers.1.encoder_attn", "bart", 4, False, True, False, 40),
    "ernie": ("encoder.layer.1.attention", "bert", 4, False, False, False, 40),
    "data2vec_text": ("encoder.layer.1.attention", "bert", 4, False, False, False, 41),
    "distilbert": ("transformer.layer.1.attention", "distilbert", 4, False, False, False, 40),
    "clip_text": ("encoder.layers.1.self_attn", "clip", 4, True, False, False, 40),
    "siglip_text": ("encoder.layers.1.self_attn", "clip", 4, False, False, False, 40),
    "mixtral": ("model.layers.1.self_attn", "llama", 2, True, False, True, 64),
    "gemma": ("model.layers.1.self_attn", "llama", 2, True, False, True, 64),
    "granite": ("model.layers.1.self_attn", "llama", 2, True, False, True, 64),
    "qwen2_moe": ("model.layers.1.self_attn", "llama", 2, True, False, True, 64),
    "qwen3": ("model.layers.1.self_attn", "llama", 2, True, False, True, 64),
    "qwen3_moe": ("model.layers.1.self_attn", "llama", 2, True, False, True, 64),
    "timm_normed": ("blocks.1.attn", "timm", 4, False, False, False, 17),
    "starcoder2": ("model.layers.1.self_attn", "llama", 2, True, False, True, 64),
    "stablelm": ("model.layers.1.self_attn", "llama", 2, True, False, True, 64),
    "phi": ("model.layers.1.self_attn", "phi", 2, True, False, True, 64),
    "phi3": ("model.layers.1.self_attn", "phi3", 2, True, False, True, 64),
    "gpt_neox": ("gpt_neox.layers.1.attention", "gpt_neox", 4, True, False, True, 64),
    "opt": ("model.decoder.layers.1.self_attn", "bart", 4, True, False, False, 48),
    "bart": ("model.decoder.layers.1.encoder_attn", "bart", 4, False, True, False, 40),
    "mbart": ("model.decoder.layers.1.encoder_attn", "bart", 4, False, True, False, 40),
    "marian": ("model.decoder.layers.1.encoder_attn", "bart", 4, False, True, False, 40),
    "pegasus": ("model.decoder.layers.1.encoder_attn", "bart", 4, False, True, False, 40),
    "m2m_100": ("model.decoder.layers.1.encoder_attn", "bart", 4, False, True, False, 40),
    "whisper": ("model.decoder.layers.1.encoder_attn", "bart", 4, False, True, False, 20),
    "deit": ("deit.layers.1.attention", "vit", 4, False, False, False, 18),
    "vit_msn": ("vit.layers.1.attention", "vit", 4, False, False, False, 17),
    "ijepa": ("ijepa.layers.1.attention", "vit", 4, False, False, False, 16),
    "dinov2": ("dinov2.encoder.layer.1.attention", DINOV2, 4, False, False, False, 17),
    "dinov2_registers": ("dinov2_with_registers.encoder.layer.1.attention", DINOV2, 4, False, False, False, 20),
    "clip_vision": ("encoder.layers.1.self_attn", "clip", 4, False, False, False, 17),
    "siglip_vision": ("encoder.layers.1.self_attn", "clip", 4, False, False, False, 16),
    "vit": ("vit.layers.1.attention", "vit", 4, False, False, False, 17),
    "timm": ("blocks.1.attn", "timm", 4, False, False, False, 17),
    "detr": ("decoder.layers.0.encoder_attn", "detr", 4, False, True, False, None),
    "transformer": ("decoder.layers.1.multihead_attn", "torch", 4, False, True, False, None),
}


@pytest.mark.parametrize("name", MAKERS)
def test_each_family_is_described(name):
    model = make(name)
    sites = find_attention(model)
    s = sites[-1]
    assert (s.name, s.family, s.kv_heads, s.causal, s.cross, s.rotary, s.max_len) == FACTS[name]
    assert all((s.dim, s.heads, s.head_dim, s.obstacle) == (32, 4, 8, None) for s in sites)
    assert len(sites) == {"bert_decoder": 4, "gpt2_decoder": 4, "detr": 3, "transformer": 6}.get(
        name, 6 if name in TRANSLATORS else 2
    )
    assert model.get_submodule(s.name) is not None
    assert not unknown_attention(model)


class Dinov2Attention(nn.Module):
    """The module of that name as transformers 5.16 has it."""

    def __init__(self):
        super().__init__()
        self.attention, self.output = nn.Module(), nn.Module()
        self.attention.num_attention_heads, self.attention.attention_head_size = 4, 8
        for name in ("query", "key", "value"):
            setattr(self.attention, name, nn.Linear(32, 32))
        self.output.dense = nn.Linear(32, 32)

    def forward(self, hidden_states):
        raise NotImplementedError


def test_two_classes_of_one_name_are_told_apart_by_their_submodules(monkeypatch):
    monkeypatch.setattr(Dinov2Attention, "__module__", "transformers.models.dinov2.modeling_dinov2")
    old = Dinov2Attention()
    (site,) = find_attention(nn.ModuleList([old]))
    assert (site.family, site.dim, site.heads, site.head_dim) == ("dinov2", 32, 4, 8)
    assert old.get_parameter(site.traits.weights[0]) is old.attention.query.weight
    old.attention = nn.Identity()  # as after a replacement
    assert find_attention(nn.ModuleList([old])) == []


def test_a_decoder_of_bert_is_causal_but_not_across():
    assert [(s.causal, s.cross, s.layer) for s in find_attention(make("bert_decoder"))] == [
        (True, False, 0),
        (False, True, 0),
        (True, False, 1),
        (False, True, 1),
    ]


def test_an_encoder_a_decoder_and_what_joins_them():
    assert [(s.causal, s.cross, s.max_len) for s in find_attention(make("whisper"))[1:4]] == [
        (False, False, 12),
        (True, False, 20),
        (False, True, 20),
    ]


def test_grids_and_windows_are_seen():
    assert [(s.grid, s.prefix) for s in find_attention(make("vit")) + find_attention(make("timm", reg_tokens=2))] == [
        ((4, 4), 1)
    ] * 2 + [((4, 4), 3)] * 2
    assert find_attention(make("mistral", sliding_window=5))[0].window == 5
    assert [s.window for s in find_attention(make("gemma3"))] == [32, None]
    assert [s.window for s in find_attention(make("embedding_gemma"))] == [5, None]
    assert [s.window for s in find_attention(make("modernbert"))] == [None, 5]  # 8 // 2 to each side, and itself


def test_norms_of_queries_and_keys_are_seen():
    assert [find_attention(make(name))[0].qk_norm for name in ("llama", "qwen3", "gemma3", "timm", "timm_normed")] == [
        None,
        "rms",
        "rms",
        None,
        "layer",
    ]


def test_what_stands_against_a_replacement_is_said():
    assert "scale_norm" in (find_attention(make("timm", scale_attn_norm=True))[0].obstacle or "")
    half = make("timm_normed")
    half.blocks[0].attn.q_norm = nn.Identity()  # of keys alone
    assert "qk_norm" in (find_attention(half)[0].obstacle or "")
    assert "3 features" in (find_attention(nn.MultiheadAttention(8, 2, kdim=3, vdim=5))[0].obstacle or "")


def test_unknown_attention_is_left_out_and_named():
    class OwnAttention(nn.MultiheadAttention):
        def forward(self, *args, **options):
            return super().forward(*args, **options)

    model = nn.Sequential(nn.Linear(4, 4), OwnAttention(4, 2))
    assert find_attention(model) == []
    assert unknown_attention(model) == ["OwnAttention"]


def test_a_class_of_a_known_name_that_is_built_differently_is_left_out():
    model = make("vit")
    del model.vit.layers[0].attention.q_proj
    assert [s.name for s in find_attention(model)] == ["vit.layers.1.attention"]
    assert unknown_attention(model) == ["ViTAttention"]


def test_no_model_is_refused():
    with pytest.raises(MixerError, match=r"find_attention: expects a model.*got str"):
        find_attention("bert")
