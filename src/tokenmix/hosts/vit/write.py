"""Write our softmax ViTs under the names of timm and of Hugging Face transformers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...mixers import is_softmax
from ...models import ViT, ViTConfig
from ...types import Options
from .names import HF, HF_FILES, PROJECTIONS, TIMM, their_name

USUAL = {"heads": 8, "qkv_bias": True, "qk_norm": None, "norm_eps": 1e-6}
"""Options of attention that their ViTs set once for all layers, with our defaults."""


def to_timm(model: ViT, *, no_embed_class: bool = False) -> dict[str, Tensor]:
    """Return a state dict of timm's ``VisionTransformer(**timm_options(model.config))`` for a softmax ViT.

    The weights are kept bit for bit. Registers get rows of zeros among timm's positions, because ours have none.

    Args:
        no_embed_class: for a timm model whose class token and registers have no rows among the positions. The class
            token's row must then be zero, as it is in a ViT read from such a model.

    Raises:
        MixerError: for mixers other than softmax attention, grouped keys, sinusoidal positions, and norms of queries
            and keys that are not timm's.
    """
    _check_softmax(model, "to_timm")
    norm = model.blocks[0].mixer.q_norm
    if norm is not None and (type(norm) is not nn.LayerNorm or norm.eps != model.config.norm_eps):
        eps = model.config.norm_eps
        only = f"timm's norms of queries and keys are LayerNorms with the eps of the others, {eps}"
        raise MixerError(f"to_timm: layer 0 is {model.config.specs()[0]}; {only}.")
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not any(part in name for part in PROJECTIONS):
            found[their_name(name, TIMM)] = tensor
        elif PROJECTIONS[0] in name:
            parts = [model.state_dict()[name.replace(PROJECTIONS[0], part)] for part in PROJECTIONS]
            found[their_name(name, TIMM)] = torch.cat(parts)
    for name in ("cls_token", "reg_token", "pos_embed"):
        if name in found:
            found[name] = found[name].reshape(1, -1, model.config.dim)
    if "pos_embed" in found:
        found["pos_embed"] = _timm_positions(found["pos_embed"], model.config, no_embed_class)
    return found


def to_hf(model: ViT, *, files: bool = False) -> dict[str, Tensor]:
    """Return the state dict of transformers' ``ViTForImageClassification(ViTConfig(**hf_options(model.config)))``.

    Without a head it is that of ``ViTModel``.

    Args:
        files: use the names of published files, which ``save_pretrained`` writes, instead of those of the modules of
            transformers >= 5.

    Raises:
        MixerError: for mixers other than softmax attention, and for what transformers' ViT lacks: registers, mean
            pooling, no positions.
    """
    config = model.config
    _check_softmax(model, "to_hf")
    if config.specs()[0].get("qk_norm"):
        raise MixerError("to_hf: transformers' ViT does not normalise queries and keys; this model has qk_norm.")
    lacks = ["registers"] * bool(config.registers)
    lacks += ["no class token"] * (config.pool != "class") + ["no positions"] * (config.positions is None)
    if lacks:
        only = "transformers' ViT puts a class token, and nothing else, before its patches"
        raise MixerError(f"to_hf: {only}; this model has {' and '.join(lacks)}.")
    found = {}
    for name, tensor in model.state_dict().items():
        theirs = their_name(name, HF_FILES if files else HF)
        tensor = tensor.reshape(1, -1, config.dim) if name in ("class_token", "positions") else tensor
        found[theirs if name.startswith("head.") or not config.classes else f"vit.{theirs}"] = tensor
    return found


def timm_options(config: ViTConfig, *, no_embed_class: bool = False) -> Options:
    """Return arguments of ``timm.models.VisionTransformer`` for the same shapes and the same function."""
    spec = config.specs()[0]
    return {
        "img_size": config.image_size,
        "patch_size": config.patch,
        "in_chans": config.channels,
        "num_classes": config.classes,
        "global_pool": "token" if config.pool == "class" else "avg",
        "embed_dim": config.dim,
        "depth": config.layers,
        "num_heads": spec.get("heads", 8),
        "mlp_ratio": config.mlp_ratio,
        "qkv_bias": spec.get("qkv_bias", True),
        "qk_norm": bool(spec.get("qk_norm")),
        "class_token": config.pool == "class",
        "pos_embed": "learn" if config.positions else "none",
        "no_embed_class": no_embed_class,
        "reg_tokens": config.registers,
        "fc_norm": False,
        "norm_layer": partial(nn.LayerNorm, eps=config.norm_eps),
    }


def hf_options(config: ViTConfig) -> Options:
    """Return arguments of ``transformers.ViTConfig`` for the same shapes and the same function."""
    spec = config.specs()[0]
    return {
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": spec.get("heads", 8),
        "intermediate_size": int(config.dim * config.mlp_ratio),
        "layer_norm_eps": config.norm_eps,
        "image_size": list(config.image_size),
        "patch_size": config.patch,
        "num_channels": config.channels,
        "qkv_bias": spec.get("qkv_bias", True),
        "num_labels": config.classes,
    }


def _check_softmax(model: ViT, who: str) -> None:
    """Raise an error for a model that neither library's ViT can represent."""
    specs = model.config.specs()
    if (model.config.norm_type, model.config.mlp) != ("layer", "gelu"):
        got = f"norm_type={model.config.norm_type!r} and mlp={model.config.mlp!r}"
        raise MixerError(f"{who}: only a ViT with LayerNorm and a GELU MLP can be written, got {got}.")
    if model.config.stem != "patch":
        raise MixerError(f"{who}: only a ViT with stem='patch' can be written, got stem={model.config.stem!r}.")
    for i, (block, spec) in enumerate(zip(model.blocks, specs, strict=True)):
        if not is_softmax(spec):
            only = "only a ViT with softmax attention in every layer can be written"
            raise MixerError(f"{who}: layer {i} is {spec['name']}; {only}.")
        mixer = block.mixer
        unusual = (
            mixer.kv_heads != mixer.heads
            or mixer.scale is not None
            or mixer.positions is not None
            or mixer.bias is not None
            or mixer.head_dim * mixer.heads != mixer.dim
        )
        if unusual or mixer.out_proj.bias is None:
            usual = "without kv_heads, head_dim, scale, positions, bias and out_bias=False"
            raise MixerError(f"{who}: layer {i} is {spec}; only the usual attention, {usual}, can be written.")
        if any(spec.get(name, default) != specs[0].get(name, default) for name, default in USUAL.items()):
            other = f"layer {i} is {spec}, layer 0 is {specs[0]}"
            raise MixerError(f"{who}: {other}; in their ViTs all layers are alike.")
    if model.config.positions == "sinusoidal":
        stored = "sinusoidal positions are computed here and stored there"
        raise MixerError(f"{who}: {stored}; build the model with learned ones.")


def _timm_positions(table: Tensor, config: ViTConfig, no_embed_class: bool) -> Tensor:
    """Return our positions (1, rows, D) with timm's rows."""
    first = int(config.pool == "class")
    if not no_embed_class:
        return torch.cat([table[:, :first], table.new_zeros(1, config.registers, config.dim), table[:, first:]], 1)
    if first and bool(table[:, :1].any()):
        own = "the class token has a position of its own"
        raise MixerError(f"to_timm: {own}, which a model with no_embed_class=True lacks.")
    return table[:, first:]
