"""Requests to other nodes: what only the owner of a queue can do."""

import contextlib
from typing import TYPE_CHECKING, TypeVar

import msgspec

from shardyard.model import RetryLater
from shardyard.wire.codec import encode
from shardyard.wire.errors import ErrorResponse, error_of
from shardyard.wire.media import JSON

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

FORWARDED = "x-shardyard-forwarded"
"""The header of a request that another node forwarded: it is not forwarded again."""
ANSWER_SECONDS = 10.0


class Forwarding:
    """Calls other nodes, with the token that all of them have."""

    def __init__(self, token: str | None) -> None:
        self._headers = {FORWARDED: "1", "Content-Type": JSON}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def call(
        self,
        address: str,
        method: str,
        path: str,
        kind: type[T],
        body: object = None,
        *,
        seconds: float = ANSWER_SECONDS,
    ) -> T:
        """The response of a node. Its error is raised as it was raised there; `RetryLater` if it does not answer."""
        import aiohttp  # noqa: PLC0415 most brokers have no other node to call, and it takes 9 MB

        from shardyard.client.http import reason  # noqa: PLC0415 likewise

        if self._http is None:
            self._http = aiohttp.ClientSession(headers=self._headers)
        try:
            async with self._http.request(
                method,
                address + path,
                data=None if body is None else encode(body),
                timeout=aiohttp.ClientTimeout(total=seconds),
            ) as response:
                status, content = response.status, await response.read()
            if status < 300:
                return msgspec.json.decode(content, type=kind)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            raise RetryLater(
                f"the node at {address} does not answer ({reason(error)}): try again in a moment"
            ) from None
        with contextlib.suppress(msgspec.DecodeError):
            raise error_of(msgspec.json.decode(content, type=ErrorResponse).error)
        raise RetryLater(f"the node at {address} answered with status {status}: try again in a moment")
