"""Real brokers, consumers and producers: killed, stalled and hung in the middle of their work."""

import asyncio
import contextlib
import itertools
import os
import select
import signal
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
from shardyard.model import Fenced, Record, UnknownGroup
from tests.queues.brokers import BrokerProcess
from tests.queues.worker import Note, Order, notes

SESSION_SECONDS = 2.0
RELEASE_SECONDS = 2.0
"""After which a consumer that hangs is put out."""
ROOT = Path(__file__).parent.parent.parent
BROKERS = 2

pytestmark = pytest.mark.timeout(90)

Rows = list[dict[str, Any]]
Story = Callable[[Brokers, Producer], Coroutine[Any, Any, None]]


class ConsumerProcess:
    """A consumer in a process of its own; see `worker`."""

    def __init__(self, yard: "Yard", order: Order, pid: int) -> None:
        self._yard, self.order, self.pid = yard, order, pid
        self.name = order.name
        self.journal = Path(order.journal)

    @property
    def ended(self) -> int | None:
        """Its exit status, or less than 0: the signal that ended it."""
        self._yard.listen()
        return self._yard.dead.get(self.pid)

    def signal(self, number: signal.Signals) -> None:
        if self.ended is None:
            os.kill(self.pid, number)

    def notes(self, *whats: str) -> list[Note]:
        return notes([self.journal], *whats)

    def errors(self) -> str:
        path = Path(f"{self.journal}.err")
        return path.read_text() if path.exists() else ""


class Yard:
    """Brokers on one log and registry, and what makes consumers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.brokers = [BrokerProcess(folder, f"broker-{i}") for i in range(BROKERS)]
        for broker in self.brokers:
            broker.start()
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", "tests.queues.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
        )
        self._heard = b""
        self._alive: dict[str, int] = {}
        self.dead: dict[int, int] = {}
        for broker in self.brokers:
            broker.listens()

    def close(self) -> None:
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        self._nursery.stdin.close()  # it kills what it made
        self._nursery.wait()
        self._nursery.stdout.close()
        for broker in self.brokers:
            broker.kill()

    @property
    def urls(self) -> list[str]:
        return [broker.url for broker in self.brokers]

    def consumer(self, name: str, group: str, topic: str, **options: Any) -> ConsumerProcess:
        assert self._nursery.stdin is not None
        journal = str(self.folder / f"{name}.txt")
        told = {"brokers": self.urls, "session": SESSION_SECONDS, **options}
        order = Order(name, group=group, topic=topic, journal=journal, **told)
        self._nursery.stdin.write(order.to_json().encode() + b"\n")
        self._nursery.stdin.flush()
        while name not in self._alive:
            self.listen(seconds=30)
        return ConsumerProcess(self, order, self._alive[name])

    def listen(self, seconds: float = 0.0) -> None:
        """Hear which consumers live and which are dead."""
        assert self._nursery.stdout is not None
        while select.select([self._nursery.stdout], [], [], seconds)[0]:
            said = os.read(self._nursery.stdout.fileno(), 65536)
            assert said, "the nursery ended"
            *lines, self._heard = (self._heard + said).split(b"\n")
            for kind, *words in (line.decode().split() for line in lines):
                if kind == "P":
                    self._alive[words[0]] = int(words[1])
                else:
                    self.dead[int(words[0])] = int(words[1])
            seconds = 0.0


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    made = Yard(tmp_path_factory.mktemp("yard"))
    yield made
    made.close()
    said = [path.read_text() for path in made.folder.glob("broker-*.err")]
    assert len(said) == BROKERS
    assert [text for text in said if "Traceback" in text] == []


@pytest.fixture
def consumers(yard: Yard) -> Iterator[Callable[..., ConsumerProcess]]:
    """Starts consumers, which are gone after the test."""
    started: list[ConsumerProcess] = []

    def start(name: str, group: str, topic: str, **options: Any) -> ConsumerProcess:
        started.append(yard.consumer(name, group, topic, **options))
        return started[-1]

    yield start
    for consumer in started:
        consumer.signal(signal.SIGKILL)
    for consumer in started:
        while consumer.ended is None:
            yard.listen(seconds=1)


# Looking


async def group_of(brokers: Brokers, group: str) -> dict[str, Any]:
    try:
        shown: dict[str, Any] = (await brokers.get(f"/v1/groups/{group}")).json()
    except UnknownGroup:
        return {"partitions": [], "members": []}
    return shown


async def rows(brokers: Brokers, group: str, topic: str) -> Rows:
    """A group's partitions of a topic; those of retry topics are balanced apart."""
    return [row for row in (await group_of(brokers, group))["partitions"] if row["topic"] == topic]


def shares(found: Rows) -> dict[str, set[int]]:
    """Who owns what; nothing while anything has no owner, or is about to have another one."""
    owned: defaultdict[str, set[int]] = defaultdict(set)
    for row in found:
        if row["owner"] is None or row["next_owner"] is not None:
            return {}
        owned[row["owner"]].add(row["partition"])
    return dict(owned)


async def until(what: Callable[[], Coroutine[Any, Any, object]], seconds: float = 30.0) -> float:
    """Wait until it is so; returns how long that took."""
    began = time.monotonic()
    while not await what():
        assert time.monotonic() < began + seconds, f"not so after {seconds:g} s: {what.__doc__ or what}"
        await asyncio.sleep(0.03)
    return time.monotonic() - began


async def shared_by(
    brokers: Brokers, group: str, topic: str, sizes: dict[str, int], seconds: float = 30.0
) -> dict[str, set[int]]:
    """Wait until these members have that many partitions each; who has which."""
    found: dict[str, set[int]] = {}

    async def so() -> bool:
        found.clear()
        found.update(shares(await rows(brokers, group, topic)))
        return {name: len(owned) for name, owned in found.items()} == sizes

    try:
        await until(so, seconds)
    except AssertionError:
        raise AssertionError(f"expected {sizes}: {await group_of(brokers, group)}") from None
    return found


async def done(brokers: Brokers, group: str, topic: str, *working: ConsumerProcess, seconds: float = 30.0) -> None:
    """Wait until the group has committed all there is; its consumers live."""

    async def so() -> bool:
        assert {c.name: c.errors() for c in working if c.ended is not None} == {}
        found = await rows(brokers, group, topic)
        return bool(found) and all(row["lag"] == 0 for row in found)

    try:
        await until(so, seconds)
    except AssertionError as error:
        raise AssertionError(f"{error}: {await group_of(brokers, group)}") from None


async def ready(url: str) -> dict[str, Any]:
    async with Brokers(url) as one:
        told: dict[str, Any] = (await one.get("/readyz")).json()
        return told


# Load


class Load:
    """Sends records of some keys, or of none, until it is told to stop. `acknowledged`: their ids."""

    def __init__(self, producer: Producer, topic: str, keys: int) -> None:
        self._producer, self._topic, self._keys = producer, topic, keys
        self._numbers = itertools.count()
        self.acknowledged: list[str] = []

    async def send(self, count: int) -> None:
        """Some more, those of a key in order."""
        numbers = list(itertools.islice(self._numbers, count))
        keys = [f"k{n % self._keys}" if self._keys else None for n in numbers]
        sent = [
            self._producer.send(self._topic, b"...", key=key, id=f"{self._topic}:{n}")
            for n, key in zip(numbers, keys, strict=True)
        ]
        self.acknowledged += await asyncio.gather(*sent)

    @contextlib.asynccontextmanager
    async def going_on(self, every: float = 0.01) -> AsyncIterator[None]:
        async def go_on() -> None:
            while True:
                await self.send(10)
                await asyncio.sleep(every)

        task = asyncio.create_task(go_on())
        try:
            yield
            assert not task.done(), task
            await self.send(10)  # in the order of calls: what went before is acknowledged too
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def tell(yard: Yard, story: Story) -> None:
    async def told() -> None:
        async with Brokers(yard.urls) as brokers, Producer(yard.urls) as producer:
            await story(brokers, producer)

    asyncio.run(told())


async def make_topic(brokers: Brokers, name: str, partitions: int) -> None:
    await brokers.post("/v1/topics", {"name": name, "partitions": partitions})


def handled_by(*consumers: ConsumerProcess) -> list[Note]:
    return notes([consumer.journal for consumer in consumers], "handled")


def check_all_handled(handled: Iterable[Note], acknowledged: Iterable[str]) -> None:
    """Each acknowledged record was stored once, and handled."""
    places: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
    for note in handled:
        places[note.id].add((note.partition, note.offset))
    assert set(acknowledged) - places.keys() == set(), "lost"
    assert {id_: where for id_, where in places.items() if len(where) > 1} == {}, "stored twice"


def check_ownerships(handled: Iterable[Note]) -> int:
    """Under one epoch each record comes once, in order, to one owner; a later epoch leaves nothing out. Returns how
    many came twice."""
    by_partition: defaultdict[str, defaultdict[int, list[Note]]] = defaultdict(lambda: defaultdict(list))
    for note in handled:
        by_partition[note.partition][note.epoch].append(note)
    twice = 0
    for partition, by_epoch in by_partition.items():
        reached = 0
        for epoch, found in sorted(by_epoch.items()):
            offsets = [note.offset for note in found]
            assert offsets == list(range(offsets[0], offsets[0] + len(offsets))), f"{partition}, epoch {epoch}"
            assert len({note.member for note in found}) == 1, f"{partition}, epoch {epoch}: two owners"
            assert offsets[0] <= reached, f"{partition}, epoch {epoch}: skips {reached} to {offsets[0]}"
            twice += max(0, min(reached, offsets[-1] + 1) - offsets[0])
            reached = max(reached, offsets[-1] + 1)
    return twice


def check_order(handled: Iterable[Note]) -> None:
    """Each owner handled the records of a key in order, in each of its ownerships."""
    offsets: defaultdict[tuple[str, str, int, str], list[int]] = defaultdict(list)
    for note in handled:
        offsets[note.member, note.partition, note.epoch, note.key].append(note.offset)
    assert {who: found for who, found in offsets.items() if found != sorted(set(found))} == {}


Start = Callable[..., ConsumerProcess]


def test_two_consumers_then_three_then_two_share_six_partitions_as_in_the_pictures(
    yard: Yard, consumers: Start
) -> None:
    async def story(brokers: Brokers, producer: Producer) -> None:
        await make_topic(brokers, "pictures", 6)
        names = ["picture-0", "picture-1", "picture-2"]
        working = [consumers(name, "pictures", "pictures", session=10.0) for name in names[:2]]
        two = await shared_by(brokers, "pictures", "pictures", dict.fromkeys(names[:2], 3))
        working.append(consumers(names[2], "pictures", "pictures", session=10.0))
        three = await shared_by(brokers, "pictures", "pictures", dict.fromkeys(names, 2))
        for name in names[:2]:
            assert three[name] < two[name], "what stays with its owner does not move"
        load = Load(producer, "pictures", keys=30)
        await load.send(300)
        await done(brokers, "pictures", "pictures", *working)
        working[2].signal(signal.SIGTERM)
        again = await shared_by(brokers, "pictures", "pictures", dict.fromkeys(names[:2], 3))
        for name in names[:2]:
            assert three[name] < again[name]
        assert working[2].notes("left")
        assert working[2].ended == 0
        await load.send(100)
        await done(brokers, "pictures", "pictures", *working[:2])
        handled = handled_by(*working)
        check_all_handled(handled, load.acknowledged)
        check_order(handled)
        assert max(Counter(note.id for note in handled).values()) == 1, "a consumer that leaves hands over what is done"

    tell(yard, story)


def test_a_consumer_killed_in_the_middle_of_a_batch_is_taken_over_from_and_nothing_is_lost(
    yard: Yard, consumers: Start
) -> None:
    async def story(brokers: Brokers, producer: Producer) -> None:
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
            """both victims have handled something"""
            return all(len(victim.notes("handled")) > 10 for victim in victims)

        await until(both_in_a_batch)
        for victim in victims:
            victim.signal(signal.SIGKILL)
        killed_at = time.monotonic_ns()
        for group, (victim, *others) in working.items():
            assert len({note.id for note in victim.notes("handled")}) < 200, "it was not in the middle"
            await shared_by(brokers, group, "killed", {other.name: 3 for other in others}, seconds=SESSION_SECONDS + 5)
            await done(brokers, group, "killed", *others)
            handled = handled_by(victim, *others)
            check_all_handled(handled, load.acknowledged)
            check_order(handled)
            by_id: defaultdict[str, list[Note]] = defaultdict(list)
            for note in handled:
                by_id[note.id].append(note)
            for first, *again in by_id.values():
                assert len(again) <= 1
                assert not again or (first.member == victim.name != again[0].member and again[0].at > killed_at)
        assert check_ownerships(handled_by(*working["killed-batches"])) > 0, "it was not in the middle"

    tell(yard, story)


def test_a_broker_killed_under_load_loses_nothing_and_ends_nobody(yard: Yard, consumers: Start) -> None:
    async def story(brokers: Brokers, producer: Producer) -> None:
        await make_topic(brokers, "load", 6)
        batches = [consumers(f"load-{i}", "load", "load", by_batch=True) for i in range(2)]
        records = [consumers(f"loaded-{i}", "loaded", "load") for i in range(2)]
        for group, members in (("load", batches), ("loaded", records)):
            await shared_by(brokers, group, "load", {member.name: 3 for member in members})
        load = Load(producer, "load", keys=30)
        async with load.going_on():
            for broker in yard.brokers:  # after the first everybody talks to the second one
                before = len(load.acknowledged)
                broker.kill()

                async def goes_on(enough: int = before + 300) -> bool:
                    """records are published and consumed"""
                    seen = [len(handled_by(*members)) for members in (batches, records)]
                    return min(len(load.acknowledged), *seen) > enough

                try:
                    await until(goes_on, 20)
                finally:
                    broker.start()
                    broker.listens()
        for group, members in (("load", batches), ("loaded", records)):
            await done(brokers, group, "load", *members)
            check_all_handled(handled_by(*members), load.acknowledged)
            await shared_by(brokers, group, "load", {member.name: 3 for member in members})
        check_ownerships(handled_by(*batches))
        check_order(handled_by(*batches, *records))

    tell(yard, story)


def test_a_broker_that_hangs_costs_nobody_its_session(yard: Yard) -> None:
    async def story(brokers: Brokers, _: Producer) -> None:
        await make_topic(brokers, "stopped", 4)
        session = 2 * SESSION_SECONDS
        async with Consumer(yard.urls, "stopped", ["stopped"], name="stays", session_timeout=session) as consumer:
            await shared_by(brokers, "stopped", "stopped", {"stays": 4})
            seat = consumer.member.identity
            epochs = {row["partition"]: row["epoch"] for row in await rows(brokers, "stopped", "stopped")}
            for stopped, other in (yard.brokers, yard.brokers[::-1]):  # it talks to one of them
                os.kill(stopped.process.pid, signal.SIGSTOP)
                stopped_at = time.monotonic()

                async def session_is_over(since: float = stopped_at) -> bool:
                    return time.monotonic() > since + 1.5 * session

                try:
                    await until(session_is_over)
                    async with Brokers(other.url) as lively:
                        found = await rows(lively, "stopped", "stopped")
                finally:
                    os.kill(stopped.process.pid, signal.SIGCONT)
                assert {row["owner"] for row in found} == {"stays"}
                assert {row["partition"]: row["epoch"] for row in found} == epochs
            assert consumer.member.identity == seat

    tell(yard, story)


def test_a_leader_killed_in_the_middle_of_a_rebalance_is_followed_by_one_who_ends_it(
    yard: Yard, consumers: Start
) -> None:
    async def story(brokers: Brokers, producer: Producer) -> None:
        await make_topic(brokers, "led", 8)
        go = yard.folder / "led.go"
        first = consumers("led-0", "led", "led", by_batch=True, pause=0.05, max_records=20)  # it is busy for 20 s
        later = [consumers(f"led-{i}", "led", "led", go=str(go), by_batch=True) for i in range(1, 4)]
        load = Load(producer, "led", keys=40)
        await load.send(400)
        await shared_by(brokers, "led", "led", {"led-0": 8})
        leads = [(await ready(broker.url))["leads"] for broker in yard.brokers]
        assert sorted(leads) == [False, True]
        leader, other = yard.brokers if leads[0] else yard.brokers[::-1]
        go.touch()

        async def has_begun() -> bool:
            """a partition is to have another owner, or has one already"""
            found = await rows(brokers, "led", "led")
            return any(row["next_owner"] is not None or row["owner"] not in (None, "led-0") for row in found)

        await until(has_begun)
        leader.kill()
        late = consumers("led-4", "led", "led", by_batch=True)
        working = [first, *later, late]
        try:
            sizes = Counter[int]()

            async def has_ended() -> bool:
                """all have their share"""
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

    tell(yard, story)


def test_a_consumer_stalled_past_its_session_is_fenced_and_joins_again(yard: Yard, consumers: Start) -> None:
    async def story(brokers: Brokers, producer: Producer) -> None:
        await make_topic(brokers, "zombies", 4)
        zombie = consumers("zombie", "zombies", "zombies", by_batch=True, pause=0.02, max_records=50)
        other = consumers("living", "zombies", "zombies", by_batch=True, pause=0.002, max_records=50)
        both = {"zombie": 2, "living": 2}
        await shared_by(brokers, "zombies", "zombies", both)
        load = Load(producer, "zombies", keys=20)
        await load.send(400)
        committed: defaultdict[int, list[int]] = defaultdict(list)

        async def look() -> Rows:
            found = await rows(brokers, "zombies", "zombies")
            for row in found:
                committed[row["partition"]].append(row["committed"] or 0)
            return found

        async def in_a_batch() -> bool:
            """the zombie to be has a batch in hand"""
            return len(zombie.notes("handled")) % 50 in range(5, 40) and bool(await look())

        await until(in_a_batch)
        zombie.signal(signal.SIGSTOP)
        last = zombie.notes("handled")[-1]

        async def taken_over() -> bool:
            """the other one has done everything"""
            found = await look()
            return shares(found).keys() == {"living"} and all(row["lag"] == 0 for row in found)

        await until(taken_over)
        (epoch,) = [int(note.words[0]) for note in zombie.notes("joined")]
        late = {"epoch": epoch, "positions": {last.partition: (last.epoch, 1, last.offset + 1)}}
        with pytest.raises(Fenced):
            await brokers.post("/v1/groups/zombies/members/zombie/commit", late)
        resumed_at = time.monotonic_ns()
        zombie.signal(signal.SIGCONT)

        async def fenced() -> bool:
            """its commit was refused"""
            return bool(zombie.notes("fenced")) and bool(await look())

        await until(fenced)
        (refused,) = zombie.notes("fenced")
        assert (refused.at > resumed_at, refused.partition, refused.epoch) == (True, last.partition, last.epoch)
        await shared_by(brokers, "zombies", "zombies", both)
        await load.send(100)
        await done(brokers, "zombies", "zombies", zombie, other)
        await look()
        for history in committed.values():
            assert history == sorted(history)
        check_all_handled(handled_by(zombie, other), load.acknowledged)
        again = [note for note in zombie.notes("committed") if note.at > refused.at]
        assert again, "it takes part again"
        assert min(note.epoch for note in again) > last.epoch
        assert check_ownerships(handled_by(zombie, other)) > 0

    tell(yard, story)


def test_twenty_consumers_joining_at_once_have_one_or_two_partitions_each(yard: Yard, consumers: Start) -> None:
    async def story(brokers: Brokers, producer: Producer) -> None:
        await make_topic(brokers, "many", 24)
        load = Load(producer, "many", keys=100)
        await load.send(500)
        go = yard.folder / "many.go"
        working = [consumers(f"many-{i}", "many", "many", go=str(go)) for i in range(20)]
        go.touch()
        sizes = Counter[int]()

        async def fair() -> bool:
            """all have their share"""
            owned = shares(await rows(brokers, "many", "many"))
            sizes.clear()
            sizes.update(len(share) for share in owned.values())
            return len(owned) == len(working)

        await until(fair, 15)
        assert sizes == {1: 16, 2: 4}
        await load.send(200)
        await done(brokers, "many", "many", *working)
        check_all_handled(handled_by(*working), load.acknowledged)

    tell(yard, story)


def test_a_topic_is_expanded_under_load(yard: Yard, consumers: Start) -> None:
    async def story(brokers: Brokers, producer: Producer) -> None:
        await make_topic(brokers, "growing", 4)
        working = [consumers(f"growing-{i}", "growing", "growing") for i in range(2)]
        await shared_by(brokers, "growing", "growing", {member.name: 2 for member in working})
        load = Load(producer, "growing", keys=0)
        async with load.going_on():
            before = len(load.acknowledged)
            await brokers.post("/v1/topics/growing/expand", {"partitions": 8})
            await shared_by(brokers, "growing", "growing", {member.name: 4 for member in working})

            async def reached() -> bool:
                """records of all partitions were handled"""
                found = {note.partition for note in handled_by(*working)}
                return found == {f"growing/{i}" for i in range(8)} and len(load.acknowledged) > before + 300

            await until(reached)
        await done(brokers, "growing", "growing", *working)
        check_all_handled(handled_by(*working), load.acknowledged)

    tell(yard, story)


def test_the_records_of_a_consumer_that_hangs_go_to_another_one(yard: Yard, consumers: Start) -> None:
    async def story(brokers: Brokers, producer: Producer) -> None:
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
        began, *again = hangs.notes("hangs")
        assert again == [], "it got the record again"
        (other,) = [note for note in helps.notes("handled") if note.id == "bad"]
        assert RELEASE_SECONDS / 2 < (other.at - began.at) / 1e9 < RELEASE_SECONDS + 3
        await shared_by(brokers, "hung", "hung", both)  # it is back, and what hung is off its hands
        await load.send(100)
        await done(brokers, "hung", "hung", hangs, helps)
        check_all_handled(handled_by(hangs, helps), [*load.acknowledged, "bad"])
        assert hangs.notes("handled")[-1].at > other.at

    tell(yard, story)


@contextlib.asynccontextmanager
async def losing_answers(url: str) -> AsyncIterator[tuple[str, set[str]]]:
    """An address that passes requests on to a broker, and cuts the connection instead of answering the first one of
    each kind: it was done, and who asked does not know. Gives the kinds, too."""
    lost = set[str]()

    async def pass_on(request: web.Request) -> web.StreamResponse:
        async with session.request(
            request.method, f"{url}{request.rel_url}", data=await request.read(), headers=request.headers
        ) as answer:
            kind = f"{request.method} {request.path}"
            if request.method != "GET" and answer.ok and kind not in lost:
                lost.add(kind)
                assert request.transport is not None
                request.transport.close()
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)

    app = web.Application(client_max_size=2**25)
    app.router.add_route("*", "/{path:.*}", pass_on)
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


def test_lost_answers_harm_nobody(yard: Yard, consumers: Start) -> None:
    async def story(brokers: Brokers, _: Producer) -> None:
        await make_topic(brokers, "answers", 4)
        async with losing_answers(yard.brokers[0].url) as (url, lost), Producer(url) as producer:
            first = consumers("answers-0", "answers", "answers", brokers=[url])

            async def joined() -> bool:
                """it knows that it is a member"""
                return bool(first.notes("joined"))

            await until(joined)
            await shared_by(brokers, "answers", "answers", {"answers-0": 4})
            load = Load(producer, "answers", keys=20)
            await load.send(200)
            second = consumers("answers-1", "answers", "answers", brokers=[url], by_batch=True)
            await shared_by(brokers, "answers", "answers", {"answers-0": 2, "answers-1": 2})
            await load.send(200)
            await done(brokers, "answers", "answers", first, second)
            check_all_handled(handled_by(first, second), load.acknowledged)
            second.signal(signal.SIGTERM)
            await shared_by(brokers, "answers", "answers", {"answers-0": 4})
            kinds = {(method, path.rpartition("/")[2]) for method, path in map(str.split, lost)}
            posted = {"members", "heartbeat", "fence", "commit", "release", "records"}
            assert kinds == {*(("POST", kind) for kind in posted), ("DELETE", "answers-1")}

    tell(yard, story)
