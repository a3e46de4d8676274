"""The answers that a session sends on its WebSocket connection."""

import asyncio

from shardyard.server.websocket import WebSocketConnection
from shardyard.wire.frames import SHARED_BYTES, messages


class Answers:
    """Frames that wait to be sent. All of one turn of the event loop travel in one message."""

    __slots__ = ("_connection", "_frames", "_loop", "_size")

    def __init__(self, connection: WebSocketConnection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._frames: list[bytes] = []
        self._size = 0

    def add(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._size += len(frame)
        if self._size > SHARED_BYTES:
            self.flush()  # so that the connection knows how much waits to be read by the client
        elif len(self._frames) == 1:
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send them now."""
        waiting, self._frames, self._size = self._frames, [], 0
        for message in messages(waiting):
            self._connection.send(message)
