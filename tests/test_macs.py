"""Multiply-accumulates by formula against the papers, and against what torch counts when the models run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ledger import printed
from tokenmix import MixerError, use_backend
from tokenmix.models import (
    LM,
    MODELS,
    DiTConfig,
    EAMLPConfig,
    LMConfig,
    MAEConfig,
    PointClassifierConfig,
    PointSegmenterConfig,
    PyramidConfig,
    ResNetConfig,
    SegmentationConfig,
    Segmenter,
    ViTConfig,
    build_model,
    macs,
)

GIGA = {name: number for name, number in printed("pvt", "Multiply-accumulates").items() if name in MODELS}
ATTENTION = ({"name": "attention", "heads": 2},)
PVT = tuple({"name": "spatial_reduction", "heads": 2, "ratio": r} for r in (4, 2, 2, 1))
HYDRA = {  # image: G of attention, its share in %, G of Hydra, saving in %; patches, 12 blocks and head of DeiT-B
    224: (17.56, 4.07, 16.85, 4.05),
    384: (55.48, 11.06, 49.36, 11.0),
    448: (78.50, 14.5, 67.15, 14.5),
    1024: (659.8, 46.9, 350.5, 46.9),
    (720, 1280): (547.0, 43.7, 308.0, 43.7),
    (1088, 1920): (1925.6, 63.8, 698.1, 63.7),
}


def meta(name):
    with torch.device("meta"):
        return build_model(name)


@pytest.mark.parametrize("name", GIGA)
def test_pvt_as_its_paper_counts(name):
    assert round(macs(meta(name)).total / 1e9, 3) == float(GIGA[name])


@pytest.mark.parametrize("size", HYDRA, ids=str)
def test_hydra_saves_what_its_paper_says(size):
    attention, share, hydra, saving = HYDRA[size]
    ours, theirs = macs(meta("hydra_deit_base"), size), macs(meta("deit_base"), size)
    assert theirs.total / 1e9 == pytest.approx(attention, rel=3e-4)
    assert 100 * theirs.share == pytest.approx(share, abs=0.05)
    assert ours.total / 1e9 == pytest.approx(hydra, rel=3e-4)
    assert 100 * ours.share == pytest.approx(0.0215, abs=5e-5)
    assert 100 * (1 - ours.total / theirs.total) == pytest.approx(saving, abs=0.05)


def small(kind):
    if kind == "vit":
        return build_model(
            ViTConfig(dim=16, layers=2, mixers=ATTENTION, image_size=(24, 32), patch=8, classes=3, registers=2)
        )
    if kind == "stem":
        return build_model(
            ViTConfig(dim=16, layers=2, mixers=ATTENTION, image_size=(24, 32), patch=8, classes=3, stem="conv")
        )
    resnet = build_model(ResNetConfig(widths=(4, 6, 6), depths=(2, 1, 2), image_size=(25, 14)))
    if kind == "resnet":
        return resnet
    if kind == "segmenter of a resnet":
        return Segmenter(resnet, SegmentationConfig(classes=5, width=12, hidden=6, levels=(1, 2)))
    options = {"depths": (1, 2, 1, 1), "dims": (8, 12, 20, 16), "mlp_ratios": (2, 2, 1, 1), "image_size": (96, 64)}
    pyramid = build_model(PyramidConfig(mixers=PVT, classes=3, **options))
    if kind == "pyramid":
        return pyramid
    if kind == "segmenter":  # runs no head of its backbone
        return Segmenter(pyramid, SegmentationConfig(classes=5, width=12, hidden=6))
    mixers = ({"name": "external_multihead", "heads": 2},) if kind == "eamlp" else ATTENTION
    token_mixer = None if kind == "eamlp" else {"name": "attention", "heads": 1}
    return build_model(
        EAMLPConfig(
            dim=16,
            layers=2,
            mixers=mixers,
            image_size=(32, 48),
            classes=3,
            token_mixer=token_mixer,
        )
    )


@pytest.mark.parametrize(
    "kind", ["vit", "stem", "pyramid", "segmenter", "segmenter of a resnet", "eamlp", "t2t", "resnet"]
)
def test_macs_are_half_of_what_torch_counts(kind):
    model = small(kind).eval()
    size = model.config.image_size
    with FlopCounterMode(display=False) as counter, use_backend("eager"), torch.no_grad():
        model(torch.randn(1, 3, *size))
    assert macs(model).total * 2 == counter.get_total_flops()


def torch_counts(model, *inputs):
    with FlopCounterMode(display=False) as counter, use_backend("eager"), torch.no_grad():
        model.eval()(*inputs)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("ratio", [0.75, 0.5])
def test_a_masked_autoencoder_as_it_trains(ratio):
    decoder = {"decoder_dim": 8, "decoder_layers": 1, "decoder_mixers": ATTENTION}
    encoder = {"dim": 16, "layers": 2, "mixers": ATTENTION, "image_size": (16, 24), "patch": 4, "registers": 2}
    model = build_model(MAEConfig(mask_ratio=ratio, **encoder, **decoder))
    keep = torch.arange(24)[: int(24 * (1 - ratio))][None]
    assert macs(model).total == torch_counts(model, torch.randn(1, 3, 16, 24), keep)


def test_a_step_of_a_diffusion_transformer():
    model = build_model(DiTConfig(dim=16, layers=2, mixers=ATTENTION, image_size=(8, 12), classes=3))
    counted = torch_counts(model, torch.randn(1, 3, 8, 12), torch.tensor([0.5]), torch.tensor([1]))
    assert macs(model).total == counted


@pytest.mark.parametrize("mixer", ["pct_attention", "attention"])
@pytest.mark.parametrize("kind", ["classifier", "segmenter"])
def test_clouds(kind, mixer):
    sizes = {"mixers": ({"name": mixer},), "layers": 2, "dim": 16, "lift": 8, "fuse": 12, "hidden": (6, 5)}
    if kind == "classifier":
        model = build_model(PointClassifierConfig(classes=3, neighbours=(4, 3), samples=(16, 10), **sizes))
        inputs = (torch.randn(1, 30, 3),)
    else:
        model = build_model(PointSegmenterConfig(classes=3, parts=7, category=4, neighbours=(4, 3), **sizes))
        inputs = (torch.randn(1, 30, 3), torch.tensor([2]))
    assert macs(model, 30).total == torch_counts(model, *inputs)


def test_sizes_are_filled_up_to_whole_patches():
    model = small("vit")
    assert macs(model, (17, 32)) == macs(model)
    assert macs(model, (16, 32)).total < macs(model).total
    assert macs(small("pyramid"), (65, 64)) == macs(small("pyramid"), (96, 64))
    assert macs(small("eamlp"), (17, 48)) == macs(small("eamlp"), (32, 48))


def test_mixing_is_what_joins_tokens():
    """2 T^2 D a layer in attention, and nothing else."""
    assert macs(small("vit")).mixing == 2 * 2 * (1 + 2 + 12) ** 2 * 16


def test_what_cannot_be_counted_says_so():
    bound = build_model(ViTConfig(dim=8, layers=1, mixers=({"name": "aft_full", "rank": 2},), image_size=16, patch=8))
    with pytest.raises(MixerError, match="max_len=5, cost was asked for T=17"):
        macs(bound, 32)
    with pytest.raises(MixerError, match="macs: supports ViT, .*, DiT, PointClassifier, PointSegmenter, got LM"):
        macs(LM(LMConfig(dim=8, max_len=8, layers=1, mixers=({"name": "aft_simple"},))))
    cloud = build_model(PointClassifierConfig(classes=3, dim=8, lift=4, fuse=8, neighbours=(4,), samples=(16,)))
    for points in (None, 15, (32, 32)):
        with pytest.raises(MixerError, match=r"a PointClassifier takes clouds .* the number of points, at least 16"):
            macs(cloud, points)
    with pytest.raises(MixerError, match=r"macs: image_size must be a positive integer or two"):
        macs(bound, (1, 2, 3))


def documented():
    """The rows of the table in docs/vision.md: name, parameters, G, share in %."""
    text = (Path(__file__).parents[1] / "docs" / "vision.md").read_text()
    return re.findall(r"^\| `(\w+)` \| ([\d,]+) \| [\d.,]* ?\| ([\d.]+) \| ([\d.]+) % \|$", text, flags=re.MULTILINE)


@pytest.mark.parametrize(("name", "parameters", "giga", "share"), documented())
def test_the_documented_numbers_are_those_of_the_models(name, parameters, giga, share):
    model = meta(name)
    table = model.positions.numel() if MODELS[name].kind == "eamlp" else 0  # fixed, but counted as its authors do
    assert f"{sum(p.numel() for p in model.parameters()) + table:,}" == parameters
    cost = macs(model)
    assert (f"{cost.total / 1e9:.2f}", f"{100 * cost.share:.2f}") == (giga, share)


def test_every_vision_model_is_documented():
    named = {name for name, config in MODELS.items() if config.kind in ("vit", "pyramid", "eamlp")}
    shown = {row[0] for row in documented()}
    assert shown <= named
    assert {n for n in named - shown if not n.startswith("hydra_deit_base_")} == set()
