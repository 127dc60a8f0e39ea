"""Define the hook of mkdocs that trains two small models and adds the page of `tokenmix look sentence` about them."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File

from tokenmix.lab.explain import explain, render
from tokenmix.lab.explain.example import train_example
from tokenmix.system.machine import torch_threads

PAGE = "explain-example.html"
TEXT = "The black cat drank the milk"
MODELS: dict[str, tuple[dict[str, Any] | None, int]] = {"attention": (None, 700), "AFT": ({"name": "aft_full"}, 300)}
"""Mixers of the example and the steps for which they are trained, some 12 seconds together on a quiet core."""


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the example's page, which docs/explain.md links to."""
    files.append(File.generated(config, PAGE, content=example()))
    return files


def example() -> str:
    """Return the page of the example.

    One thread trains the models: several that wait for each other took ten times as long beside another process.
    """
    made = []
    with torch_threads(1):
        for name, (mixer, steps) in MODELS.items():
            model, words = train_example(mixer, steps=steps)
            made.append(explain(model, words, TEXT, name))
    return render(made)
