"""Pages that may use messaging servers. A browser lets every page connect to every server, and lets it read the answers
to its requests only if the server says so."""

import ipaddress
from collections.abc import Collection
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from shardyard.messaging.server import MessagingServer
from shardyard.model import Denied
from shardyard.server.http import error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

SHARED = ("/v1/session", "/v1/where/")
"""What pages of other servers, and of given origins, may call."""
MOST_REMEMBERED = 1_000
"""Servers. With more than these, a page of a server that has stopped may not be able to go on."""


class Origins:
    """Admits the pages that the servers of the group serve themselves, and those of given origins."""

    def __init__(self, server: MessagingServer, given: Collection[str], *, is_open: bool = False) -> None:
        """`given`: such as `https://chat.example.com`; `*` admits all. `is_open`: anyone may sign in as anyone."""
        self._server = server
        self._is_open = is_open
        self._given = frozenset(given)
        self._hosts: dict[str, None] = {}
        """Of the servers, also of those that have stopped: their pages are still open."""

    def check_host(self, host: str) -> None:
        """`Denied` if the server is open and the caller knows it by a name of some other machine: then a page of that
        name in a browser of this machine may have been led here."""
        if self._is_open and not _is_loopback(host):
            raise Denied(f"this server has no SHARDYARD_SECRET, and is only reached as localhost, not as {host}")

    def admit(self, origin: str, host: str) -> bool:
        """`host`: of the request, as its caller knows this server."""
        for member in self._server.directory.members().values():
            self._hosts[urlsplit(member.address or "").netloc] = None
        while len(self._hosts) > MOST_REMEMBERED:
            del self._hosts[next(iter(self._hosts))]
        page = origin.partition("://")[2]
        return "*" in self._given or origin in self._given or (page != "" and (page == host or page in self._hosts))


def _is_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def share_answers(app: "ASGIApp", origins: Origins) -> "ASGIApp":
    """Let admitted pages of other origins call `SHARED` routes and read the answers, as CORS has it."""

    async def call(scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        try:
            origins.check_host(host)
        except Denied as error:
            await error_response(error)(scope, receive, send)
            return
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not scope["path"].startswith(SHARED):
            if origin and not origins.admit(origin, host):  # a page may send some requests without asking first
                await error_response(Denied(f"pages of {origin} may not call this"))(scope, receive, send)
                return
            await app(scope, receive, send)
            return
        allowed: list[tuple[bytes, bytes]] = []
        if origin and origins.admit(origin, host):
            allowed = [(b"access-control-allow-origin", origin.encode("latin-1"))]
            if scope["method"] == "OPTIONS":
                allowed += [(b"access-control-allow-headers", b"content-type"), (b"access-control-max-age", b"600")]
                await send({"type": "http.response.start", "status": 204, "headers": [*allowed, (b"vary", b"origin")]})
                await send({"type": "http.response.body"})
                return

        async def send_shared(message: "Message") -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *allowed, (b"vary", b"origin")]
            await send(message)

        await app(scope, receive, send_shared)

    return call
