"""Write what the pages say about each mixer from its class: a hook of mkdocs.

The pictures of core mixers and of fixed patterns, the sources of every mixer below its page, the lists of classes and
functions in the reference, and the first table of "How to choose a mixer".
"""

from __future__ import annotations

import ast
import html
import json
import re
from pathlib import Path
from types import FunctionType
from typing import Any
from xml.etree import ElementTree

from tokenmix import contrib, functional, reference, use_backend
from tokenmix.lab.report.taxonomy import page_of
from tokenmix.mixers import CORE, MIXERS, state_growth
from tokenmix.mixers.facts import mixer_options

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "docs/assets/mixers"
RESULTS = ROOT / "benchmarks/results/mixer_figures.json"
PICTURES = "<!-- pictures -->"
CORE_TABLE = "<!-- core mixers -->"
NAMES = "<!-- names of the mixers -->"
CLASSES = "<!-- classes of the mixers -->"
FORMS = "<!-- functional forms -->"
EQUATIONS = "<!-- equations -->"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Add the sources to a mixer's page, and put lists and tables where a page asks for them."""
    folder, _slash, stem = page.file.src_uri.removesuffix(".md").rpartition("/")
    if folder == "mixers" and stem != "index":
        markdown = f"{markdown.rstrip()}\n\n{sources(stem)}"
        markdown = markdown.replace(PICTURES, pictures(stem)) if PICTURES in markdown else markdown
    written = {CORE_TABLE: core_table, NAMES: names, CLASSES: classes, FORMS: forms, EQUATIONS: equations}
    for mark, write in written.items():
        markdown = markdown.replace(mark, write()) if mark in markdown else markdown
    return markdown


def pictures(stem: str) -> str:
    """Return the pictures of a page's mixers: the flow of data and the map of each core one, and fixed patterns."""
    record = json.loads(RESULTS.read_text())
    found = [name for name in MIXERS if page_of(name, ROOT / "docs/mixers") == stem]
    lines = ["## Pictures", ""]
    maps = [name for name in found if name in record["maps"]]
    if maps:
        lines += [_about_maps(record["model"], record["maps"][maps[0]]["tokens"]), ""]
    if any(name in record["patterns"] for name in found):
        lines += [
            "In a pattern, a row is a query and a column a key: blue is attended, grey is the future.",
            "",
        ]
    for name in found:
        figures = [_flow_figure(name), _map_figure(name, record["maps"][name])] if name in maps else []
        figures += [_pattern_figure(name, record["patterns"][name])] if name in record["patterns"] else []
        if figures:
            lines += [f"### `{name}`", ""] if len(found) > 1 else []
            lines += ['<div class="pictures">', *figures, "</div>", ""]
    return "\n".join([*lines, "`python benchmarks/mixer_figures.py` trains the models and draws the pictures."])


def _about_maps(model: dict[str, Any], tokens: int) -> str:
    """Say once for a page what its maps have in common."""
    return (
        f"In the maps, a byte language model of {model['layers']} layers with {model['dim']} features, trained on "
        f"{tokens:,} bytes of Python's standard library, reads `{model['line']}`. A row is a character that reads, a "
        "column one that is read; the future is grey. Dark means a large weight, and the range of each map stands "
        "above it. All models have one seed and one rate, tuned for none: their bits per byte rank nothing. In the "
        "sketches, boxes are the calls of one forward pass with the shapes that it recorded; an argument without an "
        "arrow is a parameter or a constant."
    )


def _flow_figure(name: str) -> str:
    """Return the sketch of a mixer's flow of data, which says itself what it shows and what its letters mean."""
    root = ElementTree.parse(FIGURES / f"{name}_flow.svg").getroot()
    said, letters = (root.findtext(f"{{http://www.w3.org/2000/svg}}{part}") or "" for part in ("title", "desc"))
    return _figure(f"{name}_flow.svg", f"{name}. {said}", f"Flow of data in <code>{name}</code>: {letters}.")


def _map_figure(name: str, found: dict[str, Any]) -> str:
    """Return the map of what a trained mixer attends, with a caption from what was measured."""
    parts = f"{found['groups']} {found['part']}s"
    many = len(found["panels"]) > 2
    options = ", ".join(f"{key}={value!r}" for key, value in found["spec"].items() if key != "name")
    model = f"<code>{name}</code>{f' ({options})' if options else ''}"
    caption = f"{model} after {found['tokens']:,} bytes: {found['bits_per_byte']:.2f} bits per byte on "
    caption += "text it has not seen. "
    if many:
        caption += f"Top: the mean {'size ' if found['signed'] else ''}of {parts} in each layer. Below: the "
        caption += f"{found['part']} that looks nearest, and the one that looks farthest back. "
    if found["kind"] == "jacobian":
        caption += "The output is no sum of values with weights of their own, so a cell is the norm of the derivative "
        caption += "of an output with regard to an input. "
    if found["signed"]:
        caption += "Red adds, blue subtracts. "
    reaches = [f"{panel['reach']:.1f}" for panel in found["panels"]]
    caption += f"Mean distance looked back in each map, in characters: {', '.join(reaches)}."
    seen = "; ".join(
        f"{panel['title']}: {panel['reach']:.1f} characters back on average, {100 * panel['own']:.0f} % on the "
        "character itself"
        for panel in found["panels"]
    )
    alt = f"{len(found['panels'])} triangular maps of what {name} attends in a trained model. {seen}."
    return _figure(f"{name}_map.png", alt, caption)


def _pattern_figure(name: str, found: dict[str, Any]) -> str:
    """Return the picture of a fixed pattern."""
    options = ", ".join(f"{key}={value!r}" for key, value in found["options"].items())
    T, parts = found["tokens"], []
    for form, sets in found["sets"].items():
        counts = {each["pairs"] for each in sets}
        if len(sets) > 2 and len(counts) == 1:
            parts.append(f"{form}, each of {len(sets)} heads: {counts.pop()}")
        else:
            parts += [f"{form}{', ' + each['heads'] if len(sets) > 1 else ''}: {each['pairs']}" for each in sets]
    caption = f"The pairs that <code>{name}</code> attends ({options}), read off its outputs with random weights: of "
    caption += f"{T * T:,} pairs, {'; '.join(parts)}."
    alt = f"Squares of {T} queries by {T} keys with the attended pairs of {name} in blue. {'; '.join(parts)}."
    return _figure(f"{name}_pattern.png", alt, caption)


def _figure(file: str, alt: str, caption: str) -> str:
    path = f"../assets/mixers/{file}"
    image = f'<img src="{path}" alt="{html.escape(alt)}">'
    return f'<figure><a href="{path}">{image}</a><figcaption>{caption}</figcaption></figure>'


def sources(stem: str) -> str:
    """Return where the mixers of a page stand in papers, code and tests: one line each."""
    pages = ROOT / "docs/mixers"
    found = [name for name in MIXERS if page_of(name, pages) == stem]
    lines = ["## Sources", "", *(_sources_of(name) for name in found)]
    modules = {MIXERS[name].__module__.split(".")[-1] for name in found}
    stems = {*found, *modules, *(module.split("_")[0] for module in modules)}
    tests = [f"`tests/test_{s}.py`" for s in sorted(stems) if (ROOT / f"tests/test_{s}.py").is_file()]
    also = f"Further tests: {', '.join(tests)}. " if tests else ""
    return "\n".join([*lines, "", f"{also}`make quick M={found[0]}` runs them with every promise of the contract."])


def _sources_of(name: str) -> str:
    cls, (of_class, form, equation) = MIXERS[name], _links(name)
    papers = [f"[arXiv {number}](https://arxiv.org/abs/{number})" for number in _arxiv(cls.facts.about.paper)]
    parts = [
        f"paper {', '.join(papers) or cls.facts.about.paper}",
        f"class {of_class} in `src/{cls.__module__.replace('.', '/')}.py`",
        f"functional form {form}",
        f"equation in float64 {equation}",
        f"cases in `tests/cases.py`: {', '.join(f'`{case}`' for case, mixer in _cases().items() if mixer == name)}",
    ]
    return f"- `{name}`: {'; '.join(parts)}."


def _links(name: str) -> tuple[str, str, str]:
    """Return links to a mixer's class, its functional form and its equation in the reference."""
    cls, equation = MIXERS[name], equation_of(name)
    paths = (f"{cls.__module__}.{cls.__name__}", _path(cls.facts.functional_form()), equation)
    of_class, form, equation = (f"[`{path.rpartition('.')[2]}`][{path}]" for path in paths)
    return of_class, form, equation


def _arxiv(paper: str) -> list[str]:
    return re.findall(r"arXiv (\d{4}\.\d{4,5})", paper)


def _cases() -> dict[str, str]:
    """Return the mixer of each case of the contract suite."""
    tree = ast.parse((ROOT / "tests/cases.py").read_text())
    table = next(node.value for node in tree.body if isinstance(node, ast.AnnAssign) and node.target.id == "CASES")
    return {key.value: value.elts[0].value for key, value in zip(table.keys, table.values, strict=True)}


def equation_of(name: str) -> str:
    """Return the path of the float64 reference of a mixer: its own, or that of its functional form."""
    found = getattr(reference, name, None)
    return _path(found if callable(found) else getattr(reference, MIXERS[name].facts.functional_form().__name__))


def core_table() -> str:
    """Return the core mixers side by side: growth with the length, and what positions mean to them."""
    lines = [
        "| mixer | time | kept for training | state while generating | knows positions | longest input |",
        "|---" * 6 + "|",
    ]
    for name in CORE:
        cls = MIXERS[name]
        options = mixer_options(cls)
        knows = "with `positions`" if "positions" in options else "yes" if cls.facts.knows_positions else "no"
        cells = [
            f"[`{name}`](mixers/{page_of(name, ROOT / 'docs/mixers')}.md)",
            *(text.replace("^2", "²") for text in (cls.facts.about.time, cls.facts.about.space)),
            state_growth(name),
            knows,
            "`max_len`" if options.get("max_len") is not None else "any",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def names() -> str:
    """Return the table of all mixers with links to their class, form and equation."""
    rows = [f"| `{name}` | {' | '.join(_links(name))} |" for name in MIXERS]
    return "\n".join(["| name | class | functional form | equation |", "|---" * 4 + "|", *rows])


def classes() -> str:
    """Return the directives for the classes of all mixers."""
    return "\n".join(_entry(f"{cls.__module__}.{cls.__name__}") for cls in MIXERS.values())


def forms() -> str:
    """Return the directives for all functional forms, with their source."""
    public = [vars(package)[name] for package in (functional, contrib) for name in package.__all__]
    found = [each for each in public if isinstance(each, FunctionType) and each is not use_backend]
    return "\n".join(_entry(_path(form), source=True) for form in found)


def equations() -> str:
    """Return the directives for the float64 references of all mixers, with their source."""
    return "\n".join(_entry(path, source=True) for path in dict.fromkeys(map(equation_of, MIXERS)))


def _path(function: Any) -> str:
    """Return the path of a function, which its module may have the name of."""
    return f"{function.__module__}.{function.__name__}"


def _entry(path: str, *, source: bool = False) -> str:
    options = {"heading": path.rpartition(".")[2], "show_source": str(source).lower()}
    return "\n".join([f"::: {path}", "    options:", *(f"      {key}: {value}" for key, value in options.items()), ""])
