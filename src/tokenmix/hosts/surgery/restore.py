"""Restore attention in place of mixers."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ...errors import MixerError
from ...mixers import MIXERS, is_softmax
from ...mixers.facts import QKVO
from ..conversion_report import Entry, Report
from .adapters import adapters_of, site_name
from .form_adapters import share_bias
from .replace import watch_patches
from .swap import swap_modules
from .weights import bias_table, other_parameters, write_back


def restore(model: nn.Module, names: str | Iterable[str] = "*", *, inplace: bool = False) -> tuple[Any, Report]:
    """Invert ``replace_mixers``: restore the host's own attention, with the mixers' projections as its weights.

    The result is exact for ``attention`` with the host's heads. Any other mixer with all four projections returns
    them too, trained or not, and softmax attention computes with them from then on; repeated grouped keys become the
    mean of their group.

    Args:
        names: glob patterns of the sites, by the names that ``replace_mixers`` used.

    Raises:
        MixerError: if nothing was replaced, or a mixer lacks attention's queries, keys, values or output.
    """
    adapters = adapters_of(model)
    wanted = (names,) if isinstance(names, str) else tuple(names)
    sites = {name: site_name(name, adapter) for name, adapter in adapters.items()}
    chosen = {
        name: adapter
        for name, adapter in adapters.items()
        if any(fnmatchcase(sites[name], pattern) for pattern in wanted)
    }
    if not chosen:
        found = ", ".join(sites.values()) or "none at all"
        raise MixerError(f"restore: {', '.join(map(repr, wanted))} matches no replaced attention; there are {found}.")
    news: dict[int, nn.Module] = {}
    entries_by_site: dict[str, list[Entry]] = {}
    for name, adapter in chosen.items():
        pieces, entries_by_site[sites[name]] = _restore_module(model, sites[name], adapter)
        news |= pieces
    new = swap_modules(model, news, inplace)
    watch_patches(new)
    share_bias(new)
    for name in entries_by_site:
        for module in new.get_submodule(name).modules():
            if hasattr(module, "config"):
                module.config = _config(new, name, module.config)
    return new, _report_back(new, entries_by_site)


def _restore_module(model: nn.Module, name: str, adapter: Any) -> tuple[dict[int, nn.Module], list[Entry]]:
    site, spec, mixer = adapter.site, adapter.spec, adapter.mixer
    lost = [part for part in QKVO if part not in MIXERS[spec["name"]].facts.carries]
    if lost:
        has_no = f"{spec['name']} has no {', '.join(lost)} of attention"
        raise MixerError(f"restore: {name}: {has_no}; its softmax weights are lost.")
    if spec.get("heads", site.heads) != site.heads and is_softmax(spec):
        heads = f"its mixer has {spec['heads']} heads, attention there had {site.heads}"
        raise MixerError(f"restore: {name}: {heads}.")
    like = next(mixer.parameters())
    parts = {path: _materialise_copy(module, like) for path, module in adapter.origin[0].items()}
    whole = _assemble_parts(parts)
    lost = [n for n, p in other_parameters(site, _assemble_parts(adapter.origin[0])).items() if p.is_meta]
    if lost:
        gone = f"{lost[0]} of its attention was not kept where its mixer was loaded or drawn anew"
        raise MixerError(f"restore: {name}: {gone}; load the original model.")
    try:
        entries = write_back(mixer, site, whole)
    except MixerError as why:
        raise MixerError(f"restore: {name}: {why}.") from None
    table = bias_table(model, site)
    if table is not None:  # a mixer's own table is lost only if it has become another
        ours = mixer.state_dict()
        same = {n for n, t in ours.items() if n.endswith(".table") and torch.equal(t, table.to(t))}
        entries = [e for e in entries if e.status != "dropped" or e.name not in same]
    for path in site.traits.own:
        if hasattr(adapter, path):
            whole.get_submodule(path).load_state_dict(adapter.get_submodule(path).state_dict())
    first = next(iter(parts))
    news = {
        id(adapter if path == first else model.get_submodule(f"{name}.{path}".strip("."))): part.train(adapter.training)
        for path, part in parts.items()
    }
    return news, entries


def _materialise_copy(module: nn.Module, like: torch.Tensor) -> nn.Module:
    """Copy a module with room for the weights that are on the meta device."""
    new = copy.deepcopy(module)
    for part in new.modules():
        for name, old in part._parameters.items():
            if old is not None:
                part._parameters[name] = nn.Parameter(_make_room(old, like), old.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = _make_room(buffer, like)
    return new


def _make_room(old: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    dtype = like.dtype if old.is_floating_point() else old.dtype
    data = torch.empty(old.shape, device=like.device) if old.is_meta else old.detach()
    return data.to(like.device, dtype)


def _assemble_parts(parts: dict[str, nn.Module]) -> nn.Module:
    """Join the parts under their paths in one module."""
    if "" in parts:
        return parts[""]
    whole = nn.Module()
    for path, part in parts.items():
        *parents, last = path.split(".")
        node = whole
        for parent in parents:
            if not hasattr(node, parent):
                node.add_module(parent, nn.Module())
            node = node.get_submodule(parent)
        node.add_module(last, part)
    return whole


def _config(model: nn.Module, name: str, default: object) -> Any:
    """Return the config of the model that contains a site, so that later changes to it take effect there."""
    parents = name.split(".")
    for depth in range(len(parents) - 1, -1, -1):
        found = getattr(model.get_submodule(".".join(parents[:depth])), "config", None)
        if type(found) is type(default):
            return found
    return default


def _report_back(new: nn.Module, entries_by_site: dict[str, list[Entry]]) -> Report:
    parameters = {name for name, _ in new.named_parameters()}
    entries = [
        replace(e, name=f"{site}.{e.name}" if site else e.name) for site, made in entries_by_site.items() for e in made
    ]
    named = {e.name for e in entries if e.status != "dropped"}
    entries = [
        Entry(n, "copied", tuple(t.shape), n, n in parameters) for n, t in new.state_dict().items() if n not in named
    ] + entries
    kind = type(new).__name__
    target = f"{kind} with its own attention in {len(entries_by_site)} places"
    return Report(f"{kind} with mixers", target, tuple(entries))
