"""Calls to one broker over HTTP, by aiohttp."""

import io
import os
from collections.abc import Mapping

import aiohttp
from msgspec import structs

from shardyard.client.carrier import RESPONSE_SECONDS, HeartbeatAnswer, HttpRequest, WrongAnswer, response_body
from shardyard.client.paths import member_path, partition_path, path
from shardyard.runtime.clock import Clock
from shardyard.wire import frames, requests, responses
from shardyard.wire.codec import decode, encode
from shardyard.wire.media import ARROW, JSON, MAX_WAIT_SECONDS, MSGPACK
from shardyard.wire.records import PackedRecords

LARGE_BYTES = 512 * 1024
"""A body of this size or more is written in parts, so that it does not hold up the event loop."""
CHANGES_SECONDS = 5.0
"""The longest wait for a change in one request."""


class HttpCarrier:
    """`Carrier` over HTTP: one request for each call."""

    keeps_order = False

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def request(self, request: HttpRequest) -> bytes:
        body = request.body
        try:
            async with self._session.request(
                request.method,
                self._url + request.path,
                data=io.BytesIO(body) if body is not None and len(body) > LARGE_BYTES else body,
                headers=request.headers,
                params=request.query,
                timeout=aiohttp.ClientTimeout(
                    total=request.wait + RESPONSE_SECONDS,
                    sock_connect=request.timeout,
                    sock_read=request.wait + request.timeout,
                ),
            ) as response:
                status, content, answered = response.status, await response.read(), response.content_type
        except aiohttp.TooManyRedirects:
            raise WrongAnswer("with too many redirects") from None
        except aiohttp.ClientResponseError:  # not what the response says, but that it is none
            raise WrongAnswer("in another protocol than HTTP") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConnectionError(reason(error)) from error
        return response_body(status, content, answered)

    async def publish(self, call: frames.Publish, timeout: float, lane: object = None) -> responses.Published:  # noqa: ARG002, ASYNC109 it keeps no order
        if isinstance(call.records, bytes):
            body, media = call.records, ARROW
        else:
            body, media = encode(PackedRecords(columns=call.records), MSGPACK), MSGPACK
        query = structs.asdict(call.options)
        response = await self._send("POST", path("topics", call.topic, "records"), body, media, timeout, query=query)
        return decode(response, responses.Published)

    async def read(self, call: frames.Read, timeout: float) -> bytes:  # noqa: ASYNC109
        where = f"{partition_path(call.group, call.partition)}/records"
        wait = min(call.query.wait_seconds, MAX_WAIT_SECONDS)
        query = structs.asdict(structs.replace(call.query, wait_seconds=wait))
        return await self._send("GET", where, None, MSGPACK, timeout, query=query, wait=wait)

    async def commit(self, call: frames.Commit, timeout: float) -> None:  # noqa: ASYNC109
        where = f"{member_path(call.group, call.member)}/commit"
        await self._send("POST", where, encode(call.body), JSON, timeout)

    async def heartbeat(self, call: frames.Heartbeat, timeout: float) -> HeartbeatAnswer:  # noqa: ASYNC109
        where = f"{member_path(call.group, call.member)}/heartbeat"
        response = decode(
            await self._send("POST", where, encode(call.body), JSON, timeout), responses.HeartbeatResponse
        )
        return HeartbeatAnswer(response.settings, "", response)

    async def set_fence(self, call: frames.Fence, timeout: float) -> None:  # noqa: ASYNC109
        where = f"{partition_path(call.group, call.partition)}/fence"
        await self._send("POST", where, encode(requests.Fence(call.epoch)), JSON, timeout)

    async def span(self, call: frames.Span, timeout: float) -> responses.PartitionSpan:  # noqa: ASYNC109
        topic, _, index = call.partition.rpartition("/")
        response = await self._send("GET", path("topics", topic, "partitions", index), None, JSON, timeout)
        return decode(response, responses.PartitionSpan)

    async def assignment(self, call: frames.Assignment, timeout: float) -> responses.Assignment:  # noqa: ASYNC109
        where, query = member_path(call.group, call.member), {"epoch": call.epoch}
        return decode(await self._send("GET", where, None, JSON, timeout, query=query), responses.Assignment)

    def watch(self, call: frames.Watch, timeout: float, clock: Clock) -> "HttpWatch":  # noqa: ARG002 the broker's counts
        return HttpWatch(self, call, timeout)

    async def changes(self, call: frames.Watch, seen: str, wait: float, timeout: float) -> str:  # noqa: ASYNC109
        """The version of what the member owns; waits until it differs from the one that was seen."""
        query = structs.asdict(requests.Changes(seen, call.member, wait))
        response = await self._send(
            "GET", path("groups", call.group, "changes"), None, JSON, timeout, query=query, wait=wait
        )
        return decode(response, responses.GroupVersion).version

    async def _send(
        self,
        method: str,
        where: str,
        body: bytes | None,
        media: str,
        timeout: float,  # noqa: ASYNC109
        *,
        query: Mapping[str, object] | None = None,
        wait: float = 0.0,
    ) -> bytes:
        headers = {"Accept": media} if body is None else {"Content-Type": media}
        named = {name: str(value) for name, value in (query or {}).items() if value is not None}
        return await self.request(HttpRequest(method, where, body, headers, named, wait, timeout))


class HttpWatch:
    """`AssignmentWatch` by long polls."""

    def __init__(self, carrier: HttpCarrier, call: frames.Watch, timeout: float) -> None:
        self._carrier = carrier
        self._call = call
        self._timeout = timeout
        self._seen = ""

    async def wait(self, seconds: float) -> bool:
        before, wait = self._seen, min(seconds, CHANGES_SECONDS)
        self._seen = await self._carrier.changes(self._call, before, wait, self._timeout)
        return self._seen != before

    def close(self) -> None:
        """Nothing is open between two long polls."""


def reason(error: Exception) -> str:
    """Why a broker could not be reached, in a few words."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"unknown host {error.host}"
    if isinstance(error, aiohttp.ClientSSLError):
        return f"no TLS connection: {error.os_error}"
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno).lower()
    if isinstance(error, TimeoutError):
        return "no response in time"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    return str(error) or type(error).__name__
