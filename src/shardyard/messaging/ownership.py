"""The partitions that a messaging server owns: how they come, and how their clients go elsewhere when they move."""

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence

from shardyard.groups import Directory, JoinRequest, Membership, MembershipListener, Node
from shardyard.groups.protocol import Grant
from shardyard.messaging.config import MessagingConfig
from shardyard.messaging.history_ends import HistoryEnds
from shardyard.messaging.owned import ChannelHooks, OwnedPartition
from shardyard.model import Fenced, Partition, PartitionOutOfRange, ShardyardError, UnknownTopic, WrongEpoch
from shardyard.runtime.metrics import CLIENTS_MOVED
from shardyard.wire.close_codes import CloseCode
from shardyard.wire.inbox import GROUP, TOPIC

_log = logging.getLogger(__name__)

STORING_SECONDS = 2.0
"""How long the clients of a partition that moves may finish what they are sending."""
OWNER_SECONDS = 3.0
"""How long to wait until a partition that has moved has a new owner, before its clients are sent to the directory."""
LOOK_SECONDS = 0.02
CLIENTS_PER_TURN = 100
"""That are sent elsewhere in one turn of the event loop."""


class Ownership(MembershipListener):
    """A server's membership of the group `messaging`, and its partitions."""

    def __init__(
        self,
        node: Node,
        directory: Directory,
        config: MessagingConfig,
        address: str,
        partitions: Sequence[int] | None,
        metadata: Mapping[str, str],
        hooks: ChannelHooks | None = None,
        history_ends: HistoryEnds | None = None,
    ) -> None:
        """`partitions`: own these, and no others. `metadata`: for the other servers. `history_ends`: None if there is
        no history."""
        self._hooks = hooks
        self._history_ends = history_ends
        self._node = node
        self._clock = node.clock
        self._directory = directory
        self._config = config
        manual = None if partitions is None else [Partition(TOPIC, index) for index in sorted(set(partitions))]
        request = JoinRequest(
            GROUP,
            node.name,
            [TOPIC],
            partitions=manual,
            session_timeout=config.session_timeout,
            address=address,
            metadata=dict(metadata),
        )
        self._membership = Membership(node, request, self)
        self._owned: dict[Partition, OwnedPartition] = {}
        self._serving: dict[OwnedPartition, asyncio.Task[None]] = {}
        self._moving: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    async def join(self) -> None:
        await self._membership.__aenter__()

    async def leave(self) -> None:
        """Leave the group, and return when all clients were sent to the next owners of their partitions."""
        await self._membership.__aexit__(None, None, None)
        while self._moving:
            await asyncio.wait(self._moving)

    def get(self, partition: Partition) -> OwnedPartition | None:
        """The partition if it is served here now."""
        owned = self._owned.get(partition)
        return None if owned is None or owned.ended else owned

    @property
    def partitions(self) -> Sequence[OwnedPartition]:
        """All that are served here."""
        return [self._owned[partition] for partition in sorted(self._owned)]

    def is_in_touch(self) -> bool:
        """Whether nobody else can own these partitions yet."""
        return self._clock.monotonic() - self._membership.last_contact < self._config.session_timeout

    @property
    def has_failed(self) -> bool:
        """Whether the membership has ended by an error: then the server has to be started again."""
        return self._error is not None

    # Events of the membership

    def assigned(self, partition: Partition, grant: Grant) -> None:
        history = None if self._history_ends is None else self._history_ends.for_take_over()
        owned = OwnedPartition(
            partition, grant, self._node.log, self._clock, self._config, self.is_in_touch, self._hooks, history
        )
        self._owned[partition] = owned
        self._serving[owned] = asyncio.create_task(self._serve(owned), name=f"serving {partition}")

    def revoked(self, partition: Partition) -> None:
        if (owned := self._owned.get(partition)) is not None and not owned.ended:
            self._start_moving(owned, release=True)

    def lost(self, partition: Partition) -> None:
        if (owned := self._owned.pop(partition, None)) is not None and not owned.ended:
            self._start_moving(owned, release=False)

    def failed(self, error: BaseException) -> None:
        _log.error("this server is not a member of its group any more: %s", error)
        self._error = error

    async def _serve(self, owned: OwnedPartition) -> None:
        try:
            await owned.run()
        except (Fenced, UnknownTopic, PartitionOutOfRange, WrongEpoch) as error:
            _log.info("%s is not served here any more: %s", owned.partition, error)
        except Exception:  # noqa: BLE001 nobody awaits this
            _log.exception("%s could not be read, and will be taken again", owned.partition)
        if self._owned.get(owned.partition) is owned and not owned.ended:
            del self._owned[owned.partition]
            self._membership.forget(owned.partition)  # if it still is ours, it is assigned again
            self._start_moving(owned, release=False)

    # Moving

    def _start_moving(self, owned: OwnedPartition, *, release: bool) -> None:
        owned.end()
        task = asyncio.create_task(self._move(owned, release), name=f"moving {owned.partition}")
        self._moving.add(task)
        task.add_done_callback(self._moving.discard)

    async def _move(self, owned: OwnedPartition, release: bool) -> None:
        """Let others have the partition, and send its clients to its next owner."""
        serving = self._serving.pop(owned, None)
        if serving is not None and serving is not asyncio.current_task():
            serving.cancel()
            await asyncio.wait([serving])
        if release:
            deadline = self._clock.monotonic() + STORING_SECONDS
            while self._clock.monotonic() < deadline and any(session.is_storing for session in owned.sessions()):
                await self._clock.sleep(LOOK_SECONDS)
            if self._owned.get(owned.partition) is owned:  # else it was lost meanwhile, and may be ours again
                try:
                    await self._membership.release(owned.partition)
                except ShardyardError as error:
                    _log.info("%s was not released: %s", owned.partition, error)
                if self._owned.get(owned.partition) is owned:
                    del self._owned[owned.partition]
        sessions = list(owned.sessions())
        if not sessions:
            return
        address = await self._next_owner(owned)
        seconds = len(sessions) / self._config.spread
        _log.info("%s has moved to %s with %d clients", owned.partition, address or "nobody yet", len(sessions))
        for number, session in enumerate(sessions):
            if number % CLIENTS_PER_TURN == 0:
                await asyncio.sleep(0)
            CLIENTS_MOVED.add()
            session.send_elsewhere(address, round(random.random() * seconds, 3), CloseCode.MOVED)

    async def _next_owner(self, owned: OwnedPartition) -> str | None:
        """The address of the next owner, as soon as there is one; None if that takes too long."""
        deadline = self._clock.monotonic() + OWNER_SECONDS
        while self._clock.monotonic() < deadline and not self._is_alone():
            owner = self._directory.owner_of(owned.partition)
            if owner is not None and owner.epoch > owned.epoch:
                return owner.address
            await self._clock.sleep(LOOK_SECONDS)
        return None

    def _is_alone(self) -> bool:
        """Whether nobody else could own anything."""
        return not self._directory.members().keys() - {self._node.name}
