"""Channels over HTTP, and typing notices between servers and fan-out workers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from yarl import URL

from shardyard.fanout.channels import Channels
from shardyard.groups import JoinRequest, Membership, MembershipListener, Node
from shardyard.messaging.channels.typing import EVENT_READERS
from shardyard.wire import messaging as wire
from shardyard.wire.channels import EVENTS, decode_event
from shardyard.wire.peers import PEER_PATH, TYPING_PATH, ChannelTyping, PeerCall
from tests.messaging.channel_yard import create_topics, in_history, join_channel, post, posts
from tests.messaging.servers import Running, Yard, eventually, run, user_of

ALICE, BOB = user_of(1, "alice"), user_of(1, "bob")
CAROL = user_of(2, "carol")
TOKEN = {"Authorization": "Bearer admin"}


async def call(yard: Yard, method: str, url: str | URL, body: Any = None, headers: Any = None) -> tuple[int, Any]:
    async with yard.clients.http.request(method, url, json=body, headers=TOKEN if headers is None else headers) as got:
        return got.status, msgspec.json.decode(await got.read())


def test_members_are_changed_and_listed(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start(admin_token="admin")
        alice = await yard.join(server, ALICE)
        channels = f"{server.url}/v1/channels"
        for user in (ALICE, BOB, ALICE):
            expected = {"channel": "team/a b", "user": user, "joined": True}
            assert await call(yard, "PUT", f"{channels}/team%2Fa%20b/members/{user}") == (200, expected)
        await alice.until(lambda: wire.Membership("team/a b", True) in alice.frames)
        await post(yard, "team/a b", "p1", to=1)
        assert await alice.received(1) == ["p1"]
        await in_history(yard)
        status, listed = await call(yard, "GET", f"{channels}/team%2Fa%20b/members?limit=1")
        assert (status, listed) == (200, {"channel": "team/a b", "members": [ALICE], "more": True})
        _, listed = await call(yard, "GET", f"{channels}/team%2Fa%20b/members?after={ALICE}")
        assert (listed["members"], listed["more"]) == ([BOB], False)
        for user in (ALICE, "nobody"):
            status, answer = await call(yard, "DELETE", f"{channels}/team%2Fa%20b/members/{user}")
            assert (status, answer["joined"]) == (200, False)
        await alice.until(lambda: wire.Membership("team/a b", False) in alice.frames)
        await post(yard, "team/a b", "no", to=1)
        await alice.sync()
        assert posts(alice) == ["p1"]

    run(tmp_path, scenario)


def test_names_with_the_path_of_members_in_them_are_told_apart_or_refused(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start(admin_token="admin")
        url, user, channel = f"{server.url}/v1/channels", "a/members/b", "c/members/d"
        for name, who in (("news", user), (channel, ALICE), (channel, user)):
            path = f"{url}/{name.replace('/', '%2F')}/members/{who.replace('/', '%2f')}"
            answer = {"channel": name, "user": who, "joined": True}
            assert await call(yard, "PUT", URL(path, encoded=True)) == (200, answer)
        status, answer = await call(yard, "PUT", f"{url}/news/members/a/members/b")
        assert (status, "slashes of names as %2F" in str(answer)) == (400, True)
        await in_history(yard)
        _, listed = await call(yard, "GET", f"{url}/news/members")
        assert listed["members"] == [user]

    run(tmp_path, scenario)


def test_an_event_with_the_same_id_is_stored_once_whoever_stores_it(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start(admin_token="admin")
        url, program = f"{server.url}/v1/channels/news/events", Channels(yard.log)
        assert (await call(yard, "POST", url, {"text": "by a server", "id": "7"}))[0] == 201
        assert (await program.publish("news", "by a program", sender="ci", id=7)).duplicate
        assert not (await program.publish("news", "by a program", sender="ci", id=8)).duplicate
        assert (await call(yard, "POST", url, {"text": "by a server", "id": "8"}))[0] == 200
        stored = [r for p in await yard.log.topic(EVENTS) for r in (await yard.log.read(p, 0)).records()]
        assert [decode_event(r.value).text for r in stored] == ["by a server", "by a program"]

    run(tmp_path, scenario)


def test_programs_post(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        server = await yard.start(admin_token="admin")
        url = f"{server.url}/v1/channels/news/events"
        status, first = await call(yard, "POST", url, {"text": "hello", "sender": "ci", "id": "77"})
        assert (status, first["id"], first["channel"], first["duplicate"]) == (201, "77", "news", False)
        assert await call(yard, "POST", url, {"text": "other", "id": "77"}) == (200, {**first, "duplicate": True})
        status, other = await call(yard, "POST", url, {"text": "no id"})
        assert (status, int(other["id"]) > 77) == (201, True)
        stored = [r for p in await yard.log.topic(EVENTS) for r in (await yard.log.read(p, 0)).records()]
        events = [decode_event(record.value) for record in stored]
        assert [(e.id, e.sender, e.device, e.text) for e in events] == [
            (77, "ci", "", "hello"),
            (int(other["id"]), "", "", "no id"),
        ]
        alice = await yard.join(server, ALICE)
        await join_channel(alice, 1, "news")
        await alice.send(wire.GetPosts(2, "news"))
        assert [each.text for each in (await alice.get(wire.Posts)).posts] == ["no id", "hello"]

    run(tmp_path, scenario)


def test_bad_input_and_callers_without_the_token_are_refused(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(admin_token="admin")
        channels = f"{server.url}/v1/channels"
        status, answer = await call(yard, "PUT", f"{channels}/news/members/{ALICE}")
        assert (status, answer["error"]["code"]) == (400, "unsupported")
        await create_topics(yard)
        await eventually(lambda: server.server.channels.is_on)
        for method, path in (
            ("PUT", f"news/members/{ALICE}"),
            ("DELETE", f"news/members/{ALICE}"),
            ("GET", "news/members"),
            ("POST", "news/events"),
        ):
            status, answer = await call(yard, method, f"{channels}/{path}", headers={})
            assert (status, answer["error"]["code"]) == (401, "wrong_token")
        name = "a name of 1 to 128 characters, without NUL"
        for method, path, body, message in (
            ("PUT", f"{'x' * 129}/members/{ALICE}", None, "expected a string of at most 128 characters"),
            ("PUT", f"news/members/{'x' * 129}", None, "expected a string of at most 128 characters"),
            ("PUT", "a%00b/members/u", None, f"channel is 'a\\x00b': expected {name}"),
            ("DELETE", "news/members/u%00", None, f"user is 'u\\x00': expected {name}"),
            ("GET", "news/members?limit=0", None, "from 1 to 1000"),
            ("GET", "news/members?limit=1001", None, "from 1 to 1000"),
            ("GET", "news/members?limit=x", None, "from 1 to 1000"),
            ("GET", "news/members?unknown=1", None, "one of after, limit"),
            ("GET", "news/members?after=%00", None, "after is"),
            ("POST", "news/events", {}, "text is missing"),
            ("POST", "news/events", {"text": 5}, "text is 5"),
            ("POST", "news/events", {"text": "x", "id": "abc"}, "expected a string of up to 19 digits, or null"),
            ("POST", "news/events", {"text": "x", "id": ""}, "expected a string of up to 19 digits, or null"),
            ("POST", "news/events", {"text": "x", "id": "9" * 19}, "below 2**63"),
            ("POST", "news/events", {"text": "x", "sender": ""}, f"sender is '': expected {name}, or null"),
            ("POST", "news/events", {"text": "x", "unknown": 1}, "field is 'unknown'"),
            ("POST", "a%00b/events", {"text": "x"}, f"expected {name}"),
        ):
            status, answer = await call(yard, method, f"{channels}/{path}", body)
            assert status == 400, (method, path, answer)
            assert message in answer["error"]["message"]
        status, answer = await call(yard, "POST", f"{channels}/news/events", {"text": "x" * 16_385})
        assert (status, answer["error"]["code"]) == (413, "too_large")
        assert sum([(await yard.log.span(p)).end for p in await yard.log.topic(EVENTS)]) == 0
        _, described = await call(yard, "GET", f"{server.url}/openapi.json")
        assert {"get"} <= described["paths"]["/v1/channels/{channel}/members"].keys()
        assert {"put", "delete"} <= described["paths"]["/v1/channels/{channel}/members/{user}"].keys()
        assert described["components"]["schemas"]["NewEvent"]["required"] == ["text"]

    run(tmp_path, scenario)


class Worker(MembershipListener):
    """A fan-out worker, as far as typing is concerned."""

    def __init__(self) -> None:
        self.notices: list[ChannelTyping] = []

    async def take(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"].startswith("Bearer ")
        self.notices.append(msgspec.json.decode(await request.read(), type=ChannelTyping))
        return web.json_response({"partitions": 1})


@asynccontextmanager
async def running_worker(yard: Yard) -> AsyncIterator[Worker]:
    """A worker that is known to servers by its membership."""
    worker = Worker()
    app = web.Application()
    app.router.add_post(TYPING_PATH, worker.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    async with Node(yard.log, yard.registry) as node:
        request = JoinRequest(EVENT_READERS, "worker", [EVENTS], address=f"http://{host}:{port}")
        async with Membership(node, request, worker):
            yield worker
    await runner.cleanup()


async def tell(yard: Yard, server: Running, *notices: ChannelTyping) -> None:
    """What a worker tells a messaging server."""
    token = server.server.tokens.issue_for_peer("worker")
    headers = {"Authorization": f"Bearer {token}"}
    body = msgspec.json.encode(PeerCall(channel_typing=list(notices)))
    async with yard.clients.http.post(f"{server.url}{PEER_PATH}", data=body, headers=headers) as answer:
        assert answer.status == 200


def test_typing_goes_to_the_worker_and_from_it_to_all_members_but_the_sender(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        await create_topics(yard)
        async with running_worker(yard) as worker:
            server = await yard.start()
            phone, desk = await yard.join(server, ALICE), await yard.join(server, ALICE, "desk")
            bob, carol = await yard.join(server, BOB), await yard.join(server, CAROL)
            stranger = await yard.join(server, user_of(3, "dave"))
            for client in (phone, bob, carol):
                await join_channel(client, 1, "news")
            await phone.send(wire.TypingIn("not joined"))
            await phone.send(wire.TypingIn("news"))
            await eventually(lambda: worker.notices)
            assert worker.notices == [ChannelTyping("news", ALICE, "phone")]
            await tell(yard, server, *worker.notices, ChannelTyping("unknown", ALICE))
            frame = wire.IsTypingIn("news", ALICE)
            for client in (bob, carol):
                await client.until(lambda c=client: frame in c.frames)  # type: ignore[misc]
            for client in (phone, desk, stranger):
                await client.sync()
                assert not any(isinstance(each, wire.IsTypingIn) for each in client.frames)

    run(tmp_path, scenario)
