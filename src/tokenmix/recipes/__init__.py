"""One file per experiment; each row of a paper's table is a name, each size a RunConfig."""

from __future__ import annotations

from .aft_enwik8 import RECIPE as _aft_enwik8
from .recipe import SIZES as SIZES
from .recipe import Recipe as Recipe
from .recipe import Row as Row
from .recipe import find_recipe as _find
from .text import RECIPE as _text

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (_text, _aft_enwik8)}


def find_recipe(name: str) -> Recipe:
    """The recipe called ``name``; a misspelt one is refused with the nearest names."""
    return _find(name, RECIPES)
