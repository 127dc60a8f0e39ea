"""Patterns, schedules, options that the site fills in, and the report."""

from __future__ import annotations

import copy
from typing import Any

import torch

from surgery_models import make, padded, shared
from tokenmix import build_mixer
from tokenmix.hosts.surgery import find_attention, replace_mixers, restore
from tokenmix.hosts.surgery.adapters import is_adapter


def layout(model: Any) -> list[str]:
    """The mixers of a BERT's layers; "softmax" where it kept its own."""
    return [m.attention.self.spec["name"] if is_adapter(m.attention.self) else "softmax" for m in model.encoder.layer]


def bert(layers: int = 6) -> Any:
    model = copy.deepcopy(shared("bert"))
    model.encoder.layer.extend([copy.deepcopy(model.encoder.layer[0]) for _ in range(layers - 2)])
    return model


def test_schedules():
    model, S = bert(), "softmax"
    cases: list[tuple[Any, dict[str, Any], list[str]]] = [
        ("hydra", {"last": 2}, [S, S, S, S, "hydra", "hydra"]),
        ("hydra", {"every": 2}, [S, "hydra"] * 3),
        ("hydra", {"every": 4}, [S, "hydra", S, S, S, "hydra"]),
        (["hydra", None, "linear"], {}, ["hydra", S, "linear"] * 2),
        ({"*.layer.*": ["hydra", None, "linear"]}, {}, ["hydra", S, "linear"] * 2),
        ({"*": "hydra", "*.3.*": "linear"}, {}, ["hydra"] * 3 + ["linear"] + ["hydra"] * 2),
        ("hydra", {"keep": ["*.0.*", "*.5.*"]}, [S] + ["hydra"] * 4 + [S]),
        ({"*.[12].*": "hydra"}, {"last": 1}, [S, S, "hydra", S, S, S]),
    ]
    for mixers, options, wanted in cases:
        new, _ = replace_mixers(model, mixers, seed=0, **options)
        assert layout(new) == wanted
        assert len(find_attention(new)) == wanted.count(S)
    assert layout(model) == [S] * 6


def test_surgery_can_go_on_where_it_stopped():
    once, _ = replace_mixers(bert(), "attention", last=2)
    twice, report = replace_mixers(once, "attention")
    assert layout(twice) == ["attention"] * 6
    assert report.share == 1.0


def test_in_place_changes_the_model_itself():
    model = make("gpt2")
    new, _ = replace_mixers(model, "attention", inplace=True)
    assert new is model
    assert find_attention(model) == []
    assert model.lm_head.weight is model.transformer.wte.weight
    back, _ = restore(model, inplace=True)
    assert back is model
    assert len(find_attention(model)) == 2


def test_what_the_site_says_goes_into_the_mixer():
    new, _ = replace_mixers(make("qwen2"), "attention")
    mixer = new.model.layers[0].self_attn.mixer
    assert (mixer.heads, mixer.kv_heads, mixer.causal, mixer.q_proj.bias is None, mixer.out_proj.bias is None) == (
        4,
        2,
        True,
        False,
        True,
    )
    new, _ = replace_mixers(make("gpt2", scale_attn_by_inverse_layer_idx=True), "attention")
    assert [round(h.attn.mixer.scale or 8**-0.5, 6) for h in new.transformer.h] == [
        round(8**-0.5, 6),
        round(8**-0.5 / 2, 6),
    ]
    new, _ = replace_mixers(shared("vit"), {"*": {"name": "aft_full", "rank": 4}})
    assert new.vit.layers[0].attention.mixer.max_len == 17


@torch.no_grad()
def test_grouped_keys_are_repeated_and_come_back():
    model = shared("llama")
    new, report = replace_mixers(model, "aft_simple", seed=0)
    old = model.model.layers[0].self_attn.k_proj.weight
    mixer = new.model.layers[0].self_attn.mixer
    assert torch.equal(mixer.k_proj.weight, old.view(2, 1, 8, 32).expand(2, 2, 8, 32).reshape(32, 32))
    assert "those of the host were repeated" in str(report)
    back, _ = restore(new)
    assert torch.equal(back.model.layers[0].self_attn.k_proj.weight, old)
    ids = padded("left")[0][:1]
    assert torch.equal(back(ids).logits, model(ids).logits)


def test_random_weights_are_new_and_repeatable():
    model = shared("bert")
    one, report = replace_mixers(model, "hydra", init="random", seed=3)
    two, _ = replace_mixers(model, "hydra", init="random", seed=3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    torch.manual_seed(3)
    build_mixer("hydra", 32)
    assert len(report.names("new")) == 2 * len(dict(one.encoder.layer[0].attention.self.named_parameters()))
    assert len(report.names("dropped")) == 16
    assert not torch.equal(
        one.encoder.layer[0].attention.self.mixer.q_proj.weight, model.encoder.layer[0].attention.self.query.weight
    )


def test_the_report_has_every_tensor():
    model = shared("gpt2")
    new, report = replace_mixers(model, {"*.h.1.*": {"name": "external"}}, seed=0)
    named = [e.name for e in report.entries if e.status != "dropped"]
    assert sorted(named) == sorted(new.state_dict())
    assert report.parameters("copied", "split", "new") == sum(p.numel() for p in new.parameters())
    assert {e.origin for e in report.entries if e.name.endswith("1.attn.mixer.q_proj.weight")} == {
        "transformer.h.1.attn.c_attn.weight"
    }
    dropped = sum(e.size for e in report.entries if e.status == "dropped")
    assert sum(p.numel() for p in model.parameters()) == report.parameters("copied", "split") + dropped
    text = str(report)
    assert "GPT2LMHeadModel -> GPT2LMHeadModel with 1 x external, 1 x its own attention" in text
    assert "\nlayer 0\n" in text
    assert "\nlayer 1\n  copied" in text
    assert "attn.mixer.memory_k" in text


def test_stacks_of_layers_are_told_apart_in_the_report():
    _, report = replace_mixers(shared("transformer"), "attention")
    assert "layers 0 to 1 of encoder.layers, each" in str(report)
    assert "layers 0 to 1 of decoder.layers, each" in str(report)
