"""Headless Chromium, driven over its debugging pipe: no driver, no port."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find():
    """Chromium's path, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """A tab. `messages` are what was written to the console, `requests` the addresses asked for."""

    def __init__(self, read, write, timeout=60):
        self._read, self._write, self._timeout = read, write, timeout
        self._ids, self._buffer, self._session = itertools.count(1), b"", None
        self._loaded = False
        self.messages, self.requests = [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """The result of one command of the DevTools protocol."""
        message = {"id": next(self._ids), "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != message["id"]:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, path):
        self._loaded = False
        self.call("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._note(self._next())

    def look(self, width, height=900, scheme="light", scale=1):
        """The size of the screen, and the colours that its owner prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=width < 600,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self):
        """PNG of the whole page."""
        return self._bytes("Page.captureScreenshot", captureBeyondViewport=True)

    def pdf(self):
        return self._bytes("Page.printToPDF", preferCSSPageSize=True, printBackground=False)

    def _bytes(self, method, **params):
        return base64.b64decode(self.call(method, **params)["data"])

    def _next(self):
        end = time.monotonic() + self._timeout
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            got = os.read(self._read, 1 << 20)
            if not got:
                raise RuntimeError("Chromium has ended")
            self._buffer += got
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event):
        method, params = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.messages.append(params)


@contextlib.contextmanager
def page(path):
    """A tab of the Chromium at `path`, which ends with it."""
    to_read, to_write = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = subprocess.Popen(
            [
                "bash", "-c", f'exec "$0" "$@" 3<&{to_read[0]} 4>&{to_write[1]}',
                path, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe",
                f"--user-data-dir={profile}",
            ],
            pass_fds=(to_read[0], to_write[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read[0])
        os.close(to_write[1])
        try:
            yield Page(to_write[0], to_read[1])
        finally:
            with contextlib.suppress(OSError):
                os.close(to_read[1])
            try:
                browser.wait(10)
            except subprocess.TimeoutExpired:
                browser.kill()
                browser.wait()
            os.close(to_write[0])
