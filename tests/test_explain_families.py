"""What `tokenmix look sentence` tells of each family of mixers, and that its numbers are those of the mixer."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.nn.functional as F

from test_explain_text import LENGTH, NEAR, TEXT, data_of, language_model
from tokenmix import MIXERS, MixerError, build_mixer
from tokenmix.lab.explain import explain, render
from tokenmix.lab.explain.characters import Bytes
from tokenmix.lab.explain.explain_page import LANGUAGES, words
from tokenmix.lab.explain.families import family
from tokenmix.lab.report.pictures import effective_attention
from tokenmix.mixers import Inputs


def read_by(model, ids):
    """What the mixer of each layer reads."""
    seen, hooks = [], []
    for block in model.blocks:
        hooks.append(block.mixer.register_forward_pre_hook(lambda _, args: seen.append(args[0])))
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return seen


SPECS = [
    ({"name": "aft_simple"}, "aft_simple"),
    ({"name": "aft_full"}, "aft_full"),
    ({"name": "aft_full", "gate": None}, "aft_full"),
    ({"name": "aft_local", "window": 4}, "aft_local"),
    ({"name": "aft_local", "window": 4, "outside": "none"}, "aft_window"),
    ({"name": "aft_conv", "heads": 2, "kernel_size": 5}, "aft_conv"),
    ({"name": "aft_forget", "norm_heads": 2}, "aft_forget"),
    ({"name": "aft_reach", "heads": 2}, "aft_reach"),
    ({"name": "aft_pairs", "heads": 2}, "aft_pairs"),
    ({"name": "hydra"}, "hydra"),
    ({"name": "linear", "heads": 2}, "linear"),
    ({"name": "performer", "heads": 2}, "kernel"),
    ({"name": "external", "slots": 6}, "external"),
    ({"name": "synthesizer_dense", "heads": 2}, "synthesizer_dense"),
    ({"name": "synthesizer_factorized_dense", "heads": 2}, "synthesizer_dense"),
    ({"name": "synthesizer_random", "heads": 2, "init_std": 1.0}, "synthesizer_random"),
    ({"name": "synthesizer_random", "heads": 2, "trainable": False}, "synthesizer_fixed"),
    ({"name": "synthesizer_factorized_random", "heads": 2}, "synthesizer_random"),
    ({"name": "synthesizer_mixture", "heads": 2}, "synthesizer_mixture"),
    ({"name": "lightconv", "heads": 2, "kernel_size": 5}, "lightconv"),
    ({"name": "dynamicconv", "heads": 2, "kernel_size": 5}, "dynamicconv"),
    ({"name": "local", "heads": 2, "window": 4}, "pattern"),
    ({"name": "pooling", "window": 3}, "other"),
]


@pytest.mark.parametrize(("spec", "key"), SPECS, ids=[f"{spec['name']}-{key}" for spec, key in SPECS])
def test_the_weights_shown_are_those_of_the_library_and_the_family_is_told(spec, key):
    model = language_model(spec, layers=2)
    made = explain(model, Bytes(), TEXT)
    for site, block, x in zip(made.sites, model.blocks, read_by(model, made.source.ids), strict=True):
        torch.testing.assert_close(site.x, x[0], **NEAR)
        weights, kind = effective_attention(block.mixer, x)
        assert site.kind == kind
        torch.testing.assert_close(site.weights, weights, **NEAR)
        assert float(site.weights.triu(1).abs().max()) == 0.0, "a weight of the future"
        assert site.family.key == key
        said = {lang: words(lang)[f"family_{key}"] for lang in LANGUAGES}
        asked = {name for text in said.values() for name in re.findall(r"\{(\w+)\}", text)}
        assert asked - {"mixer"} <= site.family.given.keys()
        assert all(words(lang)[table.name] for lang in LANGUAGES for table in site.family.tables)
    json.loads(data_of(render([made])), parse_constant=pytest.fail)


def numbers(spec):
    """The first site of an untrained model, its mixer, and its tables by name."""
    model = language_model(spec)
    site = explain(model, Bytes(), TEXT).sites[0]
    return site, model.blocks[0].mixer, {table.name: table.numbers for table in site.family.tables}


@pytest.mark.parametrize(
    "spec", [spec for spec, key in SPECS if key in ("aft_full", "aft_local", "aft_window")], ids=str
)
def test_aft_weighs_by_key_and_bias_and_the_rows_add_up_to_the_gate(spec):
    site, mixer, tables = numbers(spec)
    logits = site.k[0].T[:, None, :] + tables["table_bias"]
    weights = logits.masked_fill(~site.allowed, -torch.inf).softmax(-1)
    if mixer.gate is not None:
        weights = weights * tables["table_gate"].T[..., None]
        torch.testing.assert_close(site.weights.sum(-1), tables["table_gate"].T, **NEAR)
    torch.testing.assert_close(site.weights, weights, **NEAR)


def test_hydra_multiplies_one_running_sum_by_the_query():
    site, mixer, tables = numbers({"name": "hydra"})
    mixed = tables["table_phi_q"] * (tables["table_phi_k"] * mixer.v_proj(site.x).double()).cumsum(0)
    torch.testing.assert_close(tables["table_total"] * tables["table_phi_q"], mixed)
    torch.testing.assert_close(mixer.out_proj(mixed.float()), site.output, **NEAR)
    torch.testing.assert_close(tables["table_phi_q"].norm(dim=-1), torch.ones(len(TEXT)).double(), **NEAR)


def test_linear_attention_weighs_by_products_of_features():
    site, _, tables = numbers({"name": "linear", "heads": 2})
    products = tables["table_phi_q"] @ tables["table_phi_k"].mT * site.allowed
    torch.testing.assert_close(site.weights, products / products.sum(-1, keepdim=True), **NEAR)


def test_external_attention_reads_slots_that_know_no_later_word():
    site, mixer, tables = numbers({"name": "external", "slots": 6})
    read = tables["table_slots"][0]
    torch.testing.assert_close(mixer.out_proj((read @ mixer.slot_values().to(read.dtype)).float()), site.output, **NEAR)
    assert 1 <= site.family.given["used"] <= 6


@pytest.mark.parametrize("spec", [spec for spec, key in SPECS if key.startswith("synthesizer")], ids=str)
def test_synthesizers_apply_softmax_to_numbers_of_their_own(spec):
    site, _, tables = numbers(spec)
    weights = tables["table_logits"].masked_fill(~site.allowed, -torch.inf).softmax(-1)
    torch.testing.assert_close(site.weights.float(), weights.float(), **NEAR)


def test_a_mixture_tells_the_factor_of_each_part():
    site, mixer, _ = numbers({"name": "synthesizer_mixture", "heads": 2})
    assert site.family.given["parts"] == "random × 0.50, attention × 0.50"
    for options, factor in (
        ({"join": "plus"}, "1.00"),
        ({"join": "gated"}, "0.50"),
        ({"join": "gated", "alpha_per_head": True}, "0.50 / 0.50"),
    ):
        other = build_mixer("synthesizer_mixture", 16, heads=2, max_len=LENGTH, causal=True, **options)
        x = torch.zeros(1, 4, 16)
        args, given = other.functional_args(Inputs(x))
        assert f"attention × {factor}" in family(other, (x, None), args, given).given["parts"]


@pytest.mark.parametrize("spec", [spec for spec, key in SPECS if key in ("lightconv", "dynamicconv")], ids=str)
def test_convolutions_tell_their_taps(spec):
    site, mixer, tables = numbers(spec)
    g = F.glu(mixer.v_proj(site.x), -1).unflatten(-1, (2, -1))
    taps = (
        tables["table_taps"] if spec["name"] == "dynamicconv" else tables["table_taps"][:, None].expand(-1, len(g), -1)
    )
    mixed = torch.zeros_like(g)
    for t in range(len(g)):
        for j in range(max(0, t - 4), t + 1):
            mixed[t] += taps[:, t, j - t + 4, None] * g[j]
    torch.testing.assert_close(mixer.out_proj(mixed.flatten(1)), site.output, **NEAR)


def test_filters_of_aft_conv_are_the_biases_by_distance():
    site, mixer, tables = numbers({"name": "aft_conv", "heads": 2, "kernel_size": 5})
    assert torch.equal(tables["table_taps"], mixer.kernel())
    assert site.family.given["least"] == pytest.approx(float(mixer.kernel().detach().min()))


def test_what_aft_forget_keeps_is_between_nothing_and_all():
    _, _, tables = numbers({"name": "aft_forget"})
    keep = tables["table_keep"]
    assert keep.shape == (len(TEXT), 16)
    assert bool(((keep > 0) & (keep < 1)).all())


@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_every_mixer_of_the_library_has_a_family_with_words(name):
    cls = MIXERS[name]
    mixer = build_mixer(name, 16, causal=cls.facts.causal_only, **cls.example_options(16, heads=2))
    try:
        key = family(mixer, (torch.randn(1, 16, 16), None), *mixer.functional_args(Inputs(torch.randn(1, 16, 16)))).key
    except (AttributeError, MixerError):  # no functional form, or one that needs a grid
        key = family.dispatch(type(mixer))(mixer, (torch.randn(1, 16, 16), None), (), {}).key
    assert all(f"family_{key}" in words(lang) for lang in LANGUAGES)
