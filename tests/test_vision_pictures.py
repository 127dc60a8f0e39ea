"""Pictures of vision models: their numbers against computations by hand, and every picture decodes."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch

from page_checks import PNG, _undecodable
from tokenmix import MixerError
from tokenmix.lab.report import image_pictures, maps
from tokenmix.lab.report.attribution import focus, slot_reads, slot_similarity
from tokenmix.lab.report.biases import bias_pictures, filters
from tokenmix.lab.report.image_grid import as_shown, image_grid
from tokenmix.lab.report.norms import neighbour_similarity, outlier_cutoff, share_above, token_norms
from tokenmix.lab.report.pictures import effective_attention
from tokenmix.lab.report.runs import load_model, read_run
from tokenmix.lab.report.vision import draw_pictures, load_image, vision_section
from tokenmix.mixers import CORE, MIXERS
from tokenmix.models import LMConfig, ViTConfig, build_model

OPTIONS = {
    "attention": {"heads": 2},
    "aft_full": {"rank": 3},
    "aft_local": {"window": 4, "rank": None},
    "aft_conv": {"heads": 4, "kernel_size": 3},
    "external": {"slots": 5},
    "external_multihead": {"heads": 2, "slots": 3},
}
GRID = (2, 3)


def make(name, layers=2, pool="class", registers=1, **options):
    spec = {"name": name, **OPTIONS.get(name, {}), **options}
    config = ViTConfig(
        dim=8,
        layers=layers,
        mixers=(spec,),
        image_size=(8, 12),
        patch=4,
        channels=1,
        classes=5,
        mlp_ratio=2,
        pool=pool,
        registers=registers,
    )
    torch.manual_seed(2)
    model = build_model(config).double().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.6)
    return model


def pictures_of(size=(8, 12), n=3):
    torch.manual_seed(5)
    return torch.randn(n, 1, *size, dtype=torch.float64)


def check(pictures):
    assert pictures
    for picture in pictures:
        assert picture.alt
        assert "nan" not in picture.caption.lower()
        for data in (picture.light, picture.dark):
            assert data.startswith(PNG)
            assert _undecodable(data[len(PNG) :]) is None
        assert picture.light != picture.dark


def test_relative_sums_are_sums_over_pairs():
    weights = torch.rand(2, 3, 6, 6, dtype=torch.float64)
    sums, counts = maps.relative_sums(weights, GRID)
    want, number = torch.zeros(3, 3, 5, dtype=torch.float64), torch.zeros(3, 5, dtype=torch.long)
    cells = list(product(range(2), range(3)))
    for (t, (y, x)), (s, (v, u)), b in product(enumerate(cells), enumerate(cells), range(2)):
        want[:, v - y + 1, u - x + 2] += weights[b, :, t, s]
        number[v - y + 1, u - x + 2] += 1
    torch.testing.assert_close(sums, want)
    assert torch.equal(counts, number)
    assert counts[1, 2] == 2 * 6


def test_average_relative_attention_drops_what_is_no_patch_and_counts_images(monkeypatch):
    model, images = make("attention", layers=3), pictures_of()
    monkeypatch.setattr(maps, "CHUNK", 2)
    found = maps.average_relative_attention(model, images)
    assert found.means.shape == (3, 2, 3, 5)
    assert found.layers == [0, 1, 2]
    layer = maps.look_into(model, images)[1]
    weights = torch.stack([effective_attention(layer.mixer, x[None]).weights for x in layer.x])[:, :, 2:, 2:]
    torch.testing.assert_close(found.means[1, :, 1, 2], weights.diagonal(dim1=2, dim2=3).mean((0, 2)))
    torch.testing.assert_close(found.means[1, :, 2, 4], weights[:, :, 0, 5].mean(0))
    torch.testing.assert_close(found.means[1, :, 1, 0], (weights[:, :, 2, 0] + weights[:, :, 5, 3]).mean(0) / 2)
    assert int(found.counts.sum()) == 3 * 36
    with pytest.raises(MixerError, match=r"no layer is softmax attention \(AFTSimple\)"):
        maps.average_relative_attention(make("aft_simple"), images)
    with pytest.raises(MixerError, match="at least one image"):
        maps.average_relative_attention(model, images[:0])


@pytest.mark.parametrize("options", [{}, {"heads": 4, "kv_heads": 2, "scale": 0.7}])
def test_attention_weights_are_those_of_the_mixer(options):
    mixer = make("attention", **options).blocks[0].mixer
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    weights = maps.attention_weights(mixer, x)
    values = (
        mixer.v_proj(x)
        .unflatten(-1, (mixer.kv_heads, -1))
        .transpose(1, 2)
        .repeat_interleave(mixer.heads // mixer.kv_heads, 1)
    )
    torch.testing.assert_close(mixer.out_proj((weights @ values).transpose(1, 2).flatten(2)), mixer(x))


def test_layers_are_seen_without_dropout_and_the_mode_comes_back():
    model = make("aft_conv").train()
    model.dropout.p = 0.5
    a, b = (maps.look_into(model, pictures_of())[1] for _ in range(2))
    assert torch.equal(a.x, b.x)
    assert a.given == {"grid": GRID, "prefix": 2}
    assert model.training
    assert not model.blocks[0].mixer._forward_pre_hooks


def test_keys_lie_on_the_patches():
    model, images = make("aft_conv"), pictures_of()
    found, layer = maps.key_maps(model, images), maps.look_into(model, images)[1]
    assert found[1].shape == (3, 4, *GRID)
    torch.testing.assert_close(found[1][2, 3, 1, 0], layer.mixer.k_proj(layer.x)[2, 2 + 3, 3])
    norms, layer = maps.key_maps(make("attention"), images)[0], maps.look_into(make("attention"), images)[0]
    torch.testing.assert_close(norms[0, 1, 0, 2], layer.mixer.k_proj(layer.x)[0, 2 + 2, 4:].norm())
    assert maps.key_maps(make("aft_simple"), images)[0].shape[1] == 8
    with pytest.raises(MixerError, match=r"no layer projects a key .*External"):
        maps.key_maps(make("external"), images)


def test_pair_biases_around_a_query():
    mixer = make("aft_full").blocks[0].mixer
    w = mixer.bias.u @ mixer.bias.v.T
    torch.testing.assert_close(maps.bias_around(mixer, GRID, 2, 4), torch.expm1(w[2 + 4, 2:].detach()).view(GRID))
    local = make("aft_local", window=2).blocks[0].mixer
    found = maps.bias_around(local, GRID, 2, 3)
    assert (found == 0).flatten().tolist() == [True, True, False, False, False, True]
    torch.testing.assert_close(found[1, 1], torch.expm1(local.bias.weight[5, 6].detach()))
    none = maps.bias_around(make("aft_local", window=2, outside="none").blocks[0].mixer, GRID, 2, 0)
    assert none.isnan().flatten().tolist() == [False, False, True, True, True, True]
    for arguments, why in (
        ((mixer, GRID, 2, 6), "query must be a patch 0..5"),
        ((mixer, (3, 3), 2, 0), "biases for 8 tokens"),
    ):
        with pytest.raises(MixerError, match=why):
            maps.bias_around(*arguments)
    with pytest.raises(MixerError, match="AFTSimple has no bias"):
        maps.bias_around(make("aft_simple").blocks[0].mixer, GRID, 2, 0)


def test_sparsity_of_known_filters():
    one, flat, zero = torch.zeros(3, 3), torch.full((3, 3), -0.5), torch.zeros(3, 3)
    one[0, 2] = 4.0
    hoyer, gini, entropy = maps.sparsity(torch.stack([one, flat, zero]))
    torch.testing.assert_close(hoyer, torch.tensor([1.0, 0, 0], dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(gini, torch.tensor([8 / 9, 0, 0], dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(entropy, torch.tensor([0.0, 1, 1], dtype=torch.float64), atol=1e-12, rtol=0)
    measured = maps.sparsity(torch.tensor([[3.0, 0.0, -4.0, 0.0]]))
    assert [round(float(m), 6) for m in measured] == [
        round((2 - 7 / 5) / 1, 6),
        round((1 * 3 + 3 * 4) / (4 * 7), 6),
        0.492614,
    ]
    with pytest.raises(MixerError, match="one tap"):
        maps.sparsity(torch.ones(2, 1))


@pytest.mark.parametrize(
    ("name", "pool"),
    [
        ("attention", "class"),
        ("hydra", "class"),
        ("hydra", "mean"),
        ("aft_full", "class"),
        ("aft_conv", "mean"),
        ("linear", "class"),
    ],
)
def test_focus_is_what_a_token_s_value_adds(name, pool):
    """The derivative of the logit with regard to a factor on one token's value, by finite differences."""
    model, images = make(name, pool=pool), pictures_of(n=2)
    found = focus(model, images)
    scores = torch.cat([found.prefix, found.patches.flatten(1)], 1)
    logits = model(images)
    assert torch.equal(found.classes, logits.argmax(1))
    value, step = model.blocks[-1].mixer.v_proj, 1e-5
    for t in (0, 1, 3, found.prefix.shape[1] + 5):
        shifted = []
        for sign in (1, -1):
            hook = value.register_forward_hook(
                lambda m, a, y, t=t, sign=sign: torch.cat(
                    [y[:, :t], y[:, t : t + 1] * (1 + sign * step), y[:, t + 1 :]], 1
                )
            )
            shifted.append(model(images).gather(1, found.classes[:, None])[:, 0])
            hook.remove()
        torch.testing.assert_close(
            scores[:, t], ((shifted[0] - shifted[1]) / (2 * step)).detach(), rtol=1e-5, atol=1e-8
        )


def test_focus_of_hydra_is_the_papers_formula():
    model, images = make("hydra", layers=1, registers=0), pictures_of(n=2)
    classes = torch.tensor([3, 0])
    layer = maps.look_into(model, images)[0]
    q, k, v = (p(layer.x) for p in (layer.mixer.q_proj, layer.mixer.k_proj, layer.mixer.v_proj))
    unit = [p / p.norm(dim=-1, keepdim=True) for p in (q, k)]
    y = (unit[0][:, 0] * (unit[1] * v).sum(1)).detach().requires_grad_()
    x = model.embed(images)[0][:, 0] + layer.mixer.out_proj(y)
    logits = model.head(model.norm(x + model.blocks[0].mlp(model.blocks[0].mlp_norm(x))))
    (g,) = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), y)
    contribution = unit[0][:, :1] * unit[1] * v
    found = focus(model, images, classes)
    torch.testing.assert_close(
        torch.cat([found.prefix, found.patches.flatten(1)], 1), (contribution * g[:, None]).sum(-1).detach()
    )
    for wrong in (torch.tensor([5, 0]), torch.tensor([0])):
        with pytest.raises(MixerError, match=r"classes must be one of 0\.\.4"):
            focus(model, images, wrong)
    with pytest.raises(MixerError, match="one of the model's 1"):
        focus(model, images, layer=1)


@pytest.mark.parametrize("name", ["external", "fourier"])
def test_focus_refuses_what_is_no_sum_over_values(name):
    with pytest.raises(MixerError, match="focus: the output of (External|Fourier) is not a sum"):
        focus(make(name, registers=0), pictures_of())


@pytest.mark.parametrize(
    "options",
    [{"name": "external"}, {"name": "external", "norm": "slots", "tied": True}, {"name": "external_multihead"}],
)
def test_slot_weights_are_those_of_the_mixer(options):
    model, images = make(**options), pictures_of()
    mixer, x, _ = maps.look_into(model, images)[0]
    w = mixer.slot_weights(x)
    memory = mixer.memory_k if mixer.memory_v is None else mixer.memory_v
    y = (w @ memory + getattr(mixer, "memory_v_bias", 0)).flatten(2)
    torch.testing.assert_close(mixer.out_proj(y), mixer(x))
    reads = slot_reads(model, images)
    assert torch.equal(reads[0][1, 0, 2, 1, 2], w[1, 2 + 5, 0, 2])
    alike = slot_similarity(mixer)
    torch.testing.assert_close(alike[0, 1], torch.cosine_similarity(memory[0], memory[1], dim=0).detach())
    torch.testing.assert_close(alike.diagonal(), torch.ones(len(alike), dtype=torch.float64))


def test_slots_need_a_memory():
    with pytest.raises(MixerError, match=r"no layer has an external memory \(Hydra\)"):
        slot_reads(make("hydra"), pictures_of())


def test_norms_by_layer():
    model, images = make("aft_conv"), pictures_of()
    norms, feature = token_norms(model, images), model.feature_maps(images, [0, 1])
    assert norms.patches.shape == (3, 3, *GRID)
    torch.testing.assert_close(norms.patches[1:], torch.stack(feature).norm(dim=2))
    torch.testing.assert_close(
        norms.prefix[0, 0],
        torch.stack([model.class_token + model.positions[0], model.registers[0]]).norm(dim=-1).detach(),
    )
    some = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 100]).view(1, 2, 2, 2)
    assert outlier_cutoff(some) == pytest.approx(6.25 + 3 * (6.25 - 2.75))
    assert share_above(some, outlier_cutoff(some)).tolist() == [1 / 8]


def test_similarity_of_neighbours():
    model, images = make("aft_simple"), pictures_of()
    patches, found = model.patch(images), neighbour_similarity(model, images)
    for y, x in product(range(2), range(3)):
        near = [
            (y + dy, x + dx) for dy, dx in ((1, 0), (-1, 0), (0, 1), (0, -1)) if 0 <= y + dy < 2 and 0 <= x + dx < 3
        ]
        want = sum(torch.cosine_similarity(patches[:, :, y, x], patches[:, :, v, u], dim=1) for v, u in near) / len(
            near
        )
        torch.testing.assert_close(found[:, y, x], want.detach())


@pytest.mark.parametrize("name", [name for name in CORE if not MIXERS[name].facts.causal_only])
def test_every_mixer_of_the_core_is_drawn(name, monkeypatch):
    """Each number is finite, or refused in one line; each picture decodes. Norms depend on no mixer: drawn once."""
    model, images = make(name, layers=1).float(), pictures_of(n=1).float()
    assert bool(token_norms(model, images).patches.isfinite().all())
    if name != "attention":
        monkeypatch.setattr(image_pictures, "norm_pictures", lambda *_: [])
    sections = dict(vision_section(model, images, ["a very long name of an image.png"]))
    assert sections, "more than the norms that every model has"
    for pictures in sections.values():
        check(pictures)
    expected = {
        "attention": "Attention by offset",
        "aft_full": "Position biases of AFT",
        "aft_local": "Position biases of AFT",
    }
    expected |= {
        "aft_conv": "Filters of AFT-conv",
        "hydra": "Focus",
        "external": "External memories",
        "external_multihead": "External memories",
    }
    assert name not in expected or expected[name] in sections
    for ask, heading in ((focus, "Focus"), (maps.key_maps, "Keys"), (slot_reads, "External memories")):
        if heading not in sections:
            with pytest.raises(MixerError, match=ask.__name__):
                ask(model, images)


def test_filters_of_one_dimension_and_of_many_heads():
    check(image_pictures.filter_pictures(make("aft_conv", ndim=1)))
    model = make("aft_conv", heads=8, layers=1)
    (picture,) = image_pictures.filter_pictures(model)
    extra = torch.expm1(model.blocks[0].mixer.kernel())
    assert f"{float(extra.detach().min()):.3g} to {float(extra.detach().max()):.3g}" in picture.caption
    torch.testing.assert_close(filters(model.blocks[0].mixer), extra.detach())
    check(bias_pictures("run", model))
    fresh = build_model(model.config)
    assert "all exactly 0" in image_pictures.filter_pictures(fresh)[0].caption


def test_panels_share_one_scale_and_hold_what_is_not_a_number():
    small, large = torch.full((2, 2), 0.1), torch.full((2, 2), 1.0)
    large[0, 0] = torch.nan
    image = as_shown(torch.randn(2, 8, 8))
    assert image.shape == (3, 8, 8)
    assert (float(image.min()) >= 0, float(image.max()) <= 1) == (True, True)
    for options in ({}, {"about_zero": False}, {"title": "t", "marks": [(0, 1), (1, 0), (1, 1)]}):
        check(
            [
                image_grid(
                    [[small, large, None], [image, small, large]],
                    rows=["a", "b\nc"],
                    columns=["x", "y", "z"],
                    bar="w",
                    alt="alt",
                    caption="c",
                    **options,
                )
            ]
        )
    check(
        [
            image_grid(
                [[torch.zeros(3, 3)]], rows=["a"], columns=["x"], bar="w", alt="alt", caption="c", about_zero=False
            )
        ]
    )


def test_the_colours_are_those_of_the_values():
    """Equal values look alike in different panels, a positive one red, a negative one blue, a missing one clear."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    from tokenmix.lab.report.image_grid import _pixels

    colours = ScalarMappable(Normalize(-1, 1), "RdBu_r")
    found = _pixels(torch.tensor([[1.0, -1.0], [torch.nan, 0.0]]), (4, 4), colours)
    assert float(found[0, 0, 0]) > float(found[0, 0, 2])
    assert float(found[0, 2, 2]) > float(found[0, 2, 0])
    assert float(found[2, 0, 3]) == 0.0
    assert torch.equal(found[:2, :2], found[:1, :1].expand(2, 2, 4))
    assert float(found[3, 3, :3].min()) > 0.95


def test_a_section_needs_a_vit_images_and_their_names():
    model, images = make("hydra"), pictures_of()
    text = build_model(LMConfig(dim=8, max_len=8, mixers=({"name": "aft_simple"},)))
    with pytest.raises(MixerError, match="need a ViT, got LM"):
        vision_section(text, images)
    for wrong in ({"names": ["one"]}, {"images": images[:0]}):
        with pytest.raises(MixerError, match="images and a name for each"):
            vision_section(model, **{"images": images, **wrong})
    with pytest.raises(MixerError, match="expects images"):
        vision_section(model, images.expand(-1, 2, -1, -1))
    with pytest.raises(MixerError, match="no head"):
        focus(build_model(make("hydra").config, classes=0).double(), images)


def test_a_run_is_drawn_from_its_newest_weights(tmp_path):
    from safetensors.torch import save_file

    model = make("aft_conv").float()
    (tmp_path / "config.json").write_text(json.dumps({"model": model.config.to_json()}))
    with pytest.raises(MixerError, match="no checkpoint yet"):
        vision_section(read_run(tmp_path), pictures_of().float())
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    save_file(model.state_dict(), tmp_path / "checkpoints" / "step_00000001" / "model.safetensors")
    loaded = load_model(read_run(tmp_path))
    assert torch.equal(loaded(pictures_of().float()), model(pictures_of().float()))
    assert [heading for heading, _ in vision_section(read_run(tmp_path), pictures_of(n=1).float())][
        0
    ] == "Filters of AFT-conv"
    (tmp_path / "config.json").write_text(json.dumps({"model": {"kind": "poem"}}))
    with pytest.raises(MixerError, match="model of kind 'poem'"):
        load_model(read_run(tmp_path))


def photograph(path, mode="RGB", size=(30, 20)):
    """A picture whose left half is dark and whose right half is bright."""
    from PIL import Image

    image = Image.new("L", size, 0)
    image.paste(200, (size[0] // 2, 0, *size))
    if mode == "I;16":
        image = Image.frombytes("I;16", size, b"".join((v * 257).to_bytes(2, "little") for v in image.tobytes()))
    (image if mode in ("L", "I;16") else image.convert(mode)).save(path)
    return path


@pytest.mark.parametrize(
    ("mode", "suffix"), [("RGB", "png"), ("L", "png"), ("I;16", "png"), ("P", "png"), ("RGBA", "png"), ("CMYK", "jpg")]
)
def test_images_of_any_kind_are_read(tmp_path, mode, suffix):
    path = photograph(tmp_path / f"image.{suffix}", mode)
    for channels in (1, 3):
        image = load_image(path, (8, 12), channels)
        assert image.shape == (channels, 8, 12)
        torch.testing.assert_close(image[:, :, :4], torch.zeros(channels, 8, 4), atol=0.03, rtol=0)
        torch.testing.assert_close(image[:, :, 8:], torch.full((channels, 8, 4), 200 / 255), atol=0.03, rtol=0)


def test_files_become_pictures(tmp_path):
    files = [photograph(tmp_path / f"{i}.png") for i in range(2)]
    written = draw_pictures(make("attention").float(), files, tmp_path / "out", theme="dark")
    assert {"attention-by-offset.png", "focus.png", "keys-1.png", "keys-2.png", "token-norms-1.png"} <= {
        p.name for p in written
    }
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in written)
    with pytest.raises(MixerError, match="theme='blue'"):
        draw_pictures(make("attention"), files, tmp_path, theme="blue")
    with pytest.raises(MixerError, match="one number for each of 1 channels"):
        draw_pictures(make("attention"), files, tmp_path, mean=(0.5, 0.5), std=(1.0,))
    with pytest.raises(MixerError, match="images and a name"):
        draw_pictures(make("attention"), [], tmp_path)


def test_files_that_are_no_images_are_named(tmp_path):
    whole = photograph(tmp_path / "whole.png").read_bytes()
    for name, data in (("cut.png", whole[: len(whole) // 2]), ("text.png", b"no image"), ("empty.png", b"")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(MixerError, match=rf"{name} is (not an image|damaged or truncated)"):
            load_image(tmp_path / name, (8, 8))
    with pytest.raises(MixerError, match="missing.png cannot be opened"):
        load_image(tmp_path / "missing.png", (8, 8))
    with pytest.raises(MixerError, match="the model takes 2"):
        load_image(tmp_path / "whole.png", (8, 8), 2)


def test_one_hot_layers_are_drawn():
    from tokenmix.models.one_hot import to_gather

    model = to_gather(make("aft_conv").float())
    sections = dict(vision_section(model, pictures_of().float()))
    assert "Hoyer 1.00" in sections["Sparsity of the filters"][0].caption
    assert "Keys" in sections
