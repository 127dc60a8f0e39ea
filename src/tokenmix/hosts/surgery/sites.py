"""Find and describe every attention module of a known family in a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...errors import MixerError
from ..patch_grid import find_patch_embedding

FAMILIES: dict[str, tuple[str, ...]] = {
    "bert": (
        "BertAttention",
        "RobertaAttention",
        "XLMRobertaAttention",
        "CamembertAttention",
        "ElectraAttention",
        "ErnieAttention",
        "Data2VecTextAttention",
    ),
    "distilbert": ("DistilBertSelfAttention",),
    "gpt2": ("GPT2Attention",),
    "llama": (
        "LlamaAttention",
        "MistralAttention",
        "MixtralAttention",
        "Qwen2Attention",
        "Qwen2MoeAttention",
        "GemmaAttention",
        "GraniteAttention",
    )
    + (
        "Qwen3Attention",
        "Qwen3MoeAttention",
        "Starcoder2Attention",
        "StableLmAttention",
        "Gemma3Attention",
        "SmolLM3Attention",
        "ArceeAttention",
    )
    + ("GraniteMoeAttention", "GraniteMoeSharedAttention", "EuroBertAttention"),
    "modernbert": ("ModernBertAttention",),
    "phi": ("PhiAttention",),
    "phi3": ("Phi3Attention",),
    "gpt_neox": ("GPTNeoXAttention",),
    "bart": (
        "BartAttention",
        "MBartAttention",
        "MarianAttention",
        "PegasusAttention",
        "M2M100Attention",
        "WhisperAttention",
        "OPTAttention",
    )
    + ("BlenderbotAttention", "BlenderbotSmallAttention", "PLBartAttention", "BioGptAttention"),
    "vit": (
        "ViTAttention",
        "DeiTAttention",
        "ViTMSNAttention",
        "IJepaAttention",
        "Dinov2Attention",
        "Dinov2WithRegistersAttention",
    ),
    "clip": ("CLIPAttention", "SiglipAttention"),
    "detr": ("DetrSelfAttention", "DetrCrossAttention"),
    "timm": ("Attention",),
    "torch": ("MultiheadAttention",),
}
"""Family -> the classes that share its ``forward``: of transformers, except for the last two families."""
PROJECTIONS = {
    "bert": "self",
    "distilbert": "q_lin",
    "gpt2": "c_attn",
    "modernbert": "Wqkv",
    "phi": "dense",
    "phi3": "qkv_proj",
    "gpt_neox": "query_key_value",
    "timm": "qkv",
    "torch": "out_proj",
}
"""Family -> an attribute that its modules have and same-named classes of other versions of transformers lack.

Other families have ``q_proj``.
"""
PACKAGES = {"timm": "timm.", "torch": "torch."}  # other families: transformers


@dataclass(frozen=True)
class Site:
    """Describe one attention module of a model.

    Args:
        name: dotted, as in ``model.get_submodule(name)``.
        family: of ``FAMILIES``.
        heads, kv_heads, head_dim: number of heads of queries, and of keys and values; features of each.
        causal: queries attend only themselves and earlier tokens. False for torch's, where each call decides.
        cross: keys and values come from another sequence.
        rotary: the module rotates queries and keys by their positions.
        max_len: number of tokens that the model has positions for; None: unlimited or unknown.
        grid, prefix: of an image model, patches (H, W) of the images it was built for, and the number of tokens before
            them.
        patch: of an image model, the sides of a patch in pixels; None: its patch embedding tells the grid itself.
        qk_norm: how queries and keys are normalised per head: "layer" or "rms"; None: not at all.
        window: only tokens less than this far away are attended, the token itself included; None: all.
        layer: the module's number in a cache; None: it has none.
        obstacle: why it cannot be replaced as it is; None: it can.
    """

    name: str
    family: str
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = False
    cross: bool = False
    rotary: bool = False
    max_len: int | None = None
    grid: tuple[int, int] | None = None
    prefix: int = 0
    patch: tuple[int, int] | None = None
    qk_norm: str | None = None
    window: int | None = None
    layer: int | None = None
    obstacle: str | None = None


def find_attention(model: nn.Module) -> list[Site]:
    """Return every attention module of a known family, in the model's order.

    Known are BERT, ModernBERT, DistilBERT, GPT-2, GPT-NeoX, Llama, Phi, BART, ViT, CLIP and DETR of transformers and
    their relatives, timm's ``Attention``, and ``nn.MultiheadAttention``; see ``FAMILIES``. A class of another name,
    or a subclass with its own ``forward``, is skipped, because what it computes is unknown.

    Raises:
        MixerError: for anything but a module.
    """
    if not isinstance(model, nn.Module):
        raise MixerError(f"find_attention: expects a model, an nn.Module, got {type(model).__name__}.")
    return [site for site, _ in _attention(model)]


def unknown_attention(model: nn.Module) -> list[str]:
    """Return the class names of modules that look like attention and belong to no known family."""
    known = tuple(site.name for site, _ in _attention(model))
    inside = [name + "." for name in known]
    names = {
        n: f"{type(m).__module__}.Attention" if type(m).__name__ == "Attention" else type(m).__name__
        for n, m in model.named_modules()
        if "attention" in type(m).__name__.lower() and n not in known and not type(m).__module__.startswith("tokenmix.")
    }
    return sorted({cls for n, cls in names.items() if not any(n.startswith(each) for each in inside)})


def unknown_hint(model: nn.Module) -> str:
    """Return the end of an error message: the unknown attention of a model, and the known families."""
    odd = ", ".join(unknown_attention(model))
    seen = f"; it has {odd}, whose computation is unknown" if odd else ""
    return f"{seen}; known are the families {', '.join(FAMILIES)}, whose classes tokenmix.hosts.surgery.FAMILIES lists."


def _attention(model: nn.Module) -> Iterator[tuple[Site, nn.Module]]:
    for name, module in model.named_modules():
        family = family_of(module)
        if family is not None:
            try:
                yield _describe_site(model, name, module, family), module
            except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
                continue  # built differently from the class of that name: what it computes is unknown


def family_of(module: nn.Module) -> str | None:
    """Return the family of an attention module, by the class that defines its ``forward``; None if unknown."""
    owner = next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), None)
    # BERT's, already replaced
    if owner is None or (hasattr(module, "self") and not hasattr(module.self, "query")):
        return None
    for family, classes in FAMILIES.items():
        if owner.__name__ in classes and owner.__module__.startswith(PACKAGES.get(family, "transformers.")):
            return family if hasattr(module, PROJECTIONS.get(family, "q_proj")) else None
    return None


def _describe_site(model: nn.Module, name: str, module: Any, family: str) -> Site:
    describe = {
        "bert": _bert,
        "distilbert": _distilbert,
        "gpt2": _gpt2,
        "bart": _bart,
        "clip": _clip,
        "timm": _timm,
        "torch": _torch,
    }
    describe |= dict.fromkeys(("llama", "modernbert", "phi", "phi3", "gpt_neox"), _llama)
    facts = describe.get(family, _separate)(module)
    config = getattr(module, "config", None)
    if family == "timm" or (hasattr(config, "patch_size") and hasattr(config, "image_size")):
        facts |= _image(model, name, module)
    facts["qk_norm"] = _norm_of(module)
    if facts.get("grid") is not None:
        facts["max_len"] = facts["prefix"] + facts["grid"][0] * facts["grid"][1]
    if family == "torch":
        facts["cross"] = name.rpartition(".")[2] == "multihead_attn"  # of nn.TransformerDecoderLayer
    return Site(name, family, **facts)


def first_position(config: Any) -> int:
    """Return the position of the first token: in relatives of RoBERTa that after the index of the padding token."""
    late = config.model_type in ("roberta", "xlm-roberta", "camembert", "data2vec-text")
    return int(config.pad_token_id) + 1 if late else 0


def _bert(module: Any) -> dict[str, Any]:
    inner, config = module.self, module.self.config
    heads, width = inner.num_attention_heads, inner.attention_head_size
    table = config.max_position_embeddings - first_position(config)
    causal = bool(getattr(inner, "is_causal", False))
    facts = {
        "dim": inner.query.in_features,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": width,
        "causal": causal,
        "max_len": table,
    }
    return facts | {"cross": "Cross" in type(inner).__name__, "layer": inner.layer_idx}


def _gpt2(module: Any) -> dict[str, Any]:
    heads, config = module.num_heads, module.config
    facts = {
        "dim": module.embed_dim,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": module.head_dim,
        "max_len": config.max_position_embeddings,
    }
    return facts | {
        "causal": not module.is_cross_attention,
        "cross": module.is_cross_attention,
        "layer": module.layer_idx,
    }


def _distilbert(module: Any) -> dict[str, Any]:
    heads = module.n_heads
    return {
        "dim": module.dim,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": module.dim // heads,
        "max_len": module.config.max_position_embeddings,
    }


def _separate(module: Any) -> dict[str, Any]:
    """Describe a module with q_proj, k_proj and v_proj, as most newer models have."""
    heads, kv_heads = module.q_proj.out_features // module.head_dim, module.k_proj.out_features // module.head_dim
    facts = {
        "dim": module.q_proj.in_features,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": module.head_dim,
        "causal": bool(module.is_causal),
    }
    return facts | {
        "cross": "Cross" in type(module).__name__,
        "layer": getattr(module, "layer_idx", None),
        "max_len": None,
    }


def _llama(module: Any) -> dict[str, Any]:
    config = module.config
    window = module.sliding_window if hasattr(module, "sliding_window") else getattr(config, "sliding_window", None)
    norms = "it normalises queries and keys with qk_layernorm, which mixers do not support"
    odd = norms if getattr(module, "qk_layernorm", False) else None
    facts = {
        "rotary": bool(getattr(module, "use_rope", True)),
        "window": window or None,
        "max_len": config.max_position_embeddings,
        "obstacle": odd,
    }
    return (_separate(module) if hasattr(module, "q_proj") else _one_projection(module)) | facts


def _one_projection(module: Any) -> dict[str, Any]:
    """Describe a module with one projection for queries, keys and values: Phi-3, GPT-NeoX, ModernBERT."""
    config = module.config
    heads = config.num_attention_heads
    facts = {
        "dim": config.hidden_size,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", heads),
        "layer": module.layer_idx,
    }
    return facts | {
        "head_dim": getattr(module, "head_dim", config.hidden_size // heads),
        "causal": bool(module.is_causal),
    }


def _bart(module: Any) -> dict[str, Any]:
    """Describe a module of BART's class, which serves encoders, decoders and cross-attention.

    Cross-attention belongs to a decoder and is not causal.
    """
    config = module.config
    cross = getattr(module, "is_decoder", False) and not module.is_causal
    if not hasattr(config, "max_source_positions"):
        longest = config.max_position_embeddings
    else:  # Whisper's two lengths
        source, target = config.max_source_positions, config.max_target_positions
        longest = max(source, target) if cross else target if module.is_causal else source
    return _separate(module) | {"cross": cross, "max_len": longest}


def _clip(module: Any) -> dict[str, Any]:
    """Describe a module of CLIP's text model, which is causal by its calls, or of SigLIP's, which is not causal."""
    text = not hasattr(module.config, "image_size")
    facts = _separate(module) | {"causal": text and type(module).__name__ == "CLIPAttention"}
    return facts | ({"max_len": module.config.max_position_embeddings} if text else {})


def _norm_of(module: Any) -> str | None:
    """Return the kind of the per-head norm of queries and keys."""
    norms: tuple[Any, ...] = getattr(module, "q_norm", None), getattr(module, "k_norm", None)
    kinds = {
        "rms" if "rms" in type(n).__name__.lower() else "layer" if isinstance(n, nn.LayerNorm) else None for n in norms
    }
    weights = [n.weight for n in norms if getattr(n, "weight", None) is not None]
    by_head = len(weights) == 2 and all(w.shape == (module.head_dim,) for w in weights)
    return kinds.pop() if by_head and len(kinds) == 1 else None


def _timm(module: Any) -> dict[str, Any]:
    def is_identity(name: str) -> bool:
        return isinstance(getattr(module, name, None), (nn.Identity, type(None)))

    found = {
        "qk_norm": (is_identity("q_norm") and is_identity("k_norm")) or _norm_of(module) is not None,
        "scale_norm": is_identity("norm"),
        "gated": is_identity("gate"),
    }
    odd = ", ".join(name for name, fine in found.items() if not fine)
    facts = {
        "dim": module.qkv.in_features,
        "heads": module.num_heads,
        "kv_heads": module.num_heads,
        "head_dim": module.head_dim,
    }
    return facts | {"obstacle": f"it was built with {odd}, which mixers do not support" if odd else None}


def _torch(module: nn.MultiheadAttention) -> dict[str, Any]:
    heads = module.num_heads
    odd = None
    if module.bias_k is not None or module.add_zero_attn:
        built_with = "add_bias_kv" if module.bias_k is not None else "add_zero_attn"
        odd = f"it was built with {built_with}, which mixers do not support"
    elif not module._qkv_same_embed_dim:
        widths = f"its keys have {module.kdim} features and its values {module.vdim}, its queries {module.embed_dim}"
        odd = f"{widths}; they must be equal"
    return {"dim": module.embed_dim, "heads": heads, "kv_heads": heads, "head_dim": module.head_dim, "obstacle": odd}


def _image(model: nn.Module, name: str, module: Any) -> dict[str, Any]:
    """Return the patches of an image model, and the number of tokens before them."""
    if hasattr(module, "config"):
        config = module.config
        prefix = {"deit": 2, "ijepa": 0, "siglip_vision_model": 0}.get(config.model_type, 1) + getattr(
            config, "num_register_tokens", 0
        )
        (rows, columns), patch = _pair(config.image_size), _pair(config.patch_size)
        return {"grid": (rows // patch[0], columns // patch[1]), "prefix": prefix, "patch": patch}
    if (found := find_patch_embedding(model, name)) is None:
        return {}
    embedding, owner = found
    grid = getattr(embedding, "grid_size", None)
    return {"grid": None if grid is None else tuple(grid), "prefix": getattr(owner, "num_prefix_tokens", 0)}


def _pair(sides: Any) -> tuple[int, int]:
    return (sides[0], sides[1]) if isinstance(sides, (tuple, list)) else (sides, sides)
