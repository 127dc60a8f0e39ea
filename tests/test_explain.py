"""`tokenmix look sentence`: its numbers are the model's, its page holds them, and its words exist in both languages."""

from __future__ import annotations

import base64
import json
import re

import pytest
import torch

from tokenmix import MixerError
from tokenmix.lab import cli
from tokenmix.lab.data.grammar import sentence_pairs
from tokenmix.lab.explain import Explained, explain, render, runs, translation, write_page
from tokenmix.lab.explain.example import END, START, train_example
from tokenmix.lab.explain.explain_page import LANGUAGES, SCRIPTS, array, words
from tokenmix.models.seq2seq import Seq2Seq, Seq2SeqConfig

TEXT = "The black cat drank the milk"
NEAR = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def trained():
    return train_example(steps=600)


@pytest.fixture(scope="module")
def found(trained):
    return explain(*trained, TEXT)


def other(mixer, **options):
    """An untrained model of the example's words, with another mixer inside."""
    tokens = train_example(steps=1, batch=4)[1]
    torch.manual_seed(1)
    specs = {"mixers": (mixer,), "cross_mixers": ({"name": "attention", "heads": 2},), **options}
    return Seq2Seq(Seq2SeqConfig(dim=8, max_len=16, vocab=tokens.vocab, init_std=0.3, **specs)).eval(), tokens


def mixer_at(model, site):
    """The mixer of an encoder-decoder at the place of a site."""
    return next(p.mixer for p in translation.places_of(model) if p[:2] == (site.part, site.layer))


def test_the_grammar_is_distinct_the_same_every_time_and_agrees():
    pairs = sentence_pairs()
    known = dict(pairs)
    assert pairs == sentence_pairs()
    assert 2000 < len(pairs) == len(known)
    assert known["The ball is blue"] == "La bola es azul"
    assert known[TEXT] == "El gato negro bebió la leche"
    assert known["You are welcome"] == "De nada"
    assert known["The white cows are tired"] == "Las vacas blancas están cansadas"
    assert known["The boy saw the dog"] == "El niño vio al perro"
    assert known["The girls saw the cows"] == "Las niñas vieron a las vacas"
    assert all(text == " ".join(text.split()) and text[0].isupper() for pair in pairs for text in pair)


def test_a_model_trained_in_seconds_translates_the_examples(trained):
    assert [explain(*trained, text).written for text in ("The ball is blue", TEXT, "You are welcome")] == [
        "La bola es azul",
        "El gato negro bebió la leche",
        "De nada",
    ]


def test_each_attention_is_recomputed_from_what_was_collected(trained, found):
    model, _ = trained
    assert [(site.part, site.kind) for site in found.sites] == [(part, "attention") for part in translation.PARTS]
    for site in found.sites:
        logits = torch.einsum("hte,hse->hts", site.q, site.k)
        torch.testing.assert_close(site.products, logits, **NEAR)
        weights = torch.where(site.allowed, logits * site.scale, -torch.inf).softmax(-1)
        torch.testing.assert_close(site.weights, weights, **NEAR)
        torch.testing.assert_close(site.weights.sum(-1), torch.ones(site.weights.shape[:2]), **NEAR)
        mixed = torch.einsum("hts,hse->hte", weights, site.v)
        mixer = mixer_at(model, site)
        torch.testing.assert_close(mixer.out_proj(mixed.transpose(0, 1).flatten(1)), site.output, **NEAR)


def test_the_source_enters_as_embedding_plus_position(trained, found):
    model, tokens = trained
    assert found.source.ids == [*tokens.encode(TEXT), END]
    assert found.target.ids[0] == START
    entered = found.source.embedded + found.source.positions
    torch.testing.assert_close(model.encoder.blocks[0].mixer_norm(entered), found.sites[0].x, **NEAR)


def test_only_the_decoder_hides_the_future(found):
    encoder, decoder, cross = found.sites
    assert encoder.allowed.all()
    assert cross.allowed.all()
    assert torch.equal(decoder.allowed, torch.ones_like(decoder.allowed).tril())
    assert float(decoder.weights.triu(1).abs().max()) == 0.0


def test_the_choices_are_what_was_written(trained, found):
    _, tokens = trained
    written = [*found.target.pieces[1:], tokens.pieces([END])[0]]
    assert [row[0][0] for row in found.choices] == written
    assert found.unordered_loss > found.loss >= 0.0


def test_muting_a_head_adds_what_the_loss_says(trained, found):
    model, _ = trained
    with torch.no_grad():
        width = model.blocks[0].cross.head_dim
        weight = model.blocks[0].cross.out_proj.weight
        kept = weight.clone()
        weight[:, :width] = 0.0
        source, target = (torch.tensor([side.ids]) for side in (found.source, found.target))
        wanted = torch.tensor([*found.target.ids[1:], END])
        loss = torch.nn.functional.cross_entropy(model(source, target)[0], wanted)
        weight.copy_(kept)
    assert float(loss) - found.loss == pytest.approx(found.sites[2].muted[0], abs=1e-5)


@pytest.mark.parametrize(
    ("mixer", "kind"),
    [
        ({"name": "aft_full"}, "values"),
        ({"name": "hydra"}, "values"),
        ({"name": "linear"}, "values"),
        ({"name": "synthesizer_random", "heads": 2}, "values"),
        ({"name": "attention", "heads": 4, "kv_heads": 2, "bias": {"name": "alibi"}}, "attention"),
    ],
)
def test_other_mixers_show_their_effective_weights(mixer, kind):
    model, tokens = other(mixer)
    made = explain(model, tokens, "The ball is blue")
    for site in made.sites[:2]:
        assert site.kind == kind
        assert site.weights.isfinite().all()
        if kind == "values" and site.v is not None:
            values = site.v[0].unflatten(-1, (len(site.weights), -1))
            mixed = torch.einsum("gts,sge->tge", site.weights, values).flatten(1)
            own = mixer_at(model, site).out_proj(mixed)
            torch.testing.assert_close(own, site.output, rtol=1e-4, atol=1e-4)
    assert float(made.sites[1].weights.triu(1).abs().max()) == 0.0
    if mixer["name"] == "aft_full":
        gate = torch.sigmoid(made.sites[0].q[0]).T
        torch.testing.assert_close(made.sites[0].weights.sum(-1), gate, **NEAR)
    assert "data" in render([made])


def test_external_attention_shows_its_derivative_and_its_step_says_so():
    made = explain(*other({"name": "hydra"}, encoder_mixers=({"name": "external", "slots": 4},)), "The ball is blue")
    assert made.sites[0].kind == "jacobian"
    assert made.sites[0].products is None


def test_a_model_without_positions_says_so():
    made = explain(*other({"name": "attention", "heads": 2}, positions=None), "The ball is blue")
    assert made.unordered is None
    assert made.unordered_loss is None
    assert made.source.positions is None


def test_explaining_leaves_the_model_as_it_was(trained):
    model, tokens = trained
    before = {name: value.clone() for name, value in model.state_dict().items()}
    explain(model, tokens, "The ball is blue")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not [each for each in model.modules() if each._forward_hooks or each._forward_pre_hooks]
    assert model.positions is not None


def test_the_page_holds_the_numbers_to_the_last_bit_and_asks_nobody(found, tmp_path):
    page = write_page([found], tmp_path / "page.html").read_text()
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.S)[1])
    stored = data["runs"][0]["sites"][1]["products"]
    values = torch.frombuffer(bytearray(base64.b64decode(stored["data"])), dtype=torch.float32).view(stored["shape"])
    assert torch.equal(values, found.sites[1].products)
    assert not re.search(r"https?:|src=|@import|url\(", page)
    assert len(page) < 500_000


def test_text_cannot_leave_its_place_on_the_page(found):
    bad = Explained(**{**vars(found), "name": "</script><b>", "text": "<!-- {{DATA}} {{STYLE}}"})
    page = render([bad])
    assert "</script><b>" not in page
    assert "{{STYLE}}" in page, "words of the user were taken for a mark of the template"


def test_arrays_keep_shape_and_numbers():
    assert array(None) is None
    assert array(torch.zeros(0, 3)) == {"shape": [0, 3], "data": ""}


def test_every_word_of_the_page_is_there_in_both_languages():
    english, chinese = map(words, LANGUAGES)
    assert english.keys() == chinese.keys()
    for key, text in english.items():
        assert set(re.findall(r"\{\w+\}", text)) == set(re.findall(r"\{\w+\}", chinese[key])), key
        assert text.strip()
        assert key in ("language", "qkv_name", "note") or re.search("[一-鿿]|Softmax", chinese[key]), key
    script = render.__globals__["_file"]
    used = set().union(*(re.findall(r'\b[tp]\("(\w+)"', script(name)) for name in SCRIPTS))
    assert used <= {key.partition(".")[2] or key for key in english}


@pytest.mark.parametrize(
    ("text", "said"),
    [("  ", "the text is empty"), ("xyzzy plugh", "knows no piece"), ("the " * 16, "at most 16; give a shorter one")],
)
def test_text_that_cannot_be_explained_is_one_line(trained, text, said):
    with pytest.raises(MixerError, match=said) as why:
        explain(*trained, text)
    assert "\n" not in str(why.value)


def test_wrong_languages_and_large_pages_are_one_line(found, tmp_path, monkeypatch):
    with pytest.raises(MixerError, match="'fr'; choose --lang en or zh"):
        render([found], "fr")
    with pytest.raises(MixerError, match="give at least one run"):
        render([])
    monkeypatch.setattr("tokenmix.lab.explain.explain_page.LARGEST", 1000)
    with pytest.raises(MixerError, match="give a shorter text or fewer runs"):
        write_page([found], tmp_path / "page.html")


def test_the_verb_writes_a_page_of_several_runs(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, "open_explainable", lambda run: trained)
    out = tmp_path / "page.html"
    argv = ["look", "sentence", "runs/one", "runs/two", "--text", "The ball is blue", "--lang", "zh", "--out", str(out)]
    assert cli.main(argv) == 0
    assert "one: The ball is blue -> La bola es azul" in capsys.readouterr().out
    page = out.read_text()
    assert '<html lang="zh-CN">' in page
    assert '"name":"two"' in page
