"""The calls of one client on its WebSocket connection."""

import asyncio
import logging
import time
import zlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from shardyard.groups.coordinator import MemberIdentity
from shardyard.model import EarlierPublishFailed, InvalidCall, Malformed, Overloaded, RetryLater, ShardyardError
from shardyard.queues.broker import Broker
from shardyard.runtime.metrics import ERRORS
from shardyard.server.answers import Answers
from shardyard.server.auth import check_publisher, check_token
from shardyard.server.bodies import HeldBytes
from shardyard.server.drain import Drain
from shardyard.server.limits import ServerLimits
from shardyard.server.measuring import CALL_METRICS
from shardyard.server.queues import calls
from shardyard.server.tunnel import Tunnel
from shardyard.server.websocket import WebSocketConnection
from shardyard.wire import frames, responses
from shardyard.wire.arrow import decode_arrow
from shardyard.wire.close_codes import CloseCode
from shardyard.wire.codec import encode, parse_partition
from shardyard.wire.errors import ErrorBody, error_body
from shardyard.wire.media import MAX_READ_SECONDS, MSGPACK
from shardyard.wire.records import records_of_columns

if TYPE_CHECKING:
    from shardyard.wire.settings import GroupSettings

_log = logging.getLogger(__name__)

CarryOut = Callable[[int, Any], Awaitable[frames.Answer | None]]
"""Carries out one kind of call."""

WAITING = (frames.Read, frames.Watch)
"""Calls that may wait for long, and hold no memory worth counting."""
MAX_REQUESTS = 16
"""Requests of the HTTP API in progress on a connection; further ones wait."""
WATCH_SECONDS = 3600.0
"""The longest wait for one change; then it waits again."""
MAX_REFUSED = 1000
"""How many numbers of refused publishes are kept, for those that are to be stored after them."""


class _Publishing(NamedTuple):
    """A publish in progress."""

    stored: "asyncio.Future[bool]"
    """Whether it was stored, or will never be. If not, it was refused for now."""
    before: "asyncio.Future[bool] | None"
    """The same of the one that it is to be stored after, if that is in progress."""


class Session:
    """Carries out calls, and sends the answers. All answers of one turn of the event loop travel in one message."""

    def __init__(
        self,
        connection: WebSocketConnection,
        broker: Broker,
        drain: Drain,
        tunnel: Tunnel,
        limits: ServerLimits,
        *,
        token: str | None,
        host: str,
    ) -> None:
        """`token` and `host`: of the client."""
        self._connection = connection
        self._broker = broker
        self._drain = drain
        self._tunnel = tunnel
        self._limits = limits
        self._token = token
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Future[None]] = {}
        self._bytes = 0
        """Of messages in progress."""
        self._answers = Answers(connection)
        self._waiting: set[int] = set()
        """The numbers of reads and watches in progress."""
        self._gets: set[int] = set()
        """The numbers of requests in progress that change nothing."""
        self._publishing: dict[int, _Publishing] = {}
        """By the number of the call."""
        self._refused: dict[int, None] = {}
        """Publishes that were refused for now, the latest last."""
        self._settings: tuple[GroupSettings | None, str] = (None, "")
        """The settings that a heartbeat met last, and their version."""
        self._requests = asyncio.Semaphore(MAX_REQUESTS)
        self._draining = False
        self._kinds: dict[type[Any], CarryOut] = {
            frames.Publish: self._publish,
            frames.Read: self._read,
            frames.Commit: self._commit,
            frames.Heartbeat: self._heartbeat,
            frames.Watch: self._watch,
            frames.Request: self._request,
            frames.Fence: self._set_fence,
            frames.Span: self._span,
            frames.Assignment: self._assignment,
        }

    # Messages

    def receive(self, message: bytes, held: HeldBytes) -> None:
        try:
            received = frames.decode_calls(message)
        except Malformed as error:
            held.release()
            ERRORS.series(error_body(error).code).add()
            _log.warning("a connection from %s was closed: %s", self._host, error)
            self._connection.close(CloseCode.MALFORMED, str(error))
            return
        size = len(message)
        self._bytes += size
        left = 0

        def finish(_: "asyncio.Future[None]") -> None:
            nonlocal left
            left -= 1
            if not left:
                self._release(size, held)

        for number, call in received:
            task = self._take(number, call)
            if task is not None and number not in self._waiting:
                left += 1
                task.add_done_callback(finish)
        if not left:
            self._release(size, held)
        elif self._bytes > self._limits.call_bytes:
            self._connection.set_busy(True)

    def _take(self, number: int, call: frames.Call | Malformed) -> "asyncio.Future[None] | None":
        """Start, cancel or refuse a call."""
        if isinstance(call, frames.Cancel):
            if number in self._waiting:
                self._tasks[number].cancel()
            return None
        if isinstance(call, Malformed):
            self._answer(number, _failed(call))
            return None
        return self._start(number, call)

    def _release(self, size: int, held: HeldBytes) -> None:
        held.release()
        was_busy = self._bytes > self._limits.call_bytes
        self._bytes -= size
        if was_busy and self._bytes <= self._limits.call_bytes and not self._draining:
            self._connection.set_busy(False)

    def _start(self, number: int, call: frames.Call) -> "asyncio.Future[None] | None":
        """Carry out a call in a task of its own, unless it is refused at once, or is an ordinary heartbeat or commit.
        Those take a task only if something has to be looked up, or to refuse them."""
        if number in self._tasks:
            error: ShardyardError = InvalidCall(f"call {number} is in progress: each call needs a number of its own")
        elif len(self._tasks) >= self._limits.calls:
            error = Overloaded("calls of this connection", self._limits.calls)
        elif isinstance(call, frames.Publish) and call.after in self._refused:
            error = EarlierPublishFailed()
        else:
            if isinstance(call, frames.Publish):
                # What it is stored after is an earlier call, never itself or one that waits for it.
                before = None if call.after is None else self._publishing.get(call.after)
                self._publishing[number] = _Publishing(self._loop.create_future(), before and before.stored)
                self._refused.pop(number, None)
            elif isinstance(call, WAITING):
                self._waiting.add(number)
            elif isinstance(call, frames.Request) and call.method == "GET":
                self._gets.add(number)
            elif (stored := self._start_without_task(number, call)) is not None:
                return stored
            task = self._tasks[number] = self._loop.create_task(self._run(number, call, time.perf_counter()))
            task.add_done_callback(lambda _: self._end(number))
            return task
        if isinstance(call, frames.Publish) and isinstance(error, RetryLater):
            self._refuse(number)
        self._answer(number, _failed(error))
        return None

    def _end(self, number: int) -> None:
        """A call is no longer in progress, even if it was cancelled before it began."""
        del self._tasks[number]
        self._waiting.discard(number)
        self._gets.discard(number)
        if self._draining and not self._tasks:
            self._close()

    async def _run(self, number: int, call: frames.Call, started: float) -> None:
        measured = CALL_METRICS[type(call)]
        measured.count.add()
        try:
            answer = await self._kinds[type(call)](number, call)
        except Exception as error:  # noqa: BLE001 the client gets an answer, whatever it is
            answer = _failed_call(error)
        if answer is not None:
            measured.seconds.observe(time.perf_counter() - started)
            self._answer(number, answer)

    def _answer(self, number: int, answer: frames.Answer) -> None:
        self._answers.add(frames.encode_frame(number, answer))

    def drain(self) -> None:
        """Take no more calls, answer those in progress, and close the connection."""
        self._draining = True
        self._connection.set_busy(True)
        if not self._tasks:
            self._close()

    def _close(self) -> None:
        self._answers.flush()
        self._connection.close(CloseCode.DRAINING, "this broker is about to stop")

    def lost(self) -> None:
        """End what waits. All else is finished, though nobody gets the answer: a request may have several steps."""
        for number in (*self._waiting, *self._gets):
            self._tasks[number].cancel()

    # Calls

    async def _publish(self, number: int, call: frames.Publish) -> frames.Answer:
        stored, before = self._publishing[number]
        try:
            if before is not None and not await asyncio.shield(before):
                raise EarlierPublishFailed
            answer = await self._store(call)
        except RetryLater:
            self._refuse(number)
            stored.set_result(False)
            raise
        finally:
            del self._publishing[number]
            if not stored.done():
                stored.set_result(True)
        return answer

    def _refuse(self, number: int) -> None:
        """Note that a publish was refused for now: those that are to be stored after it are refused, too."""
        self._refused[number] = None
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    async def _store(self, call: frames.Publish) -> frames.Answer:
        await check_publisher(self._broker, self._token, call.topic)
        if isinstance(call.records, bytes):
            size = len(call.records)
            published = await calls.publish(self._broker, call.topic, decode_arrow(call.records), call.options, size)
        else:
            size = sum(map(len, call.records.values))
            records = records_of_columns(call.records)
            published = await calls.publish(self._broker, call.topic, records, call.options, size)
        return frames.result_of(published)

    async def _read(self, _: int, call: frames.Read) -> frames.Answer:
        check_token(self._broker, self._token)
        partition = parse_partition(call.partition)
        while True:
            batch = await calls.read(self._broker, self._drain, call.group, partition, call.query, MAX_READ_SECONDS)
            if self._connection.is_writable:
                return frames.raw_result(calls.encode_delivery(batch, MSGPACK))
            del batch  # a client that does not read must not fill the memory: read it again when it does
            await self._connection.writable()

    async def _commit(self, _: int, call: frames.Commit) -> frames.Answer:
        check_token(self._broker, self._token)
        await calls.commit(self._broker, call.group, call.member, call.body)
        return frames.NOTHING

    def _start_without_task(self, number: int, call: frames.Call) -> "asyncio.Future[None] | None":
        """Carry out a heartbeat or a commit without a task. None if it takes one, or is another call."""
        if not isinstance(call, frames.Heartbeat | frames.Commit) or not self._broker.admits(self._token):
            return None
        if isinstance(call, frames.Commit):
            committed = calls.commit_at_once(self._broker, call.group, call.member, call.body)
            if committed is not None:
                self._answer_when_stored(number, call, committed, lambda: frames.NOTHING)
            return committed
        taken = calls.heartbeat_at_once(self._broker, call.group, call.member, self._host, call.body)
        if taken is None:
            return None
        settings, stored = taken
        self._answer_when_stored(number, call, stored, lambda: self._heartbeat_answer(call, settings))
        return stored

    def _answer_when_stored(
        self, number: int, call: frames.Call, stored: "asyncio.Future[None]", result: Callable[[], frames.Answer]
    ) -> None:
        """Answer a call that has no task. `result`: returns the answer if it was stored."""
        started = time.perf_counter()
        measured = CALL_METRICS[type(call)]
        measured.count.add()

        def answer(_: "asyncio.Future[None]") -> None:
            error = stored.exception()
            measured.seconds.observe(time.perf_counter() - started)
            self._answer(number, result() if error is None else _failed_call(error))
            self._end(number)

        self._tasks[number] = stored
        stored.add_done_callback(answer)

    async def _heartbeat(self, _: int, call: frames.Heartbeat) -> frames.Answer:
        check_token(self._broker, self._token)
        settings = await calls.heartbeat(self._broker, call.group, call.member, self._host, call.body)
        return self._heartbeat_answer(call, settings)

    def _heartbeat_answer(self, call: frames.Heartbeat, settings: "GroupSettings") -> frames.Answer:
        if self._settings[0] is not settings:
            self._settings = (settings, f"{zlib.crc32(encode(settings)):08x}")
        version = self._settings[1]
        if call.seen == version:
            return frames.NOTHING
        return frames.result_of(responses.VersionedSettings(version, responses.ReportedSettings.for_members(settings)))

    async def _watch(self, number: int, call: frames.Watch) -> None:
        check_token(self._broker, self._token)
        identity = MemberIdentity(call.group, call.member, call.epoch)
        with self._broker.node.coordinator.changes(identity) as changes:
            self._answer(number, frames.CHANGED)
            while not self._drain.started:
                if await self._drain.interrupt(changes.wait(WATCH_SECONDS)):
                    self._answer(number, frames.CHANGED)

    async def _set_fence(self, _: int, call: frames.Fence) -> frames.Answer:
        check_token(self._broker, self._token)
        await calls.set_fence(self._broker, call.group, parse_partition(call.partition), call.epoch)
        return frames.NOTHING

    async def _span(self, _: int, call: frames.Span) -> frames.Answer:
        check_token(self._broker, self._token)
        span = await self._broker.log.span(parse_partition(call.partition))
        return frames.result_of(responses.PartitionSpan.of(span))

    async def _assignment(self, _: int, call: frames.Assignment) -> frames.Answer:
        check_token(self._broker, self._token)
        identity = MemberIdentity(call.group, call.member, call.epoch)
        return frames.result_of(await calls.assignment(self._broker, identity))

    async def _request(self, _: int, call: frames.Request) -> frames.Answer:
        async with self._requests:
            response = await self._tunnel.request(call)
            await self._connection.writable()
            return response


def _failed_call(error: BaseException) -> frames.Failed:
    """The answer to a call that raised this."""
    if isinstance(error, ShardyardError):
        return _failed(error)
    _log.error("a call on a WebSocket connection failed", exc_info=error)
    return frames.Failed(ErrorBody("internal_error", "the broker failed: its log says why"))


def _failed(error: ShardyardError) -> frames.Failed:
    body = error_body(error)
    ERRORS.series(body.code).add()
    return frames.Failed(body)
