"""One WebSocket connection of a messaging client, by aiohttp."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp

from shardyard.client.http import reason
from shardyard.client.websocket_messages import WebSocketMessages
from shardyard.wire.messaging import Format, ServerFrame, decode_from_server

CONNECT_SECONDS = 10.0
CLOSING_SECONDS = 1.0
"""How long to wait for the server when a connection is closed."""
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""Of a message from the server: a page of the longest texts, with every character escaped."""


async def connect(http: aiohttp.ClientSession, address: str, format_: Format) -> "Connection":
    """A new connection. `ConnectionError` if there is none."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            socket = await http.ws_connect(
                address,
                protocols=[format_.value],
                max_msg_size=MAX_MESSAGE_BYTES,
                timeout=aiohttp.ClientWSTimeout(ws_close=CLOSING_SECONDS),
            )
    except aiohttp.WSServerHandshakeError as error:
        raise ConnectionError(f"{address}: status {error.status}") from None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise ConnectionError(f"{address}: {reason(error)}") from error
    if socket.protocol != format_.value:
        await socket.close()
        raise ConnectionError(f"{address}: it speaks another protocol")
    return Connection(socket, address, format_)


class Connection:
    """Sends messages in order, without waiting; its frames are read by iterating. Not reading slows the server down."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, address: str, format_: Format) -> None:
        self.address = address
        self.messages = WebSocketMessages(socket)
        self.received = 0
        """How many messages were."""
        self._socket = socket
        self._format = format_
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._sending = asyncio.create_task(self._send_all(), name="sending to a messaging server")

    def send(self, message: bytes) -> None:
        """Send an encoded frame."""
        self._outbox.put_nowait(message)

    async def frames(self) -> AsyncIterator[ServerFrame]:
        """What the server sends, until the connection ends. `Malformed` if something is not a frame."""
        async for message in self.messages:
            self.received += 1
            data = message.data.encode() if isinstance(message.data, str) else message.data
            for frame in decode_from_server(data, self._format):
                yield frame

    async def close(self) -> None:
        """Close the connection. A server that hangs does not hold that up for long."""
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)
        await self._socket.close()

    async def _send_all(self) -> None:
        try:
            while True:
                message = await self._outbox.get()
                if self._format is Format.JSON:
                    await self._socket.send_str(message.decode())
                else:
                    await self._socket.send_bytes(message)
        except (aiohttp.ClientError, ConnectionError, RuntimeError):
            await self._socket.close()  # who reads notices that it is lost
