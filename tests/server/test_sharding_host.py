"""The node that a broker hosts: when it joins the others, and joins again."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shardyard.groups import Node
from shardyard.log.memory import MemoryLog
from shardyard.model import InvalidCall, RetryLater
from shardyard.model.sharding import NODES_GROUP
from shardyard.registry.memory import MemoryRegistry
from shardyard.runtime.retry import Backoff
from shardyard.server.sharding.consumers import Consumers
from shardyard.server.sharding.host import HostedNode, NodeOptions
from shardyard.sharding.node import ShardingNode
from shardyard.wire import sharding_frames as frames
from tests.client.sharding_server import until

OPTIONS = NodeOptions.of("http://127.0.0.1:7400/", 7400, "a")


def run(scenario: Callable[[HostedNode], Awaitable[None]]) -> list[str]:
    """Returns the members of the group of nodes at the end."""

    async def whole() -> list[str]:
        with MemoryRegistry() as registry:
            async with asyncio.timeout(30), MemoryLog() as log, Node(log, registry) as node:
                async with HostedNode(node) as hosted:
                    await scenario(hosted)
                return [member.name for member in registry.read(lambda tx: tx.members(NODES_GROUP))]

    return asyncio.run(whole())


def test_a_node_has_a_name_of_its_own_or_one_by_port_and_host() -> None:
    assert (OPTIONS.name, OPTIONS.address) == ("a", "http://127.0.0.1:7400")
    assert NodeOptions.of("http://127.0.0.1:7400", 7400).name.startswith("shardyard-7400@")


def test_it_joins_with_the_first_call_and_leaves_at_the_end() -> None:
    async def scenario(hosted: HostedNode) -> None:
        hosted.start(OPTIONS)
        assert hosted.running is None
        first, second = await asyncio.gather(hosted.get(), hosted.get())
        assert first is second is hosted.running

    assert run(scenario) == []


def test_it_joins_again_when_its_membership_has_ended_by_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(hosted: HostedNode) -> None:
        hosted.start(OPTIONS)
        first = await hosted.get()
        first._ownership.failed(RuntimeError("a bug"))
        await until(lambda: hosted.running not in (None, first))
        assert await hosted.get() is not first

    assert run(scenario) == []
    assert "its membership has ended: a bug" in caplog.text


def test_a_consumer_that_attaches_after_its_node_joined_again_hears_of_new_owners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardyard.server.sharding.host.BACKOFF", Backoff(first=2.0, longest=2.0))
    answers: list[tuple[int, object]] = []

    async def scenario(hosted: HostedNode) -> None:
        consumers = Consumers(lambda number, answer: answers.append((number, answer)))

        async def consume(number: int) -> None:
            try:
                await consumers.follow(number, frames.Consume("q", False), await hosted.get())
            except RetryLater as error:
                answers.append((number, error))

        def owner_is(number: int, address: str) -> bool:
            return answers[-1:] == [(number, frames.Attached([("q", address)]))]

        hosted.start(OPTIONS)
        first = await hosted.get()
        await first.administration.declare_queue("q", "test")
        consumers.open(1, consume(1))
        await until(lambda: owner_is(1, OPTIONS.address))
        async with Node(first.node.log, first.node.registry) as node:
            async with ShardingNode(node, name="b", address="http://b") as other:
                first._ownership.failed(RuntimeError("a bug"))
                await until(lambda: 1 not in consumers)
                assert isinstance(answers[-1][1], RetryLater)
                await until(lambda: [queue.name for queue in other.queues] == ["q"])  # before the first one joins again
                await until(lambda: hosted.running not in (None, first))
                consumers.open(2, consume(2))  # on the same connection
                await until(lambda: owner_is(2, "http://b"))
            await until(lambda: owner_is(2, OPTIONS.address))
        consumers.close_all()

    assert run(scenario) == []


def test_without_an_address_there_is_no_node() -> None:
    async def scenario(hosted: HostedNode) -> None:
        with pytest.raises(InvalidCall, match="without an address"):
            await hosted.get()

    assert run(scenario) == []
