"""Read weights of timm's and Hugging Face's Vision Transformers under our names, with their config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt, prod
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...models import ViT, ViTConfig, build_model
from ...models.images import both_sides
from ...types import Record
from .names import (
    HF,
    HF_FILES,
    NUMBER,
    TIMM,
    UNUSED,
    State,
    drop_batch_axis,
    fold_layer_scale,
    refuse_distilled,
    rename_tensors,
    split_qkv,
    strip_model_name,
    their_name,
)

WIDTH = 64
"""Features per head if the number of heads is unknown: those of every DeiT and of the original ViT-B and ViT-L."""
TIMM_PARTS = {
    "": "VisionTransformer",
    "blocks.0": "Block",
    "blocks.0.attn": "Attention",
    "blocks.0.mlp": "Mlp",
    "norm": "LayerNorm",
}


@dataclass(frozen=True)
class Weights:
    """Hold weights of a ViT under our names.

    Args:
        state: our names -> tensors.
        config: of the ViT they belong to.
        where: the file or other source; error messages start with it.
        origin: our name -> the name in the source. Several names with one origin were split from it.
        left_out: tensors of the source that a ViT does not use, with their shapes.
        notes: what was assumed, and what shapes cannot show.
    """

    state: dict[str, Tensor]
    config: ViTConfig
    where: str
    origin: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, tuple[int, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def model(self) -> ViT:
        """Build a ViT with these weights, in eval mode."""
        with torch.random.fork_rng():
            model: Any = build_model(self.config)
        model.load_state_dict(self.state)
        return model.eval()


def from_timm(
    source: nn.Module | State,
    *,
    heads: int | None = None,
    image_size: int | Sequence[int] | None = None,
    where: str = "the timm model",
) -> Weights:
    """Read a timm ViT or DeiT, or its state dict, under our names.

    The model's own LayerNorm eps, heads and image size are used; a bare state dict is read with eps 1e-6, 64 features
    per head and a square image unless ``heads`` and ``image_size`` say otherwise. Rows of registers in ``pos_embed``
    are added to the registers, which gives the same sum. LayerScale (DeiT III, DINOv2) is multiplied into the
    projections whose outputs it scales: the same function except for rounding, and a note says so.

    Raises:
        MixerError: for a distilled variant, and for any key that our ViT lacks (a norm after pooling, one before the
            blocks ...).
    """
    eps, embedded = 1e-6, None
    if isinstance(source, nn.Module):
        refuse_distilled(source.state_dict(), where)
        eps, heads, image_size, embedded = _read_timm(source, where)
        source = source.state_dict()
    refuse_distilled(source, where)
    source, scaled = fold_layer_scale(source, where)
    state, origin = rename_tensors(source, TIMM, where)
    split_qkv(state, origin, where)
    drop_batch_axis(state, origin, where)
    _place_positions(state, where, image_size=image_size, embedded=embedded)
    found = _weights(state, origin, where, TIMM, eps=eps, heads=heads, image_size=image_size)
    return (
        replace(found, notes=(*found.notes, "LayerScale is multiplied into the projections before it"))
        if scaled
        else found
    )


def from_hf(
    source: nn.Module | State,
    *,
    config: Any = None,
    heads: int | None = None,
    image_size: int | Sequence[int] | None = None,
    where: str = "the transformers model",
) -> Weights:
    """Read a Hugging Face ``ViTForImageClassification`` or ``ViTModel``, or its state dict, under our names.

    A state dict may use either naming. Heads, image size and LayerNorm eps are those of the model's config, or of
    ``config`` (an object or a dict); without one, 64 features per head, a square image and eps 1e-12 are assumed. The
    pooler of a ``ViTModel`` is left out.

    Raises:
        MixerError: for a distilled DeiT (every DeiT of transformers is one), another family, or any key that our ViT
            lacks.
    """
    if isinstance(source, nn.Module):
        source, config = source.state_dict(), getattr(source, "config", config)
    refuse_distilled(source, where)
    options = _read_hf(config, where)
    unused = {key: tuple(tensor.shape) for key, tensor in source.items() if strip_model_name(key) in UNUSED}
    used = {key: tensor for key, tensor in source.items() if key not in unused}
    table = HF_FILES if any(strip_model_name(key).startswith("encoder.") for key in used) else HF
    state, origin = rename_tensors(used, table, where)
    drop_batch_axis(state, origin, where)
    heads, image_size = heads or options.get("num_attention_heads"), image_size or options.get("image_size")
    found = _weights(
        state, origin, where, table, eps=options.get("layer_norm_eps", 1e-12), heads=heads, image_size=image_size
    )
    return replace(found, left_out=unused)


def from_own(source: Any, config: ViTConfig | None = None, *, where: str = "the model") -> Weights:
    """Read one of our ViTs, or a state dict of one with its config."""
    if isinstance(source, ViT):
        source, config = source.state_dict(), source.config
    if not isinstance(config, ViTConfig):
        got = f"(state, config), got {type(config).__name__}"
        raise MixerError(f"{where}: a state dict with our names needs its ViTConfig beside it, {got}.")
    state = {key: tensor.detach() for key, tensor in source.items()}
    check_fit(state, config, where, {}, {})
    return Weights(state, config, where, {name: name for name in state})


def check_fit(state: State, config: ViTConfig, where: str, origin: Mapping[str, str], table: Mapping[str, str]) -> None:
    """Refuse a state dict that is not exactly that of a ViT of this config.

    ``origin`` and ``table`` give the names that the source uses.
    """
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in build_model(config).state_dict().items()}
    for name, shape in wanted.items():
        if name not in state:
            raise MixerError(f"{where}: the key {_source_name(name, origin, table)!r} is missing.")
        if tuple(state[name].shape) != shape:
            gives = f"{origin.get(name, name)!r} gives {name} the shape {tuple(state[name].shape)}"
            raise MixerError(f"{where}: {gives}, a ViT of its sizes needs {shape}.")
    for name in state:
        if name not in wanted:
            vit = f"this ViT of {config.layers} layers and {config.classes} classes"
            raise MixerError(f"{where}: the key {origin.get(name, name)!r} has no place in {vit}.")


def _source_name(name: str, origin: Mapping[str, str], table: Mapping[str, str]) -> str:
    """Return the name that a missing tensor would have in the source."""
    theirs = their_name(name, table)
    prefix = next(
        (key.removesuffix(strip_model_name(key)) for key in origin.values() if key != strip_model_name(key)), ""
    )
    return theirs if theirs.startswith("classifier") else prefix + theirs


def _read_timm(model: nn.Module, where: str) -> tuple[float, int, tuple[int, int], bool]:
    """Read the settings of a plain timm ViT; raise an error for any other model.

    Returns:
        LayerNorm eps, heads, image size, and whether class token and registers have positions.
    """
    net: Any = model
    for path, wanted in TIMM_PARTS.items():
        part = _part(model, path) if path != "norm" else getattr(net, "norm", None)
        if type(part).__name__ != wanted:
            kind = type(part).__name__
            raise MixerError(
                f"{where}: {path or 'the model'} is a {kind}; only plain timm ViTs, where it is a {wanted}, are read."
            )
    act = net.blocks[0].mlp.act
    if type(act) is not nn.GELU or act.approximate != "none":
        raise MixerError(f"{where}: the MLP's activation is {act}; our ViT has the exact GELU.")
    has_class = net.cls_token is not None
    if net.global_pool != ("token" if has_class else "avg") or net.pool_include_prefix:
        pooling = f"global_pool={net.global_pool!r} with class_token={has_class}"
        raise MixerError(f"{where}: {pooling} is not a pooling of our ViT.")
    every = {norm.eps for norm in model.modules() if isinstance(norm, nn.LayerNorm)}
    if len(every) != 1:
        raise MixerError(f"{where}: its LayerNorms have different eps, {sorted(every)}.")
    return every.pop(), net.blocks[0].attn.num_heads, tuple(net.patch_embed.img_size), not net.no_embed_class


def _part(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _read_hf(config: Any, where: str) -> Record:
    """Return the options of a transformers config, an object or a dict; {} without one."""
    options = config if isinstance(config, dict) else config.to_dict() if config is not None else {}
    if options.get("model_type", "vit") != "vit":
        kind = f"a model of type {options['model_type']!r}"
        raise MixerError(f"{where}: {kind}; of transformers, plain ViTs (model_type 'vit') are read.")
    if options.get("hidden_act", "gelu") != "gelu":
        raise MixerError(f"{where}: hidden_act={options['hidden_act']!r}; our ViT has the exact GELU, 'gelu'.")
    return options


def _place_positions(
    state: dict[str, Tensor], where: str, *, image_size: int | Sequence[int] | None, embedded: bool | None
) -> None:
    """Convert timm's positions to ours, in place: one row for the class token, none for registers.

    Args:
        embedded: whether the tokens before the patches have rows (not timm's ``no_embed_class``); None: inferred from
            the number of rows.
    """
    table, has_class = state.get("positions"), "class_token" in state
    if table is None:
        return
    registers = len(state["registers"]) if "registers" in state else 0
    before = has_class + registers
    if embedded is None:
        embedded = _has_prefix_rows(len(table), before, state, image_size, where)
    if not embedded and has_class:
        table = torch.cat([torch.zeros_like(table[:1]), table])
    if embedded and registers:
        state["registers"] = state["registers"] + table[has_class:before]
        table = torch.cat([table[:has_class], table[before:]])
    state["positions"] = table


def _has_prefix_rows(rows: int, before: int, state: State, image_size: int | Sequence[int] | None, where: str) -> bool:
    """Return whether ``before`` of the rows belong to tokens before the patches."""
    if not before:
        return False
    if image_size is not None and "patch.weight" in state:
        return rows != prod(n // state["patch.weight"].shape[-1] for n in both_sides(image_size, where))
    square, less = (isqrt(n) ** 2 == n > 0 for n in (rows, rows - before))
    if square and less:
        side = isqrt(rows)
        either = f"{rows} positions may be {side} x {side} patches, or fewer and {before} tokens"
        raise MixerError(f"{where}: {either}; give image_size.")
    return not square


def _weights(
    state: dict[str, Tensor],
    origin: dict[str, str],
    where: str,
    table: Mapping[str, str],
    *,
    eps: float,
    heads: int | None,
    image_size: Any,
) -> Weights:
    """Return the renamed tensors with the config that their shapes show."""
    for name in ("patch.weight", "blocks.0.mlp.up.weight"):
        if name not in state:
            missing = f"the key {_source_name(name, origin, table)!r} is missing"
            raise MixerError(f"{where}: {missing}; this is not a checkpoint of a whole ViT.")
    if state["patch.weight"].ndim != 4:
        shape = tuple(state["patch.weight"].shape)
        raise MixerError(
            f"{where}: {origin['patch.weight']!r} has the shape {shape}, not (dim, channels, patch, patch)."
        )
    notes = []
    dim, channels, patch = state["patch.weight"].shape[:3]
    hidden = len(state["blocks.0.mlp.up.weight"])
    if heads is None:
        heads = _guessed_heads(dim, where)
        notes.append(f"{heads} heads of {WIDTH} features are assumed; the weights cannot tell")
    if image_size is None:
        image_size = _square_image(state, patch, where)
        unused = "" if "positions" in state else "; no weight depends on it"
        notes.append(f"images of {image_size[0]} x {image_size[1]} are assumed" + unused)
    bias = any(name.endswith("q_proj.bias") for name in state)
    normed = "blocks.0.mixer.q_norm.weight" in state
    spec = (
        {"name": "attention", "heads": heads}
        | ({} if bias else {"qkv_bias": False})
        | ({"qk_norm": "layer", "norm_eps": eps} if normed else {})
    )
    config = ViTConfig(
        dim=dim,
        # these names have a number
        layers=1 + max(int(n[0]) for name in state if name.startswith("blocks.") and (n := NUMBER.search(name))),
        mixers=(spec,),
        image_size=image_size,
        patch=patch,
        channels=channels,
        classes=len(state["head.weight"]) if "head.weight" in state else 0,
        mlp_ratio=hidden / dim if int(dim * (hidden / dim)) == hidden else (hidden + 0.5) / dim,
        pool="class" if "class_token" in state else "mean",
        positions="learned" if "positions" in state else None,
        registers=len(state["registers"]) if "registers" in state else 0,
        norm_eps=eps,
    )
    check_fit(state, config, where, origin, table)
    return Weights(state, config, where, origin, notes=tuple(notes))


def _guessed_heads(dim: int, where: str) -> int:
    if dim < 1 or dim % WIDTH:
        unknown = "the weights do not show how many heads there are"
        raise MixerError(f"{where}: {dim} features are not heads of {WIDTH}, and {unknown}; give heads=.")
    return dim // WIDTH


def _square_image(state: State, patch: int, where: str) -> tuple[int, int]:
    """Return the size of the square image that the positions belong to; 224 without positions."""
    if "positions" not in state:
        return (224 // patch * patch or patch,) * 2
    rows = len(state["positions"]) - ("class_token" in state)
    if isqrt(rows) ** 2 != rows or rows < 1:
        raise MixerError(f"{where}: {rows} positions of patches form no square; give image_size=[height, width].")
    return (isqrt(rows) * patch,) * 2
