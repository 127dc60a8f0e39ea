"""Models by their names in the papers: each is a config, whose fields ``build_model(name, **options)`` replaces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from ..errors import MixerError
from ..types import Spec
from .eamlp import EAMLPConfig
from .lm import LMConfig
from .pyramid import PyramidConfig
from .resnet import ResNetConfig
from .vit import ViTConfig

C = TypeVar("C", ViTConfig, PyramidConfig, EAMLPConfig)


def deit(dim: int, heads: int, **options: Any) -> ViTConfig:
    """Build the config of a DeiT without distillation (Touvron et al. 2021, arXiv 2012.12877, Table 1).

    It has 12 layers, patches of 16 and softmax attention.
    """
    return ViTConfig(dim=dim, layers=12, mixers=({"name": "attention", "heads": heads},), **options)


def aft_full(config: ViTConfig) -> ViTConfig:
    """Put AFT-full into a DeiT (AFT, Table 7).

    The bias factors have rank 128; class token and positions stay.
    """
    return replace(config, mixers=({"name": "aft_full", "rank": 128, "qkv_bias": False},))


def aft_conv(config: ViTConfig, kernel_size: int, heads: int) -> ViTConfig:
    """Put AFT-conv into a DeiT (AFT, Tables 7 and 8).

    There is no class token and there are no positions; the head reads the mean of the patches. The model accepts images
    of any size.
    """
    spec = {"name": "aft_conv", "kernel_size": kernel_size, "heads": heads, "qkv_bias": False}
    return replace(config, mixers=(spec,), pool="mean", positions=None)


def lambda_net(config: ViTConfig) -> ViTConfig:
    """Build AFT's baseline of lambda layers (Table 7).

    It has full context, keys of width 16 and BatchNorm on queries and keys; the head reads the mean of the patches.
    """
    heads = config.mixers[0]["heads"]
    spec = {"name": "lambda", "heads": heads, "key_width": 16, "norm": "qk", "qkv_bias": False}
    return replace(config, mixers=(spec,), pool="mean", positions=None)


def pvt(*depths: int) -> PyramidConfig:
    """Build the config of a PVT (Wang et al. 2021, arXiv 2102.12122, Table 1).

    Keys and values of its four stages are reduced 8, 4, 2 and 1 times along each side.
    """
    stages = zip((1, 2, 5, 8), (8, 4, 2, 1), strict=True)
    return PyramidConfig(
        depths=depths,
        mixers=tuple({"name": "spatial_reduction", "heads": heads, "ratio": ratio} for heads, ratio in stages),
    )


def eamlp(dim: int, layers: int, heads: int, mlp_ratio: float) -> EAMLPConfig:
    """Build the config of an EAMLP (Guo et al. 2021, arXiv 2105.02358).

    These are the architectures of T2T-ViT-7 to 24 with multi-head External attention.
    """
    return EAMLPConfig(
        dim=dim, layers=layers, mixers=({"name": "external_multihead", "heads": heads},), mlp_ratio=mlp_ratio
    )


def replace_layers(config: C, spec: Spec, *, last: int | None = None, every: int | None = None) -> C:
    """Replace the mixer in the last ``last`` layers, or in every ``every``-th layer (Hydra Attention, Fig. 4).

    The latter are counted from the last layer.

    Example:
        ``replace_layers(MODELS["deit_base"], {"name": "hydra"}, last=2)``
    """
    layers = config.layers
    if (last is None) == (every is None):
        raise MixerError(f"replace_layers: give either last or every, got last={last}, every={every}.")
    if last is not None and not 0 <= last <= layers:
        raise MixerError(f"replace_layers: last must be in 0..{layers}, got {last}.")
    if every is not None and not 1 <= every <= layers:
        raise MixerError(f"replace_layers: every must be in 1..{layers}, got {every}.")
    chosen = range(layers - last, layers) if last is not None else range(layers - 1, -1, -(every or 1))
    return replace(config, mixers=tuple(spec if i in chosen else old for i, old in enumerate(config.specs())))


TINY, SMALL, BASE = deit(192, 3), deit(384, 6), deit(768, 12)
BASE_384 = replace(BASE, image_size=(384, 384))
HYDRA = {"name": "hydra"}

MODELS: dict[str, Any] = {
    "resnet_cifar20": ResNetConfig(),
    "deit_tiny": TINY,
    "deit_small": SMALL,
    "deit_base": BASE,
    "deit_base_384": BASE_384,
    "deit_tiny_registers": replace(TINY, registers=4),
    "deit_small_registers": replace(SMALL, registers=4),
    "deit_base_registers": replace(BASE, registers=4),
    "aft_full_tiny": aft_full(TINY),
    "aft_full_small": aft_full(SMALL),
    "aft_conv_tiny_k11_h32": aft_conv(TINY, 11, 32),
    "aft_conv_tiny_k11_h192": aft_conv(TINY, 11, 192),
    "aft_conv_small_k11_h16": aft_conv(SMALL, 11, 16),
    "aft_conv_small_k11_h384": aft_conv(SMALL, 11, 384),
    "aft_conv_small_k15_h384": aft_conv(SMALL, 15, 384),
    "aft_conv_base384_k25_h32": aft_conv(BASE_384, 25, 32),
    "lambda_tiny": lambda_net(TINY),
    "lambda_small": lambda_net(SMALL),
    "pvt_tiny": pvt(2, 2, 2, 2),
    "pvt_small": pvt(3, 4, 6, 3),
    "pvt_medium": pvt(3, 4, 18, 3),
    "pvt_large": pvt(3, 8, 27, 3),
    "eamlp_7": eamlp(256, 7, 4, 2.0),
    "eamlp_10": eamlp(256, 10, 4, 2.0),
    "eamlp_12": eamlp(256, 12, 4, 2.0),
    "eamlp_14": eamlp(384, 14, 6, 3.0),
    "eamlp_19": eamlp(448, 19, 7, 3.0),
    "eamlp_24": eamlp(512, 24, 8, 3.0),
    "hydra_deit_base": replace_layers(BASE, HYDRA, last=12),
    **{f"hydra_deit_base_last{k}": replace_layers(BASE, HYDRA, last=k) for k in (1, 2, 4, 6, 8, 10)},
    "mamba2_130m": LMConfig(
        dim=768,
        max_len=2048,
        mixers=({"name": "mamba2", "heads": 24},),
        layers=24,
        vocab=50_288,
        mlp_ratio=0,
        norm_type="rms",
        positions=None,
        tied=True,
    ),
    **{f"hydra_deit_base_every{k}": replace_layers(BASE, HYDRA, every=k) for k in (2, 3, 4, 6)},
}
