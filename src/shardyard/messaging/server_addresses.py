"""The addresses of servers that clients get, so that they find another one when theirs is gone."""

import random

from shardyard.groups import Directory
from shardyard.wire.messaging import MAX_SERVERS


class ServerAddresses:
    """The members of the directory that have an address; some of them if there are more than `MAX_SERVERS`."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._members: object = None
        self._all: list[str] = []
        self._given: tuple[str, ...] = ()

    def current(self) -> tuple[str, ...]:
        """The same object as before, unless a server has come or gone since."""
        members = self._directory.members()
        if members is not self._members:
            self._members = members
            addresses = sorted({member.address for member in members.values() if member.address})
            if addresses != self._all:
                self._all = addresses
                self._given = tuple(random.sample(addresses, min(len(addresses), MAX_SERVERS)))
        return self._given
