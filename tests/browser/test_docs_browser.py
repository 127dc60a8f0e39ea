"""Every page of the built documentation in a real browser, on a laptop and on a telephone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from chromium import chromium, looks_of

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (1366, 390)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-d", str(folder)]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": paths, "NO_MKDOCS_2_WARNING": "1"})
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {page.relative_to(site).as_posix(): Page(page.read_text()) for page in sorted(site.rglob("*.html"))}


@pytest.fixture(scope="module")
def looks(site, pages, tmp_path_factory):
    names = [name for name in pages if name != "404.html"]
    return looks_of(site, names, WIDTHS, tmp_path_factory.mktemp("profile"), timeout=600)


class Page(HTMLParser):
    """The links, the anchors and the images of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.anchors, self.images = set(), set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "img":
            self.images.append(found)
        if tag in ("a", "link") and found.get("href"):
            self.links.add(found["href"])


def test_every_page_was_looked_at(looks, pages):
    assert len(looks) == len(WIDTHS) * (len(pages) - 1)
    assert {look["inner"] for look in looks.values()} == set(WIDTHS)


def test_no_page_is_wider_than_the_screen(looks):
    wide = {name: look for name, look in looks.items() if look["wide"] > look["inner"] or look["spills"]}
    assert not wide


def test_equations_tables_and_code_scroll_in_their_own_boxes(looks):
    assert not {name: look for name, look in looks.items() if look["scrolling"] < look["boxes"]}
    assert not {name: look for name, look in looks.items() if look["unrendered"]}
    assert all(look["equations"] for name, look in looks.items() if name.startswith("mixers/") and "index" not in name)


def test_every_image_has_its_text_and_loads(looks, pages):
    assert not {name: look["broken"] for name, look in looks.items() if look["broken"]}
    assert [image for page in pages.values() for image in page.images]
    assert not {name: page.images for name, page in pages.items() if not all(i.get("alt") for i in page.images)}


def test_every_internal_link_is_alive(site, pages):
    dead = []
    for name, page in pages.items():
        for link in page.links if name != "404.html" else ():
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (site / name).parent / unquote(parts.path) if parts.path else site / name
            target = target / "index.html" if target.is_dir() else target
            known = pages.get(os.path.relpath(target, site).replace(os.sep, "/"))
            there = target.is_file() and (
                not parts.fragment or known is None or unquote(parts.fragment) in known.anchors
            )
            dead += [] if there else [f"{name}: {link}"]
    assert not dead


def test_search_finds_pages_that_are_opened_as_files(site, tmp_path):
    address = f"{(site / 'index.html').as_uri()}?q=External+attention"
    command = chromium(tmp_path, "--virtual-time-budget=60000", "--dump-dom", address)
    shown = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    assert re.search(r'md-search-result__meta">\d+ matching documents', shown)
    assert "mixers/external.html" in shown


def test_no_page_asks_the_network_for_anything(site):
    loaded = re.compile(r'<(?:script|img|iframe)[^>]* src="?https?:|<link[^>]* rel="?stylesheet[^>]* href="?https?:')
    assert [page.name for page in site.rglob("*.html") if loaded.search(page.read_text())] == []
