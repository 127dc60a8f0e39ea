"""Test that what claims to depend on distances alone does: all positions moved by the same number change nothing."""

from __future__ import annotations

import pytest
import torch

from cases import CASES, DIM
from tokenmix import build_mixer
from tokenmix.positions.rotary import scaled_frequencies
from tokenmix.reference.attention import attention as reference
from tokenmix.reference.rotary import rotary
from tokenmix.testing import perturb

T, SHIFT = 9, 1000
TURNS = {
    "none": None,
    "rotary": {"name": "rotary", "base": 100.0},
    "partial": {"name": "rotary", "rotary_dim": 2, "layout": "interleaved"},
    "yarn": {"name": "rotary", "scaling": {"name": "yarn", "factor": 4.0, "original_max_len": 4}},
    "xpos": {"name": "xpos", "scale_base": 32.0},
}
BIASES = {
    None: None,
    "alibi": {"name": "alibi", "learned": True},
    "t5": {"name": "t5", "buckets": 8, "max_distance": 6},
    "kerple": {"name": "kerple"},
    "sandwich": {"name": "sandwich"},
    "shaw": {"name": "shaw", "max_distance": 3, "init_std": 1.0},
    "cope": {"name": "cope", "longest": 4},
    "cape": {"name": "cape", "of": {"name": "t5"}, "hidden": 5},
}
BY_DISTANCE, BY_CONTENT = ("alibi", "t5", "kerple", "sandwich"), ("shaw", "cope", "cape")
OTHERS = (
    "aft_full-alibi",
    "aft_local-t5",
    "aft_local-kerple",
    "aft_conv-kerple",
    "local-alibi",
    "local-pool-t5",
    "strided-alibi",
    "transformer_xl-memory",
)


def build(name: str, **options):
    torch.manual_seed(0)
    return perturb(build_mixer(name, DIM, **options), seed=0).double()


def tokens() -> torch.Tensor:
    return torch.randn(2, T, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def off_after_a_shift(mixer) -> float:
    """The largest change of any output when all positions move, in the forward pass and, where there are, in streams
    from the first token on."""
    x, at = tokens(), torch.arange(T)[None].expand(2, -1)
    want = mixer(x, positions=at)
    worst = float((mixer(x, positions=at + SHIFT) - want).detach().abs().max())
    if mixer.capabilities.streaming and mixer.causal:
        state, parts = mixer.init_state(2), []
        for part, where in zip(x.split(4, 1), (at + SHIFT).split(4, 1), strict=True):
            y, state = mixer.extend(part, state, positions=where)
            parts.append(y)
        worst = max(worst, float((torch.cat(parts, 1) - want).detach().abs().max()))
    return worst


def attention_forms() -> list:
    """Every way to turn queries and keys beside every bias of distances, both ways where there are both."""
    forms = [(turn, bias, causal) for turn in TURNS for bias in (None, *BY_DISTANCE, *BY_CONTENT) for causal in (1, 0)]
    return [(t, b, bool(c)) for t, b, c in forms if c or t != "xpos" and b != "cope"]


@pytest.mark.parametrize(("turn", "bias", "causal"), attention_forms())
def test_attention_depends_on_distances(turn, bias, causal):
    options = {"heads": 2, "kv_heads": 1, "qk_norm": "rms", "scale": 0.7}
    mixer = build("attention", causal=causal, positions=TURNS[turn], bias=BIASES[bias], **options)
    assert off_after_a_shift(mixer) < 1e-9


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("causal", [True, False])
def test_other_mixers_with_such_biases_do_too(case, causal):
    name, options = CASES[case]
    assert off_after_a_shift(build(name, causal=causal, **options)) < 1e-9


def test_what_depends_on_places_is_told_apart():
    fire = build("attention", causal=True, heads=2, bias={"name": "fire", "hidden": 3, "threshold": 4.0})
    assert off_after_a_shift(fire) > 1e-3


@pytest.mark.parametrize("turn", ["none", "rotary", "yarn"])
@pytest.mark.parametrize("bias", BY_CONTENT)
@pytest.mark.parametrize("qk_norm", [None, "layer"])
def test_is_the_equation_on_queries_and_keys_before_rotation(turn, bias, qk_norm):
    mixer = build("attention", causal=True, heads=2, positions=TURNS[turn], bias=BIASES[bias], qk_norm=qk_norm)
    x, at, mask = tokens(), torch.arange(T)[None], torch.ones(T, T, dtype=torch.bool).tril()
    q, k, v = mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)
    if qk_norm:
        q, k = (norm(a.unflatten(-1, (2, -1))).flatten(-2) for norm, a in ((mixer.q_norm, q), (mixer.k_norm, k)))
    heads = (a.unflatten(-1, (2, -1)).transpose(1, 2) for a in (q / (DIM // 2) ** 0.5, k))
    w = mixer.bias(*heads, at, at, mask[None])
    if turn != "none":
        thetas, gain = scaled_frequencies(mixer.positions.rotary_dim, mixer.positions.base, mixer.positions.scaling)
        q, k = (rotary(a, at, heads=2, thetas=thetas, gain=gain) for a in (q, k))
    want = mixer.out_proj(reference(q, k, v, w, heads=2, mask=mask[None]))
    torch.testing.assert_close(mixer(x), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bias", [b for b in BY_CONTENT if b != "cope"])
def test_a_context_in_the_state_is_read_alike(bias):
    mixer = build("attention", heads=2, positions=TURNS["rotary"], bias=BIASES[bias])
    x, context = tokens(), tokens()[:, :5] + 1
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, :2] = False
    state, parts = mixer.init_state(2, context=context, context_mask=mask), []
    for part in x.split(4, 1):
        y, state = mixer.extend(part, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), mixer(x, context, key_mask=mask), rtol=1e-9, atol=1e-9)
