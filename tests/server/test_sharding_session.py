"""The frames of a connection to a node, by hand."""

import asyncio
import random

import aiohttp
import pytest

from shardyard.model.sharding import OutgoingMessage
from shardyard.server.limits import ServerLimits
from shardyard.wire import sharding_frames as frames
from shardyard.wire.close_codes import CloseCode
from shardyard.wire.frames import SUBPROTOCOL, messages
from shardyard.wire.sharding_frames import Ack, Cancel, Consume, Get, MessageColumns, Nack, Publish, Subscribe
from tests.server.sharding import Connection, Nodes, RunningNode, run, run_two, until
from tests.wire.frame_damage import damaged

QUEUE = "sharding: images - a - 0"


async def one_shard(nodes: Nodes, node: RunningNode, count: int = 0) -> Connection:
    """A connection, after `images` was declared with one shard for each node, and so many messages were published."""
    await nodes.request(node, "POST", "/v1/exchanges", {"name": "images"})
    await nodes.request(node, "PUT", "/v1/policies/p", {"pattern": "^images$", "shards_per_node": 1})

    async def served() -> bool:
        _, shards = await nodes.request(node, "GET", "/v1/queues")
        return all(shard["ready"] is not None for shard in shards)

    await until(served)
    connection = await nodes.connect(node)
    if count:
        assert await connection.call(1_000, publish(*(f"m{number}" for number in range(count)))) == frames.Routed(
            [1] * count
        )
    return connection


def publish(*bodies: str, sequence: int | None = None) -> Publish:
    outgoing = [OutgoingMessage(body.encode(), "k") for body in bodies]
    return Publish("images", MessageColumns.of(outgoing), None if sequence is None else "p", sequence)


async def ready(nodes: Nodes, node: RunningNode) -> tuple[int, int]:
    """How many messages wait in the shard, and how many are not acknowledged."""
    _, shard = await nodes.request(node, "GET", f"/v1/queues/{QUEUE}")
    return shard["ready"], shard["unacknowledged"]


def test_a_publish_is_answered_with_counts_and_stored_once() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        connection = await one_shard(nodes, node)
        for number in (1, 2):  # the same again
            assert await connection.call(number, publish("a", "b", sequence=1)) == frames.Routed([1, 1])
        assert await ready(nodes, node) == (2, 0)
        assert await connection.code(3, Publish("none", MessageColumns([b""], [""]))) == "unknown_exchange"
        half = Publish("images", MessageColumns([b""], [""]), "p")
        assert await connection.code(4, half) == "invalid_call"
        reserved = MessageColumns([b""], [""], [(("shardyard.version", b"1"),)])
        assert await connection.code(5, Publish("images", reserved)) == "invalid_value"

    run(scenario)


def test_deliveries_come_in_order_up_to_the_prefetch_and_go_on_with_acknowledgements() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        connection = await one_shard(nodes, node, 6)
        await connection.send((1, Subscribe(QUEUE, 2)))
        assert await connection.bodies(1, 2) == [b"m0", b"m1"]
        assert await ready(nodes, node) == (4, 2)
        assert await connection.call(2, Ack(1, [1])) == frames.DONE
        assert await connection.bodies(1, 1) == [b"m2"]
        assert await connection.call(3, Ack(1, [3], multiple=True)) == frames.DONE
        assert await connection.bodies(1, 2) == [b"m3", b"m4"]
        assert await connection.call(4, Nack(1, [4])) == frames.DONE
        again = await connection.deliveries(1)
        assert (again.bodies, again.redelivered, again.counts) == ([b"m3"], [True], [1])
        assert await connection.call(5, Ack(1, [5, 6])) == frames.DONE
        assert await connection.bodies(1, 1) == [b"m5"]

    run(scenario)


def test_an_unknown_tag_or_one_that_was_settled_is_an_error_and_settles_nothing() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        connection = await one_shard(nodes, node, 3)
        await connection.send((1, Subscribe(QUEUE, 10)))
        await connection.bodies(1, 3)
        await connection.call(2, Ack(1, [2]))
        for call in (Ack(1, [1, 2]), Ack(1, [1, 9]), Nack(1, [3, 2]), Ack(1, [1, 1]), Ack(7, [1]), Ack(1, [9], True)):
            assert await connection.code(3, call) == "unknown_delivery_tag"
        assert await ready(nodes, node) == (0, 2)

    run(scenario)


def test_without_acknowledgements_messages_are_done_as_they_are_delivered() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        connection = await one_shard(nodes, node, 3)
        await connection.send((1, Subscribe(QUEUE, 1, no_ack=True)))
        assert await connection.bodies(1, 3) == [b"m0", b"m1", b"m2"]
        assert await ready(nodes, node) == (0, 0)
        assert await connection.code(2, Ack(1, [1])) == "unknown_delivery_tag"

    run(scenario)


def test_after_a_cancel_no_more_is_delivered_and_what_was_can_be_acknowledged() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        connection = await one_shard(nodes, node, 3)
        await connection.send((1, Subscribe(QUEUE, 2)))
        await connection.bodies(1, 2)
        assert await connection.call(1, Cancel()) == frames.ENDED
        assert await connection.call(2, Ack(1, [1, 2])) == frames.DONE
        assert await ready(nodes, node) == (1, 0)
        assert await connection.code(3, Ack(1, [2])) == "unknown_delivery_tag"
        await connection.send((1, Subscribe(QUEUE, 2)))  # its number is free
        assert await connection.bodies(1, 1) == [b"m2"]

    run(scenario)


def test_what_is_not_acknowledged_is_delivered_again_when_the_connection_ends() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        connection = await one_shard(nodes, node, 3)
        await connection.send((1, Subscribe(QUEUE, 10)))
        await connection.bodies(1, 3)
        await connection.call(2, Ack(1, [2]))
        other = await nodes.connect(node)
        await other.send((1, Subscribe(QUEUE, 10)))
        await connection.socket.close()
        found = await other.deliveries(1)
        while len(found) < 2:
            found = await other.deliveries(1)
        assert (found.bodies, found.redelivered) == ([b"m0", b"m2"], [True, True])

    run(scenario)


def test_a_message_is_got_and_acknowledged_or_given_back() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        connection = await one_shard(nodes, node, 1)
        got = await connection.call(1, Get(QUEUE))
        assert isinstance(got, frames.Deliveries)
        assert got.bodies == [b"m0"]
        assert await connection.call(2, Get(QUEUE)) == frames.Deliveries(1, [], [], [])
        assert await connection.call(3, Nack(1, [got.first_tag])) == frames.DONE
        again = await connection.call(4, Get(QUEUE))
        assert isinstance(again, frames.Deliveries)
        assert again.redelivered == [True]
        assert await connection.call(5, Ack(4, [again.first_tag])) == frames.DONE
        assert await ready(nodes, node) == (0, 0)
        assert await connection.code(6, Get("none")) == "unknown_queue"

    run(scenario)


def test_a_consumer_gets_its_queues_at_once_and_after_each_change() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        connection = await one_shard(nodes, node)
        assert await connection.call(1, Consume("images")) == frames.Attached([(QUEUE, node.url)])
        assert await connection.call(2, Consume(QUEUE)) == frames.Attached([(QUEUE, node.url)])
        assert await connection.code(3, Consume("none")) == "unknown_queue"
        other = await nodes.start("b")
        await nodes.request(other, "GET", "/v1/exchanges")
        expected = {QUEUE, "sharding: images - b - 0"}
        while True:
            attached = await connection.answer(1)
            assert isinstance(attached, frames.Attached)
            if {queue for queue, address in attached.queues if address} == expected:
                break
        await connection.send((1, Cancel()), (2, Subscribe(QUEUE, 1)))
        assert await answer_after_changes(connection, 1) == frames.ENDED
        refused = await answer_after_changes(connection, 2)  # because the number is in use
        assert isinstance(refused, frames.Failed)
        assert refused.error.code == "invalid_call"

    run(scenario)


async def answer_after_changes(connection: Connection, number: int) -> frames.Answer:
    """The next answer to a call that is not a change of the consumer's queues."""
    while isinstance(answer := await connection.answer(number), frames.Attached):
        pass
    return answer


def test_a_queue_of_another_node_is_refused_with_its_address() -> None:
    async def scenario(nodes: Nodes, one: RunningNode, other: RunningNode) -> None:
        await nodes.request(other, "GET", "/v1/exchanges")
        await one_shard(nodes, one)
        _, shards = await nodes.request(one, "GET", "/v1/queues")
        theirs = next(shard["name"] for shard in shards if shard["owner"] == "b")
        connection = await nodes.connect(one)
        for call in (Subscribe(theirs, 1), Get(theirs)):
            answer = await connection.call(1, call)
            assert isinstance(answer, frames.Failed)
            assert (answer.error.code, answer.error.fields["address"]) == ("not_owner", other.url)

    run_two(scenario)


def test_a_node_that_stops_answers_closes_and_hands_its_queues_over() -> None:
    async def scenario(nodes: Nodes, one: RunningNode, other: RunningNode) -> None:
        await nodes.request(other, "GET", "/v1/exchanges")
        connection = await one_shard(nodes, one, 3)
        await connection.send((1, Subscribe(QUEUE, 10)))
        closed, _ = await asyncio.gather(connection.closed(), nodes.stop("a"))
        assert closed == CloseCode.DRAINING

        async def taken_over() -> bool:
            _, shards = await nodes.request(other, "GET", "/v1/queues")
            return all(shard["owner"] == "b" and shard["ready"] is not None for shard in shards)

        await until(taken_over)
        _, got = await nodes.request(other, "POST", "/v1/exchanges/images/get", {"max_messages": 10})
        assert sorted(message["body"] for message in got) == ["m0", "m1", "m2"]

    run_two(scenario)


def test_a_client_that_does_not_read_gets_no_more_messages_until_it_does() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        connection = await one_shard(nodes, node)
        large = "x" * 100_000
        for number in range(8):
            await connection.call(number, publish(*[large] * 50))
        slow = await nodes.connect(node)
        await slow.send((1, Subscribe(QUEUE, 10_000)))

        async def delivered() -> bool:
            return (await ready(nodes, node))[1] > 0

        await until(delivered)
        await asyncio.sleep(0.3)  # there is nothing to wait for: it must not go on
        waiting, _ = await ready(nodes, node)
        assert waiting > 0
        assert len(await slow.bodies(1, 400)) == 400

    run(scenario)


def test_the_token_is_required() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await nodes.session.ws_connect(node.url + frames.PATH, protocols=[SUBPROTOCOL], headers=headers)
            assert refused.value.status == 401
        await one_shard(nodes, node, 1)

    run(scenario, token="secret")


def test_a_message_that_is_no_array_of_frames_closes_the_connection() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        connection = await one_shard(nodes, node)
        await connection.socket.send_bytes(b"\x91\x93\x01\x91\x00")
        assert await connection.closed() == CloseCode.MALFORMED
        connection = await nodes.connect(node)
        await connection.socket.send_bytes(b"\x91\x92\x01\x91\x00")  # a frame of an unknown kind
        assert isinstance(await connection.answer(1), frames.Failed)

    run(scenario)


def test_a_connection_has_a_limited_number_of_calls() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        connection = await one_shard(nodes, node)
        for number in range(3):
            await connection.call(number, Consume(QUEUE))
        assert await connection.code(4, Subscribe(QUEUE, 1)) == "overloaded"
        await connection.call(0, Cancel())
        await connection.send((4, Subscribe(QUEUE, 1)))
        await connection.call(9, Cancel())  # of nothing
        assert await connection.call(4, Cancel()) == frames.ENDED

    run(scenario, limits=ServerLimits(calls=3))


def test_deliveries_of_a_queue_that_is_no_longer_served_here_can_not_be_settled() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        connection = await one_shard(nodes, node, 3)
        assert isinstance(await connection.call(1, Get(QUEUE)), frames.Deliveries)
        await connection.send((2, Subscribe(QUEUE, 1)), (3, Subscribe(QUEUE, 1)))
        await connection.bodies(2, 1)
        await connection.call(2, Cancel())
        await nodes.request(node, "DELETE", "/v1/exchanges/images?discard=true")
        while not isinstance(ended := await connection.answer(3), frames.Failed):
            pass
        assert ended.error.code == "not_owner"
        for number in (1, 2):
            assert await connection.code(9, Ack(number, [1])) == "unknown_delivery_tag"

    run(scenario)


def test_a_message_that_the_consumer_did_not_try_comes_again_without_a_failed_delivery() -> None:
    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        connection = await one_shard(nodes, node, 1)
        for number in (1, 2, 3):
            got = await connection.call(number, Get(QUEUE))
            assert isinstance(got, frames.Deliveries)
            assert (got.bodies, got.counts) == ([b"m0"], None)
            assert await connection.call(9, Nack(number, [got.first_tag], failed=False)) == frames.DONE

    run(scenario)


def test_damaged_frames_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(5)
    calls: list[frames.Call] = [
        publish("a", "b", sequence=1),
        Consume("images"),
        Subscribe(QUEUE, 5),
        Get(QUEUE),
        Ack(2, [1, 2]),
        Nack(2, [3], requeue=False),
        Ack(3, [4], multiple=True),
        Cancel(),
    ]

    def a_message() -> bytes:
        chosen = [(chance.randrange(6), chance.choice(calls)) for _ in range(chance.randrange(1, 6))]
        (message,) = messages([frames.encode_frame(number, call) for number, call in chosen])
        return message if chance.random() < 0.5 else damaged(message, chance)

    async def scenario(nodes: Nodes, node: RunningNode) -> None:
        connection = await one_shard(nodes, node, 20)
        for _ in range(400):
            try:
                await connection.socket.send_bytes(a_message())
            except ConnectionError:
                connection = await nodes.connect(node)
            if connection.socket.closed or chance.random() < 0.05:
                await connection.socket.close()
                connection = await nodes.connect(node)
        connection = await nodes.connect(node)
        assert await connection.call(1, publish("still there")) == frames.Routed([1])
        assert isinstance(await connection.call(2, Get(QUEUE)), frames.Deliveries)

    run(scenario)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
