"""`Channels`: what a messaging server does for channels, as long as their topics exist."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import pyarrow.compute as pc

from shardyard.groups import Node
from shardyard.messaging.channels.following import MembersFollower
from shardyard.messaging.channels.loading import MembershipLoader
from shardyard.messaging.channels.members import LocalMembers
from shardyard.messaging.channels.publishing import PresencePublisher
from shardyard.messaging.channels.topics import KeyedTopic
from shardyard.messaging.channels.typing import TypingNotices
from shardyard.messaging.config import MessagingConfig
from shardyard.messaging.history.channel_materialiser import GROUP
from shardyard.messaging.history.channel_port import ChannelHistory
from shardyard.messaging.inbox import Inbox
from shardyard.messaging.resume import AWAY
from shardyard.messaging.session import Session, State
from shardyard.messaging.snowflakes import LeasedSnowflakes
from shardyard.messaging.tokens import Tokens
from shardyard.model import (
    Fenced,
    Malformed,
    Partition,
    Record,
    RetryLater,
    ShardyardError,
    Topic,
    UnknownTopic,
    Unsupported,
)
from shardyard.model.batch import Batch
from shardyard.runtime.background import keep_running
from shardyard.wire import messaging as wire
from shardyard.wire.channels import EVENTS, MEMBERS, PRESENCE, parse_source
from shardyard.wire.close_codes import CloseCode
from shardyard.wire.inbox import POST_KEY, InboxEntry, encode_entry

if TYPE_CHECKING:
    from shardyard.messaging.owned import OwnedPartition

_log = logging.getLogger(__name__)

SWEEP_SECONDS = 1.0


class Served(Protocol):
    """The partitions of a server."""

    @property
    def partitions(self) -> "Sequence[OwnedPartition]": ...

    def owned_of(self, user: str) -> "OwnedPartition | None":
        """The user's partition if this server serves it."""


class PartitionChannels:
    """What is known of the channels of the users of one partition."""

    def __init__(self, presence: PresencePublisher, members: LocalMembers) -> None:
        self.presence = presence
        self.members = members


class Running:
    """What runs while there are channels."""

    def __init__(
        self, follower: MembersFollower, loader: MembershipLoader, presence: Topic, tasks: list[asyncio.Task[None]]
    ) -> None:
        self.follower = follower
        self.loader = loader
        self.presence = presence
        self.tasks = tasks

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.loader.close()


class Channels:
    """The channels of a server's users: off until the topics `events`, `members` and `presence` exist."""

    def __init__(
        self,
        node: Node,
        served: Served,
        inbox: Inbox,
        ids: LeasedSnowflakes,
        history: ChannelHistory | None,
        config: MessagingConfig,
        tokens: Tokens,
    ) -> None:
        self._node = node
        self._log = node.log
        self._clock = node.clock
        self._served = served
        self._inbox = inbox
        self._ids = ids
        self._history = history
        self._config = config
        self.events = KeyedTopic(node.log, node.clock, EVENTS)
        self.members = KeyedTopic(node.log, node.clock, MEMBERS)
        self._presence = KeyedTopic(node.log, node.clock, PRESENCE)
        self.typing = TypingNotices(node, tokens)
        self._looked_up = (-1, -1)
        """The version of the catalog, and the partitions of `inbox`, by which the topics were last looked up."""
        self._running: Running | None = None
        self._beginning: set[OwnedPartition] = set()

    @property
    def is_on(self) -> bool:
        return self._running is not None

    @property
    def partitions(self) -> "Sequence[OwnedPartition]":
        """Those that the server serves."""
        return self._served.partitions

    # On and off

    async def refresh(self) -> None:
        """Look whether the topics exist, and switch channels on or off."""
        if self._history is None:
            return
        # `inbox` may have been looked up before its last change, which the version counts already.
        current = await self._log.catalog_version(), self._inbox.topic.receiving
        if current == self._looked_up:
            return
        try:
            _, members, presence = [await each.refresh() for each in (self.events, self.members, self._presence)]
            if presence.receiving < self._inbox.topic.receiving:
                presence = await self._log.expand_topic(presence.name, self._inbox.topic.receiving)
        except UnknownTopic:
            await self._switch_off()
            self._looked_up = current
            return
        running = self._running
        if running is not None and _identity(running) == (members.name, members.epoch, presence.name, presence.epoch):
            running.presence = presence
        else:
            await self._switch_off()
            await self._switch_on(self._history, members, presence)
        await asyncio.gather(*map(self._begin_later, self._served.partitions))
        self._looked_up = current

    async def _switch_on(self, history: ChannelHistory, members: Topic, presence: Topic) -> None:
        starts = await self._starts(members)
        follower = MembersFollower(
            self._log, self._clock, members, starts, self._config.recent_changes, self._membership_changed
        )
        loader = MembershipLoader(self._node, history, follower, self._config.history_seconds)
        await self.typing.open()
        tasks = [
            asyncio.create_task(keep_running(name, work, self._clock), name=name)
            for name, work in (("memberships", follower.run), ("presence in channels", self._sweep))
        ]
        self._running = Running(follower, loader, presence, tasks)
        _log.info("channels are on")

    async def _starts(self, members: Topic) -> list[int]:
        """Where to begin with each partition of `members`: the history has everything before."""
        rows = await self._node.transactions.read(lambda tx: tx.ownerships(GROUP))
        committed = {row.partition: row.committed for row in rows if row.committed is not None}
        starts = []
        for partition in members:
            known = committed.get(partition)
            starts.append(known.offset if known is not None and known.epoch == members.epoch else 0)
        return starts

    async def _switch_off(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            _log.info("channels are off: their topics have gone")
            await running.close()
            for owned in self._served.partitions:
                self.end(owned)

    async def close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            await running.close()
        await self.typing.close()

    # Partitions

    async def begin(self, owned: "OwnedPartition") -> None:
        """Take over the presence of a partition's users, before the first of them is attached."""
        running = self._running
        if running is None or owned.partition.index >= running.presence.receiving:
            return
        members = LocalMembers()
        partition = Partition(running.presence.name, owned.partition.index)
        presence = PresencePublisher(
            owned,
            partition,
            self._log,
            self._clock,
            self._config,
            self._append_away,
            members.forget,
            lambda user: self._inbox.partition_of(user) == owned.partition,
        )
        await presence.load()
        owned.channels = PartitionChannels(presence, members)

    async def _begin_later(self, owned: "OwnedPartition") -> None:
        """Begin with a partition that was served before channels were switched on, and has clients."""
        if owned.channels is not None or owned.ended or not owned.ready.done() or owned in self._beginning:
            return
        self._beginning.add(owned)
        try:
            await self.begin(owned)
            sessions = list(owned.sessions())
            await asyncio.gather(*(self._prepare_attached(session, owned) for session in sessions))
            for session in sessions:
                _tell_what_was_missed(session, owned)
        except Fenced:
            _log.debug("%s belongs to another server now", owned.partition)
        finally:
            self._beginning.discard(owned)

    async def _prepare_attached(self, session: Session, owned: "OwnedPartition") -> None:
        try:
            await self.prepare(session, owned)
        except ShardyardError as error:
            session.close(CloseCode.UNAVAILABLE, str(error))
        finally:
            self.arrived(session, owned)

    def end(self, owned: "OwnedPartition") -> None:
        """The partition is not served any more."""
        if owned.channels is not None:
            owned.channels.members.clear()
            owned.channels = None

    async def ready_for(self, batch: Batch) -> None:
        """Return when memberships are known as far as the posts of a batch need it."""
        running = self._running
        keys = batch.data.column("key")
        if running is None or not len(batch):
            return
        posts = pc.indices_nonzero(pc.starts_with(keys, POST_KEY.decode())).to_pylist()
        needed: dict[int, int] = {}
        for at in posts:
            with contextlib.suppress(Malformed, UnicodeDecodeError):
                upto = parse_source(batch.data.column("id")[at].as_py()).members
                index = self.members.partition_of(keys[at].as_py()[1:].decode()).index
                needed[index] = max(needed.get(index, 0), upto)
        behind = [(p, upto) for p, upto in needed.items() if running.follower.offsets[p] < upto]
        if behind:
            try:
                await asyncio.gather(*(running.follower.catch_up(p, upto) for p, upto in behind))
            except ShardyardError as error:  # the topic has gone
                _log.warning("memberships could not be read: %s", error)

    # Clients

    def is_prepared(self, session: Session, owned: "OwnedPartition") -> bool:
        """Whether a client can be attached at once."""
        channels = owned.channels
        return channels is None or (
            channels.members.knows(session.user) and channels.presence.is_online(session.user, session.device)
        )

    async def prepare(self, session: Session, owned: "OwnedPartition") -> None:
        """Return when the client is online for all to see, and its user's channels are known. The caller calls
        `arrived` in any case, when the client is attached, or will not be. `RetryLater` if that takes too long,
        `Fenced` if the partition has moved."""
        running, channels = self._running, owned.channels
        if running is None or channels is None:
            return
        await channels.presence.come(session.user, session.device)
        await running.loader.load(session.user, channels.members)

    def arrived(self, session: Session, owned: "OwnedPartition") -> None:
        """A client for which `prepare` was called is attached, or will not be."""
        if owned.channels is not None:
            owned.channels.presence.arrived(session.user, session.device)

    def left(self, session: Session, owned: "OwnedPartition") -> None:
        """A client was detached."""
        if owned.channels is not None and not owned.ended:
            owned.channels.presence.left(session.user, session.device)

    # Details

    def require_running(self) -> Running:
        """`Unsupported` as long as there are no channels."""
        if self._running is None:
            raise absent()
        return self._running

    def require(self, owned: "OwnedPartition") -> PartitionChannels:
        """The channels of a partition's users. `Unsupported` as long as there are none."""
        self.require_running()
        if owned.channels is None:
            raise RetryLater("channels have just been switched on: try again")
        return owned.channels

    def _membership_changed(self, user: str, channel: str, joined: bool) -> None:
        owned = self._served.owned_of(user)
        if owned is None or owned.channels is None:
            return
        if owned.channels.members.change(user, channel, joined=joined):
            for session in owned.sessions_of(user):
                if session.state is State.OPEN:
                    session.answer(wire.Membership(channel, joined))

    async def _append_away(self, owned: "OwnedPartition", users: Sequence[str]) -> int:
        now = int(self._clock.now() * 1000)
        entries = [InboxEntry(self._ids.next(), user, user, "", 0, now, "", away=True) for user in users]
        records = [Record(str(entry.id), entry.recipient.encode(), encode_entry(entry), (), now) for entry in entries]
        await self._log.append(owned.partition, records, fence=owned.fence)
        return (await self._log.span(owned.partition)).end

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            await asyncio.gather(*(self._sweep_one(owned) for owned in self._served.partitions))

    async def _sweep_one(self, owned: "OwnedPartition") -> None:
        try:
            await self._begin_later(owned)
            if owned.channels is not None:
                await owned.channels.presence.sweep()
        except Fenced:
            _log.debug("%s belongs to another server now", owned.partition)
        except ShardyardError as error:
            _log.warning("who is offline will be published later, for %s: %s", owned.partition, error)


def _tell_what_was_missed(session: Session, owned: "OwnedPartition") -> None:
    """Posts were not stored for a client before it was online. It gets a gap if it has channels."""
    if owned.channels_of(session.user):
        if session.state is State.OPEN:
            session.answer(wire.Gap(AWAY))
        elif session.state is State.OPENING:  # what it missed was looked for without its channels
            session.close(CloseCode.UNAVAILABLE, "channels have just been switched on: connect again")


def absent() -> Unsupported:
    """The error while there are no channels."""
    return Unsupported(
        "channels",
        "they need a history, and topics that fan-out creates: "
        "start `shardyard coordinator` and `shardyard fanout-worker`, and try again in a moment",
    )


def _identity(running: Running) -> tuple[str, int, str, int]:
    members, presence = running.follower.topic, running.presence
    return members.name, members.epoch, presence.name, presence.epoch
