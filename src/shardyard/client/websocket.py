"""Calls to one broker on a WebSocket connection, by aiohttp. Calls are sent as soon as they are made, those of the same
turn of the event loop together, and answered in any order."""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import aiohttp
import msgspec
from msgspec import structs

from shardyard.client.carrier import HeartbeatAnswer, HttpRequest, response_body
from shardyard.client.http import reason
from shardyard.client.outbox import Outbox
from shardyard.client.websocket_messages import WebSocketMessages
from shardyard.model import EarlierPublishFailed, InvalidCall, Malformed, TooLarge, WrongToken
from shardyard.runtime.clock import Clock, wait_until_set
from shardyard.wire import frames, responses
from shardyard.wire.close_codes import Advice, advice
from shardyard.wire.errors import error_of
from shardyard.wire.media import MAX_BODY_BYTES, MAX_MESSAGE_BYTES

T = TypeVar("T")

PING_SECONDS = 10.0
"""A connection on which nothing was received for this long is pinged, and is considered lost if no pong arrives within
half that time."""
CLOSING_SECONDS = 1.0
"""How long to wait for a broker when a connection is closed."""
WRONG_TOKEN = 401
OVERLOADED = 503


class NoWebSocket(Exception):
    """Raised when something answers that does not let WebSocket connections through."""


class UpgradeFailed(ConnectionError):
    """Raised when the request for a connection failed after it was sent: the broker is about to stop, or something in
    between does not let WebSocket connections through."""


async def connect(session: aiohttp.ClientSession, url: str) -> "WebSocketCarrier":
    """A new connection. `ConnectionError` if the broker can't be reached, `NoWebSocket` if only HTTP reaches it."""
    address = "ws" + url.removeprefix("http") + frames.PATH
    try:
        socket = await session.ws_connect(
            address, protocols=[frames.SUBPROTOCOL], heartbeat=PING_SECONDS, max_msg_size=2 * MAX_MESSAGE_BYTES
        )
    except aiohttp.WSServerHandshakeError as error:
        if error.status == WRONG_TOKEN:
            raise WrongToken("this broker") from None
        if error.status == OVERLOADED:
            raise ConnectionError(f"status {error.status}") from None
        if error.status >= 500:
            raise UpgradeFailed(f"status {error.status}") from None
        raise NoWebSocket(f"status {error.status}") from None
    except aiohttp.ClientConnectorError as error:
        raise ConnectionError(reason(error)) from error
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
        raise UpgradeFailed(reason(error)) from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ConnectionError(reason(error)) from error
    if socket.protocol != frames.SUBPROTOCOL:
        await socket.close()
        raise NoWebSocket("it speaks another protocol")
    return WebSocketCarrier(socket)


class WebSocketCarrier:
    """`Carrier` on one connection. When that is lost, it stays lost: all calls raise `ConnectionError`."""

    keeps_order = True

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[frames.Answer]] = {}
        self._lanes: defaultdict[object, dict[int, None]] = defaultdict(dict)
        """The numbers of the publishes of each lane that are in flight, in their order."""
        self._watches: dict[int, WebSocketWatch] = {}
        self._outbox = Outbox()
        self._sending: asyncio.Task[None] | None = None
        self._lost: Exception | None = None
        self._receiving = asyncio.create_task(self._receive(), name="connection to a broker")

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    async def close(self) -> None:
        """Close the connection. A broker that hangs does not hold that up for long."""
        if self._sending is not None:
            await finish(self._sending)  # a `Cancel` may be on its way
        await finish(asyncio.create_task(self._socket.close()))
        await finish(self._receiving)

    # Calls

    async def request(self, request: HttpRequest) -> bytes:
        call = frames.Request(
            request.method, request.path, dict(request.query), dict(request.headers), request.body or b""
        )
        answer = await self._call(call, request.wait + request.timeout)
        if not isinstance(answer, frames.Response):
            raise Malformed("answer", "a request is answered with a response")
        return response_body(answer.status, answer.body)

    async def publish(self, call: frames.Publish, timeout: float, lane: object = None) -> responses.Published:  # noqa: ASYNC109
        if lane is None:
            return await self._result(call, timeout, _published)
        numbers, number = self._lanes[lane], next(self._numbers)
        if numbers:
            call = structs.replace(call, after=next(reversed(numbers)))
        numbers[number] = None
        try:
            return await self._result(call, timeout, _published, number)
        finally:
            del numbers[number]
            if not numbers:
                self._lanes.pop(lane, None)

    async def read(self, call: frames.Read, timeout: float) -> bytes:  # noqa: ASYNC109
        return await self._result(call, call.query.wait_seconds + timeout, bytes)

    async def commit(self, call: frames.Commit, timeout: float) -> None:  # noqa: ASYNC109
        await self._result(call, timeout, bytes)

    async def heartbeat(self, call: frames.Heartbeat, timeout: float) -> HeartbeatAnswer:  # noqa: ASYNC109
        changed = await self._result(call, timeout, _settings)
        if changed is None:
            return HeartbeatAnswer(None, call.seen, None)
        return HeartbeatAnswer(changed.settings, changed.version, None)

    async def set_fence(self, call: frames.Fence, timeout: float) -> None:  # noqa: ASYNC109
        await self._result(call, timeout, bytes)

    async def span(self, call: frames.Span, timeout: float) -> responses.PartitionSpan:  # noqa: ASYNC109
        return await self._result(call, timeout, _span)

    async def assignment(self, call: frames.Assignment, timeout: float) -> responses.Assignment:  # noqa: ASYNC109
        return await self._result(call, timeout, _assignment)

    def watch(self, call: frames.Watch, timeout: float, clock: Clock) -> "WebSocketWatch":  # noqa: ARG002 it has no end
        number = next(self._numbers)
        watch = self._watches[number] = WebSocketWatch(clock, lambda: self._end_watch(number))
        if self._lost is not None:
            watch.lose(self._lost)
        else:
            self._send(number, call)
        return watch

    def _end_watch(self, number: int) -> None:
        if self._watches.pop(number, None) is not None:
            self._cancel(number)

    async def _result(
        self,
        call: frames.Call,
        timeout: float,  # noqa: ASYNC109
        decode: Callable[[msgspec.Raw], T],
        number: int | None = None,
    ) -> T:
        answer = await self._call(call, timeout, number)
        if not isinstance(answer, frames.Result):
            raise Malformed("answer", "a call is answered with a result")
        return decode(answer.body)

    async def _call(
        self,
        call: frames.Call,
        timeout: float,  # noqa: ASYNC109
        number: int | None = None,
    ) -> frames.Answer:
        """`number`: of the call; by default the next one."""
        if self._lost is not None:
            raise self._lost
        if number is None:
            number = next(self._numbers)
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[frames.Answer] = loop.create_future()
        self._send(number, call)
        self._calls[number] = answered
        timer = loop.call_later(timeout, _expire, answered)  # costs a fraction of asyncio.timeout()
        try:
            answer = await answered
        except (asyncio.CancelledError, TimeoutError) as error:
            self._give_up(number, call)
            if isinstance(error, TimeoutError):
                raise ConnectionError("no response in time") from None
            raise
        finally:
            timer.cancel()
            del self._calls[number]
        if isinstance(answer, frames.Failed):
            raise error_of(answer.error)
        return answer

    # The connection

    def _send(self, number: int, call: frames.Call) -> None:
        frame = frames.encode_frame(number, call)
        if len(frame) > MAX_BODY_BYTES:
            raise TooLarge("body in bytes", len(frame), MAX_BODY_BYTES)
        self._outbox.put(number, call, frame)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._flush(), name="sending to a broker")

    def _give_up(self, number: int, call: frames.Call) -> None:
        """Nobody waits for the answer to a call any more. It is not sent if it was not sent yet."""
        if isinstance(call, frames.Read):
            self._cancel(number)
        elif self._outbox.drop(number) and isinstance(call, frames.Publish):
            self._refuse_after(number)

    def _cancel(self, number: int) -> None:
        """End a read or a watch."""
        if not self._outbox.drop(number) and self._lost is None:
            self._send(number, frames.Cancel())

    def _refuse_after(self, number: int) -> None:
        """Refuse the publishes that are to be stored after one that is not sent: they were not sent either."""
        for numbers in self._lanes.values():
            for later in [each for each in numbers if each > number] if number in numbers else ():
                self._outbox.drop(later)
                if not (call := self._calls[later]).done():
                    call.set_exception(EarlierPublishFailed())

    async def _flush(self) -> None:
        while self._outbox:
            try:
                await self._socket.send_bytes(self._outbox.take())
            except (aiohttp.ClientError, ConnectionError, RuntimeError) as error:
                self._lose(ConnectionError(f"the connection was lost: {error}"))
                return

    async def _receive(self) -> None:
        """Hand answers to their calls until the connection ends."""
        ended: Exception = ConnectionError("it closed the connection")
        received = WebSocketMessages(self._socket)
        try:
            async for message in received:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    continue
                for number, answer in frames.decode_answers(message.data):
                    self._hand_over(number, answer)
            if advice(received.close_code) is Advice.GIVE_UP:
                how = received.close_reason
                ended = InvalidCall(f"the broker closed the connection with {how}: see docs/protocol.md")
        except (aiohttp.ClientError, OSError) as error:
            ended = ConnectionError(reason(error))
        except Malformed as error:
            ended = error
        finally:
            self._lose(ended)
            await self._socket.close()

    def _hand_over(self, number: int, answer: frames.Answer) -> None:
        if isinstance(answer, frames.Changed):
            if (watch := self._watches.get(number)) is not None:
                watch.notify()
        elif (call := self._calls.get(number)) is not None:
            if not call.done():
                call.set_result(answer)
        elif isinstance(answer, frames.Failed) and (watch := self._watches.get(number)) is not None:
            watch.lose(error_of(answer.error))

    def _lose(self, error: Exception) -> None:
        if self._lost is not None:
            return
        self._lost = error
        self._outbox.clear()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        for watch in self._watches.values():
            watch.lose(error)


class WebSocketWatch:
    """`AssignmentWatch` by frames that the broker sends."""

    def __init__(self, clock: Clock, end: Callable[[], None]) -> None:
        self._clock = clock
        self._end = end
        self._event = asyncio.Event()
        self._lost: Exception | None = None

    def notify(self) -> None:
        self._event.set()

    def lose(self, error: Exception) -> None:
        self._lost = error
        self._event.set()

    async def wait(self, seconds: float) -> bool:
        if not await wait_until_set(self._event, seconds, self._clock):
            return False
        if self._lost is not None:
            raise self._lost
        self._event.clear()
        return True

    def close(self) -> None:
        self._end()


def _expire(answered: "asyncio.Future[frames.Answer]") -> None:
    if not answered.done():
        answered.set_exception(TimeoutError())


async def finish(task: "asyncio.Task[Any]") -> None:
    """Wait for a task, and cancel it after a time."""
    await asyncio.wait([task], timeout=CLOSING_SECONDS)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _published(body: msgspec.Raw) -> responses.Published:
    return msgspec.msgpack.decode(body, type=responses.Published)


def _span(body: msgspec.Raw) -> responses.PartitionSpan:
    return msgspec.msgpack.decode(body, type=responses.PartitionSpan)


def _assignment(body: msgspec.Raw) -> responses.Assignment:
    return msgspec.msgpack.decode(body, type=responses.Assignment)


def _settings(body: msgspec.Raw) -> responses.VersionedSettings | None:
    return msgspec.msgpack.decode(body, type=responses.VersionedSettings | None)
