"""Fills the topics of channels for tests."""

import random
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from shardyard.fanout.routing import RoutingTable
from shardyard.model import Partition, Position, Record
from shardyard.pipeline.blocking import blocking
from shardyard.placement import Jump, Modulus
from shardyard.wire.channels import EVENTS, FANOUT_PARTITIONS, HASH, MEMBERS, PARTITIONER, PRESENCE, change
from shardyard.wire.inbox import TOPIC
from tests.pipeline.logs import url

INBOXES = 5
EVENT_PARTITIONS = 3
_place_channel = Jump(HASH, FANOUT_PARTITIONS).place
_place_user = Modulus("fnv1a32", INBOXES).place

Routes = dict[str, set[int]]
"""The inbox partitions with online members of each channel."""


class Channels:
    """A log with the topics of channels, and a dictionary model of what they say."""

    def __init__(self, folder: Path) -> None:
        self.log = url(folder)
        self._opened = blocking(self.log, create=True)
        self._log = self._opened.__enter__()
        create = self._log.log.create_topic
        self._log.wait(create(MEMBERS, FANOUT_PARTITIONS, partitioner=PARTITIONER, hash_=HASH))
        for topic, partitions in ((PRESENCE, INBOXES), (TOPIC, INBOXES), (EVENTS, EVENT_PARTITIONS)):
            self._log.wait(create(topic, partitions))
        self.members: dict[str, set[str]] = defaultdict(set)
        self.devices: dict[str, set[str]] = defaultdict(set)

    def close(self) -> None:
        self._opened.__exit__(None, None, None)

    def append(self, topic: str, partition: int, records: list[Record]) -> None:
        self._log.wait(self._log.log.append(Partition(topic, partition), records))

    def change_members(self, changes: Iterable[tuple[str, str, bool]]) -> None:
        """Append changes: channel, user, and whether it joins."""
        batches: dict[int, list[Record]] = defaultdict(list)
        for channel, user, joins in changes:
            batches[_place_channel(channel)].append(Record.new(change(user, added=joins), channel.encode()))
            (self.members[channel].add if joins else self.members[channel].discard)(user)
        for p, records in batches.items():
            self.append(MEMBERS, p, records)

    def change_presence(self, changes: Iterable[tuple[str, str, bool]]) -> None:
        """Append changes: user, device, and whether it connects."""
        batches: dict[int, list[Record]] = defaultdict(list)
        for user, device, connects in changes:
            batches[_place_user(user)].append(Record.new(change(device, added=connects), user.encode()))
            (self.devices[user].add if connects else self.devices[user].discard)(device)
        for q, records in batches.items():
            self.append(PRESENCE, q, records)

    def clear_presence(self, q: int) -> None:
        self.append(PRESENCE, q, [Record.new(b"=", None)])
        for user in self.devices:
            if _place_user(user) == q:
                self.devices[user].clear()

    def fill(self, rng: random.Random, channels: int = 10, users: int = 60, changes: int = 900) -> None:
        """Random changes: most of them joins, some of them twice."""
        names = [f"ch_{n}" for n in range(channels)] + ["ä b"]
        people = [f"user-{n}" for n in range(users)] + ["日本"]
        self.change_members((rng.choice(names), rng.choice(people), rng.random() < 0.7) for _ in range(changes))
        for round_ in range(3):
            if round_ == 1:
                self.clear_presence(rng.randrange(INBOXES))
            self.change_presence(
                (rng.choice(people), rng.choice(("phone", "desk", "web")), rng.random() < 0.6) for _ in range(users)
            )

    def partition_of(self, user: str) -> int:
        """The inbox partition of a user."""
        return _place_user(user)

    def routes(self) -> Routes:
        """By the model."""
        online = {user for user, devices in self.devices.items() if devices}
        return {channel: {_place_user(user) for user in users & online} for channel, users in self.members.items()}

    def table_of_topics(self) -> RoutingTable:
        """A routing table from the topics alone."""
        table = RoutingTable(INBOXES)
        for q in range(INBOXES):
            table.apply_presence(q, *self._all(PRESENCE, q))
        for p in range(FANOUT_PARTITIONS):
            table.add(p)
            table.apply_members(p, *self._all(MEMBERS, p))
        return table

    def _all(self, topic: str, index: int) -> tuple[pa.ChunkedArray, pa.ChunkedArray, Position]:
        batch = self._log.wait(self._log.log.read(Partition(topic, index), 0, max_records=100_000))
        return batch.data["key"], batch.data["value"], Position(batch.epoch, batch.end)


def routes_of(table: RoutingTable, channels: Iterable[str]) -> Routes:
    return {
        channel: set(table.route(_place_channel(channel), pa.array([channel.encode()]))[0].nonzero()[0].tolist())
        for channel in channels
    }
