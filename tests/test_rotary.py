"""Test rotary positions.

The paper's equation, transformers' Llama, relative positions, contexts longer than trained, options that make no sense.
"""

from __future__ import annotations

import pytest
import torch

from tokenmix import MixerError, build_mixer, reference
from tokenmix.hosts.rotary import rotary_spec
from tokenmix.models import LM, LMConfig
from tokenmix.positions import RotaryPositions
from tokenmix.positions.rotary import rescale_rotary, scaled_frequencies

YARN = {"name": "yarn", "factor": 4.0, "original_max_len": 16}
RULES = [
    None,
    {"name": "linear", "factor": 4.0},
    {"name": "ntk", "factor": 4.0},
    YARN,
    {"name": "llama3", "factor": 8.0, "original_max_len": 64},
]
E = 8


def rows(length: int, heads: int = 1, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(2, length, heads * E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [None, 4])
@pytest.mark.parametrize("scaling", RULES, ids=lambda rule: rule and rule["name"])
def test_equals_the_reference(layout, rotary_dim, scaling):
    rotary = RotaryPositions(E, base=100.0, rotary_dim=rotary_dim, layout=layout, scaling=scaling)
    thetas, gain = scaled_frequencies(rotary_dim or E, 100.0, scaling)
    at = torch.stack([torch.arange(9), 3 * torch.arange(9) - 5])
    for x, y in zip((rows(9, 3), rows(9, 2)), rotary(at, rows(9, 3), rows(9, 2)), strict=True):
        want = reference.rotary(x, at, heads=x.shape[-1] // E, thetas=thetas, layout=layout, gain=gain)
        assert torch.allclose(y, want, rtol=0, atol=1e-13)


def test_frequencies_are_the_papers():
    """RoFormer, Sec. 3.2.2: theta_i = 10000^(-2 (i - 1) / d), i = 1 .. d / 2."""
    assert scaled_frequencies(8, 10000.0)[0] == pytest.approx([1, 0.1, 0.01, 0.001])
    assert scaled_frequencies(8, 10000.0, {"name": "linear", "factor": 4})[0] == pytest.approx(
        [0.25, 0.025, 0.0025, 0.00025]
    )
    ntk, _ = scaled_frequencies(8, 10000.0, {"name": "ntk", "factor": 4})
    assert ntk[0] == 1, "the fastest pair is left as it is"
    assert ntk[-1] == pytest.approx(0.001 / 4), "the slowest one is stretched by the whole factor"
    yarn, gain = scaled_frequencies(8, 10000.0, YARN)
    assert gain == pytest.approx(1.1386294361)
    assert (yarn[0], yarn[-1]) == pytest.approx((1, 0.001 / 4))
    llama3, gain = scaled_frequencies(8, 10000.0, {"name": "llama3", "factor": 8, "original_max_len": 64})
    turns = 64 / (
        2 * torch.pi
    )  # of the fastest pair, above 4; the second turns once and a bit, the others less than once
    assert llama3 == pytest.approx(
        [1, 0.1 * ((turns / 10 - 1) / 3 + (1 - (turns / 10 - 1) / 3) / 8), 0.01 / 8, 0.001 / 8]
    )
    assert gain == 1


LLAMA = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "theta": {"rope_type": "default", "rope_theta": 500.0},
    "partial": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-options": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "attention_factor": 1.5,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


@pytest.mark.parametrize("kind", LLAMA)
def test_equals_transformers(kind):
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as llama

    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        rope_parameters=LLAMA[kind],
    )
    at = torch.stack([torch.arange(40), torch.arange(40) + 200])
    q, k = torch.randn(2, 2, 40, 16), torch.randn(2, 1, 40, 16)
    theirs = llama.LlamaRotaryEmbedding(config)
    cos, sin = theirs(q, at)
    d = cos.shape[-1]
    want = [
        torch.cat([turned, x[..., d:]], -1)
        for turned, x in zip(llama.apply_rotary_pos_emb(q[..., :d], k[..., :d], cos, sin), (q, k), strict=True)
    ]
    spec = rotary_spec(config.rope_parameters, head_dim=16, max_len=256)
    mixer = build_mixer("attention", 32, heads=2, kv_heads=1, positions=spec)
    got = mixer.positions(at, *(x.transpose(1, 2).flatten(2) for x in (q, k)))
    ours = torch.tensor(scaled_frequencies(d, spec["base"], spec.get("scaling"))[0])
    assert torch.allclose(theirs.inv_freq, ours.float(), rtol=1e-6, atol=0)
    for mine, other in zip(got, want, strict=True):
        near = mine[0], other.transpose(1, 2).flatten(2)[0]
        assert torch.allclose(*near, rtol=0, atol=1e-6 * 40), (
            "their angles are float32: the error grows with the position"
        )
        assert float((near[0][:4] - near[1][:4]).abs().max()) < 1e-6
        assert torch.allclose(mine, other.transpose(1, 2).flatten(2), rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", ["default", "yarn", "llama3"])
def test_equals_a_llama_layer(kind):
    """Compare with a whole attention layer of transformers, with its weights and a padded batch.

    It has grouped keys and heads wider than dim / heads.
    """
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as llama

    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = LlamaConfig(**sizes, max_position_embeddings=256, rope_parameters=LLAMA[kind], attn_implementation="eager")
    theirs = llama.LlamaAttention(config, layer_idx=0)
    positions = rotary_spec(config.rope_parameters, head_dim=16, max_len=256)
    ours = build_mixer(
        "attention",
        24,
        causal=True,
        heads=4,
        kv_heads=2,
        head_dim=16,
        positions=positions,
        qkv_bias=False,
        out_bias=False,
    )
    ours.load_state_dict(
        {name.replace("o_proj", "out_proj"): value for name, value in theirs.state_dict().items()}, strict=True
    )
    x, mask = torch.randn(2, 12, 24), torch.ones(2, 12, dtype=torch.bool)
    mask[1, :5] = False
    at = (mask.cumsum(1) - 1).clamp_min(0)
    pairs = mask[:, None, None, :] & torch.ones(12, 12, dtype=torch.bool).tril()
    blocked = torch.zeros(2, 1, 12, 12).masked_fill(~pairs, torch.finfo(torch.float32).min)
    want, _ = theirs(x, llama.LlamaRotaryEmbedding(config)(x, at), blocked)
    assert torch.allclose(ours(x, key_mask=mask)[mask], want[mask], rtol=0, atol=1e-6)


@pytest.mark.parametrize("scaling", RULES, ids=lambda rule: rule and rule["name"])
def test_logits_depend_on_the_distance_alone(scaling):
    rotary = RotaryPositions(E, scaling=scaling)
    q, k = rows(1), rows(1, seed=1)
    for distance in (0, 1, 7, 1000):
        logits = []
        for t in (0, 3, 4096, 1_000_003):
            (qt,), (ks,) = rotary(torch.full((2, 1), t), q), rotary(torch.full((2, 1), t - distance), k)
            logits.append((qt * ks).sum(-1))
        for other in logits[1:]:
            assert torch.allclose(other, logits[0], rtol=0, atol=1e-8)
    (near,), (far,) = rotary(torch.full((2, 1), 5), k), rotary(torch.full((2, 1), 6), k)
    assert not torch.allclose((q * near).sum(-1), (q * far).sum(-1)), "and it does depend on it"


def test_float32_is_exact_at_far_positions():
    """Angles in float32 would be wrong by 0.03 at a position of a million."""
    at = torch.tensor([[1_000_000, 999_937, 131_071], [3, 2, 1]])
    rotary = RotaryPositions(E)
    (exact,), (single,), (half,) = (
        rotary(at, rows(3, dtype=dtype)) for dtype in (torch.float64, torch.float32, torch.bfloat16)
    )
    assert float((single - exact).abs().max()) < 1e-6
    assert half.dtype == torch.bfloat16
    assert float((half - exact).abs().max()) < 0.03


def test_interpolation_keeps_angles_within_those_trained():
    """Check that a context four times as long meets no new angle.

    With linear interpolation by 4, position 4 n stands where n stood.
    """
    plain, stretched = RotaryPositions(E), RotaryPositions(E, scaling={"name": "linear", "factor": 4})
    at, x = torch.arange(16).expand(2, 16), rows(16)
    assert torch.allclose(stretched(4 * at, x)[0], plain(at, x)[0], atol=1e-12)


def test_heads_wider_than_the_share_of_dim():
    mixer = build_mixer("attention", 12, heads=4, kv_heads=2, head_dim=8, positions={"name": "rotary"})
    assert {n: tuple(p.shape) for n, p in mixer.named_parameters() if n.endswith("weight")} == {
        "q_proj.weight": (32, 12),
        "k_proj.weight": (16, 12),
        "v_proj.weight": (16, 12),
        "out_proj.weight": (12, 32),
    }
    assert mixer(torch.randn(2, 5, 12)).shape == (2, 5, 12)
    assert mixer.max_len is None, "rotary positions have no end"


def test_rotary_model_decodes_beyond_max_len():
    """Check that a language model whose only positions are rotary has no longest sequence.

    Its stream equals the whole, padded or not.
    """
    torch.manual_seed(0)
    spec = {
        "name": "attention",
        "heads": 2,
        "kv_heads": 1,
        "positions": {"name": "rotary", "scaling": {"name": "linear", "factor": 2}},
    }
    model = (
        LM(LMConfig(dim=16, max_len=8, mixers=(spec,), layers=2, vocab=11, positions=None, init_std=0.5))
        .double()
        .eval()
    )
    assert model.max_len is None
    tokens = torch.randint(11, (2, 21))
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[1, :6] = False
    whole, state, parts = model(tokens, key_mask=mask), model.init_state(2), []
    for chunk, live in zip(tokens.split([3, 1, 9, 8], 1), mask.split([3, 1, 9, 8], 1), strict=True):
        y, state = model.extend(chunk, state, key_mask=live)
        parts.append(y)
    assert torch.allclose(torch.cat(parts, 1)[mask], whole[mask], atol=1e-10)
    assert torch.allclose(whole[1, 6:], model(tokens[1:, 6:])[0], atol=1e-10), "left padding moves nothing"


def test_compiled_layers_of_other_rates_are_not_mixed_up():
    mixers = [
        build_mixer("attention", 16, heads=2, positions={"name": "rotary", "base": base}) for base in (10000.0, 50.0)
    ]
    x = torch.randn(2, 7, 16)
    for mixer in mixers:
        assert torch.allclose(torch.compile(mixer, backend="eager", fullgraph=True)(x), mixer(x), atol=1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("positions", "says"),
    [
        ("rotary", r"positions must be .* or None, got 'rotary'"),
        ({"name": "alibi"}, "one of learned, rotary, xpos"),
        ({"name": "rotary", "theta": 1e4}, "the options of 'rotary' are base, rotary_dim, layout, scaling"),
        ({"name": "learned", "base": 1e4}, "the options of 'learned' are init_std"),
        ({"name": "rotary", "base": 1.0}, "base must be a number above 1, got 1.0"),
        ({"name": "rotary", "base": "10000"}, "base must be a number above 1, got '10000'"),
        ({"name": "rotary", "rotary_dim": 3}, r"rotary_dim must be even and in 2..head_dim=8, got 3"),
        ({"name": "rotary", "rotary_dim": 10}, r"rotary_dim must be even and in 2..head_dim=8, got 10"),
        ({"name": "rotary", "layout": "neox"}, "layout='neox' is unknown; choose 'half' or 'interleaved'"),
        ({"name": "rotary", "scaling": "yarn"}, "scaling must be None or"),
        (
            {"name": "rotary", "scaling": {"name": "dynamic", "factor": 2.0}},
            "dynamic NTK changes the angles of keys already stored",
        ),
        (
            {"name": "rotary", "scaling": {"name": "yarn", "factor": 2.0}},
            "'yarn' takes factor, original_max_len, beta_fast .optional.",
        ),
        (
            {"name": "rotary", "scaling": {"name": "linear", "factor": 2.0, "original_max_len": 4}},
            "'linear' takes factor; got factor, original_max_len",
        ),
        ({"name": "rotary", "scaling": {"name": "linear", "factor": 0.5}}, "factor must be a number >= 1"),
        ({"name": "rotary", "scaling": {**YARN, "original_max_len": 0}}, "original_max_len must be an integer >= 1"),
        ({"name": "rotary", "scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 2.0}}, "needs beta_fast > beta_slow"),
        ({"name": "rotary", "scaling": {**YARN, "beta_fast": "x"}}, "beta_fast must be a positive number"),
        ({"name": "rotary", "scaling": {**YARN, "truncate": 1}}, "truncate must be True or False"),
        (
            {"name": "rotary", "scaling": {**RULES[-1], "low_freq_factor": 4.0}},
            "needs high_freq_factor > low_freq_factor",
        ),
        ({"name": "rotary", "rotary_dim": 2, "scaling": {"name": "ntk", "factor": 2.0}}, "'ntk' needs rotary_dim >= 4"),
    ],
)
def test_bad_options(positions, says):
    with pytest.raises(MixerError, match=says) as caught:
        build_mixer("attention", 16, heads=2, positions=positions, max_len=8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"heads": 3}, "heads=3 must divide dim=16, or head_dim must be given"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads=3 must divide heads=4"),
        ({"qk_norm": "rmsnorm"}, "qk_norm must be one of None, 'layer', 'rms', got 'rmsnorm'"),
        ({"qk_norm": "rms", "norm_eps": 0}, "norm_eps must be a positive number, got 0"),
        ({"heads": 4, "kv_heads": 0}, "kv_heads must be an integer >= 1, got 0"),
        ({"heads": 4, "head_dim": 0}, "head_dim must be an integer >= 1, got 0"),
        ({"heads": 4, "head_dim": 3, "positions": {"name": "rotary"}}, r"rotary_dim must be even and in 2..head_dim=3"),
        ({"scale": "1"}, "scale must be a finite number or None, got '1'"),
    ],
)
def test_bad_sizes(options, says):
    with pytest.raises(MixerError, match=says):
        build_mixer("attention", 16, **options)
    if options.get("positions"):
        with pytest.raises(MixerError, match="nothing to resize"):
            build_mixer("attention", 16, positions={"name": "rotary"}).resize(5)


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0},
            "'dynamic' has no counterpart: its angles change as a sequence grows",
        ),
        ({"rope_type": "longrope"}, "'longrope' has no counterpart"),
        ({"rope_type": "spiral"}, "it is unknown here; default, linear, yarn, llama3 have one"),
        ({"rope_type": "yarn"}, "yarn without a factor needs"),
    ],
)
def test_rules_without_counterpart(parameters, says):
    with pytest.raises(MixerError, match=says):
        rotary_spec(parameters, head_dim=8)


def test_yarn_takes_its_factor_from_two_lengths():
    spec = rotary_spec(
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}, head_dim=8, max_len=256
    )
    assert spec["scaling"] == {"name": "yarn", "factor": 4.0, "original_max_len": 64}


@torch.no_grad()
def test_a_model_is_rescaled_within_the_block_alone():
    """A name stands for the rule from the old length to the new one; the model then equals one built with that rule."""
    spec = {"name": "attention", "heads": 2, "positions": {"name": "rotary"}}
    sizes = {"dim": 16, "max_len": 64, "positions": None, "layers": 2}
    torch.manual_seed(0)
    model = LM(LMConfig(**sizes, mixers=(spec,)))
    x = torch.randint(256, (1, 64))
    before = model(x)
    rule = {"name": "yarn", "factor": 4.0, "original_max_len": 16}
    built = LM(LMConfig(**sizes, mixers=({**spec, "positions": {"name": "rotary", "scaling": rule}},)))
    built.load_state_dict(model.state_dict())
    for scaling in ("yarn", rule):
        with rescale_rotary(model, scaling, old=16, new=64) as found:
            assert found == rule
            assert torch.equal(model(x), built(x))
        assert torch.equal(model(x), before)
    assert not torch.equal(built(x), before)


def test_what_cannot_be_rescaled_is_refused():
    plain = LM(LMConfig(dim=16, max_len=8, mixers=({"name": "aft_simple"},)))
    turned = LM(
        LMConfig(dim=16, max_len=8, mixers=({"name": "attention", "heads": 1, "positions": {"name": "rotary"}},))
    )
    for model, scaling, words in (
        (plain, "ntk", "LM has no rotary positions to scale"),
        (turned, "dynamic", "scaling must be one of linear, ntk, yarn, llama3, factors, or the rule as a dict"),
        (turned, {"name": "ntk", "factor": -1}, "factor"),
    ):
        with pytest.raises(MixerError, match=words), rescale_rotary(model, scaling, old=4, new=8):
            pass
    with (
        pytest.raises(MixerError, match="for more tokens than the 4 of training, got 4"),
        rescale_rotary(turned, "ntk", old=4, new=4),
    ):
        pass
