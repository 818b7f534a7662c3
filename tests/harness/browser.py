"""Headless Chromium for the tests, and what they ask of its pages, over the Chrome DevTools Protocol.

A browser's driver would be another program to install and keep at the browser's version; the protocol needs a
WebSocket and JSON.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import websocket

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
# No sandbox, since tests run as root in containers; no GPU and no /dev/shm, which containers lack or keep small.
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")


class ProtocolError(RuntimeError):
    """The browser refused a command, for example because its page went elsewhere meanwhile."""


class ScriptError(RuntimeError):
    """JavaScript raised an exception in the page; the message is the exception's text."""


def find_chromium() -> str | None:
    """Returns the path of an installed Chromium or Chrome; None if there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Page:
    """One tab; ``address`` is its WebSocket, as the browser lists it."""

    def __init__(self, address: str) -> None:
        # Chromium refuses a WebSocket from an origin that it was not told of; none at all is welcome.
        self._socket = websocket.create_connection(address, suppress_origin=True, timeout=30)
        self._number = 0

    def call(self, method: str, *, timeout: float = 30.0, **parameters: Any) -> dict:
        """Sends one command of the protocol and returns its result.

        Raises:
            ProtocolError: The browser refused it.
            TimeoutError: No answer came in time.
        """
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        end = time.monotonic() + timeout
        while True:
            # At least a moment: a timeout of 0 would make the socket a non-blocking one.
            self._socket.settimeout(max(0.01, end - time.monotonic()))
            try:
                answer = json.loads(self._socket.recv())
            except websocket.WebSocketTimeoutException:
                raise TimeoutError(f"{method}: no answer within {timeout:g} s: {parameters}") from None
            if answer.get("id") != self._number:
                continue  # an event, or the answer to a command that was given up
            if "error" in answer:
                raise ProtocolError(f"{method}: {answer['error']['message']}")
            return answer["result"]

    def evaluate(self, expression: str, *, await_promise: bool = True, timeout: float = 30.0) -> Any:
        """Returns the value of a JavaScript expression, which has to be one of JSON's.

        Raises:
            ScriptError: The expression raised an exception, or its promise was rejected.
        """
        how = {"awaitPromise": await_promise, "returnByValue": True, "userGesture": True}
        result = self.call("Runtime.evaluate", expression=expression, timeout=timeout, **how)
        if details := result.get("exceptionDetails"):
            raised = details.get("exception", {})
            raise ScriptError(raised.get("description") or raised.get("value") or details["text"])
        return result["result"].get("value")

    def wait_for(self, expression: str, *, timeout: float = 60.0) -> Any:
        """Waits until a JavaScript expression is true, and returns its value.

        Raises:
            TimeoutError: It did not become true in time; names its last value.
        """
        end, value = time.monotonic() + timeout, None
        while time.monotonic() < end:
            try:
                value = self.evaluate(expression)
            except (ProtocolError, TimeoutError) as error:  # the page was just being loaded
                value = error
            else:
                if value:
                    return value
            time.sleep(0.2)
        raise TimeoutError(f"not within {timeout:g} s: {expression} (the last value: {value!r})")

    def screenshot(self, path: Path) -> None:
        """Saves what the window shows as a PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", timeout=60)["data"]))

    def close(self) -> None:
        """Closes the tab at once; a page that would ask whether to leave is not asked."""
        with contextlib.suppress(ProtocolError, TimeoutError, OSError, websocket.WebSocketException):
            target = self.call("Target.getTargetInfo")["targetInfo"]["targetId"]
            self.call("Target.closeTarget", targetId=target)
        self._socket.close()


class Browser:
    """A Chromium without a window, and with its own profile; on leaving the context, all its processes end.

    Args:
        folder: For the profile; it is made.
        size: Width and height of a page in pixels.
        flags: More of Chromium's own.
    """

    def __init__(self, folder: Path, *, size: tuple[int, int] = (1400, 1000), flags: Sequence[str] = ()) -> None:
        program = find_chromium()
        assert program, f"none of {', '.join(PROGRAMS)} is installed"
        folder.mkdir(parents=True, exist_ok=True)
        self._port_file = folder / "DevToolsActivePort"
        command = [program, *FLAGS, *flags, f"--user-data-dir={folder}", f"--window-size={size[0]},{size[1]}"]
        command += ["--remote-debugging-port=0", "about:blank"]
        with (folder / "chromium.log").open("wb") as log:
            # A session of its own: Chromium is many processes, and they end as one group.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def open(self, url: str) -> Page:
        """Opens an address in a new tab and returns it as soon as the server has answered."""
        new = f"http://127.0.0.1:{self._find_port()}/json/new?{urllib.parse.quote('about:blank')}"
        with urllib.request.urlopen(urllib.request.Request(new, method="PUT"), timeout=30) as answer:
            page = Page(json.load(answer)["webSocketDebuggerUrl"])
        page.call("Page.bringToFront")  # a page behind another one is not drawn, and its timers are slowed down
        if reason := page.call("Page.navigate", url=url, timeout=60).get("errorText"):
            page.close()
            raise ProtocolError(f"{url}: {reason}")
        return page

    def _find_port(self, seconds: float = 60.0) -> int:
        """The port of the protocol, which Chromium chooses and writes into its profile."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(OSError, ValueError):  # not there yet, or half written
                port, _ = self._port_file.read_text().splitlines()
                return int(port)
            time.sleep(0.1)
        said = (self._port_file.parent / "chromium.log").read_text(errors="replace")[-1000:]
        raise RuntimeError(f"Chromium did not start within {seconds:g} s: {said}")
