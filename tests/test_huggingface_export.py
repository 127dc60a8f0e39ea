"""Runs as Hugging Face folders: the same logits, bytes as tokens, images as the run saw them, and a card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from run_dirs import tiny_run
from tokenmix import MixerError
from tokenmix.hosts.huggingface.export import to_transformers
from tokenmix.lab import cli
from tokenmix.lab.data import Subwords, open_images
from tokenmix.lab.data.augment import eval_batches
from tokenmix.lab.data.subwords import END, START
from tokenmix.lab.hub import export_run
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.train import ImageDataConfig, RunConfig, TrainConfig, load_run, train, translate_run
from tokenmix.models import EncoderConfig, ImageDensityConfig, LMConfig, Seq2SeqConfig, ViTConfig, build_model, in_shell

import transformers  # isort: skip  (after the adapter, which repairs torchvision)

LM = {
    "dim": 16,
    "max_len": 24,
    "mixers": ({"name": "aft_local", "window": 4, "rank": 2}, {"name": "attention", "heads": 2}),
    "init_std": 0.3,
}
VIT = {
    "dim": 16,
    "layers": 2,
    "image_size": (8, 12),
    "patch": 4,
    "channels": 1,
    "classes": 10,
    "mixers": ({"name": "aft_full", "rank": 3},),
    "init_std": 0.3,
}


@pytest.fixture(scope="module")
def text_run(tmp_path_factory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("runs"), "mixed")


@pytest.fixture(scope="module")
def image_run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "vit"
    model = ViTConfig(**{**VIT, "image_size": (8, 8), "patch": 2})
    loop = TrainConfig(
        steps=2, batch_size=4, log_every=1, eval_every=2, save_every=2, threads=1, device="cpu", eval_images=20
    )
    train(RunConfig(model, ImageDataConfig(), train=loop), out)
    return out


@pytest.mark.parametrize(
    "config",
    [
        LMConfig(**LM),
        LMConfig(**{**LM, "tied": True, "norm": "post", "positions": None, "layers": 3, "mlp_ratio": 2.7}),
        LMConfig(
            **{
                **LM,
                "mixers": ({"name": "hydra"}, {"name": "aft_full", "max_len": 30, "rank": 2}, {"name": "linear"}),
                "vocab": 50,
            }
        ),
        LMConfig(**LM, mlp="swiglu", norm_type="rms", logit_cap=4.0),
        LMConfig(**{**LM, "mlp": "relu2", "positions": "sinusoidal"}),
        ViTConfig(**VIT),
        ViTConfig(**VIT, mlp="swiglu", norm_type="rms"),
        ViTConfig(**VIT, stem="conv"),
        ViTConfig(
            **{
                **VIT,
                "mixers": ({"name": "aft_conv", "heads": 4, "kernel_size": 3}, {"name": "attention", "heads": 4}),
                "pool": "mean",
            }
        ),
        ViTConfig(**{**VIT, "positions": "sinusoidal", "registers": 2, "drop_path": 0.2, "norm_eps": 1e-5}),
    ],
)
@torch.no_grad()
def test_logits_are_those_of_our_model(config):
    model = build_model(config).eval()
    new = to_transformers(model)
    x = torch.randint(config.vocab, (2, 24)) if config.kind == "lm" else torch.randn(2, 1, 8, 12)
    assert torch.equal(new(x, use_cache=False).logits if config.kind == "lm" else new(x).logits, model(x))
    named = dict(new.named_parameters())
    if config.kind == "lm" and config.tied:
        assert named["model.embed_tokens.weight"] is new.lm_head.weight
    assert sum(p.numel() for p in new.parameters()) == sum(p.numel() for p in model.parameters())


PAIRS = {"dim": 16, "max_len": 24, "layers": 2, "vocab": 30, "mixers": ({"name": "attention", "heads": 2},)}


@pytest.mark.parametrize(
    "config",
    [
        Seq2SeqConfig(**PAIRS),
        Seq2SeqConfig(**PAIRS, embed_scale=4.0, positions="learned", encoder_layers=1),
        Seq2SeqConfig(**PAIRS, tied=False, norm="post", cross_mixers=({"name": "linear", "heads": 2},)),
        in_shell(
            Seq2SeqConfig(**{**PAIRS, "mixers": ({"name": "aft_simple"}, {"name": "synthesizer_random", "heads": 4})}),
            "modern",
        ),
        EncoderConfig(**PAIRS),
        EncoderConfig(**PAIRS, tied=False, norm_type="rms", mlp="swiglu"),
        EncoderConfig(**PAIRS, classes=3, pool="first"),
        EncoderConfig(**{**PAIRS, "mixers": ({"name": "hydra"},)}, classes=2),
    ],
)
@torch.no_grad()
def test_encoders_and_decoders_say_the_same_in_transformers(config):
    torch.manual_seed(0)
    model = build_model(config).eval()
    new, source, target = to_transformers(model), torch.randint(3, 30, (3, 9)), torch.randint(3, 30, (3, 6))
    mask = torch.arange(9) < torch.tensor([9, 5, 1])[:, None]
    if config.kind == "encoder":
        assert torch.equal(new(source, mask.long()).logits, model(source, mask))
        return
    given = {"input_ids": source, "attention_mask": mask.long()}
    theirs = new(**given, decoder_input_ids=target).logits
    torch.testing.assert_close(theirs, model(source, target, mask), rtol=0, atol=1e-6)
    ours = model.generate(source, 10, source_mask=mask)
    theirs = new.generate(**given, max_new_tokens=10, do_sample=False, pad_token_id=config.end)[:, 1:]
    assert theirs.tolist() == ours.tolist()


def test_a_run_of_pairs_becomes_a_folder_that_translates_alike(tmp_path):
    config = RECIPES["grammar"].config("attention")
    small = {"train.steps": 3, "model.dim": 16, "model.layers": 1, "train.eval_texts": 4}
    train(config.override(small), tmp_path / "run", verbose=False)
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf")
    out = model.generate(**tokenizer(["The ball is blue"], return_tensors="pt"), max_new_tokens=24, do_sample=False)
    said = tokenizer.decode(out[0], skip_special_tokens=True).strip()
    assert said == translate_run(tmp_path / "run", "The ball is blue")
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "An encoder-decoder of" in card
    assert "AutoModelForSeq2SeqLM" in card


@torch.no_grad()
def test_a_run_of_text_becomes_a_folder(text_run, tmp_path, capsys):
    out = tmp_path / "mixed"
    assert cli.main(["export", str(text_run), str(out)]) == 0
    assert capsys.readouterr().out.split() == [str(out)]
    ours, _ = load_run(text_run)
    model, tokenizer = (
        transformers.AutoModelForCausalLM.from_pretrained(out),
        transformers.AutoTokenizer.from_pretrained(out),
    )
    text = "naïve <question>, née Ā\n\x00\U0001f600"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == list(text.encode())
    assert tokenizer.decode(ids[0]) == text
    assert torch.equal(model(ids, use_cache=False).logits, ours(ids))
    prompt = torch.tensor([list(b"To be, or")])
    assert torch.equal(
        model.generate(prompt, max_new_tokens=20, do_sample=False), ours.generate(prompt, 20, temperature=0)
    )


def test_every_byte_is_its_own_token(text_run, tmp_path):
    export_run(text_run, tmp_path / "out")
    vocabulary = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "".join(chr(n) for n in range(0x800))
    assert tokenizer(text).input_ids == list(text.encode())


def test_the_card_says_what_is_known(text_run, tmp_path):
    card = (export_run(text_run, tmp_path / "tiny", step="best") / "README.md").read_text()
    front = card.split("---")[1]
    assert "library_name: transformers" in front
    assert "pipeline_tag: text-generation" in front
    assert "- aft_full" in front
    assert "1 x aft_full, 1 x aft_conv, 1 x aft_simple" in card
    assert "| valid |" in card
    assert "bits_per_byte" in card
    assert "corpus" in card
    assert 'AutoModelForCausalLM.from_pretrained("tiny")' in card
    config = json.loads(card.split("```json\n")[1].split("```")[0])
    assert config["model"]["dim"] == 16


def test_what_the_card_shows_runs(text_run, tmp_path, monkeypatch, capsys):
    card = (export_run(text_run, tmp_path / "tiny") / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(card.split("```python\n")[1].split("```")[0].replace("max_new_tokens=100", "max_new_tokens=9"), {})
    assert capsys.readouterr().out.startswith("To be")


@torch.no_grad()
def test_a_run_of_images_becomes_a_folder(image_run, tmp_path):
    out = export_run(image_run, tmp_path / "vit")
    ours, config = load_run(image_run)
    model, processor = (
        transformers.AutoModelForImageClassification.from_pretrained(out),
        transformers.AutoImageProcessor.from_pretrained(out),
    )
    split = open_images("digits").split("test")
    wanted, _ = next(eval_batches(split, batch_size=4, image_size=(8, 8), channels=1))
    got = processor(
        [split.image(i).numpy() for i in range(4)], return_tensors="pt", input_data_format="channels_first"
    ).pixel_values
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    assert torch.equal(model(got).logits, ours(got))
    card = (out / "README.md").read_text()
    assert "image-classification" in card
    assert "top1" in card


def test_what_cannot_be_exported_is_refused(text_run, tmp_path):
    density = build_model(
        ImageDensityConfig(dim=16, size=(8, 8), channels=1, mixers=({"name": "aft_simple"},), layers=1)
    )
    with pytest.raises(MixerError, match="export: ImageDensity has no counterpart"):
        to_transformers(density)
    with pytest.raises(MixerError, match="has no head"):
        to_transformers(build_model(ViTConfig(**{**VIT, "classes": 0})))
    with pytest.raises(MixerError, match="not a run directory"):
        export_run(tmp_path / "none", tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(MixerError, match="not empty"):
        export_run(text_run, tmp_path / "full")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full"]


# --- documents and labelled texts ---


@pytest.mark.parametrize("recipe", ["masked", "sentences", "subwords"])
def test_runs_on_texts_in_subwords_are_exported_with_their_tokenizer(tmp_path, recipe):
    rows = [f"{['a', 'the'][i % 2]} {['cat', 'dog', 'bird'][i % 3]} runs {i % 7}\t{i % 2}" for i in range(200)]
    (tmp_path / "all.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    small = {"train.steps": 3, "model.dim": 16, "model.layers": 1, "model.vocab": 300, "data.max_tokens": 32}
    config = RECIPES[recipe].config("aft_full").override({**small, "data.source": str(tmp_path / "all.tsv")})
    train(config, tmp_path / "run", verbose=False)
    export_run(tmp_path / "run", tmp_path / "hf")
    tokenizer, text = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"), "the bird runs 3"
    ours, words = load_run(tmp_path / "run")[0], Subwords.load(tmp_path / "run" / "tokenizer.json")
    read = [START, *words.encode(text)] + ([END] if recipe != "subwords" else [])
    assert tokenizer(text).input_ids == read
    cls = {"masked": transformers.AutoModelForMaskedLM, "sentences": transformers.AutoModelForSequenceClassification}
    theirs = cls.get(recipe, transformers.AutoModelForCausalLM).from_pretrained(tmp_path / "hf")
    got = theirs(**tokenizer(text, return_tensors="pt")).logits
    torch.testing.assert_close(got, ours(torch.tensor([read])), rtol=1e-5, atol=1e-5)
    if recipe == "sentences":
        assert theirs.config.id2label == {0: "0", 1: "1"}
        assert tokenizer("a", "b").input_ids == [START, *words.encode("a"), END, *words.encode("b"), END]
    if recipe == "masked":
        assert tokenizer("the <mask> runs").input_ids.count(tokenizer.mask_token_id) == 1
    assert "cut into subwords" in (tmp_path / "hf" / "README.md").read_text()
