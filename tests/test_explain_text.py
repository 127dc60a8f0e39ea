"""`tokenmix look sentence` of language models and text encoders, and what it refuses."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from run_dirs import tiny_run
from tokenmix import MixerError
from tokenmix.lab import cli
from tokenmix.lab.data.subwords import END, MASK, START, Subwords
from tokenmix.lab.explain import explain, render, runs, write_page
from tokenmix.lab.explain.characters import Bytes, Characters
from tokenmix.lab.explain.explained import LONGEST
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.train import PairDataConfig, SyntheticDataConfig, load_run, train
from tokenmix.lab.train.runs import classify_run, fill_run, sample_run
from tokenmix.models import EncoderConfig, LMConfig, LoopConfig, build_model

TEXT = "To be, or not to be"
NEAR = {"rtol": 1e-4, "atol": 1e-5}
LENGTH = 48


def language_model(*mixers, **options):
    """An untrained language model over bytes whose weights are large enough to differ."""
    torch.manual_seed(3)
    given = {"dim": 16, "max_len": LENGTH, "init_std": 0.4, **options}
    return build_model(LMConfig(mixers=tuple(mixers), **given)).eval()


def data_of(page):
    """The JSON of a page."""
    return re.search(r'type="application/json">(.*?)</script>', page, re.S)[1]


@pytest.fixture(scope="module")
def attention():
    return language_model({"name": "attention", "heads": 2}, layers=2)


@pytest.fixture(scope="module")
def found(attention):
    return explain(attention, Bytes(), TEXT)


@pytest.fixture(scope="module")
def subwords():
    pytest.importorskip("tokenizers", reason="tokenizers comes with the extra text")
    return Subwords.train(["the black cat drank the milk", "the white cow is tired"] * 20, 300)


def test_a_language_model_shows_its_characters_and_what_it_predicts(attention, found):
    ids = list(TEXT.encode())
    assert found.kind == "lm"
    assert found.source is found.target
    assert found.source.ids == ids
    assert found.source.pieces == list(TEXT.replace(" ", "␣"))
    with torch.no_grad():
        probabilities = attention(torch.tensor([ids]))[0].softmax(-1)
        after = attention.generate(torch.tensor([ids]), 24, temperature=0.0)[0, len(ids) :]
    for row, choices in zip(probabilities, found.choices, strict=True):
        assert [chance for _, chance in choices] == pytest.approx(row.topk(5).values.tolist())
        assert choices[0][0] == Bytes().pieces([int(row.argmax())])[0]
    assert found.chances == pytest.approx([float(probabilities[t, ids[t + 1]]) for t in range(len(ids) - 1)])
    assert found.loss == pytest.approx(sum(-math.log(chance) for chance in found.chances) / len(found.chances))
    assert found.written == bytes(after.tolist()).decode(errors="replace")


def test_each_row_of_causal_attention_sees_only_what_is_before_it_and_adds_up_to_one(found):
    assert [(site.part, site.layer, site.kind) for site in found.sites] == [("lm", n, "attention") for n in (0, 1)]
    for site in found.sites:
        T = len(TEXT)
        assert torch.equal(site.allowed, torch.ones(T, T, dtype=torch.bool).tril())
        assert float(site.weights.triu(1).abs().max()) == 0.0
        torch.testing.assert_close(site.weights.sum(-1), torch.ones(2, T), **NEAR)
        logits = torch.einsum("hte,hse->hts", site.q, site.k) * site.scale
        torch.testing.assert_close(site.weights, logits.masked_fill(~site.allowed, -torch.inf).softmax(-1), **NEAR)


def test_tokens_enter_as_embedding_plus_position(attention, found):
    entered = found.source.embedded + found.source.positions
    torch.testing.assert_close(attention.blocks[0].mixer_norm(entered), found.sites[0].x, **NEAR)
    with torch.no_grad():
        kept, attention.positions = attention.positions, None
        logits = attention(torch.tensor([found.source.ids]))[0]
        attention.positions = kept
    assert found.unordered_loss == pytest.approx(
        float(F.cross_entropy(logits[:-1], torch.tensor(found.source.ids[1:]))), rel=1e-5
    )


def test_muting_a_head_adds_what_the_loss_says(attention, found):
    ids, weight = torch.tensor([found.source.ids]), attention.blocks[1].mixer.out_proj.weight
    with torch.no_grad():
        kept = weight.clone()
        weight[:, :8] = 0.0
        loss = F.cross_entropy(attention(ids)[0, :-1], ids[0, 1:])
        weight.copy_(kept)
    assert float(loss) - found.loss == pytest.approx(found.sites[1].muted[0], abs=1e-5)


def test_a_block_that_is_applied_again_is_a_further_layer():
    made = explain(language_model({"name": "attention", "heads": 2}, loop=LoopConfig(times=3)), Bytes(), TEXT)
    assert [site.layer for site in made.sites] == [0, 1, 2]
    assert not torch.equal(made.sites[0].x, made.sites[1].x)


def test_of_a_deep_model_six_layers_are_shown_with_the_first_and_the_last():
    made = explain(language_model({"name": "hydra"}, layers=9), Bytes(), "To be")
    assert [site.layer for site in made.sites] == [0, 2, 3, 5, 6, 8]
    assert made.layers == 9


def test_positions_of_digits_read_the_tokens():
    model = language_model({"name": "attention", "heads": 2}, positions={"name": "abacus"}, vocab=64)
    made = explain(model, Characters(), "12+345=")
    entered = made.source.embedded + made.source.positions
    torch.testing.assert_close(model.blocks[0].mixer_norm(entered), made.sites[0].x, **NEAR)
    assert made.source.pieces == list("12+345=")


def encoder(*mixers, vocab, **options):
    torch.manual_seed(5)
    return build_model(EncoderConfig(dim=16, max_len=24, mixers=mixers, vocab=vocab, init_std=0.4, **options)).eval()


def test_an_encoder_says_what_each_hidden_token_is(subwords):
    model = encoder({"name": "attention", "heads": 2}, {"name": "aft_full"}, vocab=subwords.vocab)
    made = explain(model, subwords, "the black cat")
    ids = subwords.encode("the black cat")
    assert (made.kind, made.classes, made.written) == ("encoder", False, "")
    assert [site.part for site in made.sites] == ["both", "both"]
    assert all(site.allowed.all() for site in made.sites)
    assert float(made.sites[0].weights.triu(1).max()) > 0
    for t, token in enumerate(ids):
        hidden = torch.tensor([[*ids[:t], MASK, *ids[t + 1 :]]])
        with torch.no_grad():
            row = model(hidden)[0, t].softmax(-1)
        assert made.chances[t] == pytest.approx(float(row[token]), rel=1e-4)
        assert made.choices[t][0] == (
            subwords.pieces([int(row.argmax())])[0],
            pytest.approx(float(row.max()), rel=1e-4),
        )


def test_an_encoder_with_classes_shows_their_probabilities(subwords):
    model = encoder({"name": "attention", "heads": 2}, vocab=subwords.vocab, classes=3)
    made = explain(model, subwords, "the black cat")
    with torch.no_grad():
        chances = model(torch.tensor([made.source.ids]))[0].softmax(-1)
    assert made.classes
    assert made.written == str(int(chances.argmax()))
    assert {int(name): chance for name, chance in made.choices[0]} == pytest.approx(dict(enumerate(chances.tolist())))
    assert made.loss == pytest.approx(-math.log(float(chances.max())), rel=1e-4)
    assert len(made.sites[0].muted) == 2


def test_an_encoder_whose_tokenizer_hides_nothing_is_one_line():
    with pytest.raises(MixerError, match="no token to hide them"):
        explain(encoder({"name": "hydra"}, vocab=256), Bytes(), "abc")


def test_bytes_are_characters_where_they_are_text():
    tokens = Bytes()
    ids = tokens.encode("né\n")
    assert tokens.in_context(ids) == ["n", "é1", "é2", "⏎"]
    assert tokens.pieces(ids) == ["n", "C3", "A9", "⏎"]
    assert tokens.pieces([7]) == ["07"]
    assert tokens.decode(ids[:2]) == "n�"
    assert len(tokens.in_context(tokens.encode("€ 中 👍"))) == len("€ 中 👍".encode())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (" \n ", "the text is empty"),
        ("a\udcff", "is not Unicode; give it in UTF-8"),
        ("a", "is one token, after which nothing is left to predict"),
        ("a" * (LENGTH + 1), f"has {LENGTH + 1} tokens, but the model reads at most {LENGTH}; give a shorter one"),
    ],
)
def test_a_text_that_a_language_model_cannot_read_is_one_line(attention, text, said):
    with pytest.raises(MixerError, match=said) as why:
        explain(attention, Bytes(), text)
    assert "\n" not in str(why.value)


def test_a_page_has_a_most_number_of_tokens_also_where_the_model_has_none():
    model = language_model({"name": "hydra"}, positions=None)
    with pytest.raises(MixerError, match=f"a page shows at most {LONGEST}; give a shorter one"):
        explain(model, Bytes(), "a" * (LONGEST + 1))


def test_other_models_and_characters_are_one_line():
    with pytest.raises(MixerError, match="got a Linear; give an encoder-decoder"):
        explain(torch.nn.Linear(2, 2), Bytes(), TEXT)
    with pytest.raises(MixerError, match="knows the characters 0123456789"):
        Characters().encode("Hello!")


def test_models_of_different_kinds_are_not_on_one_page(found, subwords):
    other = explain(encoder({"name": "hydra"}, vocab=subwords.vocab, classes=2), subwords, "the cat", "second")
    with pytest.raises(MixerError, match="second of kind 'encoder'; a page shows models of one kind"):
        render([found, other])


def test_a_text_that_fills_the_model_is_not_continued(attention):
    assert explain(attention, Bytes(), "a" * LENGTH).written == ""


def test_explaining_leaves_the_model_as_it_was(attention, subwords):
    model = encoder({"name": "external", "slots": 4}, vocab=subwords.vocab)
    for each, tokens in ((attention, Bytes()), (model, subwords)):
        before = {name: value.clone() for name, value in each.state_dict().items()}
        explain(each, tokens, "the cat")
        assert all(torch.equal(value, before[name]) for name, value in each.state_dict().items())
        assert not [m for m in each.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_the_verb_explains_runs_on_text_side_by_side(tmp_path, capsys):
    dirs = [tiny_run(tmp_path, name) for name in ("attention", "local")]
    out = tmp_path / "page.html"
    assert cli.main(["look", "sentence", *map(str, dirs), "--text", "To be, or", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "attention: To be, or -> " in said
    data = json.loads(data_of(out.read_text()))
    assert data["kind"] == "lm"
    assert [run["name"] for run in data["runs"]] == ["attention", "local"]
    assert data["runs"][0]["target"] is None
    assert data["runs"][1]["sites"][0]["family"]["key"] == "aft_local"


def test_runs_that_cannot_be_explained_are_one_line(tmp_path, monkeypatch, capsys):
    run = tiny_run(tmp_path, "attention")
    model, config = runs.load_run(run)

    def explained_as(**changes):
        monkeypatch.setattr(runs, "load_run", lambda run: (model, type("Config", (), {**vars(config), **changes})))
        assert cli.main(["look", "sentence", str(run), "--text", "To be", "--out", str(tmp_path / "page.html")]) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    said = explained_as(model=type("Model", (), {"kind": "vit"}))
    assert "kind 'vit'; look sentence takes one of kind 'seq2seq' (an encoder-decoder), 'lm'" in said
    assert "tokens are numbers, not text" in explained_as(data=SyntheticDataConfig(task="recall"))
    assert "has no tokenizer.json" in explained_as(data=PairDataConfig())
    assert not (tmp_path / "page.html").exists()


def test_runs_on_arithmetic_read_its_characters(tmp_path):
    assert isinstance(runs._characters(tmp_path, SyntheticDataConfig(task="addition")), Characters)


def test_a_page_of_a_language_model_is_small_and_asks_nobody(found, tmp_path):
    page = write_page([found], tmp_path / "page.html").read_text()
    assert not re.search(r"https?:|src=|@import|url\(", page)
    assert len(page) < 500_000


@pytest.mark.parametrize(("recipe", "ends"), [("masked", True), ("subwords", False), ("sentences", True)])
def test_a_run_on_texts_in_subwords_is_shown_what_it_was_trained_on(tmp_path, recipe, ends):
    rows = [f"the {['black', 'white'][i % 2]} cat drank milk {i}\t{['no', 'yes'][i % 2]}" for i in range(200)]
    (tmp_path / "all.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    small = {"train.steps": 2, "model.dim": 16, "model.layers": 1, "model.vocab": 300, "data.max_tokens": 32}
    config = RECIPES[recipe].config("attention").override({**small, "data.source": str(tmp_path / "all.tsv")})
    train(config, tmp_path / "run", verbose=False)
    (found,) = runs.explain_runs([tmp_path / "run"], "the black cat")
    other = Path(shutil.copytree(tmp_path / "run", tmp_path / "second" / "run"))
    named = [made.name for made in runs.explain_runs([tmp_path / "run", other], "the black cat")]
    assert named == [f"{tmp_path.name}/run", "second/run"]
    words = Subwords.load(tmp_path / "run" / "tokenizer.json")
    assert found.source.ids == [START, *words.encode("the black cat")] + [END] * ends
    if recipe == "masked":
        assert (found.choices[0], found.choices[-1], found.chances[0], found.chances[-1]) == ([], [], None, None)
        assert all(map(len, found.choices[1:-1]))
        assert found.loss == pytest.approx(-sum(map(math.log, found.chances[1:-1])) / len(found.chances[1:-1]))
    if recipe == "sentences":
        shares = load_run(tmp_path / "run")[0](torch.tensor([found.source.ids])).softmax(-1)[0]
        assert dict(found.choices[0]) == pytest.approx({"no": float(shares[0]), "yes": float(shares[1])}, abs=1e-5)
        (pair,) = runs.explain_runs([tmp_path / "run"], "the cat\tmilk")
        assert pair.source.ids == [START, *words.encode("the cat"), END, *words.encode("milk"), END]
    assert len(render([found], "en")) < 5 << 20
    other = Subwords.train(["nothing of the kind"] * 9, 280)
    (tmp_path / "run" / "tokenizer.json").write_text(other.json)
    read = {
        "masked": lambda run: fill_run(run, "the <mask> cat"),
        "subwords": lambda run: sample_run(run, prompt=b"the black"),
        "sentences": lambda run: classify_run(run, "the black cat"),
    }[recipe]
    start = RECIPES[recipe].config("attention").override({**small, "data.source": str(tmp_path / "all.tsv")})
    start = start.override({"train.init": str(tmp_path / "run")})
    for call in (
        lambda: runs.explain_runs([tmp_path / "run"], "the black cat"),
        lambda: read(tmp_path / "run"),
        lambda: train(start, tmp_path / "next", verbose=False),
    ):
        with pytest.raises(MixerError, match=r"run.tokenizer.json changed since the run began"):
            call()
