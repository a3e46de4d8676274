"""Calls on a WebSocket connection: their order, their limits, and how they end."""

import asyncio
import logging
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shardyard.model import Busy, InvalidValue
from shardyard.queues.delays.scheduler import Scheduler
from shardyard.runtime.clock import SystemClock
from shardyard.runtime.metrics import CALL_SECONDS, LONG_POLLS_WAITING, WEBSOCKETS
from shardyard.server.limits import ServerLimits
from shardyard.server.queues import calls, session
from shardyard.wire import frames, requests, responses
from shardyard.wire.close_codes import CloseCode
from tests.server.websockets import Client, Running, publish, read, run
from tests.wire.frame_damage import damaged, garbage
from tests.wire.frame_samples import CALLS

HEALTH = frames.Request("GET", "/healthz")
ALIVE = frames.Response(200, b'{"alive":true}')
DAMAGED_MESSAGES = 300


async def until_waiting(count: float) -> None:
    """Wait until as many reads wait for records."""
    while LONG_POLLS_WAITING.value != count:  # noqa: ASYNC110 it has no event for it
        await asyncio.sleep(0)


class Publishes:
    """Publishes as they reach the log: it holds them, and refuses those with certain ids."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._publish = calls.publish
        monkeypatch.setattr(calls, "publish", self._hold)
        self.begun: list[str] = []
        self.go = asyncio.Event()
        self.busy: set[str] = set()
        self.invalid: set[str] = set()

    async def _hold(self, broker: Any, topic: str, records: Any, *more: Any) -> Any:
        id_ = records[0].record.id
        self.begun.append(id_)
        await self.go.wait()
        if id_ in self.busy:
            raise Busy("the log", 1.0)
        if id_ in self.invalid:
            raise InvalidValue("record", id_, "another one")
        return await self._publish(broker, topic, records, *more)

    async def until_begun(self, count: int) -> None:
        while len(self.begun) < count:  # noqa: ASYNC110 it has no event for it
            await asyncio.sleep(0)


# Order


def test_a_publish_is_stored_after_the_one_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(running: Running) -> None:
        publishes = Publishes(monkeypatch)
        client = await running.connect()
        await client.send((1, publish("a")), (2, publish("b", after=1)), (3, publish("c", after=2)), (4, publish("d")))
        await client.send((5, publish("e", after=3)))
        await publishes.until_begun(2)
        assert publishes.begun == ["a", "d"]
        publishes.go.set()
        for number in range(1, 6):
            assert isinstance(await client.answer(number), frames.Result)
        assert [id_ for id_ in await running.stored() if id_ != "d"] == ["a", "b", "c", "e"]
        assert isinstance(await client.call(6, publish("f", after=1)), frames.Result), "that one is stored"
        assert isinstance(await client.call(7, publish("g", after=99)), frames.Result), "there was none"

    run(scenario)


def test_a_publish_after_one_that_was_refused_for_now_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(running: Running) -> None:
        publishes = Publishes(monkeypatch)
        publishes.busy.add("a")
        client = await running.connect()
        await client.send((1, publish("a")), (2, publish("b", after=1)), (3, publish("c", after=2)))
        publishes.go.set()
        assert [await client.code(number) for number in (1, 2, 3)] == ["busy", *["earlier_publish_failed"] * 2]
        await client.send((4, publish("d", after=3)), (5, publish("e", after=4)))  # they were refused before
        assert [await client.code(number) for number in (4, 5)] == ["earlier_publish_failed"] * 2
        assert await running.stored() == []
        publishes.busy.clear()
        await client.send((6, publish("a")), (7, publish("b", after=6)))
        assert isinstance(await client.answer(7), frames.Result)
        assert await running.stored() == ["a", "b"]

    run(scenario)


def test_a_publish_after_one_that_failed_for_good_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(running: Running) -> None:
        publishes = Publishes(monkeypatch)
        publishes.invalid.add("a")
        publishes.go.set()
        client = await running.connect()
        await client.send((1, publish("a")), (2, publish("b", after=1)))
        assert await client.code(1) == "invalid_value"
        assert isinstance(await client.answer(2), frames.Result)
        await client.send((3, publish("c", after=1)))
        assert isinstance(await client.answer(3), frames.Result)

    run(scenario)


def test_a_publish_after_one_that_was_refused_because_of_too_many_calls_is_refused_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(running: Running) -> None:
        publishes = Publishes(monkeypatch)
        client = await running.connect()
        await client.send((1, publish("a")), (2, publish("b", after=1)))
        assert await client.code(2) == "overloaded"
        publishes.go.set()
        await client.answer(1)
        await client.send((3, publish("c", after=2)))
        assert await client.code(3) == "earlier_publish_failed"
        assert await running.stored() == ["a"]

    run(scenario, ServerLimits(calls=1))


def test_a_number_that_is_used_again_is_that_of_the_later_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(running: Running) -> None:
        publishes = Publishes(monkeypatch)
        publishes.busy.add("a")
        publishes.go.set()
        client = await running.connect()
        await client.send((1, publish("a")))
        assert await client.code(1) == "busy"
        assert isinstance(await client.call(1, publish("b")), frames.Result)
        assert isinstance(await client.call(2, publish("c", after=1)), frames.Result)

    run(scenario)


def test_publishes_that_name_themselves_or_each_other_do_not_wait_for_ever() -> None:
    async def scenario(running: Running) -> None:
        client = await running.connect()
        await client.send((1, publish("a", after=1)), (2, publish("b", after=3)), (3, publish("c", after=2)))
        for number in (1, 2, 3):
            assert isinstance(await client.answer(number), frames.Result)
        stored = await running.stored()
        assert stored.index("b") < stored.index("c")

    run(scenario)


def test_answers_of_the_same_turn_share_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(running: Running) -> None:
        async def answer_at_once(*_: Any) -> responses.Published:
            return responses.Published([], 0)

        monkeypatch.setattr(calls, "publish", answer_at_once)
        client = await running.connect()
        await client.call(0, publish("x"))  # then the settings of the topic are known, and nothing waits
        await client.send(*((number, publish(f"{number}")) for number in range(100)))
        assert [number for number, _ in await client.message()] == list(range(100))

    run(scenario)


# Limits, cancelling


def test_calls_beyond_the_limit_are_refused_until_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(running: Running) -> None:
        publishes = Publishes(monkeypatch)
        client, other = await running.connect(), await running.connect()
        await client.send((1, publish("a")), (2, frames.Watch("g", "m", 1)), (3, HEALTH), (4, publish("b")))
        assert [await client.code(number) for number in (3, 4)] == ["overloaded"] * 2
        assert await other.call(1, HEALTH) == ALIVE
        publishes.go.set()
        assert isinstance(await client.answer(1), frames.Result)
        assert await client.call(4, HEALTH) == ALIVE

    run(scenario, ServerLimits(calls=2))


def test_a_number_of_a_call_in_progress_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(running: Running) -> None:
        publishes = Publishes(monkeypatch)
        client = await running.connect()
        await client.send((1, publish("a")), (1, publish("b")), (1, HEALTH))
        assert [await client.code(1), await client.code(1)] == ["invalid_call"] * 2
        publishes.go.set()
        assert isinstance(await client.answer(1), frames.Result)
        assert await running.stored() == ["a"]
        assert await client.call(1, HEALTH) == ALIVE

    run(scenario)


async def member_of(client: Client) -> tuple[responses.Joined, int]:
    """A member that owns the partition, and the epoch of its ownership."""
    member = await client.join("worker-1")
    return member, (await client.owned(member))["orders/0"]


def test_a_read_that_is_cancelled_ends_without_an_answer_and_frees_its_number() -> None:
    async def scenario(running: Running) -> None:
        client = await running.connect()
        _, epoch = await member_of(client)
        before = LONG_POLLS_WAITING.value
        await client.send((1, read(epoch)))
        await until_waiting(before + 1)
        await client.send((1, frames.Cancel()), (2, frames.Cancel()))
        await until_waiting(before)
        await client.send((1, read(epoch)), (1, frames.Cancel()))  # it is cancelled before it begins
        stored, delivered = await client.result(3, publish("a")), await client.result(1, read(epoch))
        assert delivered["columns"]["ids"] == ["a"]
        assert (delivered["epoch"], delivered["end"]) == (stored["stored"][0]["epoch"], 1)

    run(scenario)


def test_a_watch_that_is_cancelled_frees_its_number() -> None:
    async def scenario(running: Running) -> None:
        client = await running.connect()
        assert await client.call(1, frames.Watch("billing", "worker-1", 1)) == frames.CHANGED
        await client.send((1, frames.Cancel()))
        while await client.call(2, HEALTH) != ALIVE:
            pass
        await client.send((1, frames.Watch("billing", "worker-1", 1)), (1, frames.Cancel()))
        while await client.call(2, HEALTH) != ALIVE:
            pass

    run(scenario, ServerLimits(calls=1))


def test_only_reads_and_watches_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(running: Running) -> None:
        publishes = Publishes(monkeypatch)
        client = await running.connect()
        await client.send((1, publish("a")), (1, frames.Cancel()), (2, HEALTH), (2, frames.Cancel()))
        await publishes.until_begun(1)
        await client.send((1, frames.Cancel()))
        assert await client.answer(2) == ALIVE
        publishes.go.set()
        assert isinstance(await client.answer(1), frames.Result)
        assert await running.stored() == ["a"]

    run(scenario)


# The end of a connection


def test_a_server_that_stops_answers_what_is_in_progress_and_closes_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(running: Running) -> None:
        publishes = Publishes(monkeypatch)
        client, idle = await running.connect(), await running.connect()
        member, epoch = await member_of(client)
        before = LONG_POLLS_WAITING.value
        await client.send(
            (1, publish("a")),
            (2, publish("b", after=1)),
            (3, read(epoch)),
            (4, frames.Watch("billing", member.member, member.epoch)),
        )
        assert await client.answer(4) == frames.CHANGED
        await publishes.until_begun(1)
        await until_waiting(before + 1)
        running.server.should_exit = True
        assert await idle.closed() == CloseCode.DRAINING
        empty = await client.answer(3)
        assert isinstance(empty, frames.Result)
        assert msgspec.msgpack.decode(empty.body)["columns"]["ids"] == []
        publishes.go.set()
        for number in (1, 2):
            assert isinstance(await client.answer(number), frames.Result)
        assert await client.closed() == CloseCode.DRAINING
        await running.serving
        assert await running.stored() == ["a", "b"]

    run(scenario, drain_seconds=20.0)


def test_a_server_that_stops_closes_a_connection_on_which_calls_were_cancelled() -> None:
    async def scenario(running: Running) -> None:
        client = await running.connect()
        await client.send((1, read(1)), (1, frames.Cancel()))
        assert await client.call(2, HEALTH) == ALIVE
        running.server.should_exit = True
        assert await client.closed() == CloseCode.DRAINING
        async with asyncio.timeout(15):
            await running.serving

    run(scenario, drain_seconds=20.0)


@pytest.mark.parametrize("abrupt", [False, True])
def test_a_connection_that_is_lost_leaves_no_task(monkeypatch: pytest.MonkeyPatch, abrupt: bool) -> None:
    async def wait_for_ever(_: Scheduler) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Scheduler, "run", wait_for_ever)  # it would start tasks meanwhile

    async def scenario(running: Running) -> None:
        publishes = Publishes(monkeypatch)
        admin = await running.connect()
        _, epoch = await member_of(admin)
        waiting, before, connected = LONG_POLLS_WAITING.value, asyncio.all_tasks(), WEBSOCKETS.value
        client = await running.connect()
        await client.send(
            (1, publish("a")),
            (2, publish("b", after=1)),
            (3, read(epoch)),
            (4, frames.Watch("billing", "worker-1", 1)),
            (5, frames.Request("GET", "/v1/groups/nobody/changes", {"wait_seconds": "30"})),
        )
        await publishes.until_begun(1)
        await until_waiting(waiting + 2)
        await client.answer(4)
        if abrupt:
            connection = client.socket._conn
            assert connection is not None
            assert connection.transport is not None
            connection.transport.abort()
        else:
            await client.socket.close()
        publishes.go.set()  # what is being stored is finished
        while WEBSOCKETS.value > connected or asyncio.all_tasks() - before:  # noqa: ASYNC110 it has no event for it
            await asyncio.sleep(0)
        assert LONG_POLLS_WAITING.value == waiting
        assert await admin.call(1, HEALTH) == ALIVE

    run(scenario)


# Damaged messages


def test_damaged_messages_harm_neither_the_broker_nor_other_connections(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(running: Running) -> None:
        chance = random.Random(7)
        other = await running.connect()
        member, epoch = await member_of(other)
        await other.send((1, read(epoch, wait_seconds=20.0)))
        calls = [
            *CALLS,
            frames.Commit("billing", "worker-1", requests.Commit(member.epoch, {"orders/0": (epoch, 1, 0)})),
            frames.Heartbeat("billing", "worker-1", requests.Heartbeat(member.epoch, ["orders/0"])),
            read(epoch, group="elsewhere"),
        ]
        whole = [message for call in calls for message in frames.messages([frames.encode_frame(1, call)])]
        closed = 0
        for _ in range(DAMAGED_MESSAGES):
            client = await running.connect()
            await client.socket.send_bytes(
                garbage(chance) if chance.random() < 0.1 else damaged(chance.choice(whole), chance)
            )
            await client.socket.send_bytes(b"\x91" + frames.encode_frame(2**53, HEALTH))
            while True:
                message = await client.socket.receive()
                if not isinstance(message.data, bytes):
                    assert client.socket.close_code == CloseCode.MALFORMED
                    closed += 1
                    break
                if any(number == 2**53 for number, _ in frames.decode_answers(message.data)):
                    break
            await client.socket.close()
        assert 0.1 < closed / DAMAGED_MESSAGES < 0.97, "else it tests nothing"
        assert await other.call(2, HEALTH) == ALIVE

    with caplog.at_level(logging.WARNING):
        run(scenario, clock=SystemClock())
    assert [record for record in caplog.records if record.exc_info] == []


# Metrics


def test_the_time_to_the_answer_is_measured_by_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(session, "time", SimpleNamespace(perf_counter=lambda: now))
    seconds = CALL_SECONDS.series("publish")

    async def scenario(running: Running) -> None:
        nonlocal now
        publishes = Publishes(monkeypatch)
        publishes.invalid.add("b")
        client = await running.connect()
        counts, total = list(seconds.counts), seconds.sum
        await client.send((1, publish("a")), (2, publish("b")))
        await publishes.until_begun(2)
        now += 0.3
        publishes.go.set()
        assert isinstance(await client.answer(1), frames.Result)
        assert await client.code(2) == "invalid_value"
        assert seconds.sum == pytest.approx(total + 0.6), "also of a call that failed"
        grown = [after - before for before, after in zip(counts, seconds.counts, strict=True)]
        assert sorted(grown) == [0] * (len(grown) - 1) + [2]
        rendered = await client.call(3, frames.Request("GET", "/metrics"))
        assert isinstance(rendered, frames.Response)
        assert b'shardyard_call_seconds_count{kind="publish"} ' in rendered.body

    run(scenario)
