"""Unchanged hybrids of transformers as ONNX files: whole inputs, and the step with the tensors of their cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import hybrid_models
from tokenmix import MixerError
from tokenmix.export import OnnxModel, export_onnx
from tokenmix.export.onnx_model import difference
from tokenmix.hosts import cpu_kernels
from tokenmix.hosts.surgery.ports import CacheStep, host_port

MOE = ("qwen3_next", "qwen3_5_moe", "lfm2_moe")


def build(name: str) -> Any:
    """Build a model whose experts, if any, are products that a program can hold."""
    model = getattr(hybrid_models, name)()
    if name in MOE:
        model.set_experts_implementation("batched_mm")
    return model


def operators(path: Any) -> list[str]:
    import onnx

    return [node.op_type for node in onnx.load(path).graph.node]


@pytest.mark.parametrize("name", list(hybrid_models.MODELS))
@torch.no_grad()
def test_steps_are_the_whole_sequence(name):
    model = build(name)
    with cpu_kernels(model):
        port = host_port(model, True, False, 1)
        ids = torch.randint(1, 60, (3, 9))
        _, state = port.example(3, 0)
        outputs = []
        for token in ids.split(1, 1):
            y, state = port.module(token, state)
            outputs.append(y)
        assert difference(torch.cat(outputs, 1), model(ids, use_cache=False).logits) < 1e-5


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2"])
@torch.no_grad()
def test_a_file_of_the_step_writes_what_the_model_writes(name, tmp_path):
    model = build(name)
    with cpu_kernels(model):
        report = export_onnx(model, tmp_path / "step.onnx", decode=True, operators="standard")
        assert report.sizes.batch is None
        file, ids = OnnxModel(tmp_path / "step.onnx"), torch.randint(1, 60, (2, 9))
        state, outputs = file.init_state(2), []
        for token in ids.split(1, 1):
            y, state = file.extend(token, state)
            outputs.append(y)
        assert difference(torch.cat(outputs, 1), model(ids, use_cache=False).logits) < 1e-5
    assert operators(tmp_path / "step.onnx").count("LinearAttention") == {"qwen3_5": 2, "mamba2": 0}[name]


@torch.no_grad()
def test_a_file_of_whole_inputs_holds_the_standard_operator(tmp_path):
    model = build("qwen3_5")
    with cpu_kernels(model):
        export_onnx(model, tmp_path / "whole.onnx", length=40, operators="standard")
        ids = torch.randint(1, 60, (3, 33))
        assert difference(OnnxModel(tmp_path / "whole.onnx")(ids), model(ids, use_cache=False).logits) < 1e-5
    assert operators(tmp_path / "whole.onnx").count("LinearAttention") == 2


def test_a_cache_that_goes_on_wrongly_is_refused(monkeypatch):
    start = CacheStep.start
    spoilt = partial(pytree.tree_map_only, torch.Tensor, lambda a: a + 1 if a.is_floating_point() else a)
    monkeypatch.setattr(CacheStep, "start", lambda step, batch: spoilt(start(step, batch)))
    with pytest.raises(MixerError, match="Mamba2ForCausalLM computes other numbers token by token than at once"):
        host_port(build("mamba2"), True, False, 1)


def test_what_has_no_step_is_one_line():
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        num_key_value_heads=1,
        sliding_window=4,
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    with pytest.raises(MixerError, match="caches by DynamicSlidingWindowLayer, which keeps more than tensors"):
        host_port(model, True, False, 1)
    bert = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
    ).eval()
    with pytest.raises(MixerError, match="no decode step"):
        host_port(bert, True, False, 1)
