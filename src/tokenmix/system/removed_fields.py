"""The fields that configs once had, with their defaults: runs made before still load if they have these values."""

from __future__ import annotations

from ..types import Record

REMOVED: dict[str, Record] = {
    "DiTConfig": {"norm_eps": 1e-6, "init_std": 0.02},
    "DocumentDataConfig": {"masked": 0.8, "random": 0.1, "sentinels": 100},
    "EAMLPConfig": {"token_dim": 64, "token_slots": 128, "norm_eps": 1e-5, "init_std": 0.02},
    "EncoderConfig": {"logit_cap": None},
    "ImageDataConfig": {"subset_seed": 0, "loss_shift": 0.0},
    "ImageDensityConfig": {"logit_cap": None, "mlp_bias": True},
    "LabelDataConfig": {"smoothing": 0.0},
    "MaskDataConfig": {"scene_seed": 0},
    "OptimConfig": {"muon_momentum": 0.95},
    "PointsDataConfig": {"smoothing": 0.0},
    "PyramidConfig": {"norm_eps": 1e-6, "init_std": 0.02},
    "ResNetConfig": {"init_std": 0.02},
    "Seq2SeqConfig": {"logit_cap": None},
}
"""Class of a config -> its former fields, with the one value that they still may have in a file."""


def removed_fields(cls: type) -> Record:
    """Return the former fields of a config and of the classes that it inherits from."""
    return {name: value for base in cls.__mro__ for name, value in REMOVED.get(base.__name__, {}).items()}
