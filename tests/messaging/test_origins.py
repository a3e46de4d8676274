"""Which pages may use messaging servers."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import aiohttp

from shardyard.log import Log, open_log
from shardyard.model import Denied
from shardyard.registry import Registry, open_registry
from shardyard.server.messaging.app import MessengerOptions, running_messenger
from shardyard.wire.errors import status_of
from shardyard.wire.messaging import PATH, Format

FOREIGN = "https://elsewhere.example.com"
GIVEN = "https://chat.example.com"


def run(scenario: Callable[[Log, Registry, aiohttp.ClientSession], Awaitable[None]]) -> None:
    async def main() -> None:
        with open_registry("memory://") as registry:
            async with open_log("memory://") as log, aiohttp.ClientSession() as http:
                await scenario(log, registry, http)

    asyncio.run(main())


async def connects(http: aiohttp.ClientSession, url: str, origin: str, host: str | None = None) -> int:
    """The status of the answer to a page that opens a WebSocket."""
    headers = {"Origin": origin} | ({} if host is None else {"Host": host})
    try:
        socket = await http.ws_connect(url + PATH, protocols=[Format.JSON.value], headers=headers)
    except aiohttp.WSServerHandshakeError as error:
        return error.status
    await socket.close()
    return 101


async def may_read(http: aiohttp.ClientSession, url: str, origin: str) -> bool:
    """Whether the browser lets a page ask for a session and read the answer, and also an error."""
    headers = {"Origin": origin}
    allowed = set()
    async with http.options(f"{url}/v1/session", headers=headers) as response:
        allowed.add(response.headers.get("Access-Control-Allow-Origin"))
    for body in {"user": "alice"}, {"user": ""}:
        async with http.post(f"{url}/v1/session", json=body, headers=headers) as response:
            assert response.headers["Vary"] == "origin"
            allowed.add(response.headers.get("Access-Control-Allow-Origin"))
    async with http.post(f"{url}/v1/drain", headers={"Origin": origin, "Authorization": "Bearer wrong"}) as response:
        assert response.status == 401
        assert "Access-Control-Allow-Origin" not in response.headers
    assert allowed in ({origin}, {None})
    return allowed == {origin}


def test_pages_of_the_servers_and_of_given_origins_may_connect_and_no_others() -> None:
    async def scenario(log: Log, registry: Registry, http: aiohttp.ClientSession) -> None:
        options = MessengerOptions(origins=[GIVEN], topic_partitions=2, admin_token="admin")
        async with running_messenger(log, registry, options=options) as url:
            async with running_messenger(log, registry, options=options) as other:
                for origin in url, other, GIVEN:
                    assert await connects(http, url, origin) == 101
                    assert await may_read(http, url, origin)
            # its pages may still be open
            assert await connects(http, url, other) == 101
            assert await may_read(http, url, other)
            for origin in FOREIGN, "null", url.replace("http://", "http://not-"):
                assert await connects(http, url, origin) == status_of(Denied(""))
                assert not await may_read(http, url, origin)

    run(scenario)


def test_the_chat_page_loads_nothing_from_elsewhere() -> None:
    async def scenario(log: Log, registry: Registry, http: aiohttp.ClientSession) -> None:
        async with running_messenger(log, registry, options=MessengerOptions(topic_partitions=2)) as url:
            for path, kind in (
                ("/", "text/html"),
                ("/chat.css", "text/css"),
                ("/chat.js", "text/javascript"),
                ("/shardyard-messaging.js", "text/javascript"),
            ):
                async with http.get(url + path) as response:
                    assert (response.status, response.content_type) == (200, kind)
                    policy = response.headers["Content-Security-Policy"]
                    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
                    assert "unsafe" not in policy

    run(scenario)


def test_an_open_server_is_not_reached_by_the_name_of_another_machine() -> None:
    """Such a name can lead a browser on this machine to it: then its pages would be of the server's own origin."""

    async def scenario(log: Log, registry: Registry, http: aiohttp.ClientSession) -> None:
        options = MessengerOptions(topic_partitions=2)
        for secret, expected in (None, status_of(Denied(""))), ("a secret of at least 32 characters", 200):
            async with running_messenger(log, registry, options=replace(options, secret=secret)) as url:
                port = url.rpartition(":")[2]
                for host, status in {f"elsewhere.example.com:{port}": expected, f"localhost:{port}": 200}.items():
                    async with http.get(f"{url}/healthz", headers={"Host": host}) as response:
                        assert response.status == status
                connected = await connects(
                    http, url, f"http://elsewhere.example.com:{port}", host="elsewhere.example.com:" + port
                )
                assert connected == (expected if secret is None else 101)

    run(scenario)
