"""What a client logs when it loses its broker: one line for an outage and one for its end, not one per retry."""

import asyncio
import logging

import pytest

from shardyard.client import Brokers, Consumer, Producer
from shardyard.client.carrier import Carrier
from shardyard.model import Unreachable
from tests.client.test_producer import dead_address
from tests.queues.setup import Cluster, Handled, run

SECRET = "sesame"


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardyard")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of brokers, with its level, since the last call."""
    logged = [f"{r.levelname} {r.getMessage()}" for r in caplog.records if r.name == "shardyard.client.brokers"]
    caplog.clear()
    return logged


def test_a_fail_over_is_logged_with_its_reason_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        handled = Handled()
        async with Brokers(cluster.urls) as brokers, Producer(brokers) as producer:
            brokers._at = 1
            async with handled.at_work(Consumer(brokers, "billing", ["orders"])):
                await cluster.until_shared(2)
                assert lines(caplog) == []
                sending = [asyncio.create_task(producer.send("orders", f"{i}", key=f"{i}")) for i in range(500)]
                cluster.stop(1)
                await asyncio.gather(*sending)
                await cluster.until_done()
                await cluster.until(lambda: any("connected" in line for line in caplog.messages))
        warning, info = lines(caplog)
        assert warning.startswith(f"WARNING {cluster.urls[1]} can't be reached (")
        assert warning.endswith(f"): failing over to {cluster.urls[0]}")
        assert info == f"INFO connected to {cluster.urls[0]}"

    run(scenario, brokers=2)


def test_an_outage_of_all_brokers_is_logged_once_however_often_calls_are_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        failing = 0

        async def call(_: Carrier) -> str:
            nonlocal failing
            failing -= 1
            if failing >= 0:
                raise ConnectionError("a cable was cut")
            return "answer"

        async with Brokers(cluster.urls) as brokers:
            brokers._at = 0
            for _ in range(2):
                assert await brokers.run(call) == "answer"
            assert lines(caplog) == []
            for count in (5, 6):
                failing, at = count, brokers._at % 2
                here, there = cluster.urls[at], cluster.urls[1 - at]
                assert await brokers.run(call) == "answer"
                assert lines(caplog) == [
                    f"WARNING {here} can't be reached (a cable was cut): failing over to {there}",
                    f"INFO connected to {cluster.urls[brokers._at % 2]}",
                ]
        async with Brokers(cluster.urls[0]) as brokers:
            await brokers.run(call)
            failing = 3
            await brokers.run(call)
        assert lines(caplog) == [
            f"WARNING {cluster.urls[0]} can't be reached (a cable was cut): calls to it are retried",
            f"INFO connected to {cluster.urls[0]}",
        ]

    run(scenario, brokers=2)


def test_a_broker_that_was_never_reached_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(cluster: Cluster) -> None:
        dead = dead_address()
        async with Brokers([dead, *cluster.urls]) as brokers:
            brokers._at = 0
            await brokers.get("/healthz")
        assert lines(caplog) == [
            f"INFO {dead} can't be reached (connection refused): failing over to {cluster.urls[0]}",
            f"INFO connected to {cluster.urls[0]}",
        ]

    run(scenario)


def test_passwords_in_addresses_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        url = dead_address().replace("//", f"//ann:{SECRET}@")
        async with Brokers([url, url]) as brokers:
            with pytest.raises(Unreachable) as raised:
                await brokers.get("/healthz", retry_seconds=0.0)
        assert SECRET not in str(raised.value)
        assert SECRET not in str(raised.value.brokers)

    asyncio.run(scenario())
    assert "can't be reached" in caplog.text
    assert SECRET not in caplog.text
