"""The bodies of requests: all of them together have a limit, and one that makes no progress is cut.

A body is read only when its route asks for it, after the token was checked. How large a single one may be is checked
where it is read (`http.read_bytes`).
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardyard.model import BodyStalled, Overloaded
from shardyard.runtime.metrics import BODY_BYTES
from shardyard.server.limits import ServerLimits


class Bodies:
    """What the bodies of all requests, and all messages, in progress hold."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self.held = 0
        """Bytes."""


class HeldBytes:
    """The share of one body, or one message, in what a server holds."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._held = 0

    def hold(self, size: int) -> None:
        """Count `size` bytes in all, if they are more than a small body has. `Overloaded` if those of all bodies would
        be too many."""
        limits = self._bodies.limits
        more = size - self._held
        if more <= 0 or size <= limits.small_body_bytes:
            return
        if self._bodies.held + more > limits.body_bytes:
            raise Overloaded("bytes of request bodies", limits.body_bytes)
        self._held = size
        self._bodies.held += more
        BODY_BYTES.add(more)

    def release(self) -> None:
        """The request was answered."""
        self._bodies.held -= self._held
        BODY_BYTES.add(-self._held)
        self._held = 0


class _Body:
    """The body of one request."""

    def __init__(self, bodies: Bodies, declared: int, receive: Receive) -> None:
        self.held = HeldBytes(bodies)
        self._seconds = bodies.limits.stalled_seconds
        self._declared = declared
        self._receive = receive
        self._received = 0
        self._complete = False

    async def receive(self) -> Message:
        """The next part of the body, or what the server says after it."""
        if self._complete:
            return await self._receive()
        self.held.hold(max(self._declared, self._received))
        try:
            async with asyncio.timeout(self._seconds):
                message = await self._receive()
        except TimeoutError:
            raise BodyStalled(self._received, self._seconds) from None
        self._received += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        return message


def limit_bodies(app: ASGIApp, bodies: Bodies) -> ASGIApp:
    """The application, with limits on the bodies of its requests. Where they are exceeded, reading a body raises
    `Overloaded` or `BodyStalled`, whichever route reads it."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (declared := _declared_bytes(scope)) == 0:
            await app(scope, receive, send)
            return
        body = _Body(bodies, declared or 0, receive)
        try:
            await app(scope, body.receive, send)
        finally:
            body.held.release()

    return call


def _declared_bytes(scope: Scope) -> int | None:
    """The length of the body. None if it comes in chunks."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else None
        if name == b"transfer-encoding":
            return None
    return 0
