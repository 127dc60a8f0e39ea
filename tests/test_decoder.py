"""The planned decoder: the numbers of ``extend``, and one line for everything that it does not take."""

from __future__ import annotations

import threading

import pytest
import torch

from tokenmix import MIXERS, MixerError, use_backend
from tokenmix.kernels import cpu
from tokenmix.models import LM, LMConfig, LoopConfig
from tokenmix.models.blocks import Block

pytestmark = pytest.mark.skipif(not cpu.available(), reason="a decoder runs on the C kernels")

PLANNED = {
    "aft_simple": {},
    "aft_local": {"window": 7},
    "aft_conv": {"heads": 2, "kernel_size": 5},
    "aft_forget": {},
    "aft_pairs": {"heads": 2, "rank": 3},
    "hydra": {},
    "linear": {"heads": 2},
    "gated_delta": {"heads": 2},
    "kda": {"name": "gated_delta", "heads": 2, "decay": "feature", "gate": "sigmoid"},
    "mamba2": {"heads": 2, "state_dim": 8},
    "short_conv": {},
    "attention": {"heads": 4},
    "aft_full_alibi": {"name": "aft_full", "bias": {"name": "alibi"}},
    "aft_reach": {"heads": 2, "reaches": 3},
    "rotary": {"name": "attention", "heads": 4, "kv_heads": 2, "positions": {"name": "rotary"}, "qk_norm": "rms"},
}
CALLED = {
    "aft_full": {},
    "local": {"heads": 2, "window": 5},
    "performer": {"heads": 2},
    "rfa": {"heads": 2},
    "multihead_linear": {"heads": 2},
    "external": {},
    "external_multihead": {"heads": 2},
    "synthesizer_dense": {},
    "synthesizer_random": {},
    "synthesizer_factorized_dense": {},
    "synthesizer_factorized_random": {},
    "synthesizer_mixture": {},
}


def build(*specs, **options):
    config = {"vocab": 40, "max_len": 64, "layers": 2, "init_std": 0.3} | options
    torch.manual_seed(0)
    return LM(LMConfig(dim=16, mixers=specs, **config)).eval()


def spec(name):
    return {"name": name} | (PLANNED | CALLED)[name]


def read(step, tokens, state):
    logits = []
    for t in range(tokens.shape[1]):
        y, state = step(tokens[:, t : t + 1], state)
        logits.append(y.clone())
    return torch.cat(logits, 1), state


def near(a, b):
    return float((a - b).abs().max()) <= 1e-5 * float(b.abs().max())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", [*PLANNED, *CALLED])
@torch.no_grad()
def test_a_decoder_computes_the_logits_of_extend(name, rows):
    model, tokens = build(spec(name)), torch.randint(40, (rows, 30))
    decoder = model.decoder(rows)
    assert (decoder.in_python == []) is (name in PLANNED), decoder.in_python
    expected, after = read(model.extend, tokens, model.init_state(rows))
    found, state = read(decoder.extend, tokens, decoder.state)
    assert near(found, expected)
    more = torch.randint(40, (rows, 5))  # the state is one that the model itself goes on from
    assert near(model.extend(more, state)[0], model.extend(more, after)[0])


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "post"},
        {"norm_type": "rms", "mlp": "swiglu", "mlp_bias": False},
        {"mlp": "relu2", "positions": None},
        {"positions": "sinusoidal", "tied": True},
        {"logit_cap": 5.0, "mlp_ratio": 0},
        {"positions": "abacus"},
        {"loop": LoopConfig(times=2, inject="add")},
    ],
)
@torch.no_grad()
def test_models_of_every_shape_are_planned(options):
    model, tokens = build(spec("aft_simple"), spec("rotary"), **options), torch.randint(40, (2, 20))
    decoder = model.decoder(2)
    assert near(read(decoder.extend, tokens, decoder.state)[0], read(model.extend, tokens, model.init_state(2))[0])


@pytest.mark.parametrize("name", ["aft_local", "gated_delta", "rotary", "local"])
@torch.no_grad()
def test_a_state_from_elsewhere_is_copied_in(name):
    """Of prompts that are padded on the left; reordered rows; and one that was kept as it was before."""
    model, prompt = build(spec(name), spec("aft_simple")), torch.randint(40, (3, 6))
    mask = torch.arange(6) >= torch.tensor([[0], [2], [4]])
    _, state = model.prefill(prompt, key_mask=mask)
    decoder, tokens = model.decoder(3), torch.randint(40, (3, 10))
    expected, after = read(model.extend, tokens, state)
    assert near(read(decoder.extend, tokens, state)[0], expected)
    order = torch.tensor([2, 0, 0])
    turned = torch.utils._pytree.tree_map(lambda a: a[order], after)
    assert near(read(decoder.extend, tokens, turned)[0], read(model.extend, tokens, turned)[0])
    assert near(read(decoder.extend, tokens, state)[0], expected)


@torch.no_grad()
def test_numbers_that_are_not_finite_are_those_of_extend():
    for name in ("gated_delta", "aft_simple", "short_conv"):
        model = build(spec(name))
        model.embed.weight[7] = torch.nan
        tokens = torch.tensor([[1, 2, 7, 3, 4], [1, 2, 3, 4, 5]])
        decoder = model.decoder(2)
        found = read(decoder.extend, tokens, decoder.state)[0]
        expected = read(model.extend, tokens, model.init_state(2))[0]
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.allclose(found.nan_to_num(), expected.nan_to_num(), atol=1e-5 * float(expected.nan_to_num().max()))


@torch.no_grad()
def test_generated_text_is_the_same_with_a_decoder():
    model, prompt = build(spec("aft_simple"), spec("attention"), max_len=256), torch.randint(40, (2, 4))
    for options in ({"temperature": 0}, {"seed": 3}):
        plain = model.generate(prompt, 100, decoder=None, **options)
        assert torch.equal(model.generate(prompt, 100, **options), plain)
        assert torch.equal(model.generate(prompt, 100, decoder=model.decoder(2), **options), plain)


@pytest.mark.parametrize(("weights", "most"), [("bfloat16", 0.03), ("int8", 0.05)])
@torch.no_grad()
def test_narrow_weights_drift_by_what_their_rounding_makes(weights, most):
    model, tokens = build(spec("linear"), max_len=256), torch.randint(40, (1, 60))
    decoder = model.decoder(weights=weights)
    found = read(decoder.extend, tokens, decoder.state)[0]
    expected = read(model.extend, tokens, model.init_state(1))[0]
    drift = float((found - expected).norm() / expected.norm())
    assert 1e-5 < drift < most, drift


@torch.no_grad()
def test_a_model_of_bfloat16_is_planned():
    model, tokens = build(spec("aft_simple")).bfloat16(), torch.randint(40, (1, 20))
    decoder = model.decoder()
    found = read(decoder.extend, tokens, decoder.state)[0]
    expected = read(model.extend, tokens, model.init_state(1))[0]
    assert found.dtype is torch.bfloat16
    assert float((found - expected).float().norm() / expected.float().norm()) < 0.03


@torch.no_grad()
def test_threads_have_decoders_of_their_own():
    model, tokens = build(spec("aft_conv"), spec("rotary")), torch.randint(40, (1, 40))
    expected, found = read(model.extend, tokens, model.init_state(1))[0], []

    def run():
        with torch.no_grad():
            decoder = model.decoder()
            found.append(read(decoder.extend, tokens, decoder.state)[0])

    threads = [threading.Thread(target=run) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 4
    assert all(near(each, expected) for each in found)


@torch.no_grad()
def test_other_threads_compute_while_a_plan_is_recorded():
    model, other, x = build(*[spec("aft_forget")] * 6, layers=6), build(spec("aft_local")), torch.randint(40, (1, 30))
    expected, stop, wrong = other.extend(x, other.init_state(1))[0], threading.Event(), []

    def run():
        with torch.no_grad():
            while not stop.is_set():
                wrong.extend([1] * (not torch.equal(other.extend(x, other.init_state(1))[0], expected)))

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(5):
        decoder = model.decoder()
    stop.set()
    thread.join()
    assert wrong == []
    assert near(*(read(step, x, model.init_state(1))[0] for step in (decoder.extend, model.extend)))


def test_what_a_decoder_does_not_take_is_refused_in_a_line(monkeypatch):
    model = build(spec("aft_simple"))
    for options, message in (
        ({"batch_size": 0}, "Decoder: batch_size must be an integer >= 1, got 0."),
        ({"max_len": True}, "Decoder: max_len must be an integer >= 1, got True."),
        ({"weights": "int4"}, "Decoder: weights='int4' is unknown; choose 'bfloat16', 'int8' or None."),
    ):
        with pytest.raises(MixerError) as raised:
            model.decoder(**options)
        assert str(raised.value) == message
    with pytest.raises(MixerError, match="is in training mode; call model.eval"):
        build(spec("aft_simple")).train().decoder()
    with monkeypatch.context() as patch:
        patch.setattr(Block, "streams", False)
        with pytest.raises(
            MixerError, match="AFTSimple cannot continue from a state; LM.generate reads all tokens again"
        ):
            model.decoder()
    hooked = build(spec("aft_simple"))
    hooked.blocks[0].register_forward_hook(lambda *a: None)
    with pytest.raises(MixerError, match="blocks.0 has hooks, which a plan would leave out; remove them"):
        hooked.decoder()


def test_tokens_and_states_that_do_not_fit_are_refused():
    model = build(spec("attention"), max_len=8)
    decoder = model.decoder(2)
    state, token = decoder.state, torch.zeros(2, 1, dtype=torch.long)
    for tokens, message in (
        (token[:1], r"was made for integer tokens of shape \(2, 1\), got torch.int64 \(1, 1\)"),
        (token.float(), r"got torch.float32 \(2, 1\)"),
        (token - 1, r"tokens must be in 0..39, got -1"),
        (token + 40, r"tokens must be in 0..39, got 40"),
    ):
        with pytest.raises(MixerError, match=message):
            decoder.extend(tokens, state)
    with pytest.raises(MixerError, match=r"was made for a state of 2 rows and 2 layers, got \(3,\) positions"):
        decoder.extend(token, model.init_state(3))
    with pytest.raises(MixerError, match="max_len=8 and has read as many tokens; stop here"):
        read(decoder.extend, torch.zeros(2, 9, dtype=torch.long), state)
    free = build(spec("rotary"), positions=None, max_len=8)
    decoder = free.decoder(max_len=4)
    with pytest.raises(MixerError, match="has memory for 4 tokens, which are read; make one with a larger max_len"):
        read(decoder.extend, torch.zeros(1, 5, dtype=torch.long), decoder.state)


@torch.no_grad()
def test_a_model_that_changed_is_refused():
    changes = {
        "trained": lambda m: m.head.weight.add_(1),
        "moved": lambda m: m.double(),
        "replaced": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True),
        "other parameter": lambda m: setattr(m.head, "weight", torch.nn.Parameter(m.head.weight + 1)),
        "training": lambda m: m.train(),
    }
    for name, change in changes.items():
        model = build(spec("aft_simple"))
        decoder = model.decoder()
        change(model)
        with pytest.raises(MixerError, match="make another with model.decoder|training mode"):
            decoder.extend(torch.zeros(1, 1, dtype=torch.long), decoder.state)
        assert name


def test_no_text_is_generated_for_no_rows():
    model = build(spec("aft_simple"), max_len=256)
    assert model.generate(torch.zeros(0, 3, dtype=torch.long), 100).shape == (0, 103)


@torch.no_grad()
def test_generate_uses_no_decoder_on_the_eager_backend(monkeypatch):
    model = build(spec("aft_simple"), max_len=256)
    monkeypatch.setattr(LM, "decoder", lambda *a, **b: pytest.fail("a decoder was made"))
    with use_backend("eager"):
        model.generate(torch.zeros(1, 1, dtype=torch.long), 80)
    model.generate(torch.zeros(1, 1, dtype=torch.long), 20)


def test_every_streaming_core_mixer_is_tried():
    streaming = {name for name, cls in MIXERS.items() if cls.facts.about.tier == "core" and cls.facts.streaming}
    tried = {spec(name)["name"] for name in (*PLANNED, *CALLED)}
    assert streaming <= tried
