"""Clients that reconnect get what they missed, once and in order, from wherever it still is."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest

from shardyard.groups import Node, transfer_positions
from shardyard.messaging import history_ends, resume, session
from shardyard.messaging.history.materialiser import GROUP as HISTORY_GROUP
from shardyard.messaging.history_ends import HistoryEnds
from shardyard.messaging.mirror import GROUP as MIRROR_GROUP
from shardyard.messaging.server import MessagingServer
from shardyard.messaging.session import MOST_MISSED
from shardyard.model import Partition, Position, Record
from shardyard.wire import messaging as wire
from shardyard.wire.close_codes import CloseCode
from shardyard.wire.inbox import TOPIC
from shardyard.wire.messaging import Format
from tests.messaging.clients import Client
from tests.messaging.servers import JumpingClock, Running, Yard, config, eventually, inbox_of, partition_of, run
from tests.queues.engines import POSTGRESQL


def texts(numbers: Iterable[int]) -> list[str]:
    return [f"m{number}" for number in numbers]


def welcomed(client: Client) -> wire.Welcome:
    return next(frame for frame in client.frames if isinstance(frame, wire.Welcome))


def gaps(client: Client) -> list[str]:
    return [frame.reason for frame in client.frames if isinstance(frame, wire.Gap)]


async def say(client: Client, to: str, numbers: range) -> None:
    await client.send(*(wire.Send(number, to, f"m{number}") for number in numbers))
    for number in numbers:
        await client.sent(number)


async def missed(yard: Yard, server: Running, count: int, format_: Format = Format.JSON) -> tuple[Client, Client]:
    """Bob has got three messages, and is away while Alice sends more."""
    alice, bob = await yard.join(server, "alice"), await yard.join(server, "bob", format_=format_)
    await say(alice, "bob", range(3))
    assert await bob.received(3) == texts(range(3))
    await bob.vanish()
    await say(alice, "bob", range(3, 3 + count))
    return alice, bob


@pytest.mark.parametrize("engine", ["sqlite", POSTGRESQL])
@pytest.mark.parametrize("tail_records", [5_000, 2])
def test_a_client_resumes_from_memory_or_from_the_log(tmp_path: Path, engine: str, tail_records: int) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(tail_records=tail_records))
        alice, bob = await missed(yard, server, 6, Format.MSGPACK)
        again = await yard.clients.again(server.url, bob)
        assert await again.all_received(6) == texts(range(3, 9))
        welcome = welcomed(again)
        assert (welcome.resume, welcome.position) == ("position", bob.position)
        assert gaps(again) == []
        await say(alice, "bob", range(9, 10))
        assert await again.received(7) == texts(range(3, 10))
        await again.vanish()
        nothing = await yard.clients.again(server.url, again)
        assert nothing.texts == []

    run(tmp_path, scenario, engine)


def test_a_client_without_a_position_begins_with_what_the_history_may_not_have_yet(tmp_path: Path) -> None:
    """Otherwise it would find a message neither in the history, which is some moments behind, nor on its connection."""

    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        alice, _ = await missed(yard, server, 2)
        new = await yard.join(server, "bob", "laptop")
        welcome = welcomed(new)
        assert (welcome.resume, welcome.position) == (
            "new",
            wire.Position(partition_of("bob"), welcome.position.epoch, 0),
        )
        await say(alice, "bob", range(5, 6))
        assert await new.received(6) == texts(range(6))
        # It received nothing before, and resumes nevertheless
        newest = await yard.join(server, "carol")
        await newest.vanish()
        await say(alice, "carol", range(6, 8))
        again = await yard.clients.again(server.url, newest)
        assert await again.all_received(2) == ["m6", "m7"]

    run(tmp_path, scenario)


def test_a_client_that_connects_as_soon_as_a_server_serves_does_not_get_old_messages_as_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_: MessagingServer) -> None:
        await asyncio.Event().wait()

    async def scenario(yard: Yard) -> None:
        first = await yard.start()
        alice = await yard.join(first, "alice")
        await say(alice, "bob", range(5))
        await yard.materialised()
        await yard.stop(first)
        monkeypatch.setattr(MessagingServer, "_follow_history", never)  # what a server learns later is too late
        monkeypatch.setattr(history_ends, "TAKE_OVER_SECONDS", 60.0)
        clock = JumpingClock()
        clock.jump(60)
        again = await yard.start(clock=clock)
        alice, bob = await yard.join(again, "alice"), await yard.join(again, "bob", "laptop")
        await say(alice, "bob", range(5, 6))
        assert await bob.received(1) == ["m5"]

    run(tmp_path, scenario)


def test_partitions_that_are_taken_over_together_share_a_look_at_the_history(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        async with Node(yard.log, yard.registry) as node:
            ends = HistoryEnds(node)
            first, second = ends.for_take_over(), ends.for_take_over()
            assert first is second
            assert await first == {}
            assert ends.for_take_over() is not first
            await ends.close()

    run(tmp_path, scenario)


@pytest.mark.parametrize("engine", ["sqlite", POSTGRESQL])
def test_what_the_log_has_no_more_comes_from_the_history(tmp_path: Path, engine: str) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(tail_records=2))
        alice, bob = await missed(yard, server, 7)
        await alice.send(wire.SetMark(50, "bob", "seen", "1"))
        await alice.sent(50)
        await yard.materialised()
        partition = inbox_of("bob")
        await yard.log.trim(partition, (await yard.log.span(partition)).end - 3)
        again = await yard.clients.again(server.url, bob)
        assert await again.all_received(8) == [*texts(range(3, 10)), "seen 1"]
        assert gaps(again) == []
        assert welcomed(again).resume == "position"

    run(tmp_path, scenario, engine)


def test_a_gap_is_said_when_neither_log_nor_history_has_all_of_it(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(tail_records=2), history=False)
        _, bob = await missed(yard, server, 7)
        partition = inbox_of("bob")
        await yard.log.trim(partition, (await yard.log.span(partition)).end - 3)
        again = await yard.clients.again(server.url, bob)
        assert await again.all_received(3) == texts(range(7, 10))
        assert len(gaps(again)) == 1

    run(tmp_path, scenario)


def test_a_client_of_a_deleted_topic_is_told_that_its_position_is_lost(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        first = await yard.start()
        alice, bob = await missed(yard, first, 2)
        await alice.close()
        await yard.stop(first)
        await yard.log.delete_topic(TOPIC)
        second = await yard.start()
        alice = await yard.join(second, "alice", "tablet")
        await say(alice, "bob", range(10, 12))
        again = await yard.clients.again(second.url, bob)
        assert (welcomed(again).resume, len(gaps(again))) == ("lost", 1)
        assert await again.all_received(2) == texts(range(10, 12))  # what it is sure to have missed
        without = await yard.clients.again(second.url, bob, last=None)
        assert (welcomed(without).resume, len(gaps(without))) == ("lost", 1)
        assert await without.all_received(2) == texts(range(10, 12))  # like a new client
        assert without.position == again.position

    run(tmp_path, scenario)


def test_servers_serve_a_topic_that_is_deleted_and_created_again(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(mirror="local"))
        _, bob = await missed(yard, server, 2)
        await yard.materialised()
        await yard.log.delete_topic(TOPIC)
        await yard.log.create_topic(TOPIC, 4)
        epochs = {(await yard.log.span(Partition(TOPIC, index))).epoch for index in range(4)}
        await eventually(lambda: len(server.owned) == 4 and {o.log_epoch for o in server.server.partitions} == epochs)
        again = await yard.clients.again(server.url, bob)
        assert welcomed(again).resume == "lost"
        alice = await yard.join(server, "alice", "tablet")
        await say(alice, "bob", range(20, 22))
        assert (await again.received(2))[-2:] == texts(range(20, 22))

    run(tmp_path, scenario)


async def reshard(yard: Yard, partitions: int) -> None:
    """What the reshard job does: copy the records of the sealed topic to another one, which continues it."""
    log, target = yard.log, f"{TOPIC}-2"
    await log.create_topic(target, partitions)
    sealed = await log.seal_topic(TOPIC, "reshard")
    for partition in sealed:
        batch = await log.read(partition, 0, max_records=100_000)
        for record in batch.records():
            assert record.key is not None
            await log.append(Partition(target, partition_of(record.key.decode(), partitions)), [record])
    ends = {}
    for partition in await log.topic(target):
        span = await log.span(partition)
        ends[partition] = Position(span.epoch, span.end)
    for group in (MIRROR_GROUP, HISTORY_GROUP):
        yard.registry.run(lambda tx, group=group: transfer_positions(tx, group, ends, "reshard"))  # type: ignore[misc]
    await log.move_topic(TOPIC, target, holder="reshard", generation=sealed.generation)


@pytest.mark.parametrize("engine", ["sqlite", POSTGRESQL])
def test_a_client_resumes_by_id_after_a_reshard(tmp_path: Path, engine: str) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(burst=1000))
        alice, bob = await missed(yard, server, 2)
        carol = await yard.join(server, "carol")
        await yard.materialised()
        await reshard(yard, 3)
        assert await carol.closed() == 4111
        assert await alice.closed() == 4111
        await eventually(
            lambda: {o.partition.topic for o in server.server.partitions if o.ready.done()} == {f"{TOPIC}-2"}
        )
        await eventually(lambda: len(server.owned) == 3)
        again = await yard.clients.again(server.url, bob)
        assert (welcomed(again).resume, gaps(again)) == ("id", [])
        assert await again.all_received(2) == texts(range(3, 5))
        alice = await yard.clients.again(server.url, alice)
        assert (await alice.say(4, "bob", "m4")).duplicate, "its acknowledgement might have been lost"
        await say(alice, "bob", range(5, 7))
        assert await again.received(4) == texts(range(3, 7))
        await again.vanish()
        assert welcomed(await yard.clients.again(server.url, again)).resume == "position"
        assert welcomed(await yard.clients.again(server.url, carol)).resume == "lost"  # it has received nothing yet

    run(tmp_path, scenario, engine)


def test_clients_move_when_an_append_notices_first_that_the_topic_has_more_partitions(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(burst=1000))
        alice, bob = await yard.join(server, "alice"), await yard.join(server, "bob")
        assert partition_of("bob", 5) != partition_of("bob", 4)
        await yard.log.expand_topic(TOPIC, 5)
        await say(alice, "bob", range(1))  # it is refused at first, and then placed anew
        assert await bob.closed() == 4111
        await eventually(lambda: len(server.owned) == 5)
        again = await yard.clients.again(server.url, bob)
        assert "m0" in [*again.texts] or gaps(again)

    run(tmp_path, scenario)


def test_a_client_that_missed_more_than_the_limit_gets_the_newest_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "MOST_MISSED", 20)

    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(tail_records=2))
        bob = await yard.join(server, "bob")
        await bob.vanish()
        await yard.fill("bob", texts(range(25)))
        again = await yard.clients.again(server.url, bob)
        assert await again.all_received(20) == texts(range(5, 25))
        assert len(gaps(again)) == 1
        assert welcomed(again).resume == "lost"
        assert again.position is not None
        assert again.position.offset == 25

    run(tmp_path, scenario)


def test_a_client_that_missed_many_is_not_cut_because_more_arrive_while_it_reads(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(queued=50))
        alice, bob = await yard.join(server, "alice"), await yard.join(server, "bob")
        await bob.vanish()
        count = 3000
        await yard.fill("bob", (f"m{n}" + "x" * 4000 for n in range(count)))
        (owned,) = [each for each in server.server.partitions if each.partition == inbox_of("bob")]
        await eventually(lambda: owned.tail.end == count)
        token = (await yard.clients.session(server.url, "bob")).token
        raw = await yard.clients.raw(server.url, receive_bytes=4096)
        position = bob.position
        await raw.frame(wire.encode(wire.Hello(token, "phone", position), Format.JSON), kind=1)
        await eventually(lambda: any(each.is_paused for each in owned.sessions()))
        await say(alice, "bob", range(100))  # more than may wait for a client that has missed nothing
        received: list[str] = []
        while len(received) < count + 100:
            kind, payload = await raw.receive()
            assert kind == 1, payload
            for frame in wire.decode_from_server(payload, Format.JSON):
                if isinstance(frame, wire.Deliver):
                    received += [entry.text.rstrip("x") for entry in frame.entries if isinstance(entry, wire.Message)]
        assert received == texts([*range(count), *range(100)])

    assert MOST_MISSED > 3000
    assert session.MOST_MISSED == MOST_MISSED
    run(tmp_path, scenario)


@pytest.mark.parametrize("tail_records", [5_000, 5])
def test_nothing_is_doubled_or_missing_while_messages_arrive_during_resumes(tmp_path: Path, tail_records: int) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(tail_records=tail_records, burst=100_000, rate=100_000.0))
        alice, bob = await yard.join(server, "alice"), await yard.join(server, "bob")
        count = 400

        async def keep_sending() -> None:
            for first in range(0, count, 10):
                await say(alice, "bob", range(first, first + 10))

        sending = asyncio.create_task(keep_sending())
        received: list[str] = []
        reconnects = 0
        while not sending.done():
            await asyncio.wait([sending], timeout=0.02)
            await bob.vanish()
            received += bob.texts
            reconnects += 1
            bob = await yard.clients.again(server.url, bob)
        await sending
        received += await bob.all_received(count - len(received))
        assert received == texts(range(count))
        assert reconnects >= 3

    run(tmp_path, scenario)


@pytest.mark.parametrize("offset", [2**53 - 1, 999])
def test_a_position_beyond_the_end_is_not_believed(tmp_path: Path, offset: int) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start()
        _, bob = await missed(yard, server, 2)
        assert bob.position is not None
        beyond = wire.Position(bob.position.partition, bob.position.epoch, offset)
        again = await yard.clients.again(server.url, bob, position=beyond)
        assert (welcomed(again).resume, again.texts) == ("id", texts(range(3, 5)))
        lost = await yard.clients.again(server.url, bob, position=beyond, last="9" * 19)
        assert welcomed(lost).resume == "lost"
        assert len(gaps(lost)) == 1

    run(tmp_path, scenario)


def test_what_is_no_entry_of_the_inbox_is_skipped(tmp_path: Path) -> None:
    async def scenario(yard: Yard) -> None:
        server = await yard.start(config(tail_records=3))
        alice, bob = await missed(yard, server, 2)
        junk = [Record(f"junk{n}", b"bob", b"\xc1") for n in range(5)]
        await yard.log.append(inbox_of("bob"), [*junk, Record("none", None, b"")])
        await say(alice, "bob", range(5, 7))
        again = await yard.clients.again(server.url, bob)
        assert await again.all_received(4) == texts(range(3, 7))
        await yard.materialised()
        await yard.log.trim(inbox_of("bob"), 9)
        again = await yard.clients.again(server.url, bob)
        assert await again.all_received(4) == texts(range(3, 7))

    run(tmp_path, scenario)


def test_a_client_that_says_hello_while_its_partition_moves_is_sent_elsewhere(tmp_path: Path) -> None:
    class Connected:
        def __init__(self) -> None:
            self.messages: list[bytes] = []
            self.code: CloseCode | None = None

        def send(self, message: bytes) -> None:
            self.messages.append(message)

        def close(self, code: CloseCode, reason: str) -> None:
            del reason
            self.code = code

        def pause_reading(self) -> None: ...
        def resume_reading(self) -> None: ...

    async def scenario(yard: Yard) -> None:
        server = (await yard.start()).server
        owned = server.owned_of("alice")
        assert owned is not None
        connection = Connected()
        unknown = wire.Position(owned.partition.index, owned.log_epoch + 1, 5)  # it is looked for, in a task
        hello = wire.Hello(server.tokens.issue("alice").text, "phone", unknown)
        server.connect(connection, Format.JSON).receive(wire.encode(hello, Format.JSON))
        server._ownership.lost(owned.partition)
        await eventually(lambda: connection.code is not None)
        assert connection.code is CloseCode.MOVED
        [message] = connection.messages
        assert isinstance(wire.decode_from_server(message, Format.JSON)[0], wire.Elsewhere)

    run(tmp_path, scenario)
