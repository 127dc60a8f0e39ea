"""The rows the contract suite runs on: case id -> (mixer name, tiny options). A new mixer adds a row here and no test code."""

from __future__ import annotations

from typing import Any

from tokenmix import MIXERS

_LEARNED = {"positions": {"name": "learned"}, "max_len": 14}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("attention", {"heads": 2}),
    "attention-grouped": ("attention", {"heads": 4, "kv_heads": 2, "scale": 0.3, "qkv_bias": False}),
    "attention-learned": ("attention", {"heads": 2, **_LEARNED}),
    "aft_full": ("aft_full", {"max_len": 13, "rank": None}),
    "aft_full-factors": ("aft_full", {"max_len": 13, "rank": 3, "gate": None}),
    "aft_full-context": ("aft_full", {"max_len": 12, "max_context_len": 15, "rank": 2, "gate": "softplus"}),
    "aft_local-1": ("aft_local", {"max_len": 13, "window": 1, "rank": None}),
    "aft_local-3": ("aft_local", {"max_len": 13, "window": 3, "rank": 2}),
    "aft_local-0": ("aft_local", {"max_len": 13, "window": 0, "rank": None}),
    "aft_local-T": ("aft_local", {"max_len": 12, "window": 12, "rank": 3, "gate": "tanh"}),
    "aft_local-none": ("aft_local", {"max_len": 13, "window": 3, "rank": None, "outside": "none"}),
    "aft_simple": ("aft_simple", {}),
    "aft_simple-relu": ("aft_simple", {"gate": "relu", "qkv_bias": False}),
    "aft_simple-no-gate": ("aft_simple", {"gate": None, "out_bias": False}),
    "aft_conv": ("aft_conv", {"heads": 2, "kernel_size": 3, "ndim": 1}),
    "aft_conv-raw": ("aft_conv", {"heads": 4, "kernel_size": 5, "ndim": 1, "reparam": False}),
    "aft_conv-channels": ("aft_conv", {"heads": 8, "kernel_size": 3, "ndim": 1}),
    "aft_conv-none": ("aft_conv", {"heads": 2, "kernel_size": 3, "ndim": 1, "outside": "none"}),
    "aft_conv-2d": ("aft_conv", {"heads": 2, "kernel_size": 3, "ndim": 2}),
    "aft_conv-2d-prefix": ("aft_conv", {"heads": 2, "kernel_size": 3, "ndim": 2, "reparam": False, "gate": None}),
    "aft_conv-3d": ("aft_conv", {"heads": 2, "kernel_size": 3, "ndim": 3}),
    # hydra
    # external
    # synthesizer
    # linear
    # local and other patterns
    # low rank
    # gated, convolutional and MLP
    "lightconv": ("lightconv", {"heads": 2, "kernel_size": 5}),
    "lightconv-plain": ("lightconv", {"heads": 4, "kernel_size": 3, "glu": False, "qkv_bias": False, "out_bias": False}),
    "dynamicconv": ("dynamicconv", {"heads": 2, "kernel_size": 5}),
    "dynamicconv-plain": ("dynamicconv", {"heads": 8, "kernel_size": 3, "glu": False}),
    "lambda": ("lambda", {"max_len": 13, "heads": 2, "key_width": 3}),
    "lambda-window": ("lambda", {"max_len": None, "heads": 4, "key_width": 4, "window": 5, "norm": "qv"}),
    "lambda-2d": ("lambda", {"max_len": None, "heads": 2, "key_width": 3, "grid_size": [8, 9], "norm": None}),
    "mlp_mixer": ("mlp_mixer", {"max_len": 13, "hidden": 6}),
    "gmlp": ("gmlp", {"max_len": 13, "hidden": 12}),
    "gmlp-toeplitz": ("gmlp", {"max_len": 12, "toeplitz": True, "qkv_bias": False}),
    "pooling": ("pooling", {"window": 3}),
    "pooling-wide": ("pooling", {"window": 7, "subtract": False}),
    "pooling-2d": ("pooling", {"window": 3, "ndim": 2}),
    "fourier": ("fourier", {}),
    # content-sorted
    # memory
    # images
}

GRIDS: dict[str, tuple[tuple[int, ...], int]] = {
    "aft_conv-2d": ((2, 5), 0),
    "aft_conv-2d-prefix": ((3, 4), 2),
    "aft_conv-3d": ((2, 2, 3), 0),
    "lambda-2d": ((3, 4), 2),
    "pooling-2d": ((3, 4), 0),
}
"""Case id -> (grid, prefix), for the cases that mix grids. These have no causal form."""


def forms() -> list[tuple[str, bool]]:
    """Every case, bidirectional and, but for those on grids, causal."""
    return [(case, causal) for case in CASES for causal in ((False,) if case in GRIDS or not MIXERS[CASES[case][0]].supports_causal else (False, True))]
