"""Models made of mixers, and the blocks around these."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from ..errors import MixerError
from ..system.config import from_json, nearest
from .blocks import Block, evaluation_mode
from .decoder import Decoder
from .dit import DiT, DiTConfig
from .eamlp import EAMLP, EAMLPConfig
from .encoder import Encoder, EncoderConfig
from .image_density import ImageDensity, ImageDensityConfig
from .layers import MLP
from .lm import LM, LMConfig, LMState
from .looped import LoopConfig
from .macs import Macs, macs
from .mae import MAE, MAEConfig, masked_autoencoder
from .model import Model, check_layers
from .named import MODELS, replace_layers
from .points import PointClassifier, PointClassifierConfig, PointSegmenter, PointSegmenterConfig
from .pyramid import Pyramid, PyramidConfig
from .resnet import ResNet, ResNetConfig
from .segmentation import SegmentationConfig, Segmenter, SegmenterConfig
from .seq2seq import Seq2Seq, Seq2SeqConfig, Seq2SeqState
from .shells import SHELLS, in_shell, shell_of
from .speculative import Drafter, ModelDrafter, NgramDrafter
from .vit import ViT, ViTConfig

__all__ = [
    "Block",
    "Decoder",
    "DiT",
    "DiTConfig",
    "Drafter",
    "EAMLP",
    "EAMLPConfig",
    "Encoder",
    "EncoderConfig",
    "ImageDensity",
    "ImageDensityConfig",
    "KINDS",
    "LM",
    "LMConfig",
    "LMState",
    "LoopConfig",
    "MAE",
    "MAEConfig",
    "MLP",
    "MODELS",
    "Macs",
    "Model",
    "ModelConfig",
    "ModelDrafter",
    "NgramDrafter",
    "PointClassifier",
    "PointClassifierConfig",
    "PointSegmenter",
    "PointSegmenterConfig",
    "Pyramid",
    "PyramidConfig",
    "ResNet",
    "ResNetConfig",
    "SHELLS",
    "SegmentationConfig",
    "Segmenter",
    "SegmenterConfig",
    "Seq2Seq",
    "Seq2SeqConfig",
    "Seq2SeqState",
    "ViT",
    "ViTConfig",
    "build_model",
    "check_layers",
    "config_from_json",
    "evaluation_mode",
    "find_model",
    "in_shell",
    "macs",
    "masked_autoencoder",
    "replace_layers",
    "shell_of",
]

KINDS: dict[str, tuple[Any, type[Model]]] = {
    cls.config_class.kind: (cls.config_class, cls)
    for cls in (
        LM,
        ViT,
        Pyramid,
        EAMLP,
        ResNet,
        ImageDensity,
        DiT,
        MAE,
        Encoder,
        Seq2Seq,
        PointClassifier,
        PointSegmenter,
        Segmenter,
    )
}
"""The classes of config and model, by the config's ``kind``."""

ModelConfig = (
    LMConfig
    | ViTConfig
    | PyramidConfig
    | EAMLPConfig
    | ResNetConfig
    | ImageDensityConfig
    | DiTConfig
    | MAEConfig
    | EncoderConfig
    | Seq2SeqConfig
    | PointClassifierConfig
    | PointSegmenterConfig
    | SegmenterConfig
)


def config_from_json(data: object) -> Any:
    """Build a model's config from JSON values; ``kind`` names its class."""
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise MixerError(f"config: there is no model of kind {kind!r}; known: {', '.join(KINDS)}.")
    return from_json(KINDS[kind][0], data)


def build_model(model: str | ModelConfig, **options: object) -> Model:
    """Build the model that a config or a name of ``MODELS`` describes, freshly initialised from torch's generator.

    Args:
        options: fields of the config to replace: ``build_model("deit_tiny", classes=10)``.
    """
    config = find_model(model) if isinstance(model, str) else model
    known = [f.name for f in fields(config)]
    for name in options:
        if name not in known:
            raise MixerError(f"build_model: {type(config).__name__} has no field {name!r}; {nearest(name, known)}.")
    if config.kind not in KINDS:
        raise MixerError(f"build_model: there is no model of kind {config.kind!r}; known: {', '.join(KINDS)}.")
    config = replace(config, **options) if options else config
    return KINDS[config.kind][1].from_config(config)


def find_model(name: str) -> Any:
    """Return the config of a named model; a misspelt name is refused with the nearest ones."""
    if name not in MODELS:
        raise MixerError(f"there is no model {name!r}; {nearest(name, MODELS)}.")
    return MODELS[name]
