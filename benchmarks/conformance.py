"""Check the promises of public models: which implementation keeps which, and the input that breaks it.

    python benchmarks/conformance.py [NAMES] [--promises NAME ...] [--record] [--folder DIR]

Models of transformers are tiny, with random weights, and those of timm have their own size. ``--record`` writes
benchmarks/results/conformance.json, of NAMES only their parts, from which docs/conformance.md takes its tables.
``--folder`` writes the config of each model of transformers to a folder, for ``tokenmix check hf:DIR/NAME``.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tokenmix.testing import ContractError, PromiseReport, check_recurrence
from tokenmix.testing.model_subject import model_subject
from tokenmix.testing.models import open_model, run_model_promises

RESULTS = Path(__file__).parent / "results/conformance.json"


class Model(NamedTuple):
    """A class of transformers with the fields of its config."""

    cls: str
    config: str
    fields: dict[str, Any]


SIZE = {"vocab_size": 31, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 128}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BASE = {**SIZE, **HEADS, **TOKENS, "intermediate_size": 48}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 4,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "experts_implementation": "eager"}
ALONE = {"vocab_size": 31, "hidden_size": 32, "num_hidden_layers": 2, **TOKENS}
ENCODER = {**SIZE, "num_attention_heads": 4, "intermediate_size": 48, "pad_token_id": 0}


def decoder(name: str, fields: dict[str, Any], config: str | None = None) -> Model:
    """Return a causal language model of transformers by the stem of its names."""
    return Model(f"{name}ForCausalLM", config or f"{name}Config", fields)


OURS = {
    **{k: v for k, v in BASE.items() if k not in ("intermediate_size", "num_key_value_heads")},
    "mixers": [{"name": "gated_delta", "heads": 2}, {"name": "attention", "positions": {"name": "rotary"}}],
    "positions": None,
}

MODELS: dict[str, Model] = {
    "tokenmix": Model("TokenMixForCausalLM", "TokenMixConfig", OURS),
    "gpt2": Model(
        "GPT2LMHeadModel", "GPT2Config", {"vocab_size": 31, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    ),
    "llama": decoder("Llama", BASE),
    "qwen3": decoder("Qwen3", {**BASE, "head_dim": 8}),
    "gemma3": decoder(
        "Gemma3",
        {**BASE, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        "Gemma3TextConfig",
    ),
    "gpt_oss": decoder(
        "GptOss",
        {
            **BASE,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "experts_implementation": "eager",
            "sliding_window": 64,
        },
    ),
    "opt": decoder("OPT", {**BASE, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "qwen3_next": decoder(
        "Qwen3Next",
        {**BASE, **DELTA, **EXPERTS, "head_dim": 8, "num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_5": decoder("Qwen3_5", {**BASE, **DELTA, "head_dim": 8}, "Qwen3_5TextConfig"),
    "olmo_hybrid": decoder("OlmoHybrid", {**BASE, **DELTA, "linear_num_value_heads": 2}),
    "kimi_linear": decoder(
        "KimiLinear",
        {
            **BASE,
            **EXPERTS,
            "num_local_experts": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "mamba": decoder("Mamba", {**ALONE, "state_size": 8}),
    "mamba2": decoder(
        "Mamba2", {**ALONE, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 4}
    ),
    "falcon_mamba": decoder("FalconMamba", {**ALONE, "state_size": 8}),
    "bamba": decoder("Bamba", {**BASE, **MAMBA, "attn_layer_indices": [1]}),
    "falcon_h1": decoder("FalconH1", {**BASE, **MAMBA, "mamba_d_ssm": 64, "head_dim": 8}),
    "granitemoehybrid": decoder(
        "GraniteMoeHybrid",
        {
            **BASE,
            **MAMBA,
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
            "experts_implementation": "eager",
        },
    ),
    "nemotron_h": decoder(
        "NemotronH",
        {
            **{k: v for k, v in BASE.items() if k != "num_hidden_layers"},
            "layers_block_type": ["mamba", "attention", "mlp"],
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 4,
        },
    ),
    "zamba2": decoder(
        "Zamba2",
        {
            **BASE,
            "num_key_value_heads": 4,
            "layers_block_type": ["mamba", "hybrid"],
            "n_mamba_heads": 4,
            "mamba_d_state": 8,
            "mamba_ngroups": 2,
            "chunk_size": 4,
        },
    ),
    "jamba": decoder(
        "Jamba",
        {
            **BASE,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 8,
            "experts_implementation": "eager",
        },
    ),
    "lfm2": decoder("Lfm2", {**BASE, "layer_types": ["conv", "full_attention"]}),
    "recurrent_gemma": decoder(
        "RecurrentGemma",
        {**ALONE, "intermediate_size": 96, "num_attention_heads": 4, "block_types": ["recurrent", "attention"]}
        | {"attention_window_size": 64},
    ),
    "minimax": decoder(
        "MiniMax",
        {
            **BASE,
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "block_size": 4,
            "num_local_experts": 4,
            "experts_implementation": "eager",
        },
    ),
    "rwkv": decoder("Rwkv", {"vocab_size": 31, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 128}),
    "bert": Model("BertForMaskedLM", "BertConfig", ENCODER),
    "modernbert": Model("ModernBertForMaskedLM", "ModernBertConfig", {**ENCODER, "local_attention": 4}),
    "t5": Model(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 31, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"pad_token_id": 0, "decoder_start_token_id": 0},
    ),
}
"""Models of transformers by the names of their folders there, and one of this library."""
FUNCTIONS = {
    "torch_chunk_gated_delta_rule": ("qwen3_next", "fla", "head"),
    "torch_recurrent_gated_delta_rule": ("qwen3_next", "fla", "head"),
    "chunk_kimi_delta_attention": ("kimi_linear", "fla", "feature"),
    "recurrent_kimi_delta_attention": ("kimi_linear", "fla", "feature"),
    "mamba2_chunk_scan": ("mamba2", "mamba_ssm", "head"),
    "mamba2_selective_state_update": ("mamba2", "mamba_ssm_step", "head"),
}
"""Functions of transformers: the folder of their model, their signature, and what their decay is for."""
TIMM = {
    "vit_tiny_patch16_224": {"depth": 2},
    "swin_tiny_patch4_window7_224": {"depths": [1, 1, 1, 1]},
    "xcit_nano_12_p16_224": {"depth": 2},
    "mixer_s32_224": {},
    "poolformer_s12": {},
    "mambaout_femto": {},
}


def build_public(name: str) -> nn.Module:
    """Build a model of the tables with random weights."""
    if name in TIMM:
        return open_model(f"timm:{name}", TIMM[name])[0]
    import transformers

    import tokenmix.hosts.huggingface as ours

    library: Any = ours if name == "tokenmix" else transformers
    found, fields = MODELS[name], dict(MODELS[name].fields)
    implementation = fields.pop("experts_implementation", None)
    config = getattr(library, found.config)(**fields)
    config.architectures = [found.cls]
    if implementation is not None:
        config._experts_implementation = implementation
    torch.manual_seed(0)
    built: nn.Module = getattr(library, found.cls)(config).eval()
    return built


def check_function(name: str) -> PromiseReport:
    """Check a function of transformers."""
    import tokenmix.hosts.huggingface  # noqa: F401  (some installations of transformers need what it prepares)

    folder, signature, decay = FUNCTIONS[name]
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    try:
        return check_recurrence(getattr(module, name), signature, decay=decay)  # type: ignore[arg-type]  # literals
    except ContractError as found:
        return found.report


def main() -> None:
    """Check the models and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--promises", nargs="*")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found, functions = {}, {}
    for name in args.names or [*MODELS, *TIMM, *FUNCTIONS]:
        if name in FUNCTIONS:
            functions[name] = check_function(name)
            print(functions[name], flush=True)
            continue
        model: Any = build_public(name)
        if args.folder is not None and name in MODELS:
            model.config.save_pretrained(args.folder / name)
        report = run_model_promises(model_subject(model, perturb=True, title=name), args.promises)
        print(report, flush=True)
        found[name] = report.as_dict()
    if args.record:
        import timm
        import transformers

        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        versions |= {"timm": timm.__version__}
        record = json.loads(RESULTS.read_text()) if args.names else {"models": {}, "functions": {}}
        record["versions"] = versions
        found = record["models"] | found
        record["models"] = {name: found[name] for name in (*MODELS, *TIMM) if name in found}
        record["functions"] |= {name: report.as_dict() for name, report in functions.items()}
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
