"""Building a mixer from its name.

Type checkers read ``by_name.pyi`` in place of this file: it has one overload of ``build_mixer`` for each row of the
table, and `make tables` writes it.
"""

from __future__ import annotations

from typing import Any

from ..errors import MixerError
from ..system.config import nearest
from .base import Mixer
from .facts import mixer_options
from .outside import load_mixer
from .table import MIXERS

MixerName = str
"""The name of a mixer. Type checkers know the names of the library; those that ``register_mixer`` adds are strings."""


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
    for option in cls.required_options(options):
        raise MixerError(f"build_mixer: {name} needs the option {option!r}; its options are {', '.join(known)}.")
    return cls(dim, **options)
