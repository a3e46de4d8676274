"""The slots that a node owns, and the queues in them: how they come, and how they go to other nodes."""

import asyncio
import logging

from shardyard.groups import MemberIdentity, Membership, MembershipListener
from shardyard.groups.fence import ownership_fence
from shardyard.groups.protocol import Grant
from shardyard.log import Log
from shardyard.model import Fenced, InvalidCall, Partition, RetryLater, ShardyardError
from shardyard.model.sharding import NODES_GROUP, Queue
from shardyard.runtime.clock import Clock
from shardyard.runtime.metrics import SHARDING_QUEUES
from shardyard.sharding.config import ShardingConfig
from shardyard.sharding.dead_letters import DeadLetterSink
from shardyard.sharding.queue import ShardQueue
from shardyard.sharding.state_store import StateStore
from shardyard.sharding.topology_cache import TopologyCache

_log = logging.getLogger(__name__)


class Ownership(MembershipListener):
    """Serves a queue in each slot that the node owns and that holds one.

    What a slot needs is done by one task at a time: a queue is closed before the next one is opened.
    """

    def __init__(
        self,
        log: Log,
        clock: Clock,
        config: ShardingConfig,
        topology: TopologyCache,
        states: StateStore,
        dead_letters: DeadLetterSink,
    ) -> None:
        self._log = log
        self._clock = clock
        self._config = config
        self._topology = topology
        self._states = states
        self._dead_letters = dead_letters
        self._membership: Membership | None = None
        self._owned: dict[Partition, Grant] = {}
        self._revoked: set[Partition] = set()
        self._served: dict[Partition, ShardQueue] = {}
        """Also those that are being opened."""
        self._tasks: dict[Partition, asyncio.Task[None]] = {}
        self._due: set[Partition] = set()
        """Slots to look at again when their task is done."""
        self._is_closing = False
        """Nothing is served any more."""
        self._error: BaseException | None = None
        self._failed = asyncio.Event()

    async def join(self, membership: Membership) -> None:
        self._membership = membership
        await membership.__aenter__()

    @property
    def identity(self) -> MemberIdentity:
        """Of the node in its group, as of its last join."""
        if self._membership is None:
            raise InvalidCall("the node has not joined the others: enter it by `async with` first")
        return self._membership.identity

    async def close(self) -> None:
        """Store the state of all queues, and leave the group."""
        self._is_closing = True
        await asyncio.gather(*(served.close(clean=True) for served in self.queues), return_exceptions=True)
        self._served.clear()
        if self._membership is not None and self._membership.is_joined:
            await self._membership.__aexit__(None, None, None)
        while self._tasks:
            await asyncio.wait(self._tasks.values())
        await self._states.close()
        SHARDING_QUEUES.set(0)

    @property
    def queues(self) -> list[ShardQueue]:
        """The queues that are served here."""
        return [served for served in self._served.values() if served.is_open]

    async def failure(self) -> BaseException:
        """Return when the membership has ended by an error, with that: then the node has to be started again."""
        while self._error is None:
            await self._failed.wait()
        return self._error

    def queue(self, queue: Queue) -> ShardQueue | None:
        """The queue as it is served here, or None."""
        served = self._served.get(queue.partition)
        return served if served is not None and served.is_open and served.name == queue.name else None

    async def follow(self) -> None:
        """Serve what the topology says, until cancelled."""
        while True:
            for partition in list(self._owned):
                self._look(partition)
            await self._topology.changed()

    def is_in_touch(self) -> bool:
        """Whether no other node can own these slots yet."""
        membership = self._membership
        return (
            membership is not None and self._clock.monotonic() - membership.last_contact < self._config.session_timeout
        )

    # Events of the membership

    def assigned(self, partition: Partition, grant: Grant) -> None:
        self._owned[partition] = grant
        self._look(partition)

    def revoked(self, partition: Partition) -> None:
        self._revoked.add(partition)
        self._look(partition)

    def lost(self, partition: Partition) -> None:
        self._owned.pop(partition, None)
        self._revoked.discard(partition)
        self._look(partition)

    def failed(self, error: BaseException) -> None:
        _log.error("this node is not a member of its group any more: %s", error)
        self._error = error
        self._failed.set()

    # Slots

    def _look(self, partition: Partition) -> None:
        """Do what a slot needs: at once if that is quick, else in its task."""
        if partition in self._tasks:
            self._due.add(partition)
            return
        served, wanted = self._served.get(partition), self._wanted(partition)
        if served is not None and wanted is not None and self._is_same(served, partition, wanted):
            if served.queue != wanted:
                served.update(wanted)
            return
        if served is None and wanted is None and partition not in self._revoked:
            return
        task = asyncio.create_task(self._change(partition), name=f"ownership of {partition}")
        self._tasks[partition] = task
        task.add_done_callback(lambda _: self._changed(partition))

    def _changed(self, partition: Partition) -> None:
        del self._tasks[partition]
        SHARDING_QUEUES.set(len(self._served))
        if partition in self._due:
            self._due.discard(partition)
            self._look(partition)

    def _wanted(self, partition: Partition) -> Queue | None:
        """The queue to serve in this slot."""
        if self._is_closing or partition not in self._owned or partition in self._revoked:
            return None
        return self._topology.current.by_slot.get(partition.index)

    def _is_same(self, served: ShardQueue, partition: Partition, wanted: Queue) -> bool:
        """Whether it is this queue that is served, under the current ownership."""
        same_queue = (served.name, served.queue.first) == (wanted.name, wanted.first)
        is_frozen_for_good = served.is_frozen and wanted.exchange not in self._topology.current.rebalances
        same_ownership = served.is_open and served.fence.epoch == self._owned[partition].epoch
        return same_queue and same_ownership and not is_frozen_for_good

    async def _is_current(self, queue: Queue, version: int | None) -> bool:
        """Whether a queue is in its slot, by a topology of at least this version; None: what the registry says now."""
        topology = self._topology.current
        if version is None or version > topology.version:
            topology = await self._topology.refresh()
        found = topology.by_slot.get(queue.slot)
        return found is not None and (found.name, found.first) == (queue.name, queue.first)

    async def _change(self, partition: Partition) -> None:
        """Close what is served and is not wanted, release the slot if that was asked for, and open what is wanted."""
        try:
            if (served := self._served.pop(partition, None)) is not None:
                still_owned = partition in self._owned and self._owned[partition].epoch == served.fence.epoch
                await served.close(clean=still_owned)
        except ShardyardError as error:
            _log.info("the state of %s was not stored: %s", partition, error)
        except Exception:  # noqa: BLE001 nobody awaits this
            _log.exception("the state of %s was not stored", partition)
        try:
            if partition in self._revoked and partition in self._owned:
                assert self._membership is not None  # noqa: S101 it has assigned the slot
                await self._membership.release(partition)
                self._owned.pop(partition, None)
                self._revoked.discard(partition)
            elif self._wanted(partition) is not None:
                await self._open(partition)
        except ShardyardError as error:
            level = logging.INFO if isinstance(error, Fenced | RetryLater) else logging.ERROR
            _log.log(level, "%s can't be served for now, and will be tried again: %s", partition, error)
            self._take_again(partition)
        except Exception:  # noqa: BLE001 nobody awaits this
            _log.exception("%s can't be served for now, and will be tried again", partition)
            self._take_again(partition)

    async def _open(self, partition: Partition) -> None:
        """Open the queue in a slot. If its exchange is being rebalanced, it is frozen, as it was at its last owner."""
        topology = await self._topology.refresh()
        queue = self._wanted(partition)
        if queue is None:
            return
        fence = ownership_fence(NODES_GROUP, partition, self._owned[partition].epoch)
        served = ShardQueue(
            *(queue, fence, self._log, self._states, self._dead_letters),
            clock=self._clock,
            config=self._config,
            is_in_touch=self.is_in_touch,
            is_current=self._is_current,
            is_frozen=queue.exchange in topology.rebalances,
            lost=self._lost_queue,
        )
        await served.open()
        self._served[partition] = served
        self._due.add(partition)  # it may have changed meanwhile

    def _lost_queue(self, served: ShardQueue, error: BaseException) -> None:
        """A queue can't be served: if the slot is still ours, it is assigned again, and the queue opened again."""
        _log.info("queue %s is not served here any more: %s", served.name, error)
        self._take_again(served.partition)
        self._look(served.partition)

    def _take_again(self, partition: Partition) -> None:
        self._owned.pop(partition, None)
        self._revoked.discard(partition)
        if self._membership is not None:
            self._membership.forget(partition)
