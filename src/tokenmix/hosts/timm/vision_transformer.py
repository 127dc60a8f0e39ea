"""Provide the papers' Vision Transformers in ``timm.create_model``: timm's own model with our mixers in its blocks.

The names start with ``deit_`` and this module is called ``vision_transformer``, like those of timm that it resembles.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import Block, VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as timm_filter
from torch import Tensor, nn

from ...errors import MixerError
from ...mixers import is_softmax
from ...models import MODELS, ViTConfig
from ...models.blocks import cycle_specs
from ...models.images import both_sides, resizable, resize_mixers
from ...types import Options, Spec
from ..vit.names import TIMM, split_qkv, their_name
from ..vit.write import timm_options
from .attention import Grid, MixerAttention, attention_class
from .metadata import describe_model

ATTENTION: tuple[Spec, ...] = ({"name": "attention"},)


class MixerBlock(Block):
    """timm's block, with the attention class of its own layer."""

    def __init__(
        self, dim: int, num_heads: int, *, attn_layer: Sequence[type[MixerAttention]], depth: int = 0, **options: Any
    ):
        super().__init__(dim, num_heads, attn_layer=attn_layer[depth], depth=depth, **options)


class MixerVisionTransformer(VisionTransformer):
    """timm's ``VisionTransformer`` with a mixer in each block.

    Its features, heads, pooling, layer groups, pruning and checkpointing are timm's own.

    Args:
        mixers: one spec, or one per layer, or a shorter list repeated over the layers. ``max_len``, ``ndim`` and
            ``grid_size`` are filled in; ``heads``, ``qkv_bias`` and ``out_bias`` are timm's ``num_heads``,
            ``qkv_bias`` and ``proj_bias``, if a mixer has them and its spec does not set them.
        dynamic_img_size, patch_drop_rate: only if no mixer depends on the number or the grid of patches.

    Everything else is timm's.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        *,
        mixers: Spec | Sequence[Spec] = ATTENTION,
        depth: int = 12,
        class_token: bool = True,
        reg_tokens: int = 0,
        dynamic_img_size: bool = False,
        patch_drop_rate: float = 0.0,
        **options: Any,
    ):
        specs = [mixers] if isinstance(mixers, dict) else list(mixers)
        if not 0 < len(specs) <= depth:
            raise MixerError(f"MixerVisionTransformer: mixers must hold 1 to depth={depth} specs, got {len(specs)}.")
        for spec in specs:
            if not isinstance(spec, dict) or "name" not in spec:
                needed = 'a mixer spec is an object with a name, like {"name": "hydra"}'
                raise MixerError(f"MixerVisionTransformer: {needed}; got {spec!r}.")
        grid = _grid(img_size, patch_size)
        free = dynamic_img_size or patch_drop_rate > 0
        classes = [
            attention_class(**spec, grid=None if free else grid, prefix=class_token + reg_tokens)
            for spec in cycle_specs(tuple(specs), depth)
        ]
        base: Options = {"depth": depth, "class_token": class_token, "reg_tokens": reg_tokens}
        base |= {"dynamic_img_size": dynamic_img_size, "patch_drop_rate": patch_drop_rate}
        base |= {"block_fn": MixerBlock, "attn_layer": classes}  # one class for each block
        super().__init__(img_size, patch_size, **base, **options)

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Resize as timm does, interpolating the mixers' parameters per position like images.

        If one mixer cannot follow, the call is refused and nothing changes.
        """
        old: Grid = tuple(self.patch_embed.grid_size)  # type: ignore[assignment]  # a pair
        new = _grid(img_size or self.patch_embed.img_size, patch_size or self.patch_embed.patch_size)
        every: list[Any] = [block.attn for block in self.blocks]
        bound = [attention for attention in every if attention.grid is not None]
        steps = [(attention.mixer, old, new, attention.prefix) for attention in bound]
        resizable(steps)
        learned = self.pos_embed is None or self.pos_embed.requires_grad
        super().set_input_size(img_size, patch_size)
        if self.pos_embed is not None:
            self.pos_embed.requires_grad_(learned)  # timm before 1.0.31 forgets it
        resize_mixers(steps)
        for attention in bound:
            attention.grid = new

    def no_weight_decay(self) -> set[str]:
        """Return timm's names, and mixers' parameters outside linear layers and convolutions.

        Those are biases of pairs of positions, filters and memories.
        """
        found = set(super().no_weight_decay())
        for i, block in enumerate(self.blocks):
            for module_name, module in block.attn.named_modules():  # type: ignore[union-attr]  # a module
                if not isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
                    found |= {
                        ".".join(filter(None, (f"blocks.{i}.attn", module_name, name)))
                        for name, _ in module.named_parameters(recurse=False)
                    }
        return found

    def __prepare_scriptable__(self) -> nn.Module:
        """Prepare ``torch.jit.script``, which replaces mixers by traces: in a copy that shares the parameters."""
        return copy.deepcopy(self, {id(tensor): tensor for tensor in (*self.parameters(), *self.buffers())})


def checkpoint_filter(state: dict[str, Any], model: MixerVisionTransformer) -> dict[str, Tensor]:
    """Convert weights for a ``MixerVisionTransformer``.

    They come from its own file, from one of our ViT, or, for softmax blocks, from one of timm's ViT. timm resamples
    positions of another image size.

    Raises:
        MixerError: if timm's softmax attention would have to become another mixer; ``tokenmix convert`` does that and
            reports what it copied.
    """
    state = state.get("model", state)
    if "patch.out.weight" in state:
        raise MixerError(
            "checkpoint_filter: the weights are of a ViT with stem='conv'; timm's ViT has one convolution."
        )
    if "patch.weight" in state:
        state = _from_ours(state, model)
    for name in [n for n in state if ".attn.qkv." in n]:
        _check_softmax(name, model)
        found = {name.replace(".attn.", ".attn.mixer."): state.pop(name)}
        split_qkv(found, dict.fromkeys(found, name), "checkpoint_filter")
        state |= found
    state = {re.sub(r"\.attn\.proj\.", ".attn.mixer.out_proj.", name): tensor for name, tensor in state.items()}
    return timm_filter(state, model)


def _from_ours(state: dict[str, Tensor], model: MixerVisionTransformer) -> dict[str, Tensor]:
    """Rename our ViT's tensors as timm's, mixers beneath ``attn``; registers get zero positions, as in ``to_timm``."""
    trunk = {name: tensor for name, tensor in state.items() if ".mixer." not in name}
    found = {their_name(name, TIMM): tensor for name, tensor in trunk.items()}
    found |= {name.replace(".mixer.", ".attn.mixer.", 1): tensor for name, tensor in state.items() if ".mixer." in name}
    for name in ("cls_token", "reg_token", "pos_embed"):
        if name in found:
            found[name] = found[name].reshape(1, -1, found[name].shape[-1])
    if "pos_embed" in found and model.num_reg_tokens:
        table, first = found["pos_embed"], int(model.has_class_token)
        found["pos_embed"] = table.new_zeros(1, table.shape[1] + model.num_reg_tokens, table.shape[2])
        found["pos_embed"][:, :first] = table[:, :first]
        found["pos_embed"][:, first + model.num_reg_tokens :] = table[:, first:]
    return found


def _check_softmax(name: str, model: Any) -> None:
    layer = int(name.split(".")[1])
    if layer < len(model.blocks) and not is_softmax(model.blocks[layer].attn.spec):
        mixer = model.blocks[layer].attn.spec["name"]
        differ = f"{name!r} is of softmax attention, layer {layer} of the model is {mixer}"
        raise MixerError(f"checkpoint_filter: {differ}; `tokenmix convert` takes weights over.")


def _grid(img_size: int | tuple[int, int], patch_size: int | tuple[int, int]) -> Grid:
    """Return the rows and columns of patches."""
    height, width = both_sides(img_size, "MixerVisionTransformer")
    down, right = both_sides(patch_size, "MixerVisionTransformer")
    return height // down, width // right


def _describe(config: ViTConfig) -> Options:
    crop_pct = 1.0 if config.image_size[0] > 224 else 0.9
    return describe_model(config, first_conv="patch_embed.proj", pool_size=None, crop_pct=crop_pct)


def _timm_name(name: str, config: ViTConfig) -> str:
    """Return timm's name for a row of ``MODELS``: aft_conv_tiny_k11_h32 -> deit_tiny_aft_conv_k11_h32_patch16_224."""
    plain = re.sub(r"(?<=base)_?384", "", name)
    size = re.search(r"tiny|small|base", plain)
    if size is None:
        raise MixerError(f"tokenmix.hosts.timm: the model {name!r} has no size in its name.")
    rest = "_".join(part for part in plain.split("_") if part not in ("deit", size[0]))
    rest = {"": "mixer", "registers": "mixer_reg4"}.get(rest, rest)
    return f"deit_{size[0]}_{rest}_patch{config.patch}_{config.image_size[0]}"


MODEL_NAMES: dict[str, str] = {
    _timm_name(name, config): name for name, config in MODELS.items() if isinstance(config, ViTConfig)
}
"""timm's name of a model -> its row in ``tokenmix.models.MODELS``.

Names with ``mixer`` have softmax attention by default, for your own ``mixers=``.
"""

default_cfgs = generate_default_cfgs({name: _describe(MODELS[model]) for name, model in MODEL_NAMES.items()})


def _register(name: str, model: str) -> None:
    config: ViTConfig = MODELS[model]
    heads = next((spec.get("heads") for spec in config.specs() if is_softmax(spec)), None)
    spec = config.specs()[0]
    base = {**timm_options(config), "num_heads": heads or spec.get("heads", 1), "qkv_bias": True}

    def build(pretrained: bool = False, **kwargs: Any) -> MixerVisionTransformer:
        features = {"out_indices": kwargs.pop("out_indices", 3), "feature_cls": "getter"}
        options = {**base, "mixers": config.mixers, **kwargs}
        return build_model_with_cfg(
            MixerVisionTransformer,
            name,
            pretrained,
            pretrained_filter_fn=checkpoint_filter,
            feature_cfg=features,
            **options,
        )

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"Build ``tokenmix.models.MODELS[{model!r}]`` as a timm model."
    globals()[name] = register_model(build)


for _name, _model in MODEL_NAMES.items():
    _register(_name, _model)
