"""The fields of a config as options of the command line: their help, and which one a short option means."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, get_type_hints

from ...errors import MixerError
from ...system.config import nearest
from .output import wrap_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


SECTIONS = ("model", "data", "optim", "train")
SPECS = 4
"""The most mixer specs of a config whose options are listed one by one."""
EXAMPLE = '{"name": "aft_local", "window": 32}'
"""A mixer spec, for errors about one that cannot be read."""
OF_MIXERS = ("mixer", "mixers", "attention", "attn")
"""What users look for a mixer under."""
CHOICES = ("row", "size", "shell")
"""The options of train that say which config of a recipe is meant."""


def recipe_help(argv: list[str]) -> str:
    """Return the rows of the recipe in ``train RECIPE --help`` and the fields of its config with their values.

    Without a recipe, the text says how to get this.
    """
    if len(argv) < 2 or argv[1].startswith("-"):
        return "`tokenmix train RECIPE --help` shows the rows of a recipe and all fields of its config."
    from ..recipes import find_recipe, import_recipe

    import_recipe(argv[1])
    recipe, given = find_recipe(argv[1]), _chosen_values(argv)
    config = recipe.config(given.get("row"), given.get("size", "smoke"), given.get("shell"))
    lines = [f"rows of {recipe.name}, of which {recipe.default} is the default"]
    for name, row in recipe.rows.items():
        lines += wrap_text(f"  --row {name}: ", row.about, 8)
    lines.append(f"fields of the config, with their values in row {config.row} at size {config.size}")
    for section in SECTIONS:
        for name, value, about in _described_fields(getattr(config, section), section):
            lines += wrap_text(f"  --{name} ", f"{value}: {about}" if about else value, 8)
    return "\n".join(lines)


def meant_field(argv: list[str], options: Iterable[str]) -> str:
    """Return which field of the config an unknown short option may mean, as a sentence; "" where there is none.

    Args:
        argv: the verb with its arguments.
        options: names of the verb's own options.
    """
    own = {name for option in options for name in (option, f"no_{option}")} | {"help", "from"}
    for item in argv[1:]:
        short = re.fullmatch(r"--([a-z][a-z0-9_-]*)(?:=.*)?", item, re.DOTALL)
        if short is None or short[1].replace("-", "_") in own:
            continue
        name = short[1].replace("-", "_")
        if name in OF_MIXERS:
            row = "--rows" if argv[0] == "sweep" else "--row"
            return f"there is no option --{short[1]}; a mixer is a row, {row} NAME, or a spec, --model.mixers NAME."
        found = [field for field in _known_fields(argv) if field.endswith("." + name)] or _other_names(name)
        if found:
            wanted = " or ".join(f"--{field}" for field in found[:3])
            return f"there is no option --{short[1]}; did you mean {wanted}?"
    return ""


def unknown_option(argv: list[str], verb: type) -> str:
    """Return which option of a verb an unknown one may mean, as a sentence; "" where all are known."""
    own = {"help"}
    for field in dataclasses.fields(verb):
        hints = getattr(get_type_hints(verb, include_extras=True)[field.name], "__metadata__", ())
        name = next((hint.name for hint in hints if getattr(hint, "name", None)), field.name)
        own |= {name, f"no_{name}"}
    for item in argv[1:]:
        given = re.match(r"--([^=]+)", item, re.DOTALL)
        if given is not None and given[1].replace("-", "_") not in own:
            options = ["--" + name.replace("_", "-") for name in sorted(own) if not name.startswith("no_")]
            instead = getattr(verb, "instead_of_data", "") if given[1] == "data" else ""
            return f"there is no option --{given[1][:80]}; {instead or nearest('--' + given[1], options)}."
    return ""


def check_json(option: str, field: str, text: str, value: object) -> None:
    """Refuse a value that is meant as JSON and is not; the error shows a right one."""
    if not isinstance(value, str) or field in ("data.source", "data.path"):
        return
    if not text.lstrip().startswith(("[", "{")):
        return
    try:
        json.loads(text)
        why = "a text"
    except ValueError as error:
        why = str(error)
    examples = {"model.mixers": f"[{EXAMPLE}]", "optim.betas": "[0.9, 0.98]", "data.split": "[90, 5, 5]"}
    shown = examples.get(field, EXAMPLE if field.startswith("model.mixers.") else "[1, 2]")
    raise MixerError(f"{option} must be JSON, got {text!r} ({why}); write it like {option} '{shown}'.")


def _chosen_values(argv: list[str]) -> dict[str, str]:
    """Return the values of the options that choose a config of a recipe."""
    found = {}
    for i, item in enumerate(argv):
        name, equals, value = item.removeprefix("--").partition("=")
        if item.startswith("--") and name in CHOICES:
            found[name] = value if equals else next(iter(argv[i + 1 : i + 2]), "")
    return {name: value for name, value in found.items() if not value.startswith("-")}


def _other_names(name: str) -> list[str]:
    """Return the field that a name of another trainer means."""
    from ..train.config import MEANT  # not before it is needed: training imports much

    return [MEANT[name]] if name in MEANT else []


def _known_fields(argv: list[str]) -> list[str]:
    """Return the fields of the config that a command is about, or of the recipe for text where that is unknown."""
    from ..recipes import RECIPES, find_recipe, import_recipe

    name = argv[1] if len(argv) > 1 else ""
    import_recipe(name)
    recipe = find_recipe(name if name in RECIPES or name.endswith(".py") else "text")
    row = _chosen_values(argv).get("row")
    config = recipe.config(row if row in recipe.rows else None)
    sections = ("train",) if argv[0] == "resume" else SECTIONS
    return [name for section in sections for name, _, _ in _described_fields(getattr(config, section), section)]


def _described_fields(
    config: DataclassInstance | type[DataclassInstance], prefix: str
) -> Iterator[tuple[str, str, str]]:
    """Yield the dotted name, value and description of each field of a config; those inside of objects too."""
    about = _descriptions(type(config))
    for field in dataclasses.fields(config):
        name, value = f"{prefix}.{field.name}", getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _described_fields(value, name)
            continue
        yield name, _format_value(value), about.get(field.name, "")
        if isinstance(value, tuple) and len(value) <= SPECS and all(isinstance(each, dict) for each in value):
            for i, spec in enumerate(value):
                yield from ((f"{name}.{i}.{key}", _format_value(inner), "") for key, inner in spec.items())


def _descriptions(cls: type) -> dict[str, str]:
    """Return the descriptions of a class's arguments, as its docstring gives them."""
    found: dict[str, str] = {}
    name = ""
    for line in (inspect.getdoc(cls) or "").partition("Args:\n")[2].splitlines():
        if line and not line.startswith(" "):
            break
        start = re.fullmatch(r" {4}(\w+): (.*)", line)
        name = start[1] if start else name
        found[name] = start[2] if start else f"{found.get(name, '')} {line.strip()}".strip()
    return {key: text.replace("``", "`") for key, text in found.items()}


def _format_value(value: object) -> str:
    """Write a value as it is typed on the command line."""
    if value is None or isinstance(value, str):
        return "none" if value is None else value
    text = json.dumps(value)
    return f"'{text}'" if isinstance(value, (tuple, list, dict)) else text
