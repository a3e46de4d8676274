"""`/metrics`: what a broker did, for Prometheus."""

import re
from typing import Any

from shardyard.client import Message
from tests.queues.setup import Cluster, run, running

TOKEN: dict[str, Any] = {"token": "the broker's"}


def value_of(text: str, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (.*)$", text, re.MULTILINE)
    return 0.0 if found is None else float(found[1])


HEARTBEATS = "shardyard_heartbeats_total"


def test_metrics_show_what_was_published_delivered_committed_retried_and_refused() -> None:
    async def scenario(cluster: Cluster) -> None:
        async def scrape() -> str:
            response = await cluster.request("GET", "/metrics", **TOKEN)
            assert response.status == 200
            assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            return response.body.decode()

        refused = await cluster.request("GET", "/metrics")
        assert (refused.status, refused.code) == (401, "wrong_token")
        before = await scrape()
        await cluster.do("POST", "/v1/topics", {"name": "orders", "partitions": 1}, **TOKEN)
        await cluster.do("PATCH", "/v1/groups/billing", {"backoff": [0.01]}, **TOKEN)
        records = [{"value": "good"}, {"value": "bad"}]
        await cluster.do("POST", "/v1/topics/orders/records", {"records": records}, **TOKEN)

        async def handle(message: Message) -> None:
            if message.value == b"bad":
                raise ValueError("bad luck")

        async with running(cluster.consumer("m1", token="the broker's"), handle):

            async def died() -> bool:
                letters = await cluster.request("GET", "/v1/groups/billing/dead", topic="orders", **TOKEN)
                return letters.status == 200 and len(letters.json) == 1

            async def sent_heartbeat() -> bool:
                return value_of(await scrape(), HEARTBEATS) > value_of(before, HEARTBEATS)

            await cluster.until(died)
            await cluster.until(sent_heartbeat)
            stale = await cluster.request("POST", "/v1/groups/billing/members/m1/heartbeat", {"epoch": 0}, **TOKEN)
            assert stale.code == "fenced"
        after = await scrape()

        def rise(series: str) -> float:
            return value_of(after, series) - value_of(before, series)

        assert rise("shardyard_published_records_total") == 2
        assert rise("shardyard_published_bytes_total") > 20
        assert rise("shardyard_delivered_records_total") >= 3
        assert rise("shardyard_delivered_bytes_total") > 100
        assert rise("shardyard_retries_total") == 1
        assert rise("shardyard_dead_letters_total") == 1
        assert rise("shardyard_joins_total") == 1
        assert rise(HEARTBEATS) >= 1
        assert rise("shardyard_commits_total") >= 1
        assert rise("shardyard_rebalances_total") >= 1
        assert rise('shardyard_errors_total{code="fenced"}') >= 1
        assert rise('shardyard_requests_total{route="/v1/topics/{topic}/records",status="200"}') == 1
        assert rise('shardyard_request_seconds_count{route="/v1/topics/{topic}/records"}') == 1
        assert value_of(after, "shardyard_leader") == 1
        assert value_of(after, "shardyard_requests_in_flight") >= 1

    run(scenario, token="the broker's")
