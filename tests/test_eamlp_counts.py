"""Test EAMLP, External attention in the T2T-ViT shell.

Parameters to the digit, the token stages in torch's own words, sizes, other mixers.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from ledger import printed
from tokenmix import MixerError
from tokenmix.models import EAMLP, EAMLPConfig, build_model
from tokenmix.models.eamlp import sinusoids

OFFICIAL_COUNTS = printed("external", "EAMLP, official code")
TABLE = {  # the entries of the table of fixed positions, which the official code counts as parameters
    "eamlp_7": 50_432,
    "eamlp_10": 50_432,
    "eamlp_12": 50_432,
    "eamlp_14": 75_648,
    "eamlp_19": 88_256,
    "eamlp_24": 100_864,
}
EXTERNAL = {"name": "external_multihead", "heads": 2}


def make(mixers=(EXTERNAL,), **options) -> EAMLP:
    given = {"dim": 16, "layers": 2, "image_size": (32, 48), "classes": 3, **options}
    model = build_model(EAMLPConfig(mixers=mixers, **given)).eval()
    for parameter in model.parameters():  # zeros and tiny values would hide what is wrong
        torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.mark.parametrize("name", TABLE)
def test_parameters(name):
    """The official code holds the table as a parameter without gradient; here it is a buffer."""
    with torch.device("meta"):
        model = build_model(name)
    fixed = sum(b.numel() for b in model.buffers())
    assert fixed == TABLE[name]
    assert f"{sum(p.numel() for p in model.parameters()) + fixed:,}" == OFFICIAL_COUNTS[name]


def normalised(logits):
    """The double norm as the official file writes it."""
    weights = logits.softmax(1)
    return weights / (1e-9 + weights.sum(2, keepdim=True))


def token_stage(stage, x, kernel, stride, padding):
    """One tokens-to-token stage in torch's own words."""
    grid = x.shape[2] // stride, x.shape[3] // stride
    x = stage.project(stage.norm(F.unfold(x, kernel, stride=stride, padding=padding).mT))
    memory = stage.block.memory
    read = F.linear(normalised(x @ memory.memory_k.mT), memory.memory_v.mT, memory.memory_v_bias)
    x = x + memory.out_proj(read)
    x = x + stage.block.mlp.down(F.gelu(stage.block.mlp.up(stage.block.mlp_norm(x))))
    return x.mT.reshape(x.shape[0], -1, *grid)


def eamlp_layer(block, x):
    """A layer of EAMLP in torch's own words: widen, split into 4 times the heads, read the shared memories, narrow."""
    mixer, y = block.mixer, block.mixer_norm(x)
    heads = mixer.q_proj(y).unflatten(-1, (8, -1))
    reads = [
        F.linear(
            normalised(F.linear(heads[:, :, h], mixer.memory_k, mixer.memory_k_bias)),
            mixer.memory_v.mT,
            mixer.memory_v_bias,
        )
        for h in range(8)
    ]
    x = x + mixer.out_proj(torch.cat(reads, -1))
    return x + block.mlp.down(F.gelu(block.mlp.up(block.mlp_norm(x))))


def test_it_is_eamlp():
    model, images = make().double(), torch.randn(2, 3, 32, 48, dtype=torch.float64)
    x = token_stage(model.token_stages[0], images, 7, 4, 2)
    x = token_stage(model.token_stages[1], x, 3, 2, 1)
    x = model.project(F.unfold(x, 3, stride=2, padding=1).mT)
    x = torch.cat([model.class_token.expand(2, 1, -1), x], 1) + model.positions
    for block in model.blocks:
        x = eamlp_layer(block, x)
    assert torch.allclose(model(images), model.head(model.norm(x)[:, 0]), atol=1e-9)


def test_the_table_is_that_of_vaswani_and_not_trained():
    table = sinusoids(7, 6)
    for t, i in ((0, 0), (3, 1), (6, 2)):
        angle = t / 10000 ** (2 * i / 6)
        assert table[t, 2 * i : 2 * i + 2].tolist() == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-6)
    model = make()
    assert torch.equal(model.positions, sinusoids(1 + 2 * 3, 16))
    assert "positions" in model.state_dict()
    assert "positions" not in dict(model.named_parameters())


def test_memories_start_equal_and_are_two():
    memory = build_model(make().config).token_stages[0].block.memory
    assert torch.equal(memory.memory_k, memory.memory_v)
    assert memory.memory_k is not memory.memory_v
    assert float(memory.memory_k.detach().abs().max()) > 0


@pytest.mark.parametrize(
    "token_mixer",
    [None, {"name": "attention", "heads": 1}, {"name": "aft_conv", "heads": 2, "kernel_size": 3}],
    ids=str,
)
@pytest.mark.parametrize(
    "mixer", [EXTERNAL, {"name": "attention", "heads": 2}, {"name": "aft_full", "rank": 2}], ids=lambda s: s["name"]
)
def test_other_mixers_and_every_parameter_learns(mixer, token_mixer):
    model = make((mixer,), token_mixer=token_mixer).train()
    tokens = model.forward_features(torch.randn(2, 3, 32, 48))
    (model.forward_head(tokens).square().sum() + tokens.square().sum()).backward()
    idle = [
        n
        for n, p in model.named_parameters()
        if p.grad is None or not bool(p.grad.isfinite().all()) or float(p.grad.abs().max()) < 1e-9
    ]
    assert not [n for n in idle if not n.endswith(("k_proj.bias", "memory_k_bias"))], (
        idle
    )  # a softmax over tokens cancels these biases


def test_another_size_is_refused_until_resized():
    mixers = (EXTERNAL, {"name": "aft_full", "rank": 2})
    model, images = make(mixers), torch.randn(1, 3, 60, 48)
    before = model.positions.clone()
    with pytest.raises(
        MixerError,
        match=r"EAMLP: fixed positions and AFTFull belong to images of 32 x 48, got 60 x 48.*resize\(\[64, 48\]\)",
    ):
        model(images)
    assert model.resize((64, 48))(images).shape == (1, 3)
    assert model.positions.shape == (13, 16)
    assert torch.equal(model.positions[0], before[0])
    assert make(mixers)(torch.randn(1, 3, 17, 33)).shape == (1, 3)  # filled to 32 x 48
    bound = make(token_mixer={"name": "synthesizer_random", "heads": 2})
    with pytest.raises(MixerError, match="cannot be resized"):
        bound.resize((64, 48))
    assert bound(torch.randn(1, 3, 32, 48)).shape == (1, 3)


def test_json_meta_and_compile():
    model, images = make(), torch.randn(1, 3, 32, 48)
    assert EAMLPConfig.from_json(model.config.to_json()) == model.config
    torch.manual_seed(3)
    direct = build_model(model.config)
    with torch.device("meta"):
        later = build_model(model.config)
    later.to_empty(device="cpu")
    torch.manual_seed(3)
    later.reset_parameters()
    assert all(
        torch.equal(a, b) for a, b in zip(direct.state_dict().values(), later.state_dict().values(), strict=True)
    )
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(images), model(images), atol=1e-5)
    assert bool(model.bfloat16()(images.bfloat16()).isfinite().all())
    assert make(classes=0)(images).shape == (1, 16)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dim": 15}, "dim must be even"),
        ({"image_size": (40, 48)}, r"image_size=\[40, 48\] must be multiples of 16"),
        ({"mixers": ()}, "mixers must hold 1 to layers=2 specs, got 0"),
        ({"drop_path": 1.0}, "drop_path"),
    ],
)
def test_wrong_configs_are_refused(options, says):
    with pytest.raises(MixerError, match=says):
        make(**options)


def test_wrong_images_are_refused():
    for images, says in (
        (torch.zeros(1, 1, 32, 48), r"EAMLP: expects images \(batch, 3"),
        (torch.zeros(1, 3, 32, 48).int(), "floating point"),
    ):
        with pytest.raises(MixerError, match=says):
            make()(images)
