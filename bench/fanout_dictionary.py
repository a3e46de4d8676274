"""The routing table as one would write it first: dictionaries of sets. `bench.fanout_table` compares with it."""

from shardyard.placement import Modulus


class Dictionaries:
    """Channel -> inbox partition -> online members, and user -> channels. All users are online when they join."""

    def __init__(self, inboxes: int, users: int) -> None:
        self._inbox = Modulus("fnv1a32", inboxes)
        self.members: dict[bytes, dict[int, set[bytes]]] = {}
        self.channels: dict[bytes, set[bytes]] = {}
        self.devices: dict[bytes, set[bytes]] = {}
        self.inboxes: dict[bytes, int] = {}
        self._names: dict[bytes, bytes] = {}
        for number in range(users):
            name = b"user-%d" % number
            self.devices[name] = {b"phone"}
            self.inboxes[name] = self._inbox.place(name)
            self._names[name] = name

    def join(self, channel: bytes, user: bytes) -> None:
        # The same object for each name: otherwise a set would keep one for each membership.
        channel, user = self._names.setdefault(channel, channel), self._names[user]
        self.channels.setdefault(user, set()).add(channel)
        self.members.setdefault(channel, {}).setdefault(self.inboxes[user], set()).add(user)

    def connect(self, user: bytes, device: bytes) -> None:
        devices = self.devices[user]
        devices.add(device)
        if len(devices) == 1:
            inbox = self.inboxes[user]
            for channel in self.channels.get(user, ()):
                self.members[channel].setdefault(inbox, set()).add(user)

    def disconnect(self, user: bytes, device: bytes) -> None:
        devices = self.devices[user]
        devices.discard(device)
        if not devices:
            inbox = self.inboxes[user]
            for channel in self.channels.get(user, ()):
                members = self.members[channel][inbox]
                members.discard(user)
                if not members:
                    del self.members[channel][inbox]

    def route(self, channel: bytes) -> list[int]:
        """The inbox partitions with online members."""
        return list(self.members.get(channel, ()))
