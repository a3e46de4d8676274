"""`MessagingServer`: a member of the group `messaging`, which serves the users of the partitions that it owns."""

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from shardyard.groups import Directory, Node
from shardyard.messaging.admission import Admission
from shardyard.messaging.channels.calls import ChannelCalls
from shardyard.messaging.channels.channels import Channels
from shardyard.messaging.client_sends import MOVE_SECONDS
from shardyard.messaging.config import DEFAULT_CONFIG, MessagingConfig
from shardyard.messaging.history.channel_materialiser import ChannelMaterialiser
from shardyard.messaging.history.materialiser import Materialiser
from shardyard.messaging.history.port import History
from shardyard.messaging.history_ends import HistoryEnds
from shardyard.messaging.inbox import DEFAULT_PARTITIONS, LOOK_SECONDS, Inbox
from shardyard.messaging.mirror import run_mirror
from shardyard.messaging.owned import OwnedPartition
from shardyard.messaging.ownership import OWNER_SECONDS, Ownership
from shardyard.messaging.peers import Peers
from shardyard.messaging.presence import LOOK_SECONDS as PRESENCE_SECONDS
from shardyard.messaging.presence import PresenceBoard
from shardyard.messaging.recent import RecentlySent
from shardyard.messaging.resume import Resuming
from shardyard.messaging.sending import Sending
from shardyard.messaging.server_addresses import ServerAddresses
from shardyard.messaging.session import Connection, Question, Session, State
from shardyard.messaging.snowflakes import LeasedSnowflakes
from shardyard.messaging.tokens import LEEWAY_SECONDS, Tokens
from shardyard.model import (
    Fenced,
    InvalidCall,
    Partition,
    RetryLater,
    ShardyardError,
    Unsupported,
)
from shardyard.runtime.background import keep_running
from shardyard.runtime.metrics import CLIENTS, CLIENTS_CUT, CLIENTS_MOVED
from shardyard.wire import messaging as wire
from shardyard.wire.close_codes import CloseCode
from shardyard.wire.inbox import GROUP
from shardyard.wire.peers import PeerAnswer, PeerCall

_log = logging.getLogger(__name__)

USERS_PER_CALL = 1_000
"""Whose presence another server is asked for at once."""
HISTORY_SECONDS = 2.0
"""How often to look how far the history has got."""
SWEEP_SECONDS = 1.0
SWEEPS = 5
"""The idle clients are looked for in so many parts, one per sweep."""


class MessagingServer:
    """Serves users from entering the block to leaving it. It closes neither log nor registry nor history."""

    def __init__(
        self,
        node: Node,
        *,
        address: str,
        tokens: Tokens,
        history: History | None = None,
        config: MessagingConfig = DEFAULT_CONFIG,
        partitions: Sequence[int] | None = None,
        topic_partitions: int = DEFAULT_PARTITIONS,
        stores_history: bool = True,
        sign_in: str = "",
    ) -> None:
        """`address`: where clients connect. `partitions`: own these, and no others. `topic_partitions`: of the topic,
        if it does not exist yet. `stores_history`: whether this server also stores the history of its share of the
        partitions, or only reads it. `sign_in`: how users sign in, the same for all servers of the group."""
        self.config = config
        self.address = address
        self.tokens = tokens
        self.inbox = Inbox(node.log, node.clock)
        self.directory = Directory(node, GROUP)
        self.addresses = ServerAddresses(self.directory)
        self.presence = PresenceBoard(self, node.clock)
        self.peers = Peers(node.name, tokens)
        self.paused: set[Session] = set()
        """Sessions whose clients read too slowly."""
        self._draining: asyncio.Task[None] | None = None
        self._node = node
        self._clock = node.clock
        self._history = history
        self._stores_history = stores_history
        self._topic_partitions = topic_partitions
        self._ids = LeasedSnowflakes(node.transactions, node.name, node.clock)
        self._recent = RecentlySent()
        self.sending = Sending(
            node.log, self.inbox, self._ids, self._recent, node.clock, config, self.owned_of, self.start
        )
        self._alike = {"mirror": config.mirror, "sign_in": sign_in}
        """What all servers of the group have to have alike."""
        of_channels = None if history is None else history.channels
        self.channels = Channels(node, self, self.inbox, self._ids, of_channels, config, tokens)
        self.channel_calls = ChannelCalls(self.channels, node, self._ids, of_channels, config)
        self._resuming = Resuming(node, history)
        self._admission = Admission(self, node, self._resuming, self._recent)
        self._history_ends = HistoryEnds(node)
        ends = None if history is None else self._history_ends
        self._ownership = Ownership(node, self.directory, config, address, partitions, self._alike, self.channels, ends)
        self._sessions: set[Session] = set()
        self._dirty: list[Session] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def _open(self) -> None:
        await self.inbox.open(self._topic_partitions)
        await self._ids.acquire()
        self._stack.push_async_callback(self._ids.release)
        await self._stack.enter_async_context(self.peers)
        await self._stack.enter_async_context(self.directory)
        self._stack.push_async_callback(self._resuming.close)
        self._stack.push_async_callback(self._history_ends.close)
        self._stack.push_async_callback(self._end_tasks)
        self._check_alike()
        self._stack.push_async_callback(self.channels.close)
        await self.channels.refresh()
        await self._ownership.join()
        for name, work in (
            ("ids", self._ids.run),
            ("inbox", self._follow_topic),
            ("idle clients", self._sweep),
            ("presence", self._ask_for_presence),
        ):
            self.start(keep_running(name, work, self._clock))
        if self.config.mirror == "log":
            self.start(keep_running("mirror", self._mirror, self._clock))
        if self._history is not None:
            if self._stores_history:
                self.start(keep_running("history", self._materialise, self._clock))
                if self._history.channels is not None:
                    self.start(keep_running("history of channels", self._materialise_channels, self._clock))
            self.start(keep_running("end of the history", self._follow_history, self._clock))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.drain()
        finally:
            await self._stack.aclose()

    def _check_alike(self) -> None:
        """Clients would get copies twice or not at all if servers made them in different ways, and a server with a
        secret would admit those who signed in at one without it."""
        for member in self.directory.members().values():
            if not isinstance(member.metadata, dict):
                continue
            if (other := member.metadata.get("mirror")) != self.config.mirror:
                raise InvalidCall(f"the other servers have --mirror {other}: use the same, or stop all of them first")
            if member.metadata.get("sign_in") != self._alike["sign_in"]:
                raise InvalidCall(
                    "the other servers have another SHARDYARD_SECRET, or none: use the same, or stop all of them first"
                )

    @property
    def name(self) -> str:
        """Of the member."""
        return self._node.name

    @property
    def now(self) -> float:
        """The monotonic clock."""
        return self._clock.monotonic()

    @property
    def clients(self) -> int:
        """How many are connected."""
        return len(self._sessions)

    @property
    def partitions(self) -> Sequence[OwnedPartition]:
        """Those that it serves."""
        return self._ownership.partitions

    @property
    def is_ready(self) -> bool:
        """Whether it is in touch with its group, and has loaded all partitions that it owns."""
        return (
            not self.is_draining
            and not self._ownership.has_failed
            and self._ownership.is_in_touch()
            and all(owned.ready.done() for owned in self._ownership.partitions)
        )

    async def settled(self) -> None:
        """Wait until all partitions have owners and this server has loaded its own, up to a time."""
        deadline = self.now + OWNER_SECONDS
        while self.now < deadline and not (self.is_ready and all(self._is_served(p) for p in self.inbox.topic)):
            await self._clock.sleep(0.02)

    def _is_served(self, partition: Partition) -> bool:
        """Whether a server serves it, as far as this one knows."""
        owner = self.directory.owner_of(partition)
        if owner is None:
            return False
        return owner.member != self._node.name or self._ownership.get(partition) is not None

    async def drain(self) -> None:
        """Leave the group, and send all clients to the servers that own their partitions then."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain(), name="draining")
        await asyncio.shield(self._draining)

    @property
    def is_draining(self) -> bool:
        return self._draining is not None

    async def _drain(self) -> None:
        try:
            await self._ownership.leave()
        except BaseException:
            self._draining = None
            raise
        for session in list(self._sessions):
            session.send_elsewhere(None, 0.0, CloseCode.DRAINING)

    # Connections

    def connect(self, connection: Connection, format_: wire.Format) -> Session:
        """A new connection."""
        session = Session(self, connection, format_)
        self._sessions.add(session)
        CLIENTS.set(len(self._sessions))
        return session

    def leave(self, session: Session) -> None:
        """A connection has ended."""
        self._sessions.discard(session)
        CLIENTS.set(len(self._sessions))
        self.presence.forget(session)
        if session.owned is not None:
            session.owned.detach(session)
            self.channels.left(session, session.owned)
            self.presence.changed(session.user, len(session.owned.sessions_of(session.user)))

    def flush_later(self, session: Session) -> None:
        """Flush a session at the end of this turn of the event loop."""
        if not self._dirty:
            asyncio.get_running_loop().call_soon(self._flush)
        self._dirty.append(session)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        for session in dirty:
            try:
                session.flush()
            except Exception:  # noqa: BLE001 the others must not wait for ever
                _log.exception("nothing could be sent to a client of %s", session.user)
                session.close(CloseCode.UNAVAILABLE, "")

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def admit(self, session: Session, hello: wire.Hello) -> None:
        """Attach a session whose client is known to its partition, or send it elsewhere."""
        self._admission.admit(session, hello)

    # What clients ask

    async def store_in_channel(
        self, session: Session, content: wire.Post | wire.Join | wire.Leave
    ) -> wire.Sent | wire.Done:
        """Store what a client does in a channel. Returns when it is durable. `Fenced` if the client's partition has
        moved."""
        owned = session.owned
        if owned is None or owned.ended:
            raise Fenced(f"{session.user} is not served here any more")
        return await self.channel_calls.store(session, owned, content)

    async def look_up(self, session: Session, frame: Question) -> object:
        """A page of history, the list of chats, or what is asked of channels."""
        user = session.user
        if isinstance(frame, wire.GetPosts | wire.GetChannels):
            if session.owned is None:
                raise RetryLater("the connection is not open yet: try again")
            return await self.channel_calls.look_up(session.owned, user, frame)
        if self._history is None:
            raise Unsupported("history", "this server has no history")
        before = None if frame.before is None else wire.number_of(frame.before)
        if isinstance(frame, wire.GetHistory):
            page = await self._history.page(user, frame.peer, before=before, limit=frame.limit)
            return wire.History(frame.number, list(page.messages), page.more)
        found = await self._history.chats(user, before=before, limit=frame.limit)
        return wire.Chats(frame.number, list(found.chats), found.more)

    def typing(self, session: Session, frame: wire.Typing | wire.TypingIn) -> None:
        """Tell the recipient's clients, here or on another server, or the other members of a channel."""
        if isinstance(frame, wire.TypingIn):
            if session.owned is not None:
                self.channel_calls.typing(session, session.owned, frame.channel)
        elif self.owned_of(frame.recipient) is not None:
            self._notify_typing(session.user, frame.recipient)
        elif (address := self.address_of(frame.recipient)) is not None:
            self.peers.typing(address, session.user, frame.recipient)

    def _notify_typing(self, sender: str, recipient: str) -> None:
        owned = self.owned_of(recipient)
        for session in () if owned is None else owned.sessions_of(recipient):
            session.notify(wire.IsTyping(sender))

    def answer_peer(self, call: PeerCall) -> PeerAnswer:
        """What another server tells and asks."""
        for notice in call.typing:
            self._notify_typing(notice.sender, notice.recipient)
        for typing in call.channel_typing:
            self.channel_calls.notify_typing(typing.channel, typing.sender)
        return PeerAnswer([self.presence.local(user) for user in call.presence if self.owned_of(user) is not None])

    # Where users are

    def owned_of(self, user: str) -> OwnedPartition | None:
        """The user's partition if it is served here."""
        return self._ownership.get(self.inbox.partition_of(user))

    def address_of(self, user: str) -> str | None:
        """The address of the other server that serves the user, if there is one."""
        owner = self.directory.owner_of(self.inbox.partition_of(user))
        return None if owner is None or owner.member == self._node.name else owner.address

    # In the background

    async def _follow_topic(self) -> None:
        """When users belong to other partitions than before, send their clients there."""
        placements = self.inbox.placements
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            try:
                await self.inbox.refresh()
                await self.channels.refresh()
            except ShardyardError as error:
                _log.warning("the topics will be looked up again: %s", error)
                continue
            if placements != self.inbox.placements:
                placements = self.inbox.placements
                for session in list(self._sessions):
                    if session.owned and session.owned.partition != self.inbox.partition_of(session.user):
                        CLIENTS_MOVED.add()
                        session.send_elsewhere(self.address_of(session.user), random.random(), CloseCode.MOVED)

    async def _sweep(self) -> None:
        """Disconnect clients that do not read, that have gone silent, or whose token has expired."""
        for part in itertools.cycle(range(SWEEPS)):
            await self._clock.sleep(SWEEP_SECONDS)
            now, config = self.now, self.config
            for session in list(self.paused):
                if now - session.paused_at > config.unread_seconds:
                    CLIENTS_CUT.add()
                    session.close(CloseCode.NOT_READING, f"nothing was read for {config.unread_seconds:g} s")
            expired = self._clock.now() - LEEWAY_SECONDS
            for session in [each for each in self._sessions if id(each) // 64 % SWEEPS == part]:
                if session.state is State.NEW:
                    if now - session.opened_at > config.hello_seconds:
                        session.close(CloseCode.NO_HELLO, f"no hello came within {config.hello_seconds:g} s")
                elif session.owned is not None and session.owned.ended_for(now) > MOVE_SECONDS:
                    session.close(CloseCode.MOVED, "")
                elif session.expires_at < expired:
                    session.close(CloseCode.TOKEN_EXPIRED, "the access token has expired: get a new session")
                elif now - session.seen_at > config.idle_seconds:
                    session.close(CloseCode.IDLE, f"nothing came for {config.idle_seconds:g} s, not even a ping")

    async def _follow_history(self) -> None:
        """Keep in mind how far the history has got."""
        while True:
            for partition, committed in (await self._history_ends.read()).items():
                if (owned := self._ownership.get(partition)) is not None:
                    owned.note_history(committed)
            await self._clock.sleep(HISTORY_SECONDS)

    async def _ask_for_presence(self) -> None:
        """Ask other servers for the presence of users that clients of this one watch."""
        while True:
            await self._clock.sleep(PRESENCE_SECONDS)
            await asyncio.gather(*itertools.starmap(self._ask, self.presence.watched_elsewhere().items()))

    async def _ask(self, address: str, users: Sequence[str]) -> None:
        with contextlib.suppress(ConnectionError):
            for first in range(0, len(users), USERS_PER_CALL):
                self.presence.heard(await self.peers.presence(address, users[first : first + USERS_PER_CALL]))

    async def _mirror(self) -> None:
        await run_mirror(self._node, self.sending, session_timeout=self.config.session_timeout)

    async def _materialise(self) -> None:
        if self._history is not None:
            await Materialiser(self._node, self._history, session_timeout=self.config.session_timeout).run()

    async def _materialise_channels(self) -> None:
        of_channels = None if self._history is None else self._history.channels
        if of_channels is not None:
            await ChannelMaterialiser(self._node, of_channels).run()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
