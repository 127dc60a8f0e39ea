r"""Write the equations of the pages as MathML, so that they need neither the network nor a script: a hook of mkdocs.

A block ```` ```math ```` is one equation in LaTeX, or several, one per line, in ``\begin{aligned}``; ``$x_t$`` inside a
sentence is a formula. What cannot be converted ends the build, with its page and line.
"""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*([^\s`]*)[^`]*$")
INLINE = re.compile(
    r"(?P<code>(?P<ticks>`+)(?!`)(?s:.+?)(?<!`)(?P=ticks)(?!`))"
    r"|(?<![\\$\w])\$(?P<latex>[^\s$`](?:[^$`\n]*[^\s$`])?)\$(?![\w$])"
    r"|(?P<dollars>\$\$)"
)
"""A span of code, which stays as it is, or LaTeX between dollars that touch it; two dollars are refused."""
BEGIN, END = r"\begin{aligned}", r"\end{aligned}"
CHILDREN = {"mfrac": 2, "msub": 2, "msup": 2, "munder": 2, "mover": 2, "mroot": 2, "msubsup": 3, "munderover": 3}
"""The number of parts that these elements must have; a missing argument leaves fewer."""
LEADING = frozenset("=←↦∈([{,;+≤≥<>")
"""A minus after one of these is a sign."""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put MathML in the place of the page's LaTeX."""
    whole = Path(page.file.abs_src_path).read_text() if page.file.abs_src_path else markdown
    front = re.match(r"---\n.*?\n---\n", whole, flags=re.DOTALL)  # mkdocs has taken it off
    return with_mathml(markdown, page.file.src_uri, front[0].count("\n") if front else 0)


def with_mathml(markdown: str, page: str, lines_before: int = 0) -> str:
    """Return the Markdown with its blocks and formulas as MathML.

    Args:
        markdown: the text of the page.
        page: its name, for errors.
        lines_before: lines of the file that come before the text.

    Raises:
        PluginError: if a formula cannot be converted; it names the page and the line.
    """
    out, text, block = [], [], []
    fence, first, is_math = "", 0, False
    for number, line in enumerate(markdown.split("\n"), 1 + lines_before):
        found = FENCE.match(line)
        if fence:
            closes = line.strip().startswith(fence) and not line.strip().strip(fence[0])
            if closes and is_math:
                out.append(_block("\n".join(block), page, first + 1))
            elif not is_math:
                out.append(line)
            block.append(line)
            fence = "" if closes else fence
        elif found:
            out += [_formulas("\n".join(text), page, number - len(text))] if text else []
            text, block, first = [], [], number
            fence, is_math = found[2], found[3] == "math"
            if is_math and found[1]:
                raise PluginError(f"{page}:{number}: a block of math begins at the margin, not inside a list.")
            out += [] if is_math else [line]
        else:
            text.append(line)
    if fence and is_math:
        raise PluginError(f"{page}:{first}: this block of math does not end.")
    line = lines_before + markdown.count("\n") + 2 - len(text)
    return "\n".join([*out, *([_formulas("\n".join(text), page, line)] if text else [])])


def mathml(latex: str, display: str = "inline") -> str:
    """Convert one formula.

    Args:
        latex: the formula.
        display: "inline" or "block".

    Raises:
        ValueError: if a command is unknown, braces do not match or an argument is missing.
    """
    bare = re.sub(r"\\[{}\\]", "", latex)
    depths = [bare[: i + 1].count("{") - bare[: i + 1].count("}") for i in range(len(bare))]
    if depths and (min(depths) < 0 or depths[-1]):
        raise ValueError("the braces do not match")
    try:
        written = convert(latex, display=display)
    except Exception as why:  # the converter has an exception of its own for each mistake, some without a text
        raise ValueError(str(why) or re.sub(r"(?<!^)(?=[A-Z])", " ", type(why).__name__).lower()) from None
    try:
        tree = ElementTree.fromstring(re.sub(r' xmlns="[^"]*"', "", written))
    except ElementTree.ParseError:
        raise ValueError(f"'&' belongs inside {BEGIN}") from None
    for element in list(tree.iter()):
        if "\\" in (element.text or ""):
            raise ValueError(f"unknown command {element.text}")
        if element.get("linebreak"):
            raise ValueError(f"{chr(92) * 2} belongs at the end of a line in {BEGIN}")
        if len(element) < CHILDREN.get(element.tag, 0):
            raise ValueError(f"an argument of {element.tag} is missing")
        _set_for_print(element)
    for element in list(tree.iter()):
        _space(element)
    tree.set("alttext", latex)
    return ElementTree.tostring(tree, encoding="unicode")


def _set_for_print(element: ElementTree.Element) -> None:
    """Mend what the converter writes and browsers draw badly: names of functions, limits of sums, primes."""
    if element.tag == "mo" and re.fullmatch("[A-Za-z]{2,}", element.text or "") and element.text != "mod":
        element.tag = "mi"
    if element.tag in ("msub", "msubsup") and element[0].text in ("∑", "∏"):
        element.tag = {"msub": "munder", "msubsup": "munderover"}[element.tag]
    if element.tag in ("msup", "msubsup") and set(element[-1].text or " ") <= {"′", "″"}:
        # a prime is high by itself: as a superscript it would be tiny, and far up
        base, prime = element[0], element[-1]
        primed = ElementTree.Element("mrow")
        prime.tag = "mo"
        prime.attrib |= {"lspace": "0", "rspace": "0"}
        primed.extend([base, prime])
        below = list(element)[1:-1]
        element.clear()
        element.tag = "msub" if below else "mrow"
        element.extend([primed, *below] if below else [base, prime])


def _space(element: ElementTree.Element) -> None:
    """Set thin spaces around the names of functions, and none after a sign."""
    spaced: list[ElementTree.Element] = []
    for part in list(element) if element.tag in ("mrow", "math") else ():
        before = spaced[-1] if spaced else None
        last = next((each for each in reversed(spaced) if each.tag != "mspace"), None)
        ordinary = part.tag != "mo" and part.get("form") is None and not _opens(part) and part.tag != "mspace"
        alone = before is None or before.tag in ("mo", "mspace", "munder", "munderover")
        if not alone and (_names_function(part) or _names_function(before) and ordinary):
            spaced.append(ElementTree.Element("mspace", width="0.167em"))
        if part.tag == "mo" and part.text in ("-", "−") and (last is None or last.text in LEADING):
            part.set("form", "prefix")
        spaced.append(part)
    if spaced:
        element[:] = spaced


def _names_function(element: ElementTree.Element) -> bool:
    while len(element) and element.tag in ("msub", "msup", "msubsup", "munder"):
        element = element[0]
    return element.tag == "mi" and len(element.text or "") > 1


def _opens(element: ElementTree.Element) -> bool:
    """Return whether an element is a bracket with its contents."""
    return element.tag == "mrow" and len(element) > 0 and element[0].get("fence") == "true"


def _block(latex: str, page: str, line: int) -> str:
    """Return a block of math, whose first line stands at ``line``, as a box that scrolls by itself."""
    lines = latex.rstrip().split("\n")
    aligned = len(lines) > 1 and (lines[0].strip(), lines[-1].strip()) == (BEGIN, END)
    rows = [row.strip() for row in (lines[1:-1] if aligned else lines)]
    made = []
    for number, row in enumerate(rows, line + aligned):
        broken = aligned and row.endswith("\\\\")
        try:
            if not row or len(rows) > 1 and broken != (number < line + len(rows)):
                raise ValueError(f"a block of math is one line, or lines between {BEGIN} and {END} that \\\\ divides")
            made.append(_row(row.removesuffix("\\\\")) if aligned else mathml(row, "block"))
        except ValueError as why:
            raise PluginError(f"{page}:{number}: {why}: {row}") from None
    if not aligned:
        return f'\n<div class="equation">{made[0]}</div>\n'
    table = f'<mtable displaystyle="true">{"".join(made)}</mtable>'
    return f'\n<div class="equation"><math display="block" alttext="{html.escape(latex)}">{table}</math></div>\n'


def _row(row: str) -> str:
    r"""Return a line of ``\begin{aligned}``, which the converter does not know, as a row of a table.

    Its columns are right and left of ``&`` in turns.
    """
    cells = [mathml(cell.strip() or "{}", "block") for cell in re.split(r"(?<!\\)&", row)]
    return f"<mtr>{''.join('<mtd>' + re.sub(r'^<math[^>]*>|</math>$', '', cell) + '</mtd>' for cell in cells)}</mtr>"


def _formulas(text: str, page: str, line: int) -> str:
    """Return a text outside of fences with its formulas as MathML, written so that Markdown leaves it alone."""

    def formula(found: re.Match[str]) -> str:
        if found["code"]:
            return found[0]
        number = line + text[: found.start()].count("\n")
        if found["dollars"]:
            raise PluginError(f"{page}:{number}: $$ has no meaning here; write the equation as a block, ```math.")
        try:
            made = mathml(found["latex"])
        except ValueError as why:
            raise PluginError(f"{page}:{number}: {why}: {found['latex']}") from None
        made = re.sub(r"(?<=[>\"])([^<>\"]+)(?=[<\"])", lambda part: _entities(part[1]), made)
        return f'<span class="formula">{made}</span>'

    return INLINE.sub(formula, text)


def _entities(text: str) -> str:
    return "".join(c if c.isalnum() or c in " =" else f"&#{ord(c)};" for c in html.unescape(text))
