"""Decide which of a model's attention modules gets which mixer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ...errors import MixerError
from ...types import Spec
from .adapters import adapters_of
from .sites import OTHER_WAYS, Site, explain_class, unknown_hint


def plan_replacements(
    model: nn.Module, sites: list[Site], mixers: object, keep: str | Iterable[str], last: int | None, every: int | None
) -> list[tuple[Site, Spec]]:
    """Return the sites to replace with their specs, in the model's order."""
    if not sites and (replaced := len(adapters_of(model))):
        fix = "tokenmix.hosts.restore puts it back"
        raise MixerError(
            f"replace_mixers: {type(model).__name__} has no attention left: all {replaced} were replaced; {fix}."
        )
    if not sites:
        odd = unknown_hint(model)
        raise MixerError(f"replace_mixers: {type(model).__name__} has no attention of a known family{odd}")
    if last is not None and every is not None:
        raise MixerError(f"replace_mixers: give last or every, got last={last}, every={every}.")
    chosen: dict[str, Spec | None] = {}
    for pattern, specs in _patterns(mixers).items():
        matched = _schedule_sites(_match_sites(pattern, sites, model), pattern, last, every)
        row = list(specs) if isinstance(specs, (list, tuple)) else [specs]
        if not row:
            hint = "give one spec, or several that repeat"
            raise MixerError(f"replace_mixers: the list of specs for {pattern!r} is empty; {hint}.")
        chosen |= {site.name: _as_spec(row[i % len(row)], pattern) for i, site in enumerate(matched)}
    for pattern in (keep,) if isinstance(keep, str) else keep:
        for site in _match_sites(pattern, sites, model):
            chosen.pop(site.name, None)
    plan = [(site, spec) for site in sites if (spec := chosen.get(site.name)) is not None]
    if not plan:
        raise MixerError("replace_mixers: nothing is left to replace; check keep, last and every.")
    return plan


def _patterns(mixers: object) -> dict[str, Any]:
    if isinstance(mixers, (str, list, tuple)) or (isinstance(mixers, Mapping) and isinstance(mixers.get("name"), str)):
        return {"*": mixers}
    if not isinstance(mixers, Mapping) or not mixers or not all(isinstance(pattern, str) for pattern in mixers):
        wanted = 'a spec such as {"name": "hydra"}, a list of them, or patterns with one each'
        raise MixerError(f"replace_mixers: expects {wanted}, got {mixers!r}.")
    return dict(mixers)


def _as_spec(spec: object, pattern: str) -> Spec | None:
    if spec is None:
        return None
    if isinstance(spec, str):
        return {"name": spec}
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
        raise MixerError(f'replace_mixers: {pattern!r} expects a spec such as {{"name": "hydra"}}, got {spec!r}.')
    return dict(spec)


def _match_sites(pattern: str, sites: list[Site], model: nn.Module) -> list[Site]:
    found = [site for site in sites if fnmatchcase(site.name, pattern)]
    if not found:
        other = next((m for name, m in model.named_modules() if name and fnmatchcase(name, pattern)), None)
        if other is not None:
            of = f"the pattern {pattern!r} matches a {type(other).__name__}"
            raise MixerError(f"replace_mixers: {of}, {explain_class(type(other).__name__)}. {OTHER_WAYS}")
        more = f" ... {sites[-1].name}, {len(sites)} in all" if len(sites) > 6 else ""
        some = ", ".join(site.name for site in sites[:6]) + more
        raise MixerError(f"replace_mixers: the pattern {pattern!r} matches no attention module; there are {some}.")
    return found


def _schedule_sites(sites: list[Site], pattern: str, last: int | None, every: int | None) -> list[Site]:
    """Return the last N sites, or every N-th, counting from the last."""
    n = len(sites)
    for name, value, low in (("last", last, 0), ("every", every, 1)):
        if value is not None and not low <= value <= n:
            limit = f"{low}..{n}, because {pattern!r} matches {n} modules"
            raise MixerError(f"replace_mixers: {name} must be in {limit}, got {value}.")
    if last is not None:
        return sites[n - last :]
    return sites if every is None else sites[::-1][::every][::-1]
