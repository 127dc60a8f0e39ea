"""Mixers to begin a new one with: text in which NAME, CLASS and TITLE are replaced. Each keeps the whole contract."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from ...types import Options
from . import attention, pointwise, recurrent

__all__ = ["SKELETONS", "Skeleton"]


class Skeleton(NamedTuple):
    """The text of each file of a mixer, and the options of its case in the tests."""

    reference: str
    mixer: str
    page: str
    options: Options


def _skeleton(module: ModuleType, **options: object) -> Skeleton:
    return Skeleton(module.REFERENCE, module.MIXER, module.PAGE, options)


SKELETONS: dict[str, Skeleton] = {
    "pointwise": _skeleton(pointwise),
    "attention": _skeleton(attention, heads=2),
    "recurrent": _skeleton(recurrent, heads=2),
}
"""What a new mixer is like -> where it begins."""
