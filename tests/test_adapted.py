"""Models whose linear layers were replaced: by int8 ones of torch, and by LoRA's of peft; none is passed over."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import tokenmix.hosts.torchvision  # noqa: F401  # before peft, which imports transformers
from cases import CASES, FIRST
from tokenmix import MIXERS, MixerError, build_mixer
from tokenmix.models import EncoderConfig, LMConfig, Seq2SeqConfig, build_model

import peft  # isort: skip

READ = {"compressive", "set", "axial", "spatial_reduction", "routing", "reformer"}
"""Mixers that read the weights of some of their linear layers, which therefore stay as they are."""
SIZES = {"dim": 16, "max_len": 24, "vocab": 40, "init_std": 0.1}
INT8 = 0.1
"""The most that int8 weights and inputs may change an output, relative to its size."""


def quantized(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def count(model: nn.Module, kind: type) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


def built(name: str, *, causal: bool | None = None):
    mixer, options = CASES[FIRST[name]]
    causal = MIXERS[name].facts.causal_forms()[0] if causal is None else causal
    torch.manual_seed(0)
    return build_mixer(mixer, dim=16, causal=causal, **options).eval()


@torch.no_grad()
@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_computes_with_int8_weights(name):
    x = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(1))
    for causal in MIXERS[name].facts.causal_forms():
        mixer = built(name, causal=causal)
        small, want = quantized(mixer), mixer(x)
        plain = [module for module in mixer.modules() if type(module) is nn.Linear]
        assert count(small, torch.ao.nn.quantized.dynamic.Linear) == len(plain)
        got = small(x)
        assert float((got - want).abs().max()) <= INT8 * float(want.abs().max())
        assert not plain or not torch.equal(got, want)


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_an_int8_language_model_streams_and_writes(tied):
    torch.manual_seed(0)
    mixers = ({"name": "aft_forget"}, {"name": "attention", "heads": 2}, {"name": "linear", "heads": 2})
    model = build_model(LMConfig(**SIZES, mixers=mixers, mlp="swiglu", tied=tied)).eval()
    small, tokens = quantized(model), torch.randint(40, (2, 20))
    assert count(small, nn.Linear) == 0
    assert small.generate(tokens[:, :4], 9, temperature=0).shape == (2, 13)
    want, state, parts = small(tokens), small.init_state(2), []
    for chunk in tokens.split(7, 1):
        logits, state = small.extend(chunk, state)
        parts.append(logits)
    # each call rounds its inputs by their own range, so chunks differ by a rounding
    assert 0 < float((torch.cat(parts, 1) - want).norm()) <= INT8 * float(want.norm())


@torch.no_grad()
def test_int8_encoders_and_decoders_read_and_write():
    torch.manual_seed(0)
    pair = build_model(Seq2SeqConfig(**SIZES, mixers=({"name": "hydra"},))).eval()
    source = torch.randint(3, 40, (2, 9))
    for model, inputs in (
        (pair, (source, source)),
        (build_model(EncoderConfig(**SIZES, mixers=pair.config.mixers)), (source,)),
    ):
        want, got = model.eval()(*inputs), quantized(model)(*inputs)
        assert 0 < float((got - want).abs().max()) <= INT8 * float(want.abs().max())
    assert len(quantized(pair).generate(source, 5, beams=2)) == 2


@pytest.mark.parametrize("name", MIXERS)
def test_every_adapter_learns_or_is_refused(name):
    """LoRA on every linear layer of a mixer: each adapter gets a gradient, none is passed over in silence."""
    mixer = nn.ModuleDict({"mixer": built(name)})
    targets = [name for name, module in mixer.named_modules() if isinstance(module, nn.Linear)]
    if not targets:
        return
    adapted = peft.get_peft_model(mixer, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    x = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(1))
    inner = adapted.base_model.model["mixer"]
    if name in READ:
        with pytest.raises(MixerError, match=r"reads the weights of its \w+, which is now peft's Linear") as caught:
            inner(x)
        assert "\n" not in str(caught.value)
        return
    inner(x).square().sum().backward()
    asleep = [n for n, p in adapted.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert asleep == []


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (LMConfig(**SIZES, mixers=({"name": "aft_forget"}, {"name": "attention"}), mlp="swiglu"), {}),
        (EncoderConfig(**SIZES, mixers=({"name": "hydra"},)), {}),
        (EncoderConfig(**SIZES, mixers=({"name": "aft_simple"},), classes=3), {"modules_to_save": ["classifier"]}),
        (Seq2SeqConfig(**SIZES, mixers=({"name": "linear"},)), {}),
    ],
    ids=("lm", "encoder", "classes", "seq2seq"),
)
def test_adapters_of_our_models_learn_and_are_saved_and_loaded(config, options, tmp_path):
    torch.manual_seed(0)
    base = build_model(config)
    tokens = torch.randint(3, 40, (2, 9))
    inputs = (tokens, tokens) if config.kind == "seq2seq" else (tokens,)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up", "down"], **options)
    model = peft.get_peft_model(copy.deepcopy(base), lora)
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert 0 < sum(p.numel() for p in trainable) < sum(p.numel() for p in base.parameters()) / 2
    optimizer, losses = torch.optim.SGD(trainable, lr=0.1), []
    for _ in range(5):
        losses.append(model(*inputs).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    with torch.no_grad():
        want = model.eval()(*inputs)
        assert not torch.equal(want, base.eval()(*inputs))
        assert torch.equal(again(*inputs), want)
        if config.kind == "lm":
            assert torch.equal(again.generate(tokens, 4, temperature=0), model.generate(tokens, 4, temperature=0))
        merged = again.merge_and_unload()
        assert type(merged) is type(base)
        assert merged.state_dict().keys() == base.state_dict().keys()
        torch.testing.assert_close(merged(*inputs), want)
