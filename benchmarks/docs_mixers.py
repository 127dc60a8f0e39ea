"""Write what the pages say about each mixer from its class: a hook of mkdocs.

The sources of every mixer below its page, the lists of classes and functions in the reference, and the first table of
"How to choose a mixer".
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from tokenmix import functional, reference
from tokenmix.mixers import CORE, MIXERS, state_growth
from tokenmix.mixers.facts import mixer_options
from tokenmix.report.taxonomy import page_of

ROOT = Path(__file__).parent.parent
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
    written = {CORE_TABLE: core_table, NAMES: names, CLASSES: classes, FORMS: forms, EQUATIONS: equations}
    for mark, write in written.items():
        markdown = markdown.replace(mark, write()) if mark in markdown else markdown
    return markdown


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
    papers = [f"[arXiv {number}](https://arxiv.org/abs/{number})" for number in _arxiv(cls.about.paper)]
    parts = [
        f"paper {', '.join(papers) or cls.about.paper}",
        f"class {of_class} in `src/{cls.__module__.replace('.', '/')}.py`",
        f"functional form {form}",
        f"equation in float64 {equation}",
        f"cases in `tests/cases.py`: {', '.join(f'`{case}`' for case, mixer in _cases().items() if mixer == name)}",
    ]
    return f"- `{name}`: {'; '.join(parts)}."


def _links(name: str) -> tuple[str, str, str]:
    """Return links to a mixer's class, its functional form and its equation in the reference."""
    cls, equation = MIXERS[name], equation_of(name)
    paths = (f"{cls.__module__}.{cls.__name__}", _form(str(cls.form)), equation)
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
    found = found if callable(found) else getattr(reference, str(MIXERS[name].form))
    return f"{found.__module__}.{found.__name__}"


def core_table() -> str:
    """Return the core mixers side by side: growth with the length, and what positions mean to them."""
    lines = [
        "| mixer | time | kept for training | state while generating | knows positions | longest input |",
        "|---" * 6 + "|",
    ]
    for name in CORE:
        cls = MIXERS[name]
        options = mixer_options(cls)
        knows = "with `positions`" if "positions" in options else "yes" if cls.knows_positions else "no"
        cells = [
            f"[`{name}`](mixers/{page_of(name, ROOT / 'docs/mixers')}.md)",
            *(text.replace("^2", "²") for text in (cls.about.time, cls.about.space)),
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
    return "\n".join(_entry(_form(name), source=True) for name in functional.__all__ if name != "use_backend")


def equations() -> str:
    """Return the directives for the float64 references of all mixers, with their source."""
    return "\n".join(_entry(path, source=True) for path in dict.fromkeys(map(equation_of, MIXERS)))


def _form(name: str) -> str:
    """Return the path of a functional form, which its module may have the name of."""
    return f"{getattr(functional, name).__module__}.{name}"


def _entry(path: str, *, source: bool = False) -> str:
    options = {"heading": path.rpartition(".")[2], "show_source": str(source).lower()}
    return "\n".join([f"::: {path}", "    options:", *(f"      {key}: {value}" for key, value in options.items()), ""])
