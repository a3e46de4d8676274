"""Connections to a server: how many there can be, and what one of them can take without sending a valid request."""

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from shardyard.model import Overloaded, ShardyardError, TooLarge
from shardyard.runtime.metrics import CONNECTIONS
from shardyard.server.http import error_response
from shardyard.server.limits import ServerLimits


def refusal(error: ShardyardError) -> bytes:
    """A whole response with the error, after which the connection is closed."""
    response = error_response(error)
    response.headers["Connection"] = "close"
    headers = b"".join(b"%b: %b\r\n" % header for header in response.raw_headers)
    return STATUS_LINE[response.status_code] + headers + b"\r\n" + bytes(response.body)


class Connection(HttpToolsProtocol):
    """A connection that ends when its caller exceeds a limit. uvicorn has none on the number of connections, on the
    size of the headers and on the time that they take, on pipelined requests, and on callers that do not read."""

    def __init__(self, *args: Any, limits: ServerLimits, **named: Any) -> None:
        super().__init__(*args, **named)
        self._limits = limits
        self._upgraded = False
        """It is a WebSocket connection now, with another protocol."""
        self._in_head = False
        self._head_bytes = 0
        self._head_until: float | None = None
        """When the headers must be complete, by the event loop's time. None while nothing of a request has come."""
        self._unsent = 0
        """Bytes of the response that the caller had not taken when this was last looked at."""
        self._unsent_check: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        # uvicorn writes headers and body one after the other, and asyncio sets this only on sockets that name TCP.
        # Without it, the body waits for the caller to acknowledge the headers, which takes 40 ms on Linux.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        CONNECTIONS.add(1)
        if len(self.connections) > self._limits.connections:
            self._refuse(Overloaded("connections", self._limits.connections))
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def _end(self) -> None:
        """It is no HTTP connection any more."""
        CONNECTIONS.add(-1)
        self.connections.discard(self)
        self._unset_keepalive_if_required()
        self._stop_unsent_check()

    # Requests ------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # this stops the timer of an idle connection
        if self._upgraded or self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.head_bytes:
                self._refuse(TooLarge("headers of a request in bytes", self._head_bytes, self._limits.head_bytes))
                return
        if self.timeout_keep_alive_task is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_until = None
        if len(self.pipeline) >= self._limits.pipelined:
            raise ValueError("too many pipelined requests")  # uvicorn answers with 400, and closes the connection
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        if self.cycle.response_complete:
            self.cycle.body = bytearray()  # what was received of a body that no route has read
        super().on_response_complete()

    def _await_head(self) -> None:
        """Close the connection unless the headers of a request are complete in time."""
        now = self.loop.time()
        if self._head_until is None:
            self._head_until = now + self._limits.head_seconds
        elif now >= self._head_until:  # data has come before the timer each time, and stopped it
            self.transport.close()
            return
        self.timeout_keep_alive_task = self.loop.call_at(self._head_until, self.timeout_keep_alive_handler)

    def _refuse(self, error: ShardyardError) -> None:
        """Send the error, and close the connection."""
        self.transport.write(refusal(error))
        self.transport.close()

    def handle_websocket_upgrade(self) -> None:
        self._upgraded = True
        super().handle_websocket_upgrade()

    # Responses -----------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._check_unsent_later()

    def resume_writing(self) -> None:
        self._stop_unsent_check()
        super().resume_writing()

    def _check_unsent_later(self) -> None:
        self._unsent_check = self.loop.call_later(self._limits.unread_seconds, self._check_unsent)

    def _stop_unsent_check(self) -> None:
        if self._unsent_check is not None:
            self._unsent_check.cancel()
            self._unsent_check = None

    def _check_unsent(self) -> None:
        """Cut the connection if the caller has taken nothing since the last time."""
        unsent = self.transport.get_write_buffer_size()
        if unsent >= self._unsent:
            self.transport.abort()
            return
        self._unsent = unsent
        self._check_unsent_later()
