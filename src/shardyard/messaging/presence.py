"""Presence: how many clients of a user are connected, and who wants to know."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from shardyard.messaging.session import Session
from shardyard.runtime.clock import Clock
from shardyard.wire import messaging as wire

if TYPE_CHECKING:
    from shardyard.messaging.owned import OwnedPartition

REMEMBERED = 100_000
"""Users whose presence is remembered, and so since when they are on- or offline."""
LOOK_SECONDS = 2.0
"""How often other servers are asked for the presence of watched users."""


class Whereabouts(Protocol):
    """Where users are served."""

    def owned_of(self, user: str) -> "OwnedPartition | None":
        """The user's partition if this server serves it."""

    def address_of(self, user: str) -> str | None:
        """The address of another server that serves the user."""


class PresenceBoard:
    """Counts the connected clients of this server's users, and tells clients that watch a user of every change. Users
    of other servers are asked for there, every few seconds."""

    def __init__(self, whereabouts: Whereabouts, clock: Clock) -> None:
        self._whereabouts = whereabouts
        self._clock = clock
        self._last: OrderedDict[str, wire.Presence] = OrderedDict()
        self._watchers: defaultdict[str, set[Session]] = defaultdict(set)
        self._remote: dict[str, wire.Presence] = {}
        """What other servers said last, of users that are watched here."""

    # This server's own users

    def changed(self, user: str, clients: int) -> None:
        """A client of the user has connected or disconnected."""
        last = self._last.get(user)
        if last is not None and last.online == clients:
            return
        is_same = last is not None and (last.online > 0) == (clients > 0)
        since = last.since if last is not None and is_same else int(self._clock.now() * 1000)
        presence = self._last[user] = wire.Presence(user, clients, since)
        self._last.move_to_end(user)
        if len(self._last) > REMEMBERED:
            self._last.popitem(last=False)
        self._tell(presence)

    def local(self, user: str) -> wire.Presence:
        """The presence of a user of this server."""
        owned = self._whereabouts.owned_of(user)
        clients = 0 if owned is None else len(owned.sessions_of(user))
        last = self._last.get(user)
        return wire.Presence(user, clients, 0 if last is None else last.since)

    # Those who watch

    def watch(self, session: Session, users: frozenset[str]) -> None:
        """The client watches these users, and no others any more. It is told of each of them, as far as it is known."""
        for user in session.watched - users:
            self._unwatch(session, user)
        session.watched = users
        for user in users:
            self._watchers[user].add(session)
            if self._whereabouts.owned_of(user) is not None:
                session.notify(self.local(user))
            elif (known := self._remote.get(user)) is not None:
                session.notify(known)

    def forget(self, session: Session) -> None:
        """The client has gone."""
        for user in session.watched:
            self._unwatch(session, user)
        session.watched = frozenset()

    def _unwatch(self, session: Session, user: str) -> None:
        watchers = self._watchers.get(user)
        if watchers is not None:
            watchers.discard(session)
            if not watchers:
                del self._watchers[user]
                self._remote.pop(user, None)

    def _tell(self, presence: wire.Presence) -> None:
        for session in self._watchers.get(presence.user, ()):
            session.notify(presence)

    # Users of other servers

    def watched_elsewhere(self) -> dict[str, list[str]]:
        """The watched users that other servers serve, by the address of the server."""
        users: defaultdict[str, list[str]] = defaultdict(list)
        for user in self._watchers:
            if self._whereabouts.owned_of(user) is None and (address := self._whereabouts.address_of(user)) is not None:
                users[address].append(user)
        return users

    def heard(self, presences: Iterable[wire.Presence]) -> None:
        """Another server has answered."""
        for presence in presences:
            if presence.user in self._watchers and self._remote.get(presence.user) != presence:
                self._remote[presence.user] = presence
                self._tell(presence)
