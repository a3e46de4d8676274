"""The connections of a client to its brokers, opened when they are first used.

Only an open client imports this: aiohttp takes longer to load than all the rest.
"""

import asyncio
import logging
from collections.abc import Sequence

import aiohttp

from shardyard.client.brokers import CarrierName
from shardyard.client.carrier import Carrier, HttpRequest, WrongAnswer
from shardyard.client.http import HttpCarrier
from shardyard.client.websocket import NoWebSocket, UpgradeFailed, WebSocketCarrier, connect
from shardyard.model import Closed
from shardyard.model.url import without_password
from shardyard.runtime.clock import Clock
from shardyard.runtime.interruptible import Interruptible

_log = logging.getLogger(__name__)

HEALTH_SECONDS = 2.0
"""For the answer of a broker that may be reachable over HTTP only."""
HTTP_SECONDS = 60.0
"""How long a broker that lets no WebSocket connection through is used over HTTP, before one is tried again."""


class Connections:
    """One connection to each broker."""

    def __init__(self, urls: Sequence[str], headers: dict[str, str], carrier: CarrierName, clock: Clock) -> None:
        """`headers`: of all requests."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        self._brokers = [_Broker(self._session, url, carrier, clock) for url in urls]
        self.closed = False

    async def close(self) -> None:
        """Close all connections, also those that are being opened. Calls that wait for one of them get `Closed`."""
        self.closed = True
        try:
            await asyncio.gather(*(broker.close() for broker in self._brokers))
        finally:
            await self._session.close()

    async def get(self, index: int, timeout: float) -> Carrier:  # noqa: ASYNC109 it is part of what the error means
        """The connection to one of the brokers. `ConnectionError` if it can't be reached within `timeout` seconds."""
        if self.closed:
            raise Closed("the client")
        broker = self._brokers[index]
        if (carrier := broker.current) is not None:
            return carrier
        try:
            async with asyncio.timeout(timeout):
                return await broker.open()
        except TimeoutError:
            raise ConnectionError("no response in time") from None


class _Broker:
    """The connection to one broker."""

    def __init__(self, session: aiohttp.ClientSession, url: str, carrier: CarrierName, clock: Clock) -> None:
        self._session = session
        self._url = url
        self._may_fall_back = carrier == "auto"
        self._clock = clock
        self._http = HttpCarrier(session, url)
        self._http_until = float("inf") if carrier == "http" else 0.0
        """On the monotonic clock; 0 unless it has fallen back to HTTP."""
        self._websocket: WebSocketCarrier | None = None
        self._opening = asyncio.Lock()
        self._openings = Interruptible()
        """What holds the lock, and what waits for it."""

    @property
    def current(self) -> Carrier | None:
        """The connection that is in use; None if one has to be opened."""
        websocket = self._websocket
        if websocket is not None and not websocket.is_lost:
            return websocket
        return self._http if self._http_until > self._clock.monotonic() else None

    async def open(self) -> Carrier:
        """Open a connection, or wait until another call has done so."""
        opened = await self._openings.run(self._open())
        if opened is None:
            raise Closed("the client")
        return opened

    async def _open(self) -> Carrier:
        async with self._opening:
            if self._websocket is not None:
                if not self._websocket.is_lost:
                    return self._websocket
                await self._websocket.close()
                self._websocket = None
            try:
                self._websocket = await connect(self._session, self._url)
            except (NoWebSocket, UpgradeFailed) as error:
                if not self._may_fall_back:
                    raise ConnectionError(f"it takes no WebSocket connections: {error}") from None
                if isinstance(error, UpgradeFailed) and not await self._answers_http():
                    raise
                return self._fall_back(error)
            if self._http_until:
                _log.info("%s takes WebSocket connections again", without_password(self._url))
                self._http_until = 0.0
            return self._websocket

    def _fall_back(self, error: Exception) -> HttpCarrier:
        if not self._http_until:
            _log.warning("%s takes no WebSocket connections (%s): using HTTP", without_password(self._url), error)
        self._http_until = self._clock.monotonic() + HTTP_SECONDS
        return self._http

    async def _answers_http(self) -> bool:
        try:
            await self._http.request(HttpRequest("GET", "/healthz", None, {}, {}, 0.0, HEALTH_SECONDS))
        except WrongAnswer:  # a proxy may let only other paths through
            return True
        except ConnectionError:
            return False
        return True

    async def close(self) -> None:
        self._openings.interrupt()
        async with self._opening:
            if self._websocket is not None:
                await self._websocket.close()
