"""MultiheadMixer stands where torch expects nn.MultiheadAttention."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tokenmix import MIXERS, MixerError, build_mixer
from tokenmix.hosts import MultiheadMixer, replace_mixers
from tokenmix.mixers import CORE, mixer_options

DIM, HEADS, T = 8, 2, 7
NEEDS = {
    "max_len": T,
    "heads": HEADS,
    "kernel_size": 3,
    "window": 3,
    "rank": 2,
    "hidden": 3,
    "slots": 5,
    "num_features": 6,
}
CAUSAL = [name for name in CORE if MIXERS[name].facts.causal]
BOTH_WAYS = [name for name in CORE if not MIXERS[name].facts.causal_only]
CONTEXT = [name for name in CORE if MIXERS[name].facts.context]
WEIGHING = [name for name in CORE if MIXERS[name].facts.attn_mask]


def spec(name: str) -> dict:
    """The mixer at test size, with every option that a small model needs."""
    known = mixer_options(MIXERS[name])
    return {"name": name, **{option: value for option, value in NEEDS.items() if option in known}}


def made(name: str, **options) -> MultiheadMixer:
    """One with noise on its parameters, so that none is idle."""
    torch.manual_seed(1)
    host = MultiheadMixer(DIM, HEADS, mixer=spec(name), **options)
    with torch.no_grad():
        for p in host.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return host


def encoder_layer(
    name: str, *, causal: bool = False, batch_first: bool = True, **options
) -> nn.TransformerEncoderLayer:
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 12, dropout=0.0, batch_first=batch_first, **options)
    layer.self_attn = made(name, causal=causal, batch_first=batch_first)
    return layer


def by_hand(encoder: nn.TransformerEncoder, x: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    """What a post-norm encoder computes, with the mixers called directly on (N, T, E)."""
    for layer in encoder.layers:
        x = layer.norm1(x + layer.self_attn.mixer(x, key_mask=keep))
        x = layer.norm2(x + layer.linear2(F.relu(layer.linear1(x))))
    return x


def causal_mask(n: int = T) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(n)


def as_float(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, float("-inf"))


def padding(*lengths: int) -> torch.Tensor:
    return torch.arange(T) >= torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("name", "causal"), [(n, False) for n in BOTH_WAYS] + [(n, True) for n in CAUSAL])
def test_encoder_equals_the_mixer_called_directly(name, causal, batch_first, training):
    encoder = nn.TransformerEncoder(
        encoder_layer(name, causal=causal, batch_first=batch_first), 2, enable_nested_tensor=False
    ).train(training)
    encoder.layers[1].self_attn.mixer.load_state_dict(made(name, causal=causal).mixer.state_dict())
    x, off = torch.randn(3, T, DIM), padding(T, 5, 2)
    with torch.set_grad_enabled(training):  # without gradients torch would pass a softmax self_attn by
        masks = (
            {"mask": causal_mask(), "src_key_padding_mask": as_float(off)} if causal else {"src_key_padding_mask": off}
        )
        y = encoder(x if batch_first else x.transpose(0, 1), **masks)
        y = y if batch_first else y.transpose(0, 1)
        want = by_hand(encoder, x, ~off)
        assert float((want - by_hand(encoder, x, None)).detach().abs().max()) > 1e-4, "the padding counts"
    torch.testing.assert_close(y[~off], want[~off], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["attention", "hydra", "aft_full"])
@pytest.mark.parametrize("built_with", [True, False])
def test_an_encoder_in_eval_mode_never_passes_the_mixer_by(name, built_with):
    """Check that torch's shortcuts never run, with the mixers put in before or after.

    They would read softmax weights, or hand out nested tensors.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if built_with:
            encoder = nn.TransformerEncoder(encoder_layer(name), 2)
        else:
            encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, HEADS, 12, batch_first=True), 2)
            for layer in encoder.layers:
                layer.self_attn = made(name, batch_first=True)
        encoder.eval()
        x, off = torch.randn(3, T, DIM), padding(T, 5, 2)
        with torch.no_grad():
            y, want = encoder(x, src_key_padding_mask=off), by_hand(encoder, x, ~off)
            torch.testing.assert_close(encoder(x), by_hand(encoder, x, None), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y[~off], want[~off], rtol=1e-5, atol=1e-6)


def pair(batch_first: bool = True, bias: bool = True) -> tuple[nn.MultiheadAttention, MultiheadMixer]:
    theirs = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first, bias=bias)
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.5)
    return theirs, MultiheadMixer.from_torch(theirs)


MASKS = {
    "none": {},
    "padding": {"key_padding_mask": padding(T, 5, 2)},
    "float padding": {"key_padding_mask": as_float(padding(T, 5, 2))},
    "causal": {"attn_mask": causal_mask()},
    "causal and padding": {
        "attn_mask": causal_mask() == float("-inf"),
        "key_padding_mask": padding(T, 5, 2),
        "is_causal": True,
    },
    "band": {"attn_mask": (torch.arange(T) - torch.arange(T)[:, None]).abs() > 2},
    "rows": {
        "attn_mask": (torch.arange(T) - torch.arange(T)[:, None]).abs()
        > torch.tensor([1, 1, 3, 3, 5, 5])[:, None, None]
    },
}


@pytest.mark.parametrize("masks", MASKS, ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
def test_softmax_attention_is_torchs_output_and_weights_alike(masks, batch_first):
    theirs, ours = pair(batch_first)
    x, given = torch.randn(3, T, DIM), MASKS[masks]
    x = x if batch_first else x.transpose(0, 1)
    for average in (True, False):
        (y, w), (want, weights) = (m(x, x, x, **given, average_attn_weights=average) for m in (ours, theirs))
        torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(w, weights, rtol=1e-6, atol=1e-6)
    assert ours(x, x, x, need_weights=False, **given)[1] is None


def test_built_causal_softmax_attention_is_torchs_with_the_mask():
    theirs, _ = pair()
    ours, x, off = MultiheadMixer.from_torch(theirs, causal=True), torch.randn(3, T, DIM), padding(T, 5, 2)
    want = theirs(x, x, x, key_padding_mask=off, attn_mask=causal_mask() < 0)
    for given in (
        {},
        {"is_causal": True},
        {"attn_mask": causal_mask()},
        {"attn_mask": causal_mask() < 0, "is_causal": True},
    ):
        for one, other in zip(ours(x, x, x, key_padding_mask=off, **given), want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_softmax_attention_over_a_context_and_unbatched(bias):
    theirs, ours = pair(bias=bias)
    x, memory, off = torch.randn(3, T, DIM), torch.randn(3, 5, DIM), torch.arange(5) >= torch.tensor([[5], [3], [1]])
    for y, want in zip(ours(x, memory, memory, off), theirs(x, memory, memory, off), strict=True):
        torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-6)
    mask = torch.rand(T, 5) < 0.5
    mask[:, 0] = False
    for given in ({}, {"attn_mask": mask}, {"key_padding_mask": off[1]}, {"attn_mask": mask.expand(HEADS, T, 5)}):
        one = memory[0]
        for y, want in zip(ours(x[0], one, one, **given), theirs(x[0], one, one, **given), strict=True):
            torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-6)


def test_weights_of_softmax_attention_have_gradients():
    theirs, ours = pair()
    x = torch.randn(2, T, DIM)
    for m in (theirs, ours):
        m(x, x, x)[1].square().sum().backward()
    grads = [m.grad for m in (ours.mixer.q_proj.weight, ours.mixer.k_proj.weight)]
    torch.testing.assert_close(torch.cat(grads), theirs.in_proj_weight.grad[: 2 * DIM], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["aft_full", "aft_simple", "hydra", "linear", "local", "synthesizer_random"])
def test_other_mixers_give_exact_weights_when_asked(name):
    """The values put through the weights, head by head or channel by channel, are the output before its projection."""
    host = made(name, batch_first=True).double()
    x, off = torch.randn(3, T, DIM, dtype=torch.float64), padding(T, 5, 2)
    assert host(x, x, x, off)[1] is None
    y, mean = host(x, x, x, off, need_weights=True)
    assert mean.shape == (3, T, T)
    groups = torch.stack([host._row_weights(x, None, ~off, None, i) for i in range(3)])
    torch.testing.assert_close(groups.mean(1), mean)
    values = host.mixer.v_proj(x).unflatten(-1, (groups.shape[1], -1))
    mixed = torch.einsum("bgts,bsge->btge", groups, values).flatten(2)
    torch.testing.assert_close(host.mixer.out_proj(mixed)[~off], y[~off])


def test_weights_per_head_or_a_clear_refusal():
    x = torch.randn(2, T, DIM)
    host = made("linear", batch_first=True)
    assert host(x, x, x, need_weights=True, average_attn_weights=False)[1].shape == (2, HEADS, T, T)
    with pytest.raises(MixerError, match="AFTSimple has 8 maps.*average_attn_weights=True"):
        made("aft_simple", batch_first=True)(x, x, x, need_weights=True, average_attn_weights=False)
    with pytest.raises(MixerError, match="External is not a sum over values.*need_weights=False"):
        made("external", batch_first=True)(x, x, x, need_weights=True)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", CONTEXT)
def test_decoder_layer(name, training):
    """Causal self-mixing, then mixing over the padded memory: both equal the mixers called directly."""
    own = name if name in CAUSAL else "attention"
    layer = nn.TransformerDecoderLayer(DIM, HEADS, 12, dropout=0.0, batch_first=True)
    layer.self_attn, layer.multihead_attn = made(own, causal=True, batch_first=True), made(name, batch_first=True)
    decoder = nn.TransformerDecoder(layer, 2).train(training)
    x, memory, off = torch.randn(3, T, DIM), torch.randn(3, 5, DIM), torch.arange(5) >= torch.tensor([[5], [3], [1]])
    y = decoder(x, memory, tgt_mask=causal_mask(), memory_key_padding_mask=off)
    for one in decoder.layers:
        x = one.norm1(x + one.self_attn.mixer(x))
        x = one.norm2(x + one.multihead_attn.mixer(x, memory, key_mask=~off))
        x = one.norm3(x + one.linear2(F.relu(one.linear1(x))))
    torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-6)


def test_a_whole_transformer_trains():
    encoder = nn.TransformerEncoder(encoder_layer("hydra"), 1)
    decoder_layer = nn.TransformerDecoderLayer(DIM, HEADS, 12, batch_first=True)
    decoder_layer.self_attn, decoder_layer.multihead_attn = (
        made("aft_local", causal=True, batch_first=True),
        made("aft_simple", batch_first=True),
    )
    model = nn.Transformer(
        DIM, HEADS, custom_encoder=encoder, custom_decoder=nn.TransformerDecoder(decoder_layer, 1), batch_first=True
    )
    source, target = torch.randn(2, 5, DIM), torch.randn(2, T, DIM)
    model(source, target, tgt_mask=causal_mask(), tgt_is_causal=True).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_future_does_not_reach_the_past_of_a_causal_encoder():
    encoder = nn.TransformerEncoder(
        encoder_layer("hydra", causal=True, norm_first=True), 2, enable_nested_tensor=False
    ).eval()
    x = torch.randn(2, T, DIM)
    changed = torch.cat([x[:, :4], torch.randn(2, T - 4, DIM)], 1)
    with torch.no_grad():
        torch.testing.assert_close(
            encoder(x, mask=causal_mask())[:, :4], encoder(changed, mask=causal_mask(), is_causal=True)[:, :4]
        )


def test_torchs_weights_are_loaded_where_softmax_attention_is_inside():
    """Load torch's weights by load_state_dict, alone and in a model.

    The file's own dict stays as it is, and other mixers do not take them.
    """
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=True), 2).eval()
    ours, x, state = copy.deepcopy(theirs), torch.randn(2, 5, DIM), theirs.state_dict()
    for layer in ours.layers:
        layer.self_attn = MultiheadMixer(DIM, HEADS, batch_first=True)
    before = list(state)
    ours.load_state_dict(state)
    torch.testing.assert_close(ours(x), theirs(x))
    assert list(state) == before
    ours.load_state_dict(ours.state_dict())
    attention = nn.MultiheadAttention(DIM, HEADS)
    for mixer in (
        MultiheadMixer(DIM, HEADS, mixer="hydra"),
        MultiheadMixer(DIM + HEADS, HEADS),
        MultiheadMixer(DIM, HEADS, bias=False),
    ):
        with pytest.raises(RuntimeError, match=r"q_proj.weight|k_proj.bias"):
            mixer.load_state_dict(attention.state_dict())


def test_views_of_one_tensor_are_one_tensor():
    """Alike and of one base, with gradients or without; not the same memory behind a detach, nor another part of it."""
    mixer, x = MultiheadMixer(DIM, HEADS, batch_first=True), torch.randn(5, 2, DIM, requires_grad=True)
    other = MultiheadMixer(DIM, HEADS, mixer="fourier", batch_first=True)
    y = x.transpose(0, 1)
    torch.testing.assert_close(mixer(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))[0], mixer(y, y, y)[0])
    assert torch.equal(other(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))[0], other(y, y, y)[0])
    with torch.inference_mode():
        z = torch.randn(2, 5, DIM)
        assert torch.equal(mixer(z, z[:], z[:])[0], mixer(z, z, z)[0])
    for key, value in ((y, y.detach()), (x[:4].transpose(0, 1), x[1:].transpose(0, 1)), (y, y.clone())):
        with pytest.raises(MixerError, match="takes one tensor as key and value, got two"):
            mixer(y, key, value)


def test_a_trace_is_right_at_other_lengths():
    """Of softmax attention as it is; and tensors that come apart in a program are not taken for one."""

    class OfOne(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer = MultiheadMixer(DIM, HEADS, batch_first=True).eval()

        def forward(self, x):
            return self.mixer(x, x, x, need_weights=False)[0]

    model, x, longer = OfOne(), torch.randn(2, 5, DIM), torch.randn(3, 9, DIM)
    torch.testing.assert_close(torch.jit.trace(model, (x,))(longer), model(longer))
    with pytest.raises(MixerError, match="trace a module that gives it one"):
        torch.jit.trace(model.mixer, (x, x, x))


def test_weights_are_drawn_again_under_torchs_name():
    mixer = MultiheadMixer(DIM, HEADS)
    before = mixer.mixer.q_proj.weight.clone()
    mixer._reset_parameters()
    assert not torch.equal(mixer.mixer.q_proj.weight, before)


def test_copies_files_devices_and_dtypes(tmp_path):
    host = made("aft_full", batch_first=True)
    other = MultiheadMixer(DIM, HEADS, mixer=spec("aft_full"), batch_first=True)
    torch.save(host.state_dict(), tmp_path / "host.pt")
    other.load_state_dict(torch.load(tmp_path / "host.pt"))
    x = torch.randn(2, T, DIM)
    for same in (other, copy.deepcopy(host)):
        torch.testing.assert_close(same(x, x, x)[0], host(x, x, x)[0], rtol=0, atol=0)
    assert {p.device.type for p in MultiheadMixer(DIM, HEADS, device="meta").parameters()} == {"meta"}
    half = MultiheadMixer(DIM, HEADS, dtype=torch.bfloat16, bias=False)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert all(linear.bias is None for linear in half.modules() if isinstance(linear, nn.Linear))
    assert half(*[x.bfloat16()] * 3)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["attention", "hydra", "aft_full"])
def test_compiled_whole(name):
    encoder = nn.TransformerEncoder(encoder_layer(name, causal=True), 2, enable_nested_tensor=False).eval()
    x, off = torch.randn(3, T, DIM), padding(T, 5, 2)
    compiled = torch.compile(encoder, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        want = encoder(x, mask=causal_mask(), src_key_padding_mask=as_float(off), is_causal=True)
        y = compiled(x, mask=causal_mask(), src_key_padding_mask=as_float(off), is_causal=True)
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-6)
        with pytest.raises(RuntimeError, match="numbers other than 0 and -inf"):
            compiled(x, mask=causal_mask(), src_key_padding_mask=as_float(off) + 0.5, is_causal=True)


REFUSED = {
    "dropout": ({"dropout": 0.1}, "dropout=0.1 would drop attention weights"),
    "bias_kv": ({"add_bias_kv": True}, "add_bias_kv"),
    "kdim": ({"kdim": 4}, "kdim=4"),
    "heads": ({"num_heads": 3}, "num_heads=3 must divide embed_dim=8"),
    "unknown": ({"mixer": "hidra"}, "no mixer is called 'hidra'; nearest: hydra"),
    "causal spec": ({"mixer": {"name": "hydra", "causal": True}}, "leave 'causal' out of the spec"),
    "no spec": ({"mixer": ["hydra"]}, "must be a name or a spec"),
    "option": ({"mixer": "aft_full"}, "aft_full needs the option 'max_len'"),
    "no causal form": ({"mixer": "fourier", "causal": True}, "has no causal form"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_refused(case):
    options, why = REFUSED[case]
    with pytest.raises(MixerError, match=why):
        MultiheadMixer(**{"embed_dim": DIM, "num_heads": HEADS, **options})


X = torch.randn(2, T, DIM)
CALLS = {
    "two tensors": ("attention", {}, (X, X, X.clone()), {}, "one tensor as key and value"),
    "nested": (
        "attention",
        {},
        (torch.nested.nested_tensor([X[0], X[1, :3]]),) * 3,
        {},
        "no nested tensors.*enable_nested_tensor=False",
    ),
    "bias": ("attention", {}, (X, X, X), {"attn_mask": torch.full((T, T), 0.5)}, "a bias on the logits is not a mask"),
    "numbers": (
        "attention",
        {},
        (X, X, X),
        {"key_padding_mask": torch.zeros(2, T, dtype=torch.long)},
        "True = not attended.*int64",
    ),
    "shape": (
        "attention",
        {},
        (X, X, X),
        {"key_padding_mask": torch.zeros(2, 3, dtype=torch.bool)},
        r"shape \(2, 7\), got \(2, 3\)",
    ),
    "mask shape": (
        "attention",
        {},
        (X, X, X),
        {"attn_mask": torch.zeros(2, T, T, dtype=torch.bool)},
        r"\(7, 7\) or \(4, 7, 7\), got \(2, 7, 7\)",
    ),
    "heads differ": (
        "attention",
        {},
        (X, X, X),
        {"attn_mask": torch.rand(4, T, T) < 0.5},
        "heads of an attn_mask must agree",
    ),
    "no pairs": (
        "hydra",
        {},
        (X, X, X),
        {"attn_mask": causal_mask()},
        "weighs no pairs.*causal=True.*attention, aft_full",
    ),
    "other mask": (
        "hydra",
        {"causal": True},
        (X, X, X),
        {"attn_mask": torch.eye(T) == 0},
        "takes the causal attn_mask only",
    ),
    "hint": ("hydra", {}, (X, X, X), {"is_causal": True}, "needs a mixer built with causal=True"),
    "context": ("hydra", {"causal": True}, (X, X.clone(), None), {}, "context has no order"),
    "axes": ("attention", {}, (X[None],) * 3, {}, "expects query and key of 3 axes"),
    "width": ("attention", {}, (X[..., :4],) * 3, {}, "shape \\(batch, time, 8\\)"),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_refused(case):
    name, options, (query, key, value), given, why = CALLS[case]
    with pytest.raises(MixerError, match=why) as caught:
        made(name, batch_first=True, **options)(query, key, key if value is None else value, **given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "theirs",
    [nn.Linear(2, 2), nn.MultiheadAttention(DIM, HEADS, kdim=4), nn.MultiheadAttention(DIM, HEADS, add_bias_kv=True)],
    ids=str,
)
def test_from_torch_refuses_other_things(theirs):
    with pytest.raises(MixerError, match="from_torch takes"):
        MultiheadMixer.from_torch(theirs)


def test_a_mask_of_nothing_is_taken_by_every_mixer():
    host = made("hydra", batch_first=True)
    torch.testing.assert_close(host(X, X, X, attn_mask=torch.zeros(T, T))[0], host(X, X, X)[0])


@pytest.mark.parametrize("name", WEIGHING)
def test_causal_mixers_that_weigh_pairs_take_further_masks(name):
    host, band = made(name, causal=True, batch_first=True), (torch.arange(T) - torch.arange(T)[:, None]).abs() > 2
    torch.testing.assert_close(host(X, X, X, attn_mask=band)[0], host.mixer(X, attn_mask=~band))
    torch.testing.assert_close(host(X, X, X, attn_mask=causal_mask())[0], host.mixer(X))


def test_the_mixer_may_be_one_of_the_table():
    assert type(MultiheadMixer(DIM, HEADS, mixer="linear").mixer) is type(build_mixer("linear", DIM, heads=HEADS))
    assert MultiheadMixer(DIM, HEADS, mixer="linear").mixer.heads == HEADS


@pytest.mark.parametrize("given", [{}, {"bias": False}, {"batch_first": True}])
def test_attributes_are_those_of_multihead_attention(given):
    """Each is there, None where torch's is, and the same number or switch."""
    theirs = nn.MultiheadAttention(8, 2, **given)
    for ours in (MultiheadMixer(8, 2, **given), MultiheadMixer.from_torch(theirs)):
        for name in (n for n in dir(theirs) if not n.startswith("__")):
            wanted, got = getattr(theirs, name), getattr(ours, name)
            assert (got is None) == (wanted is None), name
            assert not isinstance(wanted, (bool, int, float)) or got == wanted, name


def test_scripting_is_refused_in_one_line():
    layer = nn.TransformerEncoderLayer(8, 2)
    layer.self_attn = MultiheadMixer(8, 2)
    for module in (MultiheadMixer(8, 2), layer, build_mixer("hydra", 8)):
        with pytest.raises(MixerError, match="cannot be scripted.*torch.jit.trace and torch.export take it") as told:
            torch.jit.script(module)
        assert "\n" not in str(told.value)


def test_a_mixer_without_projections_has_the_bias_it_was_asked_for():
    assert MultiheadMixer(8, 2, bias=False, mixer="fourier").in_proj_bias is None
    assert MultiheadMixer(8, 2, mixer="fourier").in_proj_bias is not None


def test_an_encoder_with_some_mixers_takes_padding_in_evaluation():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3).eval()
    padding = torch.arange(6) >= torch.tensor([[6], [4]])
    x = torch.randn(2, 6, 16)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        mixed = replace_mixers(encoder, {"layers.*": "attention"}, last=2)[0]
        assert encoder.use_nested_tensor
        assert torch.allclose(
            mixed(x, src_key_padding_mask=padding)[~padding],
            encoder(x, src_key_padding_mask=padding)[~padding],
            atol=1e-5,
        )


def test_code_that_reads_the_joint_weights_is_told_where_the_projections_are():
    """As initialisers of models do, and code that calls torch's function itself."""
    layer = MultiheadMixer(DIM, HEADS, mixer="hydra")
    where = "MultiheadMixer: .*joint weights, which a mixer has not; its projections are parameters of .mixer"
    for read, error in (
        (lambda: F.linear(torch.ones(1, DIM), layer.in_proj_weight, layer.in_proj_bias), MixerError),
        (lambda: nn.init.xavier_uniform_(layer.in_proj_weight), AttributeError),
        (lambda: layer.in_proj_bias.half(), AttributeError),
    ):
        with pytest.raises(error, match=where):
            read()
