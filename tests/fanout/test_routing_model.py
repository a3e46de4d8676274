"""The routing table against a dictionary model, over generated histories."""

import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from xxhash import xxh64_intdigest

from shardyard.fanout.routing import RoutingTable, Snapshot, changes, names, partition, table, write_snapshot
from shardyard.model import Position
from shardyard.wire.channels import FANOUT_PARTITIONS
from tests.fanout.routing_model import (
    ALL,
    Members,
    Presence,
    Record,
    columns,
    expected,
    fanout_partition,
    inbox_partition,
)

HELD = (3, 7)
"""Fan-out partitions of the histories."""
CHANNELS = {
    p: [*[name for i in range(4000) if fanout_partition(name := b"ch%d" % i) == p][:3], b"unknown"] for p in HELD
}
USERS = [b"u%d" % i for i in range(7)]
DEVICES = [b"d%d" % i for i in range(4)]
BAD: list[Record] = [(b"ch", b""), (None, b"+u"), (b"ch", b"+"), (b"ch", b"*u"), (b"", b"+u"), (b"ch", b"+\xff")]
LIMITS = [(changes, "FEW"), (partition, "FEW"), (partition, "MERGE_ROWS"), (partition, "WAITING_ROWS")]

partitions = st.sampled_from(HELD)
signs = st.sampled_from([b"+", b"+", b"-"])
back = st.sampled_from([0, 0, 1, 5, ALL])
ahead = st.sampled_from([-2, 0, 1, 3, ALL])


class WeakHash:
    """Gives most names the same hash as others."""

    def array(self, keys: pa.Array) -> npt.NDArray[np.uint64]:
        return np.array([weak(key or b"") for key in keys.to_pylist()], np.uint64)


def weak(name: bytes) -> int:
    return xxh64_intdigest(name) % 3


class Histories(RuleBasedStateMachine):
    """Logs of both topics; a table that reads them in steps, also again; a model that reads each record once."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.patches: list[Any] = []
        self.snapshot: Snapshot | None = None

    @initialize(limits=st.lists(st.sampled_from([0, 2, 12, ALL]), min_size=5, max_size=5), inboxes=st.integers(1, 5))
    def start(self, limits: list[int], inboxes: int) -> None:
        for (module, name), limit in zip(LIMITS, limits, strict=False):
            self.patches.append(patch.object(module, name, limit))
        self.patches.append(patch.object(table, "MANY_USERS", limits[4]))
        if limits[0] == limits[1]:
            self.patches += [patch.object(names, "_xxh64", WeakHash()), patch.object(names, "xxh64_intdigest", weak)]
        for each in self.patches:
            each.start()
        self.inboxes = inboxes
        self.member_log: dict[int, list[Record]] = {p: [] for p in HELD}
        self.member_epoch = dict.fromkeys(HELD, 1)
        self.presence_log: dict[int, list[Record]] = {q: [] for q in range(inboxes)}
        self.presence_floor = dict.fromkeys(range(inboxes), 0)
        self.restart(with_snapshot=False)

    def restart(self, with_snapshot: bool) -> None:
        snapshot = self.snapshot if with_snapshot else None
        self.table = RoutingTable(self.inboxes, snapshot)
        self.members: dict[int, Members] = {}
        self.presence = Presence()
        if snapshot is not None and snapshot.manifest.inbox_partitions == self.inboxes:
            self.presence = self.saved_presence.copy()
        for p in HELD:
            self.add(p, with_snapshot)

    @rule(with_snapshot=st.booleans())
    def begin_again(self, with_snapshot: bool) -> None:
        self.restart(with_snapshot)

    # What is appended ----------------------------------------------------------------------------------------

    @rule(p=partitions, channel=st.integers(0, 2), user=st.sampled_from(USERS), sign=signs)
    def change_member(self, p: int, channel: int, user: bytes, sign: bytes) -> None:
        self.member_log[p].append((CHANNELS[p][channel], sign + user))

    @rule(user=st.sampled_from(USERS), device=st.sampled_from(DEVICES), sign=signs)
    def change_presence(self, user: bytes, device: bytes, sign: bytes) -> None:
        self.presence_log[inbox_partition(user, self.inboxes)].append((user, sign + device))

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 12), look=st.booleans())
    def much_happens(self, seed: int, count: int, look: bool) -> None:
        """Many changes, all of which are read, and possibly looked at between members and presence."""
        random = Random(seed)
        for _ in range(count):
            sign = random.choice((b"+", b"-"))
            if random.random() < 0.5:
                self.change_member(random.choice(HELD), random.randrange(3), random.choice(USERS), sign)
            else:
                self.change_presence(random.choice(USERS), random.choice(DEVICES[:2]), sign)
        for p in HELD:
            self.read_members(p, 0, ALL)
        if look:
            self.check()
        for q in range(self.inboxes):
            self.read_presence(q, 0, ALL)

    @rule(q=st.integers(0, 4), p=partitions, bad=st.sampled_from(BAD))
    def append_bad_records(self, q: int, p: int, bad: Record) -> None:
        self.presence_log[q % self.inboxes].append(bad)
        self.member_log[p].append(bad)

    @rule(q=st.integers(0, 4))
    def clear(self, q: int) -> None:
        self.presence_log[q % self.inboxes].append((None, b"="))

    @rule(p=partitions)
    def recreate_members(self, p: int) -> None:
        self.member_log[p] = [(CHANNELS[p][0], b"+" + USERS[0])]
        self.member_epoch[p] += 1

    # What is read --------------------------------------------------------------------------------------------

    @rule(p=partitions, before=back, after=ahead)
    def read_members(self, p: int, before: int, after: int) -> None:
        if p not in self.members:
            return
        log, epoch, reached = self.member_log[p], self.member_epoch[p], self.table.members_offset(p)
        at = reached.offset if reached and reached.epoch == epoch else 0
        end = max(0, min(len(log), at + after))
        if reached and reached.epoch < epoch:
            if not end:
                return
            self.members[p] = Members()
        self.members[p].apply(log[at:end])
        self.table.apply_members(p, *columns(log[max(0, min(at, end) - before) : end]), Position(epoch, end))

    @rule(q=st.integers(0, 4), before=back, after=ahead)
    def read_presence(self, q: int, before: int, after: int) -> None:
        q %= self.inboxes
        log, floor, reached = self.presence_log[q], self.presence_floor[q], self.table.presence_offsets[q]
        at = max(reached.offset - floor, 0) if reached else 0
        end = max(0, min(len(log), at + after))
        self.presence.apply(q, self.inboxes, log[at:end])
        batch = log[max(0, min(at, end) - before) : end]
        self.table.apply_presence(q, *columns(batch), Position(1, floor + end))

    @rule(p=partitions, with_snapshot=st.booleans())
    def add(self, p: int, with_snapshot: bool) -> None:
        if p in self.members:
            return
        if with_snapshot and self.snapshot is not None:
            self.table.add(p, self.snapshot.partition(p))
            self.members[p] = self.saved_members[p].copy()
        else:
            self.table.add(p)
            self.members[p] = Members()

    @rule(p=partitions, again=st.booleans(), with_snapshot=st.booleans())
    def drop(self, p: int, again: bool, with_snapshot: bool) -> None:
        if self.members.pop(p, None) is not None:
            self.table.drop(p)
        if again:
            self.add(p, with_snapshot)

    @rule()
    def take_snapshot(self) -> None:
        """Of everything that the logs hold."""
        self.saved_members = {p: Members() for p in HELD}
        self.saved_presence = Presence()
        for p, log in self.member_log.items():
            self.saved_members[p].apply(log)
        for q, log in self.presence_log.items():
            self.saved_presence.apply(q, self.inboxes, log)
        memberships = [
            (channel, user) for m in self.saved_members.values() for channel, us in m.channels.items() for user in us
            if channel in CHANNELS[3] or channel in CHANNELS[7]
        ]  # fmt: skip
        positions: list[Position | None] = [None] * FANOUT_PARTITIONS
        for p, log in self.member_log.items():
            positions[p] = Position(self.member_epoch[p], len(log))
        write_snapshot(
            self.folder,
            *columns(memberships),
            *columns([(user, device) for user, ds in self.saved_presence.devices.items() for device in ds]),
            members_positions=positions,
            presence_positions=[Position(1, self.presence_floor[q] + len(log)) for q, log in self.presence_log.items()],
        )
        self.snapshot = Snapshot.open(self.folder)

    @rule(inboxes=st.sampled_from([1, 2, 3, 5, 300]))
    def resize(self, inboxes: int) -> None:
        """The servers announce again who is online, and what was there before is trimmed."""
        if inboxes == self.inboxes:
            return
        truth = Presence()
        for q, log in self.presence_log.items():
            truth.apply(q, self.inboxes, log)
        ends = {q: self.presence_floor[q] + len(log) for q, log in self.presence_log.items()}
        self.presence_floor = {q: ends.get(q, 0) for q in range(inboxes)}
        self.presence_log = {q: [(None, b"=")] for q in range(inboxes)}
        for user, devices in truth.devices.items():
            self.presence_log[inbox_partition(user, inboxes)] += [(user, b"+" + device) for device in devices]
        self.presence.resize(self.inboxes, inboxes)
        self.inboxes = inboxes
        self.table.resize(inboxes)

    # What must hold ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.members)
    @rule()
    def check(self) -> None:
        for p, members in self.members.items():
            rows, counts = expected(members, self.presence, CHANNELS[p], self.inboxes)
            assert (self.table.route(p, pa.array(CHANNELS[p], pa.binary())) == rows).all()
            assert [self.table.online(p, channel) for channel in CHANNELS[p]] == counts
        memberships = sum(len(users) for m in self.members.values() for users in m.channels.values())
        assert self.table.size().memberships == memberships

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.check()
        for each in self.patches:
            each.stop()
        shutil.rmtree(self.folder)


TestHistories = Histories.TestCase
TestHistories.settings = settings(stateful_step_count=40, deadline=None)
