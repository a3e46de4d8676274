"""What a node does for its callers when a queue can't be read to the end, without a carrier in between."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from shardyard.model import NotOwner, ShardyardError, UnknownQueue
from shardyard.server.sharding.host import HostedNode
from shardyard.server.sharding.service import Service
from shardyard.sharding.delivery import Deliveries, Subscription
from shardyard.sharding.queue import ShardQueue
from tests.sharding.nodes import Nodes, nodes

BODIES = [f"m{number}" for number in range(10)]


def run(tmp_path: Path, shards: int, scenario: Callable[[Nodes, Service], Awaitable[None]]) -> None:
    """A scenario with one node, and messages in its queues."""

    async def whole() -> None:
        async with asyncio.timeout(30), nodes("memory", tmp_path) as yard:
            node = await yard.start("a")
            await yard.declare(shards)
            await yard.publish(BODIES)
            await scenario(yard, Service(node, HostedNode(node.node)))

    asyncio.run(whole())


async def left(queue: ShardQueue) -> list[tuple[str, int]]:
    """The messages that are in a queue, with how many deliveries of each failed."""
    found = []
    while (deliveries := await queue.get()) is not None:
        found.append((deliveries.records[0].value.decode(), deliveries.counts[0]))
    return found


def before_get(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[ShardQueue], Awaitable[object]]) -> None:
    """Do something before a message is got for the nth time, from whichever queue."""
    get = ShardQueue.get
    calls = itertools.count(1)

    async def act_and_get(queue: ShardQueue, holder: Subscription | None = None) -> Deliveries | None:
        if next(calls) == number:
            await act(queue)
        return await get(queue, holder)

    monkeypatch.setattr(ShardQueue, "get", act_and_get)


def test_messages_that_were_taken_before_their_queue_moves_stay_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(yard: Nodes, service: Service) -> None:
        (queue,) = yard.queues()
        before_get(monkeypatch, 6, lambda queue: queue.close())
        with pytest.raises(NotOwner):
            await service.get([queue.queue], 10)
        await yard.stop("a")
        await yard.start("a")
        assert await left(await yard.queue(queue.name)) == [(body, 0) for body in BODIES]

    run(tmp_path, 1, scenario)


@pytest.mark.parametrize("error", [UnknownQueue("images"), asyncio.CancelledError()])
def test_messages_that_were_taken_before_an_error_go_back_to_their_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    async def scenario(yard: Nodes, service: Service) -> None:
        (queue,) = yard.queues()

        async def fail(_: ShardQueue) -> None:
            raise error

        before_get(monkeypatch, 6, fail)
        with pytest.raises(type(error)):
            await service.get([queue.queue], 10)
        assert queue.unacked == 0
        assert await left(queue) == [(body, 0) for body in BODIES]

    run(tmp_path, 1, scenario)


@pytest.mark.parametrize("is_first", [True, False])
def test_the_messages_of_one_queue_are_returned_when_another_one_can_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    async def scenario(yard: Nodes, service: Service) -> None:
        first, second = yard.queues()
        waiting = (await first.status()).ready
        assert 0 < waiting < len(BODIES)

        async def fail(queue: ShardQueue) -> None:
            raise UnknownQueue(queue.name)

        monkeypatch.setattr("random.shuffle", lambda _: None)
        before_get(monkeypatch, 2 if is_first else waiting + 3, fail)
        got = await service.get([first.queue, second.queue], 100)
        bad, good = (first, second) if is_first else (second, first)
        assert {message.queue for message in got} == {good.name}
        assert sorted([message.body or "" for message in got] + [body for body, _ in await left(bad)]) == BODIES

    run(tmp_path, 2, scenario)


def test_an_error_of_a_queue_is_raised_when_no_other_one_has_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(yard: Nodes, service: Service) -> None:
        queues = [served.queue for served in yard.queues()]
        assert len(await service.get(queues, 100)) == len(BODIES)

        async def fail(queue: ShardQueue) -> None:
            raise UnknownQueue(queue.name)

        before_get(monkeypatch, 1, fail)
        with pytest.raises(ShardyardError, match="queue"):
            await service.get(queues, 1)
        assert await service.get(queues, 1) == []

    run(tmp_path, 2, scenario)
