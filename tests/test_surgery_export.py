"""Hosts with replaced attention as ONNX files: whole inputs, decode steps, folders, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from surgery_models import SHIFTED, built, make, padded, tf
from tokenmix import MixerError
from tokenmix.export import OnnxModel, export_onnx, export_program
from tokenmix.export.onnx_model import difference
from tokenmix.hosts.surgery import load_converted, replace_mixers
from tokenmix.hosts.surgery.ports import host_port
from tokenmix.lab.cli import main


def replaced(name: str, mixers: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return replace_mixers(make(name), mixers, seed=0, **options)[0].eval()


@torch.no_grad()
def test_an_encoder_with_its_mask(tmp_path):
    model = replaced("bert", "hydra", last=1)
    report = export_onnx(model, tmp_path / "bert.onnx", key_mask=True, length=12)
    assert report.inputs == {"input_ids": "int64 (batch, length)", "attention_mask": "int64 (batch, length)"}
    assert report.outputs == {
        "last_hidden_state": "float (batch, length, 32)",
        "pooler_output": "float (batch, 32)",
    }
    assert (report.sizes.batch, report.sizes.length[0], report.sizes.padded) == (None, 1, False)
    file = OnnxModel(tmp_path / "bert.onnx")
    ids, mask = padded("left")
    wanted = model(ids, attention_mask=mask).last_hidden_state
    assert difference(file(ids, mask.long())[mask.bool()], wanted[mask.bool()]) < 1e-5
    assert file.about["config"]["mixers"] == {"encoder.layer.1.attention": {"name": "hydra"}}


@torch.no_grad()
def test_the_command_exports_a_folder_of_convert(tmp_path, capsys):
    make("gpt2").save_pretrained(tmp_path / "gpt2")
    spec = '{"transformer.h.*": {"name": "attention"}}'
    assert main(["convert", str(tmp_path / "gpt2"), spec, "--out", str(tmp_path / "folder")]) == 0
    out = tmp_path / "gpt2.onnx"
    capsys.readouterr()
    assert main(["export", str(tmp_path / "folder"), str(out), "--length", "9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["difference"] < 1e-4
    ids = torch.randint(60, (3, 7))
    assert difference(OnnxModel(out)(ids), load_converted(tmp_path / "folder")(ids).logits) < 1e-5


@torch.no_grad()
def test_a_decode_step_counts_positions_as_the_host_does():
    """RoBERTa's first token stands behind the index of its padding token."""
    host = built(tf.RobertaForCausalLM, tf.RobertaConfig, **SHIFTED, is_decoder=True)()
    for p in host.parameters():
        torch.nn.init.normal_(p, std=0.3)
    model = replace_mixers(host, "linear", seed=0)[0].eval()
    port = host_port(model, True, False, 3)
    ids = torch.randint(3, 60, (2, 9))
    _, state = port.example(2, 0)
    steps = []
    for part in ids.split(3, 1):
        logits, state = port.module(part, state)
        steps.append(logits)
    assert difference(torch.cat(steps, 1), model(ids, use_cache=False).logits) < 1e-5


@pytest.mark.parametrize(("name", "mixer"), [("gpt2", "aft_simple"), ("llama", "attention")])
@torch.no_grad()
def test_a_decode_step_is_the_whole_sequence(name, mixer, tmp_path):
    model = replaced(name, mixer)
    report = export_onnx(model, tmp_path / "step.onnx", decode=True)
    assert report.sizes.batch is None
    assert "state.position" in report.inputs
    file, ids, parts = OnnxModel(tmp_path / "step.onnx"), torch.randint(60, (3, 9)), []
    state = file.init_state(3)
    for token in ids.split(1, 1):
        logits, state = file.extend(token, state)
        parts.append(logits)
    assert difference(torch.cat(parts, 1), model(ids, use_cache=False).logits) < 1e-5


@torch.no_grad()
def test_a_padded_program_keeps_outputs_without_tokens():
    """Hydra's causal sums depend on the length; the pooled output has no axis to cut."""
    from tokenmix.export.dynamic_shapes import Padded
    from tokenmix.export.inputs import find_port

    model = replaced("bert", "linear")
    port = find_port(model, decode=False, key_mask=True, chunk=1, grid=None, prefix=0)
    assert port.tokenwise == (True, False)
    ids, mask = padded("right")
    hidden, pooled = Padded(port.module, 24, port.tokenwise)(ids, mask.long())
    wanted = model(ids, attention_mask=mask)
    assert hidden.shape == wanted.last_hidden_state.shape
    assert difference(hidden[mask.bool()], wanted.last_hidden_state[mask.bool()]) < 1e-5
    assert difference(pooled, wanted.pooler_output) < 1e-5


@torch.no_grad()
def test_a_model_of_images_as_a_program():
    model = replaced("timm", "linear")
    images = torch.randn(3, 3, 32, 32)
    assert difference(export_program(model).module()(images), model(images)) < 1e-5


REFUSED = {
    "two sequences": ("bart", "hydra", {"last": 1}, {}, "export_onnx(model.get_encoder(), path)"),
    "a layer of its own": ("gpt2", "linear", {"last": 1}, {"decode": True}, "transformer.h.0.attn keep the host's"),
    "an encoder decodes": ("bert", "linear", {}, {"decode": True}, "leave decode out to export whole inputs"),
    "tensors of torch": ("transformer", "attention", {}, {}, "how to call a Transformer is not known; torch.onnx"),
    "a mask of images": ("vit", "linear", {}, {"key_mask": True}, "takes no attention_mask"),
    "a grid": ("vit", "linear", {}, {"grid": (2, 2)}, "grid is for mixers"),
    "too large a chunk": ("gpt2", "linear", {}, {"decode": True, "chunk": 48}, "leaves nothing of the 48 tokens"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refusals_name_what_works(why, tmp_path):
    name, mixer, where, options, says = REFUSED[why]
    with pytest.raises(MixerError, match=re.escape(says)) as caught:
        export_onnx(replaced(name, mixer, **where), tmp_path / "no.onnx", **options)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_line_that_works_for_two_sequences(tmp_path):
    model = replaced("bart", {"*encoder*": "linear"})
    assert export_onnx(model.get_encoder(), tmp_path / "encoder.onnx", length=8).difference < 1e-4


def test_an_untouched_host_is_exported_as_it_is(tmp_path):
    model, ids = make("bert"), torch.arange(18).view(2, 9)
    report = export_onnx(model, tmp_path / "bert.onnx", length=12)
    assert report.sizes.length == (1, 40)
    assert torch.allclose(OnnxModel(tmp_path / "bert.onnx")(ids), model(ids).last_hidden_state, atol=1e-4)
    with pytest.raises(MixerError, match="BertModel returns no cache, so there is no decode step"):
        export_onnx(model, tmp_path / "step.onnx", decode=True)


@torch.no_grad()
def test_softmax_rows_are_taken_as_they_are(tmp_path):
    """The exporter's test for NaN after each softmax is gone, and NaN of an embedding comes out where torch's does."""
    import onnx

    model, path = make("bert"), tmp_path / "bert.onnx"
    export_onnx(model, path, key_mask=True, length=12)
    file = onnx.load(path)
    kinds = [node.op_type for node in file.graph.node]
    assert "Softmax" in kinds
    assert "IsNaN" not in kinds
    ids, mask = padded("right")
    ids[0, 1], ids[1:] = 59, ids[1:].clamp(max=58)
    stored = next(one for one in file.graph.initializer if one.name.endswith("word_embeddings.weight"))
    words = model.get_input_embeddings().weight
    words[59] = float("nan")
    stored.CopyFrom(onnx.numpy_helper.from_array(words.detach().numpy(), stored.name))
    onnx.save(file, path)
    got, want = OnnxModel(path)(ids, mask.long())[mask.bool()], model(ids, attention_mask=mask)[0][mask.bool()]
    assert want.isnan().any(-1).float().mean() not in (0, 1)
    assert torch.allclose(got, want, atol=1e-4, equal_nan=True)


def test_a_module_of_ones_own_is_exported_by_its_inputs(tmp_path):
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 1).eval()
    path, x = tmp_path / "own.onnx", torch.randn(3, 5, 16)
    report = export_onnx(encoder, path, length=12, inputs=lambda length, batch: {"src": torch.randn(batch, length, 16)})
    assert report.inputs == {"src": "float (batch, length, 16)"}
    assert torch.allclose(OnnxModel(path)(x), encoder(x), atol=1e-4)
    with pytest.raises(MixerError, match="inputs= needs length="):
        export_onnx(encoder, tmp_path / "no.onnx", inputs=lambda length, batch: x)
    with pytest.raises(MixerError, match="inputs must return a tensor, a tuple or a dict, got int"):
        export_onnx(encoder, tmp_path / "no.onnx", length=8, inputs=lambda length, batch: 3)


def test_a_wrong_host_step_is_noticed(tmp_path, monkeypatch):
    """A step that forgets where it stands differs from the whole sequence."""
    from tokenmix.hosts.surgery import ports

    model, ids = replaced("gpt2", "linear"), torch.randint(60, (2, 6))

    def last(port: Any) -> torch.Tensor:
        _, state = port.example(2, 0)
        for token in ids.split(1, 1):
            y, state = port.module(token, state)
        return y

    wanted = model(ids, use_cache=False).logits[:, -1:]
    assert difference(last(ports.host_port(model, True, False, 1)), wanted) < 1e-5
    forgets = ports.HostStep.forward
    stay = lambda self, x, s: (lambda y, after: (y, after._replace(position=s.position)))(*forgets(self, x, s))  # noqa: E731
    monkeypatch.setattr(ports.HostStep, "forward", stay)
    assert difference(last(ports.host_port(model, True, False, 1)), wanted) > 1e-3
