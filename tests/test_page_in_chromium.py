"""The benchmark page in headless Chromium: it fits, its bars are as long as their shares, and it can be read."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import websocket

from benchmarks.compare import Book
from benchmarks.result_file import load
from benchmarks.topics import MAIN

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "benchmarks" / "report.html"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
         "--no-first-run", "--hide-scrollbars", "--remote-debugging-port=0", "--remote-allow-origins=*")
SECONDS = 60   # to start, and for an answer
PHONE, DESKTOP = 390, 1280   # pixels
CONTRAST = 4.5               # the least that WCAG 2 (AA) asks of text

# What reaches beyond its place: the page, a table's frame, or a visible cell.
TOO_WIDE = """[document.documentElement, ...document.querySelectorAll('.scroll, th, td, dd, p, li')]
  .filter(e => e.scrollWidth > e.clientWidth && e.clientWidth > 1 && getComputedStyle(e).display !== 'inline')
  .map(e => `${e.tagName} ${e.scrollWidth} > ${e.clientWidth}: ${e.textContent.trim().slice(0, 40)}`)"""

# Text, its colour, and the colours behind it from the inside out; what a style puts before a cell is text too.
TEXTS = """(() => {
  const behind = e => e ? [getComputedStyle(e).backgroundColor, ...behind(e.parentElement)] : [];
  const own = e => [...e.childNodes].some(n => n.nodeType === Node.TEXT_NODE && n.textContent.trim());
  const seen = [...document.body.querySelectorAll('*')].filter(e => e.getClientRects().length);
  const texts = seen.filter(own).map(e => [e.textContent.trim(), getComputedStyle(e).color, behind(e)]);
  const labels = seen.filter(e => !['none', 'normal'].includes(getComputedStyle(e, '::before').content))
    .map(e => [e.dataset.label, getComputedStyle(e, '::before').color, behind(e)]);
  return [...texts, ...labels];
})()"""

BARS = """[...document.querySelectorAll('table')].map(table => [...table.querySelectorAll('.fill')].map(fill =>
  [fill.getBoundingClientRect().width, fill.parentElement.getBoundingClientRect().width]))"""

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


# Colours

def colour(text: str) -> tuple[float, ...]:
    """`rgb(r, g, b)` or `rgba(r, g, b, a)` as numbers, always four."""
    numbers = [float(part) for part in text[text.index("(") + 1:-1].split(",")]
    return (*numbers, 1.0)[:4]


def luminance(rgb: tuple[float, ...]) -> float:
    """As WCAG 2 defines it."""
    parts = [c / 255 for c in rgb[:3]]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(front: str, behind: list[str]) -> float:
    """Of a text on the first colour behind it that covers what is below."""
    layers = [colour(text) for text in behind]
    assert all(layer[3] in (0, 1) for layer in layers), f"half transparent: {behind}"
    back = next(layer for layer in layers if layer[3])
    lighter, darker = sorted((luminance(colour(front)), luminance(back)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def pale(browser: Browser) -> list[str]:
    """The texts of the page that contrast too little with what is behind them."""
    texts = browser.evaluate(TEXTS)
    assert texts
    return [f"{contrast(front, behind):.2f}: {text[:40]}" for text, front, behind in texts
            if contrast(front, behind) < CONTRAST]


def test_contrast_is_that_of_the_standard():
    assert contrast("rgb(0, 0, 0)", ["rgba(0, 0, 0, 0)", "rgb(255, 255, 255)"]) == pytest.approx(21)
    assert contrast("rgb(119, 119, 119)", ["rgb(255, 255, 255)"]) == pytest.approx(4.48, abs=0.005)


# The page

@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_it_fits_and_can_be_read(browser, width, dark):
    browser.show(PAGE, width, dark)
    assert browser.evaluate("window.innerWidth") == width
    assert browser.evaluate(TOO_WIDE) == []
    assert pale(browser) == []
    background = luminance(colour(browser.evaluate("getComputedStyle(document.body).backgroundColor")))
    assert background < 0.05 if dark else background > 0.8


def test_nothing_is_complained_about_and_nothing_is_fetched(browser):
    browser.events.clear()
    browser.show(PAGE, DESKTOP)
    complaints = [event for event in browser.events
                  if event["method"] in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")]
    assert complaints == []
    fetched = [event["params"]["request"]["url"] for event in browser.events
               if event["method"] == "Network.requestWillBeSent"]
    assert fetched == [PAGE.as_uri()]


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_bars_are_as_long_as_the_results_say(browser, width):
    browser.show(PAGE, width)
    latency, throughput = browser.evaluate(BARS)[:2]
    entries = Book([load(ROOT / "benchmarks" / "results" / f"{MAIN}.json")], lambda name: None).entries
    kind = "tpot" if any(e.get("counters.drafted_tokens") for e in entries) else "itl"
    waits = [wait for e in entries if (wait := e.get(f"latency.{kind}_p50_ms"))]
    rates = [rate for e in entries if (rate := e.get("throughput.tok_s"))]
    for bars, shares in ((latency, [min(waits) / wait for wait in waits]),
                         (throughput, [rate / max(rates) for rate in rates])):
        assert len(bars) == len(shares)
        for (drawn, track), share in zip(bars, shares, strict=True):
            assert track > 50 and drawn == pytest.approx(max(share * track, 1), abs=0.1)   # never less than a pixel


def test_a_row_is_a_card_on_a_phone_and_every_value_there_has_its_column_s_name(browser):
    shown = "[...document.querySelectorAll('tbody td')].filter(e => e.getClientRects().length)"
    label = "JSON.parse(getComputedStyle(e, '::before').content)"
    browser.show(PAGE, PHONE)
    assert browser.evaluate(f"{shown}.length") > 100
    assert browser.evaluate(f"{shown}.every(e => e.dataset.label && {label} === e.dataset.label)")
    assert browser.evaluate("[...document.querySelectorAll('thead')].every(e => e.offsetWidth <= 1)")
    browser.show(PAGE, DESKTOP)
    assert browser.evaluate("[...document.querySelectorAll('thead')].every(e => e.offsetWidth > 400)")
    assert browser.evaluate(f"{shown}.every(e => getComputedStyle(e, '::before').content === 'none')")


def test_what_is_wrong_with_a_page_is_found(browser, tmp_path):
    """The checks above, on a page that fails each of them."""
    page = tmp_path / "bad.html"
    page.write_text("<!doctype html><meta name=viewport content='width=device-width'>"
                    "<body style='background:#fff'><div class=scroll style='overflow-x:auto'><table><tr>"
                    + "<td>much too wide" * 20 + "</table></div><p style='color:#999'>pale</p>"
                    "<script>console.error('complaint')</script><img src=missing.png>")
    browser.events.clear()
    browser.show(page, PHONE)
    assert any(line.startswith("DIV") for line in browser.evaluate(TOO_WIDE))
    assert [line.split(": ")[1] for line in pale(browser)] == ["pale"]
    methods = {event["method"] for event in browser.events}
    assert {"Runtime.consoleAPICalled", "Log.entryAdded"} <= methods
    assert sum(event["method"] == "Network.requestWillBeSent" for event in browser.events) == 2
