"""What holds mixers: blocks and models."""

from __future__ import annotations

from torch import nn

from ..errors import MixerError
from .blocks import MLP as MLP
from .blocks import Block as Block
from .image_density import ImageDensity as ImageDensity
from .image_density import ImageDensityConfig as ImageDensityConfig
from .lm import LM as LM
from .lm import LMConfig as LMConfig
from .lm import LMState as LMState

MODELS: dict[str, type[LM]] = {"lm": LM}


def build_model(config: LMConfig) -> nn.Module:
    """The model a config describes, freshly initialised from torch's generator."""
    if config.kind not in MODELS:
        raise MixerError(f"build_model: no model is called {config.kind!r}; known: {', '.join(MODELS)}.")
    return MODELS[config.kind](config)
