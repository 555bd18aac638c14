# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium, driven by its DevTools protocol over a pipe: no port, no package.

Everything that a page logs, throws or asks for is kept, for tests to look at.
"""
import base64
import json
import os
import select
import shutil
import struct
import subprocess
import tempfile
import time
import zlib

from kvserver import PATIENCE

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--hide-scrollbars", "--no-first-run", "--no-default-browser-check",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-extensions", "--mute-audio", "--remote-debugging-pipe")


class Browser:
    """One browser with a profile of its own; ends with the block."""

    def __init__(self):
        self.profile = tempfile.mkdtemp(prefix="kvd-browser-")
        down, self.to = os.pipe()
        self.back, up = os.pipe()

        def place():  # the browser reads from 3 and writes to 4
            a, b = os.dup(down), os.dup(up)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [PROGRAM, *FLAGS, f"--user-data-dir={self.profile}", "about:blank"], preexec_fn=place,
            close_fds=False, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        os.close(down)
        os.close(up)
        self.rest, self.number, self.pages = b"", 0, {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.send("Browser.close")
            self.process.wait(PATIENCE)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self.to)
        os.close(self.back)
        self.log.close()
        shutil.rmtree(self.profile, ignore_errors=True)

    def read(self, seconds):
        """The next message, or None."""
        end = time.monotonic() + seconds
        while b"\0" not in self.rest:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.back], [], [], left)[0]:
                return None
            data = os.read(self.back, 1 << 20)
            if not data:
                self.log.seek(0)
                raise AssertionError("the browser has ended: " + self.log.read().decode()[-2000:])
            self.rest += data
        message, self.rest = self.rest.split(b"\0", 1)
        message = json.loads(message)
        if "method" in message and message.get("sessionId") in self.pages:
            self.pages[message["sessionId"]].take(message)
        return message

    def send(self, method, session=None, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.to, data):]
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            answer = self.read(1)
            if answer and answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
        raise AssertionError(f"no answer to {method}")

    def page(self, **screen):
        return Page(self, **screen)


class Page:
    """A tab.  size: in units of CSS; dark, still: what the reader prefers."""

    def __init__(self, browser, width=1280, height=800, dark=False, still=False):
        self.browser = browser
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.send("Target.attachToTarget", targetId=target,
                                    flatten=True)["sessionId"]
        browser.pages[self.session] = self
        self.problems, self.asked = [], []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(domain + ".enable")
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"}])

    def take(self, message):
        kind, p = message["method"], message["params"]
        if kind == "Network.requestWillBeSent":
            self.asked.append((p["request"]["method"], p["request"]["url"]))
        elif kind == "Runtime.exceptionThrown":
            self.problems.append(p["exceptionDetails"])
        elif kind == "Runtime.consoleAPICalled" and p["type"] in ("error", "warning", "assert"):
            self.problems.append(p["args"])
        elif kind == "Log.entryAdded" and p["entry"]["level"] in ("error", "warning"):
            self.problems.append(p["entry"])

    def send(self, method, **params):
        return self.browser.send(method, self.session, **params)

    def open(self, url):
        self.send("Page.navigate", url=url)

    def run(self, code):
        """The value of an expression in the page; promises are waited for."""
        r = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in r, (code, r["exceptionDetails"])
        return r["result"].get("value")

    def wait(self, code, seconds=10):
        """Until the expression is true; its value."""
        end = time.monotonic() + PATIENCE
        while True:
            value = self.run(code)
            if value:
                return value
            assert time.monotonic() < end, (code, value, self.problems)
            self.browser.read(0.05)

    def key(self, name, text="", shift=False):
        """A key goes down and up, as a keyboard tells it."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "ArrowLeft": 37, "ArrowUp": 38,
                 "ArrowRight": 39, "ArrowDown": 40}
        text = {"Enter": "\r", " ": " "}.get(name, text)
        p = {"key": name, "code": "Space" if name == " " else name,
             "windowsVirtualKeyCode": codes.get(name, 0), "modifiers": 8 if shift else 0}
        down = "keyDown" if text else "rawKeyDown"
        self.send("Input.dispatchKeyEvent", type=down, text=text, **p)
        self.send("Input.dispatchKeyEvent", type="keyUp", **p)

    def type(self, text):
        self.send("Input.insertText", text=text)

    def screenshot(self, scale=0.5):
        """Bytes of a PNG of all of the page."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        r = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True,
                      clip={**size, "scale": scale})
        return base64.b64decode(r["data"])


def pixels(png):
    """Rows of bytes of a PNG of 8 bits a channel, and bytes of a pixel."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed = 8, b""
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at:at + 8])
        data = png[at + 8:at + 8 + size]
        if kind == b"IHDR":
            width, _, depth, color, _, _, interlaced = struct.unpack(">IIBBBBB", data)
            assert depth == 8 and color in (2, 6) and not interlaced
            n = 3 if color == 2 else 4
        elif kind == b"IDAT":
            packed += data
        at += size + 12
    raw, stride, rows = zlib.decompress(packed), width * n, []
    before = bytearray(stride)
    for start in range(0, len(raw), stride + 1):
        row = bytearray(raw[start + 1:start + 1 + stride])
        undo(raw[start], row, before, n)
        rows.append(bytes(row))
        before = row
    return rows, n


def undo(kind, row, above, n):
    """Undoes one of PNG's filters of a row, in place."""
    for i in range(len(row)):
        left = row[i - n] if i >= n else 0
        up = above[i]
        if kind == 1:
            row[i] = (row[i] + left) & 255
        elif kind == 2:
            row[i] = (row[i] + up) & 255
        elif kind == 3:
            row[i] = (row[i] + (left + up) // 2) & 255
        elif kind == 4:
            corner = above[i - n] if i >= n else 0
            guess = left + up - corner
            a, b, c = abs(guess - left), abs(guess - up), abs(guess - corner)
            row[i] = (row[i] + (left if a <= b and a <= c else up if b <= c else corner)) & 255


def colors(png):
    """How many different ones a picture has."""
    rows, n = pixels(png)
    return len({row[i:i + 3] for row in rows for i in range(0, len(row), n)})
