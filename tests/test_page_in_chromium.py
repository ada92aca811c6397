"""The benchmark page in headless Chromium: it fits, its bars are as long as their shares, and it can be read."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import websocket

PAGE = Path(__file__).parent.parent / "benchmarks" / "report.html"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
         "--no-first-run", "--hide-scrollbars", "--remote-debugging-port=0", "--remote-allow-origins=*")
SECONDS = 60   # to start, and for an answer
PHONE, DESKTOP = 390, 1280

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH to show the page in")


class Browser:
    """One page of a Chromium, driven over its DevTools protocol."""

    def __init__(self, url: str) -> None:
        self.socket = websocket.create_connection(url, timeout=SECONDS)
        self.sent = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events that come before it are kept."""
        self.sent += 1
        self.socket.send(json.dumps({"id": self.sent, "method": method, "params": parameters}))
        while (message := json.loads(self.socket.recv())).get("id") != self.sent:
            self.events.append(message)
        assert "error" not in message, (method, message["error"])
        return message["result"]

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def show(self, path: Path, width: int, dark: bool = False) -> None:
        """Open the page, so wide and in this colour scheme, and wait until it is there."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
                  mobile=width < 600)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Page.navigate", url=path.as_uri())
        until = time.monotonic() + SECONDS
        while self.evaluate("document.readyState + location.protocol") != "completefile:":
            assert time.monotonic() < until, "the page did not load"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A Chromium of its own, with everything it notes about its page on record."""
    profile = tmp_path_factory.mktemp("chromium")
    process = subprocess.Popen([str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        page = Browser(_address(profile, process))
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        yield page
        page.socket.close()
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the DevTools of its first page listen: Chromium writes the port into its profile."""
    import urllib.request

    until = time.monotonic() + SECONDS
    while time.monotonic() < until and process.poll() is None:
        lines = port.read_text().splitlines() if (port := profile / "DevToolsActivePort").is_file() else []
        if len(lines) == 2:
            with urllib.request.urlopen(f"http://127.0.0.1:{lines[0]}/json/list", timeout=SECONDS) as answer:
                pages = [target for target in json.load(answer) if target["type"] == "page"]
            if pages:
                return str(pages[0]["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise AssertionError(f"Chromium did not come up; exit code {process.poll()}")
