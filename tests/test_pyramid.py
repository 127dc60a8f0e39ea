"""The pyramid of stages: PVT to the digit and to the number, any mixer, any size, maps for dense tasks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cases import BOTH_WAYS, CASES
from ledger import printed
from tokenmix import MixerError
from tokenmix.models import Pyramid, PyramidConfig, build_model, replace_layers

COUNTS = printed("pvt", "Parameters")
EXACT = {name.removesuffix(", exact"): count for name, count in COUNTS.items() if name.endswith(", exact")}
HEADS, RATIOS = (1, 2, 5, 2), (4, 2, 2, 1)
PVT = tuple({"name": "spatial_reduction", "heads": h, "ratio": r} for h, r in zip(HEADS, RATIOS, strict=True))
FREE = {"pool": "mean", "positions": None}
SPECS = {
    "pvt": PVT,
    "attention": ({"name": "attention", "heads": 2},),
    "aft_full": ({"name": "aft_full", "rank": 4},),
    "aft_simple": ({"name": "aft_simple"},),
    "aft_conv": ({"name": "aft_conv", "heads": 2, "kernel_size": 3},),
    "hydra": ({"name": "hydra"},),
    "external": ({"name": "external", "slots": 4},),
    "four": (
        {"name": "aft_conv", "heads": 2, "kernel_size": 3},
        {"name": "hydra"},
        {"name": "aft_full", "rank": 2},
        {"name": "attention", "heads": 2},
    ),
}


def make(mixers=PVT, **options) -> Pyramid:
    given = {
        "depths": (2, 1, 1, 1),
        "dims": (8, 12, 20, 16),
        "mlp_ratios": (2, 2, 1, 1.5),
        "image_size": (64, 32),
        "classes": 3,
        **options,
    }
    model = build_model(PyramidConfig(mixers=mixers, **given)).eval()
    for parameter in model.parameters():  # zeros and tiny values would hide what is wrong
        torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.mark.parametrize("name", EXACT)
def test_parameters_to_the_digit(name):
    with torch.device("meta"):
        assert f"{sum(p.numel() for p in build_model(name).parameters()):,}" == EXACT[name]


def pvt_layer(block, x, grid, heads):
    """A layer of PVT in torch's own words."""
    y, mixer = block.mixer_norm(x), block.mixer
    short = y
    if mixer.conv is not None:
        short = mixer.norm(mixer.conv(y.mT.reshape(*y.mT.shape[:2], *grid)).flatten(2).mT)
    q, k, v = (
        a.unflatten(-1, (heads, -1)).transpose(1, 2)
        for a in (mixer.q_proj(y), mixer.k_proj(short), mixer.v_proj(short))
    )
    x = x + mixer.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    return x + block.mlp.down(F.gelu(block.mlp.up(block.mlp_norm(x))))


def pvt(model, x):
    """PVT as its authors' code runs it: the maps of the stages without class token, and the logits."""
    maps = []
    for stage, heads in zip(model.stages, HEADS, strict=True):
        x = stage.patch(x)
        grid = x.shape[2:]
        x = F.layer_norm(x.flatten(2).mT, x.shape[1:2], stage.patch_norm.weight, stage.patch_norm.bias)
        if stage.class_token is not None:
            x = torch.cat([stage.class_token.expand(x.shape[0], 1, -1), x], 1)
        x = x + stage.positions
        for block in stage.blocks:
            x = pvt_layer(block, x, grid, heads)
        tokens, x = x, x[:, stage.prefix :].mT.unflatten(2, grid)
        maps.append(x)
    tokens = F.layer_norm(tokens, tokens.shape[2:], model.norm.weight, model.norm.bias, 1e-6)
    return maps, model.head(tokens[:, 0] if model.config.pool == "class" else tokens.mean(1))


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_it_is_pvt(pool):
    model, images = make(pool=pool).double(), torch.randn(2, 3, 64, 32, dtype=torch.float64)
    maps, logits = pvt(model, images)
    assert torch.allclose(model(images), logits, atol=1e-9)
    assert [m.shape for m in model.feature_maps(images)] == [(2, 8, 16, 8), (2, 12, 8, 4), (2, 20, 4, 2), (2, 16, 2, 1)]
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(model.feature_maps(images), maps, strict=True))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("options", [{}, FREE], ids=["class", "mean"])
def test_every_mixer_runs_and_every_parameter_learns(name, options):
    model = make(SPECS[name], **options).train()
    images = torch.randn(2, 3, 64, 32)
    tokens = model.forward_features(images)
    (model.forward_head(tokens).square().sum() + tokens.square().sum()).backward()
    idle = [
        n
        for n, p in model.named_parameters()
        if p.grad is None or not bool(p.grad.isfinite().all()) or float(p.grad.abs().max()) == 0
    ]
    # a bias added to all keys changes no softmax
    assert not [n for n in idle if not n.endswith("k_proj.bias")], idle


@pytest.mark.parametrize("case", [c for c in BOTH_WAYS if CASES[c][1].get("ndim") != 3])
def test_every_mixer_stands_in_every_stage(case):
    """With the options of the contract suite; the model fills in how many tokens each stage has, and on which grid."""
    name, options = CASES[case]
    spec = {"name": name, **{k: v for k, v in options.items() if k not in ("max_len", "max_context_len", "grid_size")}}
    pool = "mean" if name == "pooling" else "class"  # pooling has no place for a class token, and says so
    model = make((spec,), dims=(8, 8, 8, 8), depths=(1, 1, 1, 1), pool=pool)
    assert bool(model(torch.randn(2, 3, 64, 32)).isfinite().all())


def test_specs_are_one_for_all_per_stage_or_per_layer():
    one, per_stage = make(SPECS["hydra"]).config.specs(), make(SPECS["four"]).config.specs()
    assert [s["name"] for s in one] == ["hydra"] * 5
    assert [s["name"] for s in per_stage] == ["aft_conv", "aft_conv", "hydra", "aft_full", "attention"]
    per_layer = replace_layers(make(SPECS["four"]).config, {"name": "external", "slots": 4}, last=2)
    model = build_model(per_layer)
    assert [type(b.mixer).__name__ for b in model.blocks] == ["AFTConv", "AFTConv", "Hydra", "External", "External"]
    assert model.stages[2].blocks[0].mixer.dim == 20


def test_grid_options_are_those_of_the_stage():
    model = make(SPECS["aft_full"])
    assert [b.mixer.max_len for b in model.blocks] == [128, 128, 32, 8, 3]  # the last stage holds the class token too
    assert all(b.mixer.ndim == 2 for b in make().blocks)


@pytest.mark.parametrize("size", [(64, 96), (32, 32), (70, 33), (1, 1)])
def test_without_parameters_per_position_any_size_goes(size):
    model, images = make(SPECS["aft_conv"], **FREE), torch.randn(2, 3, *size)
    rows, columns = (-(-n // 32) for n in size)
    assert [m.shape[2:] for m in model.feature_maps(images)] == [(rows * n, columns * n) for n in (8, 4, 2, 1)]
    whole = F.pad(images, (0, -size[1] % 32, 0, -size[0] % 32))
    assert torch.equal(model(images), model(whole))


def test_a_fixed_size_is_refused_until_resized():
    model, images = make(SPECS["four"]), torch.randn(1, 3, 90, 64)
    with pytest.raises(
        MixerError,
        match=r"Pyramid: learned positions and AFTFull belong to images of 64 x 32, got 90 x 64.*resize\(\[96, 64\]\)",
    ):
        model(images)
    with pytest.raises(MixerError, match="learned positions"):  # as many tokens, another shape
        model(torch.randn(1, 3, 32, 64))
    before = [stage.positions.detach().clone() for stage in model.stages]
    model.resize((96, 64))
    assert model(images).shape == (1, 3)
    assert [m.shape[2:] for m in model.feature_maps(images)] == [(24, 16), (12, 8), (6, 4), (3, 2)]
    assert torch.equal(model.stages[3].positions[0], before[3][0])  # the class token's
    grown = F.interpolate(
        before[0].T.view(1, 8, 16, 8), size=(24, 16), mode="bicubic", align_corners=False, antialias=True
    )
    assert torch.allclose(model.stages[0].positions, grown[0].flatten(1).T, atol=1e-6)
    assert model.config.image_size == (96, 64)


def test_a_mixer_that_cannot_be_resized_leaves_the_model_as_it_was():
    specs = (*SPECS["four"][:2], {"name": "aft_full", "rank": 2}, {"name": "synthesizer_random", "heads": 2})
    model, images = make(specs), torch.randn(1, 3, 64, 32)
    before = model(images)
    with pytest.raises(MixerError, match="SynthesizerRandom has parameters per position that cannot be resized"):
        model.resize(64)
    with pytest.raises(MixerError, match=r"image_size=\[48, 48\] must be multiples of 32"):
        model.resize(48)
    assert torch.equal(model(images), before)


def test_drop_path_rises_over_all_stages():
    model = make(drop_path=0.4)
    assert [
        b.dropout[-1].rate if isinstance(b.dropout, torch.nn.Sequential) else 0 for b in model.blocks
    ] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


def test_without_a_head_the_features_come_out():
    assert make(classes=0)(torch.randn(2, 3, 64, 32)).shape == (2, 16)
    assert make(depths=(1, 1), dims=(8, 12), patches=(2, 4), mlp_ratios=(1, 1), mixers=SPECS["hydra"])(
        torch.randn(2, 3, 64, 32)
    ).shape == (2, 3)


def test_a_config_is_json():
    config = make(SPECS["four"], **FREE).config
    assert PyramidConfig.from_json(config.to_json()) == config
    with pytest.raises(MixerError, match="no field 'depth'; nearest: depths"):
        PyramidConfig.from_json({"depth": [1], "mixers": []})


def test_meta_build_equals_direct_build():
    config = make(SPECS["four"]).config
    torch.manual_seed(3)
    direct = build_model(config)
    with torch.device("meta"):
        later = build_model(config)
    later.to_empty(device="cpu")
    torch.manual_seed(3)
    later.reset_parameters()
    assert all(
        torch.equal(a, b) for a, b in zip(direct.state_dict().values(), later.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pool": "max"}, "pool='max'"),
        ({"positions": "sinusoidal"}, "positions='sinusoidal'"),
        ({"image_size": (48, 64)}, r"image_size=\[48, 64\] must be multiples of 32"),
        ({"dims": (8, 16)}, r"depths has 4 stages, but dims has 2: \[8, 16\]"),
        ({"depths": (1, 1, 0, 1)}, "depths must be positive integers"),
        ({"depths": (), "dims": (), "patches": (), "mlp_ratios": ()}, "depths has 0 stages"),
        ({"mixers": SPECS["hydra"] * 3}, "one spec, one for each of 4 stages or one for each of 5 layers, got 3"),
        ({"classes": -1}, "classes must be >= 0"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_wrong_configs_are_refused(options, says):
    with pytest.raises(MixerError, match=says):
        make(**options)


def test_wrong_images_are_refused():
    model = make()
    for images, says in (
        (torch.zeros(2, 1, 64, 32), r"Pyramid: expects images \(batch, 3, height, width\), got \(2, 1, 64, 32\)"),
        (torch.zeros(3, 64, 32), "expects images"),
        (torch.zeros(1, 3, 64, 32, dtype=torch.uint8), "normalised floating point"),
    ):
        with pytest.raises(MixerError, match=says):
            model(images)
    assert model(torch.zeros(0, 3, 64, 32)).shape == (0, 3)


@pytest.mark.parametrize("name", ["pvt", "four"])
def test_channels_last_half_precision_and_compile(name):
    model, images = make(SPECS[name]), torch.randn(2, 3, 64, 32)
    want = model(images)
    assert torch.allclose(model(images.to(memory_format=torch.channels_last)), want, atol=1e-4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(images), want, atol=1e-4)
    assert bool(model.bfloat16()(images.bfloat16()).isfinite().all())
