"""Test that programs of torch.jit.trace of image models are right for other images, or refuse them."""

from __future__ import annotations

import warnings

import pytest
import torch

from tokenmix.models import (
    EAMLP,
    DiT,
    DiTConfig,
    EAMLPConfig,
    Pyramid,
    PyramidConfig,
    ViT,
    ViTConfig,
)

ATTENTION = {"name": "attention", "heads": 2}
CONV = {"name": "aft_conv", "heads": 2, "kernel_size": 3}


def vit(mixer, **options):
    return ViT(ViTConfig(dim=16, layers=1, image_size=(32, 40), patch=8, classes=3, mixers=(mixer,), **options))


FREE = {"pool": "mean", "positions": None}
MODELS = {
    "free": lambda: vit(ATTENTION, **FREE),
    "grid": lambda: vit(CONV, **FREE),
    "pooling": lambda: vit({"name": "pooling"}, **FREE),
    "positions": lambda: vit(ATTENTION),
    "pyramid": lambda: Pyramid(
        PyramidConfig(
            depths=(1,), dims=(8,), patches=(8,), mlp_ratios=(1.0,), image_size=(32, 40), classes=3, mixers=(ATTENTION,)
        )
    ),
    "eamlp": lambda: EAMLP(
        EAMLPConfig(dim=16, layers=1, image_size=(32, 48), classes=3, mixers=({"name": "external"},))
    ),
    "dit": lambda: DiT(DiTConfig(dim=16, layers=1, image_size=(32, 40), patch=8, mixers=(ATTENTION,))),
}


def inputs(name, height, width):
    draw = torch.Generator().manual_seed(height * width)
    return torch.randn(1, 3, height, width, generator=draw), *([torch.tensor([0.5])] if name == "dit" else [])


def numbers_or_refusal(program, given):
    try:
        return program(*given)
    except torch.jit.Error as why:
        return str(why)


@pytest.mark.parametrize("name", MODELS)
def test_a_program_is_right_for_other_images_or_refuses_them(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    size = (32, 48) if name == "eamlp" else (32, 40)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.jit.trace(model, inputs(name, *size), check_trace=False)
        right = 0
        for other in (size, size[::-1], (16, 2 * size[1]), (30, size[1] - 1), (24, 24), (29, 33)):
            given = inputs(name, *other)
            y = numbers_or_refusal(program, given)
            if isinstance(y, str):
                assert "this program was traced" in y, other
            else:
                torch.testing.assert_close(y, model(*given), rtol=1e-5, atol=1e-6, msg=str(other))
                right += 1
    assert right == {"free": 6, "dit": 1}.get(name, right)
    assert right >= 1
