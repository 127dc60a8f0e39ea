"""Hosts whose logits have more than dot products: T5's bias, Gemma 2's cap, DeBERTa's terms; and layers without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from surgery_models import make, padded, shared
from tokenmix import MixerError
from tokenmix.export import export_onnx
from tokenmix.hosts import find_attention, load_converted, replace_mixers, restore, save_replaced

TARGETS = torch.randint(3, 60, (3, 20), generator=torch.Generator().manual_seed(2))
BIASED = "*.SelfAttention"
PARTS = {
    "all": "*",
    "encoder": "encoder.*",
    "self-attention": BIASED,
    "cross-attention": "*.EncDecAttention",
    "first layer": "decoder.block.0.layer.0.SelfAttention",
    "last layer": "decoder.block.1.layer.0.SelfAttention",
}


def translate(model: Any) -> Tensor:
    ids, mask = padded("right")
    return model(input_ids=ids, attention_mask=mask, decoder_input_ids=TARGETS).logits


def generate(model: Any, **options: Any) -> Tensor:
    ids, mask = padded("right")
    return model.generate(ids, attention_mask=mask, max_new_tokens=15, min_new_tokens=15, do_sample=False, **options)


@pytest.mark.parametrize("part", PARTS)
@torch.no_grad()
def test_attention_carries_the_bias_of_t5_to_all_layers(part):
    model = shared("t5")
    new, report = replace_mixers(model, {PARTS[part]: "attention"})
    assert report.share == 1
    assert not report.notes
    wanted = translate(model)
    assert float((translate(new) - wanted).abs().max() / wanted.abs().max()) < 1e-5
    assert torch.equal(generate(new), generate(model))
    assert torch.equal(generate(new, num_beams=2), generate(model, num_beams=2))
    back, _ = restore(new)
    assert torch.equal(translate(back), wanted)


@pytest.mark.parametrize(
    ("name", "part"),
    [("aft_full", "first layer"), ("aft_full", "encoder"), ("aft_full", "self-attention"), ("linear", "all")],
)
@torch.no_grad()
def test_t5_generates_and_is_saved_with_other_mixers(name, part, tmp_path):
    model = shared("t5")
    new, report = replace_mixers(model, {PARTS[part]: name}, seed=0)
    told = {
        "aft_full": ("aft_full has one bias of relative positions, the mean of those of the host's heads",),
        "linear": ("attention had a bias of relative positions; linear leaves that out",),
    }
    assert report.notes == told[name]
    assert torch.equal(generate(new), generate(new, use_cache=False))
    assert not torch.equal(translate(new), translate(model))
    save_replaced(new, report, tmp_path / "out")
    assert torch.equal(translate(load_converted(tmp_path / "out")), translate(new))
    assert torch.equal(translate(restore(new)[0]), translate(model))


def test_layers_that_keep_attention_get_the_bias_of_a_replaced_first_layer():
    model = shared("t5")
    new, _ = replace_mixers(model, {"decoder.block.0.layer.0.SelfAttention": "linear"}, seed=0)
    first, second = new.decoder.block[0].layer[0].SelfAttention, new.decoder.block[1].layer[0].SelfAttention
    theirs = model.decoder.block[0].layer[0].SelfAttention
    x = torch.randn(1, 5, 32)
    bias = first(x)[1]
    assert torch.equal(bias, theirs.compute_bias(5, 5))
    assert torch.equal(second(x, position_bias=bias)[0], second(x, position_bias=theirs.compute_bias(5, 5))[0])
    alone, _ = replace_mixers(model, {"decoder.*.SelfAttention": "linear"}, seed=0)
    assert alone.decoder.block[0].layer[0].SelfAttention(x)[1] is None  # nobody reads it


def test_a_table_that_has_learned_is_reported_when_restored():
    new, _ = replace_mixers(shared("t5"), {"encoder.*": "attention"})
    assert not restore(new)[1].names("dropped")
    with torch.no_grad():
        new.encoder.block[1].layer[0].SelfAttention.mixer.bias.table.add_(1)
    assert restore(new)[1].names("dropped") == ["encoder.block.1.layer.0.SelfAttention.bias.table"]


def test_heads_of_their_own_keep_a_bias_where_a_mixer_has_them():
    report = replace_mixers(shared("t5"), {"encoder.*": {"name": "local", "window": 4}}, seed=0)[1]
    tables = {e.name: e.status for e in report.entries if e.name.endswith("bias.table")}
    assert tables == {f"encoder.block.{i}.layer.0.SelfAttention.mixer.bias.table": "copied" for i in range(2)}
    assert not report.notes


CAPPED = {
    "gemma2": (
        {"attn_logit_softcapping": 5.0},
        "attention here has a cap of 5 on its logits, which the mixer attention has not; keep this module",
        "attention had a cap of 5 on its logits; hydra leaves that out",
    ),
    "deberta_v2": (
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        "attention here has terms of relative positions with queries and keys, which the mixer attention has not",
        "attention had terms of relative positions with queries and keys; hydra leaves that out",
    ),
}


@pytest.mark.parametrize("name", CAPPED)
@torch.no_grad()
def test_what_a_mixer_leaves_out_is_named(name):
    options, refusal, note = CAPPED[name]
    model = make(name, **options)
    with pytest.raises(MixerError, match=refusal):
        replace_mixers(model, "attention")
    new, report = replace_mixers(model, "hydra", last=1, seed=0)
    assert note in report.notes
    ids, mask = padded("right" if name == "deberta_v2" else "left")
    assert new(ids, attention_mask=mask)[0].isfinite().all()
    assert torch.equal(restore(new)[0](ids, attention_mask=mask)[0], model(ids, attention_mask=mask)[0])


HYBRIDS = {
    "jamba": "no attention: model.layers.0.mamba and 1 more, a JambaMambaMixer",
    "bamba": "no attention: model.layers.0.mamba and 1 more, a BambaMixer",
    "falcon_h1": "no attention: model.layers.0.mamba and 1 more, a FalconH1Mixer",
}


@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_hybrids_are_told_which_layers_have_no_attention(name):
    model = shared(name)
    new, report = replace_mixers(model, "linear", seed=0)
    assert report.notes[-1] == HYBRIDS[name]
    ids, mask = padded("left")
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(new.generate(ids, **options), new.generate(ids, **options, use_cache=False))


def test_a_decode_step_of_a_hybrid_is_refused(tmp_path):
    new, _ = replace_mixers(shared("falcon_h1"), "linear", seed=0)
    with pytest.raises(MixerError, match="also mixes by FalconH1Mixer, with states of its own; leave decode out"):
        export_onnx(new, tmp_path / "step.onnx", decode=True)


def test_models_without_attention_are_told_so():
    mamba = transformers.MambaModel(transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=9))
    with pytest.raises(
        MixerError, match="no attention of a known family; its layers mix by MambaMixer, which is no att"
    ):
        replace_mixers(mamba, "hydra")


def test_gates_are_told():
    config = transformers.Qwen3NextConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=60,
        intermediate_size=16,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=2,
        linear_num_key_heads=1,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    model = transformers.Qwen3NextForCausalLM(config)
    assert find_attention(model) == []
    with pytest.raises(
        MixerError, match="it has Qwen3NextAttention, which gates its output by half of q_proj, and no m"
    ):
        replace_mixers(model, "hydra")
