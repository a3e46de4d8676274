"""What a messaging client has sent, or is to send, and what is not answered yet."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakValueDictionary

from shardyard.log.sequences import SequenceWindow
from shardyard.model import InvalidCall, Malformed, NotAcknowledged, ShardyardError, TooLarge
from shardyard.runtime.clock import Clock, timeout
from shardyard.runtime.retry import Backoff
from shardyard.wire import messaging as wire
from shardyard.wire.errors import ErrorBody, error_of

Answer = wire.Sent | wire.Refused | wire.History | wire.Chats | wire.Done | wire.Posts | wire.Channels
A = TypeVar("A", wire.Sent, wire.History, wire.Chats, wire.Done, wire.Posts, wire.Channels)

MAX_UNANSWERED = 32
"""Messages, marks and posts, as a server allows."""
BACKOFF = Backoff(first=0.05, longest=2.0)
"""Before something that was refused for now is sent again."""
NOT_CONNECTED = "there is no connection"
NO_ANSWER = "no answer"
WAITING = "what was to be sent before it was not acknowledged"


@dataclass(slots=True)
class _Call:
    number: int
    message: bytes
    is_urgent: bool = True
    """The program waits for the answer."""
    is_post: bool = False
    answer: asyncio.Future[Answer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_sent: bool = False


class Calls:
    """Numbers calls, sends them now and again on each new connection until they are answered, and retries those that
    are refused for now.

    At most `MAX_UNANSWERED` messages, marks and posts are in flight; others wait. Those of one lane are sent one after
    the other, each when the one before it is durable: if one is refused for now, no later one overtakes it.
    """

    def __init__(self, first_number: int, format_: wire.Format, clock: Clock) -> None:
        self.waiting = asyncio.Event()
        """Set while the program waits for an answer."""
        self._format = format_
        self._clock = clock
        self._window = SequenceWindow(first_number)
        self._questions = itertools.count(1)
        self._places = asyncio.Semaphore(MAX_UNANSWERED)
        self._lanes: WeakValueDictionary[object, asyncio.Lock] = WeakValueDictionary()
        self._calls: dict[int, _Call] = {}
        self._send: Callable[[bytes], None] | None = None
        self._end: ShardyardError | None = None

    @property
    def next_number(self) -> int:
        return self._window.next

    async def store(
        self,
        what: str,
        frame: Callable[[int], wire.ClientFrame],
        lane: object,
        seconds: float | None,
        number: int | None = None,
        *,
        is_post: bool = False,
    ) -> wire.Sent:
        """Send a message, a mark or a post, and wait until it is durable. `number`: of an earlier call, to repeat it.
        Without a time limit it is not urgent: it is no reason to skip messages that the program does not take."""
        call: _Call | None = None
        refusal: list[ShardyardError] = []
        self._check_open()
        try:
            async with timeout(self._clock, seconds), self._turn(lane), self._places, self._numbered(number) as given:
                call = self._new(given, frame(given), is_urgent=seconds is not None)
                call.is_post = is_post
                return await self._answered(call, wire.Sent, refusal)
        except TimeoutError:
            if refusal:
                raise refusal[0] from None
            why = WAITING if call is None else NO_ANSWER if call.is_sent else NOT_CONNECTED
            sent_as = call.number if call is not None and call.is_sent else number
            raise NotAcknowledged(what, seconds or 0.0, why, sent_as) from None

    async def ask(
        self,
        what: str,
        frame: Callable[[int], wire.ClientFrame],
        kind: type[A],
        seconds: float,
        lane: object | None = None,
    ) -> A:
        """Ask for something that may be done twice, and wait for the answer. With a lane, it is asked when what was
        asked before it in this lane is answered."""
        self._check_open()
        number = next(self._questions)  # apart from those of messages, which start at a time
        call, refusal = self._new(number, frame(number)), list[ShardyardError]()
        why = WAITING
        try:
            async with timeout(self._clock, seconds), contextlib.AsyncExitStack() as stack:
                if lane is not None:
                    await stack.enter_async_context(self._turn(lane))
                why = NOT_CONNECTED
                return await self._answered(call, kind, refusal)
        except TimeoutError:
            if refusal:
                raise refusal[0] from None
            raise NotAcknowledged(what, seconds, NO_ANSWER if call.is_sent else why, None) from None

    # The connection

    def connected(self, send: Callable[[bytes], None]) -> None:
        """Send everything that is not answered, in the order of its numbers, and from now on what comes."""
        self._send = send
        for _, call in sorted(self._calls.items()):
            self._write(call)

    def disconnected(self) -> None:
        self._send = None

    def is_post(self, number: int) -> bool:
        """Whether the call with this number is in flight, and a post."""
        call = self._calls.get(number)
        return call is not None and call.is_post

    def answered(self, number: int, answer: Answer) -> None:
        call = self._calls.get(number)
        if call is not None and not call.answer.done():
            call.answer.set_result(answer)

    def end(self, error: ShardyardError) -> None:
        """All calls fail with this error from now on."""
        self._end = error
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(error)

    # One call

    async def _answered(self, call: _Call, kind: type[A], refusal: list[ShardyardError]) -> A:
        """The answer to a call. While it waits to be sent again, `refusal` has the error."""
        for attempt in itertools.count(1):
            answer = await self._answer(call)
            if isinstance(answer, kind):
                return answer
            if not isinstance(answer, wire.Refused):
                raise Malformed("answer", f"expected {kind.__name__}, got {type(answer).__name__}")
            error = error_of(ErrorBody(answer.code, answer.message))
            if not answer.retry:
                raise error
            refusal[:] = [error]
            await self._clock.sleep(BACKOFF.delay(attempt))
            refusal.clear()
            call.answer = asyncio.get_running_loop().create_future()
        raise AssertionError("unreachable")

    async def _answer(self, call: _Call) -> Answer:
        self._check_open()
        self._calls[call.number] = call
        self._note_waiting()
        self._write(call)
        try:
            return await call.answer
        finally:
            del self._calls[call.number]
            self._note_waiting()

    def _note_waiting(self) -> None:
        if any(call.is_urgent for call in self._calls.values()):
            self.waiting.set()
        else:
            self.waiting.clear()

    def _new(self, number: int, frame: wire.ClientFrame, *, is_urgent: bool = True) -> _Call:
        message = wire.encode(frame, self._format)
        if len(message) > wire.MAX_FRAME_BYTES:
            raise TooLarge("message in bytes, as it is sent,", len(message), wire.MAX_FRAME_BYTES)
        return _Call(number, message, is_urgent)

    def _write(self, call: _Call) -> None:
        if self._send is not None:
            self._send(call.message)
            call.is_sent = True

    def _check_open(self) -> None:
        if self._end is not None:
            raise self._end

    @contextlib.asynccontextmanager
    async def _turn(self, lane: object) -> AsyncIterator[None]:
        lock = self._lanes.get(lane)
        if lock is None:
            lock = self._lanes[lane] = asyncio.Lock()
        async with lock:
            yield

    @contextlib.asynccontextmanager
    async def _numbered(self, number: int | None) -> AsyncIterator[int]:
        if number is not None:
            if number in self._calls:
                raise InvalidCall(f"number {number} is in flight: wait for its answer")
            yield number
            return
        async with self._window.sequence() as given:
            yield given
