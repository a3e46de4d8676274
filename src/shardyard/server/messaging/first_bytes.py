"""One port for two protocols: the first bytes of a connection tell whether it is a user's client or plain HTTP."""

import asyncio
from collections.abc import Callable
from typing import Any

from shardyard.server.connections import Connection
from shardyard.wire.messaging import PATH

_CLIENT = f"GET {PATH}".encode()

ClientProtocol = Callable[[], asyncio.BufferedProtocol]
"""Makes the protocol of a client's connection."""


class FirstBytes(asyncio.Protocol):
    """Waits for the first bytes of a connection, and hands it over to the protocol that they belong to."""

    __slots__ = ("_client", "_connections", "_http", "_received", "_seconds", "_timer", "_transport")

    def __init__(
        self, client: ClientProtocol, http: Callable[[], asyncio.Protocol], seconds: float, connections: set[Any]
    ) -> None:
        """`seconds`: within which they must come. `connections`: those that the server shuts down when it stops."""
        self._client = client
        self._connections = connections
        self._http: Callable[[], asyncio.Protocol] | None = http
        self._seconds = seconds
        self._received = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._connections.add(self)
        self._timer: asyncio.TimerHandle | None = asyncio.get_running_loop().call_later(self._seconds, transport.abort)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) < len(_CLIENT) and _CLIENT.startswith(self._received):
            return
        received, transport, http = self._received, self._transport, self._http
        self._forget()
        if received.startswith(_CLIENT):
            _hand_over(transport, self._client(), received)
        elif http is not None:
            protocol = http()
            transport.set_protocol(protocol)
            protocol.connection_made(transport)
            protocol.data_received(received)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 as asyncio has it
        self._forget()

    def shutdown(self) -> None:
        """The server stops."""
        self._transport.abort()

    def _forget(self) -> None:
        """Keep nothing in memory: uvloop keeps this object as long as the connection."""
        self._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._transport = self._http = None
        self._received = b""


class HttpConnection(Connection):
    """A connection for HTTP that a client may use for its WebSocket connection later."""

    def __init__(self, *args: Any, client: ClientProtocol, **named: Any) -> None:
        super().__init__(*args, **named)
        self._client_protocol = client

    def handle_websocket_upgrade(self) -> None:
        self._upgraded = True
        self._end()
        head = [self.scope["method"].encode() + b" " + self.url + b" HTTP/1.1"]
        head += [name + b": " + value for name, value in self.scope["headers"]]
        _hand_over(self.transport, self._client_protocol(), b"\r\n".join([*head, b"", b""]))


def _hand_over(transport: Any, protocol: asyncio.BufferedProtocol, received: bytes) -> None:
    """Let the protocol have the connection, and what was received on it."""
    protocol.connection_made(transport)
    transport.set_protocol(protocol)
    while received and not transport.is_closing():
        buffer = memoryview(protocol.get_buffer(len(received)))
        size = min(len(buffer), len(received))
        buffer[:size] = received[:size]
        received = received[size:]
        protocol.buffer_updated(size)
