"""Publishes dead letters: to the exchange that the policy names, or into a queue of their own."""

from collections.abc import Sequence

from msgspec import structs

from shardyard.model import Record, TooLarge, UnknownExchange
from shardyard.model.sharding import Queue, QueueState, dead_letter_queue_name
from shardyard.runtime.metrics import SHARDING_DROPPED
from shardyard.sharding.administration import Administration
from shardyard.sharding.dead_letters import DeadLetter, dead_letter_headers, is_cycle
from shardyard.sharding.messages import routed_by, to_message, version_header
from shardyard.sharding.publishing import Publisher, PublishWork
from shardyard.sharding.topology_cache import TopologyCache


class DeadLetterPublisher:
    """Where the dead letters of a node's queues go.

    Those that the policy's exchange does not take, because it was deleted or has no queue for them, go into the queue
    `dead letters: <exchange or queue>`, so that none is lost.
    """

    def __init__(self, publisher: Publisher, administration: Administration, topology: TopologyCache, who: str) -> None:
        """`who`: for the audit log, when the queue is created."""
        self._publisher = publisher
        self._administration = administration
        self._topology = topology
        self._who = who

    async def store(self, queue: Queue, letters: Sequence[DeadLetter]) -> None:
        """Durable on return. If this raises, some of them may be stored."""
        wanted = []
        for letter in letters:
            if is_cycle(queue, letter):
                SHARDING_DROPPED.series(letter.reason).add()
            else:
                wanted.append(letter)
        exchange = queue.limits.dead_letter_exchange
        if exchange is not None and wanted:
            wanted = await self._publish(exchange, queue, wanted)
        if wanted:
            target = await self._queue_for(queue)
            version = version_header(max(self._topology.current.version, target.incarnation))
            records = [self._record(queue, letter, version) for letter in wanted]
            try:
                await self._publisher.store(target, records)
            except TooLarge:  # all together, or one by its longer history
                for letter in wanted:
                    await self._store_alone(target, queue, letter, version)

    async def _publish(self, exchange: str, queue: Queue, letters: list[DeadLetter]) -> list[DeadLetter]:
        """Publish them; returns those that no queue took."""
        messages = [to_message(letter.record) for letter in letters]
        work = PublishWork(exchange, messages, lambda i, version: self._record(queue, letters[i], version))
        try:
            taken = await self._publisher.carry_out(work, mandatory=False)
        except (UnknownExchange, TooLarge):
            return letters
        return [letter for letter, count in zip(letters, taken, strict=True) if not count]

    async def _queue_for(self, queue: Queue) -> Queue:
        source = queue.exchange or queue.name
        known = self._topology.current.queues.get(dead_letter_queue_name(source))
        if known is not None and known.state is QueueState.ACTIVE:
            return known
        return await self._administration.declare_dead_letter_queue(source, self._who)  # also if it is being removed

    async def _store_alone(self, target: Queue, queue: Queue, letter: DeadLetter, version: tuple[str, bytes]) -> None:
        record = self._record(queue, letter, version)
        try:
            await self._publisher.store(target, [record])
        except TooLarge:  # without its history, it is no larger than before
            await self._publisher.store(target, [structs.replace(routed_by(letter.record, version), timestamp=0)])

    def _record(self, queue: Queue, letter: DeadLetter, version: tuple[str, bytes]) -> Record:
        headers = (version, *dead_letter_headers(queue, letter))
        return structs.replace(letter.record, headers=headers, timestamp=0)
