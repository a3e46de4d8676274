"""A client on a WebSocket connection of picows."""

import asyncio
from abc import abstractmethod
from typing import Any

from bench.messengers.messenger import Client
from picows import WSError, WSFrame, WSListener, WSMsgType, WSTransport, ws_connect

READ_BUFFER_BYTES = 1024
"""So that thousands of clients fit into one process."""

PING_SECONDS = 20.0
"""Servers close connections on which nothing arrives."""


class Listener(WSListener):
    """Hands messages to its client, as long as this is the client's connection."""

    def __init__(self, client: "WebSocketClient") -> None:
        self._client: WebSocketClient | None = client

    def detach(self) -> None:
        self._client = None

    def on_ws_connected(self, transport: WSTransport) -> None:
        if self._client is not None:
            self._client.connected(transport)

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        if self._client is None:
            return
        if frame.msg_type is WSMsgType.CLOSE:
            code: Any = frame.get_close_code()  # an int, unless it is one of the standard
            self._client.closing(int(getattr(code, "value", code)), (frame.get_close_message() or b"").decode())
            transport.disconnect()
        elif frame.msg_type in {WSMsgType.TEXT, WSMsgType.BINARY}:
            self._client.handle(frame.get_payload_as_bytes())

    def on_ws_disconnected(self, _: WSTransport) -> None:
        if self._client is not None:
            self._client.disconnected()


class WebSocketClient(Client):
    """Opens with a handshake, whose end a system reports by `_opened`."""

    _transport: WSTransport | None = None
    _listener: Listener | None = None
    _opening: "asyncio.Future[None] | None" = None

    @abstractmethod
    def _url(self) -> str: ...

    def _headers(self) -> dict[str, str]:
        return {}

    def _greet(self) -> None:
        """Send what opens the session, once the connection is open."""

    @abstractmethod
    def handle(self, message: bytes) -> None:
        """A message has arrived."""

    def closing(self, code: int, reason: str) -> None:
        """The server closes the connection with this code."""

    async def _open(self) -> None:
        self._opening = asyncio.get_running_loop().create_future()
        listener = self._listener = Listener(self)
        try:
            await ws_connect(
                lambda: listener,
                self._url(),
                extra_headers=self._headers(),
                read_buffer_init_size=READ_BUFFER_BYTES,
                websocket_handshake_timeout=None,  # the whole opening has a limit
                enable_auto_ping=True,
                auto_ping_idle_timeout=PING_SECONDS,
                auto_ping_reply_timeout=PING_SECONDS,
            )
            # picows returns as well when the connection is lost during the handshake.
            if self._transport is None and not self._opening.done():
                raise ConnectionError("the connection was closed during the handshake")
            await self._opening
        except WSError as error:
            raise ConnectionError(str(error)) from error
        finally:
            self._opening = None

    def connected(self, transport: WSTransport) -> None:
        self._transport = transport
        self._greet()

    def _opened(self) -> None:
        if self._opening is not None and not self._opening.done():
            self._opening.set_result(None)

    def disconnected(self) -> None:
        self._transport = None
        if self._opening is not None and not self._opening.done():
            self._opening.set_exception(ConnectionError("the connection was closed"))
        self._lose()

    def _disconnect(self) -> None:
        if self._listener is not None:
            self._listener.detach()
        if self._transport is not None:
            self._transport.disconnect()
            self._transport = None

    def _send_text(self, message: str) -> None:
        if self._transport is not None:
            self._transport.send(WSMsgType.TEXT, message.encode())

    def _send_binary(self, message: bytes) -> None:
        if self._transport is not None:
            self._transport.send(WSMsgType.BINARY, message)
