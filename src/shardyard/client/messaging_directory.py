"""Where a user's messaging server is, and the session with which a client connects to it. Any server knows."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec

from shardyard.client.carrier import WrongAnswer, response_body
from shardyard.client.http import reason
from shardyard.client.paths import path
from shardyard.model import InvalidCall, RetryLater, Unreachable
from shardyard.model.url import without_password
from shardyard.runtime.clock import SystemClock
from shardyard.runtime.retry import Backoff, retry
from shardyard.wire.messaging import MAX_SERVERS, PATH, SessionGranted, Where

T = TypeVar("T")

BACKOFF = Backoff(first=0.05, longest=0.5)
RESPONSE_SECONDS = 5.0
"""For the response of one server."""
FetchToken = Callable[[], Awaitable[str]]


class Directory:
    """Asks one of the servers, and the next one if it can't be reached: those that were given, then those that servers
    told. Errors are those of the server; `ConnectionError` if none of them can be reached."""

    def __init__(self, http: aiohttp.ClientSession, urls: Sequence[str]) -> None:
        self._given = self.urls = tuple(urls)
        self._http = http
        self._at = random.randrange(len(urls))

    def learn(self, addresses: Sequence[str]) -> None:
        """Ask the servers with these addresses, too, instead of those of the last call; none changes nothing. A program
        that gave addresses with TLS only does not send its secret without."""
        if not addresses:
            return
        told = ["http" + each.removeprefix("ws").removesuffix(PATH) for each in addresses[:MAX_SERVERS]]
        if all(url.startswith("https:") for url in self._given):
            told = [url for url in told if url.startswith("https:")]
        self.urls = tuple(dict.fromkeys([*self._given, *told]))

    async def session(self, user: str, secret: str | None, token: str | FetchToken | None) -> SessionGranted:
        """A new session. `token`: a signed one instead of a secret, or a function that gets one."""
        credentials = {
            "user": user,
            "secret": secret,
            "token": token if token is None or isinstance(token, str) else await _fetched(token),
        }
        body = {name: value for name, value in credentials.items() if value is not None}
        session = await self._ask("POST", "/v1/session", SessionGranted, body)
        if session.user != user:
            raise InvalidCall(f"the token is one of user {session.user!r}: expected {user!r}")
        return session

    async def where(self, user: str) -> Where:
        return await self._ask("GET", path("where", user), Where)

    async def _ask(self, method: str, where: str, kind: type[T], body: Any = None) -> T:
        failure: Exception | None = None
        for _ in self.urls:
            url = self.urls[self._at % len(self.urls)]
            try:
                return await self._request(url, method, where, kind, body)
            except (ConnectionError, RetryLater) as error:
                failure = (
                    error if isinstance(error, RetryLater) else ConnectionError(f"{without_password(url)}: {error}")
                )
                self._at += 1
        assert failure is not None  # noqa: S101 there is at least one URL
        raise failure

    async def _request(self, url: str, method: str, where: str, kind: type[T], body: Any) -> T:
        try:
            async with (
                asyncio.timeout(RESPONSE_SECONDS),
                self._http.request(method, url + where, json=body) as response,
            ):
                content = response_body(response.status, await response.read(), response.content_type)
            return msgspec.json.decode(content, type=kind)
        except WrongAnswer as error:
            raise ConnectionError(f"it is not a messaging server: it answered {error.answer}") from None
        except msgspec.DecodeError:
            raise ConnectionError("it is not a messaging server: it answered something else") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConnectionError(reason(error)) from error


async def locate(urls: Sequence[str], user: str, seconds: float = 2.0) -> Where:
    """The server that serves a user. `Unreachable` if none of the servers can be asked for so long."""
    clock = SystemClock()
    async with aiohttp.ClientSession() as http:
        directory = Directory(http, urls)

        async def ask() -> Where:
            try:
                return await directory.where(user)
            except ConnectionError as error:
                raise Unreachable([without_password(url) for url in urls], seconds, str(error)) from None

        return await retry(ask, clock=clock, deadline=clock.monotonic() + seconds, backoff=BACKOFF)


async def _fetched(token: FetchToken) -> str:
    """What the program's function returns. That its own service can't be reached for now is as if ours could not."""
    try:
        return await token()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ConnectionError(f"no token could be got: {reason(error)}") from error
