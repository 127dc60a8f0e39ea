"""Test that nothing is generated from logits that are no numbers, and that no temperature makes numbers into others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from cases import CASES, FIRST, GRIDS
from surgery_models import make
from tokenmix import MIXERS, MixerError
from tokenmix.models import LM, DiT, DiTConfig, ImageDensity, ImageDensityConfig, LMConfig, Seq2Seq, Seq2SeqConfig
from tokenmix.models.flow import solve_flow
from tokenmix.models.sampling import FiniteSteps, finite_rows, pick_token

MIX = ({"name": "aft_simple"},)
SAYS = "are NaN or infinite; look for weights or inputs that are not finite, or for an overflow in half precision"
CAUSAL = [name for name, cls in MIXERS.items() if cls.facts.causal and FIRST[name] not in GRIDS]


def lm(mixers=MIX, **options):
    torch.manual_seed(0)
    return LM(LMConfig(dim=8, max_len=12, mixers=mixers, vocab=7, **options)).eval()


def poison(model: nn.Module, value: float = math.nan) -> nn.Module:
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if name.endswith("out_proj.weight")).fill_(value)
    return model


def refused(run, *words: str) -> None:
    with pytest.raises(MixerError) as error:
        run()
    assert "\n" not in str(error.value)
    for word in (*words, SAYS):
        assert word in str(error.value)


@pytest.mark.parametrize("name", CAUSAL)
def test_lm_with_any_mixer(name):
    model = lm(({"name": name, **CASES[FIRST[name]][1]},))
    for bad in model.parameters():
        bad.data.fill_(math.nan)
    for temperature in (0.0, 1.0):
        refused(lambda t=temperature: model.generate(torch.tensor([[1, 2]]), 5, temperature=t), "LM.generate", "row 0")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_step_and_the_row_are_named(temperature):
    model, seen = lm(), []

    def later(_, __, logits):
        seen.append(None)
        return logits.index_fill(0, torch.tensor([1]), math.nan) if len(seen) == 3 else logits

    model.norm.register_forward_hook(later)
    tokens = torch.ones(3, 4, dtype=torch.long)
    refused(lambda: model.generate(tokens, 6, temperature=temperature), "logits of new token 2 in row 1")


@pytest.mark.parametrize(
    ("row", "good"),
    [
        ([0.0, math.nan, 1.0], False),
        ([0.0, math.inf, 1.0], False),
        ([-math.inf] * 3, False),
        ([0.0, -math.inf, -math.inf], True),
        ([3e38, -3e38, 0.0], True),
    ],
)
def test_which_logits_are_refused(row, good):
    logits = torch.tensor([[0.0, 1.0, 2.0], row])
    assert finite_rows(logits).tolist() == [True, good]
    steps = FiniteSteps("test", "logits of new token {step}")
    if good:
        assert steps.logits(logits) is logits
        for temperature in (0.0, 1e-300, 1e-30, 1.0, 1e30, 1e300):
            assert pick_token(logits, temperature=temperature).shape == (2, 1)
    else:
        refused(lambda: steps.logits(logits), "test: the logits of new token 0 in row 1")


def test_devices_that_are_not_waited_for_are_asked_at_the_end(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    steps = FiniteSteps("test", "logits of new token {step}")
    for step in range(3):
        logits = torch.zeros(2, 3)
        logits[1] = math.nan if step else 0.0
        assert steps.logits(logits).isfinite().all()
    refused(steps.finish, "new token 1 in row 1")


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-8])
def test_a_small_temperature_is_greedy(temperature):
    model, tokens = lm(), torch.tensor([[1, 2], [3, 4]])
    want = model.generate(tokens, 6, temperature=0.0)
    for more in ({}, {"top_k": 3}, {"top_p": 0.5}):
        assert torch.equal(model.generate(tokens, 6, temperature=temperature, **more), want)
    tied = torch.tensor([1.0, 3.0, 3.0, -math.inf]).expand(2000, 4)
    counts = pick_token(tied, temperature=temperature).flatten().bincount(minlength=4).tolist()
    assert counts[0] == counts[3] == 0
    assert min(counts[1:3]) > 800


@pytest.mark.parametrize("temperature", [math.inf, math.nan, -1.0])
def test_temperatures_that_are_no_temperatures(temperature):
    with pytest.raises(MixerError, match="temperature must be finite and >= 0"):
        lm().generate(torch.tensor([[1, 2]]), 5, temperature=temperature)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"beams": 3}])
@pytest.mark.parametrize("across", ["attention", "linformer"])  # linformer keeps no context, so targets are read again
def test_seq2seq(options, across):
    cross = ({"name": across, **({"heads": 2} if across == "attention" else {"max_len": 8, "rank": 2})},)
    model = Seq2Seq(Seq2SeqConfig(dim=8, max_len=8, mixers=MIX, cross_mixers=cross, vocab=5, start=0, end=1))
    who = "BeamSearch" if "beams" in options else "Seq2Seq.generate"
    source = torch.tensor([[2, 3], [3, 2]])
    model.generate(source, 4, **options)
    refused(lambda: poison(model).generate(source, 4, **options), who, "new token 0 in row 0")


@pytest.mark.parametrize("mixer", ["aft_simple", "attention"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_image_density(mixer, temperature):
    spec = {"name": mixer, **({"heads": 2} if mixer == "attention" else {})}
    model = poison(ImageDensity(ImageDensityConfig(dim=8, layers=1, mixers=(spec,), size=(2, 2), channels=1)))
    refused(lambda: model.sample(2, temperature=temperature), "ImageDensity", "new sub-pixel 0")
    images = torch.zeros(1, 1, 2, 2, dtype=torch.uint8)
    refused(lambda: model.complete(images, 1, temperature=temperature), "new sub-pixel 0 (behind 2 given ones)")


@pytest.mark.parametrize("solver", ["euler", "heun"])
def test_flow(solver):
    config = DiTConfig(dim=8, layers=1, mixers=({"name": "external", "slots": 4},), image_size=(4, 4), patch=2)
    model = DiT(config)
    with torch.no_grad():
        for p in model.head.parameters():
            p.fill_(math.nan)
    refused(lambda: model.sample(2, steps=3, solver=solver), "solve_flow", "velocities of step 0 in row 0")
    noise = torch.zeros(2, 3)

    def overflows(x, t):
        return torch.full_like(x, math.inf) if float(t[0]) < 0.6 else x

    refused(lambda: solve_flow(overflows, noise, steps=4, solver=solver), "velocities of step")


HOSTED = [
    {"do_sample": False},
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.5, "top_k": 2},
    {"num_beams": 2, "do_sample": False},
]


@pytest.mark.parametrize("options", HOSTED)
@pytest.mark.parametrize("pair", [False, True])
def test_models_of_transformers(options, pair):
    from tokenmix.hosts.huggingface import TokenMixConfig, TokenMixForCausalLM, TokenMixForSeq2SeqLM

    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = TokenMixConfig(**sizes, mixers=[{"name": "hydra"}], pad_token_id=0, decoder_start_token_id=1)
    model = (TokenMixForSeq2SeqLM if pair else TokenMixForCausalLM)(config).eval()
    ids = torch.ones(2, 3, dtype=torch.long)
    assert len(model.generate(ids, max_new_tokens=3, **options)) == 2
    poison(model)
    where = f"logits of token {1 if pair else 3} in row"
    refused(lambda: model.generate(ids, max_new_tokens=3, **options), f"{type(model).__name__}.generate", where)
    with pytest.raises(MixerError, match="temperature must be a number from 1e-20, got 1e-30"):
        model.generate(ids, max_new_tokens=3, do_sample=True, temperature=1e-30)


def test_a_converted_model_that_the_command_samples(tmp_path, monkeypatch):
    from tokenmix.hosts.surgery import texts

    model = make("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)

    class Tokenizer:
        def __call__(self, text, **_):
            return {"input_ids": [1, 2]}

        def decode(self, ids, **_):
            return "text"

    monkeypatch.setattr(texts, "_language_model", lambda *_: model)
    monkeypatch.setattr(texts, "folder_tokenizer", lambda *_: Tokenizer())
    monkeypatch.setattr(texts, "check_vocabulary", lambda *_: None)
    for temperature in (0.0, 0.8):
        refused(lambda t=temperature: texts.sample_folder(tmp_path, tokens=3, temperature=t), "sample: ")


def test_settings_of_another_kind_are_one_line():
    """A fraction as top_k, words, and seeds beyond 64 bits were errors of Python and torch."""
    torch.manual_seed(0)
    model = LM(LMConfig(dim=8, vocab=7, max_len=8, mixers=({"name": "hydra"},)))
    prompt = torch.ones(1, 2, dtype=torch.long)
    wrong = {
        "top_k": (2.5, "3"),
        "top_p": ("half",),
        "temperature": ("1", None),
        "seed": (2**70, -(2**70), "a", 1.5),
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(MixerError, match=rf"^{name} must be [^\n]*$"):
                model.generate(prompt, 2, **{name: value})
    for value in (2**64 - 1, -1, True):
        assert model.generate(prompt, 2, seed=value).shape == (1, 4)
