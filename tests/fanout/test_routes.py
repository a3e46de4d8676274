"""Coordinators and workers over HTTP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from shardyard.fanout.channels import Channels
from shardyard.groups import JoinRequest, Membership, MembershipListener, Node
from shardyard.log import Log
from shardyard.messaging.tokens import Tokens, signing_key
from shardyard.registry import Registry
from shardyard.server.fanout.app import FanoutOptions, running_fanout
from shardyard.wire.inbox import GROUP, TOPIC
from shardyard.wire.peers import PeerCall
from tests.fanout.yard import CONFIG, until
from tests.messaging.servers import no_errors_logged
from tests.queues.engines import ENGINES

Scenario = Callable[[Log, Registry, aiohttp.ClientSession], Awaitable[None]]


def run(folder: Path, scenario: Scenario) -> None:
    async def whole() -> None:
        engine = ENGINES["memory"]
        with engine.open_registry(folder) as registry:
            async with engine.log(folder) as log, aiohttp.ClientSession() as http:
                await scenario(log, registry, http)

    with no_errors_logged():
        asyncio.run(whole())


async def get(http: aiohttp.ClientSession, url: str, **headers: str) -> tuple[int, Any]:
    async with http.get(url, headers=headers) as response:
        body = await response.read()
        return response.status, msgspec.json.decode(body) if response.content_type == "application/json" else body


async def post(http: aiohttp.ClientSession, url: str, body: object, **headers: str) -> tuple[int, Any]:
    async with http.post(url, json=body, headers=headers) as response:
        return response.status, msgspec.json.decode(await response.read())


@pytest.mark.parametrize("role", ["coordinator", "worker"])
def test_a_process_says_how_it_is(tmp_path: Path, role: Any) -> None:
    async def scenario(log: Log, registry: Registry, http: aiohttp.ClientSession) -> None:
        async with running_fanout(log, registry, role, FanoutOptions(admin_token="secret", config=CONFIG)) as url:
            assert await get(http, f"{url}/healthz") == (200, {"alive": True})
            assert (await get(http, f"{url}/readyz"))[0] == 200
            for path in ("metrics", "v1/status"):
                assert (await get(http, f"{url}/{path}"))[0] == 401
                assert (await get(http, f"{url}/{path}", Authorization="Bearer wrong"))[0] == 401
            status, metrics = await get(http, f"{url}/metrics", Authorization="Bearer secret")
            assert status == 200
            assert b"shardyard_requests_total" in metrics
            topic = "events" if role == "coordinator" else "fanout"

            async def owns_all() -> bool:
                status, body = await get(http, f"{url}/v1/status", Authorization="Bearer secret")
                assert status == 200
                assert (body["role"], body["mode"], body["phase"], body["ready"]) == (
                    role,
                    "partitioned",
                    "running",
                    True,
                )
                assert (body["working"], body["table"] is None) == (role, role == "coordinator")
                return len(body["partitions"].get(topic, ())) == (await log.topic(topic)).partitions

            await until(owns_all, "all partitions")
            if role == "coordinator":
                assert (await post(http, f"{url}/v1/typing", {}))[0] == 404

    run(tmp_path, scenario)


@contextlib.asynccontextmanager
async def messaging_server(node: Node, calls: list[PeerCall]) -> AsyncIterator[None]:
    """One that owns all partitions of `inbox`, and notes what it is told."""

    async def answer(request: web.Request) -> web.Response:
        tokens = Tokens(await signing_key(node.transactions), node.clock)
        tokens.check_peer(request.headers["Authorization"].removeprefix("Bearer "))
        calls.append(msgspec.json.decode(await request.read(), type=PeerCall))
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/v1/peer", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    request = JoinRequest(GROUP, "messaging", [TOPIC], address=f"ws://{host}:{port}/v1/messaging")
    async with Membership(node, request, MembershipListener()):
        try:
            yield
        finally:
            await runner.cleanup()


@pytest.mark.parametrize("mode", ["partitioned", "replicated"])
def test_typing_reaches_the_servers_of_online_members(tmp_path: Path, mode: str) -> None:
    async def scenario(log: Log, registry: Registry, http: aiohttp.ClientSession) -> None:
        channels, calls = Channels(log), list[PeerCall]()
        await channels.join_many(["general"] * 3 + ["empty"], ["alice", "bob", "carol", "offline"])
        for user in ("alice", "bob"):
            await channels.set_presence(user, "phone", online=True)
        registry.run(lambda tx: tx.put_setting("fanout", "mode", {"mode": mode}))
        async with (
            Node(log, registry) as node,
            running_fanout(log, registry, "worker", FanoutOptions(config=CONFIG)) as url,
            messaging_server(node, calls),
        ):
            tokens = Tokens(await signing_key(node.transactions), node.clock)
            peer = f"Bearer {tokens.issue_for_peer('messaging')}"
            notice = {"channel": "general", "sender": "alice", "device": "phone"}

            async def is_routed() -> bool:
                status, body = await post(http, f"{url}/v1/typing", notice, Authorization=peer)
                assert status in (200, 503)
                return bool(status == 200 and body["partitions"] == 2 and calls)

            await until(is_routed, "the notice")
            assert calls[0].channel_typing[0].channel == "general"
            assert calls[0].channel_typing[0].sender == "alice"
            empty = {"channel": "empty", "sender": "alice"}
            assert await post(http, f"{url}/v1/typing", empty, Authorization=peer) == (200, {"partitions": 0})
            assert (await post(http, f"{url}/v1/typing", notice))[0] == 401
            user = f"Bearer {tokens.issue('alice').text}"
            assert (await post(http, f"{url}/v1/typing", notice, Authorization=user))[0] == 401
            bodies: list[Any] = [{}, {"channel": "", "sender": "alice"}, {"channel": "general"}, [], {"channel": 1}]
            for wrong in bodies:
                status, body = await post(http, f"{url}/v1/typing", wrong, Authorization=peer)
                assert (status, body["error"]["code"]) == (400, "invalid_value"), wrong

    run(tmp_path, scenario)
