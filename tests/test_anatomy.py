"""`tokenmix look tokens`: each measure against its equation or a planted truth, ViTs of three libraries, the page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy
import pytest
import timm
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from transformers import (
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    ResNetConfig,
    ResNetModel,
    ViTConfig,
    ViTForImageClassification,
)

import vit_anatomy
from test_vision_pictures import make, pictures_of
from tokenmix import MixerError
from tokenmix.lab import cli
from tokenmix.lab.anatomy import dissect, looks, lost, outliers, probes, read
from tokenmix.lab.anatomy.anatomy_page import summary, write_page
from tokenmix.lab.anatomy.images import Images, load_images
from tokenmix.lab.anatomy.loading import open_subject
from tokenmix.lab.anatomy.ours import our_vit
from tokenmix.lab.anatomy.theirs import their_vit
from tokenmix.lab.data.augment import Augment
from tokenmix.lab.report.maps import attention_weights, look_into
from tokenmix.lab.report.norms import Norms, neighbour_similarity, patch_similarity, token_norms
from tokenmix.lab.train import DataConfig, ImageDataConfig, RunConfig, TrainConfig, train
from tokenmix.models import LMConfig
from tokenmix.models import ViTConfig as OurConfig

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
HALF = (0.5,) * 3


def of_timm(**options):
    torch.manual_seed(3)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 0}
    return VisionTransformer(**sizes, **options).eval()


def of_transformers(registers=True):
    torch.manual_seed(3)
    if registers:
        config = Dinov2WithRegistersConfig(**SMALL, num_register_tokens=2, mlp_ratio=2)
        return Dinov2WithRegistersModel(config).eval()
    return ViTForImageClassification(ViTConfig(**SMALL, intermediate_size=32)).eval()


def tiny(folder, *, model=None, data=None, every=4):
    """Train a run for four steps, by default of a ViT on the digits, with a checkpoint after ``every``."""
    model = model or OurConfig(
        dim=8,
        layers=2,
        mixers=({"name": "aft_conv", "heads": 2, "kernel_size": 3},),
        image_size=(8, 8),
        patch=2,
        channels=1,
        classes=10,
        pool="mean",
        registers=1,
    )
    data = data or ImageDataConfig(source="digits", augment=Augment())
    loop = TrainConfig(steps=4, batch_size=4, log_every=2, eval_every=4, save_every=every, device="cpu")
    train(RunConfig(model=model, data=data, train=loop), folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("anatomy") / "run")


# What is read


def test_norms_and_embedding_of_our_vit_are_those_of_the_report():
    model, images = make("aft_full").float(), pictures_of(n=40).float()
    seen = read(our_vit("ours", model), images)
    want = token_norms(model, images)
    torch.testing.assert_close(seen.norms.patches, want.patches, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen.norms.prefix, want.prefix, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen.similarity, neighbour_similarity(model, images), rtol=1e-5, atol=1e-5)
    assert seen.features.keys.shape == (32, 6, 8)
    assert read(our_vit("ours", model), images, 35).features.keys.shape == (35, 6, 8)
    with torch.no_grad():
        tokens = model.forward_features(images)
    torch.testing.assert_close(torch.cat([seen.prefix, seen.patches], 1), tokens)


def test_tokens_of_timm_and_transformers_are_their_own():
    images = torch.randn(3, 3, 16, 16)
    model = of_timm(reg_tokens=2)
    subject = their_vit("timm", model, HALF, HALF, [])
    seen = read(subject, images)
    assert subject.prefix == ("[CLS]", "register 1", "register 2")
    with torch.no_grad():
        tokens, layers = model.forward_intermediates(images, norm=False, output_fmt="NLC", return_prefix_tokens=True)
        projected = model.blocks[-1].attn.qkv(model.blocks[-1].norm1(layers_before(model, images)))
    torch.testing.assert_close(seen.norms.patches[1].flatten(1), layers[0][0].norm(dim=-1).double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(seen.norms.prefix[2], layers[1][1].norm(dim=-1).double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(seen.patches, tokens[:, 3:])
    for found, part in zip(seen.features, projected.chunk(3, -1), strict=True):
        torch.testing.assert_close(found, part[:, 3:])
    model = of_transformers()
    subject = their_vit("dinov2", model, HALF, HALF, [])
    seen = read(subject, images)
    assert subject.prefix == ("[CLS]", "register 1", "register 2")
    with torch.no_grad():
        given = model(images, output_hidden_states=True)
    want = torch.stack(given.hidden_states).norm(dim=-1).double()
    torch.testing.assert_close(seen.norms.patches.flatten(2), want[:, :, 3:], rtol=1e-5, atol=0)
    torch.testing.assert_close(seen.prefix, given.last_hidden_state[:, :3])


def layers_before(model, images):
    """What the last block of a timm ViT reads."""
    seen = []
    hook = model.blocks[-1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(images)
    hook.remove()
    return seen[0]


def test_attention_of_timm_and_transformers_is_their_own():
    images = torch.randn(2, 3, 16, 16)
    model = of_timm(qk_norm=True)
    model.blocks[-1].attn.fused_attn = False
    seen = []
    model.blocks[-1].attn.attn_drop.register_forward_hook(lambda _, args, y: seen.append(y))
    weights, how = their_vit("timm", model, HALF, HALF, []).attention(images)
    torch.testing.assert_close(weights, seen[0].mean(1).double(), rtol=1e-5, atol=1e-6)
    model = of_transformers(registers=False)
    weights, how = their_vit("vit", model, HALF, HALF, []).attention(images)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        want = model(images, output_attentions=True).attentions[-1].mean(1).double()
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-6)
    assert how == "softmax"


@pytest.mark.parametrize(
    ("name", "how", "has"),
    [
        ("attention", "values", ("queries", "keys", "values")),
        ("hydra", "values", ("queries", "keys", "values")),
        ("aft_conv", "values", ("queries", "keys", "values")),
        ("external", "jacobian", ()),
        ("fourier", "jacobian", ()),
    ],
)
def test_mixers_of_ours_have_weights_and_the_features_they_make(name, how, has):
    pool = "mean" if name == "aft_conv" else "class"
    model, images = make(name, pool=pool, registers=0 if name == "aft_conv" else 1), pictures_of()
    subject = our_vit(name, model)
    weights, found = subject.attention(images)
    tokens = len(subject.prefix) + 6
    assert weights.shape == (3, tokens, tokens)
    assert found == how
    assert bool((weights >= 0).all())
    with torch.no_grad():
        _, features = subject.run(images)
    assert tuple(key for key, value in features._asdict().items() if value is not None) == has
    if name == "attention":
        layer = look_into(model, images)[-1]
        torch.testing.assert_close(weights, attention_weights(layer.mixer, layer.x).mean(1), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(features.keys, layer.mixer.k_proj(layer.x).detach())


# Outliers


def norms_of(values):
    patches = torch.tensor(values, dtype=torch.float64).view(1, 1, -1, 4)
    return Norms(patches.repeat(2, 1, 1, 1), torch.zeros(2, 1, 0))


def test_outliers_are_those_above_the_fence_the_cutoff_or_the_top():
    norms = norms_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 100])
    found = outliers.find_outliers(norms)
    assert found.cutoff == pytest.approx(12.25 + 3 * 7.5)  # quartiles 4.75 and 12.25
    assert found.mask.nonzero().tolist() == [[0, 3, 3]]
    assert found.share == 1 / 16
    assert outliers.find_outliers(norms, cutoff=14).mask.sum() == 2
    assert outliers.find_outliers(norms, cutoff=100).mask.sum() == 0  # above, not at
    top = outliers.find_outliers(norms, top=25)
    assert top.mask.sum() == 4
    assert top.by_layer.tolist() == [0.25, 0.25]
    for wrong in ({"cutoff": 1, "top": 2}, {"cutoff": -1}, {"cutoff": math.nan}, {"top": 0}, {"top": 50}):
        with pytest.raises(MixerError, match="--cutoff|--top"):
            outliers.find_outliers(norms, **wrong)


def test_redundancy_is_the_mean_cosine_with_four_neighbours():
    x, mask = torch.randn(2, 5, 3, 4), torch.rand(2, 3, 4) < 0.3
    found, want = outliers.redundancy(patch_similarity(x), mask), torch.zeros(2, 3, 4)
    for b, i, j in torch.ones(2, 3, 4).nonzero().tolist():
        near = [(i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)]
        near = [(a, c) for a, c in near if 0 <= a < 3 and 0 <= c < 4]
        cosines = [torch.cosine_similarity(x[b, :, i, j], x[b, :, a, c], dim=0) for a, c in near]
        want[b, i, j] = sum(cosines) / len(cosines)
    torch.testing.assert_close(found.similarity.float(), want, rtol=1e-5, atol=1e-6)
    assert found.outliers == pytest.approx(float(want[mask].mean()), rel=1e-5)
    assert found.others == pytest.approx(float(want[~mask].mean()), rel=1e-5)
    assert outliers.redundancy(found.similarity, torch.zeros_like(mask)).outliers is None


# Probes


def test_ridge_is_that_of_scikit_learn():
    from sklearn.linear_model import Ridge

    x, y = torch.randn(4500, 6).double() * torch.tensor([1, 2, 3, 4, 5, 0.0]) + 3, torch.randn(4500, 2).double()
    standard = ((x - x.mean(0)) / x.std(0, correction=0))[:, :5].numpy()
    want = Ridge(alpha=0.5 * 4500).fit(standard, y.numpy()).predict(standard)
    torch.testing.assert_close(probes.ridge(x, y, 0.5)(x), torch.from_numpy(want))


def test_positions_and_pixels_that_tokens_hold_are_found_and_others_not():
    grid, n = (3, 4), 20
    held = torch.eye(12).expand(n, 12, 12) + 0.01 * torch.randn(n, 12, 12)
    right, distance = probes.position_probe(held[:10], held[10:], grid)
    assert right.mean() == 1
    assert distance.max() == 0
    moved = held[10:].roll(1, 1)  # tokens of the patch to the left, or of the end of the row above
    right, distance = probes.position_probe(held[:10], moved, grid)
    assert right.mean() == 0
    assert distance[:12].tolist() == pytest.approx([math.hypot(2, 3), 1, 1, 1, *[math.hypot(1, 3), 1, 1, 1] * 2])
    pixels = torch.randn(n, 12, 5)
    tokens = pixels @ torch.randn(5, 7) + torch.randn(7)
    error, plain = probes.pixel_probe(tokens[:10], pixels[:10], tokens[10:], pixels[10:])
    assert error.mean() < 0.02 * plain.mean()
    mean = pixels[:10].mean((0, 1))
    torch.testing.assert_close(plain, (pixels[10:] - mean).norm(dim=-1).flatten().double(), rtol=1e-5, atol=1e-6)


def test_probes_tell_outliers_from_others():
    """Half of the columns hold their position, those marked as outliers hold nothing."""
    n, grid = 40, (2, 4)
    mask = torch.zeros(n, 8, dtype=torch.bool)
    mask[:, ::2] = True
    tokens = torch.where(mask[..., None], 0.3 * torch.randn(n, 8, 8), torch.eye(8))
    found = probes.probe_tokens(tokens, tokens[..., :3], mask, grid)
    assert found.position.others == 1
    assert found.position.outliers < 0.8
    assert found.distance.others == 0 < found.distance.outliers
    assert found.chance == 1 / 8
    assert "8" in probes.probe_tokens(tokens[:7], tokens[:7], mask[:7], grid)


def test_patches_of_pixels_lie_in_the_order_of_tokens():
    images = torch.arange(2 * 1 * 4 * 6.0).view(2, 1, 4, 6)
    cut = probes.patch_pixels(images, (2, 3))
    assert cut.shape == (2, 4, 6)
    assert cut[1, 3].tolist() == images[1, 0, 2:, 3:].flatten().tolist()


def test_a_random_token_is_one_that_is_marked():
    mask = torch.rand(200, 9) < 0.3
    mask[:, 4] = True
    tokens = torch.arange(9.0)[None, :, None].expand(200, 9, 1)
    drawn = probes.random_tokens(tokens, mask, seed=1)[:, 0].long()
    assert bool(mask[torch.arange(200), drawn].all())
    assert len(drawn.unique()) == 9
    assert not torch.equal(drawn, probes.random_tokens(tokens, mask, seed=2)[:, 0].long())


def test_the_class_is_found_in_the_tokens_that_hold_it():
    labels = torch.arange(90) % 3
    mask = torch.zeros(90, 6, dtype=torch.bool)
    mask[torch.arange(80), torch.arange(80) % 6] = True  # the last ten images have no outlier
    patches = torch.randn(90, 6, 4)
    patches[mask] = torch.eye(4)[labels[:80]]
    prefix = torch.randn(90, 2, 4)
    prefix[:, 0, :3] += 20 * torch.eye(3)[labels]
    found = probes.class_probe(patches, prefix, ("[CLS]", "register 1"), mask, labels)
    assert found.fitted + found.scored == 80
    assert found.accuracy["one outlier"] == found.accuracy["[CLS]"] == 1
    assert found.accuracy["one other patch"] < 0.6
    assert found.accuracy["register 1"] < 0.6
    alone = probes.class_probe(patches, prefix, ("[CLS]", "register 1"), torch.zeros_like(mask), labels)
    assert "one outlier" not in alone.accuracy
    assert alone.fitted + alone.scored == 90
    assert "labels" in probes.class_probe(patches, prefix, ("a", "b"), mask, None)
    assert "too few" in probes.class_probe(patches[:9], prefix[:9], ("a", "b"), mask[:9], labels[:9])


def test_the_class_is_found_at_the_depth_that_holds_it():
    labels = torch.arange(60) % 3
    noise, held = torch.randn(60, 4), torch.eye(4)[labels] + 0.01 * torch.randn(60, 4)
    constant = torch.ones(60, 4)
    pooled = {"[CLS]": torch.stack([constant, noise, held]), "mean of all patches": torch.stack([noise, held, held])}
    found = probes.depth_probe(pooled, labels)
    assert (found.fitted, found.scored) == (30, 30)
    for by in (found.linear, found.nearest):
        first, middle, last = by["[CLS]"]
        assert max(first, middle) < 0.7 < last == 1
        assert by["mean of all patches"][1:] == [1, 1]
    assert probes.depth_probe(pooled, None) == "the images have no labels; give a labelled set"
    assert "too few" in probes.depth_probe({"[CLS]": held[None, :8]}, labels[:8])


def test_nearest_neighbours_vote_with_the_exponential_of_their_cosine():
    angles = torch.tensor([0.0, 0.02, 0.04, 0.3, 2.0])
    fit, labels = torch.stack([angles.cos(), angles.sin()], 1) * 5, torch.tensor([0, 1, 1, 0, 2])
    asked = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 2.0]])
    assert probes.nearest(fit, labels, asked, torch.tensor([1, 0, 2])) == pytest.approx(2 / 3)
    many = torch.cat([fit[1:2], fit[4:].expand(30, 2)]), torch.tensor([1] + [2] * 30)
    assert probes.nearest(*many, asked[:1], torch.tensor([1])) == 1  # the weight decides, not the number
    assert probes.nearest(*many, torch.tensor([[0.0, 1.0]]), torch.tensor([2])) == 1


def test_masks_are_found_in_tokens_that_hold_the_classes_of_their_pixels():
    torch.manual_seed(0)
    masks = torch.randint(0, 3, (20, 2, 3)).repeat_interleave(4, 1).repeat_interleave(4, 2)
    held = torch.nn.functional.one_hot(masks[:, ::4, ::4].flatten(1), 3).float() @ torch.randn(3, 5)
    parts = masks[:10], held[10:], masks[10:]
    found = probes.segmentation_probe(held[:10], *parts, (2, 3), 3)
    mixed = probes.segmentation_probe(held[:10].flip(0), *parts, (2, 3), 3)
    assert mixed < 0.4 < 0.6 < found  # borders are smoothed by the interpolation
    sharp = masks[:, ::4, ::4]
    assert probes.segmentation_probe(held[:10], sharp[:10], held[10:], sharp[10:], (2, 3), 3) == 1


# Maps and objects


def test_smoothness_is_morans_i():
    maps = torch.rand(3, 4, 5)
    want = []
    for each in maps:
        d, total, pairs = each - each.mean(), 0.0, 0
        for i, j in torch.ones(4, 5).nonzero().tolist():
            for a, c in ((i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)):
                if 0 <= a < 4 and 0 <= c < 5:
                    total, pairs = total + float(d[i, j] * d[a, c]), pairs + 1
        want.append(20 / pairs * total / float(d.square().sum()))
    assert looks.smoothness(maps).tolist() == pytest.approx(want, rel=1e-5)
    y, x = torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij")
    ramp, board, flat = (x + y).double(), ((x + y) % 2).double(), torch.full((6, 6), 0.1)
    found = looks.smoothness(torch.stack([ramp, board, flat.double()]))
    assert found[0] > 0.7
    assert found[1] == pytest.approx(-1)
    assert bool(found[2].isnan())


def test_looks_are_rows_of_the_weights_over_the_patches():
    weights = torch.rand(2, 7, 7)
    mask = torch.zeros(2, 2, 3, dtype=torch.bool)
    mask[1, 0, 2] = True
    norms = torch.zeros(2, 2, 3)
    norms[:, 1, 1] = 5
    first, largest, mean = looks.token_looks(weights, ["[CLS]"], (2, 3), mask, norms)
    row = weights[:, 0, 1:] / weights[:, 0, 1:].sum(1, keepdim=True)
    torch.testing.assert_close(first.maps, row.view(2, 2, 3).double(), rtol=1e-5, atol=1e-6)
    assert first.on_outliers == pytest.approx(float(row[1, 2]), rel=1e-5)  # of the image that has an outlier
    patch = weights[:, 1 + 4, 1:] / weights[:, 1 + 4, 1:].sum(1, keepdim=True)
    torch.testing.assert_close(largest.maps, patch.view(2, 2, 3).double(), rtol=1e-5, atol=1e-6)
    assert [each.name for each in (first, largest, mean)] == [
        "[CLS]",
        "patch of the largest norm",
        "mean of all patches",
    ]
    assert looks.token_looks(weights, ["[CLS]"], (2, 3), torch.zeros_like(mask), norms)[0].on_outliers is None


def by_hand(features, grid, k, shift):
    """LOST with loops, as its paper lists the steps."""
    n = len(features)
    a = [[float(features[p] @ features[q]) + shift for q in range(n)] for p in range(n)]
    degree = [sum(a[p][q] >= 0 for q in range(n)) for p in range(n)]
    order = sorted(range(n), key=lambda p: (degree[p], p))
    seed = order[0]
    seeds = [q for q in order[:k] if a[seed][q] >= 0 or q == seed]
    alike = {q for q in range(n) if sum(a[q][s] for s in seeds) >= 0} | {seed}
    found, edge = {seed}, [seed]
    while edge:
        i, j = divmod(edge.pop(), grid[1])
        for y, x in ((i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)):
            q = y * grid[1] + x
            if 0 <= y < grid[0] and 0 <= x < grid[1] and q in alike and q not in found:
                found.add(q)
                edge.append(q)
    return seed, found


@pytest.mark.parametrize(("k", "shift"), [(None, 0.0), (3, 0.0), (30, -0.5), (8, 1.0)])
def test_lost_is_its_steps_by_hand(k, shift):
    grid = (5, 6)
    for _ in range(8):
        features = torch.randn(30, 4, dtype=torch.float64)
        found = lost.discover(features, grid, k=k, shift=shift)
        seed, patches = by_hand(features, grid, 8 if k is None else k, shift)  # 30 / 4, rounded
        assert found.seed == divmod(seed, 6)
        assert set(found.mask.flatten().nonzero()[:, 0].tolist()) == patches
        rows, columns = zip(*(divmod(p, 6) for p in patches), strict=True)
        assert found.box == (min(rows), min(columns), max(rows) + 1, max(columns) + 1)


def test_lost_finds_a_planted_object_and_not_the_one_beside_it():
    grid = (8, 8)
    features = torch.zeros(8, 8, 3)
    features[..., 0] = 1.0  # background
    features[2:5, 3:6] = torch.tensor([-1.0, 1.0, 0.0])
    features[7, 7] = torch.tensor([-1.0, 1.0, 0.0])  # alike, but not connected
    found = lost.discover(features.flatten(0, 1), grid)
    assert found.box == (2, 3, 5, 6)
    assert int(found.mask.sum()) == 9
    with pytest.raises(MixerError, match="expects 64 features"):
        lost.discover(torch.zeros(3, 2), grid)
    with pytest.raises(MixerError, match="k must be"):
        lost.discover(torch.zeros(64, 2), grid, k=0)


def test_corloc_counts_boxes_that_overlap_a_true_one_by_more_than_half():
    assert lost.overlap((0, 0, 4, 4), (2, 2, 6, 6)) == 4 / 28
    assert lost.overlap((0, 0, 2, 2), (2, 0, 4, 2)) == lost.overlap((0, 0, 1, 1), (3, 3, 4, 4)) == 0
    boxes = [(0, 0, 4, 4)] * 4
    true = [[(0, 0, 4, 3)], [(0, 0, 2, 4)], [(9, 9, 10, 10), (0, 0, 4, 4)], []]  # 3 / 4, 1 / 2, 1, none
    assert lost.corloc(boxes, true) == 0.5
    with pytest.raises(MixerError, match="true boxes for each of 4 images, got 1"):
        lost.corloc(boxes, true[:1])


# The whole


def test_planted_outliers_show_in_all_measures_and_on_the_page(tmp_path):
    """A hook adds a large vector, the same everywhere, to one patch of each image in the last layer."""
    torch.manual_seed(0)
    model = of_timm(reg_tokens=1)
    there = torch.arange(40) % 16
    pixels = torch.randn(40, 3, 16, 16)
    pixels[:, 0, 0, 0] = there.float()  # tells the hook where

    def plant(_, args, y):
        y = y.clone()
        y[torch.arange(len(y)), 2 + seen[-1]] = 80.0 * torch.nn.functional.one_hot(torch.tensor(0), 16)
        return y

    seen = []
    model.patch_embed.register_forward_pre_hook(lambda _, args: seen.append(args[0][:, 0, 0, 0].long()))
    model.blocks[-1].register_forward_hook(plant)
    images = Images(pixels, [f"image {i}" for i in range(40)], torch.arange(40) % 2, "noise")
    found = dissect(their_vit("planted", model, HALF, HALF, []), images, cutoff=60.0)
    assert found.outliers.mask.flatten(1).nonzero()[:, 1].tolist() == there.tolist()
    assert found.outliers.by_layer.tolist() == [0, 0, 1 / 16]
    assert found.probes.position.outliers < found.probes.position.others
    assert set(found.classified.accuracy) == {
        "mean of all patches", "[CLS]", "register 1", "one outlier", "one other patch"
    }  # fmt: skip
    page = write_page(found, tmp_path / "page.html").read_text()
    assert "40 of 640 patches (6.25 %) are outliers" in page
    assert "http" not in page.replace("http-equiv", "")
    assert len(re.findall(r'<img src="data:image/png;base64,', page)) == 7
    assert "6.25 %" in summary(found)
    numbers = json.loads(json.dumps(found.to_json()))
    assert numbers["outliers"] == 1 / 16
    assert len(numbers["objects"]["boxes"]) == 6


def test_norms_of_a_run_are_read_at_every_checkpoint(run, tmp_path, capsys):
    folder = tiny(tmp_path / "run", every=2)
    subject = open_subject(str(folder))
    pixels = load_images(["digits"], subject, limit=40).pixels
    found = outliers.norms_by_step(subject, pixels)
    assert list(found) == [2, 4]
    norms = read(subject, pixels).norms.patches.flatten(1)
    assert found[4].largest == norms.amax(1).tolist()
    assert found[4].median == norms.median(1).values.tolist()
    assert found[4].outliers == outliers.find_outliers(read(subject, pixels).norms).share
    assert found[2] != found[4]
    assert outliers.norms_by_step(open_subject(str(run)), pixels) == {}
    assert cli.main(["look", "tokens", str(folder), "digits", "--limit", "40", "--out", str(tmp_path / "a.html")]) == 0
    assert "Norms by step of training" in capsys.readouterr().out
    assert "Norms by step of training" in (tmp_path / "a.html").read_text()


def test_a_run_and_folders_of_other_libraries_are_dissected_from_the_command_line(run, tmp_path, capsys):
    assert (
        cli.main(["look", "tokens", str(run), "digits", "--out", str(tmp_path / "a.html"), "--json", "--limit", "60"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "a ViT of tokenmix with aft_conv"
    assert found["tokens_before_patches"] == ["register 1"]
    assert found["objects"]["features"] == "keys"
    assert found["classified"]["scored"] == found["by_depth"]["scored"] == 30
    assert [len(found["by_depth"]["nearest"][kind]) for kind in ("mean of registers", "mean of all patches")] == [3, 3]
    assert found["by_step"] == {}  # one checkpoint
    of_transformers().save_pretrained(tmp_path / "hf")
    files = []
    for i in range(3):
        pixels = numpy.random.default_rng(i).integers(0, 255, (20 + i, 30, 3), numpy.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
        files.append(str(tmp_path / f"{i}.png"))
    asked = ["look", "tokens", str(tmp_path / "hf"), *files, "--out", str(tmp_path / "b.html"), "--top", "10"]
    assert cli.main([*asked, "--image-size", "24", "--features", "values"]) == 0
    said = capsys.readouterr().out
    assert "0.5 is assumed for both" in said
    assert "6 x 6 patches" in said
    assert "11 of 108 patches" in said
    assert "3 images are too few" in said
    assert "no labels" in said
    asked[1] = "timm:vit_tiny_patch16_224"
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=0)
    timm.models.save_for_hf(model, tmp_path / "timm", model_args={"img_size": 32, "depth": 1, "num_classes": 0})
    subject = open_subject(str(tmp_path / "timm"))
    assert subject.grid == (2, 2)
    assert subject.prefix == ("[CLS]",)
    assert subject.mean == HALF
    weights = model.state_dict()["blocks.0.attn.qkv.weight"]
    assert torch.equal(subject.model.state_dict()["blocks.0.attn.qkv.weight"], weights)
    assert load_images([str(tmp_path)], subject, limit=2).pixels.shape == (2, 3, 32, 32)


def test_what_cannot_be_read_is_refused_in_one_line(run, tmp_path):
    subject = open_subject(str(run))
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"a": 1}')
    ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])).save_pretrained(tmp_path / "resnet")
    of_transformers(registers=False).save_pretrained(tmp_path / "vit")
    text = tmp_path / "text.txt"
    text.write_bytes(b"To be or not to be. " * 400)
    lm = LMConfig(dim=8, max_len=16, mixers=({"name": "aft_simple"},))
    tiny(tmp_path / "lm", model=lm, data=DataConfig(source=str(text), seq_len=16))
    vit = open_subject(str(tmp_path / "vit"))
    pixels = torch.zeros(2, 1, 8, 8)
    named = Images(pixels, ["a", "b"], None, "zeros")
    timm_name = "timm:vit_tiny_patch16_224"
    refused = {
        "there is no folder 'nowhere'": lambda: open_subject("nowhere"),
        "holds no config.json": lambda: open_subject(str(tmp_path / "empty")),
        "no model that is known": lambda: open_subject(str(tmp_path / "odd")),
        "a model of kind 'lm', not a ViT": lambda: open_subject(str(tmp_path / "lm")),
        "ResNetModel is not a supported Vision Transformer": lambda: open_subject(str(tmp_path / "resnet")),
        "ResNet is not a supported Vision Transformer": lambda: open_subject("timm:resnet18", weights="random"),
        "has no such model": lambda: open_subject("timm:nothing", weights="random"),
        "--weights is for timm:NAME": lambda: open_subject(str(run), weights="random"),
        "there is no such file": lambda: open_subject(timm_name, weights="nowhere.pth"),
        "timm cannot load": lambda: open_subject(timm_name, weights=str(text)),
        "multiple of the patch, 2 pixels, got 9": lambda: open_subject(str(run), image_size=9),
        "parameters per position, for images of 8 x 8": lambda: open_subject(str(run), image_size=16),
        "give images": lambda: load_images([], subject),
        "contains no images": lambda: load_images([str(tmp_path / "empty")], subject),
        "there are no images at 'nothing'": lambda: load_images(["nothing"], subject),
        "--limit must be at least 1": lambda: load_images(["digits"], subject, limit=0),
        "is not an image": lambda: load_images([str(text), str(text)], subject),
        r"expects images \(B, 1, 8, 8\)": lambda: read(subject, torch.zeros(0, 1, 8, 8)),
        "1 channels and 8 x 8 pixels, got 1 channels and 8 x 6": lambda: read(subject, torch.zeros(2, 1, 8, 6)),
        "cannot read images of 32 x 32": lambda: read(replace(vit, image_size=(32, 32)), torch.zeros(1, 3, 32, 32)),
        "--features is one of": lambda: dissect(subject, named, features="logits"),
        "--shown must be": lambda: dissect(subject, named, shown=0),
        "has no keys for each token; it has tokens": lambda: dissect(
            our_vit("external", make("external").float()),
            Images(torch.zeros(2, 1, 8, 12), ["a", "b"], None, "zeros"),
            features="keys",
        ),
        "not finite": lambda: read(subject, torch.full((1, 1, 8, 8), math.nan)),
    }
    for message, call in refused.items():
        with pytest.raises(MixerError, match=message) as why:
            call()
        assert "\n" not in str(why.value), message
    assert cli.main(["look", "tokens", str(run)]) == 2
    assert cli.main(["look", "tokens", str(run), "digits", "--out", str(tmp_path / "no" / "a.html")]) == 2


def test_the_table_of_the_page_is_what_was_measured():
    found = json.loads(vit_anatomy.RECORD.read_text())
    assert vit_anatomy.table(found) in (vit_anatomy.RECORD.parents[2] / "docs" / "anatomy.md").read_text()
