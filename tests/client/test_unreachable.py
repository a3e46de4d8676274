"""Addresses at which no broker answers: what the error says, and that others are used."""

import asyncio
import contextlib
import re
import traceback
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from shardyard.client import Brokers, Producer
from shardyard.model import NotABroker, Record, Unreachable
from tests.client.proxies import serving
from tests.client.test_producer import dead_address
from tests.queues.setup import Cluster, run


@contextlib.asynccontextmanager
async def answering(status: int, body: bytes, media: str = "text/html") -> AsyncIterator[str]:
    """The address of a server that answers everything with this response."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body, content_type=media)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with serving(app) as url:
        yield url


@pytest.mark.parametrize(
    ("status", "body", "media"),
    [
        (404, b"<html>", "text/html"),
        (200, b"<html>", "text/html"),
        (501, b"<html>", "text/html"),
        (404, b'{"detail": "Not Found"}', "application/json"),
    ],
)
def test_what_is_not_a_broker_is_said_in_one_line(status: int, body: bytes, media: str) -> None:
    async def scenario() -> None:
        async with answering(status, body, media) as url:
            told = f"{url} is not a Shardyard broker: it answered {status} with {media}"
            async with Producer(url, retry_seconds=0.0) as producer:
                with pytest.raises(NotABroker, match=f"^{re.escape(told)}$"):
                    await producer.send("orders", "a")
            async with Brokers([url, dead_address()], retry_seconds=0.2) as brokers:
                with pytest.raises(Unreachable) as mixed:
                    await brokers.get("/healthz")
        assert "it is not a Shardyard broker" in str(mixed.value)
        assert "connection refused" in str(mixed.value)

    asyncio.run(scenario())


def test_what_does_not_speak_http_is_not_a_broker() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        await writer.drain()
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with Brokers(f"127.0.0.1:{port}", carrier="http") as brokers:
                with pytest.raises(NotABroker, match=r"it answered in another protocol than HTTP$"):
                    await brokers.get("/healthz", retry_seconds=0.0)

    asyncio.run(scenario())


def test_a_broker_without_tls_says_so_when_it_is_called_by_https() -> None:
    async def scenario(cluster: Cluster) -> None:
        async with Brokers(cluster.urls[0].replace("http", "https")) as brokers:
            with pytest.raises(Unreachable, match="no TLS connection: "):
                await brokers.get("/healthz", retry_seconds=0.0)

    run(scenario)


def test_an_address_of_something_else_is_failed_over_from() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        async with answering(404, b"<html>") as url, Producer([url, *cluster.urls]) as producer:
            for _ in range(4):
                await producer.send("orders", "a")
        assert sum(map(len, await cluster.records())) == 4

    run(scenario)


def test_the_error_of_a_broker_out_of_reach_has_no_other_error_before_it() -> None:
    async def scenario() -> None:
        async with Producer(dead_address(), retry_seconds=0.0) as producer:
            for sending in (producer.send("orders", "a"), producer.publish("orders", [Record.new(b"a")])):
                with pytest.raises(Unreachable) as raised:
                    await sending
                shown = "".join(traceback.format_exception(raised.value))
                assert shown.count("Traceback") == 1
                assert shown.endswith("(connection refused)\n")

    asyncio.run(scenario())
