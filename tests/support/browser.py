"""A headless Chromium for tests, driven through its DevTools protocol."""

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
WHY_NOT = "no Chromium on this machine: apt-get install chromium"
needs_browser = pytest.mark.skipif(BROWSER is None, reason=WHY_NOT)
TIMEOUT_S = 30.0


class Page:
    def __init__(self, connection: ClientConnection):
        self._connection, self._calls = connection, 0
        self.events: list[dict[str, Any]] = []  # reports of the page: exceptions, console entries, requests

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._calls += 1
        self._connection.send(json.dumps({"id": self._calls, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._connection.recv(timeout=TIMEOUT_S))
            if answer.get("id") == self._calls:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def load(self, where: Path | str) -> None:
        self.events.clear()
        self.call("Page.navigate", url=where if isinstance(where, str) else where.resolve().as_uri())
        while not any(seen["method"] == "Page.loadEventFired" for seen in self.events):
            self.events.append(json.loads(self._connection.recv(timeout=TIMEOUT_S)))

    def wait_until(self, expression: str) -> Any:
        """The value of an expression once there is a true one; True for an element."""
        deadline = time.monotonic() + TIMEOUT_S
        asked = f"(() => {{ const found = {expression}; return found instanceof Node || found; }})()"
        while not (value := self.evaluate(asked)):
            if time.monotonic() > deadline:
                pytest.fail(f"{expression}: {self.problems()}, {self.evaluate('document.body.innerText')}")
            time.sleep(0.02)
        return value

    def problems(self) -> list[dict[str, Any]]:
        return [e for e in self.events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        code = {"ArrowLeft": 37, "ArrowRight": 39}.get(key, ord(key[0].upper()))
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code)

    def click(self, selector: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def open_page(where, *, size=(1400, 1000)) -> Iterator[Page]:
    """A file or an address of this machine in a browser that can reach nothing else."""
    assert BROWSER is not None
    with tempfile.TemporaryDirectory() as profile:
        process = subprocess.Popen(
            [
                BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                "--remote-debugging-port=0", f"--user-data-dir={profile}",
                f"--window-size={size[0]},{size[1]}",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "about:blank",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,  # Debian's command is a script that starts the browser
        )  # fmt: skip
        try:
            line = next(line for line in process.stderr if line.startswith("DevTools listening on "))
            address = line.removeprefix("DevTools listening on ").strip()
            with connect(address, max_size=None, open_timeout=TIMEOUT_S) as browser_connection:
                targets = Page(browser_connection).call("Target.getTargets")["targetInfos"]
            target = next(t["targetId"] for t in targets if t["type"] == "page")
            root = address.split("/devtools/")[0]
            with connect(f"{root}/devtools/page/{target}", max_size=None, open_timeout=TIMEOUT_S) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Network", "Log"):
                    page.call(f"{domain}.enable")
                shape = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
                page.call("Emulation.setDeviceMetricsOverride", **shape)
                scheme = {"name": "prefers-color-scheme", "value": "light"}
                page.call("Emulation.setEmulatedMedia", features=[scheme])
                page.load(where)
                yield page
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
