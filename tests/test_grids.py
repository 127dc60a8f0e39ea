"""Mixers get the grid of patches of each forward pass: as many patches may lie in other rows and columns."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import pytest
import timm
import torch
from torch import nn

from surgery_models import IMAGES, make
from tokenmix import MixerError
from tokenmix.hosts import given_grid, replace_mixers, restore
from tokenmix.hosts.timm import attention_class
from tokenmix.lab.advise.inputs import inputs_of
from tokenmix.lab.train import distill
from tokenmix.models import build_model

CONV = {"name": "aft_conv", "heads": 4, "kernel_size": 3}
SHAPES = ((2, 8), (8, 2), (4, 4), (3, 5))
DYNAMIC = {"timm": {"dynamic_img_size": True}, "timm_normed": {"dynamic_img_size": True}}
PREFIX = {"deit": 2, "ijepa": 0, "siglip_vision": 0, "dinov2_registers": 4}


def picture(rows: int, columns: int, batch: int = 1, side: int = 8) -> torch.Tensor:
    return torch.randn(batch, 3, rows * side, columns * side, generator=torch.Generator().manual_seed(0))


def host(name: str, spec: Any = CONV) -> Any:
    return replace_mixers(make(name, **DYNAMIC.get(name, {})), spec, seed=0)[0].eval()


def called(model: Any, images: torch.Tensor) -> torch.Tensor:
    if not hasattr(model, "config"):
        return model(images)
    known = {} if "dinov2" in model.config.model_type else {"interpolate_pos_encoding": True}
    return next(iter(model(pixel_values=images, **known).values()))


def grids_seen(model: nn.Module) -> list[Any]:
    """The list that the grids and prefixes of all calls of mixers of grids are added to."""
    seen: list[Any] = []
    for m in model.modules():
        if type(m).__name__ == "AFTConv":
            m.register_forward_pre_hook(lambda m, args, kw: seen.append((kw["grid"], kw["prefix"])), with_kwargs=True)
    return seen


@torch.no_grad()
@pytest.mark.parametrize("name", IMAGES)
def test_hosts_hand_on_the_grid_of_each_picture(name):
    model = host(name)
    seen = grids_seen(model)
    for shape in SHAPES:
        called(model, picture(*shape))
    assert seen == [(shape, PREFIX.get(name, 1)) for shape in SHAPES for _ in range(2)]


@torch.no_grad()
@pytest.mark.parametrize("name", ["dinov2", "timm"])
def test_copies_and_files_keep_the_way_of_the_grid(name):
    model, images = host(name), picture(2, 8)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(called(other, images), called(model, images))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in restore(host(name, "attention"))[0].modules())


@pytest.mark.parametrize("name", ["dinov2", "timm"])
def test_what_belongs_to_one_grid_refuses_another_with_as_many_patches(name):
    model = host(name, "aft_full")
    assert called(model, picture(4, 4)).isfinite().all()
    with pytest.raises(MixerError, match="aft_full has parameters per position, for 4 x 4 patches, got 2 x 8"):
        called(model, picture(2, 8))


def test_dropped_patches_are_refused_by_mixers_of_grids_and_positions():
    for spec in (CONV, "aft_full"):
        model = replace_mixers(make("timm", patch_drop_rate=0.5), spec, seed=0)[0].train()
        with pytest.raises(MixerError, match="4 x 4 patches were made, and 8 came here; .*dropping of patches"):
            model(picture(4, 4))
        assert model.eval()(picture(4, 4)).shape == (1, 5)


@torch.no_grad()
def test_layers_called_by_hand_are_given_a_grid_or_refuse():
    model = host("dinov2")
    seen, tokens = grids_seen(model), torch.randn(1, 17, 32)
    with pytest.raises(MixerError, match=r"unknown; call the whole .*given_grid\(model, grid=\(rows, columns\)\)"):
        model.dinov2.encoder(tokens)
    with given_grid(model, grid=(2, 8)):
        model.dinov2.encoder(tokens)
    assert seen == [((2, 8), 1)] * 2
    with pytest.raises(MixerError, match="unknown"):
        model.dinov2.encoder(tokens)
    for wrong in (model, nn.Linear(2, 2)):
        with pytest.raises(MixerError, match="given_grid: expects"), given_grid(wrong, grid=(4,)):
            pass


@torch.no_grad()
def test_threads_and_passes_within_passes_keep_their_own_grids():
    model = host("dinov2")
    images = [picture(*shape) for shape in SHAPES[:3]]
    wanted = [called(model, each) for each in images]
    wrong: list[int] = []

    def call(i: int) -> None:
        wrong.extend(i for _ in range(10) if not torch.equal(called(model, images[i]), wanted[i]))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    inner = model.dinov2.encoder.layer[0].norm1
    once = inner.register_forward_pre_hook(lambda m, args: (once.remove(), called(model, images[1]), None)[2])
    assert torch.equal(called(model, images[0]), wanted[0])


def gradients(model: Any, *batches: torch.Tensor, together: bool = False) -> list[torch.Tensor]:
    model.zero_grad()
    losses = [model(images).square().sum() for images in batches] if together else []
    for loss in losses or (model(images).square().sum() for images in batches):
        loss.backward(retain_graph=False)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("frozen", [False, True])
def test_recomputed_layers_get_the_grid_of_their_pass(frozen):
    model = host("timm")
    model.patch_embed.requires_grad_(not frozen)
    batches = picture(2, 8), picture(8, 2)
    plain = gradients(model, *batches)
    model.set_grad_checkpointing(True)
    model.zero_grad()
    model(picture(4, 4)).sum().backward()
    for mine, theirs in zip(gradients(model, *batches), plain, strict=True):
        torch.testing.assert_close(mine, theirs)
    with pytest.raises(MixerError, match="2 x 8 and 8 x 2 .*call backward after each forward pass"):
        gradients(model, *batches, together=True)


@torch.no_grad()
@pytest.mark.parametrize("name", ["dinov2", "timm"])
def test_compiled_and_exported_programs_read_the_grid(name):
    model = host(name)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for shape in SHAPES[:2]:
        torch.testing.assert_close(called(compiled, picture(*shape)), called(model, picture(*shape)))
    if name == "dinov2":
        program = torch.export.export(model, (picture(2, 8),)).module()
        torch.testing.assert_close(program(picture(2, 8)).logits, called(model, picture(2, 8)))


def test_mixers_learn_from_a_teacher_on_its_grid(tmp_path):
    model = make("dinov2")
    student = replace_mixers(model, CONV, seed=0)[0]
    seen = grids_seen(student)
    batches = [{"pixel_values": picture(2, 8, batch=2)}]
    distill(model, student, batches, out=tmp_path / "run", layer_steps=1, steps=0)
    assert set(seen) == {((2, 8), 1)}


@torch.no_grad()
def test_a_layer_of_timm_gets_the_grid_of_each_picture():
    def built(spec: dict[str, Any], **options: Any) -> Any:
        torch.manual_seed(0)
        layer = attention_class(**spec, grid=(4, 4))
        sizes = {"depth": 1, "embed_dim": 32, "num_heads": 4, "img_size": 32, "patch_size": 8, "num_classes": 5}
        return timm.create_model("vit_tiny_patch16_224", attn_layer=layer, **sizes, **options).eval()

    model = built(CONV, dynamic_img_size=True)
    seen = grids_seen(model)
    for shape in SHAPES:
        model(picture(*shape))
    assert seen == [(shape, 1) for shape in SHAPES]
    with pytest.raises(MixerError, match="made for 1 \\+ 4 x 4 tokens, got 17 of an image of 2 x 8 patches"):
        built({"name": "aft_full"}, dynamic_img_size=True)(picture(2, 8))
    with pytest.raises(MixerError, match="images of one size; build the model without dynamic_img_size"):
        torch.jit.script(built(CONV, dynamic_img_size=True))
    fixed = built(CONV)
    fixed.set_input_size((16, 64))
    with pytest.raises(MixerError, match="got 17 of an image of 2 x 8 patches"):
        fixed(picture(2, 8))
    fixed.patch_embed.strict_img_size = False
    with pytest.raises(MixerError, match="rows and columns are unknown"):
        fixed(picture(2, 8))


def test_a_mixer_of_grids_in_a_host_without_one_must_be_told_to_read_a_sequence():
    model = timm.create_model("pit_ti_224", pretrained=False)
    with pytest.raises(MixerError, match="aft_conv mixes grids, and how the tokens .* ndim=1 in the spec"):
        replace_mixers(model, CONV)


@torch.no_grad()
def test_our_own_models_hand_on_the_grid_of_each_picture():
    model = build_model("aft_conv_tiny_k11_h32", dim=32, layers=1, image_size=(32, 32), patch=8, positions=None)
    seen = grids_seen(model)
    for shape in SHAPES:
        model(picture(*shape))
    assert [grid for grid, _ in seen] == list(SHAPES)


def test_patches_that_are_no_squares_are_counted_by_both_sides():
    options = {"depth": 1, "embed_dim": 32, "num_heads": 4, "patch_size": (8, 16), "img_size": 32}
    inputs = inputs_of(timm.create_model("vit_tiny_patch16_224", **options), "here")
    assert (inputs.tokens(32), inputs.length(9), inputs.length(10)) == (9, 32, 48)
    assert inputs.refusal(24) == "the patches of 8 x 16 pixels do not divide it"
