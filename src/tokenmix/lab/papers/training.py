"""Values of training: sizes and contents of data sets, and what our recipes state."""

from __future__ import annotations

from typing import Any

from .claim import mark_stated


def reversed_sums() -> int:
    """Count the held-out sums of our data that are none, read with the least digit first."""
    from ..data import Synthetic, text_of

    wrong = 0
    for row in Synthetic("addition", 4096, 64, longest=8).held_out("valid", 200)[0]:
        asked, _, answer = text_of(row).partition(";")[0].partition("=")
        wrong += sum(int(number[::-1]) for number in asked.split("+")) != int(answer[::-1])
    return wrong


def long_tail_images(classes: int, most: int, factor: float) -> int:
    """Count the images of all classes of a long-tailed set, with ``most`` in the largest class."""
    from ..data.long_tail import long_tail_counts

    return sum(long_tail_counts(most, classes, factor))


@mark_stated
def livt_recipe(recipe: str, fields: str) -> str:
    """Return the epochs of a recipe on ImageNet-LT at the paper's size, then fields of its config as a format."""
    from ..recipes import RECIPES
    from ..recipes.livt_pretrain import IMAGENET_LT_IMAGES

    config: Any = RECIPES[recipe].config(size="paper")
    epochs = (config.train.steps or 0) // (IMAGENET_LT_IMAGES // config.train.batch_size)
    return f"{epochs} / {fields.format(config)}"
