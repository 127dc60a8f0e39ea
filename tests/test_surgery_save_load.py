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
from tokenmix.hosts import read_report
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
    save_replaced(new, tmp_path / "out", report)
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
        save_replaced(new, tmp_path / "out", report)
    with pytest.raises(MixerError, match=r"host\['library'\] must be 'timm' or 'transformers', got 'torch'"):
        save_replaced(new, tmp_path / "out", report, host={"library": "torch", "name": "Transformer"})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}")
    bert, report = replace_mixers(shared("bert"), "attention")
    with pytest.raises(MixerError, match="holds a model or a run already"):
        save_replaced(bert, tmp_path / "full", report)


def test_damaged_folders_are_one_line(tmp_path):
    """Whatever error transformers, torch or safetensors raises."""
    make("gpt2").save_pretrained(tmp_path / "whole")
    save_replaced(replace_mixers(make("gpt2"), "linear")[0], tmp_path / "converted")

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
        save_replaced(model.to("meta"), tmp_path / "out", report)
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
    save_replaced(model.eval(), tmp_path / "out", report)
    with pytest.raises(MixerError, match="weight: its config ties it .* set tie_word_embeddings there to false"):
        load_converted(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["host"]["config"]["tie_word_embeddings"] = False
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    ids = torch.randint(60, (2, 8))
    assert torch.allclose(load_converted(tmp_path / "out")(ids).logits, model(ids).logits, atol=1e-5)


@torch.no_grad()
def test_a_report_is_not_needed_and_can_be_read(tmp_path):
    new, report = replace_mixers(shared("llama"), "hydra", seed=0)
    save_replaced(new, tmp_path / "with", report)
    assert read_report(tmp_path / "with") == report
    assert str(read_report(tmp_path / "with")) == str(report)
    save_replaced(load_converted(tmp_path / "with"), tmp_path / "without")
    ids = padded("left")[0]
    assert torch.equal(load_converted(tmp_path / "without")(ids).logits, new(ids).logits)
    with pytest.raises(MixerError, match=r"without: holds no report\.json; a model saved by [^\n]*$"):
        read_report(tmp_path / "without")
    (tmp_path / "with" / "report.json").write_text('{"tensors": 3}')
    with pytest.raises(MixerError, match=r"report\.json: is not the report of a conversion [^\n]*$"):
        read_report(tmp_path / "with")
    with pytest.deprecated_call(match=r"use save_replaced\(model, folder, report\)"):
        save_replaced(new, report, tmp_path / "old")
    assert read_report(tmp_path / "old") == report


@pytest.mark.parametrize("dtypes", ["bfloat16", "mixed"])
@torch.no_grad()
def test_data_types_survive(dtypes, tmp_path):
    """Those of the weights, whatever the config says, and rotary tables stay as exact as transformers keeps them."""
    new, _ = replace_mixers(make("llama").bfloat16(), {"*.0.*": "hydra"}, seed=0)
    if dtypes == "mixed":
        new.model.layers[0].self_attn.float()
    save_replaced(new, tmp_path / "out")
    loaded = load_converted(tmp_path / "out")
    assert {n: t.dtype for n, t in loaded.state_dict().items()} == {n: t.dtype for n, t in new.state_dict().items()}
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32
    same = all(torch.equal(t, loaded.state_dict()[n]) for n, t in new.state_dict().items())
    assert same
    if dtypes == "bfloat16":
        import transformers

        import tokenmix.hosts.huggingface  # noqa: F401  (registers converted hosts with the Auto classes)

        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert again.dtype == torch.bfloat16
        ids = padded("left")[0][:1]
        assert torch.equal(again(ids).logits, loaded(ids).logits)


SIDE_FILES = {
    "modules.json": json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]),
    "sentence_bert_config.json": "{}",
    "config_sentence_transformers.json": "{}",
    "1_Pooling/config.json": "{}",
    "2_Dense/config.json": "{}",
    "2_Dense/model.safetensors": "weights of another module",
    "vocab.txt": "[PAD]",
    "sentencepiece.bpe.model": "words",
    "tokenizer_config.json": "{}",
    "preprocessor_config.json": "{}",
    "video_preprocessor_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "README.md": "A card.",
    "LICENSE": "Free.",
}
LEFT = {
    "pytorch_model.bin": "weights of the host",
    "tf_model.h5": "weights of the host",
    "model.safetensors.index.json": "{}",
    "optimizer.pt": "",
    "trainer_state.json": "{}",
    "training_args.bin": "",
    "checkpoint-3/model.safetensors": "",
    "onnx/model.onnx": "",
    ".git/config": "",
    ".gitattributes": "",
}


def test_all_files_beside_the_weights_are_copied(tmp_path):
    """By the command line, and by Python from the folder that the model came from; twice."""
    shared("bert").save_pretrained(tmp_path / "host")
    for name, text in (SIDE_FILES | LEFT).items():
        (tmp_path / "host" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "host" / name).write_text(text)
    convert_host(str(tmp_path / "host"), "hydra", tmp_path / "first")
    save_replaced(load_converted(tmp_path / "first"), tmp_path / "second")
    for folder, own in (("first", {"report.json"}), ("second", set())):
        files = {str(f.relative_to(tmp_path / folder)) for f in (tmp_path / folder).rglob("*") if f.is_file()}
        assert files == {*SIDE_FILES, "config.json", "model.safetensors", *own}
        assert all((tmp_path / folder / name).read_text() == text for name, text in SIDE_FILES.items())
    (tmp_path / "host" / "modules.json").write_text("[3]")
    with pytest.raises(MixerError, match=r"modules\.json: is no list of modules [^\n]*$"):
        convert_host(str(tmp_path / "host"), "hydra", tmp_path / "third")
    assert not (tmp_path / "third").exists()


@torch.no_grad()
def test_a_converted_folder_is_converted_again(bert_folder, tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(["convert", str(bert_folder), '{"*.1.*": {"name": "hydra"}}', "--out", str(one)]) == 0
    assert main(["convert", str(one), '{"name": "linear"}', "--out", str(two)]) == 0
    assert "BertModel with 1 x linear\n" in capsys.readouterr().out
    loaded = load_converted(two)
    assert find_attention(loaded) == []
    both = replace_mixers(shared("bert"), {"*.1.*": "hydra", "*.0.*": "linear"}, seed=0)[0]
    ids = padded("left")[0]
    assert torch.equal(loaded(ids).last_hidden_state, both(ids).last_hidden_state)
    assert main(["convert", str(two), '{"name": "linear"}', "--out", str(tmp_path / "three")]) == 2
    said = capsys.readouterr().err
    assert "has no attention left: all 2 were replaced; tokenmix.hosts.restore puts it back" in said
    assert said.count("\n") == 1


@torch.no_grad()
def test_a_loaded_model_of_timm_knows_its_host(tmp_path):
    import timm

    options = {"embed_dim": 32, "num_heads": 4, "img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 5}
    host = {"library": "timm", "name": "vit_tiny_patch16_224", "options": options}
    vit = timm.create_model(host["name"], **options).eval()
    save_replaced(replace_mixers(vit, {"*.1.*": "hydra"})[0], tmp_path / "one", host=host)
    more, report = replace_mixers(load_converted(tmp_path / "one"), "linear")
    save_replaced(more, tmp_path / "two", report)
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(load_converted(tmp_path / "two")(x), more(x))
    convert_host(str(tmp_path / "one"), "linear", tmp_path / "three")
    assert torch.equal(load_converted(tmp_path / "three")(x), more(x))


def test_what_takes_no_host_says_so(tmp_path, capsys):
    """Verbs for runs refuse a converted folder in one line; advise refuses one without attention, or with options."""
    half, all_of_it = tmp_path / "half", tmp_path / "all"
    save_replaced(replace_mixers(shared("gpt2"), {"*.1.*": "hydra"}, seed=0)[0], half)
    save_replaced(replace_mixers(shared("gpt2"), "hydra", seed=0)[0], all_of_it)
    no_run = "is no run but a host's folder, which advise, convert, eval, "
    for words, said in (
        (["export", half, tmp_path / "hf"], no_run),
        (["look", "sentence", half, "--text", "a b"], no_run),
        (["resume", half], no_run),
        (["report", half], "is no run but the folder of a host, which has no curves"),
        (
            ["look", "images", half, tmp_path / "a.png", "--out", tmp_path / "out"],
            "tokenmix.hosts.load_converted opens",
        ),
    ):
        assert main(list(map(str, words))) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert said in errors[0]
    host = load_host(str(half))
    assert [site.name for site in find_attention(host.model)] == ["transformer.h.0.attn"]
    assert host.trained
    with pytest.raises(MixerError, match="was converted, and is measured as it is; leave out n_layer"):
        load_host(str(half), {"n_layer": 3})
    with pytest.raises(MixerError, match="its attention was replaced already; advise takes the folder"):
        load_host(str(all_of_it))


def test_look_tokens_takes_a_converted_folder(tmp_path):
    from tokenmix.lab.anatomy.loading import open_subject

    new = replace_mixers(shared("vit"), {"*.1.*": "hydra"}, seed=0)[0]
    save_replaced(new, tmp_path / "vit")
    subject = open_subject(str(tmp_path / "vit"))
    assert find_attention(subject.model)[0].name == find_attention(new)[0].name
