"""Start Debian's chromium without a window, for the tests of pages."""

from __future__ import annotations

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
