"""Auxiliary losses: collected inside ``aux_losses``, free outside of it, part of the gradient in training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tokenmix
from tokenmix.mixers.parts.aux_losses import add_aux_loss

calls: list[str] = []


class Asking(tokenmix.Mixer):
    """A mixer that asks for small outputs."""

    def __init__(self, dim, *, causal=False):
        super().__init__(dim, causal=causal)
        self.out_proj = nn.Linear(dim, dim)

    def mix(self, inputs):
        y = self.out_proj(inputs.x)

        def small():
            calls.append("computed")
            return y.square().mean()

        add_aux_loss("small", small)
        return y


def test_nothing_is_computed_outside():
    calls.clear()
    Asking(4)(torch.randn(2, 3, 4))
    assert calls == []


def test_each_layer_has_a_name_of_its_own():
    layers, x = nn.Sequential(Asking(4), Asking(4), Asking(4)), torch.randn(2, 3, 4)
    with tokenmix.aux_losses() as losses:
        y = layers(x)
    assert list(losses) == ["small", "small.1", "small.2"]
    torch.testing.assert_close(losses["small.2"], y.square().mean())
    sum(losses.values()).backward()
    assert all(layer.out_proj.weight.grad is not None for layer in layers)


def test_blocks_nest_and_close():
    mixer, x = Asking(4), torch.randn(2, 3, 4)
    with tokenmix.aux_losses() as outer:
        with tokenmix.aux_losses() as inner:
            mixer(x)
        mixer(x)
    assert list(outer) == list(inner) == ["small"]
    with pytest.raises(RuntimeError), tokenmix.aux_losses() as broken:
        raise RuntimeError
    mixer(x)
    assert broken == {}


def test_they_pass_through_compile():
    torch.compiler.reset()
    mixer, x = Asking(4), torch.randn(2, 3, 4)
    fast = torch.compile(mixer, backend="aot_eager", fullgraph=True)
    with tokenmix.aux_losses() as want:
        mixer(x)
    with tokenmix.aux_losses() as got:
        fast(x)
    torch.testing.assert_close(got["small"], want["small"])
    fast(x)
    got["small"].backward()
    assert mixer.out_proj.weight.grad is not None
