"""WebSocket connections: the transport of one, its limits, and how it is opened and closed. What messages mean is in
`server.queues.session`."""

import asyncio
import logging
from typing import Any, Protocol, cast
from urllib.parse import unquote

from starlette.types import Scope
from uvicorn import Config
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import OPEN
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from shardyard.model import InvalidCall, InvalidValue, Overloaded, ShardyardError
from shardyard.runtime.metrics import CONNECTIONS, ERRORS, WEBSOCKETS
from shardyard.server.bodies import Bodies, HeldBytes
from shardyard.server.connection_checks import ConnectionChecks
from shardyard.server.connections import refusal
from shardyard.server.limits import ServerLimits
from shardyard.server.websocket_frames import message_frame, whole_message
from shardyard.wire.close_codes import CloseCode
from shardyard.wire.errors import error_body
from shardyard.wire.frames import SUBPROTOCOL
from shardyard.wire.media import MAX_MESSAGE_BYTES

_log = logging.getLogger(__name__)
_websockets_log = logging.getLogger(f"{__name__}.protocol")
_websockets_log.setLevel(logging.WARNING)  # at DEBUG it would log tokens and records

CLOSING_SECONDS = 5.0
"""How long a client has to read what was sent to it before its connection was closed."""


class MessageHandler(Protocol):
    """What is done with the messages of a connection."""

    def receive(self, message: bytes, held: HeldBytes) -> None:
        """Process a message. `held`: the memory that it takes, to be released when it has been processed."""

    def drain(self) -> None:
        """The server is about to stop: finish what is in progress, and close the connection."""

    def lost(self) -> None:
        """The connection has ended."""


class WebSocketConnection(asyncio.Protocol):
    """A connection that began as an HTTP request and was upgraded. The application gets it as
    `scope["connection"]`, authenticates the caller, and accepts or refuses it."""

    def __init__(
        self,
        *,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],  # noqa: ARG002 uvicorn gives it to every protocol
        limits: ServerLimits,
        bodies: Bodies,
        checks: ConnectionChecks,
    ) -> None:
        self._app = config.loaded_app
        self._connections: set[Any] = server_state.connections
        self._tasks = server_state.tasks
        self._limits = limits
        self._bodies = bodies
        self._checks = checks
        self._loop = asyncio.get_running_loop()
        self._websocket = ServerProtocol(
            subprotocols=[Subprotocol(SUBPROTOCOL)], max_size=MAX_MESSAGE_BYTES, logger=_websockets_log
        )
        self._transport: asyncio.Transport
        self._request: Request | None = None
        self._handler: MessageHandler | None = None
        self._parts: list[bytes] = []
        """Of a message in fragments."""
        self._held = HeldBytes(bodies)
        """Of the message that is being received."""
        self._received_at = 0.0
        self._partial = 0
        """Bytes that came of a message that is not complete."""
        self._part_bytes = 0
        """Of its fragments that are complete, as they came."""
        self._closing = False
        self._busy = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._unsent: int | None = None
        """Bytes that the client had not taken at the last check, if it was behind."""
        self._unsent_since = 0.0
        self._close_timer: asyncio.TimerHandle | None = None

    # Opening -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # that of uvloop does not inherit from it
        self._connections.add(self)
        WEBSOCKETS.add(1)
        self._received_at = self._loop.time()
        self._checks.add(self)

    def _upgrade(self, request: Request) -> None:
        """Let the application decide about the request."""
        self._request = request
        self._transport.pause_reading()
        path, _, query = request.path.partition("?")
        scope: Scope = {
            "type": "websocket",
            "connection": self,
            "scheme": "ws",
            "http_version": "1.1",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [
                (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in request.headers.raw_items()
            ],
            "client": self._transport.get_extra_info("peername"),
            "server": self._transport.get_extra_info("sockname"),
        }
        task = self._loop.create_task(self._run(scope), name="websocket")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, scope: Scope) -> None:
        try:
            await self._app(scope, _no_receive, _no_send)
        except ShardyardError as error:
            self._refuse(error)
        except Exception:  # noqa: BLE001 nobody awaits this task
            _log.exception("a WebSocket connection could not be opened")
            self._transport.abort()

    def accept(self, handler: MessageHandler) -> None:
        """Complete the handshake. `InvalidValue` if the client does not speak our protocol."""
        if self._request is None or self._transport.is_closing():
            return
        if "origin" in self._request.headers:  # a browser lets every page connect, also to this machine
            raise InvalidCall("connections of web pages are refused: they have an Origin header")
        response = self._websocket.accept(self._request)
        if response.status_code != 101 or self._websocket.subprotocol != SUBPROTOCOL:
            offered = self._request.headers.get("sec-websocket-protocol", "")
            raise InvalidValue("sec-websocket-protocol", offered, f"a WebSocket request for {SUBPROTOCOL}")
        self._handler = handler
        self._websocket.send_response(response)
        self._flush()
        self._transport.resume_reading()

    def _refuse(self, error: ShardyardError) -> None:
        if not self._transport.is_closing():
            self._transport.write(refusal(error))
            self._transport.close()

    # Receiving -----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        self._received_at = self._loop.time()
        at = 0
        while self._handler is not None and not self._partial and at < len(data):
            found = whole_message(data, at, MAX_MESSAGE_BYTES)
            if found is None:
                break
            self._partial = self._part_bytes = found[1] - at
            if not self._hold():
                return
            self._message(found[0])
            at = found[1]
        if at < len(data):
            self._receive_others(data[at:])

    def _hold(self) -> bool:
        """Count what came of a message. If that is too much, the connection is closed."""
        try:
            self._held.hold(self._partial)
        except Overloaded as error:
            ERRORS.series(error_body(error).code).add()
            self.close(CloseCode.OVERLOADED, str(error))
            return False
        return True

    def _receive_others(self, data: bytes) -> None:
        """Take anything but whole messages."""
        self._partial += len(data)
        if self._closing or not self._hold():
            return
        self._websocket.receive_data(data)
        for event in self._websocket.events_received():
            if isinstance(event, Request):
                self._partial = 0
                self._upgrade(event)
            elif isinstance(event, Frame):
                self._receive(event)
        self._flush()
        if self._websocket.close_expected():
            self._close_transport()

    def _receive(self, frame: Frame) -> None:
        if frame.opcode is Opcode.TEXT:
            self.close(CloseCode.MALFORMED, "messages are binary: MessagePack, see docs/protocol.md")
        elif frame.opcode in (Opcode.BINARY, Opcode.CONT):
            self._parts.append(bytes(frame.data))
            self._part_bytes += _received_bytes(frame)
            if frame.fin:
                parts, self._parts = self._parts, []
                self._message(parts[0] if len(parts) == 1 else b"".join(parts))
        else:
            self._partial -= _received_bytes(frame)

    def _message(self, message: bytes) -> None:
        held, self._held = self._held, HeldBytes(self._bodies)
        self._partial -= self._part_bytes
        self._part_bytes = 0
        if self._handler is None or self._websocket.state is not OPEN:
            held.release()
            return
        self._handler.receive(message, held)

    def set_busy(self, busy: bool) -> None:
        """Whether so much of what came is in progress that no more messages are taken for now."""
        self._busy = busy
        self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        if self._closing or self._transport.is_closing():
            return
        if self._busy or not self._writable.is_set():
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # Sending -------------------------------------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        """Send a message; nothing happens if the connection is closing."""
        if self._websocket.state is OPEN:
            self._write(message_frame(message))

    @property
    def is_writable(self) -> bool:
        """Whether the client has read most of what was sent."""
        return self._writable.is_set()

    async def writable(self) -> None:
        """Wait until the client has read most of what was sent."""
        while not self._writable.is_set():
            await self._writable.wait()

    def pause_writing(self) -> None:
        """The client does not read as fast as it is sent to: take no more of its calls until it does."""
        self._writable.clear()
        self._unsent, self._unsent_since = self._transport.get_write_buffer_size(), self._loop.time()
        self._pause_or_resume()

    def resume_writing(self) -> None:
        self._unsent = None
        self._writable.set()
        self._pause_or_resume()

    def _flush(self) -> None:
        if data := self._websocket.data_to_send():
            self._write(data[0] if len(data) == 1 else b"".join(data))

    def _write(self, data: bytes) -> None:
        if not self._closing and not self._transport.is_closing():
            self._transport.write(data)

    # Closing -------------------------------------------------------------------------------------------------

    def close(self, code: CloseCode, reason: str = "") -> None:
        """Close the connection. What was sent before is still delivered, if the client reads it soon."""
        if self._websocket.state is OPEN:
            self._websocket.send_close(code, reason.encode()[:120].decode(errors="ignore"))
            self._flush()
        self._close_transport()

    def shutdown(self) -> None:
        """Called when the server stops."""
        if self._handler is None:
            self._transport.close()
        else:
            self._handler.drain()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 as asyncio has it
        self._connections.discard(self)
        CONNECTIONS.add(-1)
        WEBSOCKETS.add(-1)
        self._held.release()
        self._writable.set()
        self._checks.discard(self)
        if self._close_timer is not None:
            self._close_timer.cancel()
        if self._handler is not None:
            self._handler.lost()

    def eof_received(self) -> None:
        self._websocket.receive_eof()

    def _close_transport(self) -> None:
        """Send what is left, and let the client close the connection, up to a time. If it were closed here while
        something of the client was not read, the kernel would discard what the client has not received yet."""
        if self._closing or self._transport.is_closing():
            return
        self._closing = True
        self._parts.clear()
        self._held.release()
        try:
            self._transport.write_eof()
        except OSError:  # the client has gone
            self._transport.abort()
            return
        self._transport.resume_reading()
        self._close_timer = self._loop.call_later(CLOSING_SECONDS, self._transport.abort)

    def check(self, now: float) -> None:
        """Close the connection if the client makes no progress. `now`: by the event loop's time."""
        if self._closing:
            return
        limits = self._limits
        silent = now - self._received_at
        is_reading = self._unsent is None and not self._busy
        if self._handler is None:
            if silent > limits.head_seconds:
                self._transport.abort()
        elif is_reading and self._partial and silent > limits.stalled_seconds:
            self.close(CloseCode.STALLED, f"no more of a message came for {limits.stalled_seconds:g} s")
        elif is_reading and silent > limits.idle_seconds:
            self.close(CloseCode.IDLE, f"nothing came for {limits.idle_seconds:g} s, not even a ping")
        elif self._unsent is not None:
            unsent = self._transport.get_write_buffer_size()
            if unsent < self._unsent:
                self._unsent, self._unsent_since = unsent, now
            elif now - self._unsent_since > limits.unread_seconds:
                self.close(CloseCode.NOT_READING, f"nothing was read for {limits.unread_seconds:g} s")


def _received_bytes(frame: Frame) -> int:
    """How many bytes of a client the frame took: its head has 2, those of the length and those of the mask."""
    size = len(frame.data)
    return size + 6 + (0 if size < 126 else 2 if size < 2**16 else 8)


async def _no_receive() -> Any:
    raise RuntimeError("messages of a connection go to its handler")


async def _no_send(_: Any) -> None:
    raise RuntimeError("a connection is accepted and refused by its own methods")
