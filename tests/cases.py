"""List the rows the contract suite runs on: case id -> (mixer name, tiny options).

A new mixer adds a row here and no test code.
"""

from __future__ import annotations

import os
from typing import Any

from tokenmix import MIXERS
from tokenmix.testing import subject

DIM = 8
_LEARNED = {"positions": {"name": "learned"}, "max_len": 14}
_YARN = {"name": "yarn", "factor": 4.0, "original_max_len": 4, "beta_fast": 2.0, "beta_slow": 0.2}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("attention", {"heads": 2}),
    "attention-grouped": ("attention", {"heads": 4, "kv_heads": 2, "scale": 0.3, "qkv_bias": False}),
    "attention-learned": ("attention", {"heads": 2, **_LEARNED}),
    "attention-rotary": ("attention", {"heads": 2, "positions": {"name": "rotary"}}),
    "attention-rotary-wide": (
        "attention",
        {"heads": 4, "kv_heads": 2, "head_dim": 6, "positions": {"name": "rotary", "rotary_dim": 4, "base": 100.0}},
    ),
    "attention-rotary-interleaved": (
        "attention",
        {"heads": 2, "positions": {"name": "rotary", "layout": "interleaved", "scaling": _YARN}},
    ),
    "attention-normed": ("attention", {"heads": 4, "kv_heads": 2, "qk_norm": "rms", "positions": {"name": "rotary"}}),
    "attention-normed-layer": ("attention", {"heads": 2, "qk_norm": "layer", "norm_eps": 1e-3}),
    "attention-alibi": ("attention", {"heads": 4, "kv_heads": 2, "bias": {"name": "alibi", "learned": True}}),
    "attention-t5": (
        "attention",
        {
            "heads": 2,
            "bias": {"name": "t5", "buckets": 8, "max_distance": 6, "two_sided": True},
            "positions": {"name": "rotary"},
        },
    ),
    "attention-kerple": ("attention", {"heads": 2, "bias": {"name": "kerple", "kind": "power"}}),
    "attention-xpos": (
        "attention",
        {"heads": 4, "kv_heads": 2, "positions": {"name": "xpos", "scale_base": 32.0, "layout": "interleaved"}},
    ),
    "attention-xpos-cope": (
        "attention",
        {"heads": 2, "positions": {"name": "xpos", "scale_base": 32.0}, "bias": {"name": "cope", "longest": 4}},
    ),
    "attention-shaw": ("attention", {"heads": 4, "kv_heads": 2, "bias": {"name": "shaw", "max_distance": 3}}),
    "attention-cope": ("attention", {"heads": 4, "kv_heads": 2, "scale": 0.3, "bias": {"name": "cope", "longest": 4}}),
    "attention-cape": (
        "attention",
        {
            "heads": 2,
            "positions": {"name": "rotary"},
            "bias": {"name": "cape", "of": {"name": "fire", "hidden": 3, "threshold": 4.0}, "hidden": 5},
        },
    ),
    "attention-fire": ("attention", {"heads": 2, "bias": {"name": "fire", "hidden": 3, "threshold": 4.0}}),
    "aft_full": ("aft_full", {"max_len": 13, "rank": None}),
    "aft_full-factors": ("aft_full", {"max_len": 13, "rank": 3, "gate": None}),
    "aft_full-context": ("aft_full", {"max_len": 12, "max_context_len": 15, "rank": 2, "gate": "softplus"}),
    "aft_full-alibi": ("aft_full", {"bias": {"name": "alibi", "slope": 0.3, "learned": True}}),
    "aft_full-fire": ("aft_full", {"bias": {"name": "fire", "hidden": 3, "threshold": 4.0}, "gate": None}),
    "aft_local-1": ("aft_local", {"max_len": 13, "window": 1, "rank": None}),
    "aft_local-3": ("aft_local", {"max_len": 13, "window": 3, "rank": 2}),
    "aft_local-0": ("aft_local", {"max_len": 13, "window": 0, "rank": None}),
    "aft_local-T": ("aft_local", {"max_len": 12, "window": 12, "rank": 3, "gate": "tanh"}),
    "aft_local-none": ("aft_local", {"max_len": 13, "window": 3, "rank": None, "outside": "none"}),
    "aft_local-t5": (
        "aft_local",
        {"window": 4, "outside": "none", "bias": {"name": "t5", "buckets": 8, "max_distance": 6, "two_sided": True}},
    ),
    "aft_local-fire": ("aft_local", {"window": 3, "bias": {"name": "fire", "hidden": 3, "threshold": 4.0}}),
    "aft_local-kerple": ("aft_local", {"window": 3, "bias": {"name": "kerple"}}),
    "aft_simple": ("aft_simple", {}),
    "aft_simple-relu": ("aft_simple", {"gate": "relu", "qkv_bias": False}),
    "aft_simple-no-gate": ("aft_simple", {"gate": None, "out_bias": False}),
    "aft_conv": ("aft_conv", {"heads": 2, "kernel_size": 3, "ndim": 1}),
    "aft_conv-raw": ("aft_conv", {"heads": 4, "kernel_size": 5, "ndim": 1, "reparam": False}),
    "aft_conv-channels": ("aft_conv", {"heads": 8, "kernel_size": 3, "ndim": 1}),
    "aft_conv-none": ("aft_conv", {"heads": 2, "kernel_size": 3, "ndim": 1, "outside": "none"}),
    "aft_conv-kerple": ("aft_conv", {"heads": 2, "kernel_size": 5, "ndim": 1, "bias": {"name": "kerple"}}),
    "aft_conv-signed": ("aft_conv", {"heads": 2, "kernel_size": 3, "filters": "signed", "reparam": False}),
    "aft_conv-signed-none": (
        "aft_conv",
        {"heads": 4, "kernel_size": 5, "filters": "signed", "outside": "none", "gate": None},
    ),
    "aft_conv-whole": ("aft_conv", {"heads": 2, "kernel_size": 3, "divide": False}),
    "aft_conv-whole-none": ("aft_conv", {"heads": 8, "kernel_size": 3, "divide": False, "outside": "none"}),
    "aft_conv-depthwise": (
        "aft_conv",
        {"heads": 8, "kernel_size": 3, "filters": "signed", "outside": "none", "divide": False},
    ),
    "aft_conv-2d-signed": ("aft_conv", {"heads": 2, "kernel_size": 3, "ndim": 2, "filters": "signed"}),
    "aft_conv-2d-signed-none": (
        "aft_conv",
        {"heads": 2, "kernel_size": 3, "ndim": 2, "filters": "signed", "outside": "none"},
    ),
    "aft_conv-2d-depthwise": (
        "aft_conv",
        {"heads": 4, "kernel_size": 3, "ndim": 2, "filters": "signed", "outside": "none", "divide": False},
    ),
    "aft_conv-2d-whole": ("aft_conv", {"heads": 2, "kernel_size": 3, "ndim": 2, "divide": False}),
    "aft_conv-2d": ("aft_conv", {"heads": 2, "kernel_size": 3, "ndim": 2}),
    "aft_conv-2d-prefix": ("aft_conv", {"heads": 2, "kernel_size": 3, "ndim": 2, "reparam": False, "gate": None}),
    "aft_conv-3d": ("aft_conv", {"heads": 2, "kernel_size": 3, "ndim": 3}),
    "aft_forget": ("aft_forget", {}),
    "aft_forget-fixed": (
        "aft_forget",
        {"norm_heads": 2, "decay": "fixed", "kernel_size": 5, "half_lives": [0.5, 64.0], "gate": "tanh"},
    ),
    "aft_forget-simple": (
        "aft_forget",
        {"kernel_size": 1, "key_norm": False, "decay": None, "qkv_bias": False},
    ),
    "aft_forget-no-gate": ("aft_forget", {"norm_heads": 1, "gate": None, "key_norm": False, "out_bias": False}),
    "aft_reach": ("aft_reach", {"heads": 2, "reaches": 3}),
    "aft_reach-1": (
        "aft_reach",
        {"heads": 1, "reaches": 1, "norm": False, "kernel_size": 1, "key_norm": False, "gate": None},
    ),
    "aft_pairs": ("aft_pairs", {"heads": 2}),
    "aft_pairs-1": (
        "aft_pairs",
        {"heads": 4, "rank": 1, "decay": False, "kernel_size": 1, "gate": "tanh", "key_norm": False},
    ),
    "aft_pairs-plain": ("aft_pairs", {"heads": 2, "rank": 3, "norm": False, "qkv_bias": False, "kernel_size": 1}),
    "gated_delta": ("gated_delta", {"heads": 2}),
    "gated_delta-delta": (
        "gated_delta",
        {"heads": 2, "decay": None, "gate": None, "negative": True, "kernel_size": 1, "out_bias": True},
    ),
    "gated_delta-grouped": (
        "gated_delta",
        {"heads": 2, "value_heads": 4, "head_dim": 3, "value_dim": 5, "qkv_bias": True},
    ),
    "gated_delta-feature": (
        "gated_delta",
        {"heads": 2, "decay": "feature", "gate": "sigmoid", "gate_rank": 3, "gate_bias": True},
    ),
    "gated_delta-bound": (
        "gated_delta",
        {"heads": 2, "decay": "feature", "decay_rank": 2, "lower_bound": -5.0, "kernel_size": 2},
    ),
    "mamba2": ("mamba2", {"heads": 2, "state_dim": 3, "qkv_bias": True}),
    "mamba2-groups": (
        "mamba2",
        {
            "heads": 4,
            "groups": 2,
            "state_dim": 4,
            "expand": 1,
            "dt_limit": [0.3, 0.9],
            "conv_bias": False,
            "out_bias": True,
        },
    ),
    "short_conv": ("short_conv", {}),
    "short_conv-bias": ("short_conv", {"kernel_size": 4, "conv_bias": True, "qkv_bias": True, "out_bias": True}),
    # hydra
    "hydra": ("hydra", {}),
    "hydra-softmax": ("hydra", {"feature": "sigmoid/softmax", "qkv_bias": False}),
    "hydra-tanh-elu": ("hydra", {"feature": "tanh/elu", "normalise": True, "eps": 1e-3, "out_bias": False}),
    "multihead_linear": ("multihead_linear", {"heads": 2}),
    "multihead_linear-softmax": ("multihead_linear", {"heads": 4, "feature": "softmax", "qkv_bias": False}),
    "multihead_linear-1": ("multihead_linear", {"heads": 1, "feature": "elu", "normalise": True, "out_bias": False}),
    "polynl": ("polynl", {}),
    # external
    "external": ("external", {"slots": 5}),
    "external-tied": ("external", {"slots": 6, "tied": True, "norm": "tokens", "qkv_bias": False, "out_bias": False}),
    "external-exact": ("external", {"slots": 4, "eps": 0.0}),
    "external_multihead": ("external_multihead", {"heads": 2, "coef": 2, "slots": 3}),
    "simplified_attention": ("simplified_attention", {"scale": 0.25}),
    # synthesizer
    "synthesizer_dense": ("synthesizer_dense", {"max_len": 13, "heads": 2}),
    "synthesizer_dense-shared": (
        "synthesizer_dense",
        {"max_len": 13, "heads": 4, "head_dim": 3, "hidden": 5, "share_heads": True, "bias": False},
    ),
    "synthesizer_dense-linear": ("synthesizer_dense", {"max_len": 12, "heads": 2, "hidden": 0, "qkv_bias": False}),
    "synthesizer_dense-alibi": (
        "synthesizer_dense",
        {"max_len": 12, "heads": 4, "head_dim": 3, "pair_bias": {"name": "alibi", "learned": True}},
    ),
    "synthesizer_random": ("synthesizer_random", {"max_len": 13, "heads": 2}),
    "synthesizer_random-fire": (
        "synthesizer_random",
        {
            "max_len": 12,
            "heads": 2,
            "share_heads": True,
            "pair_bias": {"name": "fire", "hidden": 3, "threshold": 4.0},
        },
    ),
    "synthesizer_random-fixed": (
        "synthesizer_random",
        {"max_len": 12, "heads": 4, "head_dim": 3, "trainable": False, "share_heads": True, "out_bias": False},
    ),
    "synthesizer_factorized_dense": ("synthesizer_factorized_dense", {"max_len": 13, "heads": 2, "hidden": 3}),
    "synthesizer_factorized_dense-shared": (
        "synthesizer_factorized_dense",
        {"max_len": 14, "heads": 4, "head_dim": 3, "factor": 5, "share_heads": True, "bias": False},
    ),
    "synthesizer_factorized_random": (
        "synthesizer_factorized_random",
        {"max_len": 13, "heads": 2, "rank": 3, "init_std": 0.1},
    ),
    "synthesizer_mixture": ("synthesizer_mixture", {"max_len": 13, "heads": 2}),
    "synthesizer_mixture-t5": (
        "synthesizer_mixture",
        {"max_len": 12, "heads": 2, "pair_bias": {"name": "t5", "buckets": 8, "max_distance": 6}},
    ),
    "synthesizer_mixture-all": (
        "synthesizer_mixture",
        {
            "max_len": 13,
            "heads": 2,
            "parts": ["dense", "random", "factorized_dense", "factorized_random", "attention"],
            "alpha_per_head": True,
            "share_heads": True,
            "rank": 2,
        },
    ),
    "synthesizer_mixture-gated": (
        "synthesizer_mixture",
        {"max_len": 12, "heads": 2, "head_dim": 3, "join": "gated", "parts": ["attention", "dense"], "scale": 1.0},
    ),
    "synthesizer_mixture-plus": (
        "synthesizer_mixture",
        {"max_len": 13, "heads": 2, "join": "plus", "parts": ["random", "factorized_random"], "init_std": 0.1},
    ),
    # linear
    "linear": ("linear", {"heads": 2}),
    "linear-exp": ("linear", {"heads": 1, "feature": "exp"}),
    "linear-softmax": ("linear", {"heads": 4, "feature": "softmax", "qkv_bias": False, "out_bias": False}),
    "performer": ("performer", {"heads": 2, "num_features": 5}),
    "performer-relu": ("performer", {"heads": 1, "feature": "relu", "orthogonal": False, "redraw_interval": 2}),
    "rfa": ("rfa", {"heads": 2, "num_features": 6}),
    "rfa-gate": ("rfa", {"heads": 1, "gate": True}),
    "rfa-arccos": ("rfa", {"heads": 2, "num_features": 9, "feature": "arccos", "gate": True}),
    # local and other patterns
    "local": ("local", {"window": 3, "heads": 2}),
    "local-alibi": ("local", {"window": 3, "heads": 4, "bias": {"name": "alibi", "learned": True}}),
    "local-pool-t5": (
        "local",
        {
            "window": 4,
            "heads": 2,
            "outside": "pool",
            "bias": {"name": "t5", "buckets": 8, "max_distance": 6, "two_sided": True},
        },
    ),
    "local-pool": ("local", {"window": 3, "heads": 2, "outside": "pool"}),
    "strided": ("strided", {"stride": 3, "heads": 4}),
    "strided-alibi": ("strided", {"stride": 3, "heads": 4, "bias": {"name": "alibi", "learned": True}}),
    "strided-merged": ("strided", {"stride": 2, "heads": 1, "merged": True, "qkv_bias": False}),
    "fixed": ("fixed", {"stride": 4, "columns": 2, "heads": 4}),
    "fixed-kerple": ("fixed", {"stride": 3, "columns": 1, "heads": 2, "merged": True, "bias": {"name": "kerple"}}),
    "fixed-merged": ("fixed", {"stride": 3, "columns": 1, "heads": 1, "merged": True, "out_bias": False}),
    "longformer": ("longformer", {"window": 2, "dilation": [1, 2], "global_tokens": 2, "heads": 2}),
    "longformer-t5": (
        "longformer",
        {
            "window": 4,
            "dilation": [2, 1, 1, 2],
            "global_tokens": 2,
            "heads": 4,
            "bias": {"name": "t5", "buckets": 8, "max_distance": 6, "two_sided": True},
        },
    ),
    "etc": ("etc", {"radius": 1, "global_tokens": 2, "heads": 2}),
    "bigbird": ("bigbird", {"block": 2, "random_blocks": 1, "global_blocks": 1, "seed": 3, "heads": 2}),
    "bigbird-kerple": (
        "bigbird",
        {"block": 2, "random_blocks": 2, "global_blocks": 1, "seed": 3, "heads": 4, "bias": {"name": "kerple"}},
    ),
    # low rank
    "linformer": ("linformer", {"max_len": 13, "rank": 3, "heads": 2}),
    "linformer-heads": (
        "linformer",
        {"max_len": 12, "rank": 4, "heads": 4, "sharing": "none", "qkv_bias": False, "out_bias": False},
    ),
    "linformer-layers": ("linformer", {"max_len": 13, "rank": 3, "heads": 1, "sharing": "layerwise"}),
    "nystrom": ("nystrom", {"landmarks": 4, "heads": 2}),
    "nystrom-conv": ("nystrom", {"landmarks": 3, "heads": 4, "iterations": 2, "conv_kernel": 3, "qkv_bias": False}),
    "memory_compressed": ("memory_compressed", {"heads": 2, "block": 3}),
    "memory_compressed-local": ("memory_compressed", {"heads": 4, "block": 4, "mode": "local", "qkv_bias": False}),
    "spatial_reduction": ("spatial_reduction", {"ratio": 3, "heads": 2}),
    "spatial_reduction-2d": ("spatial_reduction", {"ratio": 2, "ndim": 2, "heads": 2, "qkv_bias": False}),
    "spatial_reduction-prefix": ("spatial_reduction", {"ratio": 2, "ndim": 2, "heads": 4}),
    "set": ("set", {"points": 3, "heads": 2, "qkv_bias": False}),
    "set-mab": ("set", {"points": 4, "heads": 4, "inner": "mab"}),
    # gated, convolutional and MLP
    "lightconv": ("lightconv", {"heads": 2, "kernel_size": 5}),
    "lightconv-plain": (
        "lightconv",
        {"heads": 4, "kernel_size": 3, "glu": False, "qkv_bias": False, "out_bias": False},
    ),
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
    "reformer": ("reformer", {"heads": 2, "buckets": 4, "chunk": 2, "rounds": 3}),
    "reformer-one-round": (
        "reformer",
        {"heads": 4, "buckets": 2, "chunk": 2, "rounds": 1, "seed": 2, "qkv_bias": False, "out_bias": False},
    ),
    "routing": ("routing", {"heads": 2, "clusters": 2, "window": 3, "seed": 1}),
    "routing-one-head": (
        "routing",
        {"heads": 1, "clusters": 3, "window": 2, "decay": 0.9, "qkv_bias": False, "out_bias": False},
    ),
    "sinkhorn": ("sinkhorn", {"heads": 2, "block": 3, "iterations": 3}),
    "sinkhorn-gumbel": (
        "sinkhorn",
        {
            "heads": 4,
            "block": 4,
            "iterations": 1,
            "temperature": 1.0,
            "gumbel": True,
            "qkv_bias": False,
            "out_bias": False,
        },
    ),
    # memory
    "transformer_xl": ("transformer_xl", {"heads": 2}),
    "transformer_xl-memory": ("transformer_xl", {"heads": 4, "memory": 4, "qkv_bias": False}),
    "compressive": ("compressive", {"heads": 2, "memory": 2, "compressed": 2, "rate": 2}),
    "compressive-conv": (
        "compressive",
        {"heads": 4, "memory": 3, "compressed": 1, "rate": 3, "pool": "conv", "qkv_bias": False},
    ),
    "compressive-max": ("compressive", {"heads": 2, "memory": 1, "compressed": 3, "rate": 2, "pool": "max"}),
    # images
    "axial": ("axial", {"heads": 2, "width": 4}),
    "axial-grid": ("axial", {"heads": 4, "width": None, "order": [0, 1], "qkv_bias": False}),
    "axial-sum": ("axial", {"heads": 2, "ndim": 3, "width": None, "combine": "sum"}),
    "axial-3d": ("axial", {"heads": 2, "ndim": 3, "width": None}),
    "image_local": ("image_local", {"heads": 2, "block": 3, "memory": 2}),
    "image_local-2d": (
        "image_local",
        {"heads": 2, "ndim": 2, "block": [2, 3], "memory": [1, 2], "width": 4, "qkv_bias": False},
    ),
    "image_local-grid": ("image_local", {"heads": 2, "ndim": 2, "block": [2, 2], "memory": 1}),
    "pct_attention": ("pct_attention", {"scale": 0.5}),
    "pct_attention-tied": ("pct_attention", {"tied": True, "key_width": 3, "qk_bias": True, "v_bias": False}),
    "pct_attention-linear": ("pct_attention", {"norm": None, "out_bias": False}),
}

GRIDS: dict[str, tuple[tuple[int, ...], int]] = {
    "aft_conv-2d": ((2, 5), 0),
    "aft_conv-2d-signed": ((3, 4), 0),
    "aft_conv-2d-signed-none": ((3, 3), 2),
    "aft_conv-2d-depthwise": ((3, 4), 1),
    "aft_conv-2d-whole": ((2, 5), 2),
    "aft_conv-2d-prefix": ((3, 4), 2),
    "aft_conv-3d": ((2, 2, 3), 0),
    "spatial_reduction-2d": ((4, 2), 0),
    "spatial_reduction-prefix": ((3, 5), 2),
    "image_local-grid": ((3, 3), 1),
    "axial-grid": ((3, 4), 2),
    "axial-sum": ((2, 2, 3), 1),
    "axial-3d": ((2, 3, 2), 0),
    "lambda-2d": ((3, 4), 2),
    "pooling-2d": ((3, 4), 0),
}
"""Case id -> (grid, prefix), for the cases that mix grids. These have no causal form."""


ONLY_CAUSAL = ["attention-xpos", "attention-cope", "attention-xpos-cope"]
ONLY_CAUSAL += [case for case, (name, _) in CASES.items() if MIXERS[name].facts.causal_only]
"""Cases whose mixer or options are defined in the causal form alone."""

BOTH_WAYS = [case for case in CASES if case not in ONLY_CAUSAL]

FIRST = {name: case for case, (name, _) in reversed(CASES.items())}
"""Mixer -> its first case."""

QUICK = os.environ.get("TOKENMIX_QUICK")
"""`make quick M=name`: the tests are about this mixer alone."""


def subject_of(case: str, causal: bool):
    """The subject of one test."""
    name, options = CASES[case]
    grid, prefix = GRIDS.get(case, (None, 0))
    return subject(name, {**options, "causal": causal}, dim=DIM, grid=grid, prefix=prefix)


def forms() -> list[tuple[str, bool]]:
    """Every case, bidirectional and, but for those on grids, causal."""
    chosen = [case for case in CASES if QUICK in (None, CASES[case][0])]
    return [(case, causal) for case in chosen for causal in _ways(case)]


def _ways(case: str) -> tuple[bool, ...]:
    if case in ONLY_CAUSAL:
        return (True,)
    return (False,) if case in GRIDS else MIXERS[CASES[case][0]].facts.causal_forms()
