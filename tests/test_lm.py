"""The language model: parallel and streaming are one model, whatever it is made of."""

from __future__ import annotations

import json

import pytest
import torch

from perturb import perturb_mixers
from tokenmix import MixerError, reorder, state_bytes
from tokenmix.models import LM, LMConfig, build_model
from tokenmix.models.sampling import keep_top, pick_token

ATTENTION = {"name": "attention", "heads": 2}
LOCAL = {"name": "aft_local", "window": 4, "rank": 3}
MODELS = {
    "attention": (ATTENTION,),
    "aft_full": ({"name": "aft_full", "rank": 3},),
    "aft_local": (LOCAL,),
    "aft_simple": ({"name": "aft_simple"},),
    "aft_conv": ({"name": "aft_conv", "heads": 2, "kernel_size": 5},),
    "hybrid": (LOCAL, LOCAL, LOCAL, ATTENTION),
}


def drawn(mixers=(ATTENTION,), **options) -> LM:
    """A small model as its constructor leaves it, with a large init_std."""
    torch.manual_seed(0)
    config = LMConfig(
        **{
            "dim": 16,
            "max_len": 24,
            "vocab": 50,
            "mixers": mixers,
            "layers": max(2, len(mixers)),
            "init_std": 0.3,
            **options,
        }
    )
    return LM(config).eval()


def make(mixers=(ATTENTION,), **options) -> LM:
    """The same with mixers of which everything shows in the logits."""
    return perturb_mixers(drawn(mixers, **options))


def tokens(rows: int = 3, length: int = 20) -> torch.Tensor:
    return torch.randint(50, (rows, length), generator=torch.Generator().manual_seed(1))


def stream(model: LM, x: torch.Tensor, cuts: list[int], mask: torch.Tensor | None = None) -> torch.Tensor:
    state, out = model.init_state(len(x)), []
    for a, b in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
        logits, state = model.extend(x[:, a:b], state, key_mask=None if mask is None else mask[:, a:b])
        out.append(logits)
    return torch.cat(out, 1)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_streaming_equals_parallel(name, norm):
    model, x = make(MODELS[name], norm=norm), tokens()
    full = model(x)
    assert full.std() > 0.1
    for cuts in ([7, 8, 15], list(range(1, 20))):
        torch.testing.assert_close(stream(model, x, cuts), full, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_left_padding_changes_nothing(name):
    model, x = make(MODELS[name]), tokens()
    pad = [0, 3, 9]
    mask = torch.stack([torch.arange(20) >= p for p in pad])
    padded = torch.stack([torch.cat([torch.full((p,), 7), row[: 20 - p]]) for p, row in zip(pad, x, strict=True)])
    for got in (model(padded, key_mask=mask), stream(model, padded, [2, 4, 12], mask)):
        for row, p in enumerate(pad):
            torch.testing.assert_close(got[row, p:], model(x[row : row + 1, : 20 - p])[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_future_does_not_reach_the_past_but_the_past_does_reach_the_present(name):
    model, x = make(MODELS[name]), tokens()
    y = x.clone()
    y[:, 12:] = (y[:, 12:] + 1) % 50
    torch.testing.assert_close(
        model(x)[:, :12], model(y)[:, :12], rtol=0, atol=1e-5
    )  # a kernel may choose its units by a block that holds the future
    model = model.double()
    assert (model(x)[:, :12] - model(y)[:, :12]).abs().max() <= 1e-13
    y = x.clone()
    y[:, 3] = (y[:, 3] + 1) % 50
    assert (model(x)[:, 15] - model(y)[:, 15]).abs().amax(-1).min() > 1e-4


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"positions": None}, {"norm": "post", "dropout": 0.1}])
def test_a_meta_build_reset_under_a_seed_is_a_direct_build(options):
    direct = drawn(MODELS["hybrid"], **options)
    with torch.device("meta"):
        built = LM(direct.config)
    built = built.to_empty(device="cpu")
    torch.manual_seed(0)
    built.reset_parameters()
    for (name, a), (_, b) in zip(direct.state_dict().items(), built.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_weights_start_as_promised():
    torch.manual_seed(0)
    model = LM(LMConfig(dim=128, max_len=16, mixers=(ATTENTION,), layers=8))
    block = model.blocks[3]
    for weight, std in [(model.embed.weight, 0.02), (block.mixer.q_proj.weight, 0.02), (block.mlp.up.weight, 0.02)]:
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    for weight in (block.mixer.out_proj.weight, block.mlp.down.weight):
        assert weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_config_goes_to_json_and_back():
    config = LMConfig(dim=8, max_len=16, mixers=(LOCAL, ATTENTION), layers=5, tied=True, positions=None)
    assert LMConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert [s["name"] for s in config.specs()] == ["aft_local", "attention", "aft_local", "attention", "aft_local"]
    assert make((LOCAL,)).blocks[0].mixer.max_len == 24
    assert build_model(config).config == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dimm": 3}, "nearest: dim"),
        ({"dim": "8"}, "must be an int"),
        ({"mixers": []}, "mixers is empty"),
        ({"layers": 1, "mixers": [LOCAL, LOCAL]}, "less than the number of mixers given, 2"),
        ({"positions": "rotary"}, "rotary"),
        ({"dropout": 1.0}, "dropout"),
        ({"max_len": 0}, "max_len must be positive"),
    ],
)
def test_bad_configs_are_refused(change, words):
    with pytest.raises(MixerError, match=words):
        LMConfig.from_json({"dim": 8, "max_len": 16, "mixers": [ATTENTION], **change})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"name": "fourier"}, "fourier has no causal form, which this model needs"),
        ({"name": "atention"}, "nearest: attention"),
        ({"heads": 2}, "with a name"),
        ({"name": "attention", "causal": True}, "the model sets"),
    ],
)
def test_bad_specs_are_refused(spec, words):
    with pytest.raises(MixerError, match=words):
        make((spec,))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(1, 25, dtype=torch.long), "max_len=24"),
        (torch.zeros(1, 4), "integer tokens"),
        (torch.full((1, 4), 50), "0..49"),
        (torch.zeros(4, dtype=torch.long), "shape"),
    ],
)
def test_bad_tokens_are_refused(x, words):
    with pytest.raises(MixerError, match=words):
        make()(x)


@pytest.mark.parametrize(
    ("x", "mask", "words"),
    [
        (tokens(2, 3), torch.ones(2, 2, dtype=torch.bool), r"LM: expects a bool key_mask of shape \(2, 3\)"),
        (tokens(2, 3), torch.ones(3, dtype=torch.bool), r"LM: expects a bool key_mask of shape \(2, 3\)"),
        (tokens(2, 0), torch.ones(2, 0, dtype=torch.bool), r"\(2, 1 or more\), got \(2, 0\)"),
        (tokens(3, 1), None, r"\(2, 1 or more\), got \(3, 1\)"),
    ],
)
def test_bad_chunks_are_refused_in_one_line(x, mask, words):
    model = make()
    with pytest.raises(MixerError, match=words):
        model.extend(x, model.init_state(2), key_mask=mask)
    if mask is not None and mask.numel():
        with pytest.raises(MixerError, match=words):
            model(x, key_mask=mask)


def test_no_rows_and_bytes_of_one_byte():
    model, x = make(), tokens(2, 5)
    assert model.generate(x[:0], 3).shape == (0, 8)
    assert torch.equal(model(x.to(torch.uint8)), model(x))
    assert torch.equal(model.generate(x.to(torch.uint8), 3, temperature=0).long(), model.generate(x, 3, temperature=0))


def test_streaming_past_max_len_is_refused():
    model = make()
    _, state = model.extend(tokens(1, 24), model.init_state(1))
    with pytest.raises(MixerError, match="max_len=24"):
        model.extend(tokens(1, 1), state)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_greedy_generation_is_the_argmax_of_the_parallel_form(name):
    model, x = make(MODELS[name]), tokens(2, 6)
    out = model.generate(x, 18, temperature=0)
    assert out.shape == (2, 24)
    for t in range(6, 24):
        assert torch.equal(out[:, t], model(out[:, :t])[:, -1].argmax(-1))
    assert torch.equal(out, model.generate(x, 18, top_k=1))
    assert torch.equal(out, model.generate(x, 18, top_p=1e-6))


@torch.no_grad()
def test_mixers_that_cannot_stream_generate_by_reading_everything_again():
    model, x = make(({"name": "routing", "heads": 2, "paper_form": True},)), tokens(2, 6)
    out = model.generate(x, 4, temperature=0)
    for t in range(6, 10):
        assert torch.equal(out[:, t], model(out[:, :t])[:, -1].argmax(-1))


@pytest.mark.parametrize("streams", [True, False])
def test_generation_from_prompts_of_different_lengths(streams, monkeypatch):
    model, x = make(MODELS["hybrid"]), tokens(2, 8)
    mask = torch.stack([torch.arange(10) >= 2, torch.arange(10) >= 5])
    padded = torch.stack(
        [torch.cat([torch.zeros(2, dtype=torch.long), x[0]]), torch.cat([torch.zeros(5, dtype=torch.long), x[1, :5]])]
    )
    monkeypatch.setattr(type(model), "streams", streams)
    out = model.generate(padded, 16, temperature=0, key_mask=mask)
    assert torch.equal(out[0, 2:], model.generate(x[:1], 16, temperature=0)[0])
    assert torch.equal(out[1, 5:], model.generate(x[1:, :5], 16, temperature=0)[0])


def test_generation_is_repeatable_and_leaves_the_mode_and_the_generator_alone():
    model, x = make(dropout=0.5).train(), tokens(2, 6)
    before = torch.get_rng_state()
    a, b, c = (model.generate(x, 10, seed=s) for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert model.training
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 19}, "n can be at most 18"),
        ({"n": 2.5}, "an integer n >= 0"),
        ({"n": 2, "temperature": -1.0}, "temperature"),
        ({"n": 2, "top_k": 0}, "top_k"),
        ({"n": 2, "top_p": 0.0}, "top_p"),
        ({"n": 2, "key_mask": torch.ones(2, 5, dtype=torch.bool)}, "key_mask"),
        ({"n": 2, "key_mask": torch.arange(6).expand(2, 6) < 3}, "pad on the left"),
    ],
)
def test_generation_refuses_up_front(options, words):
    with pytest.raises(MixerError, match=words):
        make().generate(tokens(2, 6), **options)


def test_a_model_without_lengths_has_no_limit():
    model = make(({"name": "aft_simple"},), positions=None)
    assert model.max_len is None
    assert model.generate(tokens(1, 2), 60, seed=0).shape == (1, 62)
    sizes = [state_bytes(model.prefill(tokens(1, n))[1]) for n in (1, 20)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "aft_full"},
        {"name": "aft_local", "window": 4, "bias": None},
        {"name": "attention", "heads": 2, "positions": {"name": "learned"}},
        {"name": "synthesizer_factorized_dense", "heads": 2},
        {"name": "synthesizer_mixture", "heads": 2, "parts": ["attention", "factorized_dense"]},
        {"name": "gmlp", "max_len": 30},
    ],
    ids=lambda spec: spec["name"],
)
@torch.no_grad()
def test_resize_stretches_what_has_a_length_and_keeps_the_config_true(spec):
    model = make((spec, ATTENTION), max_len=30)
    weights = model.positions.weight.detach().clone()
    assert model.resize(30).max_len == 30
    assert torch.equal(model.positions.weight, weights)
    with pytest.raises(MixerError, match="max_len=30, got 75 tokens"):
        model(tokens(length=75))
    assert model.resize(75) is model
    assert model.max_len == 75
    # index i reads the old table at (i + 0.5) * 30 / 75 - 0.5: 2 at 0.5, between rows 0 and 1; 7 at row 2.5
    torch.testing.assert_close(model.positions.weight[2], weights[0] * 0.5 + weights[1] * 0.5)
    again = LM(model.config)
    again.load_state_dict(model.state_dict())
    x = tokens(length=75)
    torch.testing.assert_close(again.eval()(x), model.eval()(x), rtol=0, atol=0)


def test_resize_refuses_what_it_cannot_stretch_and_changes_nothing():
    model = make(({"name": "aft_full"}, ATTENTION), max_len=30)
    model.blocks[1].mixer.max_len = 30  # a mixer of a user's, with parameters per position and no resize
    model.blocks[1].mixer.resize = None
    before = {name: a.clone() for name, a in model.state_dict().items()}
    with pytest.raises(MixerError, match="cannot be stretched; build the model for 60 tokens"):
        model.resize(60)
    assert model.config.max_len == 30
    assert all(torch.equal(a, before[n]) for n, a in model.state_dict().items())
    for wrong in (0, True, 2.5):
        with pytest.raises(MixerError, match="LM.resize: max_len must be a positive integer, got"):
            model.resize(wrong)
    free = make(({"name": "aft_simple"},), positions=None)
    assert free.resize(50).max_len is None


@torch.no_grad()
def test_states_can_be_reordered():
    model, x = make(MODELS["hybrid"]), tokens()
    _, state = model.extend(x[:, :10], model.init_state(3))
    index = torch.tensor([2, 0, 0])
    got, _ = model.extend(x[index, 10:], reorder(state, index))
    torch.testing.assert_close(got, model(x[index])[:, 10:], rtol=0, atol=1e-5)


def test_top_k_and_top_p_keep_what_they_say():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert keep_top(logits, 2, None).isfinite().tolist() == [[True, True, False, False]]
    assert keep_top(logits, None, 0.6).isfinite().tolist() == [[True, True, False, False]]
    assert keep_top(logits, None, 0.49).isfinite().tolist() == [[True, False, False, False]]
    assert keep_top(torch.zeros(1, 5), 2, None).isfinite().sum() == 2
    rows = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))  # of any shape
    assert torch.equal(keep_top(rows, 2, 0.9), torch.stack([keep_top(row, 2, 0.9) for row in rows]))
    generator = torch.Generator().manual_seed(0)
    drawn = pick_token(logits.expand(20_000, 4), generator=generator).flatten().bincount() / 20_000
    torch.testing.assert_close(drawn, logits.exp()[0], rtol=0, atol=0.02)


@torch.no_grad()
def test_five_thousand_bytes_of_streaming_are_the_parallel_form():
    torch.manual_seed(0)
    model = LM(
        LMConfig(dim=16, max_len=8192, mixers=({"name": "aft_local", "window": 32, "rank": 8},), layers=2, init_std=0.2)
    ).eval()
    x = torch.randint(256, (1, 1))
    state, token, streamed, drawn, sizes = model.init_state(1), x, [], [x], set()
    generator = torch.Generator().manual_seed(0)
    for _ in range(5000):
        logits, state = model.extend(token, state)
        streamed.append(logits)
        sizes.add(state_bytes(state))
        token = pick_token(logits[:, -1], generator=generator)
        drawn.append(token)
    assert len(sizes) == 1
    assert torch.equal(model.generate(x, 100, seed=0), torch.cat(drawn[:101], 1))
    torch.testing.assert_close(torch.cat(streamed, 1), model(torch.cat(drawn[:-1], 1)), rtol=0, atol=1e-5)
