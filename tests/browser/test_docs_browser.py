"""Every page of the built documentation in a real browser, on a laptop and on a telephone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from chromium import chromium, measured

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (1366, 390)
MEASURE = """<!doctype html><body><script>
const pages = PAGES, widths = WIDTHS, found = {};
const name = e => e.tagName.toLowerCase() + "." + e.className + " " + e.textContent.trim().slice(0, 60);
// What is wider than its room, while nothing around it scrolls.
function spills(doc, width) {
  const inside = e => { for (let p = e; p && p.tagName != "ARTICLE"; p = p.parentElement)
    if (["auto", "scroll"].includes(doc.defaultView.getComputedStyle(p).overflowX)) return true;
    return false; };
  return [...doc.querySelectorAll("article *")].filter(
    e => e.getBoundingClientRect().right > width + 1 && !inside(e)).map(name).slice(0, 3);
}
async function look(page, width) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 900px; border: 0`;
  const loaded = new Promise(done => frame.onload = done);
  frame.src = "/" + page;
  document.body.append(frame);
  await loaded;
  const doc = frame.contentDocument, view = frame.contentWindow;
  await new Promise(done => setTimeout(done, 50));
  const boxes = [...doc.querySelectorAll("article .equation, article table:not([class]), article pre > code")];
  const answer = {
    inner: view.innerWidth,
    wide: doc.documentElement.scrollWidth,
    spills: spills(doc, width),
    unrendered: [...doc.querySelectorAll("article math")].filter(
      e => e.getBoundingClientRect().width < 2 || e.getBoundingClientRect().height < 5).length,
    equations: doc.querySelectorAll("article .equation > math").length,
    scrolling: boxes.filter(e => { for (let p = e; p && p.tagName != "ARTICLE"; p = p.parentElement)
      if (["auto", "scroll"].includes(view.getComputedStyle(p).overflowX)) return true; return false; }).length,
    boxes: boxes.length,
    broken: [...doc.images].filter(i => i.complete && !i.naturalWidth).map(i => i.getAttribute("src")),
  };
  frame.remove();
  return answer;
}
(async () => {
  for (const width of widths) for (const page of pages) found[page + " " + width] = await look(page, width);
  await fetch("/", {method: "POST", body: JSON.stringify(found)});
})();
</script></body>"""


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
    page = MEASURE.replace("PAGES", json.dumps(names)).replace("WIDTHS", json.dumps(WIDTHS))
    return json.loads(measured(site, page, tmp_path_factory.mktemp("profile"), timeout=600))


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
