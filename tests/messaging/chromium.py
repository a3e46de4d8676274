"""Chromium without a screen, driven over its DevTools protocol: what a test of a page needs, and no more."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PACKAGE = "chromium-headless-shell"
START_SECONDS = 30.0
WAIT_SECONDS = 60.0
OPTIONS = [
    "--headless",
    "--no-sandbox",  # it can't be had by root, and the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-port=0",
]


def find_chromium() -> str:
    """Where it is. Without it the test is skipped, except in CI."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        say = f"Chromium is missing: apt-get install {PACKAGE}"
        if os.environ.get("CI") == "true":
            pytest.fail(say)
        pytest.skip(say)
    return found


class Window:
    """A window with one page, which shares no storage with other windows."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self.errors: list[str] = []
        """Exceptions of the page, and what its browser refused, such as by its Content-Security-Policy."""
        self._browser = browser
        self._session = session

    async def call(self, method: str, **parameters: Any) -> Any:
        return await self._browser.call(method, self._session, **parameters)

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.wait_for("document.readyState === 'complete'")

    async def reload(self) -> None:
        await self.evaluate("window.isOld = true")
        await self.call("Page.reload")
        await self.wait_for("!window.isOld && document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def wait_for(self, expression: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(DevToolsError):  # the page is being replaced
                if await self.evaluate(f"Boolean({expression})"):
                    return
            if time.monotonic() > deadline:
                shown = await self.evaluate("document.body.innerText")
                raise TimeoutError(f"not true within {seconds:g} s: {expression}; the page shows:\n{shown}")
            await asyncio.sleep(0.03)

    async def type_into(self, selector: str, text: str, *, enter: bool = True) -> None:
        """Focus a field and type a text, then the Enter key."""
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        await self.call("Input.insertText", text=text)
        if enter:
            await self.press("Enter", "\r")

    async def press(self, key: str, text: str = "") -> None:
        """Press a key, which types `text`."""
        code = {"Enter": 13, "Escape": 27}[key]
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, text=text, windowsVirtualKeyCode=code)

    async def screenshot(self) -> bytes:
        """What the window shows, as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot"))["data"])


class DevToolsError(Exception):
    """Raised when Chromium refuses a call."""


class Browser:
    """A running Chromium."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._windows: dict[str, Window] = {}

    async def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        frame = {"id": number, "method": method, "params": parameters}
        await self._socket.send_json(frame if session is None else {**frame, "sessionId": session})
        return await answer

    async def window(self, width: int = 1000, height: int = 700) -> Window:
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = await self.call(
            "Target.createTarget", url="about:blank", browserContextId=context, width=width, height=height
        )
        session = (await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True))["sessionId"]
        window = self._windows[session] = Window(self, session)
        for domain in ("Page", "Runtime", "Log"):
            await window.call(f"{domain}.enable")
        return window

    async def listen(self) -> None:
        async for message in self._socket:
            frame = message.json()
            if "id" in frame:
                answer = self._answers.pop(frame["id"])
                if "error" in frame:
                    answer.set_exception(DevToolsError(frame["error"]["message"]))
                else:
                    answer.set_result(frame["result"])
            elif (window := self._windows.get(frame.get("sessionId", ""))) is not None:
                self._note(window, frame["method"], frame["params"])

    @staticmethod
    def _note(window: Window, method: str, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            window.errors.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["source"] in ("security", "javascript"):
            window.errors.append(parameters["entry"]["text"])


@contextlib.asynccontextmanager
async def chromium(program: str) -> AsyncIterator[Browser]:
    """Start Chromium, and stop it when the block ends."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            program,
            *OPTIONS,
            f"--user-data-dir={folder}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            address = await _address(Path(folder) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as http, http.ws_connect(address, max_msg_size=0) as socket:
                browser = Browser(socket)
                listening = asyncio.create_task(browser.listen())
                try:
                    yield browser
                finally:
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # Debian's program is a script that starts the browser
            await process.wait()


async def _address(file: Path, process: asyncio.subprocess.Process) -> str:
    """What Chromium writes to this file once it listens: a port and a path."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        lines = _lines(file)
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        assert process.returncode is None, f"Chromium ended with {process.returncode}"
        assert time.monotonic() < deadline, "Chromium does not start"
        await asyncio.sleep(0.02)


def _lines(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []
