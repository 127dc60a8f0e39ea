"""EANet's head on a pyramid, a ViT or a ResNet: the block to the digit and to the number, sizes, other mixers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tokenmix import MixerError
from tokenmix.models import PyramidConfig, ResNetConfig, SegmentationConfig, Segmenter, ViTConfig, build_model
from tokenmix.models.segmentation import EAHead, MixerResidual, external_head

HYDRA = ({"name": "hydra"},)


def backbone(kind="pyramid", mixers=HYDRA, **options):
    if kind == "resnet":
        sizes = {"widths": (4, 6, 8, 10), "depths": (1, 1, 1, 1), "image_size": (32, 64), "classes": 0}
        return build_model(ResNetConfig(**sizes))
    if kind == "vit":
        return build_model(
            ViTConfig(dim=8, layers=4, mixers=mixers, image_size=(32, 64), patch=8, classes=0, **options)
        )
    given = {
        "depths": (1, 1, 1, 1),
        "dims": (4, 6, 8, 10),
        "mlp_ratios": (1, 1, 1, 1),
        "image_size": (32, 64),
        "classes": 0,
        **options,
    }
    return build_model(PyramidConfig(mixers=mixers, **given))


def make(kind="pyramid", mixers=HYDRA, free=False, **head) -> Segmenter:
    options = {"pool": "mean", "positions": None} if free else {}
    config = SegmentationConfig(**{"classes": 5, "width": 12, "hidden": 6, **head})
    return Segmenter(backbone(kind, mixers, **options), config).eval()


def test_parameters_of_the_block():
    """Two 1 x 1 convolutions and one memory of 64 slots at 512 channels, beside a bias and the norm."""
    with torch.device("meta"):
        block = MixerResidual(512, external_head(), (64, 64))
    parameters = {name: p.numel() for name, p in block.named_parameters()}
    assert (
        sum(n for name, n in parameters.items() if not name.startswith("norm") and not name.endswith("bias")) == 557_056
    )
    assert sorted(name for name in parameters if name.endswith("bias")) == ["mixer.q_proj.bias", "norm.bias"]
    with torch.device("meta"):
        untied = MixerResidual(512, {**external_head(), "tied": False}, (64, 64))
    assert sum(p.numel() for p in untied.parameters()) - sum(parameters.values()) == 64 * 512


def eanet_block(block, x):
    """EANet's block in torch's own words, on maps."""
    mixer, (B, C, H, W) = block.mixer, x.shape
    y = F.conv2d(x, mixer.q_proj.weight[..., None, None], mixer.q_proj.bias).flatten(2)
    weights = F.conv1d(y, mixer.memory_k[..., None]).softmax(-1)
    weights = weights / (1e-9 + weights.sum(1, keepdim=True))
    memory_v = mixer.memory_k if mixer.memory_v is None else mixer.memory_v
    y = F.conv2d(F.conv1d(weights, memory_v.mT[..., None]).view(B, C, H, W), mixer.out_proj.weight[..., None, None])
    return F.relu(x + block.norm(y))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_block_is_eanets(tied, training):
    torch.manual_seed(0)
    block = MixerResidual(12, {**external_head(), "slots": 7, "tied": tied}, (5, 6)).double().train(training)
    block.reset_parameters()
    x = torch.randn(2, 12, 5, 6, dtype=torch.float64)
    assert torch.allclose(block(x), eanet_block(block, x), atol=1e-9)


def test_the_head_is_its_layers():
    head = EAHead(9, SegmentationConfig(classes=5, width=12, hidden=6), (4, 4)).eval()
    head.reset_parameters()
    x = torch.randn(2, 9, 4, 4)
    y = head.block(F.relu(head.reduce_norm(F.conv2d(x, head.reduce.weight, padding=1))))
    y = F.relu(head.refine_norm(F.conv2d(y, head.refine.weight, padding=1)))
    assert torch.allclose(head(x), F.conv2d(y, head.classify.weight, head.classify.bias), atol=1e-6)
    head.train()
    head.dropout.p = 0.5
    seen = []
    head.dropout.register_forward_hook(lambda m, a, y: seen.append((a[0], y)))
    head(x)
    before, after = seen[0]
    factors = torch.where(before > 0, after / before, torch.nan).flatten(2)
    assert set(factors[factors.isfinite()].tolist()) == {0.0, 2.0}
    assert all(channel[channel.isfinite()].unique().numel() <= 1 for channel in factors.flatten(0, 1))  # whole channels


def test_weights_start_as_documented():
    torch.manual_seed(0)
    head = EAHead(64, SegmentationConfig(classes=50, width=128, hidden=64), (4, 4))
    head.reset_parameters()
    wanted = {
        "reduce": 2 / (9 * 128),
        "refine": 2 / (9 * 64),
        "classify": 2 / 50,
        "block.mixer.q_proj": 2 / 128,
        "block.mixer.out_proj": 2 / 128,
    }
    for name, variance in wanted.items():
        assert float(head.get_submodule(name).weight.detach().var()) == pytest.approx(variance, rel=0.1), name
    assert float(head.block.mixer.memory_k.detach().var()) == pytest.approx(2 / 64, rel=0.1)
    assert not bool(head.classify.bias.any() or head.block.mixer.q_proj.bias.any())


@pytest.mark.parametrize("kind", ["pyramid", "vit", "resnet"])
def test_logits_have_the_size_of_the_image(kind):
    assert make(kind)(torch.randn(2, 3, 32, 64)).shape == (2, 5, 32, 64)
    model = make(kind, ({"name": "aft_conv", "heads": 2, "kernel_size": 3},), free=True)
    for size in ((40, 33), (1, 1), (64, 64)):
        assert model(torch.randn(1, 3, *size)).shape == (1, 5, *size)


def test_logits_stand_where_the_maps_do():
    """A head that passes one map through gives each cell's value at the cell's centre."""
    model = make(free=True, levels=(1,))
    fine = torch.arange(32.0).view(1, 1, 4, 8).expand(1, 5, 4, 8)
    model.head.forward = lambda x: fine
    logits = model(torch.randn(1, 3, 32, 64))
    centres = (
        logits[..., 3::8, 3::8] + logits[..., 4::8, 4::8] + logits[..., 3::8, 4::8] + logits[..., 4::8, 3::8]
    ) / 4
    assert torch.allclose(
        centres[..., 1:-1, 1:-1], fine[..., 1:-1, 1:-1], atol=1e-4
    )  # beyond the outermost centres the edge goes on
    cut = model(torch.randn(1, 3, 30, 57))  # filled to the same 32 x 64
    assert torch.equal(cut, logits[..., :30, :57])


def test_a_resnet_gives_the_maps_of_its_stages_and_takes_any_size():
    model = make("resnet", levels=(1, 3), mixer={"name": "aft_full", "rank": 2})
    maps = model.backbone.feature_maps(torch.randn(2, 3, 33, 64))
    assert [tuple(m.shape[1:]) for m in maps] == [(4, 33, 64), (6, 17, 32), (8, 9, 16), (10, 5, 8)]
    assert model.backbone.config.strides == (1, 2, 4, 8)
    assert model.blocks == []
    assert model.resize((33, 40))(torch.randn(1, 3, 33, 40)).shape == (1, 5, 33, 40)
    assert model.config.image_size == (33, 40)
    assert model.head.block.mixer.max_len == 17 * 20
    assert build_model(model.config)(torch.randn(1, 3, 33, 40)).shape == (1, 5, 33, 40)
    classifier = build_model(ResNetConfig(widths=(4, 6), depths=(1, 1))).eval()
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(classifier(images), classifier.head(classifier.feature_maps(images)[-1].mean((2, 3))))


def test_levels_are_read_on_the_finest_grid():
    for levels, width, grid in (((0, 3), 14, (8, 16)), ((1, 2, 3), 24, (4, 8)), ((3,), 10, (1, 2))):
        model, seen = make(levels=levels), []
        model.head.register_forward_pre_hook(lambda m, a, seen=seen: seen.append(a[0]))
        images = torch.randn(2, 3, 32, 64)
        assert model(images).shape == (2, 5, 32, 64)
        assert seen[0].shape == (2, width, *grid)
        first = model.backbone.feature_maps(images)[levels[0]]
        assert torch.equal(seen[0][:, : first.shape[1]], first)


@pytest.mark.parametrize("name", ["external", "attention", "aft_conv", "aft_full", "hydra"])
def test_any_mixer_in_the_head_and_every_parameter_learns(name):
    options = {
        "external": {"slots": 4},
        "attention": {"heads": 2},
        "aft_conv": {"heads": 2, "kernel_size": 3},
        "aft_full": {"rank": 2},
    }.get(name, {})
    model = make(mixer={"name": name, **options}).train()
    model.head.dropout.p = 0.0
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else torch.nn.init.uniform_(parameter, 0.5, 1.5)
    target = torch.randint(0, 5, (2, 32, 64))
    F.cross_entropy(model(torch.randn(2, 3, 32, 64)), target).backward()
    idle = [
        n
        for n, p in model.named_parameters()
        if p.grad is None or not bool(p.grad.isfinite().all()) or float(p.grad.abs().max()) == 0
    ]
    # The backbone's last norm and class token's way out are a classifier's; BatchNorm and softmax cancel constant
    # shifts.
    allowed = ("backbone.norm.weight", "backbone.norm.bias", "k_proj.bias", "out_proj.bias")
    assert not [n for n in idle if not n.endswith(allowed)], idle


def test_a_fixed_size_is_refused_until_resized():
    model, images = make(free=True, mixer={"name": "aft_full", "rank": 2}), torch.randn(1, 3, 64, 64)
    with pytest.raises(MixerError, match="AFTFull belongs to images of 32 x 64, got 64 x 64; call model.resize first"):
        model(images)
    assert model.resize(64)(images).shape == (1, 5, 64, 64)
    assert model.head.block.mixer.max_len == 64
    bound = make(mixer={"name": "synthesizer_random", "heads": 2})
    with pytest.raises(MixerError, match="cannot be resized"):
        bound.resize(64)
    assert bound(torch.randn(1, 3, 32, 64)).shape == (1, 5, 32, 64)  # the backbone has not changed either
    with pytest.raises(MixerError, match="learned positions belong to images of 32 x 64"):
        make()(images)


def test_json_meta_and_compile():
    config = SegmentationConfig(classes=3, levels=(0, 1), mixer={"name": "hydra"})
    assert SegmentationConfig.from_json(config.to_json()) == config
    model, images = make(), torch.randn(1, 3, 32, 64)
    torch.manual_seed(3)
    model.reset_parameters()
    with torch.device("meta"):
        later = make()
    later.to_empty(device="cpu")
    torch.manual_seed(3)
    later.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), later.state_dict().values(), strict=True))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(images), model(images), atol=1e-5)


def test_wrong_heads_and_backbones_are_refused():
    for options, says in (
        ({"levels": ()}, "levels must be rising"),
        ({"levels": (2, 1)}, "levels must be rising"),
        ({"levels": (4,)}, r"levels=\[4\], but the backbone has 4 feature maps, 0 to 3"),
        ({"classes": 0}, "classes must be positive"),
        ({"dropout": 1.0}, "dropout"),
    ):
        with pytest.raises(MixerError, match=says):
            make(**options)
    with pytest.raises(MixerError, match="must be a Pyramid, a ViT or a ResNet, got Linear"):
        Segmenter(torch.nn.Linear(2, 2), SegmentationConfig(classes=2))
