"""Take the weights of recurrent layers of transformers into the mixers that compute the same."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..mixers import Mixer, build_mixer
from ..types import Options, Spec

Tensors = dict[str, Tensor]
Reader = Callable[[Any, Tensors], tuple[Spec, Tensors]]
"""Takes the layer and its tensors, of which it removes those that it uses; returns our spec and our tensors."""
LARGEST = 1e38
"""Stands for a bound of infinity, which no option may be."""


def convert_layer(layer: nn.Module) -> Mixer:
    """Build the mixer that equals a recurrent layer of transformers, with copies of its weights in their dtypes.

    Takes the gated delta layers of Qwen3-Next, Qwen3.5, OLMo-hybrid and Kimi Linear, the Mamba-2 layers of Mamba-2,
    Bamba, Granite 4, Nemotron-H and Zamba2, and the short convolutions of LFM2, by the names of their classes.

    Args:
        layer: one layer, such as ``model.layers[0].linear_attn``; not the model.

    Returns:
        ``gated_delta``, ``mamba2`` or ``short_conv``, in the layer's mode.

    Raises:
        MixerError: for another class, and for a layer with an option or a tensor that the mixer does not have.
    """
    kind = type(layer).__name__
    if kind not in READERS:
        _refuse(f"no mixer is known to equal {kind}; the layers known are {', '.join(READERS)}")
    activation = getattr(layer, "activation", "silu")
    if activation not in ("silu", "swish"):
        _refuse(f"{kind} has the activation {activation!r}, and the mixer silu alone")
    theirs = {name: tensor.detach() for name, tensor in layer.state_dict().items()}
    spec, found = READERS[kind](layer, theirs)
    if theirs:
        _refuse(f"{kind} has {', '.join(theirs)}, for which {spec['name']} has no place")
    with torch.device("meta"):
        mixer = build_mixer(**spec)
    wanted = mixer.state_dict()
    for name in wanted.keys() ^ found.keys():
        _refuse(f"{kind} does not fit {spec['name']}: {name} is in one of them only")
    for name, tensor in found.items():
        if tensor.numel() != wanted[name].numel():
            _refuse(f"{kind} does not fit {spec['name']}: {name} is {tuple(tensor.shape)} there")
        found[name] = tensor.reshape(wanted[name].shape).clone(memory_format=torch.contiguous_format)
    mixer.load_state_dict(found, assign=True)
    return mixer.train(layer.training)


def _refuse(why: str) -> NoReturn:
    raise MixerError(f"convert_layer: {why}.")


def _rename(theirs: Tensors, names: dict[str, str]) -> Tensors:
    """Remove those of these tensors, ours -> theirs, that there are, and return them by our names."""
    return {ours: theirs.pop(name) for ours, name in names.items() if name in theirs}


def _read_delta(theirs: Tensors, norm: str, out: str) -> Tensors:
    """Return what all layers with a delta rule and one decay per head call alike."""
    same = {name: name for name in ("A_log", "dt_bias")}
    return _rename(
        theirs, same | {"conv.weight": "conv1d.weight", "norm": f"{norm}.weight", "out_proj.weight": f"{out}.weight"}
    )


def _delta_spec(layer: Any, norm: Any, **options: Any) -> Spec:
    sizes: Options = {
        "heads": layer.num_k_heads,
        "value_heads": layer.num_v_heads,
        "head_dim": layer.head_k_dim,
        "value_dim": layer.head_v_dim,
    }
    rest: Options = {"kernel_size": layer.conv_kernel_size, "eps": norm.variance_epsilon}
    return {"name": "gated_delta", "dim": layer.hidden_size, **sizes, **rest, **options}


def _read_interleaved(layer: Any, theirs: Tensors) -> tuple[Spec, Tensors]:
    """Read Qwen3-Next's: each key head's query, key, values and gates follow each other."""
    keys, group = layer.num_k_heads, layer.num_v_heads // layer.num_k_heads
    K, V = layer.head_k_dim, layer.head_v_dim
    found = _read_delta(theirs, "norm", "out_proj")
    for whole, parts, sizes in (
        ("in_proj_qkvz", "qkvg", (K, K, group * V, group * V)),
        ("in_proj_ba", "ba", (group, group)),
    ):
        by_head = theirs.pop(f"{whole}.weight").unflatten(0, (keys, -1)).split(sizes, 1)
        found |= {f"{part}_proj.weight": some.flatten(0, 1) for part, some in zip(parts, by_head, strict=True)}
    return _delta_spec(layer, layer.norm), found


def _read_split(layer: Any, theirs: Tensors) -> tuple[Spec, Tensors]:
    """Read Qwen3.5's: queries, keys and values in one matrix, one after the other."""
    found = _read_delta(theirs, "norm", "out_proj")
    found |= _rename(
        theirs, {f"{ours}_proj.weight": f"in_proj_{name}.weight" for ours, name in zip("gba", "zba", strict=True)}
    )
    parts = theirs.pop("in_proj_qkv.weight").split((layer.key_dim, layer.key_dim, layer.value_dim))
    return _delta_spec(layer, layer.norm), found | {f"{a}_proj.weight": p for a, p in zip("qkv", parts, strict=True)}


def _read_apart(layer: Any, theirs: Tensors) -> tuple[Spec, Tensors]:
    """Read OLMo-hybrid's: every projection has a matrix of its own."""
    found = _read_delta(theirs, "o_norm", "o_proj")
    found |= _rename(theirs, {name: name for name in (f"{part}_proj.weight" for part in "qkvgab")})
    return _delta_spec(layer, layer.o_norm, negative=bool(layer.allow_neg_eigval)), found


def _read_by_feature(layer: Any, theirs: Tensors) -> tuple[Spec, Tensors]:
    """Read Kimi Linear's: a decay per feature, and gates of low rank."""
    names = {f"{part}_proj.weight": f"{part}_proj.weight" for part in "qkvb"} | {
        "A_log": "forget_gate.A_log",
        "dt_bias": "forget_gate.dt_bias",
        "conv.weight": "conv1d.weight",
        "norm": "o_norm.weight",
        "out_proj.weight": "o_proj.weight",
        "a_proj.down.weight": "forget_gate.f_a_proj.weight",
        "a_proj.up.weight": "forget_gate.f_b_proj.weight",
        "g_proj.down.weight": "g_a_proj.weight",
        "g_proj.up.weight": "g_b_proj.weight",
    }
    spec: Spec = {
        "name": "gated_delta",
        "dim": layer.hidden_size,
        "heads": layer.num_heads,
        "head_dim": layer.head_dim,
        "decay": "feature",
        "gate": "sigmoid",
        "gate_rank": layer.head_dim,
        "kernel_size": layer.conv_kernel_size,
        "eps": layer.o_norm.variance_epsilon,
    }
    return spec, _rename(theirs, names)


def _read_mamba2(layer: Any, theirs: Tensors) -> tuple[Spec, Tensors]:
    inner, dim = layer.intermediate_size, layer.hidden_size
    if inner % dim:
        _refuse(f"{type(layer).__name__} has {inner} features of values, and mamba2 a multiple of dim={dim}")
    low, high = layer.time_step_limit
    biased = {f"{part}_bias": f"{name}.bias" in theirs for part, name in (("qkv", "in_proj"), ("out", "out_proj"))}
    spec: Spec = {
        "name": "mamba2",
        "dim": dim,
        "heads": layer.num_heads,
        "expand": inner // dim,
        "state_dim": layer.ssm_state_size,
        "groups": layer.n_groups,
        "dt_limit": None if (low, high) == (0.0, inf) else (float(low), min(float(high), LARGEST)),
        "kernel_size": layer.conv_kernel_size,
        "conv_bias": "conv1d.bias" in theirs,
        "eps": layer.norm.variance_epsilon,
        **biased,
    }
    same = ("A_log", "dt_bias", "D", *(f"{part}_proj.{leaf}" for part in ("in", "out") for leaf in ("weight", "bias")))
    names = {name: name for name in same} | {f"conv.{leaf}": f"conv1d.{leaf}" for leaf in ("weight", "bias")}
    return spec, _rename(theirs, names | {"norm": "norm.weight"})


def _read_short_conv(layer: Any, theirs: Tensors) -> tuple[Spec, Tensors]:
    biased = "in_proj.bias" in theirs
    spec: Spec = {
        "name": "short_conv",
        "dim": layer.out_proj.in_features,
        "kernel_size": layer.conv_kernel_size,
        "conv_bias": "conv.bias" in theirs,
        "qkv_bias": biased,
        "out_bias": biased,
    }
    names = {f"{part}_proj.{leaf}": f"{part}_proj.{leaf}" for part in ("in", "out") for leaf in ("weight", "bias")}
    return spec, _rename(theirs, names | {"kernel": "conv.weight", "conv_bias": "conv.bias"})


READERS: dict[str, Reader] = {
    "Qwen3NextGatedDeltaNet": _read_interleaved,
    "Qwen3_5GatedDeltaNet": _read_split,
    "Qwen3_5MoeGatedDeltaNet": _read_split,
    "OlmoHybridGatedDeltaNet": _read_apart,
    "KimiLinearDeltaAttention": _read_by_feature,
    "Mamba2Mixer": _read_mamba2,
    "BambaMixer": _read_mamba2,
    "GraniteMoeHybridMambaLayer": _read_mamba2,
    "NemotronHMamba2Mixer": _read_mamba2,
    "Zamba2MambaMixer": _read_mamba2,
    "Lfm2ShortConv": _read_short_conv,
    "Lfm2MoeShortConv": _read_short_conv,
}
"""Class of transformers -> how its layers are read."""
