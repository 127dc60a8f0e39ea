"""Tiny hybrids of transformers with random weights: one of each family whose layers ``cpu_kernels`` replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
HEAD = {"head_dim": 16}
MLP = {"intermediate_size": 48}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 3,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
BAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}


def build(name: str, config: str, model: str | None = None, **options: Any) -> Any:
    """Build a model for text with random weights that matter."""
    import transformers

    torch.manual_seed(0)
    given = getattr(transformers, f"{config}Config")(**{**SIZES, **options})
    built = getattr(transformers, f"{model or config}ForCausalLM")(given)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for part, p in built.named_parameters():
            if part.endswith(("A_log", "dt_bias", "D")):
                p.copy_(torch.rand(p.shape, generator=draw) + 0.2)
            elif p.ndim > 1:
                p.copy_(torch.randn(p.shape, generator=draw) * (1 if "embed" in part else p[0].numel() ** -0.5))
    return built.eval()


def qwen3_next() -> Any:
    return build("qwen3_next", "Qwen3Next", **DELTA, **HEAD, **MLP, **EXPERTS)


def qwen3_5() -> Any:
    return build("qwen3_5", "Qwen3_5Text", "Qwen3_5", **DELTA, **HEAD, **MLP)


def qwen3_5_moe() -> Any:
    return build("qwen3_5_moe", "Qwen3_5MoeText", "Qwen3_5Moe", **DELTA, **HEAD, **MLP, **EXPERTS)


def olmo_hybrid() -> Any:
    return build(
        "olmo_hybrid",
        "OlmoHybrid",
        **DELTA | {"linear_num_value_heads": 2, "linear_value_head_dim": 12},
        **MLP,
        linear_allow_neg_eigval=True,
    )


def kimi_linear() -> Any:
    return build(
        "kimi_linear",
        "KimiLinear",
        **MLP,
        num_hidden_layers=3,
        layer_types=DELTA["layer_types"],
        mlp_layer_types=["dense"] * 3,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        linear_num_heads=2,
        linear_head_dim=8,
        num_key_value_heads=2,
    )


def mamba2() -> Any:
    return build(
        "mamba2", "Mamba2", num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=2, chunk_size=8
    )


def bamba() -> Any:
    return build("bamba", "Bamba", **MLP, **BAMBA, num_hidden_layers=3, attn_layer_indices=[1])


def falcon_h1() -> Any:
    return build("falcon_h1", "FalconH1", **MLP, **HEAD, **BAMBA, num_hidden_layers=2, mamba_d_ssm=64)


def granitemoehybrid() -> Any:
    return build(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        **MLP,
        **BAMBA,
        num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=0,
        shared_intermediate_size=48,
    )


def nemotron_h() -> Any:
    return build(
        "nemotron_h",
        "NemotronH",
        **MLP,
        **HEAD,
        layers_block_type=["mamba", "attention", "mamba"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=8,
    )


def zamba2() -> Any:
    return build(
        "zamba2",
        "Zamba2",
        **MLP,
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "mamba"],
        n_mamba_heads=4,
        mamba_headdim=16,
        mamba_d_state=8,
        mamba_ngroups=2,
        chunk_size=8,
        num_mem_blocks=1,
        num_key_value_heads=2,
    )


LFM = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}


def lfm2() -> Any:
    return build("lfm2", "Lfm2", **MLP, **LFM)


def lfm2_moe() -> Any:
    return build("lfm2_moe", "Lfm2Moe", **MLP, **LFM, **EXPERTS, num_dense_layers=1)


MODELS: dict[str, Callable[[], Any]] = {
    f.__name__: f
    for f in (
        qwen3_next,
        qwen3_5,
        qwen3_5_moe,
        olmo_hybrid,
        kimi_linear,
        mamba2,
        bamba,
        falcon_h1,
        granitemoehybrid,
        nemotron_h,
        zamba2,
        lfm2,
        lfm2_moe,
    )
}
