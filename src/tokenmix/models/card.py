"""Write the model card of a model: its class, sizes and mixers, and how to load it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ..mixers import MIXERS, Mixer
from ..mixers.facts import page_stem
from ..system.version import __version__


def front_matter(library: str, task: str | None, tags: Iterable[str]) -> str:
    """Return the lines of a card that model hubs read."""
    named = [f"- {tag if tag.isidentifier() else json.dumps(tag)}" for tag in dict.fromkeys(tags)]
    tasks = [f"pipeline_tag: {task}"] if task else []
    return "\n".join(["---", f"library_name: {library}", *tasks, "tags:", *named, "---"])


def model_card(model: Any, name: str) -> str:
    """Return README.md of a ``Model`` that its folder or the Hub calls ``name``."""
    cls, config = type(model), model.config.to_json()
    layers = Counter(type(mixer) for mixer in outermost_mixers(model))
    names = {mixer: next((n for n, c in MIXERS.items() if c is mixer), mixer.__name__) for mixer in layers}
    task = model.pipeline_tags["classes" not in config or not config["classes"]]
    dtypes = Counter(str(p.dtype).removeprefix("torch.") for p in model.parameters())
    about = f"A model of the class `{cls.__name__}` of tokenmix {__version__}, token mixers for PyTorch, with "
    about += f"{sum(p.numel() for p in model.parameters()):,} parameters in {' and '.join(dtypes)}."
    sizes = [f"| `{key}` | {_cell(value)} |" for key, value in config.items() if _is_size(value)]
    rows = [f"| {n} | `{names[c]}` | {c.facts.about.paper or 'none given'} | {_page(c)} |" for c, n in layers.items()]
    home = "tokenmix.models" if cls.__module__.startswith("tokenmix.") else cls.__module__
    load = f"from {home} import {cls.__name__}\n\nmodel = {cls.__name__}.from_pretrained({json.dumps(name)})"
    parts = [front_matter("tokenmix", task, ["tokenmix", *names.values()]), f"# {name}", about]
    parts += ["\n".join(["| size | |", "|---|---|", *sizes])] if sizes else []
    head = ["| layers | mixer | paper | page of the documentation |", "|---|---|---|---|"]
    parts += ["## Mixers", "\n".join([*head, *rows])] if rows else []
    parts += ["## Use", f"`pip install 'tokenmix[hf]'`, then:\n\n```python\n{load}\n```"]
    parts += [_register(names[c], c) for c in layers if not _is_ours(c)]
    return "\n\n".join([*parts, "## Config", f"```json\n{json.dumps(config, indent=1)}\n```"]) + "\n"


def outermost_mixers(module: nn.Module) -> Iterator[Mixer]:
    """Yield the mixers inside a module that are no part of another mixer."""
    for child in module.children():
        if isinstance(child, Mixer):
            yield child
        else:
            yield from outermost_mixers(child)


def _is_ours(mixer: type[Mixer]) -> bool:
    return mixer.__module__.startswith("tokenmix.")


def _page(mixer: type[Mixer]) -> str:
    return f"`docs/mixers/{page_stem(mixer)}.md`" if _is_ours(mixer) else f"none: `{mixer.__module__}`"


def _register(name: str, mixer: type[Mixer]) -> str:
    if ":" in name:
        return (
            f"The mixer `{name}` is not part of tokenmix: import `{name.partition(':')[0]}` before you load the model."
        )
    how = f'`tokenmix.register_mixer("{name}", {mixer.__name__})`'
    return f"The mixer `{name}` is not part of tokenmix: call {how} before you load the model."


def _is_size(value: Any) -> bool:
    numbers = value if isinstance(value, list) and value else [value]
    return all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers)


def _cell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
