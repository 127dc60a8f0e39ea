"""Put a mixer in the place of timm's ``Attention``.

Shapes: B images, N tokens of which the first ``prefix`` are not patches, C features.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any, ClassVar, NoReturn

import torch
from timm.layers import trunc_normal_
from timm.models import register_notrace_module
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from ...errors import MixerError
from ...functional import use_backend
from ...mixers import MIXERS, Mixer, build_mixer, mixer_options, required_options
from ...mixers.registration import load_mixer
from ...models.blocks import PROJECTIONS, complete_spec
from ...system.properties import named_errors
from ...types import Options, Spec
from ..patch_grid import Grid, PatchGrid, unwatch
from .scripted import ScriptedAttention

STD = 0.02


@register_notrace_module
@named_errors
class MixerAttention(nn.Module):
    """A mixer with the signature of timm's ``Attention``; base of the classes that ``attention_class`` makes.

    Args:
        num_heads, qkv_bias, proj_bias: the mixer's ``heads``, ``qkv_bias`` and ``out_bias``, if it has these options
            and they were not given.
        proj_drop: dropout of the output.
        qk_norm, scale_norm, attn_drop: refused, because norms of queries and keys, and dropout of weights, belong to
            softmax attention.
        norm_layer: unused, as in timm without these norms.
    """

    spec: ClassVar[Spec]
    built_for: ClassVar[Grid | None] = None
    prefix: ClassVar[int] = 0

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: object = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        for name, value in (("qk_norm", qk_norm), ("scale_attn_norm", scale_norm), ("attn_drop_rate", attn_drop)):
            if value:
                _refuse(f"{self.spec['name']} has no {name}, got {value}; it belongs to softmax attention")
        known = mixer_options(MIXERS[self.spec["name"]])
        theirs: Options = {"heads": num_heads, "qkv_bias": bool(qkv_bias), "out_bias": bool(proj_bias), "causal": False}
        with torch.device(device or torch.get_default_device()):
            self.mixer: Mixer = build_mixer(dim=dim, **{n: v for n, v in theirs.items() if n in known} | self.spec).to(
                dtype=dtype
            )
        self.grid = self.built_for
        # whether the mixer receives the grid of the patches
        self.on_grid = self.grid is not None and self.mixer.capabilities.grid and getattr(self.mixer, "ndim", 2) == 2
        self.patches = PatchGrid()
        self.embedding: tuple[Any, ...] = ()  # a tuple keeps it out of this module's own
        self.proj_drop = nn.Dropout(proj_drop)
        if self.grid is not None:
            find_embeddings()

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Mix (B, N, C) -> (B, N, C).

        Args:
            attn_mask: as in timm, True (or 0 among floats of 0 and -inf) = may be attended: (N, N), (B, N, N) or
                (B, 1, N, N), or (B, 1, 1, N) for keys only, which every mixer honours.
            is_causal: needs a class made with ``causal=True``.
        """
        given = {} if attn_mask is None else self._masks(attn_mask, x)
        if is_causal and not self.mixer.causal:
            needed = f"attention_class({self.spec['name']!r}, causal=True)"
            _refuse(f"is_causal=True needs a causal mixer: {needed}")
        return self.proj_drop(self.mix(x, **given))

    def mix(self, x: Tensor, **masks: Tensor) -> Tensor:
        """Apply the mixer, with the grid if it mixes one."""
        grid = self._real_grid(x)
        return self.mixer(x, grid=grid, prefix=self.prefix, **masks) if self.on_grid else self.mixer(x, **masks)

    def _real_grid(self, x: Tensor) -> Grid | None:
        """Return the patches as they lie in this forward pass; refuse another number, and another grid if bound."""
        if self.grid is None:
            return None
        real: Grid | None = self.grid
        patches, bound = x.shape[1] - self.prefix, True
        if self.embedding:
            (embedding,) = self.embedding
            if _is_fixed(embedding):
                real = tuple(embedding.grid_size)
            else:
                real, bound = self.patches.find(patches), self.mixer.max_len is not None
        if real is None:
            by_hand = "with tokenmix.hosts.given_grid(model, grid=(rows, columns))"
            _refuse(f"the patches' rows and columns are unknown; call the whole model, or its layers {by_hand}")
        if patches != prod(real) or (bound and real != self.grid):
            _refuse(
                f"{self.spec['name']} was made for {self.prefix} + {self.grid[0]} x {self.grid[1]} tokens, "
                f"got {x.shape[1]} of an image of {real[0]} x {real[1]} patches; "
                "give the model's own grid and prefix (class token and registers)"
            )
        return real

    def _masks(self, mask: Tensor, x: Tensor) -> dict[str, Tensor]:
        if mask.dtype != torch.bool:
            allowed = mask == 0
            if not mask.is_floating_point() or not bool((allowed | (mask == float("-inf"))).all()):
                bool_or_float = "bool, True = may be attended, or of floats 0 and -inf"
                _refuse(f"expects attn_mask of {bool_or_float}, got {mask.dtype} with other values")
            mask = allowed
        B, N = x.shape[:2]
        if tuple(mask.shape) == (B, 1, 1, N):
            return {"key_mask": mask[:, 0, 0]}
        if tuple(mask.shape) == (B, 1, N, N):
            mask = mask[:, 0]
        return {"attn_mask": mask}

    def init_weights(self) -> None:
        """Initialise the mixer as its own, and its projections from timm's truncated N(0, 0.02).

        timm calls this after its own initialisation of linear layers.
        """
        self.mixer.reset_parameters()
        for name, child in self.mixer.named_children():
            if name in PROJECTIONS and isinstance(child, nn.Linear):
                trunc_normal_(child.weight, std=STD)
                if child.bias is not None:
                    nn.init.zeros_(child.bias)
        self.mixer.start_copies()

    def reset_parameters(self) -> None:
        """Initialise again, as timm requires of modules that were built on the meta device."""
        self.init_weights()

    def __reduce__(self) -> tuple[object, ...]:
        return _new_from_spec, (self.spec, self.built_for, self.prefix), self.__dict__

    def __prepare_scriptable__(self) -> nn.Module:
        """Trace the mixer for ``torch.jit.script``, for this number of tokens and any number of images."""
        if self.grid is None and self.mixer.max_len is None:
            call = f"attention_class({self.spec['name']!r}, grid=(rows, columns), prefix=...)"
            _refuse(f"torch.jit.script needs the number of tokens: {call}")
        if self.embedding and not _is_fixed(self.embedding[0]):
            _refuse("torch.jit.script needs images of one size; build the model without dynamic_img_size")
        weight = next(iter(self.mixer.parameters()), torch.zeros(()))
        tokens = int(self.mixer.max_len or 0) if self.grid is None else self.prefix + prod(self.grid)
        x = torch.randn(2, tokens, self.mixer.dim, device=weight.device, dtype=weight.dtype)
        return ScriptedAttention(trace_module(_Mixed(self), x), self.proj_drop, self)


def trace_module(module: nn.Module, x: Tensor) -> torch.jit.ScriptModule:
    """Trace a module for any number of rows; its file needs nothing but torch, and it may be trained."""
    with use_backend("eager"), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # from checks on shapes
        return torch.jit.trace(module, x, check_inputs=[(x[:1],)])


class _Mixed(nn.Module):
    """The part of a MixerAttention that is traced."""

    def __init__(self, host: MixerAttention):
        super().__init__()
        self.mixer = host.mixer
        self.place = {"grid": host.grid, "prefix": host.prefix} if host.on_grid else {}

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(x, **self.place)


def attention_class(
    name: str, *, grid: Sequence[int] | None = None, prefix: int = 1, **options: Any
) -> type[MixerAttention]:
    """Make a class for ``attn_layer=`` of timm's Vision Transformers that builds the mixer ``name`` in every block.

    Args:
        grid: (rows, columns) of the model's patches. timm does not pass its attention layers the number of tokens, so
            mixers with parameters per position and those that mix grids need it; ``max_len``, ``ndim`` and
            ``grid_size`` follow from it, if the mixer has them.
        prefix: number of tokens before the patches: class token and registers.
        options: of the mixer.

    Example:
        ``timm.create_model("deit_tiny_patch16_224", attn_layer=attention_class("aft_full", grid=(14, 14), rank=128))``

    Raises:
        MixerError: for a mixer that cannot be built without the grid.
    """
    if load_mixer(name) is None:
        build_mixer(name, 1)
    sides, causal = _grid_pair(grid), options.pop("causal", False)
    if not isinstance(prefix, int) or prefix < 0:
        _refuse(f"attention_class expects prefix as the number of tokens before the patches, got {prefix!r}")
    if sides is None:
        _check_complete(name, options)
    spec = (
        {"name": name, **options}
        if sides is None
        else complete_spec({"name": name, **options}, prefix + prod(sides), None if causal else sides)
    )
    return _class_of({**spec, **({"causal": True} if causal else {})}, sides, prefix)


@cache
def find_embeddings() -> None:
    """Let each ``MixerAttention`` know the patch embedding of the model that it is built into, from now on."""
    register_module_module_registration_hook(_meet_embedding)


def _is_fixed(embedding: Any) -> bool:
    """Return whether a patch embedding of timm refuses images of any size but its own."""
    return embedding.img_size is not None and embedding.strict_img_size


def _meet_embedding(owner: nn.Module, name: str, part: nn.Module | None) -> None:
    """Hand the patch embedding of a model to the layers that are added to it."""
    embedding = owner.__dict__.get("_modules", {}).get("patch_embed")
    if part is None or not hasattr(embedding, "dynamic_feat_size"):
        return
    layers = [each for each in part.modules() if isinstance(each, MixerAttention) and each.grid is not None]
    if not layers:
        return
    known = unwatch(owner).get(embedding) or PatchGrid()
    if not _is_fixed(embedding):
        known.watch(embedding, owner)
    for layer in layers:
        layer.embedding, layer.patches = (embedding,), known


def _class_of(spec: Spec, grid: Grid | None, prefix: int) -> type[MixerAttention]:
    body = {
        "spec": spec,
        "built_for": grid,
        "prefix": prefix,
        "__doc__": MixerAttention.__doc__,
        "__module__": __name__,
    }
    return type(f"MixerAttention_{spec['name']}", (MixerAttention,), body)


def _new_from_spec(spec: Spec, grid: Grid | None, prefix: int) -> MixerAttention:
    cls = _class_of(spec, grid, prefix)
    return cls.__new__(cls)


def _check_complete(name: str, options: Options) -> None:
    """Refuse a mixer that needs a fixed number of tokens, or would silently read patches as a sequence."""
    required = required_options(MIXERS[name], options)
    for option in ("max_len", "ndim"):
        if option in required or option == "ndim" in mixer_options(MIXERS[name]) and option not in options:
            needs = "needs grid=(rows, columns) of the patches, and prefix if it is not 1"
            _refuse(f"attention_class({name!r}) {needs}, or {option} itself")


def _grid_pair(grid: object) -> Grid | None:
    if grid is None:
        return None
    sides = tuple(grid) if isinstance(grid, (list, tuple)) else ()
    if len(sides) != 2 or not all(isinstance(n, int) and n > 0 for n in sides):
        _refuse(f"attention_class expects grid=(rows, columns) of the patches, got {grid!r}")
    return sides[0], sides[1]


def _refuse(why: str) -> NoReturn:
    raise MixerError(f"tokenmix.hosts.timm: {why}.")
