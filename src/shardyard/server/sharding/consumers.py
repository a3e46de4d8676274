"""The consumers of one connection: what they are attached to, and who owns it."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from shardyard.model import Closed, RetryLater
from shardyard.sharding.node import ShardingNode
from shardyard.wire import sharding_frames as frames

if TYPE_CHECKING:
    from shardyard.sharding.attachments import AttachedQueues


class Consumers:
    """Sends each consumer its queues with the addresses of their owners, at once and whenever one of them changes."""

    def __init__(self, answer: Callable[[int, frames.Answer], None]) -> None:
        self._answer = answer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._attached: dict[int, AttachedQueues] = {}
        self._sent: dict[int, frames.Attached] = {}
        self._followed: ShardingNode | None = None
        self._following: list[asyncio.Task[None]] = []
        """Of this node: a broker that joins again has another one."""

    def __contains__(self, number: int) -> bool:
        return number in self._tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def open(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        """Start the work of a consumer, which calls `follow`."""
        task = self._tasks[number] = asyncio.create_task(work, name="consumer")
        task.add_done_callback(lambda _: self._forget(number) if self._tasks.get(number) is task else None)

    def close(self, number: int) -> None:
        """Detach a consumer."""
        self._tasks[number].cancel()
        self._forget(number)

    def close_all(self) -> None:
        for number in list(self._tasks):
            self.close(number)
        self._follow_node(None)

    def _forget(self, number: int) -> None:
        for by_number in (self._tasks, self._attached, self._sent):
            by_number.pop(number, None)

    async def follow(self, number: int, call: frames.Consume, sharding: ShardingNode) -> None:
        """Be attached until this is cancelled, or raises an error."""
        attachment = await sharding.attachments.attach(call.name, local=call.local)
        self._follow_node(sharding)
        try:
            async for attached in attachment:
                self._attached[number] = attached
                self._send(number, sharding)
        except Closed:
            raise RetryLater("this node is about to stop: use another one") from None
        finally:
            await asyncio.shield(attachment.detach())

    def _follow_node(self, sharding: ShardingNode | None) -> None:
        if self._followed is sharding:
            return
        for task in self._following:
            task.cancel()
        self._followed, self._following = sharding, []
        if sharding is not None:
            changes = (sharding.directory.changed, sharding.topology_cache.changed)  # a rebalance changes the slots
            self._following = [asyncio.create_task(self._follow(changed, sharding)) for changed in changes]

    async def _follow(self, changed: Callable[[], Awaitable[None]], sharding: ShardingNode) -> None:
        while True:
            for number in self._attached:
                self._send(number, sharding)
            await changed()

    def _send(self, number: int, sharding: ShardingNode) -> None:
        queues = sharding.topology.queues
        pairs = []
        for name in self._attached[number].queues:
            owner = sharding.directory.owner_of(queues[name].partition) if name in queues else None
            pairs.append((name, None if owner is None else owner.address))
        attached = frames.Attached(pairs)
        if self._sent.get(number) != attached:
            self._sent[number] = attached
            self._answer(number, attached)
