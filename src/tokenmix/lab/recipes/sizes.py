"""What a recipe's row is at a size: the experiment without its name, and what a small size makes smaller."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from inspect import Parameter
from typing import Any

from ...mixers import MIXERS
from ...mixers.facts import mixer_options
from ...system.config import dotted_fields
from ..train.config import RunConfig

NAMES = ("recipe", "row", "size")
"""Fields of a config that name an experiment and change nothing in it."""
AMOUNTS = ("layers", "dim", "depths", "dims", "widths", "image_size", "patch", "max_len", "seq_len", "size")
"""Fields of a model and its data that a smaller size may change."""
OPTIONS = ("heads", "kernel_size", "window", "rank", "stride", "block", "memory")
"""Options of mixers that it may change."""


def experiment(config: RunConfig) -> str:
    """Return what a config trains as text: rows with the same text are one model, trained in one way.

    The mixers are listed layer by layer, each with all its options.
    """
    return json.dumps({k: v for k, v in _complete_config(config).items() if k not in NAMES}, sort_keys=True)


def _complete_config(value: Any) -> Any:
    """Return a config as plain values, with every mixer spec completed by the defaults of its class."""
    if is_dataclass(value):
        found = {field.name: _complete_config(getattr(value, field.name)) for field in fields(value)}
        for name, specs in (("mixers", "specs"), ("cross_mixers", "cross_specs"), ("encoder_mixers", "encoder_specs")):
            if hasattr(value, specs):
                found[name] = _complete_config(getattr(value, specs)())
        return found | ({"layers": len(found["mixers"])} if hasattr(value, "specs") else {})
    if isinstance(value, dict):
        given = {} if value.get("name") not in MIXERS else mixer_options(MIXERS[value["name"]])
        known = {k: v for k, v in given.items() if v is not Parameter.empty}
        return {k: _complete_config(v) for k, v in (known | value).items()}
    return [_complete_config(v) for v in value] if isinstance(value, (list, tuple)) else value


def amounts(config: RunConfig) -> dict[str, object]:
    """Return the sizes of a model and of its mixers by name; an option of mixers has each of its values once."""
    given = dotted_fields(config.to_json())
    found = {name.rpartition(".")[2]: value for name, value in given.items() if name.startswith(("model.", "data."))}
    found = {name: found[name] for name in AMOUNTS if found.get(name) is not None}
    model: Any = getattr(config.model, "backbone", config.model)
    specs = model.specs() if hasattr(model, "specs") else []
    for option in OPTIONS:
        if values := [spec[option] for spec in specs if spec.get(option) is not None]:
            found[option] = [v for i, v in enumerate(values) if v not in values[:i]]
    alone = {name: value[0] for name, value in found.items() if isinstance(value, (list, tuple)) and len(value) == 1}
    return {name: _complete_config(value) for name, value in (found | alone).items()}


def reduced_amounts(config: RunConfig, original: RunConfig) -> dict[str, tuple[object, object]]:
    """Return what a config has less of than the original, by name: the original amount and that of the config."""
    now, then = amounts(config), amounts(original)
    return {name: (then[name], now[name]) for name in then if name in now and now[name] != then[name]}


def describe_changes(changes: dict[str, tuple[object, object]]) -> str:
    """Write what was shrunk as words: "layers 12 -> 4, heads 12 -> 4"."""
    return ", ".join(f"{name} {was} -> {now}" for name, (was, now) in changes.items())
