"""The nodes that a client is connected to: its home, with fail-over, and the owners of the queues that it reads."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import aiohttp

from shardyard.client.brokers import BACKOFF, FAILOVER_SECONDS, server_address
from shardyard.client.carrier import RESPONSE_SECONDS
from shardyard.client.sharding.connection import Connection, connect
from shardyard.model import Closed, InvalidCall, Unreachable
from shardyard.model.url import without_password
from shardyard.runtime.clock import Clock
from shardyard.runtime.retry import retry

_log = logging.getLogger(__name__)

T = TypeVar("T")
CONNECT_SECONDS = 5.0
"""For a connection to a node, which may have died a moment ago."""


class Nodes:
    """Connections to nodes by their addresses, opened when they are first used. The home is the node that answered last
    of those that the client was given; when it is out of reach, another one becomes the home."""

    def __init__(self, urls: Sequence[str], token: str | None, retry_seconds: float, clock: Clock) -> None:
        self.clock = clock
        self.retry_seconds = retry_seconds
        self.response_seconds = FAILOVER_SECONDS if len(urls) > 1 else RESPONSE_SECONDS
        self._urls = list(urls)
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._at = random.randrange(len(self._urls))
        self._session: aiohttp.ClientSession | None = None
        self._connections: dict[str, Connection] = {}
        self._openings: dict[str, asyncio.Lock] = {}
        self._is_closed = False

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        await asyncio.gather(*(connection.close() for connection in self._connections.values()))
        if self._session is not None:
            await self._session.close()

    async def get(self, address: str) -> Connection:
        """The connection to a node. `ConnectionError` if it can't be reached."""
        if self._session is None:
            raise InvalidCall("the client is not open: enter it by `async with` first")
        if self._is_closed:
            raise Closed("the client")
        address = server_address(address, "node")
        async with self._openings.setdefault(address, asyncio.Lock()):
            found = self._connections.get(address)
            if found is not None and not found.is_lost:
                return found
            if found is not None:
                del self._connections[address]
                await found.close()
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    opened = await connect(self._session, address)
            except TimeoutError:
                raise ConnectionError("no response in time") from None
            self._connections[address] = opened
            return opened

    async def home(self) -> Connection:
        """The connection to the home. If it can't be reached, that is `ConnectionError`, and the next node is the home
        from now on."""
        at = self._at
        try:
            return await self.get(self._urls[at % len(self._urls)])
        except ConnectionError as error:
            self._fail_over(at, error)
            raise

    def _fail_over(self, at: int, error: ConnectionError) -> None:
        if self._at == at:  # otherwise a concurrent call has done it
            self._at += 1
            _log.debug("%s can't be reached: %s", without_password(self._urls[at % len(self._urls)]), error)

    async def run(self, call: Callable[[Connection], Awaitable[T]]) -> T:
        """The result of a call to the home, which may be repeated: while no node can be reached, or the node says that
        the call may succeed later, it is retried with back-off."""
        deadline = self.clock.monotonic() + self.retry_seconds

        async def try_nodes() -> T:
            last: ConnectionError | None = None
            for _ in self._urls:
                at = self._at
                try:
                    return await call(await self.home())
                except ConnectionError as error:
                    self._fail_over(at, error)
                    last = error
                if self.clock.monotonic() >= deadline:
                    break
            names = [without_password(url) for url in self._urls]
            raise Unreachable(names, self.retry_seconds, str(last)) from None

        return await retry(try_nodes, clock=self.clock, deadline=deadline, backoff=BACKOFF)
