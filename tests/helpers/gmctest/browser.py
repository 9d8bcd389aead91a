"""A headless Chromium, spoken to over a pipe (no port, no package): opens a page and measures what a reader would see."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
#: Seconds to wait for one answer; long, because the machine may be busy. Nothing is measured in time.
PATIENCE = 120.0

MEASURE = r"""
(() => {
  // Not innerWidth: a phone zooms out of a page that is too wide, and innerWidth grows with it.
  const page = document.documentElement, wide = page.clientWidth;
  const found = { width: wide, scroll: page.scrollWidth, clipped: [], images: [], faint: [] };
  const name = (e, text) => e.tagName.toLowerCase() + ": " + text.trim().slice(0, 60);
  const scrolls = e => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
  const box = e => { for (let p = e; p && p !== page; p = p.parentElement) if (scrolls(p)) return p; return null; };
  const light = c => { const v = c.map(x => x / 255).map(x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
  const rgb = text => text.match(/[\d.]+/g).map(Number);
  const ground = e => { for (let p = e; p; p = p.parentElement) { const c = rgb(getComputedStyle(p).backgroundColor);
    if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (!node.data.trim()) continue;
    const e = node.parentElement, range = document.createRange();
    range.selectNodeContents(node);
    const rects = [...range.getClientRects()];
    if (!rects.length) continue;  // folded away
    const left = Math.min(...rects.map(r => r.left)), right = Math.max(...rects.map(r => r.right));
    const inside = box(e);
    if (inside) {  // must be within what can be scrolled to
      const b = inside.getBoundingClientRect();
      if (left < b.left - inside.scrollLeft - 1 || right > b.left - inside.scrollLeft + inside.scrollWidth + 1)
        found.clipped.push(name(e, node.data));
      if (b.right > wide + 1 || b.left < -1) found.clipped.push(name(inside, "box of " + node.data));
    } else if (left < -1 || right > wide + 1) found.clipped.push(name(e, node.data));
    for (let p = e; p && p !== page; p = p.parentElement) {
      const style = getComputedStyle(p), more = p.scrollWidth > p.clientWidth + 1 || p.scrollHeight > p.clientHeight + 1;
      if (more && [style.overflowX, style.overflowY].some(o => ["hidden", "clip"].includes(o)))
        found.clipped.push(name(p, node.data));
    }
    const [a, b] = [rgb(getComputedStyle(e).color), ground(e)].map(light).sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.faint.push(name(e, node.data));
  }
  for (const image of document.images)
    found.images.push({ loaded: image.complete && image.naturalWidth > 0, dark: image.currentSrc !== image.src });
  found.background = getComputedStyle(document.body).backgroundColor;
  found.pictures = document.querySelectorAll("picture source").length;
  return found;
})()
"""


class Browser:
    """Chromium for the length of a ``with`` block; it ends when its pipe is closed."""

    def __enter__(self) -> Browser:
        assert CHROMIUM is not None
        self.folder = tempfile.TemporaryDirectory(prefix="torchgmc-browser-", ignore_cleanup_errors=True)
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={self.folder.name}", "--disable-extensions"]
        flags += ["--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "about:blank"]
        # Chromium reads commands from descriptor 3 and answers on 4: the shell moves our pipes there.
        moved = 'exec 3<&0 4>&1 0</dev/null 1>/dev/null 2>/dev/null; exec "$@"'
        self.process = subprocess.Popen(["sh", "-c", moved, "sh", CHROMIUM, *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.number, self.buffer = 0, b""
        self.events: list[dict[str, Any]] = []
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, EOFError, TimeoutError):  # it may be gone already
            self.call("Browser.close")
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command and its answer; events that come before it are kept."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\0")
        self.process.stdin.flush()
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                found: dict[str, Any] = answer["result"]
                return found
            self.events.append(answer)

    def read(self) -> dict[str, Any]:
        """The next message."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium does not answer.")
            part = os.read(self.process.stdout.fileno(), 1 << 20)
            if not part:
                raise EOFError("Chromium has ended.")
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def wait(self, method: str, session: str) -> None:
        """Until an event has come."""
        while not any(e.get("method") == method and e.get("sessionId") == session for e in self.events):
            self.events.append(self.read())

    def look(self, page: Path, width: int, dark: bool = False, shot: Path | None = None) -> dict[str, Any]:
        """Opens a file in a window of this width and says what is there.

        Returns:
            ``scroll`` against ``width``; text that is ``clipped`` or too ``faint``; ``images``; ``errors`` of the console, of
            scripts and of loading; ``requests`` of anything but the page itself and what is inlined.
        """
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable", session)
        phone = width < 600
        self.call("Emulation.setDeviceMetricsOverride", session, width=width, height=900, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", session, features=[scheme])
        address = page.resolve().as_uri()
        self.call("Page.navigate", session, url=address)
        self.wait("Page.loadEventFired", session)
        answer = self.call("Runtime.evaluate", session, expression=MEASURE, returnByValue=True)
        found: dict[str, Any] = answer["result"]["value"]
        if shot is not None:
            options = {"format": "png", "captureBeyondViewport": True}
            shot.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", session, **options)["data"]))
        found["errors"] = [text for event in self.events if (text := _trouble(event)) is not None]
        sent = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        found["requests"] = [url for url in sent if url != address and not url.startswith("data:")]
        self.call("Target.closeTarget", targetId=target)
        return found


def _trouble(event: dict[str, Any]) -> str | None:
    params = event.get("params", {})
    if event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
        return f"console: {params['args']}"
    if event.get("method") == "Runtime.exceptionThrown":
        return f"script: {params['exceptionDetails']['text']}"
    if event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
        return f"log: {params['entry']['text']}"
    if event.get("method") == "Network.loadingFailed":
        return f"loading: {params['errorText']}"
    return None
