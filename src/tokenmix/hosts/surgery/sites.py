"""Find and describe every attention module of a known family in a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...errors import MixerError
from ...types import Options
from ..patch_grid import find_patch_embedding
from .families import FAMILIES, Family, family_of, head_norm


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
    return (
        f"{seen}; known are the families {', '.join(FAMILIES)}, whose classes tokenmix.hosts.surgery.FAMILIES lists. "
        "In code of your own, assign tokenmix.build_mixer(NAME, dim=..., causal=...) in its place."
    )


def _attention(model: nn.Module) -> Iterator[tuple[Site, nn.Module]]:
    for name, module in model.named_modules():
        family = family_of(module)
        if family is not None:
            try:
                yield _describe_site(model, name, module, family), module
            except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
                continue  # built differently from the class of that name: what it computes is unknown


def _describe_site(model: nn.Module, name: str, module: Any, family: str) -> Site:
    known = FAMILIES[family]
    facts = known.describe(module)
    config = getattr(module, "config", None)
    if known.library == "timm" or (hasattr(config, "patch_size") and hasattr(config, "image_size")):
        facts |= _image(model, name, module, known)
    facts["qk_norm"] = head_norm(module)
    if facts.get("grid") is not None:
        facts["max_len"] = facts["prefix"] + facts["grid"][0] * facts["grid"][1]
    if known.library == "torch":
        facts["cross"] = name.rpartition(".")[2] == "multihead_attn"  # of nn.TransformerDecoderLayer
    return Site(name, family, **facts)


def _image(model: nn.Module, name: str, module: Any, family: Family) -> Options:
    """Return the patches of an image model, and the number of tokens before them."""
    if hasattr(module, "config"):
        config = module.config
        prefix = family.prefix.get(config.model_type, 1) + getattr(config, "num_register_tokens", 0)
        (rows, columns), patch = _pair(config.image_size), _pair(config.patch_size)
        return {"grid": (rows // patch[0], columns // patch[1]), "prefix": prefix, "patch": patch}
    if (found := find_patch_embedding(model, name)) is None:
        return {}
    embedding, owner = found
    grid = getattr(embedding, "grid_size", None)
    return {"grid": None if grid is None else tuple(grid), "prefix": getattr(owner, "num_prefix_tokens", 0)}


def _pair(sides: Any) -> tuple[int, int]:
    return (sides[0], sides[1]) if isinstance(sides, (tuple, list)) else (sides, sides)
