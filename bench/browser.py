"""A headless Chromium, driven by its DevTools protocol: for tests of the server's page, and for its pictures."""

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

from websockets.sync.client import connect  # google-genai brings it

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = [
    "--headless", "--remote-debugging-port=0", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-color-profile=srgb",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]  # fmt: skip


def chromium() -> str | None:
    """The path of a Chromium or Chrome, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a headless Chromium. `requests`, `dialogs` and `errors` collect what happens in it."""

    def __init__(self, path: str):
        self.folder = tempfile.mkdtemp(prefix="r3lite-chromium-")
        sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        arguments = [path, *FLAGS, *sandbox, f"--user-data-dir={self.folder}", "about:blank"]
        self.process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        address = next(m[1] for line in self.process.stderr if (m := re.search(r"listening on (ws://\S+)", line)))
        self.held = ExitStack()
        self.socket = self.held.enter_context(connect(address, max_size=None))
        self.count, self.session = 0, None
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
        self.held.close()
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        self.socket.send(json.dumps(message | ({"sessionId": self.session} if self.session else {})))
        while True:
            reply = json.loads(self.socket.recv(timeout=60))
            if reply.get("id") == self.count:
                assert "error" not in reply, reply["error"]
                return reply["result"]
            self._note(reply)

    def _note(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
            case "Page.javascriptDialogOpening":
                self.dialogs.append(told["message"])
                self.count += 1
                close = {"id": self.count, "method": "Page.handleJavaScriptDialog", "params": {"accept": False}}
                self.socket.send(json.dumps(close | {"sessionId": self.session}))
            case "Runtime.exceptionThrown":
                self.errors.append(told["exceptionDetails"]["text"])
            case "Log.entryAdded" if told["entry"]["level"] == "error":
                self.errors.append(told["entry"]["text"])

    def run(self, script: str) -> Any:
        """The value of a script, of its promise if it is one."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Waits until a script is true."""
        until = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < until, f"never: {condition}"
            time.sleep(0.02)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def view(self, width: int, height: int, dark: bool = False) -> None:
        """The size of the window, and what its system prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """A key by its name; 8 is shift."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, " ": 32}[key]
        told = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        text = {"text": "\r"} if key == "Enter" else {"text": " "} if key == " " else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **told, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **told)

    def picture(self, path: Path) -> None:
        """Writes what is seen as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
