"""The broker's HTTP API as any caller sees it: what is refused, topics, groups, looking and searching."""

import asyncio
import contextlib
import functools
import re
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pyarrow as pa
import pytest

from shardyard.groups import ResetTarget, resolve_positions
from shardyard.log.memory import MemoryLog
from shardyard.model import OverQuota, Partition, PartitionOutOfRange, Record, Span, Topic
from shardyard.model.batch import SCHEMA
from shardyard.queues.broker import Broker
from shardyard.queues.delays import GROUP
from shardyard.queues.janitor import Janitor
from shardyard.queues.settings import TopicSettings, change_topic
from shardyard.registry import OwnershipRow
from shardyard.registry.batcher import TransactionBatcher
from shardyard.registry.memory import MemoryRegistry
from shardyard.runtime.clock import ManualClock
from shardyard.server import http
from shardyard.server.app import serving
from shardyard.wire.arrow import encode_arrow
from shardyard.wire.media import ARROW, JSON, MAX_BODY_BYTES, MEDIA_TYPES, MSGPACK
from tests.log.samples import at, end, move
from tests.queues.engines import BROKERS
from tests.queues.setup import Cluster, Handled, Response, run, running

RECORDS = "/v1/topics/orders/records"


def arrow(**columns: list[Any]) -> bytes:
    rows = {"id": ["a"], "key": [None], "value": [b"v"], "headers": [None], "timestamp": [0], **columns}
    schema = pa.schema([field for field in SCHEMA if field.name in rows] + [])
    batch = pa.RecordBatch.from_pydict({name: rows[name] for name in schema.names}, schema)
    return encode_arrow(batch)


async def drop_drained_partitions(cluster: Cluster) -> list[Topic]:
    """What the janitor of a broker does every two seconds, at once. Returns the topics that changed."""
    transactions = TransactionBatcher(cluster.registry)
    try:
        return await Janitor(cluster.log, transactions, holder="test").drop_drained_partitions()
    finally:
        transactions.close()


async def everything(cluster: Cluster) -> tuple[Any, ...]:
    """What is stored, anywhere."""
    with cluster.registry.snapshot() as tx:
        names = [row.name for row in tx.groups() if row.name != GROUP]
        rows = [(o.group, o.partition, o.owner, o.epoch, o.committed) for name in names for o in tx.ownerships(name)]
        settings = [tx.settings(f"group/{name}") for name in names], tx.settings("topic/orders")
        audited = len(tx.audit_log(1000))
    topics = [topic for topic in await cluster.log.topics() if not topic.name.startswith("shardyard.delay")]
    return topics, await cluster.count(), names, rows, settings, audited


# method, path, JSON or (media, body), query, status, code
BAD: list[tuple[str, str, Any, dict[str, Any], int, str]] = [
    ("POST", "/v1/topics/nope/records", {"value": "x"}, {}, 404, "unknown_topic"),
    ("POST", "/v1/topics/nope/records", {"value": "x", "delay": 5}, {}, 404, "unknown_topic"),
    ("POST", "/v1/topics/no%3Fpe/records", {"value": "x"}, {}, 404, "unknown_topic"),
    ("POST", "/v1/topics/%C3%A4%20%25/records", {"value": "x"}, {}, 404, "unknown_topic"),
    ("POST", "/v1/topics/a%2Fb/records", {"value": "x"}, {}, 404, "not_found"),
    ("POST", RECORDS, (JSON, b'{"value": '), {}, 400, "malformed"),
    ("POST", RECORDS, (JSON, b"\xff\xfe"), {}, 400, "malformed"),
    ("POST", RECORDS, (JSON, b""), {}, 400, "malformed"),
    ("POST", RECORDS, (JSON, b"[" * 100_000), {}, 400, "malformed"),
    ("POST", RECORDS, {"value": 7}, {}, 400, "malformed"),
    ("POST", RECORDS, {"value": "x", "colour": "red"}, {}, 400, "malformed"),
    ("POST", RECORDS, {"records": [{"value": "x"}], "colour": "red"}, {}, 400, "malformed"),
    ("POST", RECORDS, {"records": [{"value": "x"}, {"value": "x", "delay": -1}]}, {}, 400, "invalid_value"),
    ("POST", RECORDS, {"records": []}, {}, 400, "invalid_value"),
    ("POST", RECORDS, {"key": "no value"}, {}, 400, "invalid_value"),
    ("POST", RECORDS, {"value": "x", "value_base64": "eA=="}, {}, 400, "invalid_value"),
    ("POST", RECORDS, {"value_base64": "no base64!"}, {}, 400, "invalid_value"),
    ("POST", RECORDS, {"value_base64": "ä"}, {}, 400, "invalid_value"),
    ("POST", RECORDS, {"value": "x", "id": ""}, {}, 400, "invalid_value"),
    ("POST", RECORDS, {"value": "x", "delay": -0.5}, {}, 400, "invalid_value"),
    ("POST", RECORDS, {"value": "x", "delay": 1e15}, {}, 400, "invalid_value"),
    ("POST", RECORDS, {"value": "x", "deliver_at": -1}, {}, 400, "invalid_value"),
    ("POST", RECORDS, {"value": "x", "deliver_at": 2**80}, {}, 400, "invalid_value"),
    ("POST", RECORDS, {"value": "x", "delay": 1, "deliver_at": 1}, {}, 400, "invalid_value"),
    ("POST", RECORDS, {"value": "x", "timestamp": -1}, {}, 400, "invalid_value"),
    ("POST", RECORDS, {"value": "x", "timestamp": 2**70}, {}, 400, "invalid_value"),
    ("POST", RECORDS, {"value": "x" * 1_100_000}, {}, 413, "too_large"),
    ("POST", RECORDS, {"value": "x"}, {"partition": 99}, 400, "partition_out_of_range"),
    ("POST", RECORDS, {"value": "x"}, {"partition": -1}, 400, "invalid_value"),
    ("POST", RECORDS, {"value": "x"}, {"partition": "9" * 5000}, 400, "invalid_value"),
    ("POST", RECORDS, {"value": "x"}, {"partiton": 1}, 400, "invalid_value"),
    ("POST", RECORDS, {"value": "x"}, {"producer": "p"}, 400, "invalid_value"),
    ("POST", RECORDS, {"value": "x"}, {"producer": "p", "sequence": "first"}, 400, "invalid_value"),
    ("POST", RECORDS, {"value": "x"}, {"producer": "", "sequence": 1}, 400, "invalid_value"),
    ("POST", RECORDS, {"value": "x", "delay": 5}, {"producer": "p", "sequence": 1}, 400, "invalid_value"),
    ("POST", RECORDS, {"value": "x"}, {"fence": "f"}, 400, "invalid_value"),
    ("POST", RECORDS, {"value": "x"}, {"fence": "billing/orders/0", "owner": 0}, 409, "fenced"),
    ("POST", RECORDS, ("text/plain", b'{"value": "x"}'), {}, 400, "invalid_value"),
    ("POST", RECORDS, (MSGPACK, b"\xc1"), {}, 400, "malformed"),
    ("POST", RECORDS, (MSGPACK, msgspec.msgpack.encode({"records": [{"key": b"x"}]})), {}, 400, "malformed"),
    ("POST", RECORDS, (MSGPACK, msgspec.msgpack.encode({"records": [{"value": "x"}]})), {}, 400, "malformed"),
    (
        "POST",
        RECORDS,
        (MSGPACK, msgspec.msgpack.encode({"records": [{"value": b"x", "deliver_at": -5}]})),
        {},
        400,
        "invalid_value",
    ),
    ("POST", RECORDS, (ARROW, b"no arrow"), {}, 400, "malformed"),
    ("POST", RECORDS, (ARROW, b""), {}, 400, "malformed"),
    ("POST", RECORDS, (ARROW, arrow()[:-40]), {}, 400, "malformed"),
    ("POST", RECORDS, (ARROW, arrow(id=[""])), {}, 400, "invalid_value"),
    ("POST", RECORDS, (ARROW, arrow(timestamp=[-1])), {}, 400, "invalid_value"),
    ("POST", RECORDS, (ARROW, arrow(value=[b"x" * 1_100_000])), {}, 413, "too_large"),
    ("POST", RECORDS, (ARROW, encode_arrow(pa.RecordBatch.from_pylist([], SCHEMA))), {}, 400, "invalid_value"),
    (
        "POST",
        RECORDS,
        (ARROW, encode_arrow(pa.RecordBatch.from_pydict({"id": ["a"]}))),
        {},
        400,
        "invalid_value",
    ),
    ("POST", "/v1/topics", {"name": "new", "partitions": 0}, {}, 400, "invalid_value"),
    ("POST", "/v1/topics", {"name": "new", "partitions": 10**9}, {}, 413, "too_large"),
    ("POST", "/v1/topics", {"name": "new", "partitions": "4"}, {}, 400, "invalid_value"),
    ("POST", "/v1/topics", {"name": "new", "partitions": 4, "colour": "red"}, {}, 400, "invalid_value"),
    ("POST", "/v1/topics", {"name": "a/b", "partitions": 4}, {}, 400, "invalid_value"),
    ("POST", "/v1/topics", {"name": "", "partitions": 4}, {}, 400, "invalid_value"),
    ("POST", "/v1/topics", {"name": "new", "partitions": 4, "hash": "crc"}, {}, 400, "invalid_value"),
    ("POST", "/v1/topics", {"name": "new", "partitions": 4, "retention_ms": -1}, {}, 400, "invalid_value"),
    ("POST", "/v1/topics", {"name": "orders", "partitions": 4}, {}, 409, "topic_exists"),
    ("POST", "/v1/topics/orders/expand", {"partitions": 2}, {}, 400, "invalid_value"),
    ("POST", "/v1/topics/orders/contract", {"partitions": 9}, {}, 400, "invalid_value"),
    ("POST", "/v1/topics/orders/contract", {"partitions": 0}, {}, 400, "invalid_value"),
    ("PATCH", "/v1/topics/orders", {"colour": "red"}, {}, 400, "invalid_value"),
    ("PATCH", "/v1/topics/orders", {"token": "short"}, {}, 400, "invalid_value"),
    ("PATCH", "/v1/topics/orders", {"records_per_second": 0, "token": "long-enough"}, {}, 400, "invalid_value"),
    ("PATCH", "/v1/topics/orders", {"retention_ms": "a day", "token": "long-enough"}, {}, 400, "invalid_value"),
    ("PATCH", "/v1/topics/orders", {"token": "not everybody's"}, {}, 400, "invalid_value"),
    ("PATCH", "/v1/topics/orders", {"records_per_second": 10**30}, {}, 400, "invalid_value"),
    ("PATCH", "/v1/topics/orders", {"retention_ms": 10**30}, {}, 400, "invalid_value"),
    ("PATCH", "/v1/topics/orders", {"retention_bytes": 2**63}, {}, 400, "invalid_value"),
    ("PATCH", "/v1/topics/orders", ["token"], {}, 400, "invalid_value"),
    ("PATCH", "/v1/topics/nope", {"token": "long-enough"}, {}, 404, "unknown_topic"),
    ("DELETE", "/v1/topics/nope", None, {}, 404, "unknown_topic"),
    ("DELETE", "/v1/topics/orders", None, {}, 409, "topic_in_use"),
    ("DELETE", "/v1/topics/orders", None, {"force": True, "dry_run": True}, 400, "invalid_value"),
    ("DELETE", "/v1/topics/orders", None, {"force": "perhaps"}, 400, "invalid_value"),
    ("GET", "/v1/topics/nope", None, {}, 404, "unknown_topic"),
    ("GET", "/v1/topics/orders/partitions/99", None, {}, 400, "partition_out_of_range"),
    ("GET", "/v1/topics/orders/partitions/first", None, {}, 400, "invalid_value"),
    ("GET", RECORDS, None, {"partition": 0, "offset": 99}, 416, "offset_beyond_end"),
    ("GET", RECORDS, None, {"limit": 0}, 400, "invalid_value"),
    ("GET", "/v1/topics/orders/search", None, {}, 400, "invalid_value"),
    ("GET", "/v1/topics/nope/search", None, {"id": "a"}, 404, "unknown_topic"),
    ("PATCH", "/v1/groups/billing", {"colour": "red"}, {}, 400, "invalid_value"),
    ("PATCH", "/v1/groups/billing", {"concurrency": 0}, {}, 400, "invalid_value"),
    ("PATCH", "/v1/groups/billing", {"max_active": 10**30}, {}, 400, "invalid_value"),
    ("PATCH", "/v1/groups/billing", {"backoff": [1, -1]}, {}, 400, "invalid_value"),
    ("PATCH", "/v1/groups/billing", {"paused_partitions": ["orders"]}, {}, 400, "invalid_value"),
    ("PATCH", "/v1/groups/billing", {"webhook": "gopher://x"}, {}, 400, "invalid_value"),
    ("PATCH", "/v1/groups/billing", {"webhook": "http://"}, {}, 400, "invalid_value"),
    ("POST", f"/v1/groups/billing/partitions/orders/{10**30}/fence", {"epoch": 1}, {}, 400, "invalid_value"),
    ("GET", f"/v1/groups/billing/partitions/orders/{10**30}/records", None, {"offset": 0}, 400, "invalid_value"),
    ("GET", f"/v1/topics/orders/partitions/{10**30}", None, {}, 400, "invalid_value"),
    ("PATCH", "/v1/groups/billing", {"broadcast": True}, {}, 400, "invalid_value"),
    ("PATCH", "/v1/groups/billing", (JSON, b'{"tags": ' + b"[" * 100_000), {}, 400, "malformed"),
    ("PATCH", "/v1/groups/b%C3%A4d%20name", {"paused": True}, {}, 400, "invalid_value"),
    ("PATCH", "/v1/groups/a~b", {"paused": True}, {}, 400, "invalid_value"),
    ("GET", "/v1/groups/nope", None, {}, 404, "unknown_group"),
    ("DELETE", "/v1/groups/nope", None, {}, 404, "unknown_group"),
    ("DELETE", "/v1/groups/billing", None, {}, 409, "group_in_use"),
    ("POST", "/v1/groups/nope/reset", {"topic": "orders", "to": "earliest"}, {}, 404, "unknown_group"),
    ("POST", "/v1/groups/billing/reset", {"topic": "nope", "to": "earliest"}, {}, 404, "unknown_topic"),
    (
        "POST",
        "/v1/groups/billing/reset",
        {"topic": "orders", "to": "offset", "value": 99},
        {},
        416,
        "offset_beyond_end",
    ),
    ("POST", "/v1/groups/billing/reset", {"topic": "orders", "to": "offset"}, {}, 400, "invalid_value"),
    ("POST", "/v1/groups/billing/reset", {"topic": "orders", "to": "sideways"}, {}, 400, "invalid_value"),
    (
        "POST",
        "/v1/groups/billing/reset",
        {"topic": "orders", "to": "latest", "partitions": [99]},
        {},
        400,
        "partition_out_of_range",
    ),
    ("POST", "/v1/groups/b%20d/members", {"topics": ["orders"]}, {}, 400, "invalid_value"),
    ("POST", "/v1/groups/new/members", {"topics": ["orders", "nope"]}, {}, 404, "unknown_topic"),
    ("POST", "/v1/groups/new/members", {"topics": []}, {}, 400, "invalid_value"),
    ("POST", "/v1/groups/new/members", {"topics": ["orders"], "session_timeout": 0.1}, {}, 400, "invalid_value"),
    ("POST", "/v1/groups/new/members", {"topics": ["orders"], "name": "a/b"}, {}, 400, "invalid_value"),
    ("POST", "/v1/groups/new/members", {"topics": ["orders"], "name": ".."}, {}, 400, "invalid_value"),
    ("POST", "/v1/groups/new/members", {"topics": ["orders"], "session_timeout": 1e300}, {}, 400, "invalid_value"),
    ("POST", "/v1/groups/new/members", {"topics": ["orders"], "weight": 0}, {}, 400, "invalid_value"),
    ("POST", "/v1/groups/new/members", {"topics": ["orders"], "weight": 10**30}, {}, 400, "invalid_value"),
    (
        "POST",
        "/v1/groups/new/members",
        {"topics": ["orders"], "partitions": ["orders/99"]},
        {},
        400,
        "partition_out_of_range",
    ),
    ("POST", "/v1/groups/new/members", {"topics": ["orders"], "partitions": ["x"]}, {}, 400, "invalid_value"),
    ("POST", "/v1/groups/billing/members", {"topics": ["orders"], "name": "m1"}, {}, 409, "member_exists"),
    ("POST", "/v1/groups/billing/members/m1/heartbeat", {"epoch": 1}, {}, 409, "fenced"),
    ("POST", "/v1/groups/billing/members/nobody/heartbeat", {"epoch": 2**80}, {}, 409, "fenced"),
    ("POST", "/v1/groups/billing/members/m1/commit", {"epoch": 1, "positions": {}}, {}, 409, "fenced"),
    ("POST", "/v1/groups/billing/members/m1/release", {"epoch": 1, "partitions": {}}, {}, 409, "fenced"),
    ("DELETE", "/v1/groups/billing/members/m1", None, {"epoch": 1}, 409, "fenced"),
    ("GET", "/v1/groups/billing/members/m1", None, {}, 400, "invalid_value"),
    ("GET", "/v1/groups/billing/partitions/orders/0/records", None, {"offset": 0, "owner": 1}, 409, "fenced"),
    ("GET", "/v1/groups/billing/partitions/orders/0/records", None, {"offset": "x", "owner": 1}, 400, "invalid_value"),
    (
        "GET",
        "/v1/groups/billing/partitions/orders/0/records",
        None,
        {"offset": 0, "owner": 1, "wait_seconds": "nan"},
        400,
        "invalid_value",
    ),
    ("POST", "/v1/groups/billing/partitions/orders/0/fence", {"epoch": 1}, {}, 409, "fenced"),
    ("POST", "/v1/groups/billing/partitions/orders/0/fence", {"epoch": -1}, {}, 400, "invalid_value"),
    (
        "POST",
        "/v1/groups/billing/failures",
        {"failures": [{"partition": "orders/0", "epoch": 1, "offset": 0, "reason": "x"}]},
        {},
        409,
        "fenced",
    ),
    ("GET", "/v1/groups/billing/dead", None, {"topic": "nope"}, 404, "unknown_topic"),
    ("POST", "/v1/groups/billing/dead/redrive", {"topic": "orders", "ids": "a"}, {}, 400, "invalid_value"),
    ("GET", "/v1/audit", None, {"limit": 0}, 400, "invalid_value"),
    ("GET", "/v1/audit", None, {"before": 10**30}, 400, "invalid_value"),
    ("GET", "/v1/audit", None, {"before": -(10**30)}, 400, "invalid_value"),
    ("GET", "/nothing/here", None, {}, 404, "not_found"),
    ("PUT", "/v1/topics", {"name": "new"}, {}, 405, "method_not_allowed"),
]


@pytest.mark.parametrize("engine", BROKERS)
def test_invalid_requests_get_a_code_and_a_message_and_change_nothing(engine: str, tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await cluster.publish("one", partition=0)
        async with cluster.consumer("m1", session_timeout=60.0) as consumer:
            await cluster.until(lambda: Partition("orders", 0) in consumer.owned)
            batch = await anext(aiter(consumer))
            await batch.commit()
            for topic in ("orders", "billing.orders.retry"):
                await cluster.until_shared(4, topic=topic)
            before = await everything(cluster)
            for method, path, content, query, status, code in BAD:
                media, body = content if isinstance(content, tuple) else (JSON, None)
                request = None if isinstance(content, tuple) else content
                response = await cluster.request(method, path, request, body=body, media=media, **query)
                what = f"{method} {path} {str(content)[:200]} {str(query)[:100]}: {response.body[:300]!r}"
                assert (response.status, response.code) == (status, code), what
                assert await everything(cluster) == before, what

    run(scenario, tmp_path, engine=engine)


def test_a_stale_owner_can_neither_commit_fail_nor_publish_and_nobody_commits_beyond_the_end() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.publish("one")
        async with cluster.consumer("m1") as consumer:
            await cluster.until(lambda: consumer.owned)
            row = (await cluster.rows())[0]
            life, owned = consumer.member.identity.epoch, row["epoch"]
            epoch = (await cluster.log.topic("orders")).epoch
            commit = "/v1/groups/billing/members/m1/commit"

            def positions(owner: int, offset: int) -> dict[str, Any]:
                return {"epoch": life, "positions": {"orders/0": [owner, epoch, offset]}}

            stale = await cluster.request("POST", commit, positions(owned - 1, 1))
            beyond = await cluster.request("POST", commit, positions(owned, 2))
            negative = await cluster.request("POST", commit, positions(owned, -1))
            assert (stale.status, stale.code) == (409, "fenced")
            assert (beyond.status, beyond.code) == (409, "commit_beyond")
            assert (negative.status, negative.code) == (400, "invalid_value")
            assert (await cluster.rows())[0]["committed"] is None
            assert (await cluster.request("POST", commit, positions(owned, 1))).status == 204
            behind = await cluster.request("POST", commit, positions(owned, 0))
            assert (behind.status, behind.code) == (409, "commit_behind")
            assert (await cluster.rows())[0]["committed"] == 1
            fence = {"fence": "billing/orders/0", "owner": owned - 1, "partition": 0}
            refused = await cluster.request("POST", RECORDS, {"value": "late"}, **fence)
            assert (refused.status, refused.code) == (409, "fenced")
            await cluster.do("POST", RECORDS, {"value": "in time"}, **{**fence, "owner": owned})
            assert [r.value for r in (await cluster.records())[0]] == [b"one", b"in time"]

    run(scenario)


def test_a_body_that_is_too_large_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_BODY_BYTES", 100_000)

    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        before = await cluster.count()
        response = await cluster.request("POST", RECORDS, {"value": "x" * 200_000})
        assert (response.status, response.code) == (413, "too_large")

        async def endless() -> Any:  # without a length
            for _ in range(30):
                yield b" " * 10_000

        async with (
            aiohttp.ClientSession() as session,
            session.post(cluster.urls[0] + RECORDS, data=endless()) as answer,
        ):
            refused = Response(answer.status, await answer.read(), None)
        assert (refused.status, refused.code) == (413, "too_large")
        assert await cluster.count() == before
        await cluster.publish("fits")

    run(scenario)


def test_a_body_of_many_megabytes_gets_a_response_and_not_a_broken_connection() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        response = await cluster.request("POST", RECORDS, body=b" " * (MAX_BODY_BYTES + 1))
        assert (response.status, response.code) == (413, "too_large")

    run(scenario)


def test_only_health_checks_work_without_the_token_and_a_topic_can_have_a_token_for_publishers() -> None:
    async def scenario(cluster: Cluster) -> None:
        for method, path in (
            ("GET", "/v1/topics"),
            ("POST", "/v1/topics"),
            ("GET", "/v1/groups"),
            ("GET", "/v1/audit"),
            ("POST", RECORDS),
            ("GET", RECORDS),
            ("POST", "/v1/groups/g/members"),
        ):
            for wrong in (None, "another token"):
                response = await cluster.request(
                    method, path, {"value": "x"} if method == "POST" else None, token=wrong
                )
                assert (response.status, response.code) == (401, "wrong_token"), path
                assert response.headers["WWW-Authenticate"] == "Bearer"
        assert (await cluster.get("/healthz")) == {"alive": True}
        assert (await cluster.get("/readyz"))["ready"] is True

        admin = {"token": "the broker's"}
        await cluster.do("POST", "/v1/topics", {"name": "orders", "partitions": 1}, **admin)
        await cluster.do("POST", RECORDS, {"value": "by the admin"}, **admin)
        await cluster.do("PATCH", "/v1/topics/orders", {"token": "of-publishers"}, **admin)
        described = await cluster.get("/v1/topics/orders", **admin)
        assert described["token"] is True
        assert "of-publishers" not in str(described)
        for wrong in (None, "the broker's", "of publisher"):
            response = await cluster.request("POST", RECORDS, {"value": "x"}, token=wrong)
            assert (response.status, response.code) == (401, "wrong_token")
        await cluster.do("POST", RECORDS, {"value": "by a publisher"}, token="of-publishers")
        assert (await cluster.request("GET", RECORDS, token="of-publishers")).status == 401
        await cluster.do("PATCH", "/v1/topics/orders", {"token": None}, **admin)
        assert [r.value for r in (await cluster.records())[0]] == [b"by the admin", b"by a publisher"]

    run(scenario, token="the broker's")


# Topics


@pytest.mark.parametrize("engine", BROKERS)
def test_a_topic_is_created_described_expanded_configured_and_deleted(engine: str, tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2, retention_ms=60_000)
        await cluster.publish("a", "b", "c", partition=1)
        response = await cluster.get("/v1/topics/orders")
        assert (response["partitions"], response["receiving"], response["retention_ms"]) == (2, 2, 60_000)
        assert response["spans"] == [{"first": 0, "end": 0}, {"first": 0, "end": end(cluster.log, 3)}]
        assert "orders" in [topic["name"] for topic in await cluster.get("/v1/topics")]
        assert (await cluster.do("POST", "/v1/topics/orders/expand", {"partitions": 5}))["partitions"] == 5
        await cluster.publish("d", partition=4)
        changed = await cluster.do(
            "PATCH", "/v1/topics/orders", {"retention_bytes": 1_000_000, "records_per_second": 50}
        )
        assert (changed["retention_ms"], changed["retention_bytes"], changed["records_per_second"]) == (
            60_000,
            1_000_000,
            50,
        )
        await cluster.do("PATCH", "/v1/topics/orders", {"token": "of-publishers"})
        await cluster.do("DELETE", "/v1/topics/orders", token="of-publishers")
        assert (await cluster.request("GET", "/v1/topics/orders")).code == "unknown_topic"
        await cluster.topic(partitions=1)
        again = await cluster.get("/v1/topics/orders")
        assert (again["spans"], again["token"], again["records_per_second"]) == ([{"first": 0, "end": 0}], False, None)
        await cluster.publish("e")

    run(scenario, tmp_path, engine=engine)


@pytest.fixture
def frequent_janitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers drop drained partitions soon."""
    monkeypatch.setattr("shardyard.queues.broker.Janitor", functools.partial(Janitor, every=0.1))


@pytest.mark.usefixtures("frequent_janitor")
@pytest.mark.parametrize("engine", BROKERS)
def test_a_contracted_topic_takes_records_on_the_remaining_partitions_and_drains_the_others(
    engine: str, tmp_path: Path
) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=6)
        handled = Handled()
        sent = [f"{i}" for i in range(200)]
        async with cluster.producer() as producer:
            await asyncio.gather(*(producer.send("orders", value, key=value) for value in sent[:100]))
            response = await cluster.do("POST", "/v1/topics/orders/contract", {"partitions": 2})
            assert (response["partitions"], response["receiving"]) == (6, 2)
            assert await drop_drained_partitions(cluster) == []
            assert (await cluster.get("/v1/topics/orders"))["partitions"] == 6, "nobody has read it"
            refused = await cluster.request("POST", RECORDS, {"value": "x"}, partition=5)
            assert (refused.status, refused.code) == (409, "partition_draining")
            async with handled.at_work(cluster.consumer("m1")), handled.at_work(cluster.consumer("m2")):
                await asyncio.gather(*(producer.send("orders", value, key=value) for value in sent[100:]))

                async def gone() -> bool:
                    return bool((await cluster.get("/v1/topics/orders"))["partitions"] == 2)

                await cluster.until(gone)
                await producer.send("orders", "last")
                await cluster.until(lambda: "last" in handled.values)
                await cluster.until_shared(1, 1)
        assert sorted(handled.values) == sorted([*sent, "last"])

    run(scenario, tmp_path, engine=engine)


@pytest.mark.usefixtures("frequent_janitor")
@pytest.mark.parametrize("engine", BROKERS)
def test_a_draining_partition_waits_for_a_group_that_is_offline(engine: str, tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        on, off = Handled(), Handled()
        async with off.at_work(cluster.consumer("m1", "off")):
            await cluster.publish("a", partition=0)
            await cluster.until_done("off")
        await cluster.do("POST", "/v1/topics/orders/expand", {"partitions": 3})
        await cluster.publish("b", "c", partition=2)
        async with on.at_work(cluster.consumer("m1", "on")):
            response = await cluster.do("POST", "/v1/topics/orders/contract", {"partitions": 2})
            assert [row["partition"] for row in response["draining"]] == [2]
            assert response["draining"][0]["waiting_for"]["off"] == 2
            await cluster.until_done("on")
            assert await drop_drained_partitions(cluster) == []
            shown = await cluster.get("/v1/topics/orders")
            assert (shown["partitions"], shown["draining"]) == (
                3,
                [{"partition": 2, "records": 2, "waiting_for": {"off": 2}, "drained": False}],
            )
            async with off.at_work(cluster.consumer("m1", "off")):

                async def gone() -> bool:
                    shown = await cluster.get("/v1/topics/orders")
                    return (shown["partitions"], shown["draining"]) == (2, [])

                await cluster.until(gone)
        assert sorted(off.values) == sorted(on.values) == ["a", "b", "c"]
        (row,) = [row for row in await cluster.get("/v1/audit") if row["action"] == "partitions dropped"]
        assert (row["who"], row["subject"], row["detail"]) == ("broker", "orders", {"partitions": [2], "records": 2})

    run(scenario, tmp_path, engine=engine)


@pytest.mark.usefixtures("frequent_janitor")
def test_a_reset_to_the_end_lets_a_draining_partition_be_dropped() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        async with Handled().at_work(cluster.consumer("m1")):
            await cluster.publish("a")
            await cluster.until_done()
        await cluster.do("POST", "/v1/topics/orders/expand", {"partitions": 2})
        await cluster.publish("b", partition=1)
        response = await cluster.do("POST", "/v1/topics/orders/contract", {"partitions": 1})
        assert response["draining"] == [{"partition": 1, "records": 1, "waiting_for": {"billing": 1}, "drained": False}]
        request = {"topic": "orders", "to": "latest", "partitions": [1]}
        assert await cluster.do("POST", "/v1/groups/billing/reset", request) == {"orders/1": 1}

        async def gone() -> bool:
            return bool((await cluster.get("/v1/topics/orders"))["partitions"] == 1)

        await cluster.until(gone)

    run(scenario)


@pytest.mark.usefixtures("frequent_janitor")
def test_groups_with_positions_on_deleted_partitions_and_topics_are_listed() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=4)
        await cluster.topic("mails", partitions=1)
        await cluster.publish("a", partition=0)
        async with cluster.consumer("m1", "eu"):
            await cluster.until_shared(4, group="eu")
        with cluster.registry.transaction() as tx:
            tx.put_ownerships([OwnershipRow("eu", Partition("mails", 0)), OwnershipRow("eu", Partition("fax", 0))])
        await cluster.do("POST", "/v1/topics/orders/contract", {"partitions": 1})

        async def gone() -> bool:
            return bool((await cluster.get("/v1/topics/orders"))["partitions"] == 1)

        await cluster.until(gone)
        await cluster.do("POST", "/v1/topics/orders/expand", {"partitions": 2})
        await cluster.do("DELETE", "/v1/topics/mails")
        assert {"group": "eu", "members": 0, "lag": 1} in await cluster.get("/v1/groups")
        rows = (await cluster.get("/v1/groups/eu"))["partitions"]
        assert [f"{row['topic']}/{row['partition']}" for row in rows if "retry" not in row["topic"]] == [
            "orders/0",
            "orders/1",
        ]

    run(scenario)


def test_a_reset_of_a_topic_skips_partitions_that_are_dropped_meanwhile() -> None:
    class Dropping(MemoryLog):
        """The draining partitions are dropped when one of them is looked at."""

        async def span(self, partition: Partition) -> Span:
            if partition.index == 1:
                await self.drop_partitions("orders", 1)
            return await super().span(partition)

    async def resolved(partitions: list[int] | None) -> list[Partition]:
        async with Dropping() as log:
            await log.create_topic("orders", 2)
            await log.contract_topic("orders", 1)
            return list(await resolve_positions(log, "orders", partitions, ResetTarget("latest")))

    assert asyncio.run(resolved(None)) == [Partition("orders", 0)]
    with pytest.raises(PartitionOutOfRange):
        asyncio.run(resolved([1]))


def test_a_topic_with_subscribers_is_deleted_only_by_force_and_they_survive_it() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        handled = Handled()
        async with handled.at_work(cluster.consumer("m1")):
            await cluster.until_shared(2)
            refused = await cluster.request("DELETE", "/v1/topics/orders")
            assert (refused.status, refused.code) == (409, "topic_in_use")
            assert refused.json["error"]["fields"]["groups"] == ["billing"]
            await cluster.publish("old")
            await cluster.until(lambda: handled.values == ["old"])
            await cluster.do("DELETE", "/v1/topics/orders", force=True)
            await cluster.topic(partitions=2)
            await cluster.publish("new")
            await cluster.until(lambda: handled.values == ["old", "new"])
        await cluster.do("DELETE", "/v1/topics/orders")

    run(scenario)


def test_a_topic_is_in_use_by_subscribers_of_a_topic_that_moved_there() -> None:
    async def scenario(cluster: Cluster) -> None:
        for name in ("orders", "orders-2", "orders-3", "other"):
            await cluster.topic(name, partitions=1)
        async with cluster.consumer("m1"):
            await move(cluster.log, "orders", "orders-2")
            await move(cluster.log, "orders-2", "orders-3")
            for name in ("orders", "orders-2", "orders-3"):
                refused = await cluster.request("DELETE", f"/v1/topics/{name}")
                assert (refused.status, refused.code) == (409, "topic_in_use"), name
                assert refused.json["error"]["fields"]["groups"] == ["billing"]
            await cluster.do("DELETE", "/v1/topics/other")

    run(scenario)


@pytest.mark.parametrize(
    ("trusted", "who"),
    [
        ((), "127.0.0.1"),
        (("10.0.0.9",), "127.0.0.1"),
        (("10.0.0.9", "127.0.0.1"), "10.0.0.7"),
        (("127.1.0.0/16",), "127.0.0.1"),
        (("127.0.0.0/16",), "10.0.0.7"),
        (("0.0.0.0/0",), "10.0.0.7"),
    ],
)
def test_only_trusted_proxies_can_set_the_address_of_a_caller(trusted: tuple[str, ...], who: str) -> None:
    async def scenario() -> None:
        async with MemoryLog() as log:
            with MemoryRegistry() as registry:
                async with serving(log, registry, port=0, trusted_proxies=trusted) as server:
                    listening = server.config.bind_socket()
                    listening.listen()
                    work = asyncio.create_task(server.serve([listening]))
                    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/topics"
                    headers, topic = {"X-Forwarded-For": "10.0.0.7"}, {"name": "orders", "partitions": 1}
                    async with (
                        aiohttp.ClientSession(headers=headers) as session,
                        session.post(url, json=topic) as answer,
                    ):
                        assert answer.status == 201
                    server.should_exit = True
                    await work
                with registry.snapshot() as tx:
                    assert [row.who for row in tx.audit_log(10) if row.action == "topic created"] == [who]

    asyncio.run(scenario())


# Groups


def test_two_consumers_have_three_partitions_each_and_three_have_two_and_only_what_must_move_moves(
    tmp_path: Path,
) -> None:
    """The pictures of seed 001."""

    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=6)
        async with cluster.consumer("c1"), cluster.consumer("c2"):
            two = await cluster.until_shared(3, 3)
            async with cluster.consumer("c3"):
                three = await cluster.until_shared(2, 2, 2)
                moved = {p for p in two if two[p] != three[p]}
                assert len(moved) == 2
                assert {three[p] for p in moved} == {"c3"}
                retries = await cluster.until_shared(2, 1, 1, topic="billing.orders.retry")
                assert len(retries) == 4, "balanced apart from the others"
                epochs = {p: row["epoch"] for p, row in (await cluster.rows()).items()}
            again = await cluster.until_shared(3, 3)
            assert {p for p in three if three[p] != again[p]} == {p for p, owner in three.items() if owner == "c3"}
            stayed = {p for p, owner in three.items() if owner != "c3"}
            after = await cluster.rows()
            assert {p: after[p]["epoch"] for p in stayed} == {p: epochs[p] for p in stayed}, "they never paused"

    run(scenario, tmp_path)


def test_twenty_consumers_that_join_at_once_have_a_fair_share_and_each_record_is_handled() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=30)
        sent = [f"{i}" for i in range(300)]
        await cluster.publish(*sent)
        handled = Handled()
        async with contextlib.AsyncExitStack() as stack:
            members = [handled.at_work(cluster.consumer(f"m{i}", session_timeout=10.0)) for i in range(20)]
            await asyncio.gather(*(stack.enter_async_context(member) for member in members))
            await cluster.until_shared(*[1] * 10, *[2] * 10)
            await cluster.until_done()
        assert set(handled.values) == set(sent)
        committed = [row["committed"] for row in (await cluster.rows()).values()]
        assert committed == [10] * 30

    run(scenario)


def test_a_group_shows_the_seeds_table_and_its_members() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        await cluster.publish("a", "b", "c", partition=0)
        async with cluster.consumer("m1", max_records=1) as consumer:
            await cluster.until_shared(2)
            async for batch in consumer:
                await batch.commit()
                break
            response = await cluster.get("/v1/groups/billing")
            (row,) = [r for r in response["partitions"] if (r["topic"], r["partition"]) == ("orders", 0)]
            shown = {name: row[name] for name in ("group", "owner", "next_owner", "committed", "end", "lag")}
            expected = {"group": "billing", "owner": "m1", "next_owner": None, "committed": 1, "end": 3, "lag": 2}
            assert shown == expected
            assert row["epoch"] > 0
            (member,) = response["members"]
            assert (member["member"], member["standby"], member["session_timeout"]) == ("m1", False, 2.0)
            assert member["topics"] == ["billing.orders.retry", "orders"]
            (listed,) = [g for g in await cluster.get("/v1/groups") if g["group"] == "billing"]
            assert listed == {"group": "billing", "members": 1, "lag": 2}
        await cluster.set(paused=True)
        await cluster.do("DELETE", "/v1/groups/billing")
        assert (await cluster.request("GET", "/v1/groups/billing")).code == "unknown_group"
        async with cluster.consumer("m1") as consumer:
            assert consumer.settings.paused is False, "another group of that name starts with the defaults"

    run(scenario)


def test_a_long_poll_for_changes_of_a_group_returns_at_once_when_it_changes() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        async with cluster.consumer("m1"):
            await cluster.until_shared(1)
            seen, before = "", None
            while seen != before:  # until the first member's share is settled
                before, response = seen, await cluster.get("/v1/groups/billing/changes", seen=seen, wait_seconds=0.5)
                seen = response["version"]
            waiting = asyncio.create_task(cluster.get("/v1/groups/billing/changes", seen=seen, wait_seconds=15))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            async with cluster.consumer("m2"):
                response = await asyncio.wait_for(waiting, 12)
                assert response["version"] != seen

    run(scenario)


def test_a_long_poll_for_changes_of_a_member_ignores_those_of_others() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        path = "/v1/groups/billing/changes"
        async with cluster.consumer("m1"):
            await cluster.until_shared(1)
            seen = (await cluster.get(path, member="m1"))["version"]
            waiting = asyncio.create_task(cluster.get(path, member="m1", seen=seen, wait_seconds=15))
            before = (await cluster.get(path))["version"]
            async with cluster.consumer("m2"):
                assert (await cluster.get(path, seen=before, wait_seconds=5))["version"] != before
                assert not waiting.done()
                await cluster.do("POST", "/v1/topics/orders/expand", {"partitions": 4})
                assert (await asyncio.wait_for(waiting, 12))["version"] != seen

    run(scenario)


# Looking


@pytest.mark.parametrize("engine", BROKERS)
def test_records_can_be_inspected_and_searched_without_being_a_member(engine: str, tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        records = [
            {
                "value": "one",
                "key": "k",
                "id": "r1",
                "trace": "t1",
                "tag": "red",
                "headers": {"x": "y"},
                "timestamp": 10,
            },
            {"value_base64": "/w==", "id": "r2", "trace": "t1", "timestamp": 20},
            {"value": "three", "id": "r3", "key_base64": "/g==", "timestamp": 30},
        ]
        await cluster.do("POST", RECORDS, {"records": records}, partition=1)
        response = await cluster.get(RECORDS, partition=1)
        shown = [
            {name: value for name, value in record.items() if name not in ("partition", "offset")}
            for record in response["records"]
        ]
        assert shown == records
        places = [("orders/1", at(cluster.log, i)) for i in range(3)]
        assert [(r["partition"], r["offset"]) for r in response["records"]] == places
        assert (response["first"], response["end"]) == (0, end(cluster.log, 3))
        assert [r["id"] for r in (await cluster.get(RECORDS, partition=1, limit=2))["records"]] == ["r2", "r3"]
        assert [
            r["id"] for r in (await cluster.get(RECORDS, partition=1, offset=at(cluster.log, 1), limit=1))["records"]
        ] == ["r2"]
        assert (await cluster.get(RECORDS, partition=0))["records"] == []

        async def ids(**query: Any) -> list[str]:
            return [record["id"] for record in await cluster.get("/v1/topics/orders/search", **query)]

        assert await ids(id="r2") == ["r2"]
        assert await ids(key="k") == ["r1"]
        assert await ids(trace="t1") == ["r1", "r2"]
        assert await ids(since=20, until=30) == ["r2"]
        assert await ids(trace="t1", limit=1) == ["r2"]
        assert await ids(trace="t1", partition=0) == []
        (found,) = await cluster.get("/v1/topics/orders/search", id="r3")
        assert (found["partition"], found["offset"]) == places[2]

    run(scenario, tmp_path, engine=engine)


WITHOUT_BODY = ("/purge", "/rebalance")
"""The name says all that there is to say."""


def test_the_description_of_the_api_is_complete() -> None:
    async def scenario(cluster: Cluster) -> None:
        response = await cluster.get("/openapi.json")
        text = msgspec.json.encode(response).decode()
        refs = set(re.findall(r'"\$ref":"#/components/schemas/([^"]+)"', text))
        assert refs
        assert refs <= set(response["components"]["schemas"])
        assert len(re.findall(r'"\$ref"', text)) == len(re.findall(r'"\$ref":"#/components/schemas/', text))
        paths = response["paths"]
        for path, calls in paths.items():
            for method, call in calls.items():
                assert call["description"], f"{method} {path}"
                if method in ("post", "patch") and not path.endswith(WITHOUT_BODY):
                    assert "requestBody" in call, f"{method} {path}"
        assert {"/v1/topics/{topic}/records", "/v1/groups/{group}/members", "/v1/audit"} <= set(paths)
        published = paths["/v1/topics/{topic}/records"]["post"]["requestBody"]["content"]
        assert set(published) == set(MEDIA_TYPES)
        page = await cluster.request("GET", "/docs")
        assert page.status == 200

    run(scenario)


def test_a_broker_that_stops_answers_waiting_reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardyard.client.remote.LEAVE_SECONDS", 0.1)  # there is no broker then

    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        async with cluster.consumer("m1") as consumer:
            await cluster.until(lambda: consumer.owned)
            owner = (await cluster.rows())[0]["epoch"]
            query = {"offset": 0, "owner": owner, "wait_seconds": 30}
            waiting = asyncio.create_task(
                cluster.request("GET", "/v1/groups/billing/partitions/orders/0/records", **query)
            )
            await asyncio.sleep(0.2)
            assert not waiting.done()
            began = asyncio.get_running_loop().time()
            cluster.stop(0)
            response = await waiting
            assert response.status == 200
            assert response.json["records"] == []
            assert asyncio.get_running_loop().time() - began < 4

    run(scenario)


def test_a_reader_in_json_gets_what_an_owner_reads() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.log.append(Partition("orders", 0), [Record("a", b"\xff", b"text", (("tag", b"red"),), 7)])
        async with running(cluster.consumer("m1"), lambda _: None):
            await cluster.until_done()
            owner = (await cluster.rows())[0]["epoch"]
            response = await cluster.get("/v1/groups/billing/partitions/orders/0/records", offset=0, owner=owner)
            (record,) = response["records"]
            assert record == {
                "id": "a",
                "key_base64": "/w==",
                "value": "text",
                "tag": "red",
                "timestamp": 7,
                "partition": "orders/0",
                "offset": 0,
            }

    run(scenario)


def test_a_broker_goes_by_the_clock_it_is_given() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        async with MemoryLog() as log:
            with MemoryRegistry() as registry:
                async with Broker(log, registry, clock=clock) as broker:
                    assert broker.node.clock is clock
                    settings = TopicSettings(records_per_second=10)
                    broker.take_quota("orders", 10, settings)
                    with pytest.raises(OverQuota):
                        broker.take_quota("orders", 10, settings)
                    await clock.advance(1.0)
                    broker.take_quota("orders", 10, settings)

    asyncio.run(scenario())


def test_settings_are_read_once_and_again_as_soon_as_they_have_changed() -> None:
    async def scenario() -> None:
        async with MemoryLog() as log:
            with MemoryRegistry() as registry:
                async with Broker(log, registry) as broker, Broker(log, registry) as other:
                    await broker.settings.topic("orders")  # by now it watches
                    before = await broker.settings.topic("orders")
                    assert before.records_per_second is None
                    assert await broker.settings.topic("orders") is before, "from memory"
                    waiting = asyncio.create_task(broker.settings.until_changed(asyncio.Event().wait()))
                    await asyncio.sleep(0)
                    await other.node.transactions.run(
                        lambda tx: change_topic(tx, "orders", "ann", {"records_per_second": 7})
                    )
                    async with asyncio.timeout(60):
                        assert await waiting is None
                    assert (await broker.settings.topic("orders")).records_per_second == 7

    asyncio.run(scenario())
