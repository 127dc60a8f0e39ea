"""Put modules in the place of others."""

from __future__ import annotations

import copy
import sys

from torch import nn


def swap_modules(model: nn.Module, news: dict[int, nn.Module], inplace: bool) -> nn.Module:
    """Return the model or a copy in which the modules with these ids are replaced; these are not copied."""
    if not inplace or id(model) in news:
        held = [m for m in model.modules() if id(m) in news]  # keeps their ids from being reused meanwhile
        model = copy.deepcopy(model, {id(m): news[id(m)] for m in held})
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in news:
            model.set_submodule(name, news[id(module)])
    if "transformers" in sys.modules and any(hasattr(module, "save_pretrained") for module in model.modules()):
        from .converted_config import describe_mixers

        describe_mixers(model)
    return model
