"""Small Vision Transformers of timm with mixers of ours, for the tests of hosts.timm."""

from __future__ import annotations

import timm
import torch

import tokenmix.hosts.timm  # noqa: F401  (registers the models)
from tokenmix.models import ViTConfig, build_model

SHELL = {"img_size": (16, 12), "patch_size": 4, "embed_dim": 16, "num_heads": 2, "num_classes": 5}
SMALL = {**SHELL, "depth": 2}
GRID, TOKENS = (4, 3), 12
SPECS = {
    "attention": {"name": "attention", "heads": 2},
    "aft_full": {"name": "aft_full", "rank": 3, "qkv_bias": False},
    "aft_local": {"name": "aft_local", "window": 3, "rank": 2},
    "aft_simple": {"name": "aft_simple"},
    "aft_conv": {"name": "aft_conv", "heads": 4, "kernel_size": 3, "qkv_bias": False},
    "hydra": {"name": "hydra"},
    "multihead_linear": {"name": "multihead_linear", "heads": 2},
    "external": {"name": "external", "slots": 5},
    "external_multihead": {"name": "external_multihead", "heads": 2, "slots": 3},
    "linear": {"name": "linear", "heads": 2},
    "performer": {"name": "performer", "heads": 2},
    "rfa": {"name": "rfa", "heads": 2},
    "synthesizer_dense": {"name": "synthesizer_dense", "heads": 2},
    "synthesizer_random": {"name": "synthesizer_random", "heads": 2},
    "synthesizer_factorized_dense": {"name": "synthesizer_factorized_dense", "heads": 2},
    "synthesizer_factorized_random": {"name": "synthesizer_factorized_random", "heads": 2},
    "synthesizer_mixture": {"name": "synthesizer_mixture", "heads": 2},
    "local": {"name": "local", "heads": 2, "window": 4},
    "lambda": {"name": "lambda", "heads": 2, "key_width": 3},
    "pooling": {"name": "pooling"},
    "axial": {"name": "axial", "heads": 2, "width": None},
    "spatial_reduction": {"name": "spatial_reduction", "heads": 2, "ratio": 2},
    "gmlp": {"name": "gmlp"},
    "linformer": {"name": "linformer", "heads": 2, "rank": 3},
}


def small(mixers="hydra", name="deit_tiny_mixer_patch16_224", **options):
    torch.manual_seed(0)
    mixers = SPECS[mixers] if isinstance(mixers, str) else mixers
    return noisy(timm.create_model(name, mixers=mixers, **{**SMALL, **options}).eval())


def noisy(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def images(n=2, size=(16, 12)):
    return torch.randn(n, 3, *size)


def ours(**options):
    config = ViTConfig(
        dim=16, layers=2, patch=4, image_size=(16, 12), classes=5, **{"mixers": (SPECS["hydra"],), **options}
    )
    return noisy(build_model(config).eval())
