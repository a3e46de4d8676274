"""A deterministic simulation of registry, groups and rebalancers under a virtual clock.

One seed is one history: random joins, leaves, crashes, pauses, restarts, slow heartbeats, clock jumps, lost and delayed
responses, resets of positions, members that prepare and members that are only present, broadcast groups, leaders that
stop in the middle. Commits and heartbeats of several members are carried out together, as those of a process are, and a
leader looks at the groups only when it was notified or a time has come. After each step the guarantees are checked; at
the end all faults stop, and the group must settle. `python -m tests.groups.simulation SEED` replays one history with
its steps printed.
"""

import argparse
import math
import multiprocessing
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from shardyard.groups import GroupConfig, assignment, position_reset, protocol
from shardyard.groups.assignment import Decision
from shardyard.groups.broadcast import groups_of, member_group
from shardyard.groups.protocol import Grant, MemberAssignment
from shardyard.groups.rebalancer import LEASE, LOOK_SECONDS
from shardyard.model import (
    CommitBehind,
    Fenced,
    MemberExists,
    Partition,
    PartitionTaken,
    Position,
    ShardyardError,
    Topic,
    TopicKind,
)
from shardyard.registry import Heartbeat, OwnershipRow, PositionCommit, Transaction, lease
from shardyard.registry.memory import MemoryRegistry

GROUP = "g"
STEPS = 80
HEALING_ROUNDS = 60


class VirtualClock:
    """Only `now` matters: the protocol never waits."""

    def __init__(self) -> None:
        self.time = 1_000_000.0

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(f"the protocol must not sleep ({seconds})")


class NotingRegistry(MemoryRegistry):
    """Notes which names were touched."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.touched: set[str] = set()

    def commit(self, state: Any, touched: set[str]) -> None:
        self.touched |= touched
        super().commit(state, touched)


class Stopped(Exception):
    """The leader dies in the middle of its transaction."""


@dataclass
class SimMember:
    """What a member believes; the registry knows better."""

    name: str
    static: bool
    topics: tuple[str, ...]
    manual: tuple[Partition, ...] | None
    session: float
    prepare_seconds: float | None = None
    group: str = GROUP
    """In a broadcast group, its own."""
    epoch: int | None = None
    since: int | None = None
    """Its last epoch, as long as its process lives."""
    instance: int = 0
    """Of its process."""
    owned: dict[Partition, Grant] = field(default_factory=dict)
    incoming: frozenset[Partition] = frozenset()
    asleep_until: int = 0
    late: list[tuple[int, MemberAssignment]] = field(default_factory=list)
    """Responses that arrive at a later step."""

    def restart(self) -> None:
        self.forget()
        self.since = None
        self.instance += 1

    def apply(self, response: MemberAssignment) -> None:
        self.owned, self.incoming = dict(response.owned), response.incoming

    def forget(self) -> None:
        self.since = self.since if self.epoch is None else self.epoch
        self.epoch, self.owned, self.incoming, self.late = None, {}, frozenset(), []


@dataclass
class Promise:
    """That an owner keeps a partition while its target prepares."""

    between: tuple[str | None, str | None]
    """Owner and target."""
    since: float
    until: float
    stored: float
    """What the registry has stored of it."""


@dataclass
class Candidate:
    """A rebalancer, as far as it remembers."""

    name: str
    token: int | None = None
    asleep_until: int = 0
    known: dict[str, Topic] | None = None
    """The topics as of its last look, if it has looked under this token."""
    look_at: float = 0.0
    """When it looks again if it is not notified."""
    notified: bool = True


class History:
    """What happens under one seed."""

    looks = 0
    """Of leaders at the groups."""
    decisions = 0
    moves = 0
    """Topics that were moved to a successor."""
    refused = 0
    """Commits that came too late."""
    behind = 0
    """Commits behind what was committed."""
    together = 0
    """Commits of several partitions at once."""
    resets = 0
    """Of one or several partitions."""
    overtaken = 0
    """Commits of owners that came too late for a reset."""
    repeated = 0
    """Joins of processes whose join before was carried out, and its response lost."""
    prepared = 0
    """Partitions whose target reported that it is ready."""
    overdue = 0
    """Partitions that were handed over because their target took too long to prepare."""

    def __init__(self, seed: int, say: Callable[[str], None] = lambda _: None) -> None:
        self.random = random.Random(seed)
        self.say = say
        self.clock = VirtualClock()
        self.registry = NotingRegistry(self.clock)
        names = ["t"] + (["u.retry"] if self.chance(0.4) else [])
        self.topics = {
            name: Topic(name, self.random.randint(1, 9), TopicKind.RETRY if "retry" in name else TopicKind.NORMAL)
            for name in names
        }
        self.max_active = self.random.choice([None, None, None, 1, 2, 3])
        self.release_after = self.random.choice([None, None, 5.0])
        self.alike = self.chance(0.7)
        """All members want the same topics and take what they are given."""
        self.broadcast = self.chance(0.12)
        """Each member gets every partition."""
        self.members: list[SimMember] = []
        self.candidates = [Candidate(f"node{i}") for i in range(self.random.randint(1, 3))]
        for candidate in self.candidates:
            self.registry.watch(protocol.ANY_GROUP, partial(setattr, candidate, "notified", True))
        self.born = 0
        self.step = 0
        self.owner_of_epoch: dict[tuple[str, Partition, int], str] = {}
        self.last_epoch: Counter[tuple[str, Partition]] = Counter()
        self.committed: dict[tuple[str, Partition], Position] = {}
        self.reset_epochs: dict[tuple[str, Partition], int] = {}
        """The epochs that the last resets put an end to."""
        self.clock_went_back = False
        self.shown: dict[tuple[str, str, int], tuple[object, float]] = {}
        """For each membership what its assignment was after the last step, and when it changes by itself."""
        self.acted: set[tuple[str, str]] = set()
        """Members that changed their own assignment in this step: they released a partition, or are ready for one."""
        self.commits: list[tuple[SimMember, int | None, PositionCommit]] = []
        self.heartbeats: list[tuple[SimMember, Heartbeat]] = []
        """Those that are carried out together at the end of a step."""
        self.promised: dict[tuple[str, Partition], Promise] = {}
        """By group and partition."""
        if self.broadcast:
            self.max_active = None
        config = GroupConfig(max_active=self.max_active, release_after=self.release_after, broadcast=self.broadcast)
        self.registry.run(lambda tx: protocol.configure(tx, GROUP, config, who="test"))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def run(self) -> None:
        for self.step in range(STEPS):
            self.one_step()
            self.check()
        self.heal()

    # Faults

    def one_step(self) -> None:
        self.clock.time += self.random.choice([0.0, 0.01, 0.1, 0.3, 1.0])
        if self.chance(0.02):
            jump = self.random.choice([-30.0, -2.0, 2.0, 30.0])
            self.say(f"the clock jumps by {jump}")
            self.clock.time += jump
            self.clock_went_back |= jump < 0
            for candidate in self.candidates:
                candidate.look_at = min(candidate.look_at, self.clock.time + LOOK_SECONDS)
        if self.chance(0.03):
            topic = self.random.choice([topic for topic in self.topics.values() if topic.successor is None])
            self.random.choices([self.grow, self.move], [3, 2])[0](topic)
        kinds: list[Callable[[], None]] = [self.arrive, self.depart, self.pause, self.restart, self.reset]
        if self.chance(0.6):
            self.random.choices(kinds, [3 if len(self.members) < 6 else 0, 1, 1.5, 1, 1])[0]()
        for member in self.awake():
            self.act(member)
        self.commit_together()
        self.heartbeat_together()
        if self.chance(0.6):
            self.lead()

    def act(self, member: SimMember) -> None:
        if member.late and member.late[0][0] <= self.step:
            member.apply(member.late.pop(0)[1])  # a response from long ago
        for action in (self.work, self.release, self.prepare, self.beat):
            if self.chance(0.4 if action == self.work else 0.3):
                action(member)

    def grow(self, topic: Topic) -> None:
        grown = replace(topic, partitions=topic.partitions + self.random.randint(1, 3))
        self.topics[topic.name] = grown
        self.say(f"{topic.name} grows to {grown.partitions}")

    def move(self, topic: Topic) -> None:
        successor = Topic(topic.name + "'", self.random.randint(1, 9), topic.kind)
        self.topics |= {topic.name: replace(topic, successor=successor.name), successor.name: successor}
        self.moves += 1
        self.say(f"{topic.name} moves to {successor.name}, with {successor.partitions} partitions")

    def groups(self) -> list[str]:
        """The registry's groups that have partitions: the group, or the own groups of its members."""
        names = self.registry.read(lambda tx: groups_of(tx, GROUP))
        return [name for name in names if (name != GROUP) == self.broadcast]

    def reset(self) -> None:
        """An administrator resets positions, forward or back, also of partitions without an owner."""
        groups = self.groups()
        if not groups:
            return
        group = self.random.choice(groups)
        everything = [p for topic in self.topics.values() for p in topic]
        chosen = self.random.sample(everything, self.random.randint(1, min(4, len(everything))))
        known = {p: self.committed.get((group, p), Position(1, 0)).offset for p in chosen}
        positions = {p: Position(1, max(0, known[p] + self.random.randint(-20, 20))) for p in chosen}

        def work(tx: Transaction) -> tuple[dict[Partition, OwnershipRow], dict[Partition, OwnershipRow]]:
            before = {row.partition: row for row in tx.ownerships(group)}
            position_reset.reset(tx, group, positions, "test")
            return before, {row.partition: row for row in tx.ownerships(group)}

        before, after = self.registry.run(work)
        self.say(f"positions of {group} are reset: {', '.join(f'{p} to {to.offset}' for p, to in positions.items())}")
        for partition, row in before.items():
            same = (after[partition].owner, after[partition].target) == (row.owner, row.target)
            assert same, f"a reset moved {partition}"
            assert partition in positions or after[partition] == row, f"a reset of others changed {partition}"
        self.committed |= {(group, p): position for p, position in positions.items()}
        self.reset_epochs |= {(group, p): before[p].epoch for p in chosen if p in before}
        self.resets += 1

    def last(self, name: str) -> str:
        successor = self.topics[name].successor
        return name if successor is None else self.last(successor)

    def awake(self) -> list[SimMember]:
        return [m for m in self.members if m.asleep_until <= self.step]

    def somebody(self) -> SimMember | None:
        awake = self.awake()
        return self.random.choice(awake) if awake else None

    def arrive(self) -> None:
        self.born += 1
        topics = tuple(self.topics) if self.alike or self.chance(0.7) else (self.random.choice(list(self.topics)),)
        if self.chance(0.1):
            topics = ()  # only present
        manual = None
        if not self.alike and topics and not self.broadcast and self.chance(0.2):
            everything = [p for t in self.topics.values() for p in t]
            manual = tuple(self.random.sample(everything, self.random.randint(1, min(2, len(everything)))))
        session = self.random.choice([1.0, 3.0, 10.0])
        prepare_seconds = self.random.choice([None, None, 1.0, 6.0])
        member = SimMember(f"m{self.born}", self.chance(0.3), topics, manual, session, prepare_seconds)
        self.members.append(member)
        self.join(member)

    def join(self, member: SimMember) -> None:
        member.forget()
        instance = f"{member.name} {member.instance}"
        before = self.registry.read(lambda tx: tx.member(member.group, member.name))
        self.repeated += before is not None and before.instance == instance and before.epoch > (member.since or 0)
        try:
            row = self.registry.run(
                lambda tx: protocol.join(
                    tx,
                    GROUP,
                    member.name,
                    topics=member.topics,
                    static=member.static,
                    manual=member.manual,
                    session_timeout=member.session,
                    address=f"host of {member.name}",
                    prepare_seconds=member.prepare_seconds,
                    since=member.since,
                    instance=instance,
                )
            )
        except Fenced as error:
            raise AssertionError(f"{member.name} was fenced by its own join") from error
        except PartitionTaken:
            member.manual = None
            return
        except MemberExists:  # its process was restarted; a dynamic member takes another name
            assert member.instance > 0, f"{member.name} is in the way of its own join"
            self.born += 1
            member.name = f"m{self.born}"
            return
        member.group = row.group
        if self.chance(0.1):
            self.say(f"{member.name} joins, and the response is lost")
            if self.chance(0.5):
                self.say(f"{member.name} restarts")
                member.restart()
            return
        member.epoch = row.epoch
        self.say(f"{member.name} joins with epoch {row.epoch}")

    def depart(self) -> None:
        member = self.somebody()
        if member is None:
            return
        self.members.remove(member)
        if self.chance(0.5):
            self.say(f"{member.name} crashes")
            return
        self.say(f"{member.name} leaves")
        if member.epoch is not None:
            try:
                epoch = member.epoch
                self.registry.run(lambda tx: protocol.leave(tx, member.group, member.name, epoch))
            except Fenced:
                pass

    def restart(self) -> None:
        """A process ends and comes back under the same name; only a static member may join again at once."""
        member = self.somebody()
        if member is not None and member.static:
            self.say(f"{member.name} restarts")
            member.restart()
            self.join(member)

    def beat(self, member: SimMember) -> None:
        """Have a heartbeat ready, which is carried out together with those of others; or join."""
        if member.epoch is None:
            self.join(member)
            return
        idle = [p for p in member.owned if self.chance(0.8)]
        self.heartbeats.append((member, Heartbeat(member.group, member.name, member.epoch, idle)))

    def heartbeat_together(self, *, faults: bool = True) -> None:
        waiting, self.heartbeats = self.heartbeats, []
        if not waiting:
            return
        outcomes = self.registry.run(lambda tx: protocol.heartbeat(tx, [heartbeat for _, heartbeat in waiting]))
        for (member, heartbeat), error in zip(waiting, outcomes, strict=True):
            row = self.registry.read(lambda tx, of=heartbeat: tx.member(of.group, of.member))  # type: ignore[misc]
            alive = row is not None and row.epoch == heartbeat.epoch
            assert alive == (error is None), f"{member.name} is {'' if alive else 'not '}a member, and got {error}"
            if row is None or error is not None:
                self.say(f"{member.name} learns that it was evicted")
                if member.epoch == heartbeat.epoch:
                    member.forget()
                continue
            assert row.expires_at == self.clock.time + row.session_timeout, "a heartbeat did not renew its session"
            self.read_assignment(member, heartbeat.epoch, faults=faults)

    def read_assignment(self, member: SimMember, epoch: int, *, faults: bool) -> None:
        response = self.registry.read(lambda tx: protocol.assignment(tx, member.group, member.name, epoch))
        self.check_response(member, response)
        if faults and self.chance(0.1):
            self.say(f"{member.name} reads its assignment, and the response is lost")
        elif faults and self.chance(0.15):
            member.late.append((self.step + self.random.randint(1, 15), response))
        else:
            member.apply(response)

    def work(self, member: SimMember) -> None:
        """Have a commit ready, of partitions that the member believes to own, rightly or not."""
        if not member.owned:
            return
        several = self.random.randint(2, 4) if self.chance(0.3) else 1
        positions = {}
        for partition in self.random.sample(list(member.owned), min(several, len(member.owned))):
            grant = member.owned[partition]
            since = grant.committed.offset if grant.committed is not None else 0
            known = self.committed.get((member.group, partition), Position(1, 0)).offset
            ahead = self.random.randint(-2 if self.chance(0.1) else 0, 5)
            positions[partition] = (grant.epoch, Position(1, max(0, max(since, known) + ahead)))
        self.commits.append((member, member.epoch, PositionCommit(member.group, member.name, positions)))

    def commit_together(self) -> None:
        """Commits of several members at once; what is to come of each follows from the ones before."""
        waiting, self.commits = self.commits, []
        if not waiting:
            return
        groups = {commit.group for _, _, commit in waiting}
        rows, members = self.registry.read(
            lambda tx: (
                {(row.group, row.partition): row for group in groups for row in tx.ownerships(group)},
                {(row.group, row.name): row for group in groups for row in tx.members(group)},
            )
        )
        outcomes = self.registry.run(lambda tx: protocol.commit(tx, [commit for _, _, commit in waiting]))
        for (member, epoch, commit), error in zip(waiting, outcomes, strict=True):
            known = members.get((commit.group, commit.owner))
            alive = known is not None and known.epoch == epoch
            self.check_commit(member, commit, error, rows, alive=alive)

    def check_commit(
        self,
        member: SimMember,
        commit: PositionCommit,
        error: ShardyardError | None,
        rows: Mapping[tuple[str, Partition], OwnershipRow],
        *,
        alive: bool,
    ) -> None:
        entitled, behind, outdated = True, False, False
        for partition, (epoch, position) in commit.positions.items():
            key = (commit.group, partition)
            row = rows.get(key)
            mine = row is not None and row.owner == member.name
            too_late = epoch <= self.reset_epochs.get(key, -1)
            entitled = entitled and alive and mine and row is not None and row.epoch == epoch
            behind = behind or position < self.committed.get(key, position)
            self.overtaken += error is not None and too_late and alive and mine
            outdated = outdated or too_late
        if isinstance(error, Fenced):
            assert not entitled, f"{member.name} could not commit {commit.positions}, although it owns them"
            self.refused += 1
            for partition, (epoch, _) in commit.positions.items():
                if partition in member.owned and member.owned[partition].epoch == epoch:
                    del member.owned[partition]
        elif isinstance(error, CommitBehind):
            assert behind, f"{member.name} could not commit {commit.positions}, which is not behind"
            self.behind += 1
        else:
            assert entitled, f"{member.name} committed {commit.positions} without owning them"
            assert not outdated, f"{member.name} committed {commit.positions} under an epoch from before its reset"
            assert not behind, "a committed position went back"
            self.together += len(commit.positions) > 1
            for partition, (epoch, position) in commit.positions.items():
                self.committed[(commit.group, partition)] = position
                if partition in member.owned:
                    member.owned[partition] = Grant(epoch, position, member.owned[partition].revoked)

    def release(self, member: SimMember) -> None:
        revoked = {p: grant.epoch for p, grant in member.owned.items() if grant.revoked}
        if not revoked or (epoch := member.epoch) is None:
            return
        try:
            self.registry.run(lambda tx: protocol.release(tx, member.group, member.name, epoch, revoked))
        except Fenced:
            self.say(f"{member.name} releases what it no longer has")
        self.acted.add((member.group, member.name))
        for partition in revoked:
            member.owned.pop(partition, None)

    def prepare(self, member: SimMember) -> None:
        """Report that some of what is incoming is prepared; what it believes may be outdated."""
        done = [p for p in sorted(member.incoming) if self.chance(0.5)]
        if not done or member.epoch is None:
            return
        epoch = member.epoch

        def work(tx: Transaction) -> list[OwnershipRow]:
            before = [row for p in done if (row := tx.ownership(member.group, p)) is not None]
            protocol.ready(tx, member.group, member.name, epoch, done)
            return before

        try:
            before = self.registry.run(work)
        except Fenced:
            self.say(f"{member.name} has prepared, but was evicted")
            return
        self.acted.add((member.group, member.name))
        for partition in done:
            promise = self.promised.get((member.group, partition))
            if promise is not None and promise.between[1] == member.name:
                promise.until = promise.since  # its time is over
        self.prepared += sum(row.target == member.name and row.handover_at > self.clock.time for row in before)
        self.say(f"{member.name} is ready for {', '.join(map(str, done))}")
        member.incoming -= set(done)

    def pause(self) -> None:
        """SIGSTOP: a member or a leader does nothing for a while, then goes on with what it believed before."""
        sleepers: list[SimMember | Candidate] = [*self.members, *self.candidates]
        sleeper = self.random.choice(sleepers)
        sleeper.asleep_until = self.step + self.random.randint(2, 25)
        self.say(f"{sleeper.name} sleeps until {sleeper.asleep_until}")

    def lead(self, *, faults: bool = True) -> None:
        candidate = self.random.choice([c for c in self.candidates if c.asleep_until <= self.step] or [None])
        if candidate is None:
            return
        if not (faults and candidate.token is not None and self.chance(0.2)):  # else with the token of long ago
            name = candidate.name
            before = candidate.token
            candidate.token = self.registry.run(lambda tx: lease.acquire(tx, LEASE, name, 0.8))
            if candidate.token != before:
                candidate.known = None
        if candidate.token is None:
            return
        if faults and self.chance(0.1):
            self.say(f"{candidate.name} dies leading")
            self.die_leading(candidate)
            return
        if candidate.known == self.topics and not candidate.notified and self.clock.time < candidate.look_at:
            return
        candidate.notified = False
        outlook = self.registry.read(lambda tx: assignment.look(tx, self.topics, candidate.known))
        for group in outlook.due:
            if not self.rebalance(candidate, group):
                return
        candidate.known = dict(self.topics)
        rarely = LOOK_SECONDS if self.clock_went_back else math.inf  # else it must do without
        candidate.look_at = self.clock.time + min(rarely, math.inf if outlook.seconds is None else outlook.seconds)
        self.looks += 1

    def rebalance(self, candidate: Candidate, group: str) -> bool:
        """Rebalance one group; False if the candidate is not the leader any more."""
        token = candidate.token
        assert token is not None

        def work(tx: Transaction) -> Decision | None:
            lease.check(tx, LEASE, token)
            holder = tx.lease(LEASE)
            assert holder is not None
            assert holder.holder == candidate.name, "a stale leader passed the check"
            return assignment.rebalance(tx, group, self.topics)

        try:
            decision = self.registry.run(work)
        except Fenced:
            candidate.token = None
            return False
        self.track_preparation(group)
        if decision is not None:
            self.say(f"{candidate.name} decides {dict(sorted((str(p), m) for p, m in decision.after.items()))}")
            self.decisions += 1
            self.check_decision(group, decision)
        return True

    def die_leading(self, candidate: Candidate) -> None:
        token = candidate.token
        assert token is not None

        def work(tx: Transaction) -> None:
            lease.check(tx, LEASE, token)
            for group in groups_of(tx, GROUP):
                assignment.rebalance(tx, group, self.topics)
            raise Stopped

        try:
            self.registry.run(work)
        except (Stopped, Fenced):
            candidate.token = None
            candidate.name += "'"

    # What must hold

    def track_preparation(self, group: str) -> None:
        """Remember, apart from the registry, until when each owner may keep a partition that its target prepares."""
        rows, members = self.registry.read(lambda tx: (tx.ownerships(group), {m.name: m for m in tx.members(group)}))
        for row in rows:
            key, between = (group, row.partition), (row.owner, row.target)
            promise = self.promised.get(key)
            if promise is not None and promise.between == between and row.handover_at in (0.0, promise.stored):
                continue
            self.promised.pop(key, None)
            prepares = members[row.target].prepare_seconds if row.target in members else None
            if prepares is not None and row.owner not in (None, row.target):
                self.promised[key] = Promise(between, self.clock.time, self.clock.time + prepares, row.handover_at)

    def check_response(self, member: SimMember, response: MemberAssignment) -> None:
        """What a heartbeat says about preparation agrees with what was promised."""
        for partition, grant in response.owned.items():
            promise = self.promised.get((member.group, partition))
            if promise is None or promise.between[0] != member.name or not grant.revoked:
                continue
            in_time = promise.since <= self.clock.time < promise.until
            assert not in_time, f"{partition} was revoked before {promise.between[1]} was ready"
            self.overdue += 1
        assert not response.incoming or member.prepare_seconds is not None, f"{member.name} does not prepare"
        assert not response.incoming & set(response.owned), "a partition is incoming for its owner"

    def check(self) -> None:
        for group in self.groups():
            self.check_group(group)
        self.check_notifications()

    def check_notifications(self) -> None:
        """A member is notified of every change of its assignment that it did not make itself, except for those that
        come with time, of which it knows the time."""
        shown: dict[tuple[str, str, int], tuple[object, float]] = {}
        with self.registry.snapshot() as tx:
            for row in (row for group in self.groups() for row in tx.members(group)):
                found = protocol.assignment(tx, row.group, row.name, row.epoch)
                owned = {p: (grant.epoch, grant.revoked) for p, grant in found.owned.items()}
                until = math.inf if found.changes_in is None else tx.now + found.changes_in
                key, view = (row.group, row.name, row.epoch), (owned, found.incoming)
                shown[key] = view, until
                before, expected = self.shown.get(key, (view, until))
                notified = protocol.member_watch_name(row.group, row.name) in self.registry.touched
                known = notified or expected <= tx.now or (row.group, row.name) in self.acted
                assert view == before or known or self.clock_went_back, f"{row.name} was not notified of a change"
        self.shown = shown
        self.registry.touched.clear()
        self.acted.clear()

    def check_group(self, group: str) -> None:
        rows, members = self.registry.read(lambda tx: (tx.ownerships(group), {m.name for m in tx.members(group)}))
        for row in rows:
            key = (group, row.partition)
            assert row.owner is None or row.owner in members, f"{row.partition} belongs to {row.owner}, which is gone"
            assert row.owner is not None or row.target is None, f"{row.partition} waits for {row.target} for no reason"
            assert row.epoch >= self.last_epoch[key], f"the epoch of {row.partition} went back"
            self.last_epoch[key] = row.epoch
            if row.owner is not None:
                first = self.owner_of_epoch.setdefault((group, row.partition, row.epoch), row.owner)
                assert first == row.owner, f"{row.partition} had two owners in epoch {row.epoch}"
            if key in self.committed:
                assert row.committed == self.committed[key], "a commit was lost or invented"
        owned = {row.partition.topic for row in rows if row.owner is not None}
        if self.alike:  # nobody named partitions
            both = [name for name in owned if self.last(name) in owned - {name}]
            assert not both, f"{both} and its successor are owned at once"

    def check_decision(self, group: str, decision: Decision) -> None:
        """Sizes within one, and the fewest moves that this takes, for each kind of topic.

        Not while partitions of a successor wait for their predecessor: a member that named partitions of the
        predecessor and was evicted may leave some of the successor's partitions owned and the others waiting.
        """
        members = [m for m in self.registry.read(lambda tx: tx.members(group)) if m.topics]
        everybody = len({m.topics for m in members}) == 1 and all(m.manual is None for m in members)
        if not everybody:
            return
        shared = [self.topics[name] for name in {self.last(name) for name in members[0].topics}]
        for kind in TopicKind:
            given = [p in decision.after for topic in shared if topic.kind == kind for p in topic]
            if any(given) and not all(given):
                continue
            after = {p: m for p, m in decision.after.items() if self.topics[p.topic].kind == kind}
            owning = set(decision.after.values())
            if self.max_active is not None:
                assert len(owning) <= self.max_active
                members = [m for m in members if m.name in owning]
            sizes = Counter({m.name: 0 for m in members}) + Counter()
            sizes.update(after.values())
            held = [sizes[m.name] for m in members]
            assert not held or max(held) - min(held) <= 1, f"uneven: {sizes}"
            before = {p: m for p, m in decision.before.items() if p in after}
            if self.max_active is None and members:
                had = sorted((Counter(before.values())[m.name] for m in members), reverse=True)
                down, up = divmod(len(after), len(members))
                most_kept = sum(min(h, down + (rank < up)) for rank, h in enumerate(had))
                kept = sum(after[p] == m for p, m in before.items())
                assert kept == most_kept, f"{most_kept - kept} needless moves"

    # Healing

    def heal(self) -> None:
        """Without further faults the group settles: everything owned, evenly, by the members that are there. Members
        that hang while they prepare do not prevent it."""
        self.step = STEPS + 100
        preparing = self.chance(0.5)
        for _ in range(HEALING_ROUNDS):
            self.clock.time += 0.5
            for member in self.members:
                member.late = []
                self.beat(member)
                self.heartbeat_together(faults=False)
                self.release(member)
                if preparing:
                    self.prepare(member)
            self.lead(faults=False)
            self.check()
            if self.settled():
                break
        assert self.settled(), f"not settled after {HEALING_ROUNDS} rounds: {self.picture()}"
        self.check_presence()

    def settled(self) -> bool:
        return all(self.is_settled(group) for group in self.groups())

    def is_settled(self, group: str) -> bool:
        rows, present, row = self.registry.read(lambda tx: (tx.ownerships(group), tx.members(group), tx.group(group)))
        assert row is not None
        expected = {m.name for m in self.members if not self.broadcast or member_group(GROUP, m.name) == group}
        if {m.name for m in present} != expected or row.inputs != row.assigned:
            return False
        wanted = {p for m in present for t in m.topics for name in (t, self.last(t)) for p in self.topics[name]}
        shared = {self.last(t) for m in present if m.manual is None for t in m.topics}
        named = {p for m in present for p in m.manual or ()}
        reachable = {p for p in wanted if p in named or p.topic in shared}
        owned = {r.partition: r.owner for r in rows if r.owner is not None}
        return all(r.owner == r.target for r in rows) and set(owned) == reachable

    def check_presence(self) -> None:
        """Everyone who is there is found with the address it gave, also those that own nothing."""
        present = self.registry.read(lambda tx: [m for group in groups_of(tx, GROUP) for m in tx.members(group)])
        assert {m.name: m.address for m in present} == {m.name: f"host of {m.name}" for m in self.members}
        if self.broadcast:
            assert len({m.group for m in present}) == len(present), "members of a broadcast group share positions"

    def picture(self) -> str:
        rows, members = self.registry.read(
            lambda tx: (
                [row for group in groups_of(tx, GROUP) for row in tx.ownerships(group)],
                [m for group in groups_of(tx, GROUP) for m in tx.members(group)],
            )
        )
        lines = [f"{r.group} {r.partition}: {r.owner} -> {r.target} (epoch {r.epoch})" for r in rows]
        return "\n".join([*lines, *map(str, members)])


def run_history(seed: int, say: Callable[[str], None] = lambda _: None) -> History:
    """Run one history; an assertion that fails names the seed."""
    history = History(seed, say)
    try:
        history.run()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, step {history.step}: {error}") from error
    return history


def _outcome(seed: int) -> str | None:
    try:
        run_history(seed)
    except AssertionError as error:
        return str(error)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Replay seeds, or run many histories in several processes.")
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--histories", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, help="one per core by default")
    options = parser.parse_args()
    for seed in options.seeds:
        history = run_history(seed, say=print)
        print(f"seed {seed}: {history.decisions} decisions, {history.refused} commits refused")
    failures = []
    with multiprocessing.Pool(options.processes) as pool:
        seeds = range(options.first, options.first + options.histories)
        for done, failure in enumerate(pool.imap_unordered(_outcome, seeds, chunksize=200), 1):
            if failure is not None:
                print(failure)
                failures.append(failure)
            if done % 10_000 == 0:
                print(f"{done:,} histories, {len(failures)} failed", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
