"""Partitions that move: whose clients are told, where they go, and that nothing is lost on the way."""

import asyncio
import random
from collections import defaultdict
from pathlib import Path

import pytest

from shardyard.messaging import ownership
from shardyard.messaging.admission import Admission
from shardyard.messaging.owned import OwnedPartition
from shardyard.messaging.session import Session
from shardyard.model import RetryLater
from shardyard.wire import messaging as wire
from tests.messaging.clients import Client, address
from tests.messaging.servers import PARTITIONS, Running, Yard, config, eventually, partition_of, run, user_of
from tests.queues.engines import POSTGRESQL

EVERYONE = [user_of(partition) for partition in range(PARTITIONS)]


async def elsewhere(client: Client, code: int = 4111) -> wire.Elsewhere:
    """What a client is told before its connection is closed with the code."""
    assert await client.closed() == code
    frame = client.frames[-1]
    assert isinstance(frame, wire.Elsewhere)
    return frame


async def shared(*servers: Running) -> None:
    """Wait until the servers own all partitions, each a fair share."""
    each = PARTITIONS // len(servers)
    await eventually(lambda: all(len(server.owned) == each for server in servers))


@pytest.mark.parametrize("engine", ["sqlite", POSTGRESQL])
def test_when_a_server_joins_only_the_clients_of_partitions_that_move_are_told(tmp_path: Path, engine: str) -> None:
    async def scenario(yard: Yard) -> None:
        first = await yard.start()
        clients = {user: await yard.join(first, user) for user in EVERYONE}
        second = await yard.start()
        await shared(first, second)
        for user, client in clients.items():
            if partition_of(user) in second.owned:
                told = await elsewhere(client)
                assert told.address == address(second.url)
                assert 0 <= told.after < 1
                await yard.clients.again(second.url, client)
            else:
                before = len(client.frames)
                await client.sync()
                assert len(client.frames) == before + 1  # the pong
                assert before == 2  # welcome, and caught up

    run(tmp_path, scenario, engine)


def test_clients_are_told_the_addresses_of_servers_and_when_these_change(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        first = await yard.start(partitions=range(PARTITIONS))
        alice = await yard.join(first, "alice")
        assert (await alice.get(wire.Welcome)).servers == (address(first.url),)
        second = await yard.start(partitions=())
        await eventually(lambda: len(first.server.directory.members()) == 2)
        told = []
        for _ in range(2):
            await alice.send(wire.Ping())
            told.append((await alice.get(wire.Pong)).servers)
        assert sorted(told[0]) == sorted([address(first.url), address(second.url)])
        assert told[1] == ()
        bob = await yard.join(first, "bob")
        assert sorted((await bob.get(wire.Welcome)).servers) == sorted(told[0])

    run(tmp_path, scenario)


def test_a_drained_server_sends_its_clients_to_the_others_and_owns_nothing(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        first, second = await yard.start(), await yard.start()
        await shared(first, second)
        users = {partition_of(user): user for user in EVERYONE}
        there = [await yard.join(first, users[partition]) for partition in first.owned]
        here = [await yard.join(second, users[partition]) for partition in second.owned]
        async with yard.clients.http.post(f"{first.url}/v1/drain") as response:
            assert response.status == 200
        assert first.owned == set()
        for client in there:
            assert (await elsewhere(client)).address == address(second.url)
        for client in here:
            await client.sync()
            assert client.code is None
        async with yard.clients.http.get(f"{first.url}/readyz") as response:
            assert response.status == 503
        async with yard.clients.http.get(f"{first.url}/healthz") as response:
            assert response.status == 200
        # Whoever comes to it is sent on
        late = await yard.clients.hello(first.url, there[0].user)
        assert (await elsewhere(late, 4110)).address == address(second.url)
        granted = await yard.clients.session(first.url, there[0].user)
        assert granted.address == address(second.url)

    run(tmp_path, scenario)


def test_a_server_alone_tells_its_clients_to_ask_the_directory_when_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "OWNER_SECONDS", 0.05)

    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        client = await yard.join(server, "alice")
        unknown = await yard.clients.connected(server.url)
        await yard.stop(server)
        assert (await elsewhere(client)).address is None
        assert (await elsewhere(unknown, 4100)).address is None

    run(tmp_path, scenario)


def test_clients_of_a_server_that_is_cut_off_from_its_group_are_sent_to_the_next_owner(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        short = config(session_timeout=1.0, burst=1000)
        first, second = await yard.start(short), await yard.start(short)
        await shared(first, second)
        users = {partition_of(user): user for user in EVERYONE}
        moving = [await yard.join(first, users[partition]) for partition in first.owned]
        staying = await yard.join(second, users[min(second.owned)])

        async def unreachable(*_: object) -> None:
            raise RetryLater("the registry is away")

        coordinator = first.server._node.coordinator
        for name in ("heartbeat", "join", "assignment"):
            setattr(coordinator, name, unreachable)
        await staying.say(1, moving[0].user, "meanwhile")  # whoever serves that user by now
        for client in moving:
            assert (await elsewhere(client)).address == address(second.url)
        again = await yard.clients.again(second.url, moving[0])
        assert [*moving[0].texts, *again.texts] == ["meanwhile"]
        before = len(staying.frames)
        await staying.sync()
        assert len(staying.frames) == before + 1

    run(tmp_path, scenario)


def test_a_client_at_the_wrong_server_is_told_the_right_one(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        first, second = await yard.start(), await yard.start()
        await shared(first, second)
        users = {partition_of(user): user for user in EVERYONE}
        for right, wrong in ((first, second), (second, first)):
            for partition in right.owned:
                client = await yard.clients.hello(wrong.url, users[partition])
                assert await elsewhere(client, 4110) == wire.Elsewhere(address(right.url), 0.0)
                assert (await yard.clients.session(wrong.url, users[partition])).address == address(right.url)
                async with yard.clients.http.get(f"{wrong.url}/v1/where/{users[partition]}") as response:
                    where = await response.json()
                assert (where["user"], where["partition"]) == (users[partition], partition)
                assert where["address"] == address(right.url)
                (owned,) = [each for each in right.server.partitions if each.partition.index == partition]
                assert where["epoch"] == owned.epoch

    run(tmp_path, scenario)


def test_partitions_can_be_assigned_by_hand(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        first = await yard.start(partitions=[0, 1, 2])
        second = await yard.start(partitions=[3])
        assert (first.owned, second.owned) == ({0, 1, 2}, {3})
        client = await yard.clients.hello(first.url, user_of(3))
        assert (await elsewhere(client, 4110)).address == address(second.url)
        await yard.stop(second)
        async with yard.clients.http.get(f"{first.url}/v1/where/{user_of(3)}") as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "retry_later"

    run(tmp_path, scenario)


def test_a_partition_moves_at_once_although_its_clients_keep_sending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "STORING_SECONDS", 1_000.0)

    async def scenario(yard: Yard) -> None:
        fast = config(burst=100_000, rate=100_000.0)
        first = await yard.start(fast)
        clients = [await yard.join(first, user) for user in EVERYONE]
        bob = "a user who is not connected"
        moved = asyncio.Event()

        async def keep_sending(client: Client) -> int:
            """Some are always on their way."""
            number = 0
            while client.code is None and not moved.is_set():
                if number - len(client.answers) < 40:
                    await client.send(*(wire.Send(n, bob, str(n)) for n in range(number, number + 20)))
                    number += 20
                await asyncio.sleep(0.002)
            return number

        sending = [asyncio.create_task(keep_sending(client)) for client in clients]
        second = await yard.start(fast)
        await shared(first, second)
        moved.set()
        counts = [await task for task in sending]
        # Whatever has no answer is sent again, and stored once
        for client, count in zip(clients, counts, strict=True):
            if partition_of(client.user) in second.owned:
                await elsewhere(client)
                client = await yard.join(second, client.user)  # noqa: PLW2901
                for number in range(0, count, 20):
                    await client.send(*(wire.Send(n, bob, str(n)) for n in range(number, number + 20)))
            await answered(client, count)
        stored: defaultdict[str, list[int]] = defaultdict(list)
        for entry in await yard.stored():
            if not entry.copy:
                stored[entry.sender].append(entry.number)
        assert stored == {client.user: list(range(count)) for client, count in zip(clients, counts, strict=True)}

    run(tmp_path, scenario)


async def answered(client: Client, count: int) -> None:
    """Wait until all numbers up to this one have an answer."""
    await client.until(lambda: {answer.number for answer in client.answers} == set(range(count)))


class Follower:
    """A client that stays connected by the book: it asks any server for its own, and resumes there."""

    def __init__(self, yard: Yard, servers: list[Running], user: str) -> None:
        self._yard = yard
        self._servers = servers
        self.user = user
        self.received: dict[str, str] = {}
        self.number = 0
        self._client: Client | None = None
        self._position: wire.Position | None = None
        self._last: str | None = None

    async def connected(self) -> Client:
        client = self._client
        while client is None or client.code is not None:
            self._take()
            url = random.choice(self._servers).url
            granted = await self._yard.clients.session(url, self.user)
            url = "http" + granted.address.removeprefix("ws").removesuffix(wire.PATH)
            try:
                client = await self._yard.clients.hello(
                    url, self.user, token=granted.token, position=self._position, last=self._last
                )
                while client.code is None and not client.frames:  # noqa: ASYNC110 either may come
                    await asyncio.sleep(0.002)
            except OSError:
                await asyncio.sleep(0.01)
                continue
            if any(isinstance(frame, wire.Welcome) for frame in client.frames):
                self._client = client
        return client

    def _take(self) -> None:
        """Remember what the connection that has ended brought."""
        if self._client is None:
            return
        for entry in self._client.entries:
            assert isinstance(entry, wire.Message)
            assert entry.id not in self.received
            self.received[entry.id] = entry.text
            self._last = entry.id
        self._position = self._client.position
        self._client = None

    async def say(self, to: str) -> None:
        """Send the next message until it is acknowledged."""
        self.number += 1
        while True:
            client = await self.connected()
            try:
                await client.send(wire.Send(self.number, to, f"{self.user} {self.number}"))
                await client.sent(self.number)
            except (AssertionError, OSError):
                assert client.code is not None
                continue
            return

    async def finish(self, expected: list[str]) -> None:
        async def has_all() -> bool:
            client = await self.connected()
            return len(self.received) + len(client.entries) >= len(expected)

        while not await has_all():  # noqa: ASYNC110 on one connection or the next
            await asyncio.sleep(0.01)
        await (await self.connected()).sync()
        self._take()
        assert sorted(self.received.values()) == sorted(expected)
        for sender in {text.split()[0] for text in expected}:  # in order per conversation
            mine = [text for text in self.received.values() if text.split()[0] == sender]
            assert mine == [text for text in expected if text.split()[0] == sender]


@pytest.mark.parametrize("engine", ["sqlite", POSTGRESQL])
def test_no_two_servers_serve_a_user_in_one_epoch_and_nothing_is_lost_when_they_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    observed: set[tuple[str, int, str]] = set()
    attach = Admission._attach

    def observing(self: Admission, session: Session, owned: OwnedPartition) -> bool:
        observed.add((session.user, owned.epoch, self._server.address))
        return attach(self, session, owned)

    monkeypatch.setattr(Admission, "_attach", observing)
    quick = config(session_timeout=1.0, mirror="local", burst=100_000, rate=100_000.0)

    async def scenario(yard: Yard) -> None:
        servers = [await yard.start(quick)]
        followers = [Follower(yard, servers, user) for user in EVERYONE]
        expected: defaultdict[str, list[str]] = defaultdict(list)
        done = asyncio.Event()

        async def talk(follower: Follower) -> None:
            while not done.is_set():
                to = random.choice(EVERYONE)
                if to != follower.user:
                    expected[to].append(f"{follower.user} {follower.number + 1}")
                    await follower.say(to)

        talking = [asyncio.create_task(talk(follower)) for follower in followers]
        for step in ("join", "leave", "join", "join", "vanish", "leave"):
            if step == "join":
                servers.append(await yard.start(quick))
            else:
                leaving = servers.pop(0)
                if step == "vanish":  # it does not say goodbye
                    await leaving.server._ownership._membership.stop()
                await yard.stop(leaving)
            await asyncio.sleep(0.1)  # they talk meanwhile
        done.set()
        await asyncio.gather(*talking)
        for follower in followers:
            await follower.finish(expected[follower.user])
        assert sum(map(len, expected.values())) > 50
        assert len({server for *_, server in observed}) >= 2, "nobody has moved"
        assert len({(user, epoch) for user, epoch, _ in observed}) == len(observed)

    run(tmp_path, scenario, engine)
