"""One WebSocket connection to a node, by aiohttp. All frames of one turn of the event loop travel together."""

import asyncio
import itertools
from collections.abc import Callable

import aiohttp

from shardyard.client.http import reason
from shardyard.client.websocket import OVERLOADED, PING_SECONDS, WRONG_TOKEN, finish
from shardyard.client.websocket_messages import WebSocketMessages
from shardyard.model import InvalidCall, Malformed, TooLarge, WrongToken
from shardyard.wire import sharding_frames as frames
from shardyard.wire.close_codes import Advice, advice
from shardyard.wire.errors import error_of
from shardyard.wire.frames import SUBPROTOCOL, messages
from shardyard.wire.media import MAX_BODY_BYTES, MAX_MESSAGE_BYTES

Receive = Callable[[frames.Answer], None]
Lose = Callable[[Exception], None]


async def connect(session: aiohttp.ClientSession, url: str) -> "Connection":
    """A new connection. `ConnectionError` if the node can't be reached."""
    try:
        socket = await session.ws_connect(
            "ws" + url.removeprefix("http") + frames.PATH,
            protocols=[SUBPROTOCOL],
            heartbeat=PING_SECONDS,
            max_msg_size=2 * MAX_MESSAGE_BYTES,
        )
    except aiohttp.WSServerHandshakeError as error:
        if error.status == WRONG_TOKEN:
            raise WrongToken("this broker") from None
        if error.status >= 500 or error.status == OVERLOADED:
            raise ConnectionError(f"status {error.status}") from None
        raise ConnectionError(f"it takes no WebSocket connections for sharded queues: status {error.status}") from None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ConnectionError(reason(error)) from error
    if socket.protocol != SUBPROTOCOL:
        await socket.close()
        raise ConnectionError("it speaks another protocol")
    return Connection(socket)


class Connection:
    """Calls and streams on one connection. When that is lost, it stays lost: calls raise `ConnectionError`, and streams
    get it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._receivers: dict[int, tuple[Receive, Lose]] = {}
        self._outbox: list[bytes] = []
        self._sending: asyncio.Task[None] | None = None
        self._lost: Exception | None = None
        self._receiving = asyncio.create_task(self._receive(), name="connection to a node")

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    async def close(self) -> None:
        """Send what waits, and close the connection. A node that hangs does not hold that up for long."""
        if self._sending is not None:
            await finish(self._sending)
        await finish(asyncio.create_task(self._socket.close()))
        await finish(self._receiving)

    async def call(self, call: frames.Call, timeout: float) -> frames.Answer:  # noqa: ASYNC109 it is what the error means
        """The answer to a call. The error of a node is raised here as it was raised there."""
        answered: asyncio.Future[frames.Answer] = asyncio.get_running_loop().create_future()

        def receive(answer: frames.Answer) -> None:
            if not answered.done():
                answered.set_result(answer)

        def lose(error: Exception) -> None:
            if not answered.done():
                answered.set_exception(error)

        number = self.open(call, receive, lose)
        try:
            async with asyncio.timeout(timeout):
                answer = await answered
        except TimeoutError:
            raise ConnectionError("no response in time") from None
        finally:
            self.forget(number)
        if isinstance(answer, frames.Failed):
            raise error_of(answer.error)
        return answer

    def open(self, call: frames.Call, receive: Receive, lose: Lose) -> int:
        """Make a call that may be answered several times, until `forget`. Returns its number. `ConnectionError` if the
        connection is lost; if that happens later, `lose` is called instead."""
        if self._lost is not None:
            raise self._lost
        number = next(self._numbers)
        self.send(number, call)
        self._receivers[number] = (receive, lose)
        return number

    def forget(self, number: int) -> None:
        """No more answers of this call matter."""
        self._receivers.pop(number, None)

    def send(self, number: int, call: frames.Call) -> None:
        """Send a frame with the others of this turn; nothing happens if the connection is lost."""
        if self._lost is not None:
            return
        frame = frames.encode_frame(number, call)
        if len(frame) > MAX_BODY_BYTES:
            raise TooLarge("frame in bytes", len(frame), MAX_BODY_BYTES)
        self._outbox.append(frame)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._flush(), name="sending to a node")

    def notify(self, call: frames.Ack | frames.Nack, failed: Callable[[Exception], None]) -> None:
        """Make a call without waiting for its answer. `failed` gets the error if there is one."""
        if self._lost is not None:
            return
        number = 0

        def receive(answer: frames.Answer) -> None:
            self.forget(number)
            if isinstance(answer, frames.Failed):
                failed(error_of(answer.error))

        number = self.open(call, receive, failed)

    async def _flush(self) -> None:
        while self._outbox:
            waiting, self._outbox = self._outbox, []
            try:
                for message in messages(waiting):
                    await self._socket.send_bytes(message)
            except (aiohttp.ClientError, ConnectionError, RuntimeError) as error:
                self._lose(ConnectionError(f"the connection was lost: {error}"))
                return

    async def _receive(self) -> None:
        """Hand answers over until the connection ends."""
        ended: Exception = ConnectionError("it closed the connection")
        received = WebSocketMessages(self._socket)
        try:
            async for message in received:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    continue
                for number, answer in frames.decode_answers(message.data):
                    if (receiver := self._receivers.get(number)) is not None:
                        receiver[0](answer)
            if advice(received.close_code) is Advice.GIVE_UP:
                how = received.close_reason
                ended = InvalidCall(f"the node closed the connection with {how}: see docs/protocol.md")
        except (aiohttp.ClientError, OSError) as error:
            ended = ConnectionError(reason(error))
        except Malformed as error:
            ended = error
        finally:
            self._lose(ended)
            await self._socket.close()

    def _lose(self, error: Exception) -> None:
        if self._lost is not None:
            return
        self._lost = error
        self._outbox.clear()
        receivers, self._receivers = self._receivers, {}
        for _, lose in receivers.values():
            lose(error)
