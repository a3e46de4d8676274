"""`MessagingServer`: a member of the group `messaging`, which serves the users of the partitions that it owns."""

import asyncio
import contextlib
import heapq
import itertools
import logging
import random
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from shardyard.groups import Directory, Node
from shardyard.messaging.config import DEFAULT_CONFIG, MessagingConfig
from shardyard.messaging.history.materialiser import Materialiser
from shardyard.messaging.history.port import History
from shardyard.messaging.inbox import DEFAULT_PARTITIONS, LOOK_SECONDS, Inbox
from shardyard.messaging.items import Item
from shardyard.messaging.mirror import run_mirror
from shardyard.messaging.owned import OwnedPartition
from shardyard.messaging.ownership import OWNER_SECONDS, Ownership
from shardyard.messaging.pacing import Pacer
from shardyard.messaging.peers import PeerAnswer, PeerCall, Peers
from shardyard.messaging.presence import LOOK_SECONDS as PRESENCE_SECONDS
from shardyard.messaging.presence import PresenceBoard
from shardyard.messaging.recent import RecentlySent
from shardyard.messaging.resume import HISTORY_GROUP, YOUNG_MS, Missed, Resuming
from shardyard.messaging.session import MOVE_SECONDS, Connection, Outgoing, Session, State
from shardyard.messaging.snowflakes import LeasedSnowflakes, id_at, ms_of
from shardyard.messaging.tokens import LEEWAY_SECONDS, Tokens
from shardyard.model import (
    Appended,
    Fence,
    Fenced,
    InvalidCall,
    Malformed,
    OffsetTrimmed,
    Partition,
    RetryLater,
    ShardyardError,
    Stamp,
    Unsupported,
)
from shardyard.runtime.background import keep_running
from shardyard.runtime.metrics import CLIENTS, CLIENTS_CUT, CLIENTS_MOVED, RESUMES
from shardyard.wire import messaging as wire
from shardyard.wire.close_codes import CloseCode
from shardyard.wire.inbox import GROUP, TOPIC, InboxEntry, decode_entry
from shardyard.wire.messaging import CLOCKS_MS

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
        self._resuming = Resuming(node, history)
        self._recent = RecentlySent()
        self._pacer = Pacer(config.pace_seconds)
        self._alike = {"mirror": config.mirror, "sign_in": sign_in}
        """What all servers of the group have to have alike."""
        self._ownership = Ownership(node, self.directory, config, address, partitions, self._alike)
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
        self._stack.push_async_callback(self._end_tasks)
        self._check_alike()
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

    # Opening a session

    def admit(self, session: Session, hello: wire.Hello) -> None:
        """Attach a session whose client is known to its partition, or send it elsewhere."""
        owned = self.owned_of(session.user)
        if owned is None or not owned.ready.done():
            self.start(self._admit_later(session, hello))
            return
        missed = self._resuming.from_memory(owned, session.user, session.device, hello)
        if missed is None or (self.config.mirror == "local" and hello.sent is not None):
            self.start(self._admit_slowly(session, hello, owned))
        elif self._attach(session, owned):
            self._welcome(session, owned, hello, self._with_young(session, missed))

    async def _admit_later(self, session: Session, hello: wire.Hello) -> None:
        """The user's partition is not served here: maybe not yet, or by another server."""
        deadline = self.now + OWNER_SECONDS
        while session.state is State.OPENING:
            owned = self.owned_of(session.user)
            if owned is not None and await owned.ready:
                await self._admit_slowly(session, hello, owned)
                return
            address = self.address_of(session.user)
            if address is not None or self.now > deadline:
                CLIENTS_MOVED.add()
                session.send_elsewhere(address, 0.0 if address else 1.0, CloseCode.NOT_HERE)
                return
            await self._clock.sleep(0.05)

    async def _admit_slowly(self, session: Session, hello: wire.Hello, owned: OwnedPartition) -> None:
        """Not all that the client missed is in memory."""
        if session.state is not State.OPENING or not self._attach(session, owned):
            return
        try:
            missed = self._resuming.from_memory(owned, session.user, session.device, hello)
            if missed is None:
                missed = await self._resuming.find(owned, session.user, session.device, hello)
            if self.config.mirror == "local" and hello.sent is not None:
                missed = await self._with_sent(session, owned, missed, wire.number_of(hello.sent))
            else:
                missed = self._with_young(session, missed)
        except RetryLater as error:
            session.close(CloseCode.UNAVAILABLE, str(error))
            return
        except Exception:  # noqa: BLE001 nobody awaits this
            _log.exception("what %s missed could not be found", session.user)
            session.close(CloseCode.UNAVAILABLE, "what was missed could not be found")
            return
        if session.state is State.OPENING:
            self._welcome(session, owned, hello, missed)

    def _with_young(self, session: Session, missed: Missed) -> Missed:
        """Add what other clients of the user sent so lately that a new client may not find it in the history."""
        if self.config.mirror == "log" or missed.how != "new":
            return missed
        young = id_at(int(self._clock.now() * 1000) - YOUNG_MS)
        return _merged(missed, self._recent.items(session.user, session.device, young))

    async def _with_sent(self, session: Session, owned: OwnedPartition, missed: Missed, after: int) -> Missed:
        """Add what other clients of the user sent since an id. The clocks of servers may differ, so the client may know
        some of it."""
        after = id_at(ms_of(after) - CLOCKS_MS)
        items, gap = await self._resuming.sent(owned, session.user, session.device, after)
        recent = self._recent.items(session.user, session.device, after)
        sent = {item.entry.id: item for item in (*items, *recent)}
        for id_ in session.waiting_copies():
            sent.pop(id_, None)
        return _merged(missed, (sent[id_] for id_ in sorted(sent)), gap)

    def _attach(self, session: Session, owned: OwnedPartition) -> bool:
        """From now on the session gets what arrives for its user. False if it was closed instead."""
        if owned.ended:  # while the session waited for it
            session.send_elsewhere(self.address_of(session.user), 0.0, CloseCode.MOVED)
            return False
        others = owned.sessions_of(session.user)
        replaced = [each for each in others if each.device == session.device]
        if len(others) - len(replaced) >= self.config.connections_per_user:
            most = self.config.connections_per_user
            session.close(CloseCode.TOO_MANY_CONNECTIONS, f"a user has at most {most} clients connected")
            return False
        session.owned = owned
        owned.attach(session)
        for other in replaced:
            other.close(CloseCode.REPLACED, "the same client has connected again")
        self.presence.changed(session.user, len(owned.sessions_of(session.user)))
        return True

    def _welcome(self, session: Session, owned: OwnedPartition, hello: wire.Hello, missed: Missed) -> None:
        RESUMES.series(missed.how).add()
        position = hello.position
        if missed.how != "position" or position is None:
            position = owned.position(session.first_offset(missed.items, owned.tail.end))
        sent = hello.sent
        if sent is None and self.config.mirror == "local":
            sent = str(id_at(int(self._clock.now() * 1000)))
        welcome = wire.Welcome(
            session.user, position, self.config.mirror, missed.how, sent, self._node.name, owned.epoch
        )
        session.open(welcome, missed.items, missed.gap)

    # What clients ask

    async def store(self, session: Session, outgoing: Outgoing) -> wire.Sent:
        """Store what a client sends. Returns when it is durable. `Fenced` if the client's partition has moved."""
        owned = session.owned
        if owned is None or owned.ended:
            raise Fenced(f"{session.user} is not served here any more")
        await self._pacer.turn()
        entry = InboxEntry(
            self._ids.next(),
            session.user,
            outgoing.recipient,
            session.device,
            outgoing.number,
            int(self._clock.now() * 1000),
            outgoing.content,
        )
        producer = f"{len(session.user)}:{session.user}/{session.device}"
        stamp, deadline = Stamp(producer, outgoing.number), self.now + self.config.store_seconds
        appended = await self._append(entry, stamp=stamp, fence=owned.fence, deadline=deadline)
        if appended.duplicate:
            with contextlib.suppress(OffsetTrimmed, Malformed):  # then its id is not known any more
                batch = await self._node.log.read(appended.partition, appended.first.offset, max_records=1)
                entry = decode_entry(batch.records()[0].value) if len(batch) else entry
        if self.config.mirror == "local" and self._recent.add(entry):  # also if a retry here found that it was stored
            owned.deliver_copy(entry)
        return wire.Sent(outgoing.number, str(entry.id), entry.at, appended.duplicate)

    async def _append(self, entry: InboxEntry, *, stamp: Stamp, fence: Fence, deadline: float) -> Appended:
        """Append an entry, and deliver it if its user is served here."""
        user = entry.sender if entry.copy else entry.recipient
        owned = self.owned_of(user)
        if owned is None:
            return await self.inbox.append(entry, stamp=stamp, fence=fence, deadline=deadline)
        offset = None
        owned.begin_append()
        try:
            appended = await self.inbox.append(entry, stamp=stamp, fence=fence, deadline=deadline)
            if not appended.duplicate and appended.partition == owned.partition:
                offset = appended.first.offset
            return appended
        finally:
            owned.end_append(user, entry, offset)

    async def look_up(self, user: str, frame: wire.GetHistory | wire.GetChats) -> wire.History | wire.Chats:
        """A page of history, or the list of chats."""
        if self._history is None:
            raise Unsupported("history", "this server has no history")
        before = None if frame.before is None else wire.number_of(frame.before)
        if isinstance(frame, wire.GetHistory):
            page = await self._history.page(user, frame.peer, before=before, limit=frame.limit)
            return wire.History(frame.number, list(page.messages), page.more)
        found = await self._history.chats(user, before=before, limit=frame.limit)
        return wire.Chats(frame.number, list(found.chats), found.more)

    def typing(self, sender: str, recipient: str) -> None:
        """Tell the recipient's clients, here or on another server."""
        if self.owned_of(recipient) is not None:
            self._notify_typing(sender, recipient)
        elif (address := self.address_of(recipient)) is not None:
            self.peers.typing(address, sender, recipient)

    def _notify_typing(self, sender: str, recipient: str) -> None:
        owned = self.owned_of(recipient)
        for session in () if owned is None else owned.sessions_of(recipient):
            session.notify(wire.IsTyping(sender))

    def answer_peer(self, call: PeerCall) -> PeerAnswer:
        """What another server tells and asks."""
        for notice in call.typing:
            self._notify_typing(notice.sender, notice.recipient)
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
            except ShardyardError as error:
                _log.warning("the topic %s will be looked up again: %s", TOPIC, error)
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
            rows = await self._node.transactions.read(lambda tx: tx.ownerships(HISTORY_GROUP))
            for row in rows:
                owned = self._ownership.get(row.partition)
                if owned is not None and row.committed is not None and row.committed.epoch == owned.log_epoch:
                    owned.history_end = row.committed.offset
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
        await run_mirror(self._node, self.inbox, self._append, session_timeout=self.config.session_timeout)

    async def _materialise(self) -> None:
        if self._history is not None:
            await Materialiser(self._node, self._history, session_timeout=self.config.session_timeout).run()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _merged(missed: Missed, copies: Iterable[Item], gap: str | None = None) -> Missed:
    """What was missed, with copies in between, in the order of ids."""
    in_order = heapq.merge(missed.items, copies, key=lambda item: item.entry.id)
    return Missed(missed.how, list(in_order), missed.gap or gap)
