"""Replace a model's attention by mixers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ...errors import MixerError
from ...mixers import is_softmax
from ...types import Spec
from ..conversion_report import Entry, Report
from ..patch_grid import PatchGrid, find_patch_embedding, unwatch
from ..torch import MultiheadMixer
from .adapters import adapters_of
from .attention_adapter import AttentionAdapter
from .build import adapter_for
from .form_adapters import share_bias
from .plan import plan_replacements
from .probe import Proofs
from .sites import Adapters, Site, as_adapters, find_attention
from .swap import swap_modules

NameOrSpec = str | Mapping[str, Any]


def replace_mixers(
    model: nn.Module,
    mixers: NameOrSpec | Sequence[NameOrSpec | None] | Mapping[str, NameOrSpec | Sequence[NameOrSpec | None]],
    *,
    adapter: Adapters = None,
    init: str = "copy",
    keep: str | Iterable[str] = (),
    last: int | None = None,
    every: int | None = None,
    seed: int | None = None,
    inplace: bool = False,
) -> tuple[Any, Report]:
    """Replace a model's attention by mixers.

    Each mixer takes over the weights of its attention wherever the two mean the same. Heads, grouped keys, biases,
    norms of queries and keys, the scale of logits, rotary positions, causality and max_len are the site's, if the
    mixer has the option and the spec does not set it. A mixer takes over the projections that its class names in
    ``facts.carries``: fused and transposed ones are split, grouped keys are repeated if the mixer has no ``kv_heads``,
    and a bias that the host lacks is zero. Masks, caches and return values are the host's. With ``attention`` the
    function stays the same. Dropout of attention weights is lost, and so is ``output_attentions`` of the replaced
    layers.

    Args:
        model: any model with modules that ``find_attention`` finds.
        mixers: a spec for all modules, ``"hydra"`` or ``{"name": "aft_local", "window": 32}``, or a list of specs,
            which repeats over them and in which None keeps a module; or glob patterns of dotted names with a spec or
            a list each. Where patterns overlap, the later one holds.
        adapter: an ``AttentionAdapter``, or several, for attention of classes that no known family has.
        init: "copy", or "random": all weights of the mixers are new.
        keep: patterns of modules that stay as they are.
        last, every: of the modules that a pattern matches, only the last N, or every N-th, counting from the last.
        seed: of the new weights; None: torch's generator as it is.
        inplace: change the model itself, after everything has been prepared, instead of a copy.

    Returns:
        The new model, and the report: each tensor copied, split, new or dropped.

    Raises:
        MixerError: for a pattern that matches nothing, a mixer that does not fit a site, tensors that cannot be
            mapped, an attention module that computes something else than its class says (each is probed on random
            numbers beside softmax attention with its weights), or a model of no known family. The given model is then
            unchanged.
    """
    if init not in ("copy", "random"):
        raise MixerError(f"replace_mixers: init must be 'copy' or 'random', got {init!r}.")
    own = as_adapters(adapter)
    sites = find_attention(model, own)
    plan = plan_replacements(model, sites, mixers, keep, last, every)
    found: dict[int, nn.Module] = {}
    entries_by_site: dict[str, list[Entry]] = {}
    proofs = Proofs(model, own)
    with _seed_weights(seed):
        for site, spec in plan:
            try:
                if site.obstacle is None:
                    proofs.prove(site)
                pieces, entries_by_site[site.name] = adapter_for(model, site, spec, init)
            except MixerError as why:
                raise MixerError(f"replace_mixers: {site.name}: {str(why).rstrip('.')}.") from None
            found |= pieces
    new = swap_modules(model, found, inplace)
    watch_patches(new)
    share_bias(new)
    keep_padded(new)
    return new, _report(model if not inplace else new, new, plan, entries_by_site, proofs, own)


@contextmanager
def _seed_weights(seed: int | None) -> Iterator[None]:
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield


def keep_padded(model: nn.Module) -> None:
    """Let torch's encoders with a mixer pass padded tensors; nested ones, of evaluation, are for attention alone."""
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(
            isinstance(layer.self_attn, MultiheadMixer)
            for layer in encoder.layers
            if isinstance(layer, nn.TransformerEncoderLayer)
        ):
            encoder.enable_nested_tensor = encoder.use_nested_tensor = False


def watch_patches(model: nn.Module) -> None:
    """Let the adapters of an image model know the grid that its patch embedding makes in each forward pass."""
    known = unwatch(model)
    holders: dict[nn.Module, PatchGrid] = {}
    for name, adapter in adapters_of(model).items():
        if getattr(adapter, "patches", None) is None:
            continue
        found = find_patch_embedding(model, name, adapter.site.patch)
        if found is None:
            continue
        embedding, owner = found
        if embedding not in holders:
            holders[embedding] = known.get(embedding) or PatchGrid()
            holders[embedding].watch(embedding, owner)
        adapter.patches = holders[embedding]


def _report(
    old: nn.Module,
    new: nn.Module,
    plan: list[tuple[Site, Spec]],
    entries_by_site: dict[str, list[Entry]],
    proofs: Proofs,
    own: tuple[AttentionAdapter, ...],
) -> Report:
    parameters = {name for name, _ in new.named_parameters()}
    inside = {
        f"{site}.{e.name}" if site else e.name: e
        for site, entries in entries_by_site.items()
        for e in entries
        if e.status != "dropped"
    }
    entries = []
    for name, tensor in new.state_dict().items():
        if name not in inside:
            entries.append(Entry(name, "copied", tuple(tensor.shape), name, name in parameters))
    for site, made in entries_by_site.items():
        prefix = f"{site}." if site else ""
        entries += [
            replace(e, name=prefix + e.name, origin=None if e.origin is None else prefix + e.origin) for e in made
        ]
    names = [spec["name"] for _, spec in plan]
    counts = ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names))
    rest = len(find_attention(new, own))
    target = f"{type(new).__name__} with {counts}" + (f", {rest} x its own attention" if rest else "")
    return Report(type(old).__name__, target, tuple(entries), (*_notes(plan, inside), *proofs.notes()))


def _notes(plan: list[tuple[Site, Spec]], inside: dict[str, Entry]) -> Iterator[str]:
    """Yield notes on differences that the shapes of tensors do not show."""
    others = [(site, spec) for site, spec in plan if not is_softmax(spec)]
    tables = {name.partition(".mixer.")[0]: e.status for name, e in inside.items() if name.endswith("bias.table")}
    beyond = [(site, spec["name"]) for site, spec in others if site.beyond]
    for what, those in (
        ("positions were rotary; {} does not rotate queries and keys", [t["name"] for s, t in others if s.rotary]),
        ("queries and keys were normalised; {} does not do that", [t["name"] for s, t in others if s.qk_norm]),
        (
            "attention reached back {0} tokens; the reach of {1} depends on its own options",
            [t["name"] for s, t in others if s.window],
        ),
        (
            "{} has no grouped keys: those of the host were repeated",
            [t["name"] for s, t in others if s.kv_heads != s.heads and "kv_heads" not in t],
        ),
        (
            "{} has one bias of relative positions, the mean of those of the host's heads",
            [name for s, name in beyond if tables.get(s.name) == "new"],
        ),
    ):
        windows = sorted({site.window for site, _ in plan if site.window})
        for name in dict.fromkeys(those):
            yield what.format(*((windows[0], name) if "{0}" in what else (name,)))
    for told, name in dict.fromkeys((s.beyond, name) for s, name in beyond if s.name not in tables):
        yield f"attention had {told}; {name} leaves that out"
