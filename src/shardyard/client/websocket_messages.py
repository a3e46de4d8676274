"""What comes on a WebSocket connection, by aiohttp, and how the other side has closed it."""

from typing import Self

import aiohttp

ABNORMAL = 1006
"""The code of a connection that ended without one."""
_ENDS = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)


class WebSocketMessages:
    """The messages, by iterating until the connection ends."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._reason = ""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> aiohttp.WSMessage:
        message = await self._socket.receive()
        if message.type in _ENDS:
            self._reason = message.extra or ""
            raise StopAsyncIteration
        return message

    @property
    def close_code(self) -> int:
        return self._socket.close_code or ABNORMAL

    @property
    def close_reason(self) -> str:
        """The code, and what the other side said about it."""
        return f"code {self.close_code}{self._reason and f' ({self._reason})'}"
