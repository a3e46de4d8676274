"""The producer: order, batches, what it refuses, and that closing loses nothing."""

import asyncio
import re
import socket
from typing import Any

import pytest

from shardyard.client import BlockingProducer, Brokers, Producer
from shardyard.client.producer import PIPELINED_RECORDS, PIPELINED_SECONDS
from shardyard.model import (
    SEQUENCE_WINDOW,
    Appended,
    Closed,
    InvalidValue,
    Partition,
    Position,
    Record,
    TooLarge,
    UnknownTopic,
    Unreachable,
    WrongToken,
)
from shardyard.runtime.clock import ManualClock
from shardyard.wire import frames, responses
from tests.queues.setup import Cluster, run


def dead_address() -> str:
    """Where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_records_of_a_key_are_stored_in_the_order_of_the_calls_and_sent_in_batches() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=3)
        async with cluster.producer() as producer:
            ids = await asyncio.gather(
                *(producer.send("orders", f"{i}", key=f"k{i % 7}", id=f"{i}", tag="t", trace="x") for i in range(1200))
            )
        assert ids == [f"{i}" for i in range(1200)]
        stored = await cluster.records()
        for partition in stored:
            for key in {record.key for record in partition}:
                numbers = [int(record.value) for record in partition if record.key == key]
                assert numbers == sorted(numbers)
        assert sorted(int(r.id) for partition in stored for r in partition) == list(range(1200))
        assert stored[0][0].headers == (("tag", b"t"), ("trace", b"x"))
        assert producer._lanes["orders"].window._next < 10, "in few requests"

    run(scenario)


def test_publish_returns_where_a_batch_was_stored_and_takes_a_partition() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=3)
        async with cluster.producer() as producer:
            epoch = (await cluster.log.topic("orders")).epoch
            (part,) = await producer.publish("orders", [Record.new(b"a"), Record.new(b"b")], partition=2)
            assert part == Appended(Partition("orders", 2), Position(epoch, 0), 2)
            many = await asyncio.gather(*(producer.publish("orders", [Record.new(b"c")]) for _ in range(200)))
            assert len(many) == 200
            large = [Record.new(b"x" * 900_000) for _ in range(5)]
            await producer.publish("orders", large)
        assert sum(len(partition) for partition in await cluster.records()) == 207

    run(scenario)


def test_a_delayed_record_is_stored_when_it_is_due() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        async with cluster.producer() as producer:
            await producer.send("orders", "later", delay=0.4, id="d")
            await producer.send("orders", "now")
            with pytest.raises(InvalidValue):
                await producer.send("orders", "x", delay=-1)
            with pytest.raises(InvalidValue):
                await producer.send("orders", "x", delay=1, deliver_at=5)

            async def there() -> bool:
                return [r.value for r in (await cluster.records())[0]] == [b"now", b"later"]

            await cluster.until(there)

    run(scenario)


def test_errors_of_the_broker_are_raised_by_the_call_and_other_calls_succeed() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        async with cluster.producer() as producer:
            with pytest.raises(TooLarge):
                await producer.send("orders", b"x" * 1_100_000)
            with pytest.raises(InvalidValue):
                await producer.send("orders", "x", id="")
            for name in ("nope", "no pe?x=1", "nö#pe"):
                with pytest.raises(UnknownTopic) as refused:
                    await producer.send(name, "x")
                assert refused.value.topic == name
            await cluster.do("PATCH", "/v1/topics/orders", {"token": "open-sesame"})
            with pytest.raises(WrongToken):
                await producer.send("orders", "x")
            async with cluster.producer(token="open-sesame") as other:
                await other.send("orders", "with the token")
        assert [r.value for r in (await cluster.records())[0]] == [b"with the token"]
        with pytest.raises(Closed):
            await producer.send("orders", "x")
        with pytest.raises(Closed):
            await producer.publish("orders", [Record.new(b"x")])

    run(scenario)


def test_closing_sends_what_is_waiting_unless_the_block_ends_with_an_error() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        async with cluster.producer(linger=0.2) as producer:
            sends = [asyncio.create_task(producer.send("orders", f"{i}")) for i in range(700)]
            await asyncio.sleep(0)  # so that all of them wait
        assert len(await asyncio.gather(*sends)) == 700
        assert len((await cluster.records())[0]) == 700

        with pytest.raises(RuntimeError, match="of the program"):
            async with cluster.producer(linger=30.0) as producer:
                sends = [asyncio.create_task(producer.send("orders", f"{i}")) for i in range(10)]
                await asyncio.sleep(0)  # so that all of them wait
                raise RuntimeError("of the program")
        outcomes = await asyncio.wait_for(asyncio.gather(*sends, return_exceptions=True), 20)
        assert [type(outcome) for outcome in outcomes] == [Closed] * 10

    run(scenario)


def test_a_producer_fails_over_from_dead_brokers_and_raises_when_all_are_dead() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        for _ in range(4):  # it begins with any of them
            async with Producer([dead_address(), cluster.urls[0], dead_address()], retry_seconds=10.0) as producer:
                await asyncio.gather(*(producer.send("orders", "x") for _ in range(20)))
        assert len((await cluster.records())[0]) == 80
        async with Producer([dead_address(), dead_address()], retry_seconds=0.3) as producer:
            with pytest.raises(Unreachable, match="could be reached"):
                await producer.send("orders", "x")

    run(scenario)


def test_calls_fail_over_soon_from_a_broker_that_does_not_respond_if_there_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardyard.client.brokers.FAILOVER_SECONDS", 0.3)

    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        with socket.create_server(("127.0.0.1", 0)) as silent:  # its connections are taken, and never answered
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            async with Brokers([url, *cluster.urls]) as brokers, Producer(brokers) as producer:
                for ask in (lambda: producer.send("orders", "x"), lambda: brokers.get("/v1/topics/orders")):
                    brokers._at = 0
                    async with asyncio.timeout(12):  # it would wait for 15 s if there were no other broker
                        await ask()
                brokers._at = 0
                with pytest.raises(Unreachable, match=r"0\.1 s"):
                    await brokers.call("GET", "/readyz", timeout=0.2, retry_seconds=0.1)
        assert Brokers(url).failover_seconds > 1, "there is no other one"

    run(scenario)


def test_long_polls_fail_over_together_with_other_calls() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            async with Brokers([url, *cluster.urls]) as brokers:
                brokers._at = 0
                waiting = asyncio.create_task(brokers.get("/v1/topics/orders", wait=600.0))
                await asyncio.sleep(0)
                await brokers.call("GET", "/readyz", timeout=0.2)
                assert brokers._at == 1
                async with asyncio.timeout(60):
                    await waiting

    run(scenario)


def test_a_batch_whose_response_was_lost_is_stored_once() -> None:
    class Losing(Brokers):
        """Loses the first answer to each publish."""

        lost = 0

        async def attempt(self, *arguments: Any, **named: Any) -> Any:
            response = await super().attempt(*arguments, **named)
            if self.lost % 2 == 0:
                self.lost += 1
                raise ConnectionResetError
            self.lost += 1
            return response

    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        async with Losing(cluster.urls) as brokers, Producer(brokers) as producer:
            for i in range(5):
                await producer.send("orders", f"{i}")
            assert brokers.lost == 10
        assert sorted(int(r.value) for p in await cluster.records() for r in p) == list(range(5))

    run(scenario, brokers=2)


def test_sequences_stay_within_the_window_of_the_oldest_batch_in_flight() -> None:
    class Slow(Brokers):
        """The first publish is answered last."""

        def __init__(self, urls: list[str]) -> None:
            super().__init__(urls)
            self.held = asyncio.Event()
            self.sequences: list[int] = []

        async def publish(self, call: frames.Publish, *, is_stamped: bool) -> responses.Published:
            sequence = call.options.sequence
            assert sequence is not None
            self.sequences.append(sequence)
            if sequence == 0:
                await self.held.wait()
            return await super().publish(call, is_stamped=is_stamped)

    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        async with Slow(cluster.urls) as brokers, Producer(brokers) as producer:
            sends = [
                asyncio.create_task(producer.publish("orders", [Record.new(b"%d" % i)]))
                for i in range(2 * SEQUENCE_WINDOW)
            ]
            await cluster.until(lambda: len(brokers.sequences) == SEQUENCE_WINDOW)
            for _ in range(100):
                await asyncio.sleep(0)  # lets the producer send more, if it would
            assert max(brokers.sequences) == SEQUENCE_WINDOW - 1
            brokers.held.set()
            await asyncio.gather(*sends)
        assert len((await cluster.records())[0]) == 2 * SEQUENCE_WINDOW

    run(scenario)


class Holding(Brokers):
    """Calls are on their way until they are let through."""

    def __init__(self, urls: list[str], clock: ManualClock, *, keeps_order: bool = True) -> None:
        super().__init__(urls, clock=clock, carrier="websocket" if keeps_order else "http")
        self.through = asyncio.Event()

    async def attempt(self, call: Any, *arguments: Any, **named: Any) -> Any:
        async def held(carrier: Any) -> Any:
            await self.through.wait()
            return await call(carrier)

        return await super().attempt(held, *arguments, **named)


class NotingProducer(Producer):
    """Notes how many records each batch has."""

    def __init__(self, brokers: Brokers) -> None:
        super().__init__(brokers)
        self.sizes: list[int] = []

    def _call(self, topic: str, rows: Any, *arguments: Any, **named: Any) -> frames.Publish:
        self.sizes.append(len(rows))
        return super()._call(topic, rows, *arguments, **named)


async def settle() -> None:
    """Let everything happen that needs no answer."""
    for _ in range(20):
        await asyncio.sleep(0)


def send_numbers(producer: Producer, numbers: range) -> list["asyncio.Task[str]"]:
    return [asyncio.create_task(producer.send("orders", f"{i}", key="k")) for i in numbers]


@pytest.mark.parametrize("keeps_order", [True, False])
def test_records_wait_for_a_batch_in_flight_only_for_a_moment(keeps_order: bool) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        clock = ManualClock()
        async with (
            Holding(cluster.urls, clock, keeps_order=keeps_order) as brokers,
            NotingProducer(brokers) as producer,
        ):
            sends = send_numbers(producer, range(2))
            await settle()
            sends += send_numbers(producer, range(2, 4))
            await settle()
            assert producer.sizes == [2], "the first batch was just sent"
            await clock.advance(PIPELINED_SECONDS * 1.5)
            sends += send_numbers(producer, range(4, 6))
            await settle()
            assert producer.sizes == ([2, 4] if keeps_order else [2])
            await clock.advance(PIPELINED_SECONDS * 1.5)
            sends += send_numbers(producer, range(6, 8))
            await settle()
            assert producer.sizes == ([2, 4] if keeps_order else [2]), "no more than two are in flight"
            brokers.through.set()
            await asyncio.gather(*sends)
            assert producer.sizes == ([2, 4, 2] if keeps_order else [2, 6])
        assert [int(record.value) for record in (await cluster.records())[0]] == list(range(8))

    run(scenario)


def test_many_records_do_not_wait_for_a_batch_in_flight() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        async with Holding(cluster.urls, ManualClock()) as brokers, NotingProducer(brokers) as producer:
            sends = send_numbers(producer, range(1))
            await settle()
            sends += send_numbers(producer, range(1, PIPELINED_RECORDS))
            await settle()
            assert producer.sizes == [1], "one too few"
            sends += send_numbers(producer, range(PIPELINED_RECORDS, PIPELINED_RECORDS + 1))
            await settle()
            assert producer.sizes == [1, PIPELINED_RECORDS]
            brokers.through.set()
            await asyncio.gather(*sends)
        assert [int(record.value) for record in (await cluster.records())[0]] == list(range(PIPELINED_RECORDS + 1))

    run(scenario)


def test_a_blocking_producer_can_be_used_from_any_thread() -> None:
    def program(url: str) -> list[str]:
        with BlockingProducer(url) as producer:
            ids = [producer.send("orders", f"{i}", key="k") for i in range(5)]
            producer.publish("orders", [Record("batch", None, b"b")])
            with pytest.raises(UnknownTopic):
                producer.send("nope", "x")
        return ids

    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        sent = await asyncio.gather(*(asyncio.to_thread(program, cluster.urls[0]) for _ in range(3)))
        stored = [record.id for partition in await cluster.records() for record in partition]
        assert sorted(stored) == sorted([i for ids in sent for i in ids] + ["batch"] * 3)

    run(scenario)
    with pytest.raises(InvalidValue, match="an address such as"):
        BlockingProducer("127.0.0.1")


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ("localhost:7400", ["http://localhost:7400"]),
        (["127.0.0.1:7400/", "https://b/"], ["http://127.0.0.1:7400", "https://b"]),
        ("[::1]:7400", ["http://[::1]:7400"]),
    ],
)
def test_a_broker_is_given_as_a_url_or_as_host_and_port(given: str | list[str], urls: list[str]) -> None:
    async def scenario() -> None:
        assert Brokers(given).urls == urls

    asyncio.run(scenario())


@pytest.mark.parametrize("wrong", ["localhost", "", "http://", "ftp://b:1", "b:1/path", "http://b:99999", "b:0", 7400])
def test_an_invalid_address_among_several_is_named_in_the_error(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match=f"broker is {re.escape(repr(wrong))}: expected an address such as"):
        Brokers(["http://127.0.0.1:7400", wrong])
    with pytest.raises(InvalidValue, match="at least one address"):
        Brokers([])


def test_the_error_says_why_no_broker_could_be_reached() -> None:
    async def scenario() -> None:
        for url, why in ((dead_address(), "connection refused"), ("nowhere.invalid:1", "unknown host")):
            async with Brokers(url) as brokers:
                with pytest.raises(Unreachable, match=rf"\({why}[a-z .]*\)$"):
                    await brokers.get("/healthz", retry_seconds=0.0)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with Brokers(f"127.0.0.1:{silent.getsockname()[1]}") as brokers:
                with pytest.raises(Unreachable, match=r"\(no response in time\)$"):
                    await brokers.get("/healthz", retry_seconds=0.0, timeout=0.1)

    asyncio.run(scenario())
