"""The ViT shell: exact counts, any mixer, any size, registers, dropped tokens."""

from __future__ import annotations

import pytest
import torch

from cases import BOTH_WAYS, CASES
from ledger import printed
from tokenmix import MixerError
from tokenmix.hosts.vit.write import to_hf, to_timm
from tokenmix.models import MODELS, MAEConfig, ViT, ViTConfig, build_model, replace_layers
from tokenmix.models.vit import pad_to_patches
from tokenmix.positions.grid import resize_rows, sincos

COUNTS = {  # the documented convention: no bias on Q, K and V of AFT; DeiT's own counts to the digit
    "deit_tiny": 5_717_416,
    "deit_small": 22_050_664,
    "deit_base": 86_567_656,
    "deit_base_384": 86_859_496,
    "aft_full_tiny": 6_315_688,
    "aft_full_small": 22_642_024,
    "aft_conv_tiny_k11_h32": 5_351_080,
    "aft_conv_tiny_k11_h192": 5_955_880,
    "aft_conv_small_k11_h16": 20_288_680,
    "aft_conv_small_k11_h384": 22_527_592,
    "aft_conv_small_k15_h384": 23_006_824,
    "aft_conv_base384_k25_h32": 79_845_736,
    "hydra_deit_base": 86_567_656,
    "deit_small_registers": 22_050_664 + 4 * 384,
}
TABLES = printed("aft", "Table 7, parameters") | printed("aft", "Table 8, parameters")
PRINTED = {name: float(number) for name, number in TABLES.items()}  # AFT, in millions
SPECS = {
    "attention": {"name": "attention", "heads": 2},
    "aft_full": {"name": "aft_full", "rank": 4},
    "aft_full-table": {"name": "aft_full", "rank": None},
    "aft_local": {"name": "aft_local", "window": 5, "rank": 3},
    "aft_simple": {"name": "aft_simple"},
    "aft_conv": {"name": "aft_conv", "heads": 4, "kernel_size": 3},
    "aft_conv-1d": {"name": "aft_conv", "heads": 4, "kernel_size": 3, "ndim": 1},
    "hydra": {"name": "hydra"},
    "external": {"name": "external", "slots": 4},
    "lambda": {"name": "lambda", "heads": 2, "key_width": 3},
    "spatial_reduction": {"name": "spatial_reduction", "heads": 2, "ratio": 2},
    "axial": {"name": "axial", "heads": 2},
    "linear": {"name": "linear", "heads": 2},
}


def make(spec, **options) -> ViT:
    given = {"dim": 16, "layers": 2, "image_size": (12, 16), "patch": 4, "classes": 3, **options}
    model = build_model(ViTConfig(mixers=(spec,), **given)).eval()
    for parameter in model.parameters():  # zeros and tiny values would hide what is wrong
        torch.nn.init.normal_(parameter, std=0.5) if parameter.ndim > 1 else torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def count(name: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(name).parameters())


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_to_the_digit(name):
    assert count(name) == COUNTS[name]


@pytest.mark.parametrize("name", PRINTED)
def test_parameters_as_printed(name):
    within = {"aft_conv_base384_k25_h32": 0.17, "lambda_small": 0.1}.get(name, 0.08)
    assert abs(count(name) / 1e6 - PRINTED[name]) <= within


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("pool", ["class", "mean"])
def test_every_mixer_runs_and_every_parameter_learns(name, pool):
    model = make(SPECS[name], pool=pool, registers=1, positions=None if pool == "mean" else "learned").train()
    tokens = model.forward_features(
        torch.randn(2, 3, 12, 16)
    )  # the class token alone would not need the last layer's filters
    (model.forward_head(tokens).square().sum() + tokens.square().sum()).backward()
    idle = [
        n
        for n, p in model.named_parameters()
        if p.grad is None or not bool(p.grad.isfinite().all()) or float(p.grad.abs().max()) == 0
    ]
    # a bias added to all keys changes no softmax
    assert not [n for n in idle if not n.endswith(("k_proj.bias", "norms.k.bias"))], idle


@pytest.mark.parametrize("name", ["attention", "aft_full", "aft_simple", "aft_conv", "hydra", "external"])
def test_kept_patches_keep_their_places(name):
    """All patches in another order are the same image; a part of them is another."""
    model, images = make(SPECS[name], registers=2), torch.randn(2, 3, 12, 16)
    order = torch.stack([torch.randperm(12) for _ in range(2)])
    assert torch.allclose(model(images, keep=order), model(images), atol=1e-4)
    tokens = model.forward_features(images)
    shuffled = model.forward_features(images, keep=order)
    assert torch.allclose(shuffled[:, 3:], tokens[:, 3:].gather(1, order[..., None].expand(-1, -1, 16)), atol=1e-4)
    assert not torch.allclose(model(images, keep=order[:, :5]), model(images), atol=1e-2)


@pytest.mark.parametrize("name", ["attention", "aft_conv"])
def test_dropped_patches_have_no_influence(name):
    model, images = make(SPECS[name]), torch.randn(1, 3, 12, 16)
    changed = images.clone()
    changed[..., 8:, 12:] = 9.0  # the last patch
    keep = torch.arange(11)[None]
    assert torch.equal(model(images, keep=keep), model(changed, keep=keep))
    assert not torch.allclose(model(images), model(changed), atol=1e-3)


@pytest.mark.parametrize("patch", [2, 4, 16])
def test_a_convolutional_stem_by_its_layers(patch):
    """Against its convolutions one by one; the grid is that of the patches, and neighbours' pixels count."""
    sizes = {"image_size": (32, 48), "patch": patch, "dim": 24, "positions": None, "pool": "mean"}
    model = make(SPECS["attention"], stem="conv", **sizes)
    images = torch.randn(2, 3, 32, 48)
    x, widths, weights = images, [], dict(model.patch.named_parameters())
    for i in range(patch.bit_length() - 1):
        norm = model.patch.layers[3 * i + 1]
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
        x = torch.nn.functional.conv2d(x, weights[f"layers.{3 * i}.weight"], stride=2, padding=1)
        shape = (1, -1, 1, 1)
        x = (x - norm.running_mean.view(shape)) / (norm.running_var.view(shape) + norm.eps).sqrt()
        x = (x * norm.weight.view(shape) + norm.bias.view(shape)).relu()
        widths.append(x.shape[1])
    x = torch.nn.functional.conv2d(x, weights["out.weight"], weights["out.bias"])
    assert widths == [24 // 2 ** (len(widths) - 1 - i) for i in range(len(widths))]
    found, given = model.embed(images)
    assert given["grid"] == (32 // patch, 48 // patch)
    assert torch.allclose(found, x.flatten(2).transpose(1, 2), atol=1e-4 * float(x.detach().abs().max()))
    changed = images.clone()
    changed[..., patch - 1, patch - 1] += 5.0  # the corner of the first patch, beside three others
    moved = (model.embed(changed)[0] - found).abs().amax((0, 2)) > 0
    assert {0, 1, 48 // patch} <= set(moved.nonzero().flatten().tolist())


def test_a_convolutional_stem_trains_resizes_and_comes_back_from_json():
    config = ViTConfig(
        dim=16, layers=1, mixers=(SPECS["aft_full"],), image_size=(8, 8), patch=4, classes=3, stem="conv"
    )
    torch.manual_seed(0)
    model = build_model(ViTConfig.from_json(config.to_json())).train()
    torch.manual_seed(0)
    again = build_model(config)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    assert all(float(p.grad.abs().max()) > 0 for n, p in model.named_parameters() if n.startswith("patch."))
    assert float(model.patch.layers[1].running_mean.abs().max()) > 0
    assert model.eval().resize((12, 8))(torch.randn(1, 3, 12, 8)).shape == (1, 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stem": "resnet"}, "ViTConfig: stem='resnet' is unknown; choose 'patch' or 'conv'"),
        ({"stem": "conv", "patch": 12}, "patch must be 2, 4, 8, 16, .* got patch=12 and dim=16"),
        ({"stem": "conv", "patch": 1}, "patch must be 2, 4, 8, 16"),
        ({"stem": "conv", "patch": 16, "dim": 20}, "dim a multiple of patch / 2, got patch=16 and dim=20"),
    ],
)
def test_stems_that_do_not_fit_are_refused(options, said):
    given = {"dim": 16, "layers": 1, "mixers": (SPECS["hydra"],), "image_size": 48, "patch": 4, "classes": 3}
    with pytest.raises(MixerError, match=said):
        ViTConfig(**{**given, **options})


def test_what_reads_patches_apart_refuses_a_convolutional_stem():
    with pytest.raises(MixerError, match="MAEConfig: stem must be 'patch'; .* would read the hidden patches"):
        MAEConfig(dim=16, layers=1, mixers=(SPECS["hydra"],), image_size=16, patch=4, stem="conv")
    model = make(SPECS["attention"], stem="conv")
    for write in (to_timm, to_hf):
        with pytest.raises(MixerError, match=f"{write.__name__}: only a ViT with stem='patch' can be written"):
            write(model)


@pytest.mark.parametrize("size", [(12, 16), (24, 24), (13, 21), (4, 4), (1, 1)])
def test_without_parameters_per_position_any_size_goes(size):
    model = make(SPECS["aft_conv"], pool="mean", positions=None)
    images = torch.randn(2, 3, *size)
    whole = torch.nn.functional.pad(images, (0, -size[1] % 4, 0, -size[0] % 4))
    assert torch.equal(model(images), model(whole))
    assert model.forward_features(images).shape[1] == -(-size[0] // 4) * -(-size[1] // 4)


def test_filled_copies_nothing_where_patches_fit():
    images = torch.randn(1, 3, 8, 12)
    assert pad_to_patches(images, 4) is images


def test_a_fixed_size_is_refused_until_resized():
    model, images = make(SPECS["aft_full"]), torch.randn(1, 3, 20, 24)
    with pytest.raises(
        MixerError,
        match=r"learned positions and AFTFull belong to images of 12 x 16, got 20 x 24.*resize\(\[20, 24\]\)",
    ):
        model(images)
    with pytest.raises(MixerError, match="learned positions"):  # as many patches, another shape
        model(torch.randn(1, 3, 16, 12))
    assert model.resize((20, 24))(images).shape == (1, 3)
    assert model.config.image_size == (20, 24)
    with pytest.raises(MixerError, match="belong to images of 20 x 24"):
        model(torch.randn(1, 3, 12, 16))


def test_resizing_interpolates_as_images():
    model = make(SPECS["aft_full"], registers=1)
    bias, table = model.blocks[0].mixer.bias.u.detach().clone(), model.positions.detach().clone()
    with torch.no_grad():  # a table that is linear in row and column stays so away from the edges
        rows, columns = torch.meshgrid(torch.arange(3.0), torch.arange(4.0), indexing="ij")
        model.positions[1:, 0] = columns.flatten()
        table = model.positions.detach().clone()
    model.resize((24, 32))
    assert model.blocks[0].mixer.bias.u.shape == (2 + 48, 4)
    assert torch.equal(model.blocks[0].mixer.bias.u[:2], bias[:2])
    assert torch.equal(model.positions[0], table[0])
    grown = model.positions[1:, 0].detach().view(6, 8)
    assert torch.allclose(grown, grown[:1].expand(6, -1), atol=1e-5)
    assert torch.allclose(grown[0, 3:5], torch.tensor([1.25, 1.75]), atol=0.02)
    same = make(SPECS["aft_full"])
    before = {k: v.clone() for k, v in same.state_dict().items()}
    same.resize((12, 16))
    assert all(torch.equal(v, before[k]) for k, v in same.state_dict().items())


def test_a_mixer_that_cannot_be_resized_says_so():
    for spec in (SPECS["lambda"], {"name": "synthesizer_random", "heads": 2}):
        with pytest.raises(MixerError, match="cannot be resized to another image"):
            make(spec).resize(24)


def test_resize_rows_checks_its_table():
    with pytest.raises(MixerError, match="does not belong to a grid of 2 x 2"):
        resize_rows(torch.zeros(4, 3), (2, 2), (3, 3), 1)


def test_sinusoids():
    table = sincos((3, 5), 8)
    assert table.shape == (15, 8)
    row, column = (
        torch.tensor([[p], [p / 100]]) for p in (1.0, 2.0)
    )  # patch 7 stands at (1, 2); rates are 1 and 1 / 100
    expected = torch.cat([f(p) for p in (row, column) for f in (torch.sin, torch.cos)])[:, 0]
    assert torch.allclose(table[7], expected)
    assert torch.unique(table, dim=0).shape[0] == 15
    model = make(SPECS["attention"], positions="sinusoidal")
    assert model(torch.randn(1, 3, 40, 8)).shape == (1, 3)
    with pytest.raises(MixerError, match="divisible by 4"):
        make(SPECS["aft_simple"], positions="sinusoidal", dim=6)(torch.randn(1, 3, 4, 4))


def test_registers_are_mixed_and_dropped_at_the_output():
    model, images = make(SPECS["attention"], pool="mean", registers=3), torch.randn(1, 3, 12, 16)
    features = model.forward_features(images)
    assert features.shape == (1, 15, 16)
    assert torch.allclose(model(images), model.head(features[:, 3:].mean(1)))
    with torch.no_grad():
        before = model(images)
        model.registers += torch.randn(3, 16)
    assert not torch.allclose(model(images), before)
    assert all(m.shape == (1, 16, 3, 4) for m in model.feature_maps(images))


def test_feature_maps_are_the_blocks_outputs():
    model, images = make(SPECS["aft_conv"], layers=4), torch.randn(2, 3, 12, 16)
    seen = []
    hooks = [block.register_forward_hook(lambda m, a, y: seen.append(y)) for block in model.blocks]
    maps = model.feature_maps(images, [0, -1])
    for hook in hooks:
        hook.remove()
    for found, block in zip(maps, (seen[0], seen[3]), strict=True):
        assert torch.equal(found.flatten(2).transpose(1, 2), block[:, 1:])
    assert len(make(SPECS["aft_simple"], layers=2).feature_maps(images)) == 4


def test_drop_path_rises_with_depth_and_rests_in_eval():
    model = make(SPECS["aft_simple"], layers=3, drop_path=0.5)
    images = torch.randn(4, 3, 12, 16)
    assert [
        getattr(b.dropout[-1], "rate", 0) if isinstance(b.dropout, torch.nn.Sequential) else 0 for b in model.blocks
    ] == [0, 0.25, 0.5]
    assert torch.equal(model(images), model(images))
    model.train()
    assert not torch.equal(model(images), model(images))
    from tokenmix.models.blocks import DropPath

    path, ones = DropPath(0.5).train(), torch.ones(4000, 2)
    out = path(ones)
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(out[:, 0], out[:, 1])
    assert abs(float(out.mean()) - 1) < 0.1


def test_layers_are_replaced_from_the_back():
    names = lambda config: "".join("h" if s["name"] == "hydra" else "a" for s in config.specs())  # noqa: E731  (a letter per layer)
    hydra = {"name": "hydra"}
    assert names(replace_layers(MODELS["deit_base"], hydra, last=2)) == "aaaaaaaaaahh"
    assert names(MODELS["hydra_deit_base"]) == "hhhhhhhhhhhh"
    assert names(MODELS["hydra_deit_base_every2"]) == "ahahahahahah"
    assert names(MODELS["hydra_deit_base_every6"]) == "aaaaahaaaaah"
    for wrong in ({}, {"last": 13}, {"every": 0}, {"last": 1, "every": 1}):
        with pytest.raises(MixerError, match="replace_layers"):
            replace_layers(MODELS["deit_base"], hydra, **wrong)


def test_a_config_is_json_and_a_name_takes_options():
    config = MODELS["aft_conv_tiny_k11_h32"]
    assert ViTConfig.from_json(config.to_json()) == config
    assert build_model("deit_tiny", classes=0, layers=2)(torch.randn(1, 3, 224, 224)).shape == (1, 192)
    with pytest.raises(MixerError, match="nearest: deit_tiny"):
        build_model("diet_tiny")
    with pytest.raises(MixerError, match="no field 'clases'; nearest: classes"):
        build_model("deit_tiny", clases=10)


def test_meta_build_equals_direct_build():
    torch.manual_seed(3)
    direct = build_model(
        ViTConfig(dim=16, layers=2, mixers=(SPECS["aft_conv"],), image_size=(16, 16), patch=8, classes=2)
    )
    with torch.device("meta"):
        later = build_model(direct.config)
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
        ({"positions": "rotary"}, "positions='rotary'"),
        ({"image_size": (10, 16)}, r"image_size=\[10, 16\] must be multiples of patch=4"),
        ({"image_size": (8, 8, 8)}, "two"),
        ({"registers": -1}, "registers must be >= 0"),
        ({"layers": 0}, "layers must be positive"),
        ({"drop_path": 1.0}, "drop_path"),
    ],
)
def test_wrong_configs_are_refused(options, says):
    with pytest.raises(MixerError, match=says):
        make(SPECS["attention"], **options)


def test_wrong_images_are_refused():
    model = make(SPECS["aft_simple"])
    for images, says in (
        (torch.zeros(2, 1, 12, 16), r"expects images \(batch, 3, height, width\), got \(2, 1, 12, 16\)"),
        (torch.zeros(3, 12, 16), "expects images"),
        (torch.zeros(1, 3, 12, 16, dtype=torch.uint8), "normalised floating point"),
    ):
        with pytest.raises(MixerError, match=says):
            model(images)
    for keep, says in (
        (torch.tensor([[12]]), r"patches in 0\.\.11, got 12"),
        (torch.tensor([0]), "integers"),
        (torch.ones(1, 2), "integers"),
    ):
        with pytest.raises(MixerError, match=says):
            model(torch.zeros(1, 3, 12, 16), keep=keep)
    assert model(torch.zeros(0, 3, 12, 16)).shape == (0, 3)


@pytest.mark.parametrize("name", ["attention", "aft_conv", "aft_full"])
def test_channels_last_half_precision_and_compile(name):
    model, images = make(SPECS[name]), torch.randn(2, 3, 12, 16)
    want = model(images)
    assert torch.allclose(model(images.to(memory_format=torch.channels_last)), want, atol=1e-5)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(images), want, atol=1e-5)
    assert bool(model.bfloat16()(images.bfloat16()).isfinite().all())


@pytest.mark.parametrize("case", BOTH_WAYS)
def test_every_mixer_stands_in_a_vit(case):
    """With the options of the contract suite; the model fills in how many tokens there are."""
    name, options = CASES[case]
    spec = {"name": name, **{k: v for k, v in options.items() if k != "max_len"}}
    if options.get("ndim") == 3:
        with pytest.raises(MixerError, match="the 3 sizes of the token grid"):
            make(spec, dim=8)(torch.randn(1, 3, 12, 16))
        return
    pool = "mean" if name == "pooling" else "class"  # pooling has no place for a class token, and says so
    assert make(spec, dim=8, pool=pool)(torch.randn(2, 3, 12, 16)).shape == (2, 3)
