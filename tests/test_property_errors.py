"""Test that a property of a module says why it fails, instead of that there is no such property."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tokenmix import MIXERS, MixerError, build_mixer
from tokenmix.models import LM, LMConfig, Seq2Seq, Seq2SeqConfig
from tokenmix.system.properties import named_errors

MIX = ({"name": "aft_simple"},)


def modules_with_properties() -> list[type]:
    """Every class that a model or mixer of the library is made of, and that has properties of its own."""
    import tokenmix.models

    kinds = [*MIXERS.values(), *(v for v in vars(tokenmix.models).values() if isinstance(v, type))]
    every = {each: None for kind in kinds for each in kind.__mro__ if issubclass(kind, nn.Module)}
    ours = [each for each in every if each.__module__.startswith("tokenmix.")]
    return [each for each in ours if any(isinstance(v, property) for v in vars(each).values())]


@pytest.mark.parametrize("cls", modules_with_properties(), ids=lambda cls: cls.__name__)
def test_every_property_of_a_module_keeps_the_reason(cls):
    for name, value in vars(cls).items():
        assert not isinstance(value, property) or hasattr(value.fget, "__wrapped__"), name


@pytest.mark.parametrize("call", ["forward", "generate", "max_len", "streams"])
def test_a_foreign_layer_in_the_place_of_a_mixer_is_named(call):
    model, tokens = LM(LMConfig(dim=8, max_len=8, mixers=MIX, vocab=5)).eval(), torch.ones(1, 3, dtype=torch.long)
    model.blocks[0].mixer = nn.Identity()
    with pytest.raises(MixerError, match=r"'Identity' object has no attribute .*; a layer that was put") as error:
        {
            "forward": lambda: model(tokens),
            "generate": lambda: model.generate(tokens, 2),
            "max_len": lambda: model.max_len,
            "streams": lambda: model.streams,
        }[call]()
    assert "\n" not in str(error.value)


def test_of_an_encoder_decoder():
    model = Seq2Seq(Seq2SeqConfig(dim=8, max_len=8, mixers=MIX, vocab=5, start=0, end=1))
    model.encoder.blocks[0].mixer = nn.Linear(8, 8)
    with pytest.raises(MixerError, match="'Linear' object has no attribute"):
        model(torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.long))


def test_of_a_mixer_and_of_a_class_of_ones_own():
    local = build_mixer("local", 8, window=3, heads=2)
    del local.window
    with pytest.raises(MixerError, match=r"Local.halo: .* has no attribute 'window'"):
        _ = local.halo

    @named_errors
    class Own(nn.Module):
        @property
        def size(self) -> int:
            """Return a number."""
            return self.inner.size

    with pytest.raises(MixerError, match=r"Own.size: 'Own' object has no attribute 'inner'"):
        _ = Own().size
    assert Own.size.__doc__ == "Return a number."
