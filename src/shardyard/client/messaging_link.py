"""Keeps a messaging client connected to the server of its user: finds it, resumes there, and starts again when the
connection ends."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from shardyard.client.messaging_calls import Calls
from shardyard.client.messaging_connection import Connection, connect
from shardyard.client.messaging_inbox import Inbox
from shardyard.client.messaging_receiving import GoElsewhere, ReadAgain, Receiving
from shardyard.model import InvalidCall, Malformed, RetryLater, WrongToken
from shardyard.runtime.clock import Clock, timeout
from shardyard.runtime.retry import Backoff
from shardyard.wire import messaging as wire
from shardyard.wire.close_codes import Advice, CloseCode, advice

_log = logging.getLogger(__name__)

BACKOFF = Backoff(first=0.1, longest=5.0)
"""Before a new connection."""
STABLE_SECONDS = 5.0
"""The back-off starts anew after a connection that lasted this long."""
WELCOME_SECONDS = 45.0
PING_SECONDS = 20.0
SILENCE_SECONDS = 10.0
"""A connection is lost if nothing is received for this long after a ping."""
EXPIRY_SECONDS = 10.0
"""A session that expires sooner is not used for a new connection."""
HOPS = 2
"""How often in a row a client goes elsewhere without back-off."""


class Link:
    """The connection, and what happens with the frames that come on it."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        new_session: Callable[[], Awaitable[wire.SessionGranted]],
        learn: Callable[[Sequence[str]], None],
        inbox: Inbox,
        calls: Calls,
        format_: wire.Format,
        clock: Clock,
    ) -> None:
        """`learn` gets the addresses of servers that may be asked for a new session, too."""
        self.opened = asyncio.Event()
        """Set once the client was connected for the first time."""
        self.failure: Exception | None = None
        """Why there is no connection now."""
        self.watched: list[str] = []
        self._http = http
        self._new_session = new_session
        self._learn = learn
        self._session: wire.SessionGranted | None = None
        self._address: str | None = None
        """Where to connect next; None: where a new session says."""
        self._inbox = inbox
        self.calls = calls
        self._format = format_
        self._clock = clock
        self._connection: Connection | None = None

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    def send(self, frame: wire.ClientFrame) -> None:
        """Send a frame that is not answered. Without a connection it is dropped."""
        if self._connection is not None:
            self._connection.send(wire.encode(frame, self._format))

    async def run(self) -> None:
        """Stay connected. Raises only what would happen again and again: `Denied`, or `InvalidCall`."""
        failures = 0
        while True:
            started = self._clock.monotonic()
            try:
                await self._serve()
            except ReadAgain:
                continue
            except GoElsewhere as error:
                self._address = error.address
                failures = self._count(failures, started)
                if error.address is None or failures > HOPS:
                    self._note_failure(RetryLater("no server serves this user now"))
                delay = error.after if failures <= HOPS else max(error.after, BACKOFF.delay(failures))
            except (ConnectionError, RetryLater, Malformed) as error:
                self._note_failure(error)
                failures = self._count(failures, started)
                delay = BACKOFF.delay(failures)
            await self._clock.sleep(delay)

    def _note_failure(self, error: Exception) -> None:
        """Log the first reason why there is no connection."""
        if self.failure is None:
            level = logging.WARNING if self.opened.is_set() else logging.INFO
            _log.log(level, "not connected to a messaging server (%s): connecting again", error)
        self.failure = error

    def _count(self, failures: int, started: float) -> int:
        return 1 if self._clock.monotonic() - started >= STABLE_SECONDS else failures + 1

    # One connection

    async def _serve(self) -> None:
        """Connect, and handle what is received until the connection ends, which raises an error that says why."""
        connection = await self._connect()
        frames = connection.frames()
        pings: asyncio.Task[None] | None = None
        try:
            async with timeout(self._clock, WELCOME_SECONDS):
                welcome = await anext(frames, None)
            if isinstance(welcome, wire.Elsewhere):
                raise GoElsewhere(welcome)
            if isinstance(welcome, wire.Welcome):
                self._open(connection, welcome)
                receiving = Receiving(connection, frames, self._inbox, self.calls, self._learn)
                pings = asyncio.create_task(self._keep_alive(connection, receiving), name="pings to a messaging server")
                await receiving.run()
            elif welcome is not None:
                raise Malformed("frame", f"expected welcome, got {type(welcome).__name__}")
        except TimeoutError:
            raise ConnectionError(f"{connection.address}: no answer to the first frame") from None
        finally:
            self._connection = None
            self.calls.disconnected()
            if pings is not None:
                pings.cancel()
                await asyncio.gather(pings, return_exceptions=True)
            await connection.close()
        self._explain_end(connection)

    async def _connect(self) -> Connection:
        """A connection on which the first frame was sent."""
        session, address = self._session, self._address
        if session is None or address is None or session.expires_at < (self._clock.now() + EXPIRY_SECONDS) * 1000:
            session = self._session = await self._new_session()
            address = session.address
        self._address = None  # if it can't be reached, ask for another one
        connection = await connect(self._http, address, self._format)
        self._address = address
        point = self._inbox.received
        hello = wire.Hello(session.token, point.device, point.position, point.last, point.sent)
        connection.send(wire.encode(hello, self._format))
        return connection

    def _open(self, connection: Connection, welcome: wire.Welcome) -> None:
        self._inbox.welcome(welcome)
        self._learn(welcome.servers)
        self._connection = connection
        if self.watched:
            self.send(wire.Watch(self.watched))
        self.calls.connected(connection.send)
        if self.failure is not None:
            _log.info("connected to %s", connection.address)
        self.failure = None
        self.opened.set()

    def _explain_end(self, connection: Connection) -> None:
        """Raise what the code says with which the connection was closed."""
        code = connection.messages.close_code
        what = f"{connection.address} closed the connection with {connection.messages.close_reason}"
        if code == CloseCode.WRONG_TOKEN:
            raise WrongToken(connection.address, "an access token that its directory issued")
        if advice(code) is Advice.GIVE_UP:
            raise InvalidCall(f"{what}: see docs/messaging-protocol.md")
        if advice(code) is Advice.GO_ELSEWHERE:
            self._address = None
        if code == CloseCode.TOKEN_EXPIRED:
            self._session = None
        if code == CloseCode.REPLACED:
            what = f"another client has connected as device {self._inbox.received.device!r}: give each its own"
        raise ConnectionError(what)

    async def _keep_alive(self, connection: Connection, receiving: Receiving) -> None:
        """Ping, and close a connection on which nothing comes, unless that is because nothing was read."""
        while True:
            await self._clock.sleep(PING_SECONDS - SILENCE_SECONDS)
            before = connection.received, receiving.pauses
            connection.send(wire.encode(wire.Ping(), self._format))
            await self._clock.sleep(SILENCE_SECONDS)
            if (connection.received, receiving.pauses) == before and not receiving.is_paused:
                await connection.close()
