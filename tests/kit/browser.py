"""A headless Chromium for the tests, driven through its DevTools protocol over a pipe: no driver, no port.

python tests/kit/browser.py --install      installs the distribution's Chromium if it is missing
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-sync",
    "--remote-debugging-pipe", "--force-color-profile=srgb",
)  # fmt: skip


def executable() -> str | None:
    """The path of an installed Chromium, `HF_TRAK_CHROMIUM` first."""
    named = os.environ.get("HF_TRAK_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


def install() -> str | None:
    """Install Chromium from the distribution's packages if it is missing and that can be done. Its path or `None`."""
    if (found := executable()) is not None:
        return found
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return None
    packages = ["apt-get", "install", "-y", "--no-install-recommends", "chromium", "fonts-dejavu-core"]
    if subprocess.run(packages, stdout=subprocess.DEVNULL).returncode != 0:
        subprocess.run(["apt-get", "update"], stdout=subprocess.DEVNULL, check=True)
        subprocess.run(packages, stdout=subprocess.DEVNULL, check=True)
    return executable()


class Page:
    """One tab, and everything that it said, asked for, or failed at."""

    def __init__(self, send: Callable[..., Any], receive: Callable[[float], dict[str, Any] | None]) -> None:
        self._send, self._receive = send, receive
        self._number = 0
        self.session: str | None = None
        self.complaints: list[str] = []
        """Console messages, uncaught exceptions, and log entries such as violations of the policy."""
        self.requests: list[str] = []
        """URLs of all requests."""
        self.loaded = False

    def call(self, method: str, timeout: float = 120.0, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol and its result."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        self._send(message)
        deadline = time.monotonic() + timeout
        while True:
            answer = self._next(deadline)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self, deadline: float) -> dict[str, Any]:
        message = self._receive(max(0.0, deadline - time.monotonic()))
        if message is None:
            raise TimeoutError("Chromium did not answer in time.")
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"][:200])
        elif method == "Page.loadEventFired":
            self.loaded = True
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(f"console.{parameters['type']}: {parameters['args']}")
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(f"exception: {parameters['exceptionDetails']}")
        elif method == "Log.entryAdded":
            self.complaints.append(f"log: {parameters['entry']['text']}")
        return message

    def open(self, path: Path, timeout: float = 120.0) -> float:
        """Load a file; the seconds until its load event."""
        self.complaints.clear()
        self.requests.clear()
        self.loaded = False
        start = time.monotonic()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self.loaded:
            self._next(start + timeout)
        return time.monotonic() - start

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def size(self, width: int, height: int, mobile: bool = False) -> None:
        """The size of the window in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if mobile else 1,
            mobile=mobile,
        )  # fmt: skip

    def media(self, kind: str = "", **features: str) -> None:
        """Emulate a medium (`"print"`) and media features (`prefers_color_scheme="dark"`)."""
        chosen = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", media=kind, features=chosen)

    def press(self, key: str) -> None:
        """Press and release a key such as `Tab` or `Enter`."""
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            down = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **down)

    def type(self, text: str) -> None:
        """Put text into what has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path, whole: bool = False) -> Path:
        """Save what is visible, or the whole page, as PNG."""
        clip: dict[str, Any] = {"captureBeyondViewport": whole}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **clip)["data"]))
        return path

    def pdf(self, path: Path) -> Path:
        """Save the page as it prints."""
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"]))
        return path


@contextmanager
def chromium() -> Iterator[Page]:
    """A running Chromium with one empty page. Raises `FileNotFoundError` if none is installed."""
    path = executable()
    if path is None:
        raise FileNotFoundError(
            f"There is no Chromium. Expected one of {NAMES}; `python tests/kit/browser.py --install`."
        )
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The protocol wants descriptors 3 and 4.
        wiring = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        process = subprocess.Popen(
            ["bash", "-c", wiring, "bash", path, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
        )
        os.close(theirs_in)
        os.close(theirs_out)
        os.set_blocking(ours_in, False)
        try:
            page = Page(*_wire(ours_in, ours_out))
            (target,) = [t for t in page.call("Target.getTargets")["targetInfos"] if t["type"] == "page"][:1]
            page.session = page.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
                page.call(f"{domain}.enable")
            yield page
        finally:
            process.terminate()
            process.wait(timeout=20)
            os.close(ours_in)
            os.close(ours_out)


def _wire(source: int, sink: int) -> tuple[Callable[..., None], Callable[[float], dict[str, Any] | None]]:
    """How to send and receive messages: JSON, each ended by a NUL."""
    import select

    pending = bytearray()

    def send(message: dict[str, Any]) -> None:
        data = memoryview(json.dumps(message).encode() + b"\0")
        while data:
            data = data[os.write(sink, data) :]

    def receive(timeout: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + timeout
        while True:
            if (end := pending.find(b"\0")) >= 0:
                message = json.loads(pending[:end])
                del pending[: end + 1]
                return message
            ready, _, _ = select.select([source], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            chunk = os.read(source, 1 << 20)
            if not chunk:
                raise EOFError("Chromium has closed its pipe: it did not start, or crashed.")
            pending.extend(chunk)

    return send, receive


if __name__ == "__main__":
    path = install() if "--install" in sys.argv[1:] else executable()
    print(path or "no Chromium")
    sys.exit(path is None)
