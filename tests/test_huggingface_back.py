"""Models of ours taken back from transformers: the same weights to the bit, the same logits, or one clear line."""

from __future__ import annotations

import pytest
import torch

from tokenmix import MixerError
from tokenmix.hosts.huggingface import (
    TokenMixConfig,
    TokenMixForCausalLM,
    TokenMixForMaskedLM,
    TokenMixForSeq2SeqLM,
    TokenMixForSequenceClassification,
    TokenMixForTokenClassification,
    TokenMixModel,
    from_transformers,
    to_transformers,
)
from tokenmix.models import EncoderConfig, LMConfig, Seq2SeqConfig, ViTConfig, build_model, in_shell
from tokenmix.testing.tolerances import BY_DTYPE

SMALL = {"dim": 16, "max_len": 24, "layers": 2, "vocab": 30, "init_std": 0.3}
ATTENTION = {"name": "attention", "heads": 2}
CAUSAL = (
    ATTENTION,
    {"name": "attention", "heads": 4, "kv_heads": 2},
    {"name": "aft_local", "window": 4, "rank": 2},
    {"name": "aft_forget", "norm_heads": 4},
    {"name": "aft_full"},
    {"name": "hydra"},
    {"name": "linear", "heads": 2},
    {"name": "performer", "heads": 2},
    {"name": "synthesizer_random", "heads": 4},
)
BOTH_SIDES = (
    ATTENTION,
    {"name": "aft_simple"},
    {"name": "external", "slots": 8},
    {"name": "fourier"},
    {"name": "linear"},
)
ACROSS = (ATTENTION, {"name": "hydra"}, {"name": "aft_full"})


def name_of(value: object) -> str | None:
    return value["name"] if isinstance(value, dict) else None


def same_weights(ours: torch.nn.Module, wanted: torch.nn.Module) -> None:
    got, want = ours.state_dict(), wanted.state_dict()
    assert got.keys() == want.keys()
    assert [name for name in got if not torch.equal(got[name], want[name])] == []


@torch.no_grad()
def round_trip(config, *inputs):
    """Take a model there and back, and compare weights and logits."""
    torch.manual_seed(0)
    model = build_model(config).eval()
    again = from_transformers(to_transformers(model))
    assert type(again) is type(model)
    same_weights(again, model)
    assert torch.equal(again(*inputs), model(*inputs))
    return model, again


@pytest.mark.parametrize("spec", CAUSAL, ids=name_of)
def test_a_language_model_comes_back(spec):
    tokens = torch.randint(30, (2, 20), generator=torch.Generator().manual_seed(1))
    model, again = round_trip(LMConfig(**SMALL, mixers=(spec,)), tokens)
    assert torch.equal(again.generate(tokens[:, :5], 9, seed=0), model.generate(tokens[:, :5], 9, seed=0))


@pytest.mark.parametrize(
    "changes",
    [
        {"tied": True, "norm": "post", "positions": None, "mlp_ratio": 2.7},
        {"mlp": "swiglu", "norm_type": "rms", "logit_cap": 4.0},
        {"mlp": "swiglu", "mlp_ratio": 3.3},
        {"mlp": "relu2", "positions": "sinusoidal", "dropout": 0.1},
        {"mlp": "swiglu", "mlp_bias": False},
    ],
)
def test_what_a_model_is_made_of_comes_back(changes):
    config = LMConfig(**SMALL | {"layers": 3}, mixers=(ATTENTION, {"name": "aft_local", "window": 4}), **changes)
    _, again = round_trip(config, torch.arange(24)[None])
    for field in (
        "tied",
        "norm",
        "norm_type",
        "mlp",
        "mlp_bias",
        "positions",
        "logit_cap",
        "dropout",
        "layers",
        "init_std",
    ):
        assert getattr(again.config, field) == getattr(config, field)


@pytest.mark.parametrize("spec", BOTH_SIDES, ids=name_of)
@pytest.mark.parametrize("head", [{}, {"tied": False}, {"classes": 3}, {"classes": 2, "pool": "first"}], ids=str)
def test_an_encoder_comes_back(spec, head):
    _, again = round_trip(EncoderConfig(**SMALL, mixers=(spec,), **head), torch.arange(20).view(2, 10))
    assert (again.config.classes, again.config.pool) == (head.get("classes", 0), head.get("pool", "mean"))


@pytest.mark.parametrize("spec", ACROSS, ids=name_of)
@pytest.mark.parametrize("changes", [{}, {"tied": False, "norm": "post", "encoder_layers": 1}], ids=str)
def test_an_encoder_decoder_comes_back(spec, changes):
    config = Seq2SeqConfig(**SMALL, mixers=(spec,), cross_mixers=(spec, ATTENTION), start=4, end=5, **changes)
    source, target = torch.arange(18).view(2, 9) + 6, torch.arange(12).view(2, 6) + 6
    model, again = round_trip(config, source, target)
    assert torch.equal(again.generate(source, 8, beams=2), model.generate(source, 8, beams=2))


def test_a_scaled_embedding_comes_back_as_a_part_of_the_table():
    torch.manual_seed(0)
    model = build_model(in_shell(Seq2SeqConfig(**SMALL, mixers=(ATTENTION,), embed_scale=4.0), "modern")).eval()
    again, pair = from_transformers(to_transformers(model)), torch.arange(18).view(2, 9)
    assert torch.equal(again.embed.weight, 4 * model.embed.weight)
    assert again.config.embed_scale == 1
    torch.testing.assert_close(again(pair, pair), model(pair, pair), rtol=0, atol=BY_DTYPE[torch.float32])


def test_a_vision_transformer_comes_back():
    config = ViTConfig(
        dim=16, layers=2, image_size=(8, 8), patch=4, channels=1, classes=3, mixers=({"name": "aft_full", "rank": 3},)
    )
    round_trip(config, torch.randn(2, 1, 8, 8))


@torch.no_grad()
@pytest.mark.parametrize(
    ("cls", "more"),
    [
        (TokenMixForCausalLM, {"tie_word_embeddings": True}),
        (TokenMixForMaskedLM, {"hidden_act": "silu", "gated_mlp": True, "intermediate_size": 40}),
        (TokenMixForSequenceClassification, {"num_labels": 4}),
        (TokenMixForSeq2SeqLM, {"tie_word_embeddings": True, "decoder_start_token_id": 1, "eos_token_id": 2}),
    ],
)
def test_a_folder_that_began_in_transformers_comes_back(cls, more, tmp_path):
    torch.manual_seed(0)
    mixers = [{"name": "aft_local", "window": 4}, {"name": "attention"}]
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 3, "max_position_embeddings": 24}
    theirs = cls(TokenMixConfig(**sizes, mixers=mixers, num_attention_heads=2, initializer_range=0.3, **more)).eval()
    theirs.save_pretrained(tmp_path)
    ours, tokens = from_transformers(tmp_path), torch.arange(20).view(2, 10)
    assert not ours.training
    if cls is TokenMixForSeq2SeqLM:
        assert torch.equal(ours(tokens, tokens), theirs(tokens, decoder_input_ids=tokens, use_cache=False).logits)
    else:
        assert torch.equal(ours(tokens), theirs(tokens, use_cache=False).logits)
    same_weights(to_transformers(ours), theirs)


def test_dtype_and_mode_stay():
    theirs = TokenMixForCausalLM(TokenMixConfig(hidden_size=16, num_hidden_layers=1)).to(torch.bfloat16).train()
    ours = from_transformers(theirs)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert theirs.training
    with torch.no_grad():
        ours.blocks[0].mlp.up.weight.zero_()
    assert theirs.model.layers[0].mlp.up.weight.any(), "a copy, not the same memory"


TINY = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("cls", "config", "words"),
    [
        (TokenMixForTokenClassification, {}, "a TokenMixForTokenClassification has no counterpart here"),
        (TokenMixModel, {}, "a TokenMixModel has no counterpart here; TokenMixForCausalLM, "),
        (TokenMixForCausalLM, {"hidden_act": "relu"}, "hidden_act='relu' with gated_mlp=False; MLPs here are 'gelu'"),
        (TokenMixForCausalLM, {"gated_mlp": True}, "hidden_act='gelu' with gated_mlp=True"),
        (TokenMixForCausalLM, {"layer_norm_eps": 1e-6}, "layer_norm_eps=1e-06; models of text here have 1e-05"),
        (
            TokenMixForCausalLM,
            {"gated_mlp": True, "hidden_act": "silu", "intermediate_size": 37},
            "intermediate_size=37; the width of ours is a multiple of 8",
        ),
        (TokenMixForMaskedLM, {"is_causal": True}, "is causal, is_causal=True; an Encoder sees both sides"),
        (TokenMixForSequenceClassification, {"classifier_pooling": "last"}, "an Encoder pools 'mean' or 'cls'"),
        (TokenMixForSequenceClassification, {"num_labels": 1}, "an Encoder has at least 2 classes"),
        (TokenMixForSeq2SeqLM, {"decoder_start_token_id": 1}, "decoder_start_token_id=1 and eos_token_id=None"),
        (
            TokenMixForSeq2SeqLM,
            {"decoder_start_token_id": 1, "eos_token_id": 2},
            "encoder and decoder embed tokens differently",
        ),
    ],
)
def test_what_ours_has_not_is_refused_in_one_line(cls, config, words):
    with pytest.raises(MixerError) as caught:
        from_transformers(cls(TokenMixConfig(**TINY, **config)))
    assert str(caught.value).startswith("from_transformers: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_ours_is_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    other = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=30, n_positions=8))
    with pytest.raises(MixerError, match="a GPT2LMHeadModel has no counterpart here"):
        from_transformers(other)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(MixerError, match="holds a model of type 'gpt2', not 'tokenmix'"):
        from_transformers(tmp_path / "other")
    with pytest.raises(MixerError, match="is no folder with a config.json"):
        from_transformers(tmp_path / "none")
    TokenMixModel(TokenMixConfig(**TINY)).save_pretrained(tmp_path / "trunk")
    with pytest.raises(MixerError, match="holds a TokenMixModel, which has no counterpart here"):
        from_transformers(str(tmp_path / "trunk"))


def test_changed_modules_are_refused():
    model = TokenMixForCausalLM(TokenMixConfig(**TINY))
    model.model.layers[0].mlp.more = torch.nn.Linear(2, 2)
    with pytest.raises(MixerError, match="holds blocks.0.mlp.more.bias, which a LM has not; merge adapters"):
        from_transformers(model)
    mixed = TokenMixForCausalLM(TokenMixConfig(**TINY))
    mixed.lm_head.to(torch.bfloat16)
    with pytest.raises(MixerError, match=r"holds weights of torch\.bfloat16 and torch\.float32"):
        from_transformers(mixed)
