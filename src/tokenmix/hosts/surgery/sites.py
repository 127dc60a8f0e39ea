"""Find and describe every attention module of a known family in a model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...errors import MixerError
from ...types import Options
from ..patch_grid import find_patch_embedding
from .attention_adapter import AttentionAdapter
from .families import FAMILIES, Family, family_of, head_norm

OWN = "own"
"""The family of attention that an ``AttentionAdapter`` describes."""
Adapters = AttentionAdapter | Sequence[AttentionAdapter] | None


@dataclass(frozen=True)
class Site:
    """Describe one attention module of a model.

    Args:
        name: dotted, as in ``model.get_submodule(name)``.
        family: of ``FAMILIES``; "own" of a module that an ``AttentionAdapter`` describes.
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
        scale: factor on its logits; None: as the module says, or 1 / sqrt(head_dim).
        beyond: what its logits have that is lost with it: a bias, a cap; None: nothing.
        adapter: that describes it; None: it is of a known family.
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
    scale: float | None = None
    beyond: str | None = None
    adapter: AttentionAdapter | None = field(default=None, repr=False)

    @property
    def traits(self) -> Family:
        """What is known of its family, or of its class by its adapter."""
        return FAMILIES[self.family] if self.adapter is None else self.adapter.family


def find_attention(model: nn.Module, adapter: Adapters = None) -> list[Site]:
    """Return every attention module of a known family, in the model's order.

    Known are BERT, ModernBERT, DistilBERT, DeBERTa, GPT-2, GPT-NeoX, Llama, Phi, BART, T5, ViT, CLIP and DETR of
    transformers and their relatives, timm's ``Attention``, and ``nn.MultiheadAttention``; see ``FAMILIES``. A class of
    another name, or a subclass with its own ``forward``, is skipped, because what it computes is unknown.

    Args:
        adapter: describes attention of other classes; one or several.

    Raises:
        MixerError: for anything but a module, or a module that lacks what its adapter names.
    """
    if not isinstance(model, nn.Module):
        raise MixerError(f"find_attention: expects a model, an nn.Module, got {type(model).__name__}.")
    return [site for site, _ in _attention(model, as_adapters(adapter))]


def as_adapters(adapter: Adapters) -> tuple[AttentionAdapter, ...]:
    """Return the adapters as a tuple.

    Raises:
        MixerError: for anything else.
    """
    given = () if adapter is None else (adapter,) if isinstance(adapter, AttentionAdapter) else adapter
    if isinstance(given, (list, tuple)) and all(isinstance(each, AttentionAdapter) for each in given):
        return tuple(given)
    raise MixerError(f"adapter must be a tokenmix.hosts.AttentionAdapter or a list of them, got {adapter!r}.")


def unknown_attention(model: nn.Module, adapter: Adapters = None) -> list[str]:
    """Return the class names of modules that look like attention and belong to no known family."""
    known = tuple(site.name for site, _ in _attention(model, as_adapters(adapter)))
    inside = [name + "." for name in known]
    names = {
        n: f"{type(m).__module__}.Attention" if type(m).__name__ == "Attention" else type(m).__name__
        for n, m in model.named_modules()
        if "attention" in type(m).__name__.lower() and n not in known and not type(m).__module__.startswith("tokenmix.")
    }
    return sorted(
        {
            cls
            for n, cls in names.items()
            if not any(n.startswith(each) for each in inside)  # a part of known attention
            and not any(each.startswith(f"{n}.") for each in known)  # a layer around it
            and not any(n.startswith(f"{each}.") for each in names)  # a part of unknown attention
        }
    )


def unknown_hint(model: nn.Module) -> str:
    """Return the end of an error message: the unknown attention of a model, and the known families."""
    odd, other = unknown_attention(model), modules_without_attention(model)
    seen = f"; it has {', '.join(f'{cls}, {explain_class(cls)}' for cls in odd)}" if odd else ""
    seen += f"; its layers mix by {', '.join(other)}, which is no attention" if other else ""
    return (
        f"{seen}; known are the families {', '.join(FAMILIES)}, whose classes tokenmix.hosts.surgery.FAMILIES lists. "
        f"{OTHER_WAYS}"
    )


def explain_class(cls: str) -> str:
    """Return why no family describes modules of a class."""
    return UNSERVED.get(cls, "whose computation is unknown")


def modules_without_attention(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of modules that mix tokens by a recurrence or a convolution, by their class."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if RECURRENT.search(type(module).__name__) and not type(module).__module__.startswith("tokenmix."):
            found.setdefault(type(module).__name__, []).append(name)
    return found


RECURRENT = re.compile(r"(Mamba2?Mixer|MambaLayer|Mamba2?|SSM|GatedDeltaNet|ShortConv|RecurrentBlock|(Bamba|H1)Mixer)$")
"""How the names of classes end that mix the tokens of hybrid and attention-free models."""
UNSERVED = {
    "Qwen3NextAttention": "which gates its output by half of q_proj, and no mixer has such a gate",
    "DebertaAttention": "whose in_proj has biases of its own for queries and values",
    "SwinAttention": "which attends within windows: an AttentionAdapter with tokens= serves it",
    "WindowAttention": "which attends within windows: an AttentionAdapter with tokens= serves it",
}
"""Class -> why no family describes it."""
OTHER_WAYS = (
    "Describe another class by adapter=tokenmix.hosts.AttentionAdapter(...); or assign a mixer by hand, "
    "layer.attn = tokenmix.build_mixer(NAME, dim=..., causal=...)."
)


def _attention(model: nn.Module, adapters: tuple[AttentionAdapter, ...] = ()) -> Iterator[tuple[Site, nn.Module]]:
    for name, module in model.named_modules():
        own = next((each for each in adapters if each.describes(module)), None)
        if own is not None:
            try:
                yield Site(name, OWN, **own.read(module), adapter=own), module
            except MixerError as why:
                raise MixerError(f"AttentionAdapter: {name}: {why}.") from None
            continue
        family = family_of(module)
        if family is not None:
            try:
                yield _describe_site(model, name, module, family), module
            except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
                continue  # built differently from the class of that name: what it computes is unknown


def _describe_site(model: nn.Module, name: str, module: Any, family: str) -> Site:
    known = FAMILIES[family]
    facts = known.describe(module)
    config = getattr(module.get_submodule(known.parts[0]), "config", None)
    if known.library == "timm" or (hasattr(config, "patch_size") and hasattr(config, "image_size")):
        facts |= _image(model, name, config, known)
    facts["qk_norm"] = head_norm(module, facts["head_dim"])
    if facts.get("grid") is not None:
        facts["max_len"] = facts["prefix"] + facts["grid"][0] * facts["grid"][1]
    if known.library == "torch":
        facts["cross"] = name.rpartition(".")[2] == "multihead_attn"  # of nn.TransformerDecoderLayer
    if name.rpartition(".")[2] == "EncDecAttention":  # of T5, whose class serves both
        facts |= {"cross": True, "causal": False, "beyond": None}
    return Site(name, family, **facts)


def _image(model: nn.Module, name: str, config: Any, family: Family) -> Options:
    """Return the patches of an image model, and the number of tokens before them."""
    if config is not None:
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
