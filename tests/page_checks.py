"""Static checks of a page: it parses, loads nothing from outside, every image decodes, every table has rows."""

from __future__ import annotations

import base64
import binascii
import io
import re
from html.parser import HTMLParser
from pathlib import Path

VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
ADDRESSES = {"src", "href", "srcset", "action", "data", "poster", "background", "formaction", "xlink:href"}
OUTSIDE = re.compile(r"(?:https?:)?//|@import", re.IGNORECASE)
NOT_A_NUMBER = re.compile(r"\b(?:nan|inf|infinity|none|undefined)\b", re.IGNORECASE)
PNG = "data:image/png;base64,"


def check_page(page: Path | str) -> list[str]:
    """Return everything wrong with the page at this path, one line each; empty when nothing is."""
    reader = _Reader()
    reader.feed(Path(page).read_text(encoding="utf-8"))
    reader.close()
    return [*reader.problems, *reader.unfinished()]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.problems: list[str] = []
        self.ids: set[str] = set()
        self.seen: set[str] = set()
        self.rows = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.seen.add(tag)
        if tag in ("script", "iframe", "object", "embed", "link", "base"):
            self._say(f"<{tag}> is not allowed in a self-contained page")
        for name, value in given.items():
            self._address(tag, name, value)
        if tag == "img" and not given.get("alt"):
            self._say("an image has no alternative text")
        if given.get("id") in self.ids:
            self._say(f"the id {given['id']!r} is used twice")
        self.ids |= {given["id"]} if given.get("id") else set()
        if tag == "table":
            self.rows = 0
        self.rows += tag == "td"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID or not self.open or self.open[-1] != tag:
            self._say(f"</{tag}> closes {'<' + self.open[-1] + '>' if self.open else 'nothing'}")
        if tag in self.open:
            while self.open.pop() != tag:
                pass
        if tag == "table" and self.rows == 0:
            self._say("a table has no rows")

    def handle_data(self, data: str) -> None:
        if "style" in self.open and (OUTSIDE.search(data) or re.search(r"url\((?!['\"]?data:)", data)):
            self._say("the style sheet names an outside address")
        if (
            "pre" not in self.open
            and "style" not in self.open
            and (found := NOT_A_NUMBER.search(data))
            and (self.open[-1:] == ["td"] or "nan" in found[0].lower())
        ):
            self._say(f"the text {data.strip()[:60]!r} shows a value that is not a number")

    def unfinished(self) -> list[str]:
        """Return the problems that show only at the end of the page."""
        left = [f"<{tag}> is never closed" for tag in self.open]
        return left + [
            f"line 1: the page has no <{tag}>"
            for tag in ("html", "head", "title", "body", "h1", "table")
            if tag not in self.seen
        ]

    def _address(self, tag: str, name: str, value: str) -> None:
        if name == "style" and re.search(r"url\((?!['\"]?data:)|//", value):
            self._say(f"the style of <{tag}> names an outside address")
        if name not in ADDRESSES:
            return
        if name != "srcset" and value.startswith("#"):
            return
        if not value.startswith("data:"):
            self._say(f"<{tag} {name}={value[:60]!r}> points outside of the page")
        elif not value.startswith(PNG):
            self._say(f"<{tag} {name}> holds data that is not a PNG")
        elif why := _undecodable(value[len(PNG) :]):
            self._say(f"<{tag} {name}> holds an image that does not decode: {why}")

    def _say(self, problem: str) -> None:
        self.problems.append(f"line {self.getpos()[0]}: {problem}")


def _undecodable(encoded: str) -> str | None:
    """Return why a base64 PNG cannot be shown, None when it can."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(base64.b64decode(encoded, validate=True))) as image:
            image.load()
            low, high = image.convert("L").getextrema()
    except (binascii.Error, UnidentifiedImageError, OSError, SyntaxError, ValueError) as why:
        return str(why)
    return "it is blank" if low == high else None
