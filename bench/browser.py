"""Drives a headless Chromium by its DevTools protocol: for tests and screenshots of the server's page."""

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import connect  # installed with google-genai

EXECUTABLES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = [
    "--headless", "--remote-debugging-port=0", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-color-profile=srgb",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]  # fmt: skip
REPLY_SECONDS = 60  # wait for one message of the browser
POLL_SECONDS = 0.02  # from one look at a condition to the next
PHONE_WIDTH = 500  # pixels; a narrower window is emulated as that of a phone
KEY_CODES = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, " ": 32}  # Windows virtual key codes


def chromium() -> str | None:
    """Returns the path of an installed Chromium or Chrome; None if there is none."""
    return next(filter(None, map(shutil.which, EXECUTABLES)), None)


class Browser:
    """One page of a headless Chromium.

    `requests` collects the URLs that the page requests, `dialogs` the texts of its dialogs (each is dismissed), and
    `errors` its uncaught exceptions and the errors in its console.
    """

    def __init__(self, path: str):
        self.folder = tempfile.mkdtemp(prefix="r3lite-chromium-")
        sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        arguments = [path, *FLAGS, *sandbox, f"--user-data-dir={self.folder}", "about:blank"]
        self.process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        address = next(m[1] for line in self.process.stderr if (m := re.search(r"listening on (ws://\S+)", line)))
        self.connection = ExitStack()
        self.socket = self.connection.enter_context(connect(address, max_size=None))
        self.count = 0  # messages sent; each has its number as id
        self.session: str | None = None  # id of the session with the page
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *exception: object) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the DevTools protocol and returns its result. Events that arrive before it are recorded."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        self.socket.send(json.dumps(message | ({"sessionId": self.session} if self.session else {})))
        while True:
            reply = json.loads(self.socket.recv(timeout=REPLY_SECONDS))
            if reply.get("id") == self.count:
                assert "error" not in reply, reply["error"]
                return reply["result"]
            self._record(reply)

    def _record(self, event: dict[str, Any]) -> None:
        """Adds an event to `requests`, `dialogs` or `errors`; dismisses a dialog, which would block the page."""
        parameters = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Page.javascriptDialogOpening":
                self.dialogs.append(parameters["message"])
                self.count += 1
                close = {"id": self.count, "method": "Page.handleJavaScriptDialog", "params": {"accept": False}}
                self.socket.send(json.dumps(close | {"sessionId": self.session}))
            case "Runtime.exceptionThrown":
                self.errors.append(parameters["exceptionDetails"]["text"])
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.errors.append(parameters["entry"]["text"])

    def run(self, script: str) -> Any:
        """Runs JavaScript in the page and returns its value; waits for the value if it is a promise."""
        reply = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Waits until the JavaScript expression `condition` is true; AssertionError after `seconds` seconds."""
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"never: {condition}"
            time.sleep(POLL_SECONDS)

    def open(self, url: str) -> None:
        """Opens a URL and waits until the page has loaded."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def view(self, width: int, height: int, dark: bool = False) -> None:
        """Sets the size of the window in pixels, and whether the system prefers dark colors."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < PHONE_WIDTH}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def type(self, text: str) -> None:
        """Types a text into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """Presses and releases a key of KEY_CODES; `modifiers` is a sum of 1 (Alt), 2 (Ctrl), 4 (Meta), 8 (Shift)."""
        event = {"key": key, "code": key, "windowsVirtualKeyCode": KEY_CODES[key], "modifiers": modifiers}
        text = {"text": "\r"} if key == "Enter" else {"text": " "} if key == " " else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def picture(self, path: Path) -> None:
        """Writes a screenshot of the window as a PNG."""
        screenshot = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(screenshot))
