"""Calls to brokers: fail over to another broker, and retry with back-off where that may help."""

import asyncio
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from shardyard.model import InvalidCall, InvalidValue, Unreachable
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.runtime.retry import Backoff, retry
from shardyard.wire.codec import encode
from shardyard.wire.errors import ErrorResponse, error_of
from shardyard.wire.media import JSON

if TYPE_CHECKING:
    from shardyard.client.http import HttpSession

T = TypeVar("T")

BACKOFF = Backoff(first=0.05, longest=2.0)
"""Between two rounds over all brokers."""
RESPONSE_SECONDS = 15.0
"""How long to wait for a response, beyond the time for which the broker was asked to wait."""
FAILOVER_SECONDS = 5.0
"""The same for requests that can be sent to another broker at no cost, if there is one."""
_HOST_AND_PORT = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]+/?")


@dataclass(frozen=True, slots=True)
class Response:
    """The response of a broker."""

    body: bytes
    attempts: int
    """How many requests it took."""

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    def decode(self, kind: type[T]) -> T:
        """The JSON body as one of `shardyard.wire.responses`."""
        return msgspec.json.decode(self.body, type=kind)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request, as any of the brokers gets it."""

    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str] | None
    query: Mapping[str, str]
    wait: float
    """Seconds for which the broker was asked to wait."""
    timeout: float
    """Seconds without a response, beyond that, after which the broker counts as unreachable."""


class Brokers:
    """The brokers of one system. A call goes to the broker that responded last; when it is out of reach, the call fails
    over to the next one.

    While no broker can be reached, or a broker says that the call may succeed later, it is retried with back-off.
    Therefore all requests of the API can safely be repeated.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | None = None,
        retry_seconds: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        """`urls`: such as http://127.0.0.1:7400, or 127.0.0.1:7400. `retry_seconds`: how long a call
        is retried before its last error is raised."""
        self.urls = [_address(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self.urls:
            raise InvalidValue("brokers", urls, "at least one address such as http://127.0.0.1:7400")
        self.clock = clock or SystemClock()
        self.failover_seconds = FAILOVER_SECONDS if len(self.urls) > 1 else RESPONSE_SECONDS
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._retry_seconds = retry_seconds
        self._at = random.randrange(len(self.urls))
        self._failed_over = asyncio.Event()
        """Set when the current broker is given up for the next one, which gets a new event."""
        self._session: HttpSession | None = None

    async def __aenter__(self) -> Self:
        from shardyard.client.http import HttpSession  # noqa: PLC0415 importing aiohttp takes longer than all the rest

        self._session = HttpSession(self._headers)
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
        accept: str = JSON,
        timeout: float | None = None,  # noqa: ASYNC109 of one attempt; there may be several
        retry_seconds: float | None = None,
        **query: object,
    ) -> Response:
        timeout = self.failover_seconds if timeout is None else timeout
        headers = {"Accept": accept}
        return await self.call(
            "GET", path, query=query, headers=headers, wait=wait, timeout=timeout, retry_seconds=retry_seconds
        )

    async def post(
        self,
        path: str,
        content: object,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 of one attempt; there may be several
        retry_seconds: float | None = None,
    ) -> Response:
        timeout = self.failover_seconds if timeout is None else timeout
        return await self.call(
            "POST", path, encode(content), {"Content-Type": JSON}, timeout=timeout, retry_seconds=retry_seconds
        )

    async def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        query: Mapping[str, object] | None = None,
        wait: float = 0.0,
        timeout: float = RESPONSE_SECONDS,  # noqa: ASYNC109 of one attempt; there may be several
        retry_seconds: float | None = None,
    ) -> Response:
        """The response to a request. An error of the broker is raised here as it was raised there.

        `wait`: seconds for which the broker was asked to wait. `timeout`: seconds without a response, beyond that,
        after which the call fails over to the next broker.
        """
        retry_seconds = self._retry_seconds if retry_seconds is None else retry_seconds
        deadline = self.clock.monotonic() + retry_seconds
        named = {name: str(value) for name, value in (query or {}).items() if value is not None}
        request = HttpRequest(method, path, body, headers, named, wait, timeout)
        attempts = 0

        async def try_brokers() -> Response:
            """One attempt with each broker, until one responds."""
            nonlocal attempts
            reason = ""
            for _ in self.urls:
                attempts += 1
                at = self._at
                try:
                    return Response(await self._attempt(at, request), attempts)
                except ConnectionError as error:
                    if self._at == at:  # otherwise a concurrent call has failed over already
                        self._fail_over()
                    reason = str(error)
                if self.clock.monotonic() >= deadline:
                    break
            raise Unreachable(self.urls, retry_seconds, reason)

        return await retry(try_brokers, clock=self.clock, deadline=deadline, backoff=BACKOFF)

    def _fail_over(self) -> None:
        """Use the next broker from now on. Long polls at the last one are interrupted: if it hangs, they would notice
        that much later."""
        self._at += 1
        self._failed_over.set()
        self._failed_over = asyncio.Event()

    async def _attempt(self, at: int, request: HttpRequest) -> bytes:
        if request.wait <= 0 or len(self.urls) == 1:
            return await self._send(at, request)
        response = asyncio.ensure_future(self._send(at, request))
        failed_over = asyncio.ensure_future(self._failed_over.wait())
        try:
            await asyncio.wait((response, failed_over), return_when=asyncio.FIRST_COMPLETED)
            if response.done():
                return response.result()
            raise ConnectionError("it does not respond to other calls")
        finally:
            failed_over.cancel()
            if not response.done():
                response.cancel()
                await asyncio.gather(response, return_exceptions=True)

    async def _send(self, at: int, request: HttpRequest) -> bytes:
        if self._session is None:
            raise InvalidCall("the client is not open: enter it by `async with` first")
        status, content = await self._session.send(self.urls[at % len(self.urls)], request)
        if status < 400:
            return content
        raise _error_of(status, content)


def _address(url: str) -> str:
    """The URL of a broker. A host and a port are enough."""
    whole = f"http://{url}" if isinstance(url, str) and _HOST_AND_PORT.fullmatch(url) else url
    try:
        parts = urlsplit(whole)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except (AttributeError, TypeError, ValueError):  # not a string, or with an invalid port
        valid = False
    if not valid:
        raise InvalidValue("broker", url, "an address such as http://127.0.0.1:7400, or a host and a port")
    return whole.rstrip("/")


def path(*names: object) -> str:
    """A path of the API. Names can have any characters."""
    return "/v1/" + "/".join(quote(str(name), safe="") for name in names)


def _error_of(status: int, content: bytes) -> Exception:
    """The error of a response. An error of a proxy counts as a broker that can't be reached."""
    try:
        return error_of(msgspec.json.decode(content, type=ErrorResponse).error)
    except msgspec.DecodeError:
        if status >= 500:
            return ConnectionError(f"status {status}")
        return InvalidCall(f"a broker answered with status {status}: {content[:200].decode(errors='replace')}")
