"""The papers' pyramids as backbones of timm."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.loss import SoftTargetCrossEntropy
from timm.models import create_feature_extractor
from timm.optim import param_groups_layer_decay

from timm_models import images, noisy
from tokenmix import MixerError
from tokenmix.hosts.timm import PYRAMID_NAMES
from tokenmix.models import PyramidConfig, build_model

PYRAMID = {
    "depths": (1, 2),
    "dims": (8, 16),
    "patches": (4, 2),
    "mlp_ratios": (2.0, 2.0),
    "img_size": 32,
    "num_classes": 5,
}
STAGES = ({"name": "spatial_reduction", "heads": 1, "ratio": 2}, {"name": "aft_full", "rank": 3})


def pyramid(**options):
    torch.manual_seed(0)
    return noisy(timm.create_model("pvt_tiny", mixers=STAGES, **{**PYRAMID, **options}).eval())


def test_a_pyramid_is_ours():
    fields = {name: PYRAMID[name] for name in ("depths", "dims", "patches", "mlp_ratios")}
    source = build_model(PyramidConfig(**fields, mixers=STAGES, image_size=32, classes=5)).eval()
    model, x = pyramid(), images(size=(32, 32))
    model.load_state_dict(source.state_dict())
    torch.testing.assert_close(model(x), source(x), rtol=0, atol=0)
    final, maps = model.forward_intermediates(x)
    torch.testing.assert_close(final, source.forward_features(x), rtol=0, atol=0)
    for one, other in zip(maps, source.feature_maps(x), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    features = timm.create_model("pvt_tiny", mixers=STAGES, **PYRAMID, features_only=True, out_indices=(1,)).eval()
    features.model.load_state_dict({n: t for n, t in source.state_dict().items() if n in features.model.state_dict()})
    assert (features.feature_info.channels(), features.feature_info.reduction()) == ([16], [8])
    torch.testing.assert_close(features(x)[0], maps[1], rtol=0, atol=0)


def test_a_pyramid_trains_and_changes_its_head():
    model, x, grads = pyramid(drop_rate=0.0).train(), images(size=(32, 32)), []
    for on in (False, True):
        model.set_grad_checkpointing(on)
        model.zero_grad()
        SoftTargetCrossEntropy()(model(x), torch.full((2, 5), 0.2)).backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
    groups = param_groups_layer_decay(
        model, weight_decay=0.05, layer_decay=0.5, no_weight_decay_list=model.no_weight_decay()
    )
    scale = {id(p): (g["lr_scale"], g["weight_decay"]) for g in groups for p in g["params"]}
    named = {n: scale[id(p)] for n, p in model.named_parameters()}
    assert named["head.weight"] == (1.0, 0.05)
    steps = [named[f"stages.{i}.blocks.{j}.mlp.up.weight"][0] for i, j in ((0, 0), (1, 0), (1, 1))]
    assert steps[0] * 4 == steps[1] * 2 == steps[2] < 1.0
    assert named["stages.0.patch.weight"][0] < steps[0]
    assert named["stages.1.patch.weight"][0] < steps[2]
    assert named["stages.1.class_token"][1] == named["stages.0.positions"][1] == 0.0
    model.reset_classifier(3)
    assert model.eval()(x).shape == (2, 3)
    model.set_input_size((32, 64))
    assert model(images(size=(32, 64))).shape == (2, 3)
    model.reset_classifier(0)
    assert model(images(size=(32, 64))).shape == (2, model.num_features)
    assert pyramid(global_pool="avg", in_chans=1)(torch.randn(1, 1, 32, 32)).shape == (1, 5)
    with pytest.raises(MixerError, match="was built with global_pool='avg' and has no class token, got 'token'"):
        pyramid(global_pool="avg").reset_classifier(3, "token")
    with pytest.raises(MixerError, match="choose 'token', 'avg' or ''"):
        pyramid(global_pool="max")


@pytest.mark.parametrize("pool", ["token", "avg", ""])
@torch.no_grad()
def test_pooling_is_that_of_timms_own_pyramids(pool):
    """The map, its mean, or each place of it through the head; chosen when built, and with another head."""
    model, x, last = pyramid(global_pool=pool), images(size=(32, 32)), (4, 4)
    assert model.default_cfg["pool_size"] == (7, 7)
    final, maps = model.forward_intermediates(x)
    features = model.forward_features(x)
    torch.testing.assert_close(final, features, rtol=0, atol=0)
    assert [tuple(m.shape[1:]) for m in maps] == [(8, 8, 8), (16, *last)]
    assert features.shape == ((2, 17, 16) if pool == "token" else (2, 16, *last))
    torch.testing.assert_close(model.forward_head(features), model(x), rtol=0, atol=0)
    pooled = model.forward_head(features, pre_logits=True)
    logits = model.head(pooled if pool else pooled.movedim(1, -1))
    torch.testing.assert_close(model(x), logits if pool else logits.movedim(-1, 1))
    model.reset_classifier(0)
    torch.testing.assert_close(model(x), pooled)
    model.reset_classifier(0, "")
    whole = model(x)
    assert whole.shape == (2, 16, *last)
    model.reset_classifier(0, "avg")
    torch.testing.assert_close(model(x), whole.mean((2, 3)))
    bare = pyramid(global_pool=pool, num_classes=0)
    assert isinstance(bare.get_classifier(), torch.nn.Identity)
    assert bare(x).shape == ((2, 16) if pool else (2, 16, *last))


@pytest.mark.parametrize("grad", [True, False])
def test_a_pyramid_is_scripted(grad, tmp_path):
    model, x = pyramid(), images(size=(32, 32))
    with torch.set_grad_enabled(grad):
        scripted = torch.jit.script(model)
    torch.jit.save(scripted, tmp_path / "model.pt")
    for n in (1, 2):
        torch.testing.assert_close(torch.jit.load(tmp_path / "model.pt")(x[:n]), model(x[:n]), rtol=1e-5, atol=1e-6)
    scripted(x).sum().backward()
    assert model.head.weight.grad is not None


@pytest.mark.parametrize("pool", ["token", "avg", ""])
def test_fx_takes_a_pyramid_apart_into_blocks(pool, tmp_path):
    """Check the features of blocks and stages, TorchScript of the graph, training, and that the size stays checked."""
    model, x = pyramid(global_pool=pool, drop_rate=0.0), images(size=(32, 32))
    names = {"stages.0.blocks.0": "first", "stages.1.patch": "patches", "head" if pool else "movedim_1": "logits"}
    traced = create_feature_extractor(model, names)
    found, maps = traced(x), model.forward_intermediates(x, intermediates_only=True)
    torch.testing.assert_close(found["logits"], model(x), rtol=0, atol=0)
    torch.testing.assert_close(found["first"].transpose(1, 2).unflatten(2, (8, 8)), maps[0], rtol=0, atol=0)
    assert found["patches"].shape == (2, 16, 4, 4)
    padded = traced(x[..., :31])
    torch.testing.assert_close(padded["logits"], model(x[..., :31]), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"Pyramid: this program of torch.fx is for images of 32 x 32, .* \[40, 24\]"):
        traced(images(size=(40, 24)))
    found["logits"].sum().backward()
    assert all(p.grad is not None for p in model.stages.parameters())
    torch.jit.save(torch.jit.script(traced), tmp_path / "model.pt")
    loaded, more = torch.jit.load(tmp_path / "model.pt"), images(3, size=(32, 32))
    torch.testing.assert_close(loaded(more)["logits"], model(more), rtol=1e-5, atol=1e-6)


def test_fx_of_a_resized_pyramid():
    model, x = pyramid(), images(size=(40, 24))
    model.set_input_size((40, 24))
    scripted = torch.jit.script(create_feature_extractor(model, {"head": "logits"}))
    torch.testing.assert_close(scripted(x)["logits"], model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PYRAMID_NAMES)
def test_registered_pyramids_have_the_papers_shapes(name):
    with torch.device("meta"):
        model, source = timm.create_model(name), build_model(name)
    assert {n: p.shape for n, p in model.state_dict().items()} == {n: p.shape for n, p in source.state_dict().items()}
    assert model.feature_info[-1] == {"module": "stages.3", "num_chs": 512, "reduction": 32}
