"""What a node does for its callers, whichever carrier brings the call, and whichever node owns the queue."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar
from urllib.parse import quote

from fastapi import Request

from shardyard.model import NotOwner, PartlyPurged, QueueFull, ShardyardError, Stamp, UnknownQueue
from shardyard.model.sharding import OutgoingMessage, Queue
from shardyard.runtime.retry import Backoff, retry
from shardyard.server.auth import authorise
from shardyard.server.sharding.forwarding import FORWARDED
from shardyard.server.sharding.host import HostedNode
from shardyard.sharding.delivery import Deliveries
from shardyard.sharding.node import ShardingNode
from shardyard.sharding.routing import distribute
from shardyard.sharding.runs import runs_of
from shardyard.wire import sharding as wire

T = TypeVar("T")

COUNT_SECONDS = 2.0
"""For the counts of another node; without an answer, they are not known."""
PURGE_SECONDS = 10.0
"""For how long a purge waits until another node serves the queues of one that has died: some seconds more than the
session of a node."""
PURGE_ATTEMPT_SECONDS = 4.0
BACKOFF = Backoff(first=0.05, longest=0.5)
OWNED_PATH = "/v1/nodes/owned-queues"
MAX_GET_BYTES = 8 * 1024 * 1024
"""Of the messages of one queue that a request gets."""


class Service:
    """A node, and the others by forwarding."""

    def __init__(self, sharding: ShardingNode, hosted: HostedNode, *, is_forwarded: bool = False) -> None:
        """`is_forwarded`: the call came from another node, which takes this one for the owner."""
        self.sharding = sharding
        self._forwarding = hosted.forwarding
        self._is_forwarded = is_forwarded

    async def administer(self, change: Awaitable[T]) -> T:
        """Carry out a change of the topology. This node knows it on return, the others some milliseconds later."""
        result = await change
        await self.sharding.topology_cache.refresh()
        return result

    # Publishing

    async def publish(
        self, exchange: str, messages: Sequence[OutgoingMessage], stamp: Stamp | None
    ) -> tuple[list[int], dict[int, ShardyardError]]:
        """Publish messages; durable on return. Returns for each how many queues took it, and which were refused because
        a queue is full: the others are stored. The same call again, under the same stamp, stores those, too, when there
        is room."""
        runs = [] if stamp is None else runs_of(self.sharding.topology, exchange, messages)
        if stamp is None or len(runs) == 1:
            return await self._publish_run(exchange, messages, stamp)
        counts: list[int] = []
        refused: dict[int, ShardyardError] = {}
        for number, run in enumerate(runs):
            some, own = [messages[place] for place in run], Stamp(f"{stamp.producer}~{number}", stamp.sequence)
            taken, errors = await self._publish_run(exchange, some, own)
            counts += taken
            refused |= {run[at]: error for at, error in errors.items()}
        return counts, refused

    async def _publish_run(
        self, exchange: str, messages: Sequence[OutgoingMessage], stamp: Stamp | None
    ) -> tuple[list[int], dict[int, ShardyardError]]:
        refused: dict[int, ShardyardError] = {}
        left = list(range(len(messages)))
        while left:
            some = messages if len(left) == len(messages) else [messages[index] for index in left]
            try:
                counts = await self.sharding.publisher.publish(exchange, some, mandatory=False, stamp=stamp)
            except QueueFull as error:
                full = distribute(self.sharding.topology, exchange, some).by_queue.get(error.queue, range(len(some)))
                refused |= {left[at]: error for at in full}
                left = [index for index in left if index not in refused]
                continue
            routed = [0] * len(messages)
            for index, count in zip(left, counts, strict=True):
                routed[index] = count
            return routed, refused
        return [0] * len(messages), refused

    # Queues

    async def infos(self, queues: Iterable[Queue]) -> list[wire.QueueInfo]:
        """These queues with what is in them, as their owners say."""
        queues = list(queues)
        owners = {queue.name: self.sharding.directory.owner_of(queue.partition) for queue in queues}
        elsewhere: defaultdict[str, list[str]] = defaultdict(list)
        for name, owner in owners.items():
            if owner is not None and owner.address is not None and owner.address != self.sharding.address:
                elsewhere[owner.address].append(name)
        counts = await self.owned(owners)
        for others in await asyncio.gather(*(self._owned_by(*each) for each in elsewhere.items())):
            counts |= others
        return [
            wire.QueueInfo.of(
                queue,
                None if owner is None else owner.member,
                None if owner is None else owner.address,
                counts.get(queue.name),
            )
            for queue in queues
            for owner in (owners[queue.name],)
        ]

    async def owned(self, names: Iterable[str]) -> dict[str, wire.QueueCounts]:
        """What is in those of these queues that this node owns."""
        found = {}
        wanted = set(names)
        for served in self.sharding.queues:
            if served.name not in wanted:
                continue
            try:
                status = await served.status()
            except ShardyardError:  # it has just moved to another node
                continue
            found[served.name] = wire.QueueCounts(status.ready, status.unacked, status.consumers)
        return found

    async def _owned_by(self, address: str, names: list[str]) -> dict[str, wire.QueueCounts]:
        kind, body = dict[str, wire.QueueCounts], wire.QueueNames(names)
        try:
            return await self._forwarding.call(address, "POST", OWNED_PATH, kind, body, seconds=COUNT_SECONDS)
        except ShardyardError:
            return {}

    async def purge(self, name: str) -> int:
        """Remove the messages of a queue that wait for delivery. Returns how many they were. If its owner has died,
        this waits for the next one."""

        async def purge_once() -> int:
            try:
                return await self.sharding.queue(name).purge()
            except NotOwner as error:
                path, address = f"/v1/queues/{quote(name, safe='')}/purge", self._address(error)
                purged = await self._forwarding.call(address, "POST", path, wire.Purged, seconds=PURGE_ATTEMPT_SECONDS)
                return purged.messages

        if self._is_forwarded:  # the other node waits
            return await purge_once()
        clock = self.sharding.node.clock
        return await retry(purge_once, clock=clock, deadline=clock.monotonic() + PURGE_SECONDS, backoff=BACKOFF)

    async def purge_all(self, exchange: str, queues: Iterable[Queue]) -> int:
        """The same for the shards of an exchange. `PartlyPurged` if some of them were not purged."""
        names = [queue.name for queue in queues]
        outcomes = dict(zip(names, await asyncio.gather(*map(self._purged, names)), strict=True))
        errors = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, ShardyardError)}
        messages = sum(outcome for outcome in outcomes.values() if isinstance(outcome, int))
        if errors:
            purged = [name for name in names if name not in errors]
            raise PartlyPurged(exchange, purged, list(errors), messages, str(next(iter(errors.values()))))
        return messages

    async def _purged(self, name: str) -> int | ShardyardError:
        try:
            return await self.purge(name)
        except UnknownQueue:  # it was drained, and is gone
            return 0
        except ShardyardError as error:
            return error

    async def get(self, queues: Iterable[Queue], most: int) -> list[wire.GotMessage]:
        """Messages of these queues, which count as acknowledged. Queues that can't be read, for example because their
        owners are gone, are left out, unless no other one has a message."""
        found: list[wire.GotMessage] = []
        error: ShardyardError | None = None
        order = list(queues)
        random.shuffle(order)
        for queue in order:
            try:
                found += await self._get(queue.name, most - len(found))
            except ShardyardError as raised:  # what other queues gave is acknowledged: it must reach the caller
                error = raised
            if len(found) == most:
                return found
        if error is not None and not found:
            raise error
        return found

    async def _get(self, name: str, most: int) -> list[wire.GotMessage]:
        try:
            queue = self.sharding.queue(name)
        except NotOwner as error:
            path, body = f"/v1/queues/{quote(name, safe='')}/get", wire.GetMessages(most)
            return await self._forwarding.call(self._address(error), "POST", path, list[wire.GotMessage], body)
        holder = queue.getter()
        found: list[wire.GotMessage] = []
        size = 0
        try:
            while len(found) < most and size < MAX_GET_BYTES and (deliveries := await queue.get(holder)) is not None:
                found += got_messages(name, deliveries)
                size += sum(len(record.value) for record in deliveries.records)
        except BaseException:  # the caller gets none of them
            if holder.unacked:
                holder.nack_tags(range(1, holder.unacked + 1), failed=False)
            raise
        holder.ack(0, multiple=True)
        return found

    def _address(self, error: NotOwner) -> str:
        """Where to forward a call. The error, if that is unknown, or the call was forwarded already."""
        if error.address is None or self._is_forwarded:
            raise error
        return error.address


def got_messages(queue: str, deliveries: Deliveries) -> list[wire.GotMessage]:
    return [
        wire.GotMessage.of(
            queue,
            record.value,
            (record.key or b"").decode(),
            record.headers,
            record.timestamp,
            redelivered=redelivered,
            delivery_count=count,
        )
        for record, redelivered, count in zip(
            deliveries.records, deliveries.redelivered, deliveries.counts, strict=True
        )
    ]


def hosted_of(request: Request) -> HostedNode:
    hosted: HostedNode = request.app.state.hosted
    return hosted


async def authorised_service(request: Request) -> Service:
    """The service, if the caller sent the broker's token. `WrongToken` otherwise."""
    await authorise(request)
    hosted = hosted_of(request)
    return Service(await hosted.get(), hosted, is_forwarded=FORWARDED in request.headers)
