"""Calls of members on a WebSocket connection, and requests that are tunnelled through one."""

from typing import Any

import msgspec
import pytest

from shardyard.model import TopicKind
from shardyard.runtime.metrics import CALLS, COMMITS, DELIVERED_RECORDS, HEARTBEATS, REQUESTS
from shardyard.server.queues import calls
from shardyard.wire import frames, requests
from shardyard.wire.responses import Joined
from tests.server.websockets import Client, Running, publish, read, run


def heartbeat(member: Joined, seen: str = "") -> frames.Heartbeat:
    return frames.Heartbeat(member.group, member.member, requests.Heartbeat(member.epoch), seen)


def watch(member: Joined) -> frames.Watch:
    return frames.Watch(member.group, member.member, member.epoch)


def test_a_heartbeat_returns_settings_that_the_member_has_not_seen() -> None:
    async def scenario(running: Running) -> None:
        client, other = await running.connect(), await running.connect()
        member = await client.join("worker-1")
        before = HEARTBEATS.value
        first = await client.result(1, heartbeat(member))
        assert first["settings"]["concurrency"] == 16
        assert await client.result(2, heartbeat(member, first["version"])) is None
        assert await other.result(1, heartbeat(member, first["version"])) is None
        assert HEARTBEATS.value == before + 3
        await other.request(2, "PATCH", "/v1/groups/billing", {"concurrency": 7, "webhook": "http://secret"})
        changed = await client.result(3, heartbeat(member, first["version"]))
        while changed is None:  # it is signalled to the broker
            changed = await client.result(3, heartbeat(member, first["version"]))
        assert (changed["settings"]["concurrency"], changed["settings"]["webhook"]) == (7, None)
        assert await client.result(4, heartbeat(member, first["version"])) == changed, "until the member has seen it"
        assert await client.result(5, heartbeat(member, changed["version"])) is None

    run(scenario)


def test_a_heartbeat_of_a_member_that_is_gone_fails() -> None:
    async def scenario(running: Running) -> None:
        client = await running.connect()
        member = await client.join("worker-1")
        where = f"/v1/groups/billing/members/{member.member}"
        await client.request(1, "DELETE", where, epoch=str(member.epoch))
        await client.send((1, heartbeat(member)), (2, frames.Commit("billing", "worker-1", requests.Commit(1, {}))))
        assert [await client.code(1), await client.code(2)] == ["fenced", "fenced"]

    run(scenario)


def test_a_heartbeat_is_checked_also_when_the_settings_of_the_group_are_known() -> None:
    async def scenario(running: Running) -> None:
        client = await running.connect()
        member = await client.join("worker-1")
        version = (await client.result(1, heartbeat(member)))["version"]
        count = CALLS.series("heartbeat").value
        assert await client.result(2, heartbeat(member, version)) is None
        assert CALLS.series("heartbeat").value == count + 1
        nowhere = frames.Heartbeat("billing", "worker-1", requests.Heartbeat(member.epoch, ["orders"]), version)
        await client.send((3, nowhere))
        assert await client.code(3) == "invalid_value"
        where = f"/v1/groups/billing/members/{member.member}"
        await client.request(4, "DELETE", where, epoch=str(member.epoch))
        await client.send((5, heartbeat(member, version)))
        assert await client.code(5) == "fenced"
        await client.join("worker-1")
        assert await client.result(5, frames.Span("orders/0")), "its number is free again"

    run(scenario)


def test_a_watch_tells_at_once_and_after_each_change_that_concerns_the_member() -> None:
    async def scenario(running: Running) -> None:
        await running.log.create_topic("pictures", 2)
        client, other = await running.connect(), await running.connect()
        member = await client.join("worker-1", "viewers", "pictures")
        assert len(await client.owned(member, 2)) == 2
        assert await client.call(1, watch(member)) == frames.CHANGED
        second = await other.join("worker-2", "viewers", "pictures")
        assert await client.answer(1) == frames.CHANGED, "a partition is revoked"
        where = f"/v1/groups/viewers/members/{member.member}"
        shown = (await client.request(2, "GET", where, epoch=str(member.epoch)))["partitions"]
        revoked = {name: grant["epoch"] for name, grant in shown.items() if grant["revoked"]}
        assert sorted(revoked) == ["pictures/1", "viewers.pictures.retry/1"]
        assert await other.call(1, watch(second)) == frames.CHANGED
        await client.request(3, "POST", f"{where}/release", {"epoch": member.epoch, "partitions": revoked})
        assert await other.answer(1) == frames.CHANGED, "it got the partition"
        assert (await other.owned(second))["pictures/1"] > revoked["pictures/1"]

    run(scenario)


def test_a_watch_does_not_tell_of_changes_that_do_not_concern_the_member() -> None:
    async def scenario(running: Running) -> None:
        client, other = await running.connect(), await running.connect()
        member = await client.join("worker-1")
        epoch = (await client.owned(member))["orders/0"]
        await client.send((1, watch(member)))
        assert await client.answer(1) == frames.CHANGED
        elsewhere = await other.join("worker-1", "another-group")
        await other.owned(elsewhere)
        standby = await other.join("worker-2")  # there is no partition for it
        await other.result(1, heartbeat(standby))
        await other.request(2, "DELETE", "/v1/groups/billing/members/worker-2", epoch=str(standby.epoch))
        await client.result(2, publish("a"))
        positions = {"orders/0": (epoch, (await running.log.topic("orders")).epoch, 1)}
        commit = frames.Commit("billing", "worker-1", requests.Commit(member.epoch, positions))
        await client.result(3, commit)
        for number in range(10, 30):
            await client.result(number, heartbeat(member))
        assert client.others == []

    run(scenario)


def test_the_owner_of_a_partition_reads_what_is_published_and_commits_it() -> None:
    async def scenario(running: Running) -> None:
        client, other = await running.connect(), await running.connect()
        member = await client.join("worker-1")
        epoch = (await client.owned(member))["orders/0"]
        assert await client.result(1, frames.Fence("billing", "orders/0", epoch)) is None
        before = DELIVERED_RECORDS.value, CALLS.series("read").value
        await client.send((2, read(epoch)))
        stored = (await other.result(1, publish("a", "b")))["stored"][0]
        answer = await client.answer(2)
        assert isinstance(answer, frames.Result)
        batch = msgspec.msgpack.decode(answer.body)
        assert (batch["epoch"], batch["first"], batch["end"]) == (stored["epoch"], 0, 2)
        assert batch["columns"]["ids"] == ["a", "b"]
        assert (DELIVERED_RECORDS.value, CALLS.series("read").value) == (before[0] + 2, before[1] + 1)
        body = requests.Commit(member.epoch, {"orders/0": (epoch, stored["epoch"], 2)})
        assert await client.result(3, frames.Commit("billing", "worker-1", body)) is None
        shown = await client.request(4, "GET", "/v1/groups/billing")
        assert [row["lag"] for row in shown["partitions"] if row["topic"] == "orders"] == [0]
        assert await client.result(5, frames.Span("orders/0")) == {"epoch": stored["epoch"], "first": 0, "end": 2}
        assert (await client.result(6, read(epoch, 2, wait_seconds=0.01)))["columns"]["ids"] == []
        await client.send(
            (7, read(epoch + 1)),
            (8, frames.Fence("billing", "orders/0", epoch - 1)),
            (9, frames.Span("nope/0")),
            (10, frames.Span("orders")),
        )
        codes = [await client.code(number) for number in range(7, 11)]
        assert codes == ["fenced", "fenced", "unknown_topic", "invalid_value"]

    run(scenario)


def test_a_commit_is_checked_whether_or_not_it_takes_a_look_at_the_log() -> None:
    async def scenario(running: Running) -> None:
        client = await running.connect()
        member = await client.join("worker-1")
        epoch = (await client.owned(member))["orders/0"]
        stored = (await client.result(1, publish("a", "b")))["stored"][0]

        def commit(offset: int, owned: int = epoch, partition: str = "orders/0") -> frames.Commit:
            body = requests.Commit(member.epoch, {partition: (owned, stored["epoch"], offset)})
            return frames.Commit("billing", "worker-1", body)

        before = COMMITS.value, CALLS.series("commit").value
        assert await client.result(2, commit(1)) is None, "nobody has read it through this broker yet"
        await client.result(3, read(epoch))
        assert await client.result(4, commit(2)) is None
        await client.send((5, commit(2, epoch + 1)), (6, commit(3)), (7, commit(2, partition="orders")))
        assert [await client.code(number) for number in (5, 6, 7)] == ["fenced", "commit_beyond", "invalid_value"]
        assert (COMMITS.value, CALLS.series("commit").value) == (before[0] + 2, before[1] + 5)

    run(scenario)


def test_a_commit_of_what_was_read_here_needs_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise AssertionError("it was carried out by a task")

    async def scenario(running: Running) -> None:
        client = await running.connect()
        member = await client.join("worker-1")
        epoch = (await client.owned(member))["orders/0"]
        stored = (await client.result(1, publish("a")))["stored"][0]
        await client.result(2, read(epoch))
        monkeypatch.setattr(calls, "commit", fail)
        body = requests.Commit(member.epoch, {"orders/0": (epoch, stored["epoch"], 1)})
        assert await client.result(3, frames.Commit("billing", "worker-1", body)) is None

    run(scenario)


# Requests


async def audited(client: Client) -> str:
    """Who made the last administrative change, as the audit log has it."""
    who: str = (await client.request(999, "GET", "/v1/audit"))[-1]["who"]
    return who


def test_a_tunnelled_request_has_the_address_and_the_token_of_its_connection() -> None:
    async def scenario(running: Running) -> None:
        client = await running.connect("the-broker's")
        body = msgspec.json.encode({"name": "pictures", "partitions": 1})
        forged = {
            "X-Forwarded-For": "6.6.6.6",
            "x-forwarded-for": "7.7.7.7",
            "Authorization": "Bearer wrong",
            "X-Shardyard-User": "ann",
        }
        made = await client.call(1, frames.Request("POST", "/v1/topics", {}, forged, body))
        assert isinstance(made, frames.Response)
        assert made.status == 201
        assert await audited(client) == "ann@127.0.0.1"
        route = REQUESTS.series("/v1/topics/{name}", "200")
        before = route.value
        await client.request(2, "GET", "/v1/topics/pictures")
        assert route.value == before + 1

    run(scenario, token="the-broker's")
    run(scenario, token="the-broker's", trusted_proxies=["127.0.0.1"])


def test_a_tunnelled_deletion_of_a_group_requires_the_token_of_the_topic_from_its_connection() -> None:
    async def scenario(running: Running) -> None:
        owner = await running.connect("of-publishers")
        await owner.request(1, "POST", "/v1/topics", {"name": "pictures", "partitions": 1})
        await owner.request(2, "PATCH", "/v1/topics/pictures", {"token": "of-publishers"})
        await owner.request(3, "PATCH", "/v1/groups/billing", {"paused": True})
        await running.log.create_topic("billing.pictures.retry", 1, kind=TopicKind.RETRY)
        other = await running.connect("another-one")
        forged = {"Authorization": "Bearer of-publishers"}
        refused = await other.call(4, frames.Request("DELETE", "/v1/groups/billing", {}, forged, b""))
        assert isinstance(refused, frames.Response)
        assert refused.status == 401
        assert msgspec.json.decode(refused.body)["error"]["code"] == "wrong_token"
        assert (await owner.request(5, "DELETE", "/v1/groups/billing"))["also_deleted"] == ["billing.pictures.retry"]

    run(scenario)


def test_a_tunnelled_request_of_a_client_behind_a_proxy_has_the_address_that_the_proxy_gave() -> None:
    async def scenario(running: Running) -> None:
        headers = {"X-Forwarded-For": "9.9.9.9", "X-Shardyard-User": "bob"}
        client = await running.connect(headers=headers)
        await client.request(1, "POST", "/v1/topics", {"name": "pictures", "partitions": 1})
        assert await audited(client) == "bob@9.9.9.9"
        await client.request(2, "PATCH", "/v1/groups/billing", {"deny": ["9.9.9.*"]})
        await client.send((3, frames.Request("POST", "/v1/groups/billing/members", {}, {}, b'{"topics": ["orders"]}')))
        refused = await client.answer(3)
        assert isinstance(refused, frames.Response)
        assert refused.status == 403

    run(scenario, trusted_proxies=["127.0.0.1"])


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (frames.Request("GET", "/v1/topics/orders"), 200),
        (frames.Request("GET", "/v1/topics/%6frders"), 200),
        (frames.Request("GET", "/v1/topics/a%2Fb"), 404),
        (frames.Request("GET", "/v1/nothing"), 404),
        (frames.Request("GET", frames.PATH), 426),
        (frames.Request("DELETE", "/v1/topics"), 405),
        (frames.Request("POST", "/v1/topics", body=b"{"), 400),
        (frames.Request("POST", "/v1/topics", headers={"content-length": str(2**40)}), 413),
        (frames.Request("GET", "/v1/topics/orders/records", {"offset": "0", "limit": "&=?"}), 400),
        (frames.Request("", ""), 404),
    ],
)
def test_a_request_is_answered_as_over_http(request_: frames.Request, status: int) -> None:
    async def scenario(running: Running) -> None:
        client = await running.connect()
        answer = await client.call(1, request_)
        assert isinstance(answer, frames.Response)
        assert answer.status == status, answer.body

    run(scenario)


def test_a_call_that_fails_unexpectedly_is_answered_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(running: Running) -> None:
        async def fail(*_: Any) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(calls, "set_fence", fail)
        client = await running.connect()
        await client.send((1, frames.Fence("billing", "orders/0", 1)))
        assert await client.code(1) == "internal_error"
        assert await client.call(2, frames.Request("GET", "/healthz")) == frames.Response(200, b'{"alive":true}')

    run(scenario)
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["a bug"]
