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
    # content-sorted
    # memory
    "transformer_xl": ("transformer_xl", {"heads": 2}),
    "transformer_xl-memory": ("transformer_xl", {"heads": 4, "memory": 4, "qkv_bias": False}),
    "compressive": ("compressive", {"heads": 2, "memory": 2, "compressed": 2, "rate": 2}),
    "compressive-conv": ("compressive", {"heads": 4, "memory": 3, "compressed": 1, "rate": 3, "pool": "conv", "qkv_bias": False}),
    "compressive-max": ("compressive", {"heads": 2, "memory": 1, "compressed": 3, "rate": 2, "pool": "max"}),
    # images
    "axial": ("axial", {"heads": 2, "width": 4}),
    "axial-grid": ("axial", {"heads": 4, "width": None, "order": [0, 1], "qkv_bias": False}),
    "axial-sum": ("axial", {"heads": 2, "ndim": 3, "width": None, "combine": "sum"}),
    "axial-3d": ("axial", {"heads": 2, "ndim": 3, "width": None}),
    "image_local": ("image_local", {"heads": 2, "block": 3, "memory": 2}),
    "image_local-2d": ("image_local", {"heads": 2, "ndim": 2, "block": [2, 3], "memory": [1, 2], "width": 4, "qkv_bias": False}),
    "image_local-grid": ("image_local", {"heads": 2, "ndim": 2, "block": [2, 2], "memory": 1}),
}

GRIDS: dict[str, tuple[tuple[int, ...], int]] = {
    "aft_conv-2d": ((2, 5), 0),
    "aft_conv-2d-prefix": ((3, 4), 2),
    "aft_conv-3d": ((2, 2, 3), 0),
    "image_local-grid": ((3, 3), 1),
    "axial-grid": ((3, 4), 2),
    "axial-sum": ((2, 2, 3), 1),
    "axial-3d": ((2, 3, 2), 0),
}
"""Case id -> (grid, prefix), for the cases that mix grids. These have no causal form."""


def forms() -> list[tuple[str, bool]]:
    """Every case, bidirectional and, but for those on grids, causal."""
    return [(case, causal) for case in CASES for causal in ((False,) if case in GRIDS or not MIXERS[CASES[case][0]].supports_causal else (False, True))]
