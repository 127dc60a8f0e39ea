"""Start Debian's chromium without a window, for the tests of pages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

MEASURE = """<!doctype html><body><script>
const pages = PAGES, widths = WIDTHS, found = {};
const name = e => e.tagName.toLowerCase() + "." + e.className + " " + e.textContent.trim().slice(0, 60);
// What is wider than its room, while nothing around it scrolls.
function spills(doc, width) {
  const inside = e => { for (let p = e; p && p.tagName != "ROOM"; p = p.parentElement)
    if (["auto", "scroll"].includes(doc.defaultView.getComputedStyle(p).overflowX)) return true;
    return false; };
  return [...doc.querySelectorAll("ROOM *")].filter(
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
  const boxes = [...doc.querySelectorAll("ROOM .equation, ROOM table:not([class]), ROOM pre > code")];
  const answer = {
    inner: view.innerWidth,
    wide: doc.documentElement.scrollWidth,
    spills: spills(doc, width),
    unrendered: [...doc.querySelectorAll("ROOM math")].filter(
      e => e.getBoundingClientRect().width < 2 || e.getBoundingClientRect().height < 5).length,
    equations: doc.querySelectorAll("ROOM .equation > math").length,
    scrolling: boxes.filter(e => { for (let p = e; p && p.tagName != "ROOM"; p = p.parentElement)
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
"""What a page looks like at some widths; all of it stands in an element ROOM."""


def chromium(profile: Path, *arguments: str) -> list[str]:
    """Return the command that starts the browser with a profile of its own."""
    browser = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    assert browser, "no chromium on this machine: install Debian's package chromium"
    return [browser, *QUIET, f"--user-data-dir={profile}", *arguments]


def measured(site: Path, page: str, profile: Path, timeout: float) -> str:
    """Serve a folder and one more page beside it, open that page, and return the text that its script posts."""
    answer: list[str] = []
    done = threading.Event()
    handler = partial(_Handler, directory=str(site), page=page, answered=lambda text: (answer.append(text), done.set()))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/{_Handler.ADDED}"
        with subprocess.Popen(
            chromium(profile, "--window-size=1600,1200", "--remote-debugging-port=0", address),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as browser:
            done.wait(timeout)
            browser.terminate()
        server.shutdown()
    assert answer, f"the page posted nothing in {timeout} seconds"
    return answer[0]


def looks_of(
    site: Path, pages: list[str], widths: tuple[int, ...], profile: Path, *, room: str = "article", timeout: float = 120
) -> dict[str, dict]:
    """Return how pages of a folder look at some widths, by page and width."""
    page = MEASURE.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(widths))
    page = page.replace('"ROOM"', json.dumps(room.upper())).replace("ROOM", room)
    return json.loads(measured(site, page, profile, timeout=timeout))


class _Handler(SimpleHTTPRequestHandler):
    ADDED = "measure-these-pages.html"

    def __init__(self, *args: object, page: str, answered: Callable[[str], object], **options: str) -> None:
        self.page, self.answered = page, answered
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        if self.path != f"/{self.ADDED}":
            super().do_GET()
            return
        body = self.page.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.answered(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass
