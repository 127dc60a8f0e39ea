"""Recipes, one file per experiment. Each row of a paper's table has a name, and each size of it is a RunConfig."""

from __future__ import annotations

from .ablations import RECIPE as _ablations
from .aft_cifar10_classify import RECIPE as _aft_cifar10_classify
from .aft_cifar10_density import RECIPE as _aft_cifar10_density
from .aft_enwik8 import RECIPE as _aft_enwik8
from .aft_imagenet import RECIPE as _aft_imagenet
from .arithmetic import RECIPES as _arithmetic
from .documents import RECIPES as _documents
from .hydra_imagenet import RECIPE as _hydra_imagenet
from .image_diffusion import RECIPE as _image_diffusion
from .livt_cifar_lt import RECIPES as _livt_cifar_lt
from .livt_imagenet_lt import RECIPE as _livt_imagenet_lt
from .livt_pretrain import RECIPE as _livt_pretrain
from .long_range import RECIPE as _long_range
from .points import RECIPES as _points
from .pvt_imagenet import RECIPE as _pvt_imagenet
from .recall import RECIPE as _recall
from .recipe import SIZES, Recipe, Row, import_recipe
from .recipe import find_recipe as _find
from .segmentation import RECIPE as _segmentation
from .sizes import amounts, describe_changes, experiment
from .text import RECIPE as _text
from .translation import RECIPES as _translation

__all__ = [
    "RECIPES",
    "Recipe",
    "Row",
    "SIZES",
    "amounts",
    "describe_changes",
    "experiment",
    "find_recipe",
    "import_recipe",
]

_ALL = (
    _text,
    _aft_enwik8,
    _aft_cifar10_density,
    _aft_cifar10_classify,
    _image_diffusion,
    _aft_imagenet,
    _ablations,
    _hydra_imagenet,
    _pvt_imagenet,
    _livt_pretrain,
    *_livt_cifar_lt,
    _livt_imagenet_lt,
    _segmentation,
    _recall,
    *_arithmetic,
    *_translation,
    *_documents,
    _long_range,
    *_points,
)
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}


def find_recipe(name: str) -> Recipe:
    """Return the recipe called ``name``, or that of a file; a misspelt name is refused with the nearest ones."""
    return _find(name, RECIPES)
