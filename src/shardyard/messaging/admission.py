"""Opening the sessions of clients: the server that serves them, what they missed, and their welcome."""

import heapq
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardyard.groups import Node
from shardyard.messaging.items import Item
from shardyard.messaging.owned import OwnedPartition
from shardyard.messaging.ownership import OWNER_SECONDS
from shardyard.messaging.recent import RecentlySent
from shardyard.messaging.resume import YOUNG_MS, Missed, Resuming
from shardyard.messaging.session import Session, State
from shardyard.messaging.snowflakes import id_at, ms_of
from shardyard.model import Fenced, RetryLater
from shardyard.runtime.metrics import CLIENTS_MOVED, RESUMES
from shardyard.wire import messaging as wire
from shardyard.wire.close_codes import CloseCode
from shardyard.wire.messaging import CLOCKS_MS

if TYPE_CHECKING:
    from shardyard.messaging.server import MessagingServer

_log = logging.getLogger(__name__)


class Admission:
    """Admits clients whose token was valid."""

    def __init__(self, server: "MessagingServer", node: Node, resuming: Resuming, recent: RecentlySent) -> None:
        self._server = server
        self._node = node
        self._clock = node.clock
        self._resuming = resuming
        self._recent = recent

    def admit(self, session: Session, hello: wire.Hello) -> None:
        """Attach a session whose client is known to its partition, or send it elsewhere."""
        owned = self._server.owned_of(session.user)
        if owned is None or not owned.ready.done():
            self._server.start(self._admit_later(session, hello))
            return
        if not self._server.channels.is_prepared(session, owned):
            self._server.start(self._admit_slowly(session, hello, owned))
            return
        missed = self._resuming.from_memory(owned, session.user, session.device, hello)
        if missed is None or (self._server.config.mirror == "local" and hello.sent is not None):
            self._server.start(self._admit_slowly(session, hello, owned))
        elif self._attach(session, owned):
            self._welcome(session, owned, hello, self._with_young(session, missed))

    async def _admit_later(self, session: Session, hello: wire.Hello) -> None:
        """The user's partition is not served here: maybe not yet, or by another server."""
        deadline = self._server.now + OWNER_SECONDS
        while session.state is State.OPENING:
            owned = self._server.owned_of(session.user)
            if owned is not None and await owned.ready:
                await self._admit_slowly(session, hello, owned)
                return
            address = self._server.address_of(session.user)
            if address is not None or self._server.now > deadline:
                CLIENTS_MOVED.add()
                session.send_elsewhere(address, 0.0 if address else 1.0, CloseCode.NOT_HERE)
                return
            await self._clock.sleep(0.05)

    async def _admit_slowly(self, session: Session, hello: wire.Hello, owned: OwnedPartition) -> None:
        """Not all is in memory: the user's channels, or what the client missed."""
        if session.state is not State.OPENING or not await self._attach_prepared(session, owned):
            return
        try:
            missed = self._resuming.from_memory(owned, session.user, session.device, hello)
            if missed is None:
                missed = await self._resuming.find(owned, session.user, session.device, hello)
            if self._server.config.mirror == "local" and hello.sent is not None:
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
        if self._server.config.mirror == "log" or missed.how != "new":
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

    async def _attach_prepared(self, session: Session, owned: OwnedPartition) -> bool:
        """Attach a session as soon as its user's channels are known. False if it was closed instead."""
        channels = self._server.channels
        if channels.is_prepared(session, owned):
            return self._attach(session, owned)
        try:
            await channels.prepare(session, owned)
            return session.state is State.OPENING and self._attach(session, owned)
        except Fenced:
            session.send_elsewhere(self._server.address_of(session.user), 0.0, CloseCode.MOVED)
        except RetryLater as error:
            session.close(CloseCode.UNAVAILABLE, str(error))
        except Exception:  # noqa: BLE001 nobody awaits this
            _log.exception("the channels of %s could not be found", session.user)
            session.close(CloseCode.UNAVAILABLE, "the user's channels could not be found")
        finally:
            channels.arrived(session, owned)
        return False

    def _attach(self, session: Session, owned: OwnedPartition) -> bool:
        """From now on the session gets what arrives for its user. False if it was closed instead."""
        if owned.ended:  # while the session waited for it
            session.send_elsewhere(self._server.address_of(session.user), 0.0, CloseCode.MOVED)
            return False
        others = owned.sessions_of(session.user)
        replaced = [each for each in others if each.device == session.device]
        if len(others) - len(replaced) >= self._server.config.connections_per_user:
            most = self._server.config.connections_per_user
            session.close(CloseCode.TOO_MANY_CONNECTIONS, f"the user has too many clients connected: at most {most}")
            return False
        session.owned = owned
        owned.attach(session)
        for other in replaced:
            other.close(CloseCode.REPLACED, "the same client has connected again")
        self._server.presence.changed(session.user, len(owned.sessions_of(session.user)))
        return True

    def _welcome(self, session: Session, owned: OwnedPartition, hello: wire.Hello, missed: Missed) -> None:
        RESUMES.series(missed.how).add()
        position = hello.position
        if missed.how != "position" or position is None:
            position = owned.position(session.first_offset(missed.items, owned.tail.end))
        sent = hello.sent
        if sent is None and self._server.config.mirror == "local":
            sent = str(id_at(int(self._clock.now() * 1000)))
        welcome = wire.Welcome(
            session.user,
            position,
            self._server.config.mirror,
            missed.how,
            sent,
            self._node.name,
            owned.epoch,
            self._server.addresses.current(),
        )
        session.open(welcome, missed.items, missed.gap)


def _merged(missed: Missed, copies: Iterable[Item], gap: str | None = None) -> Missed:
    """What was missed, with copies in between, in the order of ids."""
    in_order = heapq.merge(missed.items, copies, key=lambda item: item.entry.id)
    return Missed(missed.how, list(in_order), missed.gap or gap)
