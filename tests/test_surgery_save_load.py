"""A converted host in its folder and back, from Python and from the command line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from surgery_models import make, padded, shared
from tokenmix import MixerError
from tokenmix.hosts.surgery import (
    convert_host,
    find_attention,
    load_converted,
    open_host,
    replace_mixers,
    save_replaced,
)
from tokenmix.hosts.vit import checkpoints as files
from tokenmix.lab.advise import load_host
from tokenmix.lab.cli import main


@pytest.fixture
def bert_folder(tmp_path: Any) -> Any:
    shared("bert").save_pretrained(tmp_path / "bert")
    (tmp_path / "bert" / "vocab.txt").write_text("[PAD]\n")
    return tmp_path / "bert"


@torch.no_grad()
def test_softmax_into_softmax_through_folders(bert_folder, tmp_path):
    convert_host(str(bert_folder), "attention", tmp_path / "out")
    new = load_converted(tmp_path / "out")
    ids, mask = padded("left")
    assert find_attention(new) == []
    assert (
        new(ids, attention_mask=mask).last_hidden_state - shared("bert")(ids, attention_mask=mask).last_hidden_state
    )[mask.bool()].abs().max() <= 1e-5
    assert (tmp_path / "out" / "vocab.txt").read_text() == "[PAD]\n"


@pytest.mark.parametrize("name", ["gpt2", "llama", "vit"])
@torch.no_grad()
def test_what_was_written_is_what_is_loaded(name, tmp_path):
    new, report = replace_mixers(shared(name), {"*.1.*": "hydra", "*.0.*": {"name": "aft_full", "rank": 4}}, seed=0)
    state = torch.get_rng_state()
    save_replaced(new, report, tmp_path / "out")
    loaded = load_converted(tmp_path / "out")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, loaded.state_dict()[key]) for key, tensor in new.state_dict().items())
    if name == "gpt2":
        assert loaded.lm_head.weight is loaded.transformer.wte.weight  # written once, tied again
    given = torch.randn(1, 3, 32, 32) if name == "vit" else padded("left")[0][:1]
    assert torch.equal(loaded(given).logits, new(given).logits)
    assert json.loads((tmp_path / "out" / "report.json").read_text())["share"] == report.share


def test_the_command_line_converts_a_host(bert_folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        main(["convert", str(bert_folder), '{"encoder.layer.*": {"name": "hydra"}}', "--last", "1", "--out", str(out)])
        == 0
    )
    text = capsys.readouterr().out
    assert "BertModel with 1 x hydra, 1 x its own attention" in text
    assert text.splitlines()[-1] == f"load it: tokenmix.hosts.load_converted({str(out)!r})"
    assert [s.name for s in find_attention(load_converted(out))] == ["encoder.layer.0.attention"]
    assert (
        main(["convert", str(bert_folder), '{"name": "linear"}', "--every", "2", "--out", str(tmp_path / "one")]) == 0
    )
    assert len(find_attention(load_converted(tmp_path / "one"))) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ['{"encoder.block.*": {"name": "hydra"}}'],
            "matches no attention module; there are encoder.layer.0.attention",
        ),
        (['{"*": {"name": "hydra"}}', "--classes", "3"], "--classes is for a ViT of ours"),
        (['{"*": {"name": "hydra"'], "not readable JSON"),
    ],
)
def test_bad_commands_are_one_line(bert_folder, tmp_path, capsys, words, message):
    assert main(["convert", str(bert_folder), *words, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@torch.no_grad()
def test_a_timm_model_by_name(tmp_path, monkeypatch):
    import timm

    published = timm.create_model("test_vit", pretrained=False).eval()
    monkeypatch.setattr(files, "timm_model", lambda name: published)
    convert_host("timm:test_vit", {"blocks.*": "hydra"}, tmp_path / "out")
    loaded = load_converted(tmp_path / "out")
    assert find_attention(loaded) == []
    assert torch.equal(loaded.patch_embed.proj.weight, published.patch_embed.proj.weight)
    x = torch.randn(1, 3, *published.patch_embed.img_size)
    assert torch.equal(loaded(x), replace_mixers(published, "hydra")[0](x))


def test_a_model_that_cannot_be_built_again_is_refused(tmp_path):
    new, report = replace_mixers(shared("transformer"), "attention")
    with pytest.raises(
        MixerError, match=r"a folder holds models of transformers and timm, .* not a Transformer; torch.save"
    ):
        save_replaced(new, report, tmp_path / "out")
    with pytest.raises(MixerError, match=r"host\['library'\] must be 'timm' or 'transformers', got 'torch'"):
        save_replaced(new, report, tmp_path / "out", host={"library": "torch", "name": "Transformer"})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}")
    bert, report = replace_mixers(shared("bert"), "attention")
    with pytest.raises(MixerError, match="holds a model or a run already"):
        save_replaced(bert, report, tmp_path / "full")


def test_damaged_folders_are_one_line(tmp_path):
    """Whatever error transformers, torch or safetensors raises."""
    make("gpt2").save_pretrained(tmp_path / "whole")
    save_replaced(*replace_mixers(make("gpt2"), "linear"), tmp_path / "converted")

    def damaged(source: str, change: Any) -> Path:
        folder = tmp_path / f"damaged-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tmp_path / source, folder)
        if change is None:
            os.truncate(folder / "model.safetensors", 3000)
        else:
            config = json.loads((folder / "config.json").read_text())
            change(config)
            (folder / "config.json").write_text(json.dumps(config))
        return folder

    for change in (None, lambda c: c.update(n_embd=64), lambda c: c.update(n_embd="x")):
        folder = str(damaged("whole", change))
        for load in (open_host, load_host):
            with pytest.raises(MixerError, match="transformers cannot"):
                load(folder)
    with pytest.raises(MixerError, match="has no class 3"):
        open_host(str(damaged("whole", lambda c: c.update(architectures=[3]))))
    for change, said in (
        (lambda c: c.pop("host"), "describes no model that can be built .KeyError: 'host'"),
        (lambda c: c["host"].update(config=None), "describes no model that can be built"),
        (lambda c: c["host"]["config"].update(n_embd=64), "does not fit its config.json: .*size mismatch"),
    ):
        with pytest.raises(MixerError, match=said):
            load_converted(damaged("converted", change))
    with pytest.raises(MixerError, match="is a folder of transformers, whose attention `tokenmix convert` replaces"):
        load_converted(tmp_path / "whole")
    with pytest.raises(MixerError, match="its attention was replaced already; advise takes the folder it was"):
        load_host(str(tmp_path / "converted"))


def test_a_model_without_weights_is_not_written(tmp_path):
    model, report = replace_mixers(make("gpt2"), "linear")
    with pytest.raises(MixerError, match="on the meta device and has no weights to write"):
        save_replaced(model.to("meta"), report, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_converted_model_generates_by_the_defaults_of_its_host(tmp_path):
    """Its ends of a text and its penalties, which transformers keeps in a file of their own."""
    host = make("gpt2")
    host.generation_config.eos_token_id, host.generation_config.repetition_penalty = [5, 6], 1.5
    host.save_pretrained(tmp_path / "host")
    convert_host(str(tmp_path / "host"), "linear", tmp_path / "out")
    settings = load_converted(tmp_path / "out").generation_config
    assert (settings.eos_token_id, settings.repetition_penalty) == ([5, 6], 1.5)


def test_weights_that_were_untied_are_not_tied_silently(tmp_path):
    model, report = replace_mixers(make("gpt2"), "linear")
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    save_replaced(model.eval(), report, tmp_path / "out")
    with pytest.raises(MixerError, match="weight: its config ties it .* set tie_word_embeddings there to false"):
        load_converted(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["host"]["config"]["tie_word_embeddings"] = False
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    ids = torch.randint(60, (2, 8))
    assert torch.allclose(load_converted(tmp_path / "out")(ids).logits, model(ids).logits, atol=1e-5)
