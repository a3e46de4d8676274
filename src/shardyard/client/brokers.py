"""Calls to brokers: fail over to another broker, and retry with back-off where that may help."""

import logging
import random
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast
from urllib.parse import urlsplit

import msgspec

from shardyard.client.carrier import RESPONSE_SECONDS, Carrier, HeartbeatAnswer, HttpRequest, WrongAnswer
from shardyard.model import InvalidCall, InvalidValue, NotABroker, ShardyardError, Unreachable
from shardyard.model.url import without_password
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.runtime.interruptible import Interruptible
from shardyard.runtime.retry import Backoff, retry
from shardyard.wire import frames, responses
from shardyard.wire.codec import encode
from shardyard.wire.media import JSON

if TYPE_CHECKING:
    from shardyard.client.connections import Connections

_log = logging.getLogger(__name__)

T = TypeVar("T")
CarrierName = Literal["auto", "websocket", "http"]
"""How to talk to brokers: on a WebSocket connection, and over HTTP where that does not get through (auto); or only in
one of these ways."""

BACKOFF = Backoff(first=0.05, longest=2.0)
"""Between two rounds over all brokers."""
FAILOVER_SECONDS = 5.0
"""The same for requests that can be sent to another broker at no cost, if there is one."""
_HOST_AND_PORT = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):[0-9]+/?")


@dataclass(frozen=True, slots=True)
class Response:
    """The response of a broker."""

    body: bytes

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    def decode(self, kind: type[T]) -> T:
        """The JSON body as one of `shardyard.wire.responses`."""
        return msgspec.json.decode(self.body, type=kind)


class Brokers:
    """The brokers of one system. A call goes to the broker that responded last; when it is out of reach, the call fails
    over to the next one.

    While no broker can be reached, or a broker says that the call may succeed later, it is retried with back-off: all
    calls can safely be repeated.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | None = None,
        retry_seconds: float = 30.0,
        carrier: CarrierName = "auto",
        clock: Clock | None = None,
    ) -> None:
        """`urls`: such as http://127.0.0.1:7400, or 127.0.0.1:7400. `retry_seconds`: how long a call
        is retried before its last error is raised. `carrier`: see `CarrierName`."""
        several = isinstance(urls, Iterable) and not isinstance(urls, str | bytes)
        self.urls = [server_address(url) for url in (urls if several else [cast(str, urls)])]
        if not self.urls:
            raise InvalidValue("brokers", urls, "at least one address such as http://127.0.0.1:7400")
        if token is not None and not (isinstance(token, str) and token.isprintable()):
            raise InvalidValue("token", "***", "a string in one line, or None")
        if not isinstance(retry_seconds, int | float) or not retry_seconds >= 0:
            raise InvalidValue("retry_seconds", retry_seconds, "a number of seconds, at least 0")
        if carrier not in ("auto", "websocket", "http"):
            raise InvalidValue("carrier", carrier, "one of auto, websocket, http")
        self.clock = clock or SystemClock()
        self.failover_seconds = FAILOVER_SECONDS if len(self.urls) > 1 else RESPONSE_SECONDS
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._retry_seconds = retry_seconds
        self._carrier: CarrierName = carrier
        self._at = random.randrange(len(self.urls))
        self._is_reached: bool | None = None
        """Whether the broker that is used now responded last; None before the first response."""
        self._waits = Interruptible()
        """Calls that wait at a broker."""
        self._connections: Connections | None = None
        self.keeps_order = carrier != "http"
        """Whether the connection that was used last keeps the order of publishes in flight."""

    async def __aenter__(self) -> Self:
        from shardyard.client.connections import Connections  # noqa: PLC0415 aiohttp takes longer than all the rest

        self._connections = Connections(self.urls, self._headers, self._carrier, self.clock)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connections is not None:
            await self._connections.close()

    @property
    def is_open(self) -> bool:
        return self._connections is not None and not self._connections.closed

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
        named = {name: str(value) for name, value in (query or {}).items() if value is not None}
        request = HttpRequest(method, path, body, headers or {}, named, wait, timeout)
        return Response(await self.run(lambda carrier: carrier.request(request), wait, timeout, retry_seconds))

    async def publish(self, call: frames.Publish, *, is_stamped: bool) -> responses.Published:
        """Publish. Without a stamp it is not sent to another broker as long as this one may be at work on it."""
        timeout = self.failover_seconds if is_stamped else RESPONSE_SECONDS
        return await self.run(lambda carrier: carrier.publish(call, timeout), timeout=timeout)

    async def read(self, call: frames.Read) -> bytes:
        """Read as the owner of a partition."""
        timeout = self.failover_seconds
        return await self.run(lambda carrier: carrier.read(call, timeout), call.query.wait_seconds, timeout)

    async def commit(self, call: frames.Commit) -> None:
        """Commit positions."""
        timeout = self.failover_seconds
        await self.run(lambda carrier: carrier.commit(call, timeout), timeout=timeout)

    async def set_fence(self, call: frames.Fence) -> None:
        """Fence off the earlier owners of a partition."""
        timeout = self.failover_seconds
        await self.run(lambda carrier: carrier.set_fence(call, timeout), timeout=timeout)

    async def span(self, call: frames.Span) -> responses.PartitionSpan:
        """The offsets that a partition holds."""
        timeout = self.failover_seconds
        return await self.run(lambda carrier: carrier.span(call, timeout), timeout=timeout)

    async def heartbeat(self, call: frames.Heartbeat, timeout: float) -> HeartbeatAnswer:  # noqa: ASYNC109 of one attempt
        """Send a heartbeat, within twice the time of one attempt."""
        return await self.run(
            lambda carrier: carrier.heartbeat(call, timeout), timeout=timeout, retry_seconds=2 * timeout
        )

    async def assignment(self, call: frames.Assignment, timeout: float) -> responses.Assignment:  # noqa: ASYNC109
        """What a member owns, within twice the time of one attempt."""
        return await self.run(
            lambda carrier: carrier.assignment(call, timeout), timeout=timeout, retry_seconds=2 * timeout
        )

    async def run(
        self,
        call: Callable[[Carrier], Awaitable[T]],
        wait: float = 0.0,
        timeout: float = RESPONSE_SECONDS,  # noqa: ASYNC109 of connecting; there may be several attempts
        retry_seconds: float | None = None,
    ) -> T:
        """The result of a call to one of the brokers. `call` raises `ConnectionError` if that broker is out of reach.
        `wait`: seconds for which the broker was asked to wait."""
        retry_seconds = self._retry_seconds if retry_seconds is None else retry_seconds
        deadline = self.clock.monotonic() + retry_seconds
        failures: dict[str, ConnectionError] = {}

        async def try_brokers() -> T:
            """One attempt with each broker, until one responds."""
            for _ in self.urls:
                at = self._at
                try:
                    return await self.attempt(call, wait, timeout)
                except ConnectionError as error:
                    failures[self._name_at(at)] = error
                if self.clock.monotonic() >= deadline:
                    break
            raise self._unreachable(failures, retry_seconds) from None  # it names the causes

        return await retry(try_brokers, clock=self.clock, deadline=deadline, backoff=BACKOFF)

    def _unreachable(self, failures: Mapping[str, ConnectionError], seconds: float) -> Unreachable:
        """The error after these failures, the last of each broker."""
        names = [without_password(url) for url in self.urls]
        answers = [error.answer for error in failures.values() if isinstance(error, WrongAnswer)]
        if len(answers) == len(names):
            return NotABroker(names, " and ".join(dict.fromkeys(answers)))
        reasons = {name: str(error) for name, error in failures.items()}
        if len(set(reasons.values())) == 1:
            return Unreachable(names, seconds, next(iter(reasons.values())))
        return Unreachable(names, seconds, "; ".join(f"{name}: {reason}" for name, reason in reasons.items()))

    async def attempt(
        self,
        call: Callable[[Carrier], Awaitable[T]],
        wait: float = 0.0,
        timeout: float = RESPONSE_SECONDS,  # noqa: ASYNC109 of connecting
    ) -> T:
        """The result of a call to the broker that is used now. If it is out of reach, that is `ConnectionError`,
        and the next attempt goes to the next broker."""
        at = self._at

        async def connect_and_call() -> T:
            return await call(await self._connect(at, timeout))

        try:
            if wait <= 0 or len(self.urls) == 1:
                result = await connect_and_call()
            else:
                result = await self._unless_failed_over(connect_and_call())
        except ConnectionError as error:
            if self._at == at:  # otherwise a concurrent call has failed over already
                self._fail_over(error)
            raise
        except ShardyardError:
            self._note_response(at)
            raise
        self._note_response(at)
        return result

    async def connect(self, timeout: float) -> Carrier:  # noqa: ASYNC109 it is part of what the error means
        """The connection to the broker that is used now. `ConnectionError` if it can't be reached."""
        return await self._connect(self._at, timeout)

    async def _connect(self, at: int, timeout: float) -> Carrier:  # noqa: ASYNC109 it is part of what the error means
        if self._connections is None:
            raise InvalidCall("the client is not open: enter it by `async with` first")
        carrier = await self._connections.get(at % len(self.urls), timeout)
        self.keeps_order = carrier.keeps_order
        return carrier

    def _fail_over(self, error: ConnectionError) -> None:
        """Use the next broker from now on. Calls that wait at the last one are interrupted: if it hangs, they would
        notice that much later."""
        lost, self._at = self._name, self._at + 1
        if self._is_reached is not False:  # the first failure of an outage
            level = logging.INFO if self._is_reached is None else logging.WARNING
            then = "calls to it are retried" if len(self.urls) == 1 else f"failing over to {self._name}"
            _log.log(level, "%s can't be reached (%s): %s", lost, error, then)
            self._is_reached = False
        self._waits.interrupt()

    def _note_response(self, at: int) -> None:
        """The broker that was used at this point has responded."""
        if self._is_reached is not True and self._at == at:
            if self._is_reached is False:
                _log.info("connected to %s", self._name)
            self._is_reached = True

    @property
    def _name(self) -> str:
        """The broker that is used now, as messages name it."""
        return self._name_at(self._at)

    def _name_at(self, at: int) -> str:
        return without_password(self.urls[at % len(self.urls)])

    async def _unless_failed_over(self, work: Awaitable[T]) -> T:
        result = await self._waits.run(work)
        if result is None:
            raise ConnectionError("it does not respond to other calls")
        return result


def server_address(url: str, what: str = "broker", port: int = 7400) -> str:
    """The URL of a broker, or of another server. A host and a port are enough. `port`: of an address in the error."""
    whole = f"http://{url}" if isinstance(url, str) and _HOST_AND_PORT.fullmatch(url) else url
    try:
        parts = urlsplit(whole)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except (AttributeError, TypeError, ValueError):  # not a string, or with an invalid port
        valid = False
    if not valid:
        raise InvalidValue(what, url, f"an address such as http://127.0.0.1:{port}, or a host and a port")
    return whole.rstrip("/")
