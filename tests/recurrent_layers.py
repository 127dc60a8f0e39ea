"""Layers of transformers beside ours with the same weights: gated recurrences and short convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix import build_mixer
from tokenmix.contrib.parts.recurrent import LowRank
from tokenmix.mixers import Mixer


def perturb(layer: nn.Module) -> nn.Module:
    """Draw every parameter at a size at which it matters."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            plain = name.endswith(("A_log", "dt_bias", "norm.weight", "D"))
            p.copy_(torch.rand_like(p) + 0.2 if plain else torch.randn_like(p) * 0.4)
    return layer.eval()


def copy(target: Tensor | nn.Module | None, source: Tensor | nn.Module) -> None:
    """Copy a parameter, or the weights of a linear or low-rank map, of the same size."""
    assert target is not None
    if isinstance(target, Tensor):
        assert isinstance(source, Tensor)
        assert target.numel() == source.numel()
        with torch.no_grad():
            target.copy_(source.reshape(target.shape))
    else:
        target.load_state_dict(source.state_dict())  # type: ignore[union-attr]  # a module, as the target is one


def same_delta(theirs: Any, ours: Any, norm: nn.Module, out: nn.Linear) -> None:
    """Copy what all layers with a delta rule call alike."""
    copy(ours.conv.weight, theirs.conv1d.weight)
    copy(ours.norm, norm.weight)
    copy(ours.out_proj, out)


def qwen(hidden: int = 32, heads: int = 2, values: int = 4, width: int = 8) -> tuple[nn.Module, Mixer]:
    """Return Qwen3-Next's Gated DeltaNet, whose projections are interleaved by key head, and ours."""
    from transformers.models.qwen3_next import modeling_qwen3_next as hf

    config = hf.Qwen3NextConfig(
        hidden_size=hidden,
        num_hidden_layers=1,
        linear_num_key_heads=heads,
        linear_num_value_heads=values,
        linear_key_head_dim=width,
        linear_value_head_dim=width,
    )
    theirs: Any = perturb(hf.Qwen3NextGatedDeltaNet(config, 0))
    options = {"heads": heads, "value_heads": values, "head_dim": width, "value_dim": width, "eps": 1e-6}
    ours: Any = build_mixer("gated_delta", hidden, **options)
    group, weight = values // heads, theirs.in_proj_qkvz.weight.unflatten(0, (heads, -1))
    parts = weight.split([width, width, group * width, group * width], 1)
    for name, part in zip(("q_proj", "k_proj", "v_proj", "g_proj"), parts, strict=True):
        copy(getattr(ours, name).weight, part.flatten(0, 1))
    b, a = theirs.in_proj_ba.weight.unflatten(0, (heads, -1)).split([group, group], 1)
    copy(ours.b_proj.weight, b.flatten(0, 1))
    copy(ours.a_proj.weight, a.flatten(0, 1))
    copy(ours.A_log, theirs.A_log)
    copy(ours.dt_bias, theirs.dt_bias)
    same_delta(theirs, ours, theirs.norm, theirs.out_proj)
    return theirs, ours.eval()


def olmo(hidden: int = 32, heads: int = 2, width: int = 8, wide: int = 12) -> tuple[nn.Module, Mixer]:
    """Return OLMo-hybrid's Gated DeltaNet, with betas up to 2, and ours."""
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid as hf

    config = hf.OlmoHybridConfig(
        hidden_size=hidden,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=width,
        linear_value_head_dim=wide,
        linear_allow_neg_eigval=True,
    )
    theirs: Any = perturb(hf.OlmoHybridGatedDeltaNet(config, 0))
    ours: Any = build_mixer("gated_delta", hidden, heads=heads, head_dim=width, value_dim=wide, negative=True)
    for name in ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj", "A_log", "dt_bias"):
        copy(getattr(ours, name), getattr(theirs, name))
    same_delta(theirs, ours, theirs.o_norm, theirs.o_proj)
    return theirs, ours.eval()


def copy_low_rank(target: LowRank, down: nn.Module, up: nn.Module) -> None:
    """Copy two linear maps."""
    copy(target.down, down)
    copy(target.up, up)


def kimi(hidden: int = 32, heads: int = 2, width: int = 8) -> tuple[nn.Module, Mixer]:
    """Return Kimi Linear's delta attention, with a decay per feature and low-rank gates, and ours."""
    from transformers.models.kimi_linear import modeling_kimi_linear as hf

    config = hf.KimiLinearConfig(
        hidden_size=hidden, num_hidden_layers=1, linear_head_dim=width, linear_num_heads=heads, layer_types=None
    )
    theirs: Any = perturb(hf.KimiLinearDeltaAttention(config, 0))
    options = {"decay": "feature", "gate": "sigmoid", "gate_rank": width}
    ours: Any = build_mixer("gated_delta", hidden, heads=heads, head_dim=width, **options)
    for name in ("q_proj", "k_proj", "v_proj", "b_proj"):
        copy(getattr(ours, name), getattr(theirs, name))
    gate = theirs.forget_gate
    copy_low_rank(ours.a_proj, gate.f_a_proj, gate.f_b_proj)
    copy_low_rank(ours.g_proj, theirs.g_a_proj, theirs.g_b_proj)
    copy(ours.A_log, gate.A_log)
    copy(ours.dt_bias, gate.dt_bias)
    same_delta(theirs, ours, theirs.o_norm, theirs.o_proj)
    return theirs, ours.eval()


def mamba(hidden: int = 16, heads: int = 4, state: int = 6, groups: int = 2) -> tuple[nn.Module, Mixer]:
    """Return transformers' Mamba-2, and ours."""
    from transformers.models.mamba2 import modeling_mamba2 as hf

    config = hf.Mamba2Config(
        hidden_size=hidden,
        num_hidden_layers=1,
        num_heads=heads,
        head_dim=2 * hidden // heads,
        state_size=state,
        n_groups=groups,
        chunk_size=8,
        time_step_limit=(0.0, 1.0),
    )
    theirs: Any = perturb(hf.Mamba2Mixer(config, 0))
    options = {"heads": heads, "state_dim": state, "groups": groups, "dt_limit": (0.0, 1.0)}
    ours: Any = build_mixer("mamba2", hidden, **options)
    for name in ("in_proj", "out_proj", "A_log", "dt_bias", "D"):
        copy(getattr(ours, name), getattr(theirs, name))
    copy(ours.conv.weight, theirs.conv1d.weight)
    copy(ours.conv.bias, theirs.conv1d.bias)
    copy(ours.norm, theirs.norm.weight)
    ours.eps = config.layer_norm_epsilon
    return theirs, ours.eval()


def lfm(hidden: int = 16, *, bias: bool = False) -> tuple[nn.Module, Mixer]:
    """Return LFM2's gated short convolution, and ours."""
    from transformers.models.lfm2 import modeling_lfm2 as hf

    config = hf.Lfm2Config(
        hidden_size=hidden, num_hidden_layers=1, conv_bias=bias, num_attention_heads=2, num_key_value_heads=2
    )
    theirs: Any = perturb(hf.Lfm2ShortConv(config, 0))
    options = {"kernel_size": config.conv_L_cache, "conv_bias": bias, "qkv_bias": bias, "out_bias": bias}
    ours: Any = build_mixer("short_conv", hidden, **options)
    copy(ours.in_proj, theirs.in_proj)
    copy(ours.out_proj, theirs.out_proj)
    copy(ours.kernel, theirs.conv.weight)
    if bias:
        copy(ours.conv_bias, theirs.conv.bias)
    return theirs, ours.eval()


PAIRS: dict[str, Callable[[], tuple[nn.Module, Mixer]]] = {
    "qwen3_next": qwen,
    "olmo_hybrid": olmo,
    "kimi_linear": kimi,
    "mamba2": mamba,
    "lfm2": lfm,
}
