"""Finding a mixer by name, also one that only a module of the user's own has: ``package:Class``."""

from __future__ import annotations

from typing import Any

from ..errors import MixerError
from ..system.modules import import_named
from .base import Mixer
from .table import MIXERS, register_mixer


def load_mixer(name: Any) -> type[Mixer] | None:
    """Return the class of the mixer called ``name``, or None if there is none.

    ``package:Class`` is the class of a module that is imported already, that TOKENMIX_MODULES names, or, inside
    ``typed_names``, of any module, from the working folder too. It is registered under that name.

    Raises:
        MixerError: if the module may not or cannot be imported, or has no such subclass of ``Mixer``.
    """
    if not isinstance(name, str) or ":" not in name or name in MIXERS:
        return MIXERS.get(name) if isinstance(name, str) else None
    package, _, attribute = name.partition(":")
    module = import_named(package, "build_mixer", f"the mixer {name!r}")
    cls = getattr(module, attribute, None)
    if not (isinstance(cls, type) and issubclass(cls, Mixer)):
        known = [each for each, value in vars(module).items() if isinstance(value, type) and issubclass(value, Mixer)]
        own = [each for each in known if getattr(module, each).__module__ == module.__name__]
        raise MixerError(
            f"build_mixer: {package!r} has no subclass of tokenmix.Mixer called {attribute!r}; "
            + (f"it has {', '.join(own)}." if own else "it has none.")
        )
    register_mixer(name, cls)
    return cls
