"""Build a mixer from its name, also one that only a module of the user's own has: ``package:Class``."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import MixerError
from ..system.config import nearest
from ..system.modules import import_named
from .base import Mixer
from .facts import mixer_options, required_options
from .table import MIXERS, register_mixer


def load_mixer(name: Any) -> type[Mixer] | None:
    """Return the class of the mixer called ``name``, or None if there is none.

    ``package:Class`` is the class of a module that is imported already, that TOKENMIX_MODULES names, or, inside
    ``typed_names``, of any module, from the working folder too; ``file.py:Class`` that of a file. Registered under
    that name.

    Raises:
        MixerError: if the module may not or cannot be imported, or has no such subclass of ``Mixer``.
    """
    if not isinstance(name, str) or ":" not in name or name in MIXERS:
        return MIXERS.get(name) if isinstance(name, str) else None
    package, _, attribute = name.partition(":")
    module = import_named(package, "build_mixer", f"the mixer {name!r}")
    cls = getattr(module, attribute, None)
    if isinstance(cls, type) and issubclass(cls, nn.Module) and not issubclass(cls, Mixer):
        raise MixerError(
            f"build_mixer: {name} is a plain nn.Module, which says nothing of masks and causality; make it a mixer in "
            f"three lines: class My{attribute}(tokenmix.Mixer): | def __init__(self, dim, *, causal=False): "
            f"super().__init__(dim, causal=causal); self.inner = {attribute}(dim) | def mix(self, inputs): return "
            "self.inner(inputs.x); then state what it can in `facts` and run `tokenmix check` on it."
        )
    if not (isinstance(cls, type) and issubclass(cls, Mixer)):
        known = [each for each, value in vars(module).items() if isinstance(value, type) and issubclass(value, Mixer)]
        own = [each for each in known if getattr(module, each).__module__ == module.__name__]
        raise MixerError(
            f"build_mixer: {package!r} has no subclass of tokenmix.Mixer called {attribute!r}; "
            + (f"it has {', '.join(own)}." if own else "it has none.")
        )
    register_mixer(name, cls)
    return cls


def build_mixer(name: str, dim: int, **options: Any) -> Mixer:
    """Build the mixer called ``name``.

    A spec such as ``{"name": "aft_local", "window": 32}`` is built by ``build_mixer(dim=..., **spec)``. The name
    ``package:Class`` is that of a mixer in a module of your own, which has to be imported already.
    """
    cls = load_mixer(name)
    if cls is None:
        raise MixerError(f"build_mixer: no mixer is called {name!r}; {nearest(str(name), MIXERS)}.")
    known = mixer_options(cls)
    for option in options:
        if option not in known:
            raise MixerError(f"build_mixer: {name} has no option {option!r}; {nearest(option, known)}.")
    for option in required_options(cls, options):
        raise MixerError(f"build_mixer: {name} needs the option {option!r}; its options are {', '.join(known)}.")
    return cls(dim, **options)
