"""One HTTP request to one broker, by aiohttp. Nothing else of the client imports it."""

import io
import os

import aiohttp

from shardyard.client.brokers import RESPONSE_SECONDS, HttpRequest

LARGE_BYTES = 512 * 1024
"""A body of this size or more is written in parts, so that it does not hold up the event loop."""


class HttpSession:
    """The connections to brokers."""

    def __init__(self, headers: dict[str, str]) -> None:
        """`headers`: of all requests."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)

    @property
    def closed(self) -> bool:
        return self._session.closed

    async def close(self) -> None:
        await self._session.close()

    async def send(self, url: str, request: HttpRequest) -> tuple[int, bytes]:
        """The status and the body of the response. `ConnectionError`, with the reason, if the broker gives none."""
        body = request.body
        try:
            async with self._session.request(
                request.method,
                url + request.path,
                data=io.BytesIO(body) if body is not None and len(body) > LARGE_BYTES else body,
                headers=request.headers,
                params=request.query,
                timeout=aiohttp.ClientTimeout(
                    total=request.wait + RESPONSE_SECONDS,
                    sock_connect=request.timeout,
                    sock_read=request.wait + request.timeout,
                ),
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConnectionError(_reason(error)) from error


def _reason(error: Exception) -> str:
    """Why a broker could not be reached, in a few words."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"unknown host {error.host}"
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno).lower()
    if isinstance(error, TimeoutError):
        return "no response in time"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    return str(error) or type(error).__name__
