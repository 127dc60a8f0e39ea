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
    "reformer": ("reformer", {"heads": 2, "buckets": 4, "chunk": 2, "rounds": 3}),
    "reformer-one-round": ("reformer", {"heads": 4, "buckets": 2, "chunk": 2, "rounds": 1, "seed": 2, "qkv_bias": False, "out_bias": False}),
    "routing": ("routing", {"heads": 2, "clusters": 2, "window": 3, "seed": 1}),
    "routing-one-head": ("routing", {"heads": 1, "clusters": 3, "window": 2, "decay": 0.9, "qkv_bias": False, "out_bias": False}),
    "sinkhorn": ("sinkhorn", {"heads": 2, "block": 3, "iterations": 3}),
    "sinkhorn-gumbel": ("sinkhorn", {"heads": 4, "block": 4, "iterations": 1, "temperature": 1.0, "gumbel": True, "qkv_bias": False, "out_bias": False}),
    # memory
    # images
}

GRIDS: dict[str, tuple[tuple[int, ...], int]] = {
    "aft_conv-2d": ((2, 5), 0),
    "aft_conv-2d-prefix": ((3, 4), 2),
    "aft_conv-3d": ((2, 2, 3), 0),
}
"""Case id -> (grid, prefix), for the cases that mix grids. These have no causal form."""


def forms() -> list[tuple[str, bool]]:
    """Every case, bidirectional and, but for those on grids, causal."""
    return [(case, causal) for case in CASES for causal in ((False,) if case in GRIDS or not MIXERS[CASES[case][0]].supports_causal else (False, True))]
