"""A headless Chromium, driven by the DevTools protocol over a pipe: what a page does in a real browser.

The pipe carries JSON that ends in a NUL byte, so nothing but the browser itself is needed.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

VARIABLE = "PENSTOCK_CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
MISSING = (
    f"no Chromium was found: neither {VARIABLE} names one nor is any of {', '.join(NAMES)} on the path; on Debian, "
    "apt-get install chromium"
)


def find_browser() -> str | None:
    given = os.environ.get(VARIABLE)
    if given is not None:
        return given
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    def __init__(self, program: str, profile: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def give_pipe() -> None:
            # The browser reads commands from 3 and writes answers to 4. Either end may have one of those numbers.
            commands, answers = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_read, to_write))
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        self._process = subprocess.Popen(
            [
                program,
                "--headless",
                "--remote-debugging-pipe",
                # A container's root has no sandbox to give, and a small /dev/shm.
                "--no-sandbox",
                "--disable-dev-shm-usage",
                "--disable-gpu",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=give_pipe,
            close_fds=False,
        )
        os.close(to_read)
        os.close(to_write)
        self._number = 0
        self._received = b""
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "the browser has closed its pipe"
            self._received += chunk
        message, self._received = self._received.split(b"\0", 1)
        return dict(json.loads(message))

    def wait_for(self, method: str) -> dict[str, Any]:
        """The next event of that kind, or the first one of those that were not looked at."""
        while not any(event["method"] == method for event in self.events):
            self.events.append(self._next())
        found = next(event for event in self.events if event["method"] == method)
        self.events.remove(found)
        return dict(found["params"])

    def close(self) -> None:
        self.send("Browser.close")
        self._process.wait()
        os.close(self._read)
        os.close(self._write)


class Page:
    """One tab. It records what is logged, thrown and asked of a network, from before the page is loaded."""

    def __init__(
        self, browser: Browser, path: Path, *, width: int = 1400, height: int = 900, dark: bool = False
    ) -> None:
        self._browser = browser
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        self._target = target
        self._session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._send("Emulation.setEmulatedMedia", features=scheme)
        self._send("Page.navigate", url=path.as_uri())
        while self.run("document.readyState") != "complete" or self.run("location.href") == "about:blank":
            pass
        self.settle()

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **parameters)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        answer = self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Two frames: what was to be drawn is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "PageDown": 34}
        named: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": codes.get(key, ord(key[0]))}
        if len(key) == 1 or key == "Enter":
            named["text"] = "\r" if key == "Enter" else key
        for kind in ("keyDown", "keyUp"):
            self._send("Input.dispatchKeyEvent", type=kind, modifiers=8 if shift else 0, **named)
        self.settle()

    def move_mouse(self, x: float, y: float) -> None:
        self._send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def picture(self, path: Path, *, whole: bool = True) -> None:
        data = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def accessibility(self) -> list[dict[str, Any]]:
        return list(self._send("Accessibility.getFullAXTree")["nodes"])

    def allow_downloads(self, folder: Path) -> None:
        self._browser.send(
            "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder), eventsEnabled=True
        )

    def await_download(self) -> None:
        while (state := self._browser.wait_for("Browser.downloadProgress")["state"]) == "inProgress":
            pass
        assert state == "completed"

    def _own_events(self, *methods: str) -> list[dict[str, Any]]:
        self.settle()
        own = [event for event in self._browser.events if event.get("sessionId") == self._session]
        return [event["params"] for event in own if event["method"] in methods]

    def complaints(self) -> list[Any]:
        """What was logged or thrown: errors, and warnings too."""
        return self._own_events("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")

    def requests(self) -> list[str]:
        """Every address that the page asked for, its own included."""
        return [event["request"]["url"] for event in self._own_events("Network.requestWillBeSent")]

    def close(self) -> None:
        self._browser.send("Target.closeTarget", targetId=self._target)


if __name__ == "__main__":
    found = find_browser()
    print(f"browser tests: run in {found}" if found else f"browser tests: SKIPPED, because {MISSING}")
