"""Map the names that timm and Hugging Face transformers give to the weights of a Vision Transformer to ours.

timm      blocks.3.attn.qkv.weight                       (3 D, D): queries, keys and values in one
HF        vit.layers.3.attention.q_proj.weight           modules of transformers >= 5
HF files  vit.encoder.layer.3.attention.attention.query.weight   published files, and what save_pretrained writes
ours      blocks.3.mixer.q_proj.weight
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from ...errors import MixerError

State = Mapping[str, Tensor]
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
PROJECTIONS = ("q_proj", "k_proj", "v_proj")

TIMM = {  # theirs -> ours; {} is the layer
    "patch_embed.proj": "patch",
    "cls_token": "class_token",
    "reg_token": "registers",
    "pos_embed": "positions",
    "blocks.{}.norm1": "blocks.{}.mixer_norm",
    "blocks.{}.attn.qkv": "blocks.{}.mixer.qkv",
    "blocks.{}.attn.q_norm": "blocks.{}.mixer.q_norm",
    "blocks.{}.attn.k_norm": "blocks.{}.mixer.k_norm",
    "blocks.{}.attn.proj": "blocks.{}.mixer.out_proj",
    "blocks.{}.norm2": "blocks.{}.mlp_norm",
    "blocks.{}.mlp.fc1": "blocks.{}.mlp.up",
    "blocks.{}.mlp.fc2": "blocks.{}.mlp.down",
    "norm": "norm",
    "head": "head",
}
SCALED = {"ls1.gamma": "attn.proj", "ls2.gamma": "mlp.fc2"}
"""timm's LayerScale -> the projection whose output it scales."""
HF_TRUNK = {
    "embeddings.patch_embeddings.projection": "patch",
    "embeddings.cls_token": "class_token",
    "embeddings.position_embeddings": "positions",
    "layernorm": "norm",
    "classifier": "head",
}
HF = HF_TRUNK | {
    "layers.{}.layernorm_before": "blocks.{}.mixer_norm",
    "layers.{}.attention.q_proj": "blocks.{}.mixer.q_proj",
    "layers.{}.attention.k_proj": "blocks.{}.mixer.k_proj",
    "layers.{}.attention.v_proj": "blocks.{}.mixer.v_proj",
    "layers.{}.attention.o_proj": "blocks.{}.mixer.out_proj",
    "layers.{}.layernorm_after": "blocks.{}.mlp_norm",
    "layers.{}.mlp.fc1": "blocks.{}.mlp.up",
    "layers.{}.mlp.fc2": "blocks.{}.mlp.down",
}
HF_FILES = HF_TRUNK | {
    "encoder.layer.{}.layernorm_before": "blocks.{}.mixer_norm",
    "encoder.layer.{}.attention.attention.query": "blocks.{}.mixer.q_proj",
    "encoder.layer.{}.attention.attention.key": "blocks.{}.mixer.k_proj",
    "encoder.layer.{}.attention.attention.value": "blocks.{}.mixer.v_proj",
    "encoder.layer.{}.attention.output.dense": "blocks.{}.mixer.out_proj",
    "encoder.layer.{}.layernorm_after": "blocks.{}.mlp_norm",
    "encoder.layer.{}.intermediate.dense": "blocks.{}.mlp.up",
    "encoder.layer.{}.output.dense": "blocks.{}.mlp.down",
}
DISTILLED = (
    "dist_token",
    "head_dist.weight",
    "head_dist.bias",
    "distillation_token",
    "distillation_classifier.weight",
    "cls_classifier.weight",
)
UNUSED = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.mask_token")
"""Tensors of transformers' ViTModel that no image classifier uses."""


def rename_tensors(state: State, table: Mapping[str, str], where: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors under our names, and their original names; raise an error for an unknown key."""
    found: dict[str, Tensor] = {}
    origin: dict[str, str] = {}
    for key, tensor in state.items():
        plain = strip_model_name(key)
        like, number = NUMBER.sub("{}", plain, count=1), NUMBER.search(plain)
        module, _, leaf = like.rpartition(".")
        ours = table.get(like) or (
            f"{table[module]}.{leaf}" if module in table and leaf in ("weight", "bias") else None
        )
        if ours is None or not isinstance(tensor, Tensor):
            other = "this is a checkpoint of another architecture or variant"
            raise MixerError(f"{where}: the key {key!r} has no place in a plain ViT; {other}.")
        ours = ours.replace("{}", number[0]) if number else ours
        found[ours], origin[ours] = tensor.detach(), key
    return found, origin


def strip_model_name(key: str) -> str:
    """Return a transformers key without the name of its model."""
    return re.sub(r"^(vit|deit)\.", "", key)


def their_name(name: str, table: Mapping[str, str]) -> str:
    """Return the name of one of our tensors in the naming of a table."""
    backwards = {ours: theirs for theirs, ours in table.items()}
    like, number = NUMBER.sub("{}", name, count=1), NUMBER.search(name)
    module, _, leaf = like.rpartition(".")
    if module not in backwards and module.endswith(PROJECTIONS):
        module = f"{module.rpartition('.')[0]}.qkv"
    theirs = backwards.get(like) or (f"{backwards[module]}.{leaf}" if module in backwards else name)
    return theirs.replace("{}", number[0]) if number else theirs


def refuse_distilled(state: State, where: str) -> None:
    """Refuse a distilled DeiT, which has a second token and a second head."""
    key = next((key for key in state if strip_model_name(key).removeprefix("embeddings.") in DISTILLED), None)
    if key is not None:
        distilled = f"{key!r} shows a distilled DeiT, with a second token and head"
        raise MixerError(f"{where}: {distilled}; take the variant without distillation.")


def fold_layer_scale(state: State, where: str) -> tuple[dict[str, Tensor], bool]:
    """Multiply each LayerScale of timm into the projection before it; return the tensors, and whether any was there."""
    found = dict(state)
    for key in [key for key in found if NUMBER.sub("{}", key, count=1).removeprefix("blocks.{}.") in SCALED]:
        block, number, scale = key.split(".", 2)
        scaled = [name for part in ("weight", "bias") if (name := f"{block}.{number}.{SCALED[scale]}.{part}") in found]
        gamma = found.pop(key) if scaled else found[key]  # without a projection it stays, and is refused later
        for name in scaled:
            if gamma.ndim != 1 or len(gamma) != len(found[name]):
                shapes = [tuple(a.shape) for a in (gamma, found[name])]
                raise MixerError(f"{where}: {key!r} of shape {shapes[0]} does not scale {name!r} of shape {shapes[1]}.")
            found[name] = found[name] * (gamma[:, None] if found[name].ndim > 1 else gamma)
    return found, len(found) < len(state)


def split_qkv(state: dict[str, Tensor], origin: dict[str, str], where: str) -> None:
    """Split timm's joint projections into queries, keys and values, in place."""
    for name in [n for n in state if ".qkv." in n]:
        joint, key = state.pop(name), origin.pop(name)
        if joint.ndim < 1 or len(joint) % 3:
            raise MixerError(f"{where}: {key!r} of shape {tuple(joint.shape)} does not hold queries, keys and values.")
        for part, tensor in zip(PROJECTIONS, joint.chunk(3), strict=True):
            state[name.replace("qkv", part)], origin[name.replace("qkv", part)] = tensor, key


def drop_batch_axis(state: dict[str, Tensor], origin: Mapping[str, str], where: str) -> None:
    """Reshape tokens and positions as we hold them, in place: (1, 1, D) -> (D,), (1, rows, D) -> (rows, D)."""
    for name in ("class_token", "registers", "positions"):
        if name in state:
            shape = tuple(state[name].shape)
            if len(shape) != 3 or shape[0] != 1 or (name == "class_token" and shape[1] != 1):
                rows = 1 if name == "class_token" else "tokens"
                raise MixerError(f"{where}: {origin[name]!r} must have the shape (1, {rows}, dim), got {shape}.")
            state[name] = state[name][0, 0] if name == "class_token" else state[name][0]
