"""Nodes and consumers as processes that are killed under load: nothing is lost, and nothing is stuck."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from shardyard.client.sharding import Message, ShardingClient
from tests.queues.brokers import BrokerProcess

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

WAIT_SECONDS = 60.0


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110 any condition
            await asyncio.sleep(0.02)


async def until_seen(condition: Callable[[], Awaitable[object]]) -> None:
    """The same for a condition that takes a request."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not await condition():  # noqa: ASYNC110 any condition
            await asyncio.sleep(0.05)


class Load:
    """A publisher and two consumers that go on, whatever happens to the nodes."""

    def __init__(self, client: ShardingClient) -> None:
        self.client = client
        self.published: list[str] = []
        """What was acknowledged to the publisher."""
        self.consumed: list[str] = []
        self.unsettled: list[Message] = []
        """Deliveries that the second consumer keeps."""
        self.keeps = False
        self._is_stopped = False

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(work()) for work in (self._publish, self._consume, self._keep)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop_publishing(self) -> None:
        self._is_stopped = True

    async def more(self, count: int = 100) -> None:
        """Return after so many more were published, and everything of before was consumed."""
        before = set(self.published)
        target = len(self.published) + count
        await until(lambda: len(self.published) >= target)
        await until(lambda: before <= set(self.consumed))

    async def _publish(self) -> None:
        images = self.client.exchange("images")
        number = 0
        while not self._is_stopped:
            bodies = [f"m{number + n}" for n in range(10)]
            await asyncio.gather(*(images.publish(body, routing_key=body) for body in bodies))
            self.published += bodies
            number += 10

    async def _consume(self) -> None:
        async with self.client.channel(prefetch=20) as channel:
            async for message in channel.consume("images"):
                self.consumed.append(message.body.decode())
                await message.ack()

    async def _keep(self) -> None:
        """Acknowledges nothing while `keeps`."""
        async with self.client.channel(prefetch=20) as channel:
            async for message in channel.consume("images"):
                if self.keeps:
                    self.unsettled.append(message)
                else:
                    self.consumed.append(message.body.decode())
                    await message.ack()

    async def requeue_kept(self) -> None:
        """Give back what was kept. Of a node that is gone, it comes again anyway."""
        self.keeps = False
        for message in self.unsettled:
            await message.nack()

    async def drained(self) -> None:
        """Return when everything was consumed, and no queue has anything left."""
        self.stop_publishing()
        await until(lambda: set(self.published) <= set(self.consumed))
        await until_seen(self._is_empty)

    async def _is_empty(self) -> bool:
        return all(shard.ready == shard.unacknowledged == 0 for shard in await self.client.queues("images"))

    async def are_running(self, count: int) -> bool:
        return sum(node.is_running for node in await self.client.nodes()) == count

    async def has_shards(self, count: int) -> bool:
        return len(await self.client.queues("images")) == count


@contextlib.asynccontextmanager
async def under_load(*brokers: BrokerProcess) -> AsyncIterator[Load]:
    """Load on two shards for each node."""
    async with ShardingClient([broker.url for broker in brokers], retry_seconds=60.0) as client:
        await client.declare_exchange("images")
        await client.set_policy("images", "^images$", 2)
        load = Load(client)
        async with load.running():
            await load.more()
            await until_seen(lambda: load.has_shards(2 * len(brokers)))
            yield load


def started(folder: Path, *names: str, database: str | None = None) -> list[BrokerProcess]:
    brokers = [BrokerProcess(folder, name, database=database) for name in names]
    for broker in brokers:
        broker.start()
    for broker in brokers:
        broker.listens()
    return brokers


def a_consumer(broker: BrokerProcess, folder: Path) -> "subprocess.Popen[str]":
    """A consumer as a process, whose output is in a file."""
    command = [sys.executable, "-m", "shardyard.cli", "exchanges", "consume", "images", "--broker", broker.url]
    with (folder / "consumed").open("a") as output:
        return subprocess.Popen([*command, "--prefetch", "50"], stdout=output, stderr=subprocess.DEVNULL, text=True)


def test_nodes_are_killed_one_after_the_other_and_a_consumer_under_load(tmp_path: Path) -> None:
    async def whole(one: BrokerProcess, other: BrokerProcess) -> None:
        async with under_load(one, other) as load:
            consumer = a_consumer(other, tmp_path)
            try:
                await until(lambda: (tmp_path / "consumed").read_text().count("\n") > 20)
            finally:
                consumer.kill()
                consumer.wait()
            load.keeps = True
            await until(lambda: len(load.unsettled) >= 20)
            one.kill()
            await load.requeue_kept()
            printed = (tmp_path / "consumed").read_text().splitlines()
            load.consumed += [line.split("\t")[2] for line in printed]
            await load.more()
            names = {shard.name for shard in await load.client.queues("images")}
            one.start()
            one.listens()
            await load.more()
            await until_seen(lambda: load.are_running(2))
            other.kill()
            await load.more()
            assert {shard.name for shard in await load.client.queues("images")} == names
            await load.drained()

    one, other = started(tmp_path, "one", "other")
    try:
        asyncio.run(whole(one, other))
    finally:
        one.kill()
        other.kill()


@pytest.mark.server
def test_a_node_on_postgresql_is_killed_under_load(tmp_path: Path, postgresql_url: str) -> None:
    async def whole(one: BrokerProcess, other: BrokerProcess) -> None:
        async with under_load(one, other) as load:
            load.keeps = True
            await until(lambda: len(load.unsettled) >= 20)
            one.kill()
            await load.requeue_kept()
            await load.more()
            await load.drained()

    one, other = started(tmp_path, "one", "other", database=postgresql_url)
    try:
        asyncio.run(whole(one, other))
    finally:
        one.kill()
        other.kill()


def test_what_was_acknowledged_never_comes_again_after_a_clean_stop(tmp_path: Path) -> None:
    async def whole(broker: BrokerProcess) -> None:
        async with ShardingClient(broker.url, retry_seconds=60.0) as client:
            images = await client.declare_exchange("images")
            await client.set_policy("images", "^images$", 2)
            bodies = [f"m{n}" for n in range(200)]
            await asyncio.gather(*(images.publish(body, routing_key=body) for body in bodies))
            done: set[str] = set()
            async with client.channel() as channel:
                async for message in channel.consume("images"):
                    if int(message.body[1:]) % 3:  # acknowledged out of order, with holes
                        await message.ack()
                        done.add(message.body.decode())
                    if len(done) == len([body for body in bodies if int(body[1:]) % 3]):
                        break
            broker.process.terminate()
            await asyncio.to_thread(broker.process.wait)
            broker.kill()  # it is gone, and this closes its output
            broker.start()
            broker.listens()
            again: list[str] = []
            async with client.channel() as channel:
                async for message in channel.consume("images"):
                    again.append(message.body.decode())
                    await message.ack()
                    if len(again) + len(done) == len(bodies):
                        break
            assert sorted(again) == sorted(set(bodies) - done)

    (broker,) = started(tmp_path, "one")
    try:
        asyncio.run(whole(broker))
    finally:
        broker.kill()
