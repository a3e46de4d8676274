"""What a messaging client has received and its program has not taken yet. No I/O."""

import asyncio
from collections import deque
from typing import TypeVar

import msgspec
from msgspec import Struct, structs

from shardyard.model import InvalidCall, InvalidValue, Malformed
from shardyard.wire.messaging import (
    CLOCKS_MS,
    CaughtUp,
    Deliver,
    Gap,
    IsTyping,
    IsTypingIn,
    Marked,
    Membership,
    Message,
    Position,
    Posted,
    Presence,
    Welcome,
)

Event = Message | Posted | Marked | IsTyping | IsTypingIn | Presence | Membership | CaughtUp | Gap
"""What a program gets: messages, posts to channels and marks, which are durable and come once; who is typing, who is
online, and that the user has joined or left a channel, which come only while there is a connection; that the client has
got all it missed; and that something it missed can't be delivered any more."""

_Key = str | tuple[str, str]
"""The id of a message or a mark; channel and id of a post."""
K = TypeVar("K", bound=_Key)

KNOWN_IDS = 2000
"""How many messages, posts and marks are remembered, to drop those that come again."""
MS_SHIFT = 22
"""Above these bits an id has the milliseconds of its moment."""


class ResumePoint(Struct, frozen=True, omit_defaults=True):
    """Where a client goes on after its connection or its process has ended."""

    device: str
    number: int
    """Of what it sends next. Not below it, and above all that it has sent."""
    position: Position | None = None
    last: str | None = None
    sent: str | None = None
    copies: tuple[str, ...] = ()
    """What of the user's own messages the server may deliver again, because that is not found by the position."""

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def parse(cls, text: str) -> "ResumePoint":
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, TypeError, UnicodeEncodeError):
            raise InvalidValue("resume", text, "what `position` of a messaging client was") from None


class Inbox:
    """A queue of events, each with the point to resume from after it. Drops what was received before.

    It is full from `limit` events on. It still takes what is put into it: who reads from the network asks first.
    """

    def __init__(self, user: str, limit: int, start: ResumePoint) -> None:
        self.received = self.taken = start
        """After everything that was received, and after what the program has taken."""
        self.has_room, self.is_half_empty = asyncio.Event(), asyncio.Event()
        self.has_room.set()
        self.is_half_empty.set()
        self._user = user
        self._limit = limit
        self._queue: deque[tuple[Event, ResumePoint]] = deque()
        self._known: dict[_Key, None] = dict.fromkeys(start.copies)
        self._copies: dict[str, None] = dict.fromkeys(start.copies)
        """Those that did not come from the partition, and that the program has taken."""
        self._changed = asyncio.Event()
        self._end: BaseException | None = None
        self._is_awaited = False
        self._partition = 0
        """Of the connection."""
        self._delivered = start.position
        """After the last message, post or mark of the partition."""
        self._acknowledged: str | None = None

    # From the server

    def welcome(self, welcome: Welcome) -> None:
        """A connection was opened. The position of a client that resumes stays as it is until something is delivered:
        what it missed comes after this."""
        self._partition = welcome.position.partition
        if self.received.position is None:
            self._advance(structs.replace(self.received, position=welcome.position))
        if self.received.sent is None and welcome.sent is not None:
            self._advance(structs.replace(self.received, sent=welcome.sent))
        if welcome.resume == "lost":
            self.put(Gap("what was missed can't be found any more, or not all of it: load the history"))

    def deliver(self, delivered: Deliver) -> None:
        """Take messages, posts and marks. `Malformed` if one has an id that is none."""
        for entry in delivered.entries:
            point = self.received
            if entry.offset is not None:
                after = Position(self._partition, delivered.epoch, entry.offset + 1)
                if self._is_behind(after):
                    continue
                point = structs.replace(point, position=after)
                self._delivered = after
            key: _Key = entry.id
            if isinstance(entry, Posted):  # it has the id of an event of its channel, by which nobody can resume
                key = entry.channel, entry.id
            elif entry.offset is not None:
                point = structs.replace(point, last=entry.id)
            if not isinstance(entry, Posted) and entry.sender == self._user:
                point = structs.replace(point, sent=_newer(point.sent, entry.id))
            if key in self._known:
                self._advance(point)
            else:
                _add(self._known, key)
                self.received = point
                self.put(entry)

    def _is_behind(self, position: Position) -> bool:
        """Whether what ends there was delivered before."""
        last = self._delivered
        return (
            last is not None
            and (position.partition, position.epoch) == (last.partition, last.epoch)
            and position.offset <= last.offset
        )

    def put(self, event: Event) -> None:
        """Queue an event that is the last of what was received."""
        self._queue.append((event, self.received))
        self._note_length()

    def adopt(self, position: Position) -> None:
        """Everything before this position was received, and everything else that the server had for the client."""
        sent = self.received.sent if self._acknowledged is None else _newer(self.received.sent, self._acknowledged)
        self._advance(structs.replace(self.received, position=position, sent=sent))

    def note_sent(self, id_: str) -> None:
        """This client has sent something. It counts as its user's newest message only once everything else that the
        server had before it was received: acknowledgements overtake messages."""
        self._acknowledged = _newer(self._acknowledged, id_)

    def end(self, error: BaseException | None) -> None:
        """Nothing more will come. The program gets the error after what is still in the queue."""
        self._end = error or StopAsyncIteration()
        self._changed.set()

    def _advance(self, point: ResumePoint) -> None:
        self.received = point
        if self._queue:
            self._queue[-1] = self._queue[-1][0], point
        else:
            self.taken = point

    def resume_point(self, number: int) -> ResumePoint:
        """Where a client goes on that has what the program has taken. `number`: of what it sends next."""
        newest = max(map(int, self._copies), default=0) >> MS_SHIFT
        copies = tuple(id_ for id_ in self._copies if int(id_) >> MS_SHIFT >= newest - CLOCKS_MS)
        return structs.replace(self.taken, number=number, copies=copies)

    # To the program

    async def next(self) -> Event:
        """Wait for the next event. `StopAsyncIteration` once the client is closed."""
        if self._is_awaited:
            raise InvalidCall("another task waits for the next event: read events in one task, and pass them on")
        self._is_awaited = True
        try:
            while not self._queue:
                if self._end is not None:
                    raise self._end
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._is_awaited = False
        event, self.taken = self._queue.popleft()
        if isinstance(event, Message | Marked) and event.offset is None:
            _add(self._copies, event.id)
        self._note_length()
        return event

    def _note_length(self) -> None:
        length = len(self._queue)
        self._changed.set()
        for event, is_set in (self.has_room, length < self._limit), (self.is_half_empty, length <= self._limit // 2):
            event.set() if is_set else event.clear()


def _add(known: dict[K, None], key: K) -> None:
    known[key] = None
    if len(known) > KNOWN_IDS:
        del known[next(iter(known))]


def _newer(known: str | None, id_: str) -> str:
    try:
        return id_ if known is None or int(id_) > int(known) else known
    except ValueError:
        raise Malformed("frame", f"{id_!r} is not an id") from None
