"""The rebalancer looks at the groups when something has changed or a time has come, and not otherwise."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shardyard.groups import Node, assignment, protocol
from shardyard.groups.rebalancer import LEASE, LOOK_SECONDS
from shardyard.log.memory import MemoryLog
from shardyard.model import Fenced, Partition, Topic
from shardyard.registry import Snapshot, lease
from shardyard.registry.memory import MemoryRegistry
from shardyard.runtime.clock import ManualClock

GROUP, TOPIC = "billing", "orders"


class CountingLog(MemoryLog):
    """Counts how often all topics were read."""

    times_read = 0

    async def topics(self) -> list[Topic]:
        self.times_read += 1
        return await super().topics()


class Environment:
    """A rebalancer whose rounds the test calls, and how often it looked at the groups."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self.log = CountingLog(clock=self.clock)
        self.registry = MemoryRegistry(self.clock)
        self.node = Node(self.log, self.registry, clock=self.clock)
        self.looks = 0
        look = assignment.look

        def counted(tx: Snapshot, *arguments: Any) -> assignment.Outlook:
            self.looks += 1
            return look(tx, *arguments)

        monkeypatch.setattr(assignment, "look", counted)

    def lead(self, holder: str = "this node") -> int:
        token = self.registry.run(lambda tx: lease.acquire(tx, LEASE, holder, 3600.0))
        assert token is not None
        return token

    def join(self, name: str, **options: Any) -> None:
        self.registry.run(lambda tx: protocol.join(tx, GROUP, name, topics=[TOPIC], **options))

    def owners(self) -> dict[Partition, str | None]:
        return {row.partition: row.owner for row in self.registry.read(lambda tx: tx.ownerships(GROUP))}

    async def round(self, token: int) -> int:
        """One round; returns how many decisions it made."""
        return len(await self.node.rebalancer.rebalance_all(token))


Scenario = Callable[[Environment], Awaitable[None]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Scenario], None]:
    async def with_environment(scenario: Scenario) -> None:
        env = Environment(monkeypatch)
        await env.log.create_topic(TOPIC, 4)
        try:
            await scenario(env)
        finally:
            await asyncio.to_thread(env.node.transactions.close)

    return lambda scenario: asyncio.run(with_environment(scenario))


def test_while_nothing_happens_it_reads_neither_topics_nor_groups_until_a_session_could_expire(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(env: Environment) -> None:
        token = env.lead()
        env.join("a", session_timeout=1.5)
        assert await env.round(token) == 1
        for _ in range(10):
            await env.clock.advance(0.1)
            assert await env.round(token) == 0
        assert (env.looks, env.log.times_read) == (1, 1)
        await env.clock.advance(0.6)
        assert await env.round(token) == 1, "the session has expired"
        assert set(env.owners().values()) == {None}
        assert (env.looks, env.log.times_read) == (2, 1)

    run(scenario)


def test_it_looks_from_time_to_time_in_any_case(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        token = env.lead()
        assert await env.round(token) == 0
        await env.clock.advance(LOOK_SECONDS - 0.1)
        await env.round(token)
        assert env.looks == 1
        await env.clock.advance(0.2)
        await env.round(token)
        assert env.looks == 2

    run(scenario)


def test_only_the_groups_of_a_topic_that_changed_are_rebalanced(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        token = env.lead()
        env.join("a")
        env.registry.run(lambda tx: protocol.join(tx, "other", "x", topics=["other"]))
        await env.log.create_topic("other", 1)
        assert await env.round(token) == 2
        await env.log.expand_topic(TOPIC, 6)
        assert await env.round(token) == 1
        assert set(env.owners().values()) == {"a"}
        assert len(env.owners()) == 6
        await env.log.create_topic("new", 1)
        assert await env.round(token) == 0
        await env.log.delete_topic(TOPIC)
        assert await env.round(token) == 1
        assert env.owners() == {}

    run(scenario)


def test_a_new_leader_looks_at_everything(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        first = env.lead()
        env.join("a")
        assert await env.round(first) == 1
        env.registry.run(lambda tx: lease.release(tx, LEASE, first))
        await env.log.expand_topic(TOPIC, 6)
        second = env.lead("another node")
        with pytest.raises(Fenced):
            await env.round(first)
        assert await env.round(second) == 1
        assert len(env.owners()) == 6

    run(scenario)


def test_what_failed_is_tried_again_in_the_next_round(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(env: Environment) -> None:
        token = env.lead()
        env.join("a")
        assert await env.round(token) == 1
        await env.log.expand_topic(TOPIC, 6)
        rebalance = assignment.rebalance

        def fail(*_: object) -> None:
            raise Fenced("not now")

        monkeypatch.setattr(assignment, "rebalance", fail)
        with pytest.raises(Fenced, match="not now"):
            await env.round(token)
        monkeypatch.setattr(assignment, "rebalance", rebalance)
        assert await env.round(token) == 1
        assert len(env.owners()) == 6

    run(scenario)
