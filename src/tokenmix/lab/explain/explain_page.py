"""The explanation of one or several models as one self-contained page, in English or Chinese."""

from __future__ import annotations

import base64
import importlib.resources
import json
import re
from pathlib import Path

import torch
from torch import Tensor

from ...errors import MixerError
from ...system.files import whole_file
from ...types import Record
from .explained import Entered, Explained
from .families import Family
from .sites import Site

LANGUAGES = ("en", "zh")
SCRIPTS = ("values.js", "parts.js", "families.js", "steps.js", "ends.js", "explain.js")
CHANNELS = 16
"""The most maps of weights that a page holds for one mixer without heads, besides their mean."""
WIDEST = 256
"""The most columns of a table of a family."""
LARGEST = 5_000_000
"""The most bytes of a page."""


def write_page(models: list[Explained], out: Path, lang: str = "en") -> Path:
    """Write the page of one or several models of one kind that read the same text.

    Raises:
        MixerError: for a language that the page is not written in, for models of different kinds, and for a page that
            would be too large.
    """
    page = render(models, lang).encode()
    if len(page) > LARGEST:
        raise MixerError(
            f"look sentence: the page would have {len(page) / 1e6:.1f} MB, and {LARGEST / 1e6:.0f} MB is the most; "
            + "give a shorter text or fewer runs."
        )
    with whole_file(Path(out)) as f:
        f.write(page)
    return Path(out)


def render(models: list[Explained], lang: str = "en") -> str:
    """Return the page as HTML."""
    if lang not in LANGUAGES:
        raise MixerError(f"look sentence: the page is not written in {lang!r}; choose --lang {' or '.join(LANGUAGES)}.")
    if not models:
        raise MixerError("look sentence: no model was given; give at least one run directory.")
    other = next((each for each in models if each.kind != models[0].kind), None)
    if other is not None:
        raise MixerError(
            f"look sentence: {models[0].name} is of kind {models[0].kind!r} and {other.name} of kind {other.kind!r}; a "
            + "page shows models of one kind, so write two."
        )
    data = {
        "lang": lang,
        "kind": models[0].kind,
        "runs": [model_data(each) for each in models],
        "words": {name: words(name) for name in LANGUAGES},
    }
    filled = {
        "LANGUAGE": "zh-CN" if lang == "zh" else "en",
        "STYLE": _file("explain.css"),
        "SCRIPT": "".join(_file(name) for name in SCRIPTS),
        "DATA": script_json(data),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: filled[mark[1]], _file("explain.html"))


def words(lang: str) -> dict[str, str]:
    """Return all words of the page in one language, by key."""
    return json.loads(_file(f"words.{lang}.json"))


def script_json(data: object) -> str:
    """Return data as JSON that can stand inside a script element."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def array(a: Tensor | None) -> Record | None:
    """Return a tensor as its shape and its float32 numbers in base64."""
    if a is None:
        return None
    plain = a.detach().to("cpu", torch.float32).contiguous()
    raw = bytes(plain.view(-1).view(torch.uint8).tolist()) if plain.numel() else b""
    return {"shape": list(a.shape), "data": base64.b64encode(raw).decode()}


def model_data(model: Explained) -> Record:
    """Return what the page knows of a model."""
    return {
        "name": model.name,
        "text": model.text,
        "written": model.written,
        "unordered": model.unordered,
        "unordered_loss": model.unordered_loss,
        "loss": model.loss,
        "parameters": model.parameters,
        "source": _entered_json(model.source),
        "target": None if model.target is model.source else _entered_json(model.target),
        "choices": model.choices,
        "chances": model.chances,
        "classes": model.classes,
        "layers": model.layers,
        "sites": [_site(site) for site in model.sites],
    }


def _entered_json(entered: Entered) -> Record:
    return {
        "pieces": entered.pieces,
        "ids": entered.ids,
        "embedded": array(entered.embedded),
        "positions": array(entered.positions),
    }


def _site(site: Site) -> Record:
    arrays = ("output", "q", "k", "v", "products", "bias", "mixed")
    return {
        "part": site.part,
        "layer": site.layer,
        "mixer": site.mixer,
        "kind": site.kind,
        "scale": site.scale,
        "muted": site.muted,
        "allowed": array(site.allowed.float()),
        "mean": array(site.weights.mean(0)),
        "channels": len(site.weights),
        "weights": array(site.weights if site.products is not None else site.weights[:CHANNELS]),
        "family": None if site.family is None else _family(site.family),
        **{name: array(getattr(site, name)) for name in arrays},
    }


def _family(family: Family) -> Record:
    return {
        "key": family.key,
        "given": family.given,
        "tables": [{**table._asdict(), "numbers": array(table.numbers[..., :WIDEST])} for table in family.tables],
    }


def _file(name: str) -> str:
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")
