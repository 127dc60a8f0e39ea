"""Attention modules are known by what they compute: probed beside softmax attention with their weights, or refused."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import nn
from torch.ao.nn.quantizable import MultiheadAttention as Quantizable
from transformers.models.llama import modeling_llama

from surgery_models import GROUPED, MAKERS, make, shared
from tokenmix import MixerError
from tokenmix.hosts import find_attention, replace_mixers
from tokenmix.hosts.surgery.probe import Proofs


def layers(model: Any) -> Any:
    return model.model.layers


@pytest.mark.parametrize("name", MAKERS)
def test_every_known_family_is_proven(name):
    model = shared(name)
    proofs, mode, before = Proofs(model), model.training, torch.get_rng_state()
    state = {n: t.clone() for n, t in model.state_dict().items()}
    for site in find_attention(model):
        proofs.prove(site)
    assert not proofs.unproven
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training == mode
    assert all(torch.equal(state[n], t) for n, t in model.state_dict().items())


def scaled(model: Any) -> None:
    attention = layers(model)[1].self_attn
    theirs = type(attention).forward

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        return 1.5 * theirs(self, *args, **options)[0], None

    attention.forward = MethodType(forward, attention)


def capped(model: Any) -> None:
    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, dropout: float = 0.0, **others: Any):
        k, v = (modeling_llama.repeat_kv(each, module.num_key_value_groups) for each in (k, v))
        logits = 30 * torch.tanh(q @ k.mT * scaling / 30) + mask[..., : k.shape[-2]]
        return (logits.softmax(-1) @ v).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("capped", attend)
    model.set_attn_implementation("capped")


def with_alibi(model: Any) -> None:
    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, dropout: float = 0.0, **others: Any):
        k, v = (modeling_llama.repeat_kv(each, module.num_key_value_groups) for each in (k, v))
        far = torch.arange(k.shape[-2])
        logits = q @ k.mT * scaling + mask[..., : k.shape[-2]] - 0.1 * (far[:, None] - far).abs()
        return (logits.softmax(-1) @ v).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("with_alibi", attend)
    model.set_attn_implementation("with_alibi")


def normed(model: Any) -> None:
    class Normed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.normalize(super().forward(x), dim=-1)

    for layer in layers(model):
        layer.self_attn.q_proj.__class__ = Normed


def parametrised(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(layers(model)[0].self_attn.k_proj)


REFUSED = {
    scaled: r"layers.1.self_attn: its LlamaAttention is not softmax attention with its weights: outputs differ by 3",
    capped: "is not softmax attention .* cap",
    with_alibi: "is not softmax attention",
    normed: "is not softmax attention",
    parametrised: "its LlamaAttention has no matrix k_proj.weight: k_proj is ParametrizedLinear",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_computes_something_else_is_refused_by_name(change, dtype):
    model = make("llama").to(dtype)
    assert "unproven" not in str(replace_mixers(model, "hydra", seed=0)[1])
    change(model)
    for spec in ("hydra", "attention"):
        with pytest.raises(MixerError, match=REFUSED[change]) as why:
            replace_mixers(model, spec)
        assert "\n" not in str(why.value)


def test_a_quantizable_attention_of_torch_is_no_attention_of_torch():
    with pytest.raises(MixerError, match="MultiheadAttention is not softmax .* it has linear_Q.weight, linear_Q.bias"):
        replace_mixers(nn.Sequential(Quantizable(8, 2)), "hydra")


def test_what_cannot_be_probed_is_taken_by_class_and_said():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))
    report = replace_mixers(model, "hydra")[1]
    assert report.notes[-1].startswith("unproven: model.layers.0.self_attn and 1 more could not be probed (without num")


def test_attention_of_no_known_family_that_stays_is_named():
    model = make("llama")
    own = type("OwnAttention", (modeling_llama.LlamaAttention,), {"forward": lambda self, x, **options: (x, None)})
    layers(model)[0].self_attn.__class__ = own
    assert "left alone: OwnAttention, whose computation is unknown" in replace_mixers(model, "hydra")[1].notes


TIMM = {
    "beit_base_patch16_224": "timm.models.beit.Attention",
    "levit_128s": "timm.models.levit.Attention",
    "volo_d1_224": "timm.models.volo.Attention",
    "visformer_tiny": "timm.models.visformer.Attention",
    "nest_tiny": "timm.models.nest.Attention",
    "tiny_vit_5m_224": "timm.models.tiny_vit.Attention",
    "efficientformer_l1": "timm.models.efficientformer.Attention",
    "fastvit_ma36": "its timm.models.fastvit.Attention cannot be called as timm's attention is",
    "samvit_base_patch16_224": "its timm.models.vision_transformer_sam.Attention cannot be called",
}


@pytest.mark.parametrize("name", TIMM)
def test_other_attention_of_timm_is_refused_in_one_line(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    for module in [m for m in model.modules() if type(m).__name__ == "Attention"][:1]:
        module.to_empty(device="cpu")
    with pytest.raises(MixerError, match=TIMM[name]) as why:
        replace_mixers(model, "hydra")
    assert "\n" not in str(why.value)


@torch.no_grad()
@pytest.mark.parametrize("name", ["crossvit_tiny_240", "mobilevit_xxs", "caformer_s18"])
def test_other_models_of_timm_with_its_attention_are_taken_over(name):
    model = timm.create_model(name).eval()
    new, _ = replace_mixers(model, "attention")
    images = torch.randn(1, *timm.get_pretrained_cfg(name).input_size)
    torch.testing.assert_close(new(images), model(images), rtol=1e-4, atol=1e-5)
