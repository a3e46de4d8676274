"""Moving the messages of a RabbitMQ, which a mover that dies at any step does without losing or doubling one."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import aio_pika
import pytest
from aio_pika.abc import AbstractConnection, AbstractIncomingMessage

from shardyard.client.rabbitmq.mover import QueueInUse, QueueMover, _Notes
from shardyard.client.sharding.publishing import checked
from shardyard.model import Stamp
from shardyard.model.sharding import OutgoingMessage
from tests.rabbitmq import RabbitMQ

QUEUE = "moved"


class Died(Exception):
    """A mover that is killed."""


class Target:
    """Stores messages once for a stamp, as Shardyard does."""

    def __init__(self) -> None:
        self.messages: list[OutgoingMessage] = []
        self.stamps: dict[Stamp, int] = {}

    async def publish(self, messages: Sequence[OutgoingMessage], stamp: Stamp) -> None:
        if stamp in self.stamps:
            assert self.stamps[stamp] == len(messages)
            return
        self.stamps[stamp] = len(messages)
        self.messages += messages


def run(rabbitmq: RabbitMQ, scenario: Callable[[AbstractConnection], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with await aio_pika.connect(rabbitmq.url) as connection, connection.channel() as channel:
            queue = await channel.declare_queue(QUEUE, durable=True)
            try:
                await scenario(connection)
            finally:
                await queue.delete(if_unused=False, if_empty=False)

    asyncio.run(whole())


async def fill(connection: AbstractConnection, bodies: Sequence[bytes]) -> None:
    async with connection.channel() as channel:
        for body in bodies:
            message = aio_pika.Message(body, headers={"color": "red", "CC": ["other"]}, message_id="7")
            await channel.default_exchange.publish(message, QUEUE)


def mover(connection: AbstractConnection, target: Target) -> QueueMover:
    return QueueMover(connection, QUEUE, target.publish, batch_messages=7, idle_seconds=0.1)


def test_a_queue_is_moved_in_order_with_headers_and_properties(rabbitmq: RabbitMQ) -> None:
    async def scenario(connection: AbstractConnection) -> None:
        target = Target()
        bodies = [b"%d" % n for n in range(20)]
        await fill(connection, bodies)
        batches: list[int] = []
        assert await mover(connection, target).run(batches.append) == 20
        assert batches == [7, 7, 6]
        assert [message.body for message in target.messages] == bodies
        expected = OutgoingMessage(b"0", QUEUE, (("color", b"red"),), ("other",), (), (("message_id", "7"),))
        assert target.messages[0] == expected
        assert await mover(connection, target).run() == 0

    run(rabbitmq, scenario)


@pytest.mark.parametrize("contents", ["different", "equal"])
@pytest.mark.parametrize("step", ["take", "begin", "publish", "published", "acknowledged", "done"])
def test_a_mover_that_dies_at_any_step_loses_and_doubles_nothing(
    rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch, step: str, contents: str
) -> None:
    """Each mover dies at the same step of its second batch, until one has nothing left to do."""

    async def scenario(connection: AbstractConnection) -> None:
        target = Target()
        bodies = [b"%d" % n if contents == "different" else b"x" for n in range(40)]
        await fill(connection, bodies)
        for _ in range(20):
            async with await aio_pika.connect(rabbitmq.url) as doomed:
                dying = mover(doomed, target)
                with monkeypatch.context() as patch:
                    kill_at(dying, step, patch)
                    try:
                        await dying.run()
                    except Died:
                        continue
                break
        else:
            pytest.fail("no mover came to its end")
        assert Counter(message.body for message in target.messages) == Counter(bodies)
        assert [message.body for message in target.messages] == bodies

    run(rabbitmq, scenario)


def kill_at(mover: QueueMover, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a mover fail before or after a step of its second batch. Its connection is closed then, as by a kill."""
    times = 0

    def reached(name: str) -> None:
        nonlocal times
        times += name == step
        if times == 2:
            raise Died

    def watch(owner: object, method: str, before: str, after: str) -> None:
        do = getattr(owner, method)

        async def watched(*arguments: object) -> object:
            reached(before)
            result = await do(*arguments)
            reached(after)
            return result

        monkeypatch.setattr(owner, method, watched)

    watch(mover, "_take", "", "take")
    watch(mover, "_publish", "publish", "published")
    watch(_Notes, "begin", "", "begin")
    watch(_Notes, "end", "acknowledged", "done")


def test_a_batch_that_was_begun_is_recognised_by_a_mover_with_smaller_batches(
    rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(connection: AbstractConnection) -> None:
        target = Target()
        bodies = [b"%d" % n for n in range(20)]
        await fill(connection, bodies)
        async with await aio_pika.connect(rabbitmq.url) as doomed:
            dying = mover(doomed, target)
            with monkeypatch.context() as patch:
                kill_at(dying, "published", patch)
                with pytest.raises(Died):
                    await dying.run()
        smaller = QueueMover(connection, QUEUE, target.publish, batch_messages=2, idle_seconds=0.1)
        await smaller.run()
        assert [message.body for message in target.messages] == bodies

    run(rabbitmq, scenario)


def test_headers_and_properties_that_shardyard_does_not_take_do_not_stop_the_mover(rabbitmq: RabbitMQ) -> None:
    async def scenario(connection: AbstractConnection) -> None:
        target = Target()
        async with connection.channel() as channel:
            message = aio_pika.Message(b"x", headers={"property.a": 1, "shardyard.b": "c"}, correlation_id="")
            await channel.default_exchange.publish(message, QUEUE)
        await mover(connection, target).run()
        [moved] = target.messages
        assert moved.headers == (("rabbitmq.property.a", b"1"), ("rabbitmq.shardyard.b", b"c"))
        assert "correlation_id" not in dict(moved.properties)
        assert checked(moved) == moved

    run(rabbitmq, scenario)


def test_a_queue_with_other_consumers_is_refused(rabbitmq: RabbitMQ) -> None:
    async def scenario(connection: AbstractConnection) -> None:
        async with connection.channel() as channel:
            queue = await channel.get_queue(QUEUE)

            async def ignore(message: AbstractIncomingMessage) -> None:
                """Keep it."""

            await queue.consume(ignore)
            with pytest.raises(QueueInUse, match="stop them"):
                await mover(connection, Target()).run()

    run(rabbitmq, scenario)
