"""WebSocket connections of users' clients, by picows."""

import asyncio
import logging

from picows import WSFrame, WSListener, WSMsgType, WSTransport, WSUpgradeRequest, WSUpgradeResponse
from picows import WSUpgradeResponseWithListener as Upgrade
from picows.picows import WSProtocol  # type: ignore[attr-defined]  # it is there, and in no stub

from shardyard.messaging.server import MessagingServer
from shardyard.messaging.session import Session
from shardyard.model import Denied, InvalidValue, Overloaded, ShardyardError
from shardyard.server.http import error_response
from shardyard.server.messaging.origins import Origins
from shardyard.wire.close_codes import CloseCode
from shardyard.wire.messaging import MAX_FRAME_BYTES, PATH, Format

_log = logging.getLogger(__name__)
_picows_log = logging.getLogger(f"{__name__}.picows")
_picows_log.setLevel(logging.ERROR)
_picows_log.addFilter(
    lambda record: record.exc_info is not None
)  # else every client that breaks the protocol is an error
_picows_adapter = logging.LoggerAdapter(_picows_log, {})
"""picows would make a logger for each connection out of a plain one, which takes memory."""

READ_BUFFER_BYTES = 1024
"""To begin with. Most frames are small, and memory per client counts."""
WRITE_BUFFER_BYTES = 64 * 1024
"""That the client has not taken, before what is for it waits in its session."""
MAX_CLOSE_REASON_BYTES = 120
CLOSING_SECONDS = 5.0
"""How long a client has to read what was sent to it before its connection was closed."""

_FORMATS = {format_.value: format_ for format_ in Format}


class ClientConnection(WSListener):
    """The transport of a session."""

    __slots__ = ("_format", "_parts", "_server", "_session", "_transport", "_type")

    def __init__(self, server: MessagingServer, format_: Format) -> None:
        super().__init__()
        self._server = server
        self._format = format_
        self._type = WSMsgType.TEXT if format_ is Format.JSON else WSMsgType.BINARY
        self._transport: WSTransport | None = None
        self._session: Session | None = None
        self._parts: bytearray | None = None
        """Of a message in fragments."""

    # Called by picows

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._transport = transport
        transport.request.headers.clear()  # these would stay in memory as long as the connection
        transport.response.headers.clear()
        transport.underlying_transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        self._session = self._server.connect(self, self._format)

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        session = self._session
        kind = frame.msg_type
        if kind == WSMsgType.CLOSE:
            if not transport.is_close_frame_sent:
                transport.send_close(frame.get_close_code())
            transport.disconnect()
        elif session is None:
            return
        elif kind in (WSMsgType.PING, WSMsgType.PONG):
            session.alive()
            if kind == WSMsgType.PING:
                transport.send_pong(frame.get_payload_as_bytes())
        elif kind == WSMsgType.CONTINUATION:
            self._continue(session, frame)
        elif self._parts is not None:
            session.close(CloseCode.MALFORMED, "a message began before the end of another one")
        elif kind != self._type:
            session.close(CloseCode.MALFORMED, f"this subprotocol has {self._type.name.lower()} messages")
        elif frame.fin:
            session.receive(frame.get_payload_as_bytes())
        else:
            self._parts = bytearray(frame.get_payload_as_bytes())

    def _continue(self, session: Session, frame: WSFrame) -> None:
        if self._parts is None:
            session.close(CloseCode.MALFORMED, "a message did not begin before it went on")
            return
        self._parts += frame.get_payload_as_bytes()
        if len(self._parts) > MAX_FRAME_BYTES:
            session.close(CloseCode.MALFORMED, f"a message has at most {MAX_FRAME_BYTES} bytes")
        elif frame.fin:
            message, self._parts = bytes(self._parts), None
            session.receive(message)

    def on_ws_disconnected(self, transport: WSTransport) -> None:  # noqa: ARG002 as picows has it
        if self._session is not None:
            self._session.closed()
            self._session = None

    def pause_writing(self) -> None:
        if self._session is not None:
            self._session.pause_writing()

    def resume_writing(self) -> None:
        if self._session is not None:
            self._session.resume_writing()

    # Called by the session

    def send(self, message: bytes) -> None:
        if self._transport is not None and not self._transport.is_close_frame_sent:
            self._transport.send(self._type, message)

    def close(self, code: CloseCode, reason: str) -> None:
        """Let the client close the connection, up to a time. If it were closed here while something of the client was
        not read, the kernel would discard what the client has not received yet."""
        self._session = None
        transport = self._transport
        if transport is not None and not transport.is_close_frame_sent:
            text = reason.encode()[:MAX_CLOSE_REASON_BYTES].decode(errors="ignore")
            transport.send_close(code, text)  # type: ignore[arg-type]  # picows takes any number
            self.resume_reading()
            asyncio.get_running_loop().call_later(CLOSING_SECONDS, transport.disconnect, False)

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.underlying_transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._transport.underlying_transport.is_closing():
            self._transport.underlying_transport.resume_reading()


class ClientConnections:
    """Takes the connections of clients."""

    def __init__(self, server: MessagingServer, *, origins: Origins, most: int) -> None:
        """`origins`: of pages that may connect. `most`: how many connections there can be."""
        self._server = server
        self._origins = origins
        self._most = most

    def protocol(self) -> WSProtocol:
        """The protocol for one connection, which has asked for an upgrade."""
        return WSProtocol(
            None,  # host and port
            None,  # path
            False,  # is a client
            self._upgrade,
            _picows_adapter,
            True,  # disconnects on an exception
            10.0,  # seconds for the handshake
            False,  # pings by itself: the server looks for idle clients
            10.0,
            10.0,
            1,
            False,  # answers pings by itself: they count as signs of life
            MAX_FRAME_BYTES,
            None,  # headers
            READ_BUFFER_BYTES,
        )

    def _upgrade(self, request: WSUpgradeRequest) -> Upgrade:
        try:
            format_ = self._check(request)
        except ShardyardError as error:
            response = error_response(error)
            headers = [("Content-Type", "application/json")]
            return Upgrade(
                WSUpgradeResponse.create_error_response(response.status_code, bytes(response.body), headers), None
            )
        response = WSUpgradeResponse.create_101_response([("Sec-WebSocket-Protocol", format_.value)])
        return Upgrade(response, ClientConnection(self._server, format_))

    def _check(self, request: WSUpgradeRequest) -> Format:
        path = request.path.decode(errors="replace").partition("?")[0]
        if path != PATH:
            raise InvalidValue("path", path, PATH)
        self._origins.check_host(request.headers.get("Host", ""))
        origin = request.headers.get("Origin")
        if origin is not None and not self._origins.admit(origin, request.headers.get("Host", "")):
            raise Denied(f"pages of {origin} may not connect: start the server with --origin {origin}")
        if self._server.clients >= self._most:
            raise Overloaded("connections", self._most)
        offered = request.headers.get("Sec-WebSocket-Protocol", "")
        for name in offered.split(","):
            if (format_ := _FORMATS.get(name.strip())) is not None:
                return format_
        raise InvalidValue("sec-websocket-protocol", offered, "one of " + ", ".join(_FORMATS))
