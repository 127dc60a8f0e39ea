"""Layers of transformers beside ours with the same weights: gated recurrences and short convolutions."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix.hosts import convert_layer
from tokenmix.mixers import Mixer
from tokenmix.mixers.parts.recurrent import LowRank


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


def copy_low_rank(target: LowRank, down: nn.Module, up: nn.Module) -> None:
    """Copy two linear maps."""
    copy(target.down, down)
    copy(target.up, up)


def both(theirs: nn.Module) -> tuple[nn.Module, Mixer]:
    """Return a layer of transformers with weights that matter, and ours with the same ones."""
    ours = convert_layer(perturb(theirs))
    assert not ours.training
    return theirs, ours


def qwen(hidden: int = 32, heads: int = 2, values: int = 4, width: int = 8) -> tuple[nn.Module, Mixer]:
    """Return Qwen3-Next's Gated DeltaNet, whose projections are interleaved by key head, and ours."""
    from transformers.models.qwen3_next import modeling_qwen3_next as hf

    config = hf.Qwen3NextConfig(
        hidden_size=hidden, num_hidden_layers=1, rms_norm_eps=1e-4, **delta_sizes(heads, values, width)
    )
    return both(hf.Qwen3NextGatedDeltaNet(config, 0))


def delta_sizes(heads: int, values: int, width: int) -> dict[str, int]:
    """Return the fields of configs for layers with a delta rule."""
    return {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": values,
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
    }


def qwen_split(*, experts: bool = False) -> tuple[nn.Module, Mixer]:
    """Return Qwen3.5's Gated DeltaNet, whose projections are split, and ours."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as sparse

    hf: Any = sparse if experts else dense
    name = "Qwen3_5Moe" if experts else "Qwen3_5"
    sizes = delta_sizes(2, 4, 8) | {"linear_conv_kernel_dim": 3}
    config = getattr(hf, f"{name}TextConfig")(hidden_size=32, num_hidden_layers=1, **sizes)
    return both(getattr(hf, f"{name}GatedDeltaNet")(config, 0))


def olmo(hidden: int = 32, heads: int = 2, width: int = 8, wide: int = 12) -> tuple[nn.Module, Mixer]:
    """Return OLMo-hybrid's Gated DeltaNet, with betas up to 2, and ours."""
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid as hf

    config = hf.OlmoHybridConfig(
        hidden_size=hidden,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        linear_allow_neg_eigval=True,
        **delta_sizes(heads, heads, width) | {"linear_value_head_dim": wide},
    )
    return both(hf.OlmoHybridGatedDeltaNet(config, 0))


def kimi(hidden: int = 32, heads: int = 2, width: int = 8) -> tuple[nn.Module, Mixer]:
    """Return Kimi Linear's delta attention, with a decay per feature and low-rank gates, and ours."""
    from transformers.models.kimi_linear import modeling_kimi_linear as hf

    config = hf.KimiLinearConfig(
        hidden_size=hidden, num_hidden_layers=1, linear_head_dim=width, linear_num_heads=heads, layer_types=None
    )
    return both(hf.KimiLinearDeltaAttention(config, 0))


def mamba(hidden: int = 16, heads: int = 4, state: int = 6, groups: int = 2, **more: Any) -> tuple[nn.Module, Mixer]:
    """Return transformers' Mamba-2, and ours."""
    from transformers.models.mamba2 import modeling_mamba2 as hf

    options = {"num_hidden_layers": 1, "chunk_size": 8, "time_step_limit": (0.0, 1.0), **more}
    sizes = {"num_heads": heads, "head_dim": 2 * hidden // heads, "state_size": state, "n_groups": groups}
    return both(hf.Mamba2Mixer(hf.Mamba2Config(hidden_size=hidden, **sizes, **options), 0))


def of_hybrid(name: str, kind: str, layer: str, **options: Any) -> tuple[nn.Module, Mixer]:
    """Return the Mamba-2 of a hybrid model, and ours."""
    hf: Any = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    config = getattr(hf, f"{kind}Config")(hidden_size=16, num_attention_heads=2, **options)
    return both(getattr(hf, f"{kind}{layer}")(config, 0))


BAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_chunk_size": 8}
NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 6, "n_groups": 2, "chunk_size": 8}
ZAMBA = {"n_mamba_heads": 4, "mamba_headdim": 8, "mamba_d_state": 6, "mamba_ngroups": 2, "chunk_size": 8}


def lfm(hidden: int = 16, *, bias: bool = False) -> tuple[nn.Module, Mixer]:
    """Return LFM2's gated short convolution, and ours."""
    from transformers.models.lfm2 import modeling_lfm2 as hf

    config = hf.Lfm2Config(
        hidden_size=hidden, num_hidden_layers=1, conv_bias=bias, num_attention_heads=2, num_key_value_heads=2
    )
    return both(hf.Lfm2ShortConv(config, 0))


PAIRS: dict[str, Callable[[], tuple[nn.Module, Mixer]]] = {
    "qwen3_next": qwen,
    "olmo_hybrid": olmo,
    "kimi_linear": kimi,
    "mamba2": mamba,
    "lfm2": lfm,
}
"""One layer of each kind."""
OTHERS: dict[str, Callable[[], tuple[nn.Module, Mixer]]] = {
    "qwen3_5": qwen_split,
    "qwen3_5_moe": partial(qwen_split, experts=True),
    "mamba2 with biases": partial(mamba, use_bias=True, use_conv_bias=False, time_step_limit=(0.0, float("inf"))),
    "bamba": partial(of_hybrid, "bamba", "Bamba", "Mixer", num_key_value_heads=2, mamba_proj_bias=True, **BAMBA),
    "granite 4": partial(
        of_hybrid, "granitemoehybrid", "GraniteMoeHybrid", "MambaLayer", num_key_value_heads=2, **BAMBA
    ),
    "nemotron_h, whose steps have a lower bound alone": partial(
        of_hybrid, "nemotron_h", "NemotronH", "Mamba2Mixer", time_step_min=0.3, **NEMOTRON
    ),
    "zamba2": partial(of_hybrid, "zamba2", "Zamba2", "MambaMixer", **ZAMBA),
    "lfm2 with biases": partial(lfm, bias=True),
}
"""Layers of other models and options."""
