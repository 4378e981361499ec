"""Controls a headless Chromium browser for tests, through the DevTools protocol over two pipes."""

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_SECONDS = 60.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-default-browser-check",
    "--no-first-run",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
)

_WITH_PIPES = """
import os, sys
read, write, *command = sys.argv[1:]
read, write = os.dup(int(read)), os.dup(int(write))  # so that neither is overwritten before it is moved
for number, wanted in ((read, 3), (write, 4)):
    os.dup2(number, wanted)
    os.set_inheritable(wanted, True)
os.execv(command[0], command)
"""
"""Python program that runs a command with two given pipes as file descriptors 3 and 4 of the command. A shell cannot do
this: it can only redirect descriptors of one digit, and the numbers of the pipes may be larger."""


def chromium() -> str | None:
    """Return the path of the program Chromium. Return None if it is not installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def why_impossible() -> str | None:
    """Return why no browser can be started, and how to install one. Return None if Chromium is installed."""
    return None if chromium() else "needs Chromium; Debian: apt-get install chromium"


@dataclass
class Tab:
    """A page that is open in the browser."""

    _read: int
    _write: int
    _session: str | None = None
    _number: int = 0
    _unread: bytes = b""
    events: list[dict[str, Any]] = field(default_factory=list)
    """DevTools events of the page, in order of arrival."""

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """Call a DevTools method and return its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def attach(self) -> None:
        """Open a page and subscribe to its events."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def open(self, url: str, *, width: int = 1100, dark: bool = False) -> None:
        """Load ``url`` and wait until the page is complete."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not self.events_named("Page.loadEventFired"):
            self.events.append(self._next())

    def events_named(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of all events called ``method`` since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def evaluate(self, expression: str) -> Any:
        """Evaluate a JavaScript expression in the page and return its value."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def screenshot(self, path: Path, *, top: float = 0.0, bottom: float | None = None) -> None:
        """Save the whole page as PNG, or only the pixel rows from ``top`` to ``bottom``."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        height = (size["height"] if bottom is None else bottom) - top
        clip = {"x": 0, "y": top, "width": size["width"], "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + TIMEOUT_SECONDS
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"the browser sent nothing for {TIMEOUT_SECONDS} s"
            more = os.read(self._read, 1 << 20)
            assert more, "the browser has ended"
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        received: dict[str, Any] = json.loads(message)
        return received


@contextlib.contextmanager
def browse(folder: Path) -> Iterator[Tab]:
    """Start a browser that writes all its files to ``folder``. Yield an open page of the browser. End all processes of
    the browser after the block."""
    path = chromium()
    assert path is not None, "there is a browser"
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    command = [sys.executable, "-c", _WITH_PIPES, str(theirs_in), str(theirs_out), path, *_FLAGS]
    log = (folder / "chromium.log").open("wb")
    process = subprocess.Popen(
        [*command, f"--user-data-dir={folder / 'profile'}", "about:blank"],
        pass_fds=(theirs_in, theirs_out),
        env=os.environ | {"HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)},
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        os.close(theirs_in)
        os.close(theirs_out)
        tab = Tab(ours_in, ours_out)
        tab.attach()
        yield tab
    finally:
        os.close(ours_in)
        os.close(ours_out)
        try:
            process.wait(timeout=TIMEOUT_SECONDS)  # the browser and its child processes end when the pipes close
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            log.close()
