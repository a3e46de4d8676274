"""Who has joined which channels, of the users of one partition of `inbox` that are online."""

from collections.abc import Collection, Iterable

from shardyard.runtime.metrics import CHANNEL_MEMBERSHIPS

_NONE: frozenset[str] = frozenset()


class LocalMembers:
    """Both directions, for users whose channels were loaded. Changes of other users are not kept."""

    def __init__(self) -> None:
        self._channels: dict[str, set[str]] = {}
        self._users: dict[str, set[str]] = {}

    def knows(self, user: str) -> bool:
        """Whether the user's channels were loaded."""
        return user in self._channels

    def channels_of(self, user: str) -> Collection[str]:
        return self._channels.get(user, _NONE)

    def users_of(self, channel: str) -> Collection[str]:
        return self._users.get(channel, _NONE)

    def load(self, user: str, channels: Iterable[str]) -> None:
        """The user's channels. From now on, changes are kept."""
        self.forget(user)
        self._channels[user] = set()
        for channel in channels:
            self._add(user, channel)

    def change(self, user: str, channel: str, *, joined: bool) -> bool:
        """The user has joined or left. Returns whether that changed anything here."""
        channels = self._channels.get(user)
        if channels is None or (channel in channels) == joined:
            return False
        if joined:
            self._add(user, channel)
        else:
            channels.discard(channel)
            self._remove(user, channel)
        return True

    def forget(self, user: str) -> None:
        """The user is offline."""
        for channel in self._channels.pop(user, ()):
            self._remove(user, channel)

    def clear(self) -> None:
        for user in list(self._channels):
            self.forget(user)

    def _add(self, user: str, channel: str) -> None:
        self._channels[user].add(channel)
        self._users.setdefault(channel, set()).add(user)
        CHANNEL_MEMBERSHIPS.add(1)

    def _remove(self, user: str, channel: str) -> None:
        users = self._users[channel]
        users.discard(user)
        if not users:
            del self._users[channel]
        CHANNEL_MEMBERSHIPS.add(-1)
