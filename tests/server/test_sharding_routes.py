"""Exchanges, policies, queues and nodes over HTTP, with one node and with two."""

import asyncio
from typing import Any
from urllib.parse import quote

import pytest

from shardyard.model import PartlyPurged
from shardyard.server.sharding import service
from shardyard.server.sharding.forwarding import Forwarding
from shardyard.sharding.queue import QueueStatus, ShardQueue
from tests.server.sharding import Nodes, RunningNode, run, run_two, until
from tests.server.websockets import Running
from tests.server.websockets import run as run_server

URL = "http://127.0.0.1:1"
"""Nobody listens there."""
K = {"routing_key": "k"}
IMAGES = {"pattern": "^images$", "shards_per_node": 2}


async def sharded(nodes: Nodes, node: RunningNode, **policy: Any) -> list[str]:
    """Declare `images` with a policy. Returns the names of its shards when all of them are served."""
    assert (await nodes.request(node, "POST", "/v1/exchanges", {"name": "images"}))[0] == 201
    assert (await nodes.request(node, "PUT", "/v1/policies/images", IMAGES | policy))[0] == 200

    async def served() -> bool:
        _, found = await nodes.request(node, "GET", "/v1/queues?exchange=images")
        return bool(found) and all(shard["ready"] is not None for shard in found)

    await until(served)
    _, found = await nodes.request(node, "GET", "/v1/queues?exchange=images")
    return [shard["name"] for shard in found]


async def publish(nodes: Nodes, node: RunningNode, *bodies: str, exchange: str = "images", **options: Any) -> Any:
    messages = [{"body": body, "routing_key": body} for body in bodies]
    return await nodes.request(node, "POST", f"/v1/exchanges/{exchange}/messages", {"messages": messages, **options})


def test_an_exchange_is_declared_described_and_deleted() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        declared = {"name": "images", "type": "x-modulus-hash", "hash_header": None, "hash_property": None}
        for _ in range(2):  # declaring it again changes nothing
            assert await nodes.request(node, "POST", "/v1/exchanges", {"name": "images"}) == (201, declared)
        assert await nodes.request(node, "GET", "/v1/exchanges") == (200, [declared])
        other = {"name": "images", "type": "fanout"}
        status, error = await nodes.request(node, "POST", "/v1/exchanges", other)
        assert (status, error["error"]["code"]) == (409, "exchange_exists")
        assert await nodes.request(node, "GET", "/v1/exchanges/images") == (
            200,
            {"exchange": declared, "policy": None, "bindings": [], "shards": []},
        )
        assert await nodes.request(node, "DELETE", "/v1/exchanges/images") == (200, {"name": "images", "remaining": []})
        status, error = await nodes.request(node, "GET", "/v1/exchanges/images")
        assert (status, error["error"]["code"]) == (404, "unknown_exchange")

    run(scenario)


def test_a_policy_gives_an_exchange_shards_and_they_go_with_it_when_they_are_empty() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        names = await sharded(nodes, node)
        assert names == ["sharding: images - a - 0", "sharding: images - a - 1"]
        assert await nodes.request(node, "GET", "/v1/exchanges/images/policy") == (
            200,
            {"exchange": "images", "policy": (await nodes.request(node, "GET", "/v1/policies/images"))[1]},
        )
        assert (await publish(nodes, node, *"abcdef"))[1] == {"routed": [1] * 6, "refused": {}}
        status, removed = await nodes.request(node, "DELETE", "/v1/policies/images")
        assert status == 200
        assert sum(left["messages"] for left in removed["remaining"]) == 6
        assert {left["queue"] for left in removed["remaining"]} <= set(names)
        status, error = await publish(nodes, node, "g")
        assert (status, error["error"]["code"], error["error"]["fields"]["refused"]) == (409, "unroutable", [0])
        for left in removed["remaining"]:  # they are read by their names, and go
            path = f"/v1/queues/{left['queue']}/get"
            _, got = await nodes.request(node, "POST", path, {"max_messages": 10})
            assert len(got) == left["messages"]

        async def gone() -> bool:
            return not (await nodes.request(node, "GET", "/v1/queues"))[1]

        await until(gone)
        assert (await nodes.request(node, "GET", "/v1/policies")) == (200, [])

    run(scenario)


def test_messages_are_got_from_any_shard_and_purged_from_all() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        names = await sharded(nodes, node)
        await publish(nodes, node, *"abcdef")
        _, first = await nodes.request(node, "POST", "/v1/exchanges/images/get", {})
        assert len(first) == 1
        assert first[0]["queue"] in names
        _, others = await nodes.request(node, "POST", "/v1/exchanges/images/get", {"max_messages": 3})
        assert len({message["body"] for message in (*first, *others)}) == 4
        assert await nodes.request(node, "POST", "/v1/exchanges/images/purge") == (
            200,
            {"name": "images", "messages": 2},
        )
        assert await nodes.request(node, "POST", "/v1/exchanges/images/get", {"max_messages": 3}) == (200, [])

    run(scenario)


def test_everything_about_a_message_comes_back() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        await sharded(nodes, node)
        message = {
            "body_base64": "/w==",
            "routing_key": "k",
            "headers": {"h": "v"},
            "headers_base64": {"b": "/w=="},
            "cc": ["c"],
            "bcc": ["d"],
            "properties": {"message_id": "7"},
            "expiration_ms": 60_000,
        }
        status, routed = await nodes.request(
            node, "POST", "/v1/exchanges/images/messages", {"messages": [message], "producer": "p", "sequence": 1}
        )
        assert (status, routed["routed"]) == (200, [1])
        again = {"messages": [message], "producer": "p", "sequence": 1}
        assert (await nodes.request(node, "POST", "/v1/exchanges/images/messages", again))[0] == 200
        _, got = await nodes.request(node, "POST", "/v1/exchanges/images/get", {"max_messages": 5})
        assert len(got) == 1  # the same stamp is stored once
        assert {name: got[0][name] for name in ("body", "body_base64", "routing_key", "properties")} == {
            "body": None,
            "body_base64": "/w==",
            "routing_key": "k",
            "properties": {"message_id": "7"},
        }
        assert (got[0]["headers"], got[0]["headers_base64"]) == ({"h": "v"}, {"b": "/w=="})

    run(scenario)


def test_queues_of_ones_own_are_declared_bound_and_deleted() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        await nodes.request(node, "POST", "/v1/exchanges", {"name": "events", "type": "direct"})
        assert (await nodes.request(node, "POST", "/v1/queues", {"name": "audit"}))[0] == 201
        binding = {"queue": "audit", "routing_key": "paid"}
        where = "/v1/exchanges/events/bindings"
        assert (await nodes.request(node, "POST", where, binding))[0] == 201
        status, error = await publish(nodes, node, "paid", "sent", exchange="events")
        assert (status, error["error"]["code"], error["error"]["fields"]["refused"]) == (409, "unroutable", [1])
        assert "1 of 2 messages, at 1 from 0; the others are stored" in error["error"]["message"]
        answer = await publish(nodes, node, "paid", "sent", exchange="events", mandatory=False)
        assert answer == (200, {"routed": [1, 0], "refused": {}})
        await nodes.request(node, "DELETE", f"{where}?queue=audit&routing_key=paid")
        assert (await publish(nodes, node, "paid", exchange="events", mandatory=False))[1]["routed"] == [0]
        assert (await nodes.request(node, "DELETE", "/v1/queues/audit"))[1] == {"name": "audit", "messages": 2}
        assert (await nodes.request(node, "GET", "/v1/queues/audit"))[0] == 404

    run(scenario)


def test_what_would_make_a_queue_of_a_sharded_exchange_is_refused_with_the_reason() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        names = await sharded(nodes, node)
        for method, path, body in (
            ("POST", "/v1/queues", {"name": "images"}),
            ("POST", "/v1/exchanges/images/bindings", {"queue": "images"}),
            ("DELETE", "/v1/exchanges/images/bindings?queue=images", None),
            ("DELETE", "/v1/queues/images", None),
            ("GET", "/v1/queues/images", None),
            ("POST", "/v1/queues/images/purge", None),
        ):
            status, error = await nodes.request(node, method, path, body)
            assert (status, error["error"]["code"]) == (400, "pseudo_queue"), path
            assert "'images' is a sharded exchange" in error["error"]["message"]
        status, error = await nodes.request(node, "DELETE", f"/v1/queues/{names[0]}")
        assert (status, error["error"]["code"]) == (400, "shard_managed")

    run(scenario)


@pytest.mark.parametrize(
    ("method", "path", "body", "says"),
    [
        ("PUT", "/v1/policies/p", {"pattern": "^a$", "shards_per_node": 0}, "shards_per_node is 0"),
        ("PUT", "/v1/policies/p", {"pattern": "^a$", "shards_per_node": 1001}, "from 1 to 1000"),
        ("PUT", "/v1/policies/p", {"pattern": "^a$", "shards_per_node": 2.5}, "shards_per_node is 2.5"),
        ("PUT", "/v1/policies/p", {"pattern": "^a$", "shards_per_node": "3"}, "shards_per_node is '3'"),
        ("PUT", "/v1/policies/p", {"pattern": "(", "shards_per_node": 1}, "pattern"),
        ("PUT", "/v1/policies/p", {"pattern": "a", "shards_per_node": 1, "overflow": "x"}, "drop-head"),
        (
            "PUT",
            "/v1/policies/p",
            {"pattern": "a", "shards_per_node": 1, "shards": 1},
            "one of pattern, shards_per_node",
        ),
        ("POST", "/v1/exchanges", {"name": "x", "type": "topic"}, "x-modulus-hash"),
        ("POST", "/v1/exchanges", {"name": ""}, "not empty"),
        ("POST", "/v1/exchanges", {"name": "a/b"}, "without '/'"),
        ("POST", "/v1/exchanges/direct/bindings", {"queue": "none"}, "does not exist"),
        ("POST", "/v1/exchanges/direct/messages", {"messages": []}, "messages"),
        ("POST", "/v1/exchanges/direct/messages", {"messages": [{"routing_key": "k"}]}, "body or body_base64"),
        ("POST", "/v1/exchanges/direct/messages", {"messages": [{"body_base64": "?"}]}, "base64"),
        (
            "POST",
            "/v1/exchanges/direct/messages",
            {"messages": [{"body": "", "headers": {"shardyard.x": ""}}]},
            "begin",
        ),
        ("POST", "/v1/exchanges/direct/messages", {"messages": [{"body": ""}], "producer": "p"}, "neither"),
        ("POST", "/v1/exchanges/direct/get", {"max_messages": 0}, "max_messages is 0"),
        ("GET", "/v1/exchanges?all=1", None, "query parameter is 'all'"),
        ("GET", "/v1/policies/none", None, "'none' does not exist"),
        ("DELETE", "/v1/nodes/none", None, "'none' is not known"),
        ("DELETE", "/v1/nodes/a", None, "is running: stop it first"),
        ("GET", "/v1/sharding/connect", None, "takes WebSocket connections"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(method: str, path: str, body: object, says: str) -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        await nodes.request(node, "POST", "/v1/exchanges", {"name": "direct", "type": "direct"})
        status, answer = await nodes.request(node, method, path, body)
        assert 400 <= status < 500
        assert says in answer["error"]["message"]
        assert len((await nodes.request(node, "GET", "/v1/exchanges"))[1]) == 1
        assert (await nodes.request(node, "GET", "/v1/policies"))[1] == []
        assert (await nodes.request(node, "GET", "/v1/queues"))[1] == []

    run(scenario)


def test_a_full_queue_refuses_its_messages_and_the_others_are_stored() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        await sharded(nodes, node, max_length=2, overflow="reject-publish")
        bodies = [str(number) for number in range(3)]
        keys = {"messages": [{"body": body, "routing_key": "same"} for body in bodies[:2]]}
        assert (await nodes.request(node, "POST", "/v1/exchanges/images/messages", keys))[1]["refused"] == {}
        mixed = {"messages": [{"body": "x", "routing_key": "same"}, {"body": "y", "routing_key": "cat.png"}]}
        status, error = await nodes.request(node, "POST", "/v1/exchanges/images/messages", mixed)
        assert (status, error["error"]["code"], error["error"]["fields"]["refused"]) == (409, "queue_full", [0])
        optional = mixed | {"mandatory": False}
        _, answer = await nodes.request(node, "POST", "/v1/exchanges/images/messages", optional)
        assert answer["routed"] == [0, 1]  # the two keys are in different shards
        assert "maximum length of 2" in answer["refused"]["0"]

    run(scenario)


def test_a_batch_that_was_refused_in_part_is_stored_whole_by_a_retry_under_its_stamp() -> None:
    """The queue `all` gets messages of both keys. It takes one part of the batch at first, and the other one later."""

    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        await nodes.request(node, "POST", "/v1/exchanges", {"name": "images", "type": "direct"})
        limited = IMAGES | {"shards_per_node": 1, "routing_key": "k", "max_length": 1, "overflow": "reject-publish"}
        await nodes.request(node, "PUT", "/v1/policies/images", limited)
        for key in ("k", "free"):
            binding = {"queue": "all", "routing_key": key, "declare": True}
            assert (await nodes.request(node, "POST", "/v1/exchanges/images/bindings", binding))[0] == 201
        await nodes.request(node, "POST", "/v1/exchanges/images/messages", {"messages": [{"body": "0"} | K]})
        keys = {"1": "free", "2": "k", "3": "free"}
        batch = [{"body": body, "routing_key": key} for body, key in keys.items()]
        stamped = {"messages": batch, "producer": "p", "sequence": 1, "mandatory": False}
        for _ in range(2):
            _, answer = await nodes.request(node, "POST", "/v1/exchanges/images/messages", stamped)
            assert (answer["routed"], list(answer["refused"])) == ([1, 0, 1], ["1"])
        assert (await nodes.request(node, "POST", "/v1/exchanges/images/purge"))[1]["messages"] == 1

        async def is_stored() -> bool:
            _, answer = await nodes.request(node, "POST", "/v1/exchanges/images/messages", stamped)
            return bool(answer["routed"] == [1, 2, 1])

        await until(is_stored)  # when the log has dropped what was purged
        assert await is_stored()
        for queue, bodies in (("all", "0132"), ("sharding: images - a - 0", "2")):
            status, got = await nodes.request(node, "POST", f"/v1/queues/{queue}/get", {"max_messages": 10})
            while status == 503:  # on a busy machine, the node may just have to take the queue again
                status, got = await nodes.request(node, "POST", f"/v1/queues/{queue}/get", {"max_messages": 10})
            assert status == 200, got
            assert "".join(message["body"] for message in got) == bodies

    run(scenario)


def test_any_node_does_what_the_owner_of_a_queue_has_to_do() -> None:
    async def scenario(nodes: Nodes, one: RunningNode, other: RunningNode) -> None:
        await nodes.request(other, "GET", "/v1/exchanges")  # it joins with its first request
        names = await sharded(nodes, one)
        assert len(names) == 4
        _, shards = await nodes.request(one, "GET", "/v1/queues?exchange=images")
        assert {shard["owner"] for shard in shards} == {"a", "b"}
        assert {shard["address"] for shard in shards} == {one.url, other.url}
        bodies = [f"m{number}" for number in range(40)]
        assert (await publish(nodes, other, *bodies))[1]["routed"] == [1] * 40
        for node in (one, other):
            _, shards = await nodes.request(node, "GET", "/v1/queues?exchange=images")
            assert sum(shard["ready"] for shard in shards) == 40
        got = []
        for node in (one, other):
            _, some = await nodes.request(node, "POST", "/v1/exchanges/images/get", {"max_messages": 15})
            assert len(some) == 15
            got += [message["body"] for message in some]
        assert len(set(got)) == 30
        assert (await nodes.request(one, "POST", "/v1/exchanges/images/purge"))[1]["messages"] == 10

    run_two(scenario, token="secret")


def unreachable(address: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let other nodes not reach the one at this address. Returns the paths of their requests to it."""
    requests: list[str] = []
    call = Forwarding.call

    async def fail(forwarding: Forwarding, to: str, method: str, path: str, *rest: Any, **options: Any) -> Any:
        if to != address:
            return await call(forwarding, to, method, path, *rest, **options)
        requests.append(path)
        return await call(forwarding, URL, method, path, *rest, **options)

    monkeypatch.setattr(Forwarding, "call", fail)
    return requests


def test_a_purge_waits_until_the_shards_of_a_dead_node_have_another_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(nodes: Nodes, one: RunningNode, other: RunningNode) -> None:
        await nodes.request(other, "GET", "/v1/exchanges")  # it joins with its first request
        await sharded(nodes, one)
        await publish(nodes, one, *(f"m{number}" for number in range(40)))
        requests = unreachable(other.url, monkeypatch)
        purging = asyncio.create_task(nodes.request(one, "POST", "/v1/exchanges/images/purge"))

        async def tried() -> bool:
            return len(requests) >= 2

        await until(tried)
        assert not purging.done()
        await nodes.stop("b")
        assert await purging == (200, {"name": "images", "messages": 40})

    run_two(scenario)


def test_a_purge_that_does_not_reach_a_node_names_the_shards_that_were_purged_and_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(nodes: Nodes, one: RunningNode, other: RunningNode) -> None:
        await nodes.request(other, "GET", "/v1/exchanges")  # it joins with its first request
        await sharded(nodes, one)
        await publish(nodes, one, *(f"m{number}" for number in range(40)))
        _, shards = await nodes.request(one, "GET", "/v1/queues?exchange=images")
        ours = [shard["name"] for shard in shards if shard["owner"] == "a"]
        theirs = [shard["name"] for shard in shards if shard["owner"] == "b"]
        waiting = sum(shard["ready"] for shard in shards if shard["name"] in ours)
        monkeypatch.setattr(service, "PURGE_SECONDS", 0.0)
        unreachable(other.url, monkeypatch)
        status, answer = await nodes.request(one, "POST", "/v1/exchanges/images/purge")
        error = answer["error"]
        assert (status, error["code"]) == (409, "partly_purged")
        fields = {"exchange": "images", "purged": ours, "not_purged": theirs, "messages": waiting}
        assert error["fields"] == fields
        assert error["message"] == (
            f"exchange 'images' was purged only in part. Purged: {ours[0]!r}, {ours[1]!r}, where {waiting} messages "
            f"waited. Not purged: {theirs[0]!r}, {theirs[1]!r} (the node at {URL} does not answer (connection "
            "refused): try again in a moment). Purge the exchange again when each of these has an owner that runs, "
            "which the list of shards shows"
        )
        async with nodes.client(one) as client:
            with pytest.raises(PartlyPurged) as raised:
                await client.purge("images")
            assert raised.value.not_purged == theirs
        monkeypatch.undo()
        _, purged = await nodes.request(one, "POST", "/v1/exchanges/images/purge")
        assert purged["messages"] == 40 - waiting

    run_two(scenario)


def test_an_exchange_is_deleted_with_the_shards_of_a_node_that_can_not_be_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(nodes: Nodes, one: RunningNode, other: RunningNode) -> None:
        await nodes.request(other, "GET", "/v1/exchanges")  # it joins with its first request
        await sharded(nodes, one)
        await publish(nodes, one, *(f"m{number}" for number in range(40)))
        unreachable(other.url, monkeypatch)
        deleted = await nodes.request(one, "DELETE", "/v1/exchanges/images?discard=true")
        assert deleted == (200, {"name": "images", "remaining": []})
        assert (await nodes.request(one, "GET", "/v1/queues"))[1] == []

    run_two(scenario)


def test_only_the_queues_that_are_asked_for_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    status = ShardQueue.status

    async def count(queue: ShardQueue) -> QueueStatus:
        counted.append(queue.name)
        return await status(queue)

    async def scenario(nodes: Nodes, one: RunningNode, other: RunningNode) -> None:
        await nodes.request(other, "GET", "/v1/exchanges")  # it joins with its first request
        names = await sharded(nodes, one, pattern="^(images|others)$")
        await nodes.request(one, "POST", "/v1/exchanges", {"name": "others"})
        monkeypatch.setattr(ShardQueue, "status", count)
        for path, expected in (
            ("/v1/exchanges/images", names),
            ("/v1/queues?exchange=images", names),
            (f"/v1/queues/{quote(names[0])}", names[:1]),
        ):
            for node in (one, other):
                counted.clear()
                assert (await nodes.request(node, "GET", path))[0] == 200
                assert sorted(counted) == expected

    run_two(scenario)


def test_nodes_are_listed_and_forgotten_when_they_do_not_run() -> None:
    async def scenario(nodes: Nodes, one: RunningNode, other: RunningNode) -> None:
        await nodes.request(other, "GET", "/v1/exchanges")
        await sharded(nodes, one)
        _, found = await nodes.request(one, "GET", "/v1/nodes")
        assert [(node["name"], node["is_running"], node["shards"]) for node in found] == [
            ("a", True, 2),
            ("b", True, 2),
        ]
        await nodes.stop("b")
        _, found = await nodes.request(one, "GET", "/v1/nodes")
        assert [(node["is_running"], node["address"]) for node in found] == [(True, one.url), (False, None)]
        status, removed = await nodes.request(one, "DELETE", "/v1/nodes/b")
        assert (status, removed["remaining"]) == (200, [])
        _, found = await nodes.request(one, "GET", "/v1/nodes")
        assert [(node["name"], node["shards"]) for node in found] == [("a", 2)]

    run_two(scenario)


def test_a_backlog_is_rebalanced_over_the_shards_of_a_node_that_joined() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        await sharded(nodes, node)
        await publish(nodes, node, *(f"m{number}" for number in range(60)))
        other = await nodes.start("b")
        await nodes.request(other, "GET", "/v1/exchanges")
        status, done = await nodes.request(node, "POST", "/v1/exchanges/images/rebalance")
        assert (status, done["total"]) == (200, 60)
        assert len(done["messages"]) == 4
        assert all(done["messages"].values())
        got: list[str] = []

        async def all_got() -> bool:
            status, some = await nodes.request(other, "POST", "/v1/exchanges/images/get", {"max_messages": 100})
            if status == 200:  # 503 while a shard has no owner
                got.extend(message["body"] for message in some)
            return len(got) == 60

        await until(all_got)
        assert len(set(got)) == 60

    run(scenario)


def test_metrics_say_what_is_in_each_queue_and_forget_those_that_are_gone() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        names = await sharded(nodes, node)
        await publish(nodes, node, *"abcdef")

        async def measured() -> dict[str, float]:
            async with nodes.session.get(f"{node.url}/metrics") as response:
                lines = (await response.text()).splitlines()
            found = [line.rpartition(" ") for line in lines if line.startswith("shardyard_sharding_ready_messages{")]
            return {name.split('"')[1]: float(value) for name, _, value in found}

        counts = await measured()
        assert sorted(counts) == names
        assert sum(counts.values()) == 6
        await nodes.request(node, "DELETE", "/v1/exchanges/images?discard=true")

        async def gone() -> bool:
            return not await measured()

        await until(gone)

    run(scenario)


def test_brokers_become_nodes_when_sharded_queues_are_used_and_create_nothing_before() -> None:
    async def scenario(nodes: Nodes, one: RunningNode, other: RunningNode) -> None:
        for node in (one, other):
            _, topics = await nodes.request(node, "GET", "/v1/topics")
            assert not [topic["name"] for topic in topics if "shard-states" in topic["name"]]
        await nodes.request(one, "POST", "/v1/exchanges", {"name": "images"})

        async def joined() -> bool:  # by itself: the other one has got no request
            _, found = await nodes.request(one, "GET", "/v1/nodes")
            return [node["name"] for node in found if node["is_running"]] == ["a", "b"]

        await until(joined)

    run_two(scenario)


def test_a_server_without_an_address_for_its_node_says_so() -> None:
    async def scenario(running: Running) -> None:
        async with running.session.get(f"{running.url}/v1/exchanges") as response:
            assert response.status == 400
            assert "started without an address for its node" in await response.text()

    run_server(scenario)
