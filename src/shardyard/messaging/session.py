"""One connection of a user's client: what it sends, and what waits to be sent to it, over any transport."""

import asyncio
import itertools
import logging
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

from shardyard.messaging.client_sends import ClientSends
from shardyard.messaging.items import Deliver, Item
from shardyard.messaging.outgoing import Outgoing, Sendable, outgoing_of
from shardyard.messaging.tokens import TokenExpired
from shardyard.model import Malformed, RetryLater, ShardyardError, WrongToken
from shardyard.runtime.metrics import CLIENTS_CUT, DELIVERED_ENTRIES
from shardyard.wire import messaging as wire
from shardyard.wire.close_codes import CloseCode
from shardyard.wire.errors import error_body

if TYPE_CHECKING:
    from shardyard.messaging.owned import OwnedPartition
    from shardyard.messaging.server import MessagingServer

_log = logging.getLogger(__name__)

ENTRIES_PER_FRAME = 200
BYTES_PER_FRAME = 128 * 1024
"""After which a frame gets no more entries."""
MOST_MISSED = 10_000
"""Entries that a client gets when it resumes. One that missed more loads the history."""
REQUESTS = 4
"""Requests for history, chats, posts and channels of one client at a time."""


Question = wire.GetHistory | wire.GetChats | wire.GetPosts | wire.GetChannels


class Connection(Protocol):
    """The transport of a session."""

    def send(self, message: bytes) -> None: ...
    def close(self, code: CloseCode, reason: str) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class State(IntEnum):
    """How far a session has come."""

    NEW = 0
    """Its `hello` has not come."""
    OPENING = 1
    """What it missed is being looked up. Meanwhile new entries wait."""
    OPEN = 2
    CLOSED = 3


class Session:
    """The state of a connection, from its opening to its end.

    What is for the client goes to a queue, gets its sequence number there, and is sent at the end of the event loop's
    turn, all in one frame. While the client does not read, the queue grows up to a limit.
    """

    __slots__ = (
        "_answers",
        "_at",
        "_connection",
        "_format",
        "_is_dirty",
        "_owes_caught_up",
        "_queue",
        "_requests",
        "_sends",
        "_server",
        "_servers",
        "_tokens",
        "device",
        "expires_at",
        "is_paused",
        "opened_at",
        "owned",
        "paused_at",
        "seen_at",
        "seq",
        "state",
        "user",
        "watched",
    )

    def __init__(self, server: "MessagingServer", connection: Connection, format_: wire.Format) -> None:
        self.user = ""
        self.device = ""
        self.owned: OwnedPartition | None = None
        """The partition that it belongs to, once it is attached."""
        self.state = State.NEW
        self.seq = 0
        """How many entries were queued."""
        self.expires_at = 0.0
        """Of its token, in seconds since 1970."""
        self.opened_at = self.seen_at = server.now
        """When something last came from the client, on the monotonic clock."""
        self.is_paused = False
        """The client does not read as fast as it is sent to."""
        self.paused_at = 0.0
        self.watched: frozenset[str] = frozenset()
        """Users whose presence it watches."""
        self._server = server
        self._connection = connection
        self._format = format_
        self._queue: list[Item] | None = None
        self._answers: list[object] | None = None
        self._is_dirty = False
        self._sends: ClientSends | None = None
        """Most clients send seldom: it is made when it is needed."""
        self._owes_caught_up = False
        """It has not got everything yet that it had missed."""
        self._requests = 0
        self._servers: tuple[str, ...] = ()
        """The addresses that the client was told."""
        self._tokens = float(server.config.burst)
        self._at = self.seen_at
        """When the rate's tokens were last counted."""

    @property
    def is_open(self) -> bool:
        return self.state is State.OPEN

    @property
    def is_closed(self) -> bool:
        return self.state is State.CLOSED

    # What comes from the client

    def receive(self, message: bytes) -> None:
        """Process a WebSocket message."""
        self.seen_at = self._server.now
        try:
            frames = wire.decode_from_client(message, self._format)
        except Malformed as error:
            self.close(CloseCode.MALFORMED, str(error))
            return
        for frame in frames:
            if self.state is State.CLOSED:
                return
            self._handle(frame)
        self._count(len(frames))

    def alive(self) -> None:
        """The client has sent a ping, or answered one."""
        self.seen_at = self._server.now
        self._count(1)

    def _handle(self, frame: wire.ClientFrame) -> None:
        if isinstance(frame, wire.Hello):
            self._hello(frame)
        elif self.state is State.NEW:
            self.close(CloseCode.NO_HELLO, "the first frame must be hello")
        elif isinstance(frame, Sendable):
            outgoing = outgoing_of(frame)
            if isinstance(outgoing, wire.Refused):
                self.answer(outgoing)
            else:
                self.sends.submit(outgoing)
        elif isinstance(frame, wire.Typing | wire.TypingIn):
            self._server.typing(self, frame)
        elif isinstance(frame, wire.Watch):
            self._server.presence.watch(self, frozenset(frame.users))
        elif isinstance(frame, wire.Ping):
            self._pong()
        else:
            self._request(frame)

    def _hello(self, frame: wire.Hello) -> None:
        if self.state is not State.NEW:
            self.close(CloseCode.NO_HELLO, "only the first frame is hello")
            return
        try:
            self.user, self.expires_at = self._server.tokens.check(frame.token)
        except TokenExpired as error:
            self.close(CloseCode.TOKEN_EXPIRED, str(error))
            return
        except WrongToken:
            self.close(CloseCode.WRONG_TOKEN, "the access token is not valid: get one from /v1/session")
            return
        self.device = frame.device
        self.state = State.OPENING
        self._server.admit(self, frame)

    def _pong(self) -> None:
        """Everything before the position was queued before this answer."""
        position, servers = None, self._server.addresses.current()
        if self.state is State.OPEN and self.owned is not None:
            self.flush()
            if not self._queue:
                position = self.owned.position(self.owned.tail.end)
        self.answer(wire.Pong(position, () if servers is self._servers else servers))
        self._servers = servers

    def _count(self, frames: int) -> None:
        """Read more slowly from a client that sends more than its rate, or more than is stored."""
        now, config = self._server.now, self._server.config
        self._tokens = min(self._tokens + (now - self._at) * config.rate, config.burst) - frames
        self._at = now
        if self._tokens < 0 or self._unanswered >= config.unanswered:
            wait = max(-self._tokens / config.rate, 0.01)
            self.seen_at = now + wait  # it is not silent: it is not read
            self._connection.pause_reading()
            asyncio.get_running_loop().call_later(wait, self._read_again)

    @property
    def _unanswered(self) -> int:
        return 0 if self._sends is None else self._sends.unanswered

    def _read_again(self) -> None:
        """Read from the client again, unless it still sends too much, or does not read itself."""
        if self.state is State.CLOSED or self.is_paused:
            return
        self._count(0)
        if self._tokens >= 0 and self._unanswered < self._server.config.unanswered:
            self._connection.resume_reading()

    # Sending to others

    @property
    def sends(self) -> ClientSends:
        """What the client sends that is being stored."""
        if self._sends is None:
            self._sends = ClientSends(self)
        return self._sends

    def store(self, outgoing: Outgoing) -> None:
        """Begin to store it. `sends` gets the outcome."""
        if isinstance(outgoing.content, wire.Post | wire.Join | wire.Leave):
            self._server.start(self._store_in_channel(outgoing, outgoing.content))
        else:
            self._server.sending.add(self, outgoing)

    async def _store_in_channel(self, outgoing: Outgoing, content: wire.Post | wire.Join | wire.Leave) -> None:
        try:
            answer = await self._server.store_in_channel(self, content)
        except Exception as error:  # noqa: BLE001 nobody awaits this
            self.sends.failed(outgoing, error)
        else:
            self.sends.stored(outgoing, answer)

    @property
    def is_storing(self) -> bool:
        return self._sends is not None and self._sends.is_storing

    # Asking for history

    def _request(self, frame: Question) -> None:
        if self._requests >= REQUESTS:
            text = f"at most {REQUESTS} requests at a time"
            self.answer(wire.Refused(frame.number, "too_many_requests", text, retry=True))
            return
        self._requests += 1
        self._server.start(self._answer_request(frame))

    async def _answer_request(self, frame: Question) -> None:
        try:
            self.answer(await self._server.look_up(self, frame))
        except ShardyardError as error:
            body = error_body(error)
            self.answer(wire.Refused(frame.number, body.code, body.message, retry=isinstance(error, RetryLater)))
        except Exception:  # noqa: BLE001 nobody awaits this
            _log.exception("a request of %s failed", self.user)
            self.answer(wire.Refused(frame.number, "internal", "the request failed: see the server's log"))
        finally:
            self._requests -= 1

    # What goes to the client

    def deliver(self, item: Item) -> None:
        """Put an entry on the queue."""
        if self.state is State.CLOSED:
            return
        if self._queue is None:
            self._queue = []
        self._queue.append(item)
        self.seq += 1
        most = self._server.config.queued
        if self._owes_caught_up:  # what it missed is waiting, too
            most += MOST_MISSED
        if len(self._queue) > most and (self.is_paused or self.state is State.OPENING):
            CLIENTS_CUT.add()
            self.close(CloseCode.NOT_READING, f"{len(self._queue)} entries were waiting for this client")
            return
        self._mark_dirty()

    def answer(self, frame: object) -> None:
        """Send a frame at the end of the turn."""
        if self.state is State.CLOSED:
            return
        if self._answers is None:
            self._answers = []
        self._answers.append(frame)
        self._mark_dirty()

    def notify(self, frame: wire.IsTyping | wire.IsTypingIn | wire.Presence) -> None:
        """Send a frame that is only worth something now."""
        if not self.is_paused:
            self.answer(frame)

    def _mark_dirty(self) -> None:
        if not self._is_dirty:
            self._is_dirty = True
            self._server.flush_later(self)

    def flush(self) -> None:
        """Send what is waiting: answers first, then entries, as far as the client reads them."""
        self._is_dirty = False
        if self.state is State.CLOSED:
            return
        answers, self._answers = self._answers, None
        if answers:
            frames = answers[0] if len(answers) == 1 else answers
            self._connection.send(wire.encode(frames, self._format))
        if self.state is not State.OPEN or self.owned is None:
            return
        while (queue := self._queue) and not self.is_paused:
            entries, size = [], 0
            for item in itertools.islice(queue, ENTRIES_PER_FRAME):
                entries.append(item.encoded(self._format))
                size += memoryview(entries[-1]).nbytes
                if size > BYTES_PER_FRAME:
                    break
            frame = Deliver(self.seq - len(queue), self.owned.log_epoch, entries)
            self._queue = queue[len(entries) :] or None
            self._connection.send(wire.encode(frame, self._format))
            DELIVERED_ENTRIES.add(len(entries))
        if self._owes_caught_up and not self._queue:
            self._owes_caught_up = False
            self.answer(wire.CaughtUp(self.owned.position(self.owned.tail.end)))

    def waiting_copies(self) -> set[int]:
        """The ids of copies that were handed over while it was opening."""
        return {item.entry.id for item in self._queue or () if item.offset is None}

    def first_offset(self, missed: list[Item], end: int) -> int:
        """The offset of the first entry that the client gets when it opens; `end` if there is none."""
        offsets = (item.offset for item in (*missed, *(self._queue or ())) if item.offset is not None)
        return next(offsets, end)

    def open(self, welcome: wire.Welcome, missed: list[Item], gap: str | None) -> None:
        """Welcome the client, and send what it missed before what has come since."""
        self.state = State.OPEN
        self._servers = welcome.servers
        since, self._queue = self._queue or [], None
        self.answer(welcome)
        if gap is not None:
            self.answer(wire.Gap(gap))
        self._queue = [*missed, *since] or None
        self.seq += len(missed)
        self._owes_caught_up = True
        self.flush()
        if self._sends is not None:
            self._sends.start()

    def pause_writing(self) -> None:
        """The client does not read as fast as it is sent to."""
        self.is_paused = True
        self.paused_at = self._server.now
        self._server.paused.add(self)
        self._connection.pause_reading()  # or the answers to what it asks would pile up

    def resume_writing(self) -> None:
        self.is_paused = False
        self._server.paused.discard(self)
        if self.state is not State.CLOSED:
            self.flush()
            self._read_again()
            if self.watched:  # it was told of no changes meanwhile
                self._server.presence.watch(self, self.watched)

    # The end

    def send_elsewhere(self, address: str | None, after: float, code: CloseCode) -> None:
        """Tell the client which server is right, and close the connection."""
        if self.state is not State.CLOSED:
            self.answer(wire.Elsewhere(address, after))
            self.flush()
            self.close(code, address or "")

    def close(self, code: CloseCode, reason: str) -> None:
        """Close the connection."""
        if self.state is not State.CLOSED:
            if self._answers:
                self.flush()
            self._connection.close(code, reason)
            self.closed()

    def closed(self) -> None:
        """The connection has ended."""
        if self.state is State.CLOSED:
            return
        self.state = State.CLOSED
        self._queue = self._answers = None
        self._server.paused.discard(self)
        self._server.leave(self)
