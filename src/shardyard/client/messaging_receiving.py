"""What a messaging client does with the frames of one connection."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from shardyard.client.messaging_calls import Answer, Calls
from shardyard.client.messaging_connection import Connection
from shardyard.client.messaging_inbox import Event, Inbox
from shardyard.model import Malformed
from shardyard.wire import messaging as wire

_log = logging.getLogger(__name__)

MAX_AFTER_SECONDS = 60.0
"""The longest time for which a server can ask to wait before going elsewhere."""


class GoElsewhere(Exception):
    """Raised when another server is the right one."""

    def __init__(self, frame: wire.Elsewhere) -> None:
        self.address = frame.address
        self.after = min(max(frame.after, 0.0), MAX_AFTER_SECONDS)


class ReadAgain(Exception):
    """Raised when the program takes messages again, after some were skipped: they are delivered on a new connection."""


class Receiving:
    """Puts what is received into the inbox, and gives answers to their calls.

    While the inbox is full, nothing is read, and so the server stops sending. If the program waits for an answer then,
    that would never come, because it is behind messages that the program does not take. So those are skipped: they
    are read and dropped without moving the position, and once the program has taken half of the inbox, `ReadAgain`
    asks for a new connection, on which they come again.
    """

    def __init__(
        self,
        connection: Connection,
        frames: AsyncIterator[wire.ServerFrame],
        inbox: Inbox,
        calls: Calls,
        learn: Callable[[Sequence[str]], None],
    ) -> None:
        """`learn` gets the addresses of servers."""
        self.pauses = 0
        """How often nothing was read because the inbox was full."""
        self.is_paused = False
        self._connection = connection
        self._frames = frames
        self._inbox = inbox
        self._calls = calls
        self._learn = learn
        self._count = 0
        """Messages, marks and posts that were received on this connection."""
        self._skipping = asyncio.Event()

    async def run(self) -> None:
        """Until the connection ends."""
        restart = asyncio.create_task(self._restart_after_skipping(), name="skipped messages")
        try:
            async for frame in self._frames:
                await self._handle(frame)
        finally:
            restart.cancel()
            await asyncio.gather(restart, return_exceptions=True)
        if self._skipping.is_set() and self._inbox.is_half_empty.is_set():
            raise ReadAgain

    async def _handle(self, frame: wire.ServerFrame) -> None:
        match frame:
            case wire.Deliver():
                await self._deliver(frame)
            case wire.IsTyping() | wire.IsTypingIn() | wire.Presence() | wire.Membership() | wire.Gap():
                await self._put(frame)
            case wire.CaughtUp():
                if await self._put(frame):
                    self._inbox.adopt(frame.position)
            case wire.Pong():
                self._learn(frame.servers)
                if frame.position is not None and not self._skipping.is_set():
                    self._inbox.adopt(frame.position)
            case wire.Elsewhere():
                raise GoElsewhere(frame)
            case wire.Welcome():
                raise Malformed("frame", "welcome comes once")
            case _:
                self._answer(frame)

    async def _deliver(self, frame: wire.Deliver) -> None:
        if frame.seq != self._count:
            raise ConnectionError(f"{frame.seq} messages were sent and {self._count} received: some are missing")
        self._count += len(frame.entries)
        if await self._has_room():
            self._inbox.deliver(frame)

    def _answer(self, frame: Answer) -> None:
        if frame.number is None:
            _log.warning("the messaging server refused something: %s", frame.message)
            return
        if isinstance(frame, wire.Sent) and not self._skipping.is_set() and not self._calls.is_post(frame.number):
            self._inbox.note_sent(frame.id)
        self._calls.answered(frame.number, frame)

    async def _put(self, event: Event) -> bool:
        has_room = await self._has_room()
        if has_room:
            self._inbox.put(event)
        return has_room

    async def _has_room(self) -> bool:
        """Whether the inbox takes more. Waits for that unless messages are skipped."""
        if not self._skipping.is_set() and not self._inbox.has_room.is_set():
            self.pauses, self.is_paused = self.pauses + 1, True
            try:
                await _one_of(self._inbox.has_room, self._calls.waiting)
            finally:
                self.is_paused = False
            if not self._inbox.has_room.is_set():
                self._skipping.set()
        return not self._skipping.is_set()

    async def _restart_after_skipping(self) -> None:
        await self._skipping.wait()
        await self._inbox.is_half_empty.wait()
        await self._connection.close()


async def _one_of(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
