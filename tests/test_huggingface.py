"""Our models in transformers: generation, padding, training, saving, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
import transformers
from torch import nn

from huggingface_checks import CHECKS, KINDS, PADS, causal, chunks, close, config, padded, tokens
from perturb import perturb_mixers
from surgery_models import make
from tokenmix import MixerError, register_mixer, state_bytes
from tokenmix.hosts import huggingface as host
from tokenmix.hosts.huggingface import layers
from tokenmix.hosts.huggingface.cache import OUTPUT_NAME, name_cache_output
from tokenmix.hosts.surgery import replace_mixers
from tokenmix.mixers import MIXERS, Facts, Mixer

SEQ2SEQ = {
    "encoder_mixers": [{"name": "fourier"}, {"name": "attention"}],
    "encoder_layers": 2,
    "cross_mixers": [{"name": "hydra"}, {"name": "attention"}],
}


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHECKS)
def test_check(name, kind):
    CHECKS[name](kind)


def seq2seq(**options):
    torch.manual_seed(0)
    given = {**SEQ2SEQ, "num_hidden_layers": 2, "decoder_start_token_id": 1, **options}
    return perturb_mixers(host.TokenMixForSeq2SeqLM(config("hydra", **given)))


def image_model(**options):
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "num_labels": 5,
    }
    return host.TokenMixForImageClassification(
        host.TokenMixConfig(**{**sizes, "mixers": [{"name": "aft_full", "rank": 3}], **options})
    )


@torch.no_grad()
def test_the_state_keeps_its_size():
    model = causal("hydra")
    short, long = (chunks(model, tokens(2, n), [])[1] for n in (4, 12))
    assert [state_bytes(layer.state) for layer in short.layers] == [state_bytes(layer.state) for layer in long.layers]
    assert short.get_seq_length() == 4
    short.reset()
    assert short.get_seq_length() == 0


@torch.no_grad()
def test_generation_goes_on_from_a_cache():
    model, x = causal("hybrid"), tokens(2, 12)
    _, cache = chunks(model, x[:, :7], [])
    assert torch.equal(
        model.generate(x, **name_cache_output(cache), max_new_tokens=6, do_sample=False),
        model.generate(x, max_new_tokens=6, do_sample=False),
    )


@torch.no_grad()
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_goes_by_its_name_of_either_version_of_transformers(name):
    model, x = causal("hybrid"), tokens(2, 12)
    whole, cache = model(x).logits, model(x[:, :7], use_cache=True).past_key_values
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        out = model(x[:, 7:], **{name: cache})
    old = [w for w in told if "`past_key_values` is deprecated since transformers 5.24" in str(w.message)]
    assert len(old) == (name == "past_key_values" and OUTPUT_NAME == "cache")
    close(out.logits, whole[:, 7:])
    assert out.past_key_values is cache
    assert cache.get_seq_length() == 12


@torch.no_grad()
def test_an_assistant_changes_only_the_speed():
    """A draft by another model, some of it taken and some given back; of an encoder and a decoder, too."""
    model, x, how = causal("hybrid"), tokens(1, 6), {"max_new_tokens": 14, "do_sample": False}
    draft = causal("hybrid")
    for p in draft.parameters():
        p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    calls, wanted = [], model.generate(x, **how)
    model.register_forward_hook(lambda *given: calls.append(1))
    assert torch.equal(model.generate(x, assistant_model=draft, **how), wanted)
    assert 1 < len(calls) < 14
    other = seq2seq()
    assert torch.equal(other.generate(x, prompt_lookup_num_tokens=2, **how), other.generate(x, **how))


@torch.no_grad()
def test_sampling_and_several_sequences():
    model, x = causal("aft"), tokens(2, 6)
    found = []
    for cache in (True, False):
        torch.manual_seed(1)
        found.append(model.generate(x, max_new_tokens=6, do_sample=True, num_return_sequences=3, use_cache=cache))
    assert torch.equal(*found)
    assert len(found[0].unique(dim=0)) > 2


@torch.no_grad()
def test_explicit_positions_select_rows():
    """A subset of tokens with their positions is the whole with the others masked."""
    model, x = causal("aft"), tokens(2, 12)
    keep = torch.tensor([0, 2, 3, 7, 11])
    mask = torch.zeros(2, 12, dtype=torch.long)
    mask[:, keep] = 1
    close(model(x[:, keep], position_ids=keep[None]).logits, model(x, attention_mask=mask).logits[:, keep])


@torch.no_grad()
def test_seq2seq_generates_the_same_with_its_cache():
    model, x = seq2seq(), tokens(3, 9)
    mask = torch.stack([torch.arange(9) < n for n in (9, 5, 7)]).long()
    for options in ({}, {"num_beams": 3}):
        given = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, **options}
        written = model.generate(x, **given)
        assert torch.equal(written, model.generate(x, use_cache=False, **given))
        if not options:
            assert torch.equal(written[1], model.generate(x[1:2, :5], max_new_tokens=8, do_sample=False)[0])
    out = model.generate(x, attention_mask=mask, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    assert len(out.past_key_values.cross_attention_cache.layers) == 2


CROSS = [
    {"name": "aft_full", "rank": 3},
    {"name": "aft_local", "window": 3, "rank": 3},
    {"name": "local", "window": 4},
    {"name": "aft_simple"},
]


def chunks_over_context(model, x, mask, ids, ids_mask):
    """Logits of a decoder in chunks through its cache."""
    out, cache, seen = [], None, 0
    context = model.encoder(x, mask, use_cache=False)
    for chunk in ids.split([4, 1, 3, 1], 1):
        seen += chunk.shape[1]
        given = {"encoder_outputs": context, "attention_mask": mask, "decoder_attention_mask": ids_mask[:, :seen]}
        found = model(decoder_input_ids=chunk, cache=cache, use_cache=True, **given)
        out, cache = [*out, found.logits], found.past_key_values
    return torch.cat(out, 1)


@pytest.mark.parametrize("cross", [CROSS[:2], CROSS[2:]], ids=["aft", "others"])
@torch.no_grad()
def test_seq2seq_streams_at_the_right_positions(cross, monkeypatch):
    """Both sides padded on the left: each row is its two sequences alone, whole and in chunks."""
    model, (x, mask) = seq2seq(cross_mixers=cross), padded()
    ids, ids_mask = tokens(3, 9).flip(0), (torch.arange(9) >= torch.tensor([[2], [0], [5]])).long()
    whole = model(x, mask, ids * ids_mask, ids_mask, use_cache=False).logits
    streamed = chunks_over_context(model, x, mask, ids * ids_mask, ids_mask)
    for row, n in enumerate((2, 0, 5)):
        alone = model(x[row : row + 1, PADS[row] :], None, ids[row : row + 1, n:], use_cache=False).logits[0]
        close(whole[row, n:], alone)
        close(streamed[row, n:], alone)
    crossed = layers.TokenMixLayer._mix_cross
    monkeypatch.setattr(layers.TokenMixLayer, "_mix_cross", staticmethod(lambda *args: crossed(*args[:-1], None)))
    assert (chunks_over_context(model, x, mask, ids * ids_mask, ids_mask) - streamed)[
        ids_mask.bool()
    ].abs().max() > 1e-2, "a bug that must be seen"


def test_seq2seq_learns_what_it_is_shown():
    model, x = seq2seq(tie_word_embeddings=True), tokens(2, 9)
    assert model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight
    labels = torch.tensor([[5, 6, 7, -100], [8, 9, 10, 11]])
    loss = model(x, labels=labels).loss
    inputs = torch.tensor([[1, 5, 6, 7], [1, 8, 9, 10]])
    logits = model(x, decoder_input_ids=inputs).logits
    close(loss, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    loss.backward()
    assert model.encoder.embed_tokens.weight.grad.abs().sum() > 0


def test_labels_are_shifted():
    model, x = causal("aft"), tokens(2, 9)
    out = model(x, labels=x)
    close(out.loss, nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()))
    assert model(x, logits_to_keep=1).logits.shape == (2, 1, 40)


@pytest.mark.parametrize("how", ["mean", "cls", "last"])
def test_what_is_classified(how):
    torch.manual_seed(0)
    model = host.TokenMixForSequenceClassification(
        config([{"name": "external"}], num_labels=4, classifier_pooling=how)
    ).eval()
    x = tokens(2, 8)
    mask = torch.stack([torch.arange(8) >= 3, torch.arange(8) < 5]).long()
    out = model(x, attention_mask=mask, labels=torch.tensor([1, 3]))
    for row, piece in enumerate((x[:1, 3:], x[1:, :5])):
        close(out.logits[row], model(piece).logits[0])
    close(out.loss, nn.functional.cross_entropy(out.logits, torch.tensor([1, 3])))


def test_encoders_see_both_sides_and_decoders_one():
    x = tokens(1, 8)
    y = x.clone()
    y[:, -1] = 3 if x[0, -1] != 3 else 4
    for cls in (host.TokenMixForMaskedLM, host.TokenMixForTokenClassification):
        model = cls(config("hybrid")).eval()
        assert (model(x).logits - model(y).logits)[:, 0].abs().max() > 1e-3
    assert torch.equal(causal("hybrid")(x).logits[:, :-1], causal("hybrid")(y).logits[:, :-1])


def test_a_language_model_becomes_a_classifier(tmp_path):
    """The trunk comes with its weights, causal as it was; the head is new."""
    model, x = causal("hybrid"), tokens(2, 8)
    model.save_pretrained(tmp_path)
    new = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3).eval()
    assert new.config.is_causal
    assert torch.equal(new.model(x).last_hidden_state, model.model(x).last_hidden_state)
    assert new.score.weight.std().item() == pytest.approx(0.5, rel=0.3)


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "performer"},
        {"name": "aft_conv", "kernel_size": 3},
        {"name": "synthesizer_random"},
        {"name": "routing"},
    ],
)
def test_other_mixers_are_saved_with_all_they_hold(spec, tmp_path):
    """Buffers too; of the parts that are missing in the file, only these begin anew."""
    model, x = causal([spec], hidden_size=32, num_attention_heads=4), tokens(2, 8)
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(x).logits, model(x).logits)


def test_weights_start_as_the_config_says():
    model = host.TokenMixForCausalLM(config("hybrid", hidden_size=64, initializer_range=0.1, num_hidden_layers=8))
    layer = model.model.layers[1]
    for weight in (
        model.model.embed_tokens.weight[1:],
        model.model.positions.weight,
        layer.mixer.q_proj.weight,
        layer.mlp.up.weight,
    ):
        assert weight.std().item() == pytest.approx(0.1, rel=0.1)
    assert layer.mixer.out_proj.weight.std().item() == pytest.approx(0.1 / 4, rel=0.1)
    assert layer.mixer.q_proj.bias.abs().max() == 0
    assert model.model.embed_tokens.weight[0].abs().max() == 0  # the padding token's


def test_only_what_is_missing_begins_anew_and_only_when_asked(tmp_path):
    """Check that a file without one layer's MLP is refused, or loaded where the user says so.

    Then the MLP is drawn as a new model's and everything else is loaded.
    """
    from safetensors.torch import load_file, save_file

    model = causal("hybrid", hidden_size=64)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = "model.layers.1.mlp.down.weight"
    del tensors[gone]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        MixerError, match=r"lacks 1 of \d+ weights of TokenMixForCausalLM, such as model.layers.1.mlp.down.weight; load"
    ):
        type(model).from_pretrained(tmp_path)
    loaded = dict(type(model).from_pretrained(tmp_path, ignore_mismatched_sizes=True).named_parameters())
    for name, tensor in model.named_parameters():
        assert torch.equal(loaded[name], tensor) == (name != gone), name
    assert loaded[gone].std().item() == pytest.approx(0.5 / 6**0.5, rel=0.1)


def test_gradient_checkpointing_gives_the_same_gradients():
    x = tokens(2, 10)
    for model, given in (
        (causal("hybrid"), {"input_ids": x, "labels": x}),
        (seq2seq(), {"input_ids": x, "labels": x}),
        (image_model(), None),
    ):
        given = given or {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 4])}
        found = []
        for again in (False, True):
            model.zero_grad()
            if again:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
            model.train()(**given).loss.backward()
            found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        assert found[0].keys() == found[1].keys()
        for name, grad in found[0].items():
            close(found[1][name], grad, 1e-6)


@pytest.mark.parametrize("kind", ["aft", "llama"])
@torch.no_grad()
def test_decoding_compiles_whole_and_not_anew_each_step(kind):
    """A graph for the first chunk, one for a step, and one more where a number turns out to vary."""
    model = (
        causal("aft")
        if kind == "aft"
        else perturb_mixers(replace_mixers(make("llama", 0.2), {"name": "aft_local", "window": 3}, seed=0)[0])
    )
    x, met = tokens(3, 12), torch._dynamo.utils.counters["stats"]
    whole = model(x, use_cache=False).logits
    torch._dynamo.reset()
    before = met["unique_graphs"]
    fast, out, cache = (
        torch.compile(model, backend="aot_eager", fullgraph=True),
        [],
        transformers.DynamicCache(config=model.config),
    )
    for chunk in x.split([4] + [1] * 8, 1):
        out.append(fast(chunk, use_cache=True, **name_cache_output(cache)).logits)
    close(torch.cat(out, 1), whole)
    assert met["unique_graphs"] - before <= 3


def test_hidden_states_are_recorded():
    assert len(causal("hybrid")(tokens(1, 4), output_hidden_states=True).hidden_states) == 4
    assert len(image_model()(torch.zeros(1, 3, 16, 16), output_hidden_states=True).hidden_states) == 3


@torch.no_grad()
def test_seq2seq_gives_what_others_of_transformers_give(tmp_path):
    """Check the hidden states of both sides, also through the encoder's own outputs and generate().

    Some of the logits as well; and no trunk where there is none.
    """
    model, x, y = seq2seq(), tokens(2, 6), tokens(2, 4)
    whole = model(x, decoder_input_ids=y, output_hidden_states=True)
    assert [len(whole.encoder_hidden_states), len(whole.decoder_hidden_states)] == [3, 3]
    assert torch.equal(whole.encoder_hidden_states[-1], whole.encoder_last_hidden_state)
    for return_dict in (True, False):
        before = model.get_encoder()(x, output_hidden_states=True, return_dict=return_dict)
        again = model(encoder_outputs=before, decoder_input_ids=y)
        assert torch.equal(again.encoder_hidden_states[1], whole.encoder_hidden_states[1])
    assert model(x, decoder_input_ids=y).encoder_hidden_states is None
    written = model.generate(x, max_new_tokens=3, output_hidden_states=True, return_dict_in_generate=True)
    assert len(written.encoder_hidden_states) == 3
    close(model(x, decoder_input_ids=y, logits_to_keep=1).logits, whole.logits[:, -1:])
    assert model.base_model is model
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(x, decoder_input_ids=y).logits, whole.logits)


def test_answers_are_found_and_not_in_the_padding(tmp_path):
    """Each row's loss and logits are those it has alone; a trunk gets such a head by its Auto class."""
    torch.manual_seed(0)
    model, (x, mask), at = (
        perturb_mixers(host.TokenMixForQuestionAnswering(config("hybrid"))),
        padded(),
        torch.tensor([7, 8, 9]),
    )
    out = model(x, attention_mask=mask, start_positions=at, end_positions=at + 1)
    losses = []
    for row, n in enumerate(PADS):
        alone = model(
            x[row : row + 1, n:], start_positions=at[row : row + 1] - n, end_positions=at[row : row + 1] + 1 - n
        )
        close(out.start_logits[row, n:], alone.start_logits[0])
        close(out.end_logits[row, n:], alone.end_logits[0])
        assert not out.start_logits[row, :n].exp().any()
        losses.append(alone.loss)
    close(out.loss, torch.stack(losses).mean())
    out.loss.backward()
    model.save_pretrained(tmp_path / "answers")
    assert isinstance(
        transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "answers"),
        host.TokenMixForQuestionAnswering,
    )
    causal("aft").save_pretrained(tmp_path / "trunk")
    assert (
        transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "trunk")(x).start_logits.shape == x.shape
    )


def test_images_are_those_of_our_vit(tmp_path):
    model, x = image_model(num_register_tokens=2).eval(), torch.randn(2, 3, 16, 16)
    assert torch.equal(model(x).logits, model.vit(x))
    model.save_pretrained(tmp_path)
    assert model.get_input_embeddings() is model.vit.patch
    model.set_input_embeddings(model.get_input_embeddings())
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(loaded(pixel_values=x).logits, model(x).logits)
    assert loaded.config.vit() == model.config.vit()


def test_lora_on_the_projections(tmp_path):
    import peft  # after the adapter, which repairs torchvision

    base, x = causal("hybrid"), tokens(2, 8)
    before = base(x).logits
    model = peft.get_peft_model(
        base, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == 6
    model.eval()
    assert (model(x).logits - before).abs().max() > 1e-3
    written = model.generate(input_ids=x, max_new_tokens=4, do_sample=False)
    assert torch.equal(written, model.generate(input_ids=x, max_new_tokens=4, do_sample=False, use_cache=False))
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(causal("hybrid"), tmp_path).eval()
    close(again(x).logits, model(x).logits)


class Still(Mixer):
    """A causal mixer that cannot stream."""

    facts = Facts(causal=True)

    def mix(self, inputs):
        x = inputs.x
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


@pytest.fixture
def still():
    register_mixer("still", Still)
    yield {"name": "still"}
    del MIXERS["still"]


@torch.no_grad()
def test_a_mixer_that_does_not_stream_writes_without_a_cache(still):
    model, x = causal([still]), tokens(2, 6)
    assert model.generate(x, max_new_tokens=3, do_sample=False).shape == (2, 9)
    for call in (
        lambda: model(x, use_cache=True),
        lambda: model.generate(x, max_new_tokens=3, do_sample=False, use_cache=True),
    ):
        with pytest.raises(
            MixerError,
            match="Still of layer 0 has no streaming form, so there is no cache to use; pass use_cache=False",
        ):
            call()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hiden_size": 8}, "no field 'hiden_size'; nearest: hidden_size"),
        ({"vocab_size": "8"}, "vocab_size must be a positive integer, got '8'"),
        ({"vocab_size": None}, "vocab_size must be a positive integer"),
        ({"mixers": []}, "list of at least one"),
        ({"mixers": [{"heads": 2}]}, "with a name"),
        ({"mixers": [{"name": "hydra", "causal": True}]}, "the model sets 'causal'"),
        ({"mixers": [{"name": "hydra"}] * 5, "num_hidden_layers": 4}, "5 specs for 4 layers"),
        ({"norm": "mid"}, "norm='mid' is unknown"),
        ({"positions": "rotary"}, "positions='rotary' is unknown"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob must be in"),
        ({"initializer_range": 0.0}, "initializer_range must be a positive number"),
    ],
)
def test_bad_configs_are_refused(given, words):
    with pytest.raises(MixerError, match=words):
        host.TokenMixConfig(**given)


def test_a_shorter_list_repeats_and_heads_are_filled_in():
    found = config(
        [{"name": "attention"}, {"name": "hydra"}, {"name": "linear", "heads": 4}],
        num_hidden_layers=5,
        num_key_value_heads=1,
    ).specs()
    assert [spec["name"] for spec in found] == ["attention", "hydra", "linear", "attention", "hydra"]
    assert found[0] == {"name": "attention", "heads": 2, "kv_heads": 1}
    assert found[1] == {"name": "hydra"}
    assert found[2]["heads"] == 4


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: causal([{"name": "fourier"}]), "fourier has no causal form, which this model needs"),
        (lambda: causal([{"name": "hydro"}]), "nearest: hydra"),
        (lambda: causal("aft", is_causal=False), "is_causal=False"),
        (lambda: causal("aft", hidden_act="gellu"), "hidden_act='gellu'"),
        (lambda: causal("aft", norm_type="batch"), "norm_type='batch' is unknown"),
        (lambda: causal("aft", final_logit_softcapping=0.0), "final_logit_softcapping must be a positive number"),
        (
            lambda: seq2seq(cross_mixers=[{"name": "external"}]),
            "external mixes a sequence with itself and cannot be a cross mixer; choose among attention",
        ),
        (lambda: image_model(norm="post"), "norm='pre'"),
        (lambda: host.TokenMixModel(config("aft", is_encoder_decoder=True)), "build TokenMixForSeq2SeqLM"),
        (lambda: host.register_attention("hydrra"), "choose hydra"),
    ],
)
def test_bad_models_are_refused(build, words):
    with pytest.raises(MixerError, match=words):
        build()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"attention_mask": torch.ones(2, 3)}, r"attention_mask of shape \(2, 4\), 1 = valid, got \(2, 3\)"),
        ({"attention_mask": torch.ones(2, 1, 4, 4)}, r"got \(2, 1, 4, 4\)"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1]])}, "packed into one row"),
        ({"output_attentions": True}, "no attention weights"),
        ({"token_type_ids": torch.ones(2, 4, dtype=torch.long)}, "no token types"),
        ({"inputs_embeds": torch.zeros(2, 4, 16)}, "either input_ids or inputs_embeds"),
        ({"cache": transformers.DynamicCache()}, "must be DynamicCache"),
        (
            dict.fromkeys(("cache", "past_key_values"), transformers.DynamicCache()),
            "got both cache and past_key_values",
        ),
        ({"encoder_hidden_states": torch.zeros(2, 4, 16)}, "no cross_mixers"),
        ({"input_ids": torch.ones(2, 41, dtype=torch.long)}, "max_position_embeddings=40, got a token at position 40"),
    ],
)
def test_bad_inputs_are_refused(given, words):
    with pytest.raises(MixerError, match=words) as told:
        causal("hydra").model(**{"input_ids": tokens(2, 4), **given})
    assert "\n" not in str(told.value)


def test_what_a_state_cannot_do_is_refused():
    model, x = causal("aft"), tokens(2, 6)
    _, cache = chunks(model, x, [])
    with pytest.raises(MixerError, match="cannot take back 2 tokens"):
        cache.crop(-2)
    with pytest.raises(MixerError, match="holds 2 rows, got 1"):
        model(x[:1], cache=cache)
    with pytest.raises(
        MixerError, match="static caches are not supported: they hold keys and values, and a mixer's state needs none"
    ):
        model.generate(x, cache_implementation="static", max_new_tokens=3)
    with pytest.raises(MixerError, match="expects an EncoderDecoderCache of two caches"):
        seq2seq()(x, decoder_input_ids=x, cache=transformers.DynamicCache(config=seq2seq().decoder.config))
    with pytest.raises(MixerError, match="is not causal and keeps no cache"):
        host.TokenMixModel(config("aft"))(x, use_cache=True)


def test_a_checkpoint_of_another_family_is_refused(tmp_path):
    transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2).save_pretrained(
        tmp_path / "bert"
    )
    with pytest.raises(MixerError, match="holds a model of type 'bert', not 'tokenmix'"):
        host.TokenMixForCausalLM.from_pretrained(tmp_path / "bert")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"model": {"kind": "lm"}}')
    with pytest.raises(MixerError, match="`tokenmix export`"):
        host.TokenMixForCausalLM.from_pretrained(tmp_path / "run")


def test_what_does_not_hold_of_mixers_is_refused_when_loaded(tmp_path):
    model = causal("aft")
    model.save_pretrained(tmp_path)
    for given, words in (
        ({"attn_implementation": "flex_attention"}, "ours is torch's fused attention"),
        ({"tp_plan": "auto"}, "no tensor-parallel plan"),
    ):
        with pytest.raises(MixerError, match=f"TokenMixForCausalLM: .*{words}"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **given)
    with pytest.raises(MixerError, match="the Auto classes know it"):
        type(model).register_for_auto_class("AutoModelForCausalLM")


@pytest.mark.parametrize("held", ["causal", "seq2seq", "image"])
def test_a_folder_of_another_kind_is_refused(held, tmp_path):
    """transformers reports the weights that are missing, and goes on with random ones."""
    models = {
        "causal": (causal, transformers.AutoModelForSeq2SeqLM),
        "seq2seq": (seq2seq, transformers.AutoModelForImageClassification),
    }
    make_one, auto = models.get(held, (image_model, transformers.AutoModel))
    model = make_one()
    model.save_pretrained(tmp_path)
    with pytest.raises(
        MixerError, match=rf"{tmp_path}: holds a {type(model).__name__}, which lacks \d+ of \d+ weights of TokenMix"
    ):
        auto.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("found", "words"),
    [("4.57.1", "needs transformers >= 5.16, found 4.57.1: pip"), (None, "which is not installed: pip")],
)
def test_the_package_is_named_where_it_is_missing_or_old(found, words):
    code = f"""
from importlib import metadata
def version(name, found={found!r}):
    if found is None: raise metadata.PackageNotFoundError(name)
    return found
metadata.version = version
try:
    import tokenmix.hosts.huggingface
except ValueError as why:
    print(why)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100)
    assert words in done.stdout, done.stderr
    assert "tokenmix[hf]" in done.stdout
