"""The client of sharded queues, with nodes that follow a script."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest

from shardyard.client.brokers import BACKOFF
from shardyard.client.sharding import OutgoingMessage, ShardingClient
from shardyard.client.sharding.channel import ShardingChannel
from shardyard.client.sharding.feed import Feed
from shardyard.client.sharding.publishing import checked
from shardyard.model import (
    Busy,
    Closed,
    InvalidCall,
    InvalidValue,
    NotOwner,
    QueueFull,
    ShardyardError,
    TooLarge,
    UnknownDeliveryTag,
    UnknownExchange,
    Unreachable,
    Unroutable,
    WrongToken,
)
from shardyard.runtime.clock import Clock, ManualClock
from shardyard.wire import sharding as wire
from shardyard.wire import sharding_frames as frames
from shardyard.wire.errors import error_body
from shardyard.wire.frames import messages
from tests.client.sharding_server import Peer, ScriptedNode, deliveries, until

if TYPE_CHECKING:
    from shardyard.client.sharding.api import Message

Scenario = Callable[[ShardingClient, ScriptedNode], Awaitable[None]]


@contextlib.asynccontextmanager
async def two_nodes(
    *, known: int, clock: Clock | None = None
) -> AsyncIterator[tuple[ScriptedNode, ScriptedNode, ShardingClient]]:
    """Two nodes, and a client that was given the addresses of the first ones."""
    async with (
        ScriptedNode().running() as one,
        ScriptedNode().running() as other,
        ShardingClient([one.url, other.url][:known], clock=clock) as client,
    ):
        yield one, other, client


def run(scenario: Scenario, **options: Any) -> None:
    async def whole() -> None:
        async with ScriptedNode().running() as node, ShardingClient(node.url, **options) as client:
            await scenario(client, node)

    asyncio.run(whole())


# Publishing


def test_publishes_of_one_turn_travel_in_one_frame_in_their_order() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        images = client.exchange("images")
        sends = [asyncio.create_task(images.publish(f"{n}", routing_key=f"k{n}")) for n in range(64)]
        peer = await node.accept()
        call = await peer.routes()
        assert call.exchange == "images"
        assert call.messages.bodies == [b"%d" % n for n in range(64)]
        assert call.messages.routing_keys == [f"k{n}" for n in range(64)]
        assert await asyncio.gather(*sends) == [1] * 64
        assert len(peer.messages) == 1

    run(scenario)


def test_what_is_published_while_a_frame_is_in_flight_travels_in_the_next_one() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        images = client.exchange("images")
        first = asyncio.create_task(images.publish("first"))
        peer = await node.accept()
        number, _ = await peer.get(frames.Publish)
        others = [asyncio.create_task(images.publish(body)) for body in ("second", "third")]
        await asyncio.sleep(0)
        assert not peer.has_calls
        await peer.answer(number, frames.Routed([1]))
        assert await first == 1
        call = await peer.routes(1, 2)
        assert call.messages.bodies == [b"second", b"third"]
        assert await asyncio.gather(*others) == [1, 2]

    run(scenario)


def test_everything_about_a_message_is_sent() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        publish = client.exchange("images").publish(
            {"a": 1},
            routing_key="cat.png",
            headers={"h": "v"},
            cc=["dog.png"],
            bcc=["bird.png"],
            expiration_ms=500,
            properties={"content_type": "application/json"},
            message_id="m1",
        )
        sending = asyncio.create_task(publish)
        call = await (await node.accept()).routes()
        assert call.messages.messages() == [
            OutgoingMessage(
                b'{"a":1}',
                "cat.png",
                (("h", b"v"),),
                ("dog.png",),
                ("bird.png",),
                (("content_type", "application/json"), ("message_id", "m1")),
                500,
            )
        ]
        await sending

    run(scenario)


def test_a_large_batch_is_cut_into_frames_that_keep_its_order() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        batch = [OutgoingMessage(b"%d" % n) for n in range(2_500)]
        sending = asyncio.create_task(client.exchange("images").publish_batch(batch))
        peer = await node.accept()
        calls = [await peer.routes() for _ in range(3)]
        assert [body for call in calls for body in call.messages.bodies] == [message.body for message in batch]
        assert [call.sequence for call in calls] == [1, 2, 3]
        assert len({call.producer for call in calls}) == 1
        assert await sending == [1] * 2_500

    run(scenario)


def test_a_message_that_no_queue_took_is_unroutable_unless_it_may_be() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        images = client.exchange("images")
        sends = [
            asyncio.create_task(images.publish("a", routing_key="x")),
            asyncio.create_task(images.publish("b", mandatory=False)),
        ]
        peer = await node.accept()
        await peer.routes(0, 0)
        with pytest.raises(Unroutable, match="'images' routes the message with routing key 'x'"):
            await sends[0]
        assert await sends[1] == 0
        batch = asyncio.create_task(images.publish_batch([OutgoingMessage(b"", "y"), OutgoingMessage(b"", "z")]))
        await peer.routes(1, 0)
        with pytest.raises(Unroutable, match=r"'z'.* 1 of 2 messages, at 1 from 0; the others are stored") as error:
            await batch
        assert error.value.refused == [1]

    run(scenario)


def test_a_message_that_is_refused_fails_alone() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        images = client.exchange("images")
        sends = [asyncio.create_task(images.publish(body)) for body in "ab"]
        peer = await node.accept()
        number, _ = await peer.get(frames.Publish)
        await peer.answer(number, frames.Routed([1, 0], {1: error_body(QueueFull("q", 5))}))
        assert await sends[0] == 1
        with pytest.raises(QueueFull, match="maximum length of 5"):
            await sends[1]

    run(scenario)


def test_a_publish_is_sent_again_with_the_same_stamp_after_the_connection_was_lost() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        sending = asyncio.create_task(client.exchange("images").publish("a"))
        peer = await node.accept()
        _, first = await peer.get(frames.Publish)
        peer.abort()
        again = await (await node.accept()).routes()
        assert again == first
        assert await sending == 1

    run(scenario)


def test_a_publish_is_sent_again_while_the_node_asks_for_it() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        sending = asyncio.create_task(client.exchange("images").publish("a"))
        peer = await node.accept()
        number, first = await peer.get(frames.Publish)
        await peer.fail(number, Busy("the log", 1.0))
        assert await peer.routes() == first
        await sending

    run(scenario)


def test_a_publish_fails_over_to_another_node() -> None:
    async def whole() -> None:
        async with two_nodes(known=2) as (one, other, client):
            sending = asyncio.create_task(client.exchange("images").publish("a"))
            accepting = [asyncio.create_task(node.accept()) for node in (one, other)]
            done, (left,) = await asyncio.wait(accepting, return_when=asyncio.FIRST_COMPLETED)
            peer = done.pop().result()
            _, first = await peer.get(frames.Publish)
            peer.abort()
            assert await (await left).routes() == first
            assert await sending == 1

    asyncio.run(whole())


def test_an_error_of_the_node_is_raised_at_once() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        sending = asyncio.create_task(client.exchange("images").publish("a"))
        peer = await node.accept()
        number, _ = await peer.get(frames.Publish)
        await peer.fail(number, UnknownExchange("images"))
        with pytest.raises(UnknownExchange, match="'images' does not exist"):
            await sending

    run(scenario)


def test_a_wrong_token_and_a_node_out_of_reach_are_said() -> None:
    async def refused(client: ShardingClient, node: ScriptedNode) -> None:
        node.status = 401
        with pytest.raises(WrongToken):
            await client.exchange("images").publish("a")
        with pytest.raises(WrongToken):
            await anext((await opened(client)).consume("images"))
        assert set(node.tokens) == {"Bearer secret"}

    async def gone(client: ShardingClient, node: ScriptedNode) -> None:
        node.status = 503
        with pytest.raises(Unreachable, match="status 503"):
            await client.exchange("images").publish("a")

    run(refused, token="secret")
    run(gone, retry_seconds=0.1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"body": 5}, InvalidValue),
        ({"body": "a", "routing_key": 7}, InvalidValue),
        ({"body": "a", "routing_key": "\ud800"}, InvalidValue),
        ({"body": "a", "cc": "cat.png"}, InvalidValue),
        ({"body": "a", "bcc": [1]}, InvalidValue),
        ({"body": "a", "headers": {"shardyard.cc": "x"}}, InvalidValue),
        ({"body": "a", "headers": {"property.x": "x"}}, InvalidValue),
        ({"body": "a", "headers": {"x": 1}}, InvalidValue),
        ({"body": "a", "properties": {"content_type": 1}}, InvalidValue),
        ({"body": "a", "expiration_ms": -1}, InvalidValue),
        ({"body": "a", "expiration_ms": "5"}, InvalidValue),
        ({"body": b"x" * 2_000_000}, TooLarge),
    ],
)
def test_a_wrong_message_is_refused_without_a_call(arguments: dict[str, Any], expected: type[ShardyardError]) -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        with pytest.raises(expected):
            await client.exchange("images").publish(**arguments)
        assert not node.tokens

    run(scenario)


def test_the_body_of_a_message_of_a_batch_may_be_a_string() -> None:
    assert checked(OutgoingMessage("text", "key")) == OutgoingMessage(b"text", "key")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="expected bytes, a string"):
        checked(OutgoingMessage(5))  # type: ignore[arg-type]


def test_what_waits_is_published_before_the_client_is_closed_and_nothing_after() -> None:
    async def whole() -> None:
        async with ScriptedNode().running() as node:
            async with ShardingClient(node.url) as client:
                images = client.exchange("images")
                sending = asyncio.create_task(images.publish("a"))
                peer = await node.accept()
                routing = asyncio.create_task(peer.routes())
            await routing
            assert await sending == 1
            with pytest.raises(Closed):
                await images.publish("b")
            with pytest.raises(Closed):
                client.channel()

    asyncio.run(whole())


# Consuming


async def attached(peer: Peer, *queues: tuple[str, str | None]) -> int:
    """Answer the next consume with these queues. Returns its number."""
    number, _ = await peer.get(frames.Consume)
    await peer.answer(number, frames.Attached(list(queues)))
    return number


async def opened(client: ShardingClient) -> ShardingChannel:
    """A channel that is closed with its client."""
    return await client.channel().__aenter__()


def take(messages: "list[Message]", consumer: Any) -> "asyncio.Task[None]":
    async def work() -> None:
        async for message in consumer:
            messages.append(message)

    return asyncio.create_task(work())


def test_a_channel_that_was_not_entered_says_how_to_open_it() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        with pytest.raises(InvalidCall, match="the channel is not open: enter it by `async with` first"):
            client.channel().consume("images")
        assert node._peers.empty()

    run(scenario)


def test_a_client_that_was_not_entered_says_how_to_open_it() -> None:
    async def whole() -> None:
        client = ShardingClient("127.0.0.1:1")
        for call in (client.exchange("images").publish("a"), client.get("images"), client.exchanges()):
            with pytest.raises(InvalidCall, match="the client is not open: enter it by `async with` first"):
                await call
        with pytest.raises(InvalidCall, match="the client is not open"):
            await anext((await opened(client)).consume("images"))

    asyncio.run(whole())


def test_a_consumer_gets_the_messages_of_the_queue_that_it_is_attached_to() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        async with client.channel(prefetch=7) as channel:
            consumer = channel.consume("images")
            coming = asyncio.create_task(anext(consumer))
            peer = await node.accept()
            await attached(peer, ("q", node.url))
            number, call = await peer.get(frames.Subscribe)
            assert call == frames.Subscribe("q", 7)
            await peer.answer(number, deliveries(1, "a", "b"), deliveries(3, "c", redelivered=True))
            first = await coming
            second, third = await anext(consumer), await anext(consumer)
            assert [(m.body, m.routing_key, m.queue) for m in (first, second)] == [
                (b"a", "key-a", "q"),
                (b"b", "key-b", "q"),
            ]
            assert (first.redelivered, first.delivery_count, first.timestamp) == (False, 0, 7)
            assert (third.redelivered, third.delivery_count) == (True, 1)
            assert [m.delivery_tag for m in (first, second, third)] == [1, 2, 3]
            for message in (first, second, third):
                await message.ack()
            assert await peer.settled() == frames.Ack(number, [1, 2, 3])  # in one frame
            closing = asyncio.create_task(channel.close())
            await peer.get(frames.Cancel)
            cancelled, _ = await peer.get(frames.Cancel)
            await peer.answer(cancelled, frames.ENDED)
            await closing

    run(scenario)


def test_headers_and_properties_are_those_of_the_publisher() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        channel = await opened(client)
        coming = asyncio.create_task(anext(channel.consume("images")))
        peer = await node.accept()
        await attached(peer, ("q", node.url))
        number, _ = await peer.get(frames.Subscribe)
        headers = (("shardyard.version", b"3"), ("property.message_id", b"m1"), ("own", b"v"))
        await peer.answer(number, frames.Deliveries(1, [b"a"], ["k"], [7], [headers]))
        message = await coming
        assert message.headers == (("own", b"v"),)
        assert message.properties == {"message_id": "m1"}
        peer.abort()

    run(scenario)


def test_nack_reject_and_multiple_settle_what_they_say() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        channel = await opened(client)
        consumer = channel.consume("images")
        coming = asyncio.create_task(anext(consumer))
        peer = await node.accept()
        await attached(peer, ("q", node.url))
        number, _ = await peer.get(frames.Subscribe)
        await peer.answer(number, deliveries(1, *"abcdef"))
        messages = [await coming, *[await anext(consumer) for _ in range(5)]]
        await messages[1].nack()
        assert await peer.settled() == frames.Nack(number, [2], requeue=True)
        await messages[3].ack(multiple=True)
        assert await peer.settled() == frames.Ack(number, [1, 3, 4])
        await messages[4].reject()
        assert await peer.settled() == frames.Nack(number, [5], requeue=False)
        with pytest.raises(UnknownDeliveryTag, match="delivery tag 5 is unknown: it is settled already"):
            await messages[4].ack()
        with pytest.raises(UnknownDeliveryTag):
            await messages[0].nack()
        await messages[5].nack(requeue=True, multiple=True)
        assert await peer.settled() == frames.Nack(number, [6], requeue=True)
        peer.abort()

    run(scenario)


def test_acknowledgements_of_deliveries_that_came_together_travel_together() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        channel = await opened(client)

        async def acknowledge_all() -> None:
            async for message in channel.consume("images"):
                await message.ack()

        working = asyncio.create_task(acknowledge_all())
        peer = await node.accept()
        await attached(peer, *((f"q{n}", node.url) for n in range(3)))
        numbers = [(await peer.get(frames.Subscribe))[0] for _ in range(3)]
        delivered = [frames.encode_frame(number, deliveries(1, "a", "b")) for number in numbers]
        (together,) = messages(delivered)
        before = len(peer.messages)
        await peer.socket.send_bytes(together)
        acks = [await peer.settled() for _ in numbers]
        assert {(ack.subscription, *ack.tags) for ack in acks} == {(number, 1, 2) for number in numbers}
        assert len(peer.messages) == before + 1
        working.cancel()
        peer.abort()

    run(scenario)


def test_without_acknowledgements_there_is_nothing_to_acknowledge() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        channel = await opened(client)
        coming = asyncio.create_task(anext(channel.consume("images", no_ack=True)))
        peer = await node.accept()
        await attached(peer, ("q", node.url))
        number, call = await peer.get(frames.Subscribe)
        assert call.no_ack
        await peer.answer(number, deliveries(1, "a"))
        with pytest.raises(UnknownDeliveryTag, match="no_ack"):
            await (await coming).ack()
        peer.abort()

    run(scenario)


def test_a_consumer_subscribes_at_the_owner_of_each_queue() -> None:
    async def whole() -> None:
        async with two_nodes(known=1) as (home, owner, client):
            messages: list[Message] = []
            taking = take(messages, (await opened(client)).consume("images"))
            home_peer = await home.accept()
            await attached(home_peer, ("here", home.url), ("there", owner.url))
            here, _ = await home_peer.get(frames.Subscribe)
            owner_peer = await owner.accept()
            there, call = await owner_peer.get(frames.Subscribe)
            assert call.queue == "there"
            await home_peer.answer(here, deliveries(1, "a"))
            await owner_peer.answer(there, deliveries(1, "b"))
            await until(lambda: len(messages) == 2)
            assert {message.queue: message.body for message in messages} == {"here": b"a", "there": b"b"}
            await messages[0].ack(multiple=False)
            await messages[1].ack(multiple=True)  # each goes to the node that delivered it
            assert (await home_peer.settled()).tags == [1]
            assert (await owner_peer.settled()).tags == [1]
            taking.cancel()
            home_peer.abort()
            owner_peer.abort()

    asyncio.run(whole())


def test_a_consumer_follows_a_queue_to_its_next_owner() -> None:
    async def whole() -> None:
        async with two_nodes(known=1) as (home, owner, client):
            messages: list[Message] = []
            taking = take(messages, (await opened(client)).consume("images"))
            peer = await home.accept()
            await attached(peer, ("q", home.url))
            number, _ = await peer.get(frames.Subscribe)
            await peer.answer(number, deliveries(1, "a"))
            await until(lambda: messages)
            await peer.fail(number, NotOwner("q", owner.url))
            owner_peer = await owner.accept()
            there, call = await owner_peer.get(frames.Subscribe)
            assert call.queue == "q"
            await messages[0].ack()  # it is lost, and comes again
            await owner_peer.answer(there, deliveries(1, "a", redelivered=True))
            await until(lambda: len(messages) == 2)
            assert messages[1].redelivered
            await messages[1].ack()
            assert await owner_peer.settled() == frames.Ack(there, [1])
            assert not peer.has_calls
            taking.cancel()
            peer.abort()
            owner_peer.abort()

    asyncio.run(whole())


def test_a_consumer_follows_its_queue_also_after_errors_that_have_passed() -> None:
    async def whole() -> None:
        clock = ManualClock()
        async with two_nodes(known=1, clock=clock) as (home, owner, client):
            taking = take([], (await opened(client)).consume("images"))
            peer = await home.accept()
            await attached(peer, ("q", home.url))
            for _ in range(3):
                number, _ = await peer.get(frames.Subscribe)
                await peer.fail(number, NotOwner("q", None))
            number, _ = await peer.get(frames.Subscribe)
            await clock.advance(BACKOFF.longest)  # it works as long as that
            await peer.fail(number, NotOwner("q", owner.url))
            owner_peer = await owner.accept()
            await owner_peer.get(frames.Subscribe)
            taking.cancel()
            peer.abort()
            owner_peer.abort()

    asyncio.run(whole())


def test_a_consumer_reconnects_and_subscribes_again_by_itself() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        messages: list[Message] = []
        taking = take(messages, (await opened(client)).consume("images"))
        peer = await node.accept()
        await attached(peer, ("q", node.url))
        number, _ = await peer.get(frames.Subscribe)
        await peer.answer(number, deliveries(1, "a", "b"))
        await until(lambda: len(messages) == 2)
        peer.abort()
        peer = await node.accept()
        calls = [await peer.get(frames.Consume | frames.Subscribe) for _ in range(2)]  # type: ignore[arg-type]
        by_kind: dict[type, int] = {type(call): number for number, call in calls}
        await peer.answer(by_kind[frames.Consume], frames.Attached([("q", node.url)]))
        await peer.answer(by_kind[frames.Subscribe], deliveries(1, "a", "b", redelivered=True))
        await until(lambda: len(messages) == 4)
        assert [m.redelivered for m in messages] == [False, False, True, True]
        assert [m.delivery_tag for m in messages] == [1, 2, 3, 4]
        taking.cancel()
        peer.abort()

    run(scenario)


def test_deliveries_that_were_not_taken_before_the_connection_was_lost_are_dropped() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        consumer = (await opened(client)).consume("images")
        coming = asyncio.create_task(anext(consumer))
        peer = await node.accept()
        await attached(peer, ("q", node.url))
        number, _ = await peer.get(frames.Subscribe)
        await peer.answer(number, deliveries(1, "a", "b", "c"))
        assert (await coming).body == b"a"
        peer.abort()
        await peer.ended.wait()
        peer = await node.accept()
        coming = asyncio.create_task(anext(consumer))
        calls = [await peer.get(frames.Consume | frames.Subscribe) for _ in range(2)]  # type: ignore[arg-type]
        again = next(number for number, call in calls if isinstance(call, frames.Subscribe))
        await peer.answer(again, deliveries(1, "a", redelivered=True))
        assert (await coming).redelivered  # "b" and "c" come again from the node, too
        peer.abort()

    run(scenario)


def test_a_queue_that_is_taken_away_is_left_when_its_deliveries_are_settled() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        messages: list[Message] = []
        taking = take(messages, (await opened(client)).consume("images"))
        peer = await node.accept()
        consume = await attached(peer, ("q", node.url), ("r", node.url))
        q, _ = await peer.get(frames.Subscribe)
        r, _ = await peer.get(frames.Subscribe)
        await peer.answer(q, deliveries(1, "a"))
        await until(lambda: messages)
        await peer.answer(consume, frames.Attached([("r", node.url)]))
        cancelled, _ = await peer.get(frames.Cancel)
        assert cancelled == q
        await peer.answer(q, frames.ENDED)
        await messages[0].ack()
        assert await peer.settled() == frames.Ack(q, [1])
        await peer.answer(consume, frames.Attached([("q", node.url), ("r", node.url)]))
        _, again = await peer.get(frames.Subscribe)
        assert again.queue == "q"
        assert r != q
        taking.cancel()
        peer.abort()

    run(scenario)


def test_a_queue_that_is_attached_again_is_read_while_its_earlier_deliveries_are_not_settled() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        messages: list[Message] = []
        channel = await opened(client)
        taking = take(messages, channel.consume("images"))
        peer = await node.accept()
        consume = await attached(peer, ("q", node.url))
        first, _ = await peer.get(frames.Subscribe)
        await peer.answer(first, deliveries(1, "a"))
        await until(lambda: messages)
        await peer.answer(consume, frames.Attached([]))
        assert (await peer.get(frames.Cancel))[0] == first
        await peer.answer(first, frames.ENDED)
        await peer.answer(consume, frames.Attached([("q", node.url)]))
        second, call = await peer.get(frames.Subscribe)
        assert call.queue == "q"
        await peer.answer(second, deliveries(1, "b"))
        await until(lambda: len(messages) == 2)
        await messages[0].ack()
        assert await peer.settled() == frames.Ack(first, [1])
        await messages[1].ack()
        assert await peer.settled() == frames.Ack(second, [1])
        taking.cancel()
        closing = asyncio.create_task(channel.close())
        cancelled = {(await peer.get(frames.Cancel))[0] for _ in range(2)}
        assert cancelled == {consume, second}  # the first one is done
        await peer.answer(second, frames.ENDED)
        await closing

    run(scenario)


def test_what_is_not_acknowledged_goes_back_with_the_end_of_the_channel() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        channel = await opened(client)
        consumer = channel.consume("images")
        coming = asyncio.create_task(anext(consumer))
        peer = await node.accept()
        consume = await attached(peer, ("q", node.url))
        number, _ = await peer.get(frames.Subscribe)
        await peer.answer(number, deliveries(1, "a", "b", "c"))
        message = await coming
        closing = asyncio.create_task(channel.close())
        cancelled = [(await peer.get(frames.Cancel))[0] for _ in range(2)]
        assert sorted(cancelled) == sorted([consume, number])
        await peer.answer(number, deliveries(4, "d"), frames.ENDED)  # one more was on its way
        await closing
        returned = [(await peer.settled()) for _ in range(1)]
        while sum(len(call.tags) for call in returned) < 4:
            returned.append(await peer.settled())
        assert all(isinstance(call, frames.Nack) and call.requeue for call in returned)
        tried = {tag: call.failed for call in returned if isinstance(call, frames.Nack) for tag in call.tags}
        assert tried == {1: True, 2: False, 3: False, 4: False}  # the program has got only the first one
        with pytest.raises(UnknownDeliveryTag, match="end of its channel"):
            await message.ack()
        with pytest.raises(StopAsyncIteration):
            await anext(consumer)
        with pytest.raises(Closed):
            channel.consume("images")

    run(scenario)


def test_consuming_what_does_not_exist_ends_with_the_error() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        coming = asyncio.create_task(anext((await opened(client)).consume("nothing")))
        peer = await node.accept()
        number, _ = await peer.get(frames.Consume)
        await peer.fail(number, UnknownExchange("nothing"))
        with pytest.raises(UnknownExchange):
            await coming

    run(scenario)


def test_a_consumer_waits_for_an_owner_and_for_a_node_that_asks_it_to_retry() -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        messages: list[Message] = []
        taking = take(messages, (await opened(client)).consume("images"))
        peer = await node.accept()
        number, _ = await peer.get(frames.Consume)
        await peer.fail(number, Busy("the registry", 1.0))
        cancelled, _ = await peer.get(frames.Cancel)
        assert cancelled == number
        consume = await attached(peer, ("q", None))
        await peer.answer(consume, frames.Attached([("q", node.url)]))
        subscribed, _ = await peer.get(frames.Subscribe)
        await peer.answer(subscribed, deliveries(1, "a"))
        await until(lambda: messages)
        taking.cancel()
        peer.abort()

    run(scenario)


# Getting


@contextlib.asynccontextmanager
async def getting(
    client: ShardingClient, node: ScriptedNode, monkeypatch: pytest.MonkeyPatch
) -> "AsyncIterator[tuple[asyncio.Task[Message | None], Peer, int]]":
    """A get from queue "q", which the node has received."""

    async def queues(_: ShardingClient, name: str) -> list[wire.QueueInfo]:
        return [wire.QueueInfo(name, "plain", "active", None, None, None, 0, "a", node.url, 1, 0, 0)]

    monkeypatch.setattr(ShardingClient, "_queues_of", queues)
    task = asyncio.create_task(client.get("q"))
    peer = await node.accept()
    number, call = await peer.get(frames.Get)
    assert call == frames.Get("q", False)
    yield task, peer, number


def test_a_message_that_is_got_is_acknowledged_by_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        async with getting(client, node, monkeypatch) as (task, peer, number):
            await peer.answer(number, deliveries(1, "a"))
            message = await task
            assert message is not None
            assert message.body == b"a"
            await message.ack()
            assert await peer.settled() == frames.Ack(number, [1])

    run(scenario)


def test_a_message_that_comes_after_its_get_was_cancelled_goes_back_to_its_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        async with getting(client, node, monkeypatch) as (task, peer, number):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await peer.answer(number, deliveries(1, "a"))
            assert await peer.settled() == frames.Nack(number, [1], True, failed=False)

    run(scenario)


def test_a_message_that_comes_as_its_get_is_cancelled_goes_back_to_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        receive = Feed._receive

        def receive_and_cancel(feed: Feed, answer: frames.Answer) -> None:
            receive(feed, answer)
            task.cancel()

        monkeypatch.setattr(Feed, "_receive", receive_and_cancel)
        async with getting(client, node, monkeypatch) as (task, peer, number):
            await peer.answer(number, deliveries(1, "a"))
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await peer.settled() == frames.Nack(number, [1], True, failed=False)

    run(scenario)


def test_a_message_that_comes_too_late_goes_back_to_its_queue_and_is_got_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(client: ShardingClient, node: ScriptedNode) -> None:
        client._nodes.response_seconds = 0.01
        async with getting(client, node, monkeypatch) as (task, peer, number):
            client._nodes.response_seconds = 20.0
            again, _ = await peer.get(frames.Get)
            await peer.answer(number, deliveries(1, "a"))
            assert await peer.settled() == frames.Nack(number, [1], True, failed=False)
            await peer.answer(again, deliveries(1, "a", redelivered=True))
            message = await task
            assert message is not None
            assert message.redelivered
            await message.ack()
            assert await peer.settled() == frames.Ack(again, [1])

    run(scenario)


@pytest.mark.parametrize("prefetch", [0, -1, 10_001, 2.5, "3", True])
def test_a_wrong_prefetch_is_refused(prefetch: Any) -> None:
    with pytest.raises(InvalidValue, match="prefetch"):
        ShardingClient("127.0.0.1:7400").channel(prefetch=prefetch)


@pytest.mark.parametrize("shards", [0, 2.5, "3", True, -1])
def test_a_wrong_number_of_shards_is_refused_at_once(shards: Any) -> None:
    async def whole() -> None:
        async with ShardingClient("127.0.0.1:1") as client:
            with pytest.raises(InvalidValue, match=r"shards_per_node is .* expected a whole number of at least 1"):
                await client.set_policy("p", "^images$", shards)

    asyncio.run(whole())
