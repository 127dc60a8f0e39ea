"""What `tokenmix list` prints, as data and as text."""

from __future__ import annotations

import inspect

from ...types import Record
from .output import wrap_text

CAPABILITIES = ("causal", "streaming", "context", "attn_mask", "grid", "export")
SETS = {
    "corpora": "CORPORA",
    "documents": "DOCUMENT_SETS",
    "labelled texts": "LABELLED_SETS",
    "pairs of texts": "PARALLEL_SETS",
    "images": "IMAGE_SETS",
    "masks": "MASK_SETS",
    "points": "POINT_SETS",
}
"""Kind of data -> the table of ``tokenmix.lab.data`` that names its sets."""


def catalogue() -> Record:
    """Return the mixers, recipes, models and sets of data of this version."""
    from ...mixers import MIXERS, mixer_options, required_options, state_growth
    from ...models import MODELS
    from .. import data
    from ..recipes import RECIPES, SIZES

    mixers = {}
    for name, cls in MIXERS.items():
        able = [c for c in CAPABILITIES if getattr(cls.facts, c)]
        options = mixer_options(cls) | dict.fromkeys(required_options(cls), "required")
        mixers[name] = {
            "about": (inspect.getdoc(cls) or "").split("\n")[0],
            **cls.facts.about._asdict(),
            "kernels": cls.facts.kernels._asdict(),
            "state": state_growth(name),
            "can": able,
            "causal_only": cls.facts.causal_only,
            "options": options,
            "waivers": dict(cls.facts.waivers),
        }
    recipes = {}
    for name, recipe in RECIPES.items():
        rows = {row: {"about": r.about, "printed": r.printed} for row, r in recipe.rows.items()}
        recipes[name] = {"about": recipe.about, "default": recipe.default, "sizes": list(SIZES), "rows": rows}
    sets = {title: getattr(data, name) for title, name in SETS.items()}
    return {"mixers": mixers, "recipes": recipes, "models": list(MODELS), **sets}


def catalogue_text(found: Record) -> str:
    """Return the catalogue as text."""
    lines = wrap_text("", "mixers, with their capabilities and options; options shown without a value are required", 0)
    for name, m in found["mixers"].items():
        lines += _mixer_lines(name, m)
    lines.append("recipes")
    for name, r in found["recipes"].items():
        lines += wrap_text(f"  {name}: ", f"{r['about']}; sizes {', '.join(r['sizes'])}", 6)
        for row, entry in r["rows"].items():
            label = f"      --row {row}{' (default)' if row == r['default'] else ''}: "
            lines += wrap_text(label, f"{entry['about']}{_printed_text(entry['printed'])}", 14)
    lines += ["models by name", *wrap_text("  ", ", ".join(found["models"]), 2)]
    for title in SETS:
        lines.append(title)
        lines += [line for name, about in found[title].items() for line in wrap_text(f"  {name}: ", about, 6)]
    return "\n".join(lines)


def _mixer_lines(name: str, m: Record) -> list[str]:
    """Return the lines about one mixer, at least one for each fact."""
    options = ", ".join(k if v == "required" else f"{k}={v!r}" for k, v in m["options"].items())
    facts = [
        ("paper", m["paper"] or "none given"),
        ("kind", m["kind"]),
        ("cost", f"time {m['time']}; space {m['space']}; state: {m['state']}"),
        ("can", ", ".join("causal only" if c == "causal" and m["causal_only"] else c for c in m["can"])),
        ("options", options),
    ]
    whole, step = m["kernels"]["whole"], m["kernels"]["step"]
    if whole or step:
        steps = [f"{step} for a few streamed tokens"] if step else []
        facts.append(("kernels", ", ".join([*whole, *steps])))
    promises: dict[str, list[str]] = {}
    for promise, reason in m["waivers"].items():
        promises.setdefault(reason, []).append(promise)
    facts += [("waives", f"{', '.join(kept)}: {reason}") for reason, kept in promises.items()]
    return [
        *wrap_text(f"  {name} [{m['tier']}]: ", m["about"].replace("``", "`"), 6),
        *(part for fact in facts for part in wrap_text(f"      {fact[0]:8}", fact[1], 14)),
    ]


def _printed_text(numbers: dict[str, float]) -> str:
    """Return the numbers that the paper prints for a row, in words."""
    texts = {
        "test": "test {:.3f} bits",
        "top1": "{:.1f} % top-1",
        "top1_easycv": "{:.2f} % top-1 (EasyCV)",
        "parameters_m": "{:.1f}M parameters",
    }
    found = [text.format(numbers[name]) for name, text in texts.items() if name in numbers]
    return f"; printed: {', '.join(found)}" if found else ""
