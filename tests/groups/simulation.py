"""A deterministic simulation of registry, groups and rebalancers under a virtual clock.

One seed is one history: random joins, leaves, crashes, pauses, restarts, slow heartbeats, clock jumps, lost and delayed
answers, resets of positions, leaders that stop in the middle. After each step the guarantees are checked; at the end
everything heals, and the group must settle. `python -m tests.groups.simulation SEED` replays one history with its steps
printed.
"""

import argparse
import multiprocessing
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shardyard.groups import position_reset, protocol
from shardyard.groups.protocol import Decision, Grant
from shardyard.groups.rebalancer import REBALANCER
from shardyard.model import Fenced, MemberExists, Partition, PartitionTaken, Position, Topic, TopicKind
from shardyard.registry import lease
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
    epoch: int | None = None
    holdings: dict[Partition, Grant] = field(default_factory=dict)
    asleep_until: int = 0
    late: list[tuple[int, dict[Partition, Grant]]] = field(default_factory=list)
    """Answers that arrive at a later step."""


@dataclass
class Candidate:
    """A rebalancer, as far as it remembers."""

    name: str
    token: int | None = None
    asleep_until: int = 0


class History:
    """One seed's worth of trouble."""

    def __init__(self, seed: int, say: Callable[[str], None] = lambda _: None) -> None:
        self.random = random.Random(seed)
        self.say = say
        self.clock = VirtualClock()
        self.registry = MemoryRegistry(self.clock)
        names = ["t"] + (["u.retry"] if self.chance(0.4) else [])
        self.topics = {
            name: Topic(name, self.random.randint(1, 9), TopicKind.RETRY if "retry" in name else TopicKind.NORMAL)
            for name in names
        }
        self.max_active = self.random.choice([None, None, None, 1, 2, 3])
        self.release_after = self.random.choice([None, None, 5.0])
        self.alike = self.chance(0.7)
        """All members want the same topics and take what they are given."""
        self.members: list[SimMember] = []
        self.candidates = [Candidate(f"node{i}") for i in range(self.random.randint(1, 3))]
        self.born = 0
        self.step = 0
        self.owner_of_epoch: dict[tuple[Partition, int], str] = {}
        self.last_epoch: Counter[Partition] = Counter()
        self.committed: dict[Partition, Position] = {}
        self.reset_epochs: dict[Partition, int] = {}
        """The epochs that the last resets put an end to."""
        self.decisions = 0
        self.moves = 0
        """Topics that went on as others."""
        self.refused = 0
        """Commits that came too late."""
        self.resets = 0
        """Of one or several partitions."""
        self.overtaken = 0
        """Commits of owners that came too late for a reset."""
        with self.registry.transaction() as tx:
            protocol.configure(
                tx,
                GROUP,
                protocol.GroupConfig(max_active=self.max_active, release_after=self.release_after),
                who="test",
            )

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def run(self) -> None:
        for self.step in range(STEPS):
            self.one_step()
            self.check()
        self.heal()

    # Trouble

    def one_step(self) -> None:
        self.clock.time += self.random.choice([0.0, 0.01, 0.1, 0.3, 1.0])
        if self.chance(0.02):
            jump = self.random.choice([-30.0, -2.0, 2.0, 30.0])
            self.say(f"the clock jumps by {jump}")
            self.clock.time += jump
        if self.chance(0.03):
            topic = self.random.choice([topic for topic in self.topics.values() if topic.successor is None])
            self.random.choices([self.grow, self.move], [3, 2])[0](topic)
        kinds: list[Callable[[], None]] = [self.arrive, self.depart, self.pause, self.restart, self.reset]
        if self.chance(0.6):
            self.random.choices(kinds, [3 if len(self.members) < 6 else 0, 1, 1.5, 1, 1])[0]()
        for member in self.awake():
            if member.late and member.late[0][0] <= self.step:
                member.holdings = member.late.pop(0)[1]  # news from long ago
            if self.chance(0.4):
                self.work(member)
            if self.chance(0.3):
                self.release(member)
            if self.chance(0.3):
                self.heartbeat(member)
        if self.chance(0.6):
            self.lead()

    def grow(self, topic: Topic) -> None:
        grown = replace(topic, partitions=topic.partitions + self.random.randint(1, 3))
        self.topics[topic.name] = grown
        self.say(f"{topic.name} grows to {grown.partitions}")

    def move(self, topic: Topic) -> None:
        successor = Topic(topic.name + "'", self.random.randint(1, 9), topic.kind)
        self.topics |= {topic.name: replace(topic, successor=successor.name), successor.name: successor}
        self.moves += 1
        self.say(f"{topic.name} goes on as {successor.name}, with {successor.partitions} partitions")

    def reset(self) -> None:
        """Somebody lets the group go on from elsewhere, earlier or later, also on partitions that nobody owns."""
        everything = [p for topic in self.topics.values() for p in topic]
        chosen = self.random.sample(everything, self.random.randint(1, min(4, len(everything))))
        known = {p: self.committed.get(p, Position(1, 0)).offset for p in chosen}
        positions = {p: Position(1, max(0, known[p] + self.random.randint(-20, 20))) for p in chosen}
        with self.registry.transaction() as tx:
            before = {row.partition: row for row in tx.ownerships(GROUP)}
            position_reset.reset(tx, GROUP, positions, "test")
            after = {row.partition: row for row in tx.ownerships(GROUP)}
        self.say(f"positions are reset: {', '.join(f'{p} to {to.offset}' for p, to in positions.items())}")
        for partition, row in before.items():
            same = (after[partition].owner, after[partition].target) == (row.owner, row.target)
            assert same, f"a reset moved {partition}"
            assert partition in positions or after[partition] == row, f"a reset of others changed {partition}"
        self.committed |= positions
        self.reset_epochs |= {p: before[p].epoch for p in chosen if p in before}
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
        manual = None
        if not self.alike and self.chance(0.2):
            everything = [p for t in self.topics.values() for p in t]
            manual = tuple(self.random.sample(everything, self.random.randint(1, min(2, len(everything)))))
        session = self.random.choice([1.0, 3.0, 10.0])
        member = SimMember(f"m{self.born}", self.chance(0.3), topics, manual, session)
        self.members.append(member)
        self.join(member)

    def join(self, member: SimMember) -> None:
        member.epoch, member.holdings, member.late = None, {}, []
        try:
            with self.registry.transaction() as tx:
                row = protocol.join(
                    tx,
                    GROUP,
                    member.name,
                    topics=member.topics,
                    static=member.static,
                    manual=member.manual,
                    session_timeout=member.session,
                )
        except PartitionTaken:
            member.manual = None
            return
        except MemberExists:  # an answer to an earlier join was lost, and a dynamic member takes another name
            self.born += 1
            member.name = f"m{self.born}"
            return
        if self.chance(0.1):
            self.say(f"{member.name} joins, and never hears of it")
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
                with self.registry.transaction() as tx:
                    protocol.leave(tx, GROUP, member.name, member.epoch)
            except Fenced:
                pass

    def restart(self) -> None:
        """A process ends and comes back under the same name; only a static member is welcome at once."""
        member = self.somebody()
        if member is not None and member.static:
            self.say(f"{member.name} restarts")
            self.join(member)

    def heartbeat(self, member: SimMember, *, faults: bool = True) -> None:
        if member.epoch is None:
            self.join(member)
            return
        idle = [p for p in member.holdings if self.chance(0.8)]
        try:
            with self.registry.transaction() as tx:
                told = protocol.heartbeat(tx, GROUP, member.name, member.epoch, idle)
        except Fenced:
            self.say(f"{member.name} hears that it is out")
            member.epoch, member.holdings, member.late = None, {}, []
            return
        if faults and self.chance(0.1):
            self.say(f"{member.name} heartbeats, and the answer is lost")
        elif faults and self.chance(0.15):
            member.late.append((self.step + self.random.randint(1, 15), told))
        else:
            member.holdings = told

    def work(self, member: SimMember) -> None:
        """Commit on a partition that the member believes to own, rightly or not."""
        if not member.holdings:
            return
        partition = self.random.choice(list(member.holdings))
        holding = member.holdings[partition]
        since = holding.committed.offset if holding.committed is not None else 0
        known = self.committed.get(partition, Position(1, 0)).offset
        self.commit(member, partition, holding, Position(1, max(since, known) + self.random.randint(0, 5)))

    def commit(self, member: SimMember, partition: Partition, holding: Grant, position: Position) -> None:
        epoch = member.epoch if member.epoch is not None else -1
        with self.registry.transaction() as tx:
            row = tx.ownership(GROUP, partition)
            known = tx.member(GROUP, member.name)
        alive = known is not None and known.epoch == epoch
        too_late = holding.epoch <= self.reset_epochs.get(partition, -1)
        entitled = alive and row is not None and row.owner == member.name and row.epoch == holding.epoch
        try:
            with self.registry.transaction() as tx:
                protocol.commit(tx, GROUP, member.name, epoch, {partition: (holding.epoch, position)})
        except Fenced:
            assert not entitled, f"{member.name} could not commit {partition}, which is its own"
            self.refused += 1
            self.overtaken += too_late and alive and row is not None and row.owner == member.name
            member.holdings.pop(partition, None)
            return
        assert entitled, f"{member.name} committed {partition}, which is not its own"
        assert not too_late, f"{member.name} committed {partition} under an epoch from before its reset"
        assert position >= self.committed.get(partition, position), "a committed position went back"
        self.committed[partition] = position
        member.holdings[partition] = Grant(holding.epoch, position, holding.revoked)

    def release(self, member: SimMember) -> None:
        revoked = {p: h.epoch for p, h in member.holdings.items() if h.revoked}
        if not revoked or member.epoch is None:
            return
        try:
            with self.registry.transaction() as tx:
                protocol.release(tx, GROUP, member.name, member.epoch, revoked)
        except Fenced:
            self.say(f"{member.name} releases what it no longer has")
        for partition in revoked:
            member.holdings.pop(partition, None)

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
            with self.registry.transaction() as tx:
                candidate.token = lease.acquire(tx, REBALANCER, candidate.name, 0.8)
        if candidate.token is None:
            return
        if faults and self.chance(0.1):
            self.say(f"{candidate.name} dies leading")
            self.die_leading(candidate)
            return
        try:
            with self.registry.transaction() as tx:
                lease.check(tx, REBALANCER, candidate.token)
                holder = tx.lease(REBALANCER)
                assert holder is not None
                assert holder.holder == candidate.name, "a stale leader passed the check"
                decision = protocol.rebalance(tx, GROUP, self.topics)
        except Fenced:
            candidate.token = None
            return
        if decision is not None:
            self.say(f"{candidate.name} decides {dict(sorted((str(p), m) for p, m in decision.after.items()))}")
            self.decisions += 1
            self.check_decision(decision)

    def die_leading(self, candidate: Candidate) -> None:
        assert candidate.token is not None
        try:
            with self.registry.transaction() as tx:
                lease.check(tx, REBALANCER, candidate.token)
                protocol.rebalance(tx, GROUP, self.topics)
                raise Stopped
        except (Stopped, Fenced):
            candidate.token = None
            candidate.name += "'"

    # What must hold

    def check(self) -> None:
        with self.registry.transaction() as tx:
            rows, members = tx.ownerships(GROUP), {m.name for m in tx.members(GROUP)}
        for row in rows:
            assert row.owner is None or row.owner in members, f"{row.partition} belongs to {row.owner}, who is gone"
            assert row.epoch >= self.last_epoch[row.partition], f"the epoch of {row.partition} went back"
            self.last_epoch[row.partition] = row.epoch
            if row.owner is not None:
                first = self.owner_of_epoch.setdefault((row.partition, row.epoch), row.owner)
                assert first == row.owner, f"{row.partition} had two owners in epoch {row.epoch}"
            if row.partition in self.committed:
                assert row.committed == self.committed[row.partition], "a commit was lost or invented"
        owned = {row.partition.topic for row in rows if row.owner is not None}
        if self.alike:  # nobody keeps partitions of his own
            both = [name for name in owned if self.last(name) in owned - {name}]
            assert not both, f"{both} and where it goes on are owned at once"

    def check_decision(self, decision: Decision) -> None:
        """Sizes within one, and the fewest moves that this takes, for each kind of topic."""
        with self.registry.transaction() as tx:
            members = tx.members(GROUP)
        everybody = len({m.topics for m in members}) == 1 and all(m.manual is None for m in members)
        if not everybody:
            return
        for kind in TopicKind:
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
        """Without further trouble the group settles: everything owned, evenly, by those who are there."""
        self.step = STEPS + 100
        for _ in range(HEALING_ROUNDS):
            self.clock.time += 0.5
            for member in self.members:
                member.late = []
                self.heartbeat(member, faults=False)
                self.release(member)
            self.lead(faults=False)
            self.check()
            if self.settled():
                break
        assert self.settled(), f"not settled after {HEALING_ROUNDS} rounds: {self.picture()}"

    def settled(self) -> bool:
        with self.registry.transaction() as tx:
            rows, present = tx.ownerships(GROUP), tx.members(GROUP)
            row = tx.group(GROUP)
        assert row is not None
        if {m.name for m in present} != {m.name for m in self.members} or row.inputs != row.assigned:
            return False
        wanted = {p for m in present for t in m.topics for name in (t, self.last(t)) for p in self.topics[name]}
        shared = {self.last(t) for m in present if m.manual is None for t in m.topics}
        named = {p for m in present for p in m.manual or ()}
        reachable = {p for p in wanted if p in named or p.topic in shared}
        owned = {r.partition: r.owner for r in rows if r.owner is not None}
        return all(r.owner == r.target for r in rows) and set(owned) == reachable

    def picture(self) -> str:
        with self.registry.transaction() as tx:
            lines = [f"{r.partition}: {r.owner} -> {r.target} (epoch {r.epoch})" for r in tx.ownerships(GROUP)]
            return "\n".join([*lines, *map(str, tx.members(GROUP)), str(tx.group(GROUP))])


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
    parser = argparse.ArgumentParser(description="Replay seeds, or run many histories on all cores.")
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--histories", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    for seed in options.seeds:
        history = run_history(seed, say=print)
        print(f"seed {seed}: {history.decisions} decisions, {history.refused} commits refused")
    failures = []
    with multiprocessing.Pool() as pool:
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
