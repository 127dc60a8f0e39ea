"""Find a cache under the names that transformers has for it: ``cache`` since 5.24, ``past_key_values`` before."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

from ..errors import MixerError

Cache = TypeVar("Cache")
CACHE_NAMES = ("cache", "past_key_values", "layer_past")
"""Keywords of a cache in forward methods of transformers; some attention modules, as GPT-NeoX's, say layer_past."""


def given_cache(who: str, **named: Cache | None) -> Cache | None:
    """Return the one cache that is not None among those given by name; None if all are.

    Raises:
        MixerError: for more than one.
    """
    found = [name for name, cache in named.items() if cache is not None]
    if len(found) > 1:
        raise MixerError(f"{who}: got both {found[0]} and {found[1]}, two names of one argument; give one of them.")
    return named[found[0]] if found else None


def find_cache_name(model: Any) -> str | None:
    """Return the keyword of a cache in a model's ``forward``; None if it takes none."""
    known = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in known), None)


def returned_cache(out: Any) -> Any:
    """Return the cache in a model's output, or None."""
    return out.cache if hasattr(out, "cache") else getattr(out, "past_key_values", None)
