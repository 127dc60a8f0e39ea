"""State what surgery knows of each family of hosts; a new family is one entry of ``FAMILIES``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

from torch import Tensor, nn

from ...types import Options
from ..cache_names import CACHE_NAMES


def _describe_separate(module: Any) -> Options:
    """Describe a module with q_proj, k_proj and v_proj, as most newer models have."""
    return {
        "dim": module.q_proj.in_features,
        "heads": module.q_proj.out_features // module.head_dim,
        "kv_heads": module.k_proj.out_features // module.head_dim,
        "head_dim": module.head_dim,
        "causal": bool(module.is_causal),
        "cross": "Cross" in type(module).__name__,
        "layer": getattr(module, "layer_idx", None),
        "max_len": None,
    }


@dataclass(frozen=True)
class CallForm:
    """State how a host calls an attention module that is not called as those of transformers are.

    Args:
        hidden, mask, context, positions: names of the arguments with the tokens, a mask, the other sequence of
            cross-attention, and the positions of the tokens; None: it has none.
        cache: names of arguments with keys and values of earlier tokens.
        ignored: names of arguments without a meaning for a mixer.
        returns: what the module returns: "output", or a tuple of "output", names of arguments that it passes on, and
            constants.
        mask_axes: of the mask: "BS" of keys, "TS", "BTS" or "B1TS" of pairs.
        mask_means: "keep": True or 1 is attended; "hide": it is not; "add": numbers that are added to logits.
        hidden_below: numbers of such a mask at or below this hide.
        batch_first: tokens are (B, T, D), and not (T, B, D).
        tokens: the only number of tokens that the module takes; None: any.
        example: returns further arguments of a call with these tokens.
    """

    hidden: str
    mask: str | None = None
    context: str | None = None
    positions: str | None = None
    cache: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    returns: Any = "output"
    mask_axes: str = "B1TS"
    mask_means: str = "add"
    hidden_below: float = -1e4
    batch_first: bool = True
    tokens: Callable[[Any], int | None] = field(default=lambda module: None)
    example: Callable[[Any, Tensor], Options] = field(default=lambda module, x: {})


@dataclass(frozen=True)
class Family:
    """State how the attention modules of a family are recognised, described, called and taken apart.

    Args:
        classes: names of the classes that share its ``forward``.
        library: where they come from; it decides how a host calls them, and so which adapter replaces them.
        mark: dotted, an attribute that its modules have; same-named classes of other versions, and modules that were
            replaced already, lack it.
        describe: returns what a module says of itself, as fields of ``Site``.
        weights: names of the weights of queries, keys, values and output; one that repeats is a fused tensor, with
            these parts in this order. Biases are beside them.
        context_weights: the same in cross-attention, where it differs.
        by_head: a fused tensor has the parts of one head after those of another, as in GPT-NeoX.
        transposed: weights are (in, out), as in GPT-2's Conv1D.
        one_plus: how the names of classes begin whose norms multiply by 1 + weight.
        parts: the submodules that are replaced, the mixer's first; "" is the module itself.
        kept: how the names of parameters begin that are no part of attention and stay.
        dropout: the attribute with the dropout of the module's output, a module or a rate; elsewhere the layer does
            that.
        adds_positions: position_embeddings are added to the input of queries and keys; elsewhere they are rotary.
        context_mask: the argument with the mask of another sequence.
        prefix: model_type -> number of tokens before the patches of an image; other types have one.
        form: how the modules are called; None: as those of transformers with the same arguments.
        neutral: paths of what makes the terms of the logits that ``Site.beyond`` names; without these the rest is
            verified.
        own: paths of submodules that stay in the place of the module, because other layers read them.
        bias: returns the bias of ours that equals such a term, which mixers with a bias take over; None: none does.
        softmax: returns the options with which ``attention`` computes the same, where the weights do not show them.
    """

    classes: tuple[str, ...]
    library: Literal["transformers", "timm", "torch", "own"] = "transformers"
    mark: str = "q_proj"
    describe: Callable[[Any], Options] = _describe_separate
    weights: tuple[str, str, str, str] = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
    context_weights: tuple[str, str, str, str] | None = None
    by_head: bool = False
    transposed: bool = False
    one_plus: tuple[str, ...] = ()
    parts: tuple[str, ...] = ("",)
    kept: tuple[str, ...] = ()
    dropout: str = "residual_dropout"
    adds_positions: bool = False
    context_mask: str = "attention_mask"
    prefix: Mapping[str, int] = field(default_factory=dict)
    form: CallForm | None = None
    neutral: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    bias: Callable[[Any], Options] | None = None
    softmax: Callable[[Any], Options] = field(default=lambda module: {})


def first_position(config: Any) -> int:
    """Return the position of the first token: in relatives of RoBERTa that after the index of the padding token."""
    late = config.model_type in ("roberta", "xlm-roberta", "camembert", "data2vec-text")
    return int(config.pad_token_id) + 1 if late else 0


def _describe_bert(module: Any) -> Options:
    """Describe a module of BERT's, whose projections are in its ``self`` and its ``output``."""
    inner, config = module.self, module.self.config
    return {
        "dim": inner.query.in_features,
        "heads": inner.num_attention_heads,
        "kv_heads": inner.num_attention_heads,
        "head_dim": inner.attention_head_size,
        "causal": bool(getattr(inner, "is_causal", False)),
        "cross": "Cross" in type(inner).__name__,
        "layer": inner.layer_idx,
        "max_len": config.max_position_embeddings - first_position(config),
    }


def _describe_dinov2(module: Any) -> Options:
    """Describe a module of DINOv2's in transformers 5.16: projections are in its ``attention`` and its ``output``."""
    inner = module.attention
    return {
        "dim": inner.query.in_features,
        "heads": inner.num_attention_heads,
        "kv_heads": inner.num_attention_heads,
        "head_dim": inner.attention_head_size,
    }


def _describe_gpt2(module: Any) -> Options:
    """Describe a module of GPT-2's."""
    return {
        "dim": module.embed_dim,
        "heads": module.num_heads,
        "kv_heads": module.num_heads,
        "head_dim": module.head_dim,
        "causal": not module.is_cross_attention,
        "cross": module.is_cross_attention,
        "layer": module.layer_idx,
        "max_len": module.config.max_position_embeddings,
    }


def _describe_distilbert(module: Any) -> Options:
    """Describe a module of DistilBERT's."""
    return {
        "dim": module.dim,
        "heads": module.n_heads,
        "kv_heads": module.n_heads,
        "head_dim": module.dim // module.n_heads,
        "max_len": module.config.max_position_embeddings,
    }


def _describe_llama(module: Any) -> Options:
    """Describe a module with rotary positions, which may have a window."""
    config = module.config
    window = module.sliding_window if hasattr(module, "sliding_window") else getattr(config, "sliding_window", None)
    norms = "it normalises queries and keys with qk_layernorm, which mixers do not support"
    facts = _describe_separate(module) if hasattr(module, "q_proj") else _describe_one_projection(module)
    return facts | {
        "rotary": bool(getattr(module, "use_rope", True)),
        "window": window or None,
        "max_len": config.max_position_embeddings,
        "obstacle": norms if getattr(module, "qk_layernorm", False) else None,
    }


def _describe_falcon_h1(module: Any) -> Options:
    """Describe a module of Falcon-H1's, which multiplies its keys by a number."""
    return _describe_llama(module) | {"scale": module.head_dim**-0.5 * module.key_multiplier}


def _describe_gemma2(module: Any) -> Options:
    """Describe a module of Gemma 2's, whose logits have a cap."""
    cap = module.attn_logit_softcapping
    return _describe_llama(module) | {"beyond": f"a cap of {cap:g} on its logits" if cap else None}


def _describe_t5(module: Any) -> Options:
    """Describe a module of T5's. The bias of the first layer of a stack serves all its self-attention."""
    bias = getattr(module, "relative_attention_num_buckets", None)
    return {
        "dim": module.d_model,
        "heads": module.n_heads,
        "kv_heads": module.n_heads,
        "head_dim": module.key_value_proj_dim,
        "causal": bool(module.is_decoder),  # cross-attention is told apart by its name
        "layer": module.layer_idx,
        "scale": 1.0,
        "beyond": "a bias of relative positions" if bias else None,
    }


def _t5_bias(module: Any) -> Options:
    """Return the spec of the bias of T5's self-attention."""
    return {
        "name": "t5",
        "buckets": module.relative_attention_num_buckets,
        "max_distance": module.relative_attention_max_distance,
        "two_sided": not module.is_decoder,
    }


def _describe_deberta(module: Any) -> Options:
    """Describe a module of DeBERTa v2's and v3's."""
    inner = module.self
    terms = 1 + sum(kind in inner.pos_att_type for kind in ("c2p", "p2c"))
    disentangled = "terms of relative positions with queries and keys"
    return {
        "dim": inner.query_proj.in_features,
        "heads": inner.num_attention_heads,
        "kv_heads": inner.num_attention_heads,
        "head_dim": inner.attention_head_size,
        "max_len": module.config.max_position_embeddings,
        "scale": (inner.attention_head_size * terms) ** -0.5,
        "beyond": disentangled if inner.relative_attention else None,
    }


def _describe_one_projection(module: Any) -> Options:
    """Describe a module with one projection for queries, keys and values: Phi-3, GPT-NeoX, ModernBERT."""
    config = module.config
    heads = config.num_attention_heads
    return {
        "dim": config.hidden_size,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", heads),
        "head_dim": getattr(module, "head_dim", config.hidden_size // heads),
        "causal": bool(module.is_causal),
        "layer": module.layer_idx,
    }


def _describe_bart(module: Any) -> Options:
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
    return _describe_separate(module) | {"cross": cross, "max_len": longest}


def _describe_clip(module: Any) -> Options:
    """Describe a module of CLIP's text model, which is causal by its calls, or of SigLIP's, which is not causal."""
    text = not hasattr(module.config, "image_size")
    facts = _describe_separate(module) | {"causal": text and type(module).__name__ == "CLIPAttention"}
    return facts | ({"max_len": module.config.max_position_embeddings} if text else {})


def _describe_timm(module: Any) -> Options:
    """Describe a module of timm's."""

    def is_identity(name: str) -> bool:
        return isinstance(getattr(module, name, None), (nn.Identity, type(None)))

    found = {
        "qk_norm": (is_identity("q_norm") and is_identity("k_norm")) or head_norm(module) is not None,
        "scale_norm": is_identity("norm"),
        "gated": is_identity("gate"),
    }
    odd = ", ".join(name for name, fine in found.items() if not fine)
    return {
        "dim": module.qkv.in_features,
        "heads": module.num_heads,
        "kv_heads": module.num_heads,
        "head_dim": module.head_dim,
        "obstacle": f"it was built with {odd}, which mixers do not support" if odd else None,
    }


def head_norm(module: Any, head_dim: int | None = None) -> str | None:
    """Return the kind of the norm of queries and keys in each head: "layer", "rms", or None."""
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    kinds = {
        "rms" if "rms" in type(n).__name__.lower() else "layer" if isinstance(n, nn.LayerNorm) else None for n in norms
    }
    weights = [weight for n in norms if (weight := getattr(n, "weight", None)) is not None]
    width = head_dim or module.head_dim
    by_head = len(weights) == 2 and all(w.shape == (width,) for w in weights)
    return kinds.pop() if by_head and len(kinds) == 1 else None


def _describe_torch(module: nn.MultiheadAttention) -> Options:
    """Describe ``nn.MultiheadAttention``."""
    odd = None
    if module.bias_k is not None or module.add_zero_attn:
        built_with = "add_bias_kv" if module.bias_k is not None else "add_zero_attn"
        odd = f"it was built with {built_with}, which mixers do not support"
    elif not module._qkv_same_embed_dim:
        widths = f"its keys have {module.kdim} features and its values {module.vdim}, its queries {module.embed_dim}"
        odd = f"{widths}; they must be equal"
    return {
        "dim": module.embed_dim,
        "heads": module.num_heads,
        "kv_heads": module.num_heads,
        "head_dim": module.head_dim,
        "obstacle": odd,
    }


FAMILIES = {
    "bert": Family(
        classes=(
            "BertAttention",
            "RobertaAttention",
            "XLMRobertaAttention",
            "CamembertAttention",
            "ElectraAttention",
            "ErnieAttention",
            "Data2VecTextAttention",
        ),
        mark="self.query",
        describe=_describe_bert,
        weights=("self.query.weight", "self.key.weight", "self.value.weight", "output.dense.weight"),
        parts=("self", "output.dense"),
        kept=("output.LayerNorm.",),
    ),
    "distilbert": Family(
        classes=("DistilBertSelfAttention",),
        mark="q_lin",
        describe=_describe_distilbert,
        weights=("q_lin.weight", "k_lin.weight", "v_lin.weight", "out_lin.weight"),
    ),
    "gpt2": Family(
        classes=("GPT2Attention",),
        mark="c_attn",
        describe=_describe_gpt2,
        weights=("c_attn.weight", "c_attn.weight", "c_attn.weight", "c_proj.weight"),
        context_weights=("q_attn.weight", "c_attn.weight", "c_attn.weight", "c_proj.weight"),
        transposed=True,
        dropout="resid_dropout",
        context_mask="encoder_attention_mask",
    ),
    "llama": Family(
        classes=(
            "LlamaAttention",
            "MistralAttention",
            "MixtralAttention",
            "Qwen2Attention",
            "Qwen2MoeAttention",
            "GemmaAttention",
            "GraniteAttention",
            "Qwen3Attention",
            "Qwen3MoeAttention",
            "Starcoder2Attention",
            "StableLmAttention",
            "Gemma3Attention",
            "SmolLM3Attention",
            "ArceeAttention",
            "GraniteMoeAttention",
            "GraniteMoeSharedAttention",
            "EuroBertAttention",
            "BambaAttention",
        ),
        describe=_describe_llama,
        one_plus=("Gemma",),
    ),
    "jamba": Family(classes=("JambaAttention",)),
    "falcon_h1": Family(classes=("FalconH1Attention",), describe=_describe_falcon_h1),
    "gemma2": Family(classes=("Gemma2Attention",), describe=_describe_gemma2, neutral=("attn_logit_softcapping",)),
    "t5": Family(
        classes=("T5Attention", "MT5Attention"),
        mark="q",
        describe=_describe_t5,
        weights=("q.weight", "k.weight", "v.weight", "o.weight"),
        kept=("relative_attention_bias.",),
        form=CallForm(
            "hidden_states",
            "mask",
            "key_value_states",
            cache=CACHE_NAMES,
            ignored=("position_bias", "cache_position"),
            returns=("output", "position_bias", None),
        ),
        neutral=("relative_attention_bias.weight",),
        own=("relative_attention_bias",),
        bias=_t5_bias,
    ),
    "deberta": Family(
        classes=("DebertaV2Attention",),
        mark="self.query_proj",
        describe=_describe_deberta,
        weights=("self.query_proj.weight", "self.key_proj.weight", "self.value_proj.weight", "output.dense.weight"),
        parts=("self", "output.dense"),
        kept=("output.LayerNorm.", "self.pos_key_proj.", "self.pos_query_proj."),
        form=CallForm(
            "hidden_states",
            "attention_mask",
            ignored=("relative_pos", "rel_embeddings"),
            returns=("output", None),
            mask_means="keep",
        ),
        neutral=("self.relative_attention",),
    ),
    "modernbert": Family(
        classes=("ModernBertAttention",),
        mark="Wqkv",
        describe=_describe_llama,
        weights=("Wqkv.weight", "Wqkv.weight", "Wqkv.weight", "Wo.weight"),
        dropout="out_drop",  # an Identity if the rate is 0
    ),
    "phi": Family(
        classes=("PhiAttention",),
        mark="dense",
        describe=_describe_llama,
        weights=("q_proj.weight", "k_proj.weight", "v_proj.weight", "dense.weight"),
    ),
    "phi3": Family(
        classes=("Phi3Attention",),
        mark="qkv_proj",
        describe=_describe_llama,
        weights=("qkv_proj.weight", "qkv_proj.weight", "qkv_proj.weight", "o_proj.weight"),
    ),
    "gpt_neox": Family(
        classes=("GPTNeoXAttention",),
        mark="query_key_value",
        describe=_describe_llama,
        weights=("query_key_value.weight", "query_key_value.weight", "query_key_value.weight", "dense.weight"),
        by_head=True,
    ),
    "bart": Family(
        classes=(
            "BartAttention",
            "MBartAttention",
            "MarianAttention",
            "PegasusAttention",
            "M2M100Attention",
            "WhisperAttention",
            "OPTAttention",
            "BlenderbotAttention",
            "BlenderbotSmallAttention",
            "PLBartAttention",
            "BioGptAttention",
        ),
        describe=_describe_bart,
        weights=("q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight"),
    ),
    "vit": Family(
        classes=(
            "ViTAttention",
            "DeiTAttention",
            "ViTMSNAttention",
            "IJepaAttention",
            "Dinov2Attention",
            "Dinov2WithRegistersAttention",
        ),
        prefix={"deit": 2, "ijepa": 0},
    ),
    "dinov2": Family(  # as in transformers 5.16; later ones belong to vit
        classes=("Dinov2Attention", "Dinov2WithRegistersAttention"),
        mark="attention.query",
        describe=_describe_dinov2,
        weights=("attention.query.weight", "attention.key.weight", "attention.value.weight", "output.dense.weight"),
        parts=("attention", "output.dense"),
    ),
    "clip": Family(
        classes=("CLIPAttention", "SiglipAttention"),
        describe=_describe_clip,
        weights=("q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight"),
        prefix={"siglip_vision_model": 0},
    ),
    "detr": Family(classes=("DetrSelfAttention", "DetrCrossAttention"), adds_positions=True),
    "timm": Family(
        classes=("Attention",),
        library="timm",
        mark="qkv",
        describe=_describe_timm,
        weights=("qkv.weight", "qkv.weight", "qkv.weight", "proj.weight"),
        dropout="proj_drop",
    ),
    "torch": Family(
        classes=("MultiheadAttention",),
        library="torch",
        mark="out_proj",
        describe=_describe_torch,
        weights=("in_proj_weight", "in_proj_weight", "in_proj_weight", "out_proj.weight"),
    ),
}
"""Family -> what is known of it."""


def forward_class(module: nn.Module) -> type | None:
    """Return the class that defines a module's ``forward``."""
    return next((cls for cls in type(module).__mro__ if "forward" in vars(cls)), None)


def family_of(module: nn.Module) -> str | None:
    """Return the family of an attention module, by the class that defines its ``forward``; None if unknown."""
    owner = forward_class(module)
    if owner is None:
        return None
    for name, family in FAMILIES.items():
        known = owner.__name__ in family.classes and owner.__module__.startswith(f"{family.library}.")
        if known and _has_attribute(module, family.mark):
            return name
    return None


def _has_attribute(module: nn.Module, path: str) -> bool:
    try:
        attrgetter(path)(module)
    except AttributeError:
        return False
    return True
