"""Calling brokers: any of several, again with back-off where that may help."""

import asyncio
import io
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from shardyard.model import InvalidCall, InvalidValue, RetryLater, ShardyardError, Unreachable
from shardyard.wire import errors
from shardyard.wire import records as wire

FIRST_WAIT_SECONDS = 0.05
LONGEST_WAIT_SECONDS = 2.0
ANSWER_SECONDS = 15.0
"""How long to wait for an answer, beyond what was asked to be waited for."""
TURN_SECONDS = 5.0
"""The same for what can be asked of another broker at no cost, if there is one."""
LARGE_BYTES = 512 * 1024
"""From which on a body is written in parts, so that other calls get their turn."""
_HOST_AND_PORT = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]+/?")
_BROKEN = (aiohttp.ClientError, ConnectionError, TimeoutError, OSError)


class Answer(msgspec.Struct):
    """What a broker answered, and how often it was asked."""

    body: bytes
    tries: int

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


class Brokers:
    """Some brokers of one system. A call goes to the one that answered last; when that fails, to the others in turn.

    Calls are repeated, with growing pauses of random length, while brokers can't be reached or say that it may work
    later. Everything that is asked of them can be asked twice.
    """

    def __init__(self, urls: str | Sequence[str], *, token: str | None = None, patience: float = 30.0) -> None:
        """`urls`: such as http://127.0.0.1:7400, or 127.0.0.1:7400. `patience`: seconds after which a call that gets no
        good answer gives up."""
        self.urls = [_address(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self.urls:
            raise InvalidValue("brokers", urls, "at least one address such as http://127.0.0.1:7400")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._patience = patience
        self._at = random.randrange(len(self.urls))
        self.turn_seconds = TURN_SECONDS if len(self.urls) > 1 else ANSWER_SECONDS
        self._turned = asyncio.Event()
        """The broker that is called now was found to be out of reach; then it is another one's turn, and event."""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def is_open(self) -> bool:
        return self._session is not None and not self._session.closed

    async def get(
        self,
        path: str,
        *,
        wait: float = 0.0,
        accept: str = wire.JSON,
        timeout: float | None = None,  # noqa: ASYNC109 of a try; there may be several
        patience: float | None = None,
        **query: object,
    ) -> Answer:
        timeout = self.turn_seconds if timeout is None else timeout
        headers = {"Accept": accept}
        return await self.call("GET", path, query=query, headers=headers, wait=wait, timeout=timeout, patience=patience)

    async def post(
        self,
        path: str,
        content: object,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 of a try; there may be several
        patience: float | None = None,
    ) -> Answer:
        timeout = self.turn_seconds if timeout is None else timeout
        body, headers = msgspec.json.encode(content), {"Content-Type": wire.JSON}
        return await self.call("POST", path, body, headers, timeout=timeout, patience=patience)

    async def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        query: Mapping[str, object] | None = None,
        wait: float = 0.0,
        timeout: float = ANSWER_SECONDS,  # noqa: ASYNC109 of a try; there may be several
        patience: float | None = None,
    ) -> Answer:
        """Call until it is answered; what a broker refuses is raised as it was raised there.

        `wait`: seconds for which the broker was asked to wait; `timeout`: seconds of silence beyond that after which
        it is another one's turn.
        """
        patience = self._patience if patience is None else patience
        until = time.monotonic() + patience
        named = {name: str(value) for name, value in (query or {}).items() if value is not None}
        pause, tries = FIRST_WAIT_SECONDS, 0
        while True:
            tries += 1
            at = self._at
            try:
                told = (at, method, path, body, headers, named, wait, timeout)
                waits = wait > 0 and len(self.urls) > 1
                return Answer(await (self._waited(self._turned, *told) if waits else self._once(*told)), tries)
            except _BROKEN as error:
                if self._at == at:  # else another call has turned to the next one already
                    self._turn()
                failed: ShardyardError = Unreachable(self.urls, patience, _reason(error))
            except RetryLater as error:
                failed = error
            if time.monotonic() >= until:
                raise failed
            if tries % len(self.urls) == 0:
                await asyncio.sleep(random.uniform(0.5, 1.0) * pause)
                pause = min(2 * pause, LONGEST_WAIT_SECONDS)

    def _turn(self) -> None:
        """To the next one. Who waits long for an answer of the last one is told: if it hangs, it would take its time to
        notice."""
        self._at += 1
        self._turned.set()
        self._turned = asyncio.Event()

    async def _waited(self, turned: asyncio.Event, *told: Any) -> bytes:
        """`_once`, unless others turn away from that broker before it has answered."""
        answering = asyncio.ensure_future(self._once(*told))
        turning = asyncio.ensure_future(turned.wait())
        try:
            await asyncio.wait((answering, turning), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            raise ConnectionError("it does not answer others")
        finally:
            turning.cancel()
            if not answering.done():
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)

    async def _once(
        self,
        at: int,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str] | None,
        query: Mapping[str, str],
        wait: float,
        silence: float,
    ) -> bytes:
        if self._session is None:
            raise InvalidCall("the client is not open: enter it by `async with` first")
        url = self.urls[at % len(self.urls)] + path
        timeout = aiohttp.ClientTimeout(total=wait + ANSWER_SECONDS, sock_connect=silence, sock_read=wait + silence)
        data = io.BytesIO(body) if body is not None and len(body) > LARGE_BYTES else body
        async with self._session.request(
            method, url, data=data, headers=headers, params=query, timeout=timeout
        ) as response:
            content = await response.read()
            if response.status < 400:
                return content
            raise _refusal(response.status, content)


def _address(url: str) -> str:
    """As it is called. A host and a port are enough."""
    whole = f"http://{url}" if isinstance(url, str) and _HOST_AND_PORT.fullmatch(url) else url
    try:
        parts = urlsplit(whole)
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except (AttributeError, TypeError, ValueError):  # it is no text, or its port is none
        right = False
    if not right:
        raise InvalidValue("broker", url, "an address such as http://127.0.0.1:7400, or a host and a port")
    return whole.rstrip("/")


def _reason(error: Exception) -> str:
    """Why a broker could not be reached, in few words."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"nobody knows the host {error.host}"
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno).lower()
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it hung up"
    return str(error) or type(error).__name__


def path(*names: object) -> str:
    """A path of the API; names may have any characters."""
    return "/v1/" + "/".join(quote(str(name), safe="") for name in names)


def _refusal(status: int, content: bytes) -> Exception:
    """What was refused; a proxy's own error counts as a broker that can't be reached."""
    try:
        return errors.error_of(msgspec.json.decode(content, type=errors.ErrorResponse).error)
    except msgspec.DecodeError:
        if status >= 500:
            return ConnectionError(f"status {status}")
        return InvalidCall(f"a broker answered {status}: {content[:200].decode(errors='replace')}")
