"""Broker, consumer and producer processes that are killed, stalled or hang while they work."""

import asyncio
import contextlib
import itertools
import os
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from shardyard.client import Brokers, Consumer, Producer
from shardyard.client.brokers import CarrierName
from shardyard.model import Fenced, Record, UnknownGroup
from tests.queues.brokers import BrokerProcess
from tests.queues.worker import ConsumerSpec, Event, events

SESSION_SECONDS = 2.0
RELEASE_SECONDS = 2.0
"""After which a consumer that hangs is evicted."""
ROOT = Path(__file__).parent.parent.parent
BROKERS = 2

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90)]

Rows = list[dict[str, Any]]
Scenario = Callable[[Brokers, Producer], Coroutine[Any, Any, None]]


class ConsumerProcess:
    """A consumer process; see `worker`."""

    def __init__(self, cluster: "Cluster", spec: ConsumerSpec, pid: int) -> None:
        self._cluster, self.pid = cluster, pid
        self.name = spec.name
        self.journal = Path(spec.journal)

    @property
    def ended(self) -> int | None:
        """Its exit status; a negative number is the signal that ended it; None while it runs."""
        self._cluster.listen()
        return self._cluster.dead.get(self.pid)

    def signal(self, number: signal.Signals) -> None:
        if self.ended is None:
            os.kill(self.pid, number)

    def events(self, *kinds: str) -> list[Event]:
        return events([self.journal], *kinds)

    def errors(self) -> str:
        path = Path(f"{self.journal}.err")
        return path.read_text() if path.exists() else ""


class Cluster:
    """Brokers on one log and registry, and the worker that starts consumers."""

    def __init__(self, folder: Path, carrier: CarrierName) -> None:
        """`carrier`: of all clients."""
        self.folder = folder
        self.carrier = carrier
        self.brokers = [BrokerProcess(folder, f"broker-{i}") for i in range(BROKERS)]
        for broker in self.brokers:
            broker.start()
        self._worker = subprocess.Popen(
            [sys.executable, "-m", "tests.queues.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
        )
        self._buffer = b""
        self._alive: dict[str, int] = {}
        self.dead: dict[int, int] = {}
        for broker in self.brokers:
            broker.listens()

    def close(self) -> None:
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._worker.stdin.close()  # it kills its children
        self._worker.wait()
        self._worker.stdout.close()
        for broker in self.brokers:
            broker.kill()

    @property
    def urls(self) -> list[str]:
        return [broker.url for broker in self.brokers]

    def consumer(self, name: str, group: str, topic: str, **options: Any) -> ConsumerProcess:
        assert self._worker.stdin is not None
        journal = str(self.folder / f"{name}.txt")
        arguments = {"brokers": self.urls, "session": SESSION_SECONDS, "carrier": self.carrier, **options}
        spec = ConsumerSpec(name, group=group, topic=topic, journal=journal, **arguments)
        self._worker.stdin.write(spec.to_json().encode() + b"\n")
        self._worker.stdin.flush()
        while name not in self._alive:
            self.listen(seconds=30)
        return ConsumerProcess(self, spec, self._alive[name])

    def listen(self, seconds: float = 0.0) -> None:
        """Read which consumers have started and which have ended."""
        assert self._worker.stdout is not None
        while select.select([self._worker.stdout], [], [], seconds)[0]:
            output = os.read(self._worker.stdout.fileno(), 65536)
            assert output, "the worker ended"
            *lines, self._buffer = (self._buffer + output).split(b"\n")
            for kind, *words in (line.decode().split() for line in lines):
                if kind == "P":
                    self._alive[words[0]] = int(words[1])
                else:
                    self.dead[int(words[0])] = int(words[1])
            seconds = 0.0


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all tests that use the same carrier; see `both_carriers`."""
    made = Cluster(tmp_path_factory.mktemp("cluster"), getattr(request, "param", "auto"))
    yield made
    made.close()
    errors = [path.read_text() for path in made.folder.glob("broker-*.err")]
    assert len(errors) == BROKERS
    assert [text for text in errors if "Traceback" in text] == []


@pytest.fixture
def consumers(cluster: Cluster) -> Iterator[Callable[..., ConsumerProcess]]:
    """Starts consumers, which are killed after the test."""
    started: list[ConsumerProcess] = []

    def start(name: str, group: str, topic: str, **options: Any) -> ConsumerProcess:
        started.append(cluster.consumer(name, group, topic, **options))
        return started[-1]

    yield start
    for consumer in started:
        consumer.signal(signal.SIGKILL)
    for consumer in started:
        while consumer.ended is None:
            cluster.listen(seconds=1)


# Inspecting groups


async def group_of(brokers: Brokers, group: str) -> dict[str, Any]:
    try:
        shown: dict[str, Any] = (await brokers.get(f"/v1/groups/{group}")).json()
    except UnknownGroup:
        return {"partitions": [], "members": []}
    return shown


async def rows(brokers: Brokers, group: str, topic: str) -> Rows:
    """A group's partitions of a topic. Those of its retry topic are not among them: they are balanced separately."""
    return [row for row in (await group_of(brokers, group))["partitions"] if row["topic"] == topic]


def shares(found: Rows) -> dict[str, set[int]]:
    """The partitions of each owner; empty while a partition has no owner, or is about to move."""
    owned: defaultdict[str, set[int]] = defaultdict(set)
    for row in found:
        if row["owner"] is None or row["next_owner"] is not None:
            return {}
        owned[row["owner"]].add(row["partition"])
    return dict(owned)


async def until(condition: Callable[[], Coroutine[Any, Any, object]], seconds: float = 30.0) -> float:
    """Wait until the condition holds. Returns how long that took."""
    began = time.monotonic()
    while not await condition():
        assert time.monotonic() < began + seconds, f"not after {seconds:g} s: {condition.__doc__ or condition}"
        await asyncio.sleep(0.03)
    return time.monotonic() - began


async def shared_by(
    brokers: Brokers, group: str, topic: str, sizes: dict[str, int], seconds: float = 30.0
) -> dict[str, set[int]]:
    """Wait until these members own that many partitions each. Returns the partitions of each."""
    found: dict[str, set[int]] = {}

    async def holds() -> bool:
        found.clear()
        found.update(shares(await rows(brokers, group, topic)))
        return {name: len(owned) for name, owned in found.items()} == sizes

    try:
        await until(holds, seconds)
    except AssertionError:
        raise AssertionError(f"expected {sizes}: {await group_of(brokers, group)}") from None
    return found


async def done(brokers: Brokers, group: str, topic: str, *working: ConsumerProcess, seconds: float = 30.0) -> None:
    """Wait until the group has committed all records. These consumers must not end."""

    async def holds() -> bool:
        assert {c.name: c.errors() for c in working if c.ended is not None} == {}
        found = await rows(brokers, group, topic)
        return bool(found) and all(row["lag"] == 0 for row in found)

    try:
        await until(holds, seconds)
    except AssertionError as error:
        raise AssertionError(f"{error}: {await group_of(brokers, group)}") from None


async def ready(url: str) -> dict[str, Any]:
    async with Brokers(url) as one:
        body: dict[str, Any] = (await one.get("/readyz")).json()
        return body


# Load


class Load:
    """Sends records with some keys, or with none. `acknowledged`: the ids of those that are durable."""

    def __init__(self, producer: Producer, topic: str, keys: int) -> None:
        self._producer, self._topic, self._keys = producer, topic, keys
        self._numbers = itertools.count()
        self.acknowledged: list[str] = []

    async def send(self, count: int) -> None:
        """Send some more, those of a key in order."""
        numbers = list(itertools.islice(self._numbers, count))
        keys = [f"k{n % self._keys}" if self._keys else None for n in numbers]
        sent = [
            self._producer.send(self._topic, b"...", key=key, id=f"{self._topic}:{n}")
            for n, key in zip(numbers, keys, strict=True)
        ]
        self.acknowledged += await asyncio.gather(*sent)

    @contextlib.asynccontextmanager
    async def sending(self, every: float = 0.01) -> AsyncIterator[None]:
        async def send_on() -> None:
            while True:
                await self.send(10)
                await asyncio.sleep(every)

        task = asyncio.create_task(send_on())
        try:
            yield
            assert not task.done(), task
            await self.send(10)  # in the order of the calls: all earlier records are acknowledged, too
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def run(cluster: Cluster, scenario: Scenario) -> None:
    async def with_clients() -> None:
        async with (
            Brokers(cluster.urls, carrier=cluster.carrier) as brokers,
            Producer(cluster.urls, carrier=cluster.carrier) as producer,
        ):
            await scenario(brokers, producer)

    asyncio.run(with_clients())


async def make_topic(brokers: Brokers, name: str, partitions: int) -> None:
    await brokers.post("/v1/topics", {"name": name, "partitions": partitions})


def handled_by(*consumers: ConsumerProcess) -> list[Event]:
    return events([consumer.journal for consumer in consumers], "handled")


def check_all_handled(handled: Iterable[Event], acknowledged: Iterable[str]) -> None:
    """Each acknowledged record was stored once, and was handled."""
    places: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
    for event in handled:
        places[event.id].add((event.partition, event.offset))
    assert set(acknowledged) - places.keys() == set(), "lost"
    assert {id_: where for id_, where in places.items() if len(where) > 1} == {}, "stored twice"


def check_ownerships(handled: Iterable[Event]) -> int:
    """In one epoch each record is delivered once, in order, to one owner, and a later epoch skips no record. Returns
    how many were delivered twice."""
    by_partition: defaultdict[str, defaultdict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in handled:
        by_partition[event.partition][event.epoch].append(event)
    twice = 0
    for partition, by_epoch in by_partition.items():
        stored = sorted({event.offset for found in by_epoch.values() for event in found})
        number = {offset: i for i, offset in enumerate(stored)}
        reached = 0
        for epoch, found in sorted(by_epoch.items()):
            numbers = [number[event.offset] for event in found]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), f"{partition}, epoch {epoch}"
            assert len({event.member for event in found}) == 1, f"{partition}, epoch {epoch}: two owners"
            assert numbers[0] <= reached, f"{partition}, epoch {epoch}: skips {reached} to {numbers[0]}"
            twice += max(0, min(reached, numbers[-1] + 1) - numbers[0])
            reached = max(reached, numbers[-1] + 1)
    return twice


def check_order(handled: Iterable[Event]) -> None:
    """Each owner handled the records of a key in order, in each of its ownerships."""
    offsets: defaultdict[tuple[str, str, int, str], list[int]] = defaultdict(list)
    for event in handled:
        offsets[event.member, event.partition, event.epoch, event.key].append(event.offset)
    assert {owner: found for owner, found in offsets.items() if found != sorted(set(found))} == {}


Start = Callable[..., ConsumerProcess]
both_carriers = pytest.mark.parametrize("cluster", ["websocket", "http"], indirect=True)


def test_two_consumers_then_three_then_two_share_six_partitions(cluster: Cluster, consumers: Start) -> None:
    async def scenario(brokers: Brokers, producer: Producer) -> None:
        await make_topic(brokers, "pictures", 6)
        names = ["picture-0", "picture-1", "picture-2"]
        working = [consumers(name, "pictures", "pictures", session=10.0) for name in names[:2]]
        two = await shared_by(brokers, "pictures", "pictures", dict.fromkeys(names[:2], 3))
        working.append(consumers(names[2], "pictures", "pictures", session=10.0))
        three = await shared_by(brokers, "pictures", "pictures", dict.fromkeys(names, 2))
        for name in names[:2]:
            assert three[name] < two[name], "partitions that stay do not move"
        load = Load(producer, "pictures", keys=30)
        await load.send(300)
        await done(brokers, "pictures", "pictures", *working)
        working[2].signal(signal.SIGTERM)
        again = await shared_by(brokers, "pictures", "pictures", dict.fromkeys(names[:2], 3))
        for name in names[:2]:
            assert three[name] < again[name]
        assert working[2].events("left")
        assert working[2].ended == 0
        await load.send(100)
        await done(brokers, "pictures", "pictures", *working[:2])
        handled = handled_by(*working)
        check_all_handled(handled, load.acknowledged)
        check_order(handled)
        assert max(Counter(event.id for event in handled).values()) == 1, "a leaving consumer commits what it handled"

    run(cluster, scenario)


@both_carriers
def test_others_take_over_from_a_consumer_killed_in_the_middle_of_a_batch_and_nothing_is_lost(
    cluster: Cluster, consumers: Start
) -> None:
    async def scenario(brokers: Brokers, producer: Producer) -> None:
        await make_topic(brokers, "killed", 6)
        groups = {"killed-batches": True, "killed-records": False}
        working = {
            group: [consumers(f"{group}-{i}", group, "killed", by_batch=by_batch, pause=0.01) for i in range(3)]
            for group, by_batch in groups.items()
        }
        for group, members in working.items():
            await shared_by(brokers, group, "killed", {member.name: 2 for member in members})
        load = Load(producer, "killed", keys=30)
        await load.send(600)
        victims = [members[0] for members in working.values()]

        async def both_in_a_batch() -> bool:
            """both victims have handled some records"""
            return all(len(victim.events("handled")) > 10 for victim in victims)

        await until(both_in_a_batch)
        for victim in victims:
            victim.signal(signal.SIGKILL)
        killed_at = time.monotonic_ns()
        for group, (victim, *others) in working.items():
            assert len({event.id for event in victim.events("handled")}) < 200, "it was killed outside of a batch"
            await shared_by(brokers, group, "killed", {other.name: 3 for other in others}, seconds=SESSION_SECONDS + 5)
            await done(brokers, group, "killed", *others)
            handled = handled_by(victim, *others)
            check_all_handled(handled, load.acknowledged)
            check_order(handled)
            by_id: defaultdict[str, list[Event]] = defaultdict(list)
            for event in handled:
                by_id[event.id].append(event)
            for first, *again in by_id.values():
                assert len(again) <= 1
                assert not again or (first.member == victim.name != again[0].member and again[0].at > killed_at)
        assert check_ownerships(handled_by(*working["killed-batches"])) > 0, "it was killed outside of a batch"

    run(cluster, scenario)


@both_carriers
def test_a_broker_killed_under_load_loses_no_record_and_ends_no_client(cluster: Cluster, consumers: Start) -> None:
    async def scenario(brokers: Brokers, producer: Producer) -> None:
        await make_topic(brokers, "load", 6)
        batches = [consumers(f"load-{i}", "load", "load", by_batch=True) for i in range(2)]
        records = [consumers(f"loaded-{i}", "loaded", "load") for i in range(2)]
        for group, members in (("load", batches), ("loaded", records)):
            await shared_by(brokers, group, "load", {member.name: 3 for member in members})
        load = Load(producer, "load", keys=30)
        async with load.sending():
            for broker in cluster.brokers:  # after the first kill all clients use the second broker
                before = len(load.acknowledged)
                broker.kill()

                async def clients_work(enough: int = before + 300) -> bool:
                    """records are published and consumed"""
                    seen = [len(handled_by(*members)) for members in (batches, records)]
                    return min(len(load.acknowledged), *seen) > enough

                try:
                    await until(clients_work, 20)
                finally:
                    broker.start()
                    broker.listens()
        for group, members in (("load", batches), ("loaded", records)):
            await done(brokers, group, "load", *members)
            check_all_handled(handled_by(*members), load.acknowledged)
            await shared_by(brokers, group, "load", {member.name: 3 for member in members})
        check_ownerships(handled_by(*batches))
        check_order(handled_by(*batches, *records))

    run(cluster, scenario)


def stall(broker: BrokerProcess, registry: Path) -> None:
    """Stop a broker that is not in the middle of a commit to the registry: there it would hold the lock of the file,
    and all other brokers would wait for it."""
    while True:
        os.kill(broker.process.pid, signal.SIGSTOP)
        with contextlib.closing(sqlite3.connect(registry, timeout=1.0, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                os.kill(broker.process.pid, signal.SIGCONT)
            else:
                return


@both_carriers
def test_a_broker_that_hangs_ends_no_session(cluster: Cluster) -> None:
    async def scenario(brokers: Brokers, _: Producer) -> None:
        await make_topic(brokers, "stopped", 4)
        session = 2 * SESSION_SECONDS
        async with Consumer(
            cluster.urls, "stopped", ["stopped"], name="stays", session_timeout=session, carrier=cluster.carrier
        ) as consumer:
            await shared_by(brokers, "stopped", "stopped", {"stays": 4})
            identity = consumer.member.identity
            epochs = {row["partition"]: row["epoch"] for row in await rows(brokers, "stopped", "stopped")}
            for stopped, other in (cluster.brokers, cluster.brokers[::-1]):  # it is connected to one of them
                stall(stopped, cluster.folder / "registry.db")
                stopped_at = time.monotonic()

                async def session_is_over(since: float = stopped_at) -> bool:
                    return time.monotonic() > since + 1.5 * session

                try:
                    await until(session_is_over)
                    async with Brokers(other.url) as reachable:
                        found = await rows(reachable, "stopped", "stopped")
                finally:
                    os.kill(stopped.process.pid, signal.SIGCONT)
                assert {row["owner"] for row in found} == {"stays"}
                assert {row["partition"]: row["epoch"] for row in found} == epochs
            assert consumer.member.identity == identity

    run(cluster, scenario)


@both_carriers
def test_when_the_leader_is_killed_during_a_rebalance_another_one_finishes_it(
    cluster: Cluster, consumers: Start
) -> None:
    async def scenario(brokers: Brokers, producer: Producer) -> None:
        await make_topic(brokers, "led", 8)
        go = cluster.folder / "led.go"
        first = consumers("led-0", "led", "led", by_batch=True, pause=0.05, max_records=20)  # it is busy for 20 s
        later = [consumers(f"led-{i}", "led", "led", go=str(go), by_batch=True) for i in range(1, 4)]
        load = Load(producer, "led", keys=40)
        await load.send(400)
        await shared_by(brokers, "led", "led", {"led-0": 8})
        leads = [(await ready(broker.url))["leads"] for broker in cluster.brokers]
        assert sorted(leads) == [False, True]
        leader, other = cluster.brokers if leads[0] else cluster.brokers[::-1]
        go.touch()

        async def has_begun() -> bool:
            """a partition is about to move, or has moved"""
            found = await rows(brokers, "led", "led")
            return any(row["next_owner"] is not None or row["owner"] not in (None, "led-0") for row in found)

        await until(has_begun)
        leader.kill()
        late = consumers("led-4", "led", "led", by_batch=True)
        working = [first, *later, late]
        try:
            sizes = Counter[int]()

            async def has_ended() -> bool:
                """all members have their share"""
                owned = shares(await rows(brokers, "led", "led"))
                sizes.clear()
                sizes.update(len(share) for share in owned.values())
                return len(owned) == len(working)

            await until(has_ended, 20)
            assert sizes == {2: 3, 1: 2}
            assert (await ready(other.url))["leads"]
        finally:
            leader.start()
            leader.listens()
        await load.send(100)
        await done(brokers, "led", "led", *working)
        check_all_handled(handled_by(*working), load.acknowledged)
        check_ownerships(handled_by(*working))

    run(cluster, scenario)


@both_carriers
def test_a_consumer_stalled_past_its_session_is_fenced_and_joins_again(cluster: Cluster, consumers: Start) -> None:
    async def scenario(brokers: Brokers, producer: Producer) -> None:
        await make_topic(brokers, "zombies", 4)
        zombie = consumers("zombie", "zombies", "zombies", by_batch=True, pause=0.02, max_records=50)
        other = consumers("living", "zombies", "zombies", by_batch=True, pause=0.002, max_records=50)
        both = {"zombie": 2, "living": 2}
        await shared_by(brokers, "zombies", "zombies", both)
        load = Load(producer, "zombies", keys=20)
        await load.send(400)
        committed: defaultdict[int, list[int]] = defaultdict(list)

        async def inspect() -> Rows:
            found = await rows(brokers, "zombies", "zombies")
            for row in found:
                committed[row["partition"]].append(row["committed"] or 0)
            return found

        async def in_a_batch() -> bool:
            """the consumer that will be stalled has a batch in flight"""
            return len(zombie.events("handled")) % 50 in range(5, 40) and bool(await inspect())

        await until(in_a_batch)
        zombie.signal(signal.SIGSTOP)
        last = zombie.events("handled")[-1]

        async def taken_over() -> bool:
            """the other consumer has committed all records"""
            found = await inspect()
            return shares(found).keys() == {"living"} and all(row["lag"] == 0 for row in found)

        await until(taken_over)
        (epoch,) = [int(event.words[0]) for event in zombie.events("joined")]
        late = {"epoch": epoch, "positions": {last.partition: (last.epoch, 1, last.offset + 1)}}
        with pytest.raises(Fenced):
            await brokers.post("/v1/groups/zombies/members/zombie/commit", late)
        resumed_at = time.monotonic_ns()
        zombie.signal(signal.SIGCONT)

        async def fenced() -> bool:
            """its commit was refused"""
            return bool(zombie.events("fenced")) and bool(await inspect())

        await until(fenced)
        (refused,) = zombie.events("fenced")
        assert (refused.at > resumed_at, refused.partition, refused.epoch) == (True, last.partition, last.epoch)
        await shared_by(brokers, "zombies", "zombies", both)
        await load.send(100)
        await done(brokers, "zombies", "zombies", zombie, other)
        await inspect()
        for history in committed.values():
            assert history == sorted(history)
        check_all_handled(handled_by(zombie, other), load.acknowledged)
        again = [event for event in zombie.events("committed") if event.at > refused.at]
        assert again, "it is a member again"
        assert min(event.epoch for event in again) > last.epoch
        assert check_ownerships(handled_by(zombie, other)) > 0

    run(cluster, scenario)


def test_twenty_consumers_joining_at_once_have_one_or_two_partitions_each(cluster: Cluster, consumers: Start) -> None:
    async def scenario(brokers: Brokers, producer: Producer) -> None:
        await make_topic(brokers, "many", 24)
        load = Load(producer, "many", keys=100)
        await load.send(500)
        go = cluster.folder / "many.go"
        working = [consumers(f"many-{i}", "many", "many", go=str(go)) for i in range(20)]
        go.touch()
        sizes = Counter[int]()

        async def fair() -> bool:
            """all members have their share"""
            owned = shares(await rows(brokers, "many", "many"))
            sizes.clear()
            sizes.update(len(share) for share in owned.values())
            return len(owned) == len(working)

        await until(fair, 15)
        assert sizes == {1: 16, 2: 4}
        await load.send(200)
        await done(brokers, "many", "many", *working)
        check_all_handled(handled_by(*working), load.acknowledged)

    run(cluster, scenario)


def test_a_topic_is_expanded_under_load(cluster: Cluster, consumers: Start) -> None:
    async def scenario(brokers: Brokers, producer: Producer) -> None:
        await make_topic(brokers, "growing", 4)
        working = [consumers(f"growing-{i}", "growing", "growing") for i in range(2)]
        await shared_by(brokers, "growing", "growing", {member.name: 2 for member in working})
        load = Load(producer, "growing", keys=0)
        async with load.sending():
            before = len(load.acknowledged)
            await brokers.post("/v1/topics/growing/expand", {"partitions": 8})
            await shared_by(brokers, "growing", "growing", {member.name: 4 for member in working})

            async def reached() -> bool:
                """records of all partitions were handled"""
                found = {event.partition for event in handled_by(*working)}
                return found == {f"growing/{i}" for i in range(8)} and len(load.acknowledged) > before + 300

            await until(reached)
        await done(brokers, "growing", "growing", *working)
        check_all_handled(handled_by(*working), load.acknowledged)

    run(cluster, scenario)


@both_carriers
def test_the_records_of_a_consumer_that_hangs_go_to_another_one(cluster: Cluster, consumers: Start) -> None:
    async def scenario(brokers: Brokers, producer: Producer) -> None:
        await make_topic(brokers, "hung", 4)
        settings = {"release_after": RELEASE_SECONDS, "concurrency": 1}
        await brokers.call("PATCH", "/v1/groups/hung", msgspec.json.encode(settings))
        hangs = consumers("hung-0", "hung", "hung", hang_on="bad")
        helps = consumers("hung-1", "hung", "hung")
        both = {"hung-0": 2, "hung-1": 2}
        place = max((await shared_by(brokers, "hung", "hung", both))["hung-0"])
        load = Load(producer, "hung", keys=40)
        await load.send(100)
        await producer.publish("hung", [Record("bad", b"k0", b"...")], partition=place)
        await load.send(100)
        await done(brokers, "hung", "hung", hangs, helps)
        began, *again = hangs.events("hangs")
        assert again == [], "it was given the record again"
        (other,) = [event for event in helps.events("handled") if event.id == "bad"]
        assert RELEASE_SECONDS / 2 < (other.at - began.at) / 1e9 < RELEASE_SECONDS + 3
        await shared_by(brokers, "hung", "hung", both)  # it has joined again, without the record
        await load.send(100)
        await done(brokers, "hung", "hung", hangs, helps)
        check_all_handled(handled_by(hangs, helps), [*load.acknowledged, "bad"])
        assert hangs.events("handled")[-1].at > other.at

    run(cluster, scenario)


@contextlib.asynccontextmanager
async def losing_responses(url: str) -> AsyncIterator[tuple[str, set[str]]]:
    """The address of a proxy that forwards requests to a broker, and closes the connection instead of sending the first
    response of each kind: the call was done, and the client does not know. Also yields the kinds."""
    lost = set[str]()

    async def forward(request: web.Request) -> web.StreamResponse:
        async with session.request(
            request.method, f"{url}{request.rel_url}", data=await request.read(), headers=request.headers
        ) as response:
            kind = f"{request.method} {request.path}"
            if request.method != "GET" and response.ok and kind not in lost:
                lost.add(kind)
                assert request.transport is not None
                request.transport.close()
            return web.Response(body=await response.read(), status=response.status, content_type=response.content_type)

    app = web.Application(client_max_size=2**25)
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    async with aiohttp.ClientSession() as session:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            yield f"http://{host}:{port}", lost
        finally:
            await runner.cleanup()


def test_lost_responses_do_no_harm(cluster: Cluster, consumers: Start) -> None:
    """Over HTTP; for connections see `tests/client/test_carriers.py`."""

    async def scenario(brokers: Brokers, _: Producer) -> None:
        await make_topic(brokers, "answers", 4)
        async with losing_responses(cluster.brokers[0].url) as (url, lost), Producer(url, carrier="http") as producer:
            first = consumers("answers-0", "answers", "answers", brokers=[url], carrier="http")

            async def joined() -> bool:
                """it has joined"""
                return bool(first.events("joined"))

            await until(joined)
            await shared_by(brokers, "answers", "answers", {"answers-0": 4})
            load = Load(producer, "answers", keys=20)
            await load.send(200)
            second = consumers("answers-1", "answers", "answers", brokers=[url], carrier="http", by_batch=True)
            await shared_by(brokers, "answers", "answers", {"answers-0": 2, "answers-1": 2})
            await load.send(200)
            await done(brokers, "answers", "answers", first, second)
            check_all_handled(handled_by(first, second), load.acknowledged)

            async def lost_a_heartbeat() -> bool:
                """the response to a heartbeat was lost"""
                return any(kind.endswith("/heartbeat") for kind in lost)

            await until(lost_a_heartbeat)
            second.signal(signal.SIGTERM)
            await shared_by(brokers, "answers", "answers", {"answers-0": 4})
            kinds = {(method, path.rpartition("/")[2]) for method, path in map(str.split, lost)}
            posted = {"members", "heartbeat", "fence", "commit", "release", "records"}
            assert kinds == {*(("POST", kind) for kind in posted), ("DELETE", "answers-1")}

    run(cluster, scenario)
