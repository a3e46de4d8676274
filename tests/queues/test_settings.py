"""What is set on the server takes effect while consumers run."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from shardyard.client import Message
from shardyard.groups.broadcast import groups_of
from shardyard.model import Headers, InvalidValue, NotAllowed, Partition
from shardyard.queues.settings import change_group, change_topic, group_settings, topic_settings
from shardyard.registry.memory import MemoryRegistry
from shardyard.wire import errors
from shardyard.wire.headers import PUBLISHED
from shardyard.wire.settings import GroupSettings
from tests.queues.setup import Handled, Yard, running, tell

RECORDS = "/v1/topics/orders/records"


def test_changes_leave_the_rest_as_it_is_and_wrong_ones_change_nothing() -> None:
    with MemoryRegistry() as registry, registry.transaction() as tx:
        assert group_settings(tx, "g") == GroupSettings()
        change_group(tx, "g", "ann", {"tags": ["red"], "max_active": 2})
        changed = change_group(tx, "g", "ann", {"concurrency": 3})
        assert (changed.tags, changed.max_active, changed.concurrency) == (("red",), 2, 3)
        wrongs: list[dict[str, Any]] = [{"colour": 1}, {"max_active": 0}, {"max_active": 2**31}, {"lag_alarm": 10**30}]
        wrongs += [{"tags": "red"}, {"assignor": "unfair"}, {"backoff": [0]}]
        for wrong in wrongs:
            with pytest.raises(InvalidValue):
                change_group(tx, "g", "ann", wrong)
        assert group_settings(tx, "g") == changed
        row = tx.group("g")
        assert row is not None
        assert (row.max_active, row.release_after) == (2, 60.0)


def test_a_token_is_kept_as_its_hash_only() -> None:
    with MemoryRegistry() as registry, registry.transaction() as tx:
        changed = change_topic(tx, "orders", "ann", {"token": "open-sesame"})
        assert changed.admits("open-sesame")
        assert not changed.admits("open-sesam")
        assert not changed.admits(None)
        assert topic_settings(tx, "orders") == changed
        assert "sesame" not in repr((tx.settings("topic/orders"), tx.audit_log(100)))
        assert change_topic(tx, "orders", "ann", {"token": None}).admits(None)


@pytest.mark.parametrize("token", ["", "short", "open sesame", "öffne-dich", "open-sesame\n", "open\tsesame", 12345678])
def test_a_token_that_not_every_publisher_could_show_is_refused(token: object) -> None:
    with MemoryRegistry() as registry, registry.transaction() as tx:
        with pytest.raises(
            InvalidValue, match=r"token is '\*\*\*': expected at least 8 ASCII characters without spaces"
        ):
            change_topic(tx, "orders", "ann", {"token": token})
        assert topic_settings(tx, "orders").admits(None)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"concurrency": 0}, "concurrency is 0"),
        ({"webhook": "gopher://ann:sesame@hooks.example"}, "webhook is '***'"),
        ({"webhooks": "https://ann:sesame@hooks.example"}, "setting is 'webhooks'"),
    ],
)
def test_a_refusal_does_not_tell_the_webhook(wrong: dict[str, Any], says: str) -> None:
    with MemoryRegistry() as registry, registry.transaction() as tx:
        with pytest.raises(InvalidValue, match=f"^{re.escape(says)}: expected ") as refused:
            change_group(tx, "g", "ann", {"webhook": "https://ann:sesame@hooks.example", **wrong})
        assert "sesame" not in str(errors.error_body(refused.value))


COUNT = "an integer from 1 to 2147483647"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("concurrency", "abc", COUNT),
        ("concurrency", 0, COUNT),
        ("concurrency", None, COUNT),
        ("max_active", 2**31, f"{COUNT}, or null"),
        ("lag_alarm", 1.5, f"{COUNT}, or null"),
        ("handler_seconds", 0, "a number of more than 0, or null"),
        ("backoff", [1, 0], "a list, each item a number of more than 0"),
        ("backoff", 5, "a list, each item a number of more than 0"),
        ("tags", "red", "a list, each item a string"),
        ("paused", "yes", "true or false"),
        ("paused_partitions", ["orders"], "a list, each item a partition such as orders/3"),
        ("assignor", "unfair", "one of contiguous, even, least_loaded, sticky"),
    ],
)
def test_a_refusal_names_the_setting_what_was_given_and_what_is_expected(name: str, value: Any, expected: str) -> None:
    with MemoryRegistry() as registry, registry.transaction() as tx, pytest.raises(InvalidValue) as refused:
        change_group(tx, "g", "ann", {"tags": ["red"], name: value})
    assert str(refused.value) == f"{name} is {value!r}: expected {expected}"
    assert (refused.value.name, refused.value.value, refused.value.expected) == (name, value, expected)


@pytest.mark.parametrize(
    ("name", "near"),
    [("concurency", "concurrency"), ("MAX_RECORDS", "max_records"), ("max-active", "max_active"), ("colour", None)],
)
def test_an_unknown_setting_is_told_which_there_are_and_which_was_meant(name: str, near: str | None) -> None:
    with MemoryRegistry() as registry, registry.transaction() as tx, pytest.raises(InvalidValue) as refused:
        change_group(tx, "g", "ann", {name: 1})
    hint = "" if near is None else f" (did you mean {near}?)"
    every = ", ".join(GroupSettings.__struct_fields__)
    assert str(refused.value) == f"setting is {name!r}: expected one of {every}{hint}"


def test_a_group_that_is_set_is_not_joined_until_somebody_was_there() -> None:
    async def joined(yard: Yard, group: str = "billing") -> Any:
        return (await yard.get(f"/v1/groups/{group}"))["joined"]

    async def story(yard: Yard) -> None:
        await yard.topic(partitions=1)
        await yard.set(concurrency=2)
        assert await joined(yard) is False
        await yard.do("POST", "/v1/groups/billing/reset", {"topic": "orders", "to": "earliest"})
        assert await joined(yard) is False, "a reset is no member"
        async with yard.consumer("m1"):
            assert await joined(yard) is True
            await yard.until_shared(1)
        assert await joined(yard) is True, "it has left"
        await yard.do("PATCH", "/v1/groups/all", {"broadcast": True})
        assert await joined(yard, "all") is False
        async with yard.consumer("m1", group="all"):
            assert await joined(yard, "all") is True
        async with yard.consumer("m1", group="unset"):
            pass
        assert await joined(yard, "unset") is True

    tell(story)


def test_lists_go_by_member_or_host_and_deny_wins() -> None:
    lists = GroupSettings(allow=("web-*", "10.0.0.*"), deny=("web-13",))
    assert lists.admits("web-1", "192.168.0.1")
    assert lists.admits("other", "10.0.0.7")
    assert not lists.admits("other", "10.0.1.7")
    assert not lists.admits("web-13", "10.0.0.7")
    assert GroupSettings(deny=("x",)).admits("y", "h")


@pytest.mark.parametrize("engine", ["memory", "sqlite"])
def test_a_group_or_one_partition_pauses_and_goes_on(engine: str, tmp_path: Path) -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=2)
        handled = Handled()
        async with handled.at_work(yard.consumer("m1")):
            await yard.until_shared(2)
            await yard.set(paused_partitions=["orders/1"])
            await yard.publish("a1", partition=1)
            await yard.publish("a0", partition=0)
            await yard.until(lambda: handled.values == ["a0"])
            await yard.set(paused=True)
            await yard.publish("b0", partition=0)
            await asyncio.sleep(0.7)
            assert handled.values == ["a0"]
            await yard.set(paused=False)
            await yard.until(lambda: handled.values == ["a0", "b0"])
            await yard.set(paused_partitions=[])
            await yard.until(lambda: handled.values == ["a0", "b0", "a1"])
            await yard.until_done()

    tell(story, tmp_path if engine == "sqlite" else None)


def test_only_records_with_the_groups_tags_leave_the_server_and_commits_get_past_the_others() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=1)
        await yard.set(tags=["red", "blue"])
        tags = ["green", "red", None, "green", "blue", "green", "green"]
        records = [{"value": f"{i}{tag}", **({} if tag is None else {"tag": tag})} for i, tag in enumerate(tags)]
        await yard.do("POST", RECORDS, {"records": records})
        handled = Handled()
        async with handled.at_work(yard.consumer("m1")):
            await yard.until_done()
            assert handled.values == ["1red", "4blue"]
            assert (await yard.rows())[0]["committed"] == 7
            await yard.do("POST", RECORDS, {"value": "alone", "tag": "green"})
            await yard.until_done()
            await yard.set(tags=[])
            await yard.do("POST", RECORDS, {"value": "any"})
            await yard.until(lambda: handled.values == ["1red", "4blue", "any"])

    tell(story)


def test_lists_keep_members_out_and_put_out_who_is_there_already() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=2)
        async with yard.consumer("good"), yard.consumer("bad", session_timeout=1.0) as bad:
            await yard.until_shared(1, 1)
            await yard.set(deny=["bad*"])
            with pytest.raises(NotAllowed, match="'bad' is not allowed"):
                async with asyncio.timeout(10):
                    await anext(aiter(bad))
            assert set((await yard.until_shared(2)).values()) == {"good"}
            with pytest.raises(NotAllowed):
                async with yard.consumer("bad-2"):
                    pass
        await yard.set(deny=[], allow=["127.0.0.*"])
        async with yard.consumer("anybody"):
            pass
        await yard.set(allow=["10.*", "web-?"])
        with pytest.raises(NotAllowed):
            async with yard.consumer("m1"):
                pass
        async with yard.consumer("web-1"):
            await yard.until_shared(2)

    tell(story)


def test_standby_members_get_nothing_until_an_active_one_goes() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=4)
        await yard.set(max_active=1)
        async with yard.consumer("m2"):
            async with yard.consumer("m1"):
                active = set((await yard.until_shared(4)).values())
                told = await yard.get("/v1/groups/billing")
                standby = {m["member"] for m in told["members"] if m["standby"]}
                assert active | standby == {"m1", "m2"}
                assert len(standby) == 1
                await yard.set(max_active=2)
                await yard.until_shared(2, 2)
                await yard.set(max_active=1)
                await yard.until_shared(4)
            assert set((await yard.until_shared(4)).values()) == {"m2"}

    tell(story)


def test_each_member_of_a_broadcast_group_gets_everything_and_goes_on_under_its_name() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=2)
        await yard.set(broadcast=True)
        await yard.publish("a", "b")
        handled = Handled()
        async with handled.at_work(yard.consumer("m1")), handled.at_work(yard.consumer("m2")):
            await yard.until(lambda: sorted(handled.values) == ["a", "a", "b", "b"])
            assert sorted(handled.by("m1")) == ["a", "b"]

            async def committed() -> bool:
                rows = (await yard.get("/v1/groups/billing"))["partitions"]
                return len(rows) == 4 and all(row["lag"] == 0 for row in rows)

            await yard.until(committed)
            refused = await yard.ask("PATCH", "/v1/groups/billing", {"broadcast": False})
            assert (refused.status, refused.code) == (400, "invalid_value")
            await yard.set(release_after=30.0)
            with yard.registry.snapshot() as tx:
                assert groups_of(tx, "billing") == ["billing", "billing~m1", "billing~m2"]
                told = [row.release_after for row in map(tx.group, groups_of(tx, "billing")) if row is not None]
            assert told == [30.0] * 3
        await yard.publish("c")
        async with handled.at_work(yard.consumer("m1")):
            await yard.until(lambda: "c" in handled.values)
            assert sorted(handled.by("m1")) == ["a", "b", "c"]
            assert sorted(handled.by("m2")) == ["a", "b"]
            (listed,) = [g for g in await yard.get("/v1/groups") if g["group"] == "billing"]
            assert listed["members"] == 1
            handled.all.clear()
            await yard.do("POST", "/v1/groups/billing/reset", {"topic": "orders", "to": "earliest"})
            await yard.until(lambda: sorted(handled.by("m1")) == ["a", "b", "c"])
        await yard.do("DELETE", "/v1/groups/billing")
        await yard.topic("other")
        await yard.set(broadcast=False)

    tell(story)


def test_a_record_that_fails_in_a_broadcast_group_is_a_dead_letter_of_the_group() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=1)
        await yard.set(broadcast=True)
        await yard.publish("a")

        async def handle(_: Message) -> None:
            raise ValueError("no")

        async with running(yard.consumer("m1"), handle):

            async def dead() -> bool:
                letters = await yard.get("/v1/groups/billing/dead?topic=orders")
                return [letter["reason"] for letter in letters] == ["ValueError: no"]

            await yard.until(dead)

    tell(story)


def test_concurrency_and_the_time_for_a_record_are_changed_while_handlers_run() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=1)
        await yard.set(concurrency=2, backoff=[])
        at_once = most = 0
        may_end = asyncio.Event()

        async def handle(_: Message) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            try:
                await may_end.wait()
            finally:
                at_once -= 1

        await yard.publish(*[f"{i}" for i in range(12)])
        async with running(yard.consumer("m1", session_timeout=1.0), handle) as consumer:
            await yard.until(lambda: at_once == 2)
            await yard.set(concurrency=5)
            await yard.until(lambda: at_once == 5)
            assert most == 5
            await yard.set(concurrency=1, handler_seconds=0.3)
            may_end.set()
            await yard.until_done()
            await yard.until(lambda: consumer.settings.handler_seconds == 0.3)
            may_end.clear()
            most = 0
            await yard.publish("slow", "slow too")

            async def dead() -> bool:
                return len(await yard.get("/v1/groups/billing/dead", topic="orders")) == 2

            await yard.until(dead)
            assert most == 1
            letters = await yard.get("/v1/groups/billing/dead", topic="orders")
            assert {letter["reason"] for letter in letters} == {"not done after 0.3 s"}

    tell(story)


def test_records_of_a_handler_that_hangs_go_to_another_member() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=2)
        await yard.set(release_after=1.0)
        handled = Handled()
        hung: list[str] = []

        async def hang(message: Message) -> None:
            hung.append(message.value.decode())
            await asyncio.Event().wait()

        consumer = yard.consumer("stuck", session_timeout=1.0)
        async with running(consumer, hang):
            await yard.until_shared(2)
            await yard.publish("x", partition=0)
            await yard.until(lambda: hung == ["x"])
            async with handled.at_work(yard.consumer("fine", session_timeout=1.0)):
                await yard.until(lambda: "x" in handled.values)
                audit = await yard.get("/v1/audit")
                assert any(row["action"] == "member evicted" and row["subject"] == "billing" for row in audit)

    tell(story)


@pytest.mark.parametrize("engine", ["memory", "sqlite"])
def test_failed_records_climb_the_ladder_die_and_are_driven_again(engine: str, tmp_path: Path) -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=2)
        await yard.set(backoff=[0.1, 0.2])
        attempts: list[int] = []
        handled: list[str] = []
        seen: list[Headers] = []
        broken = True

        async def handle(message: Message) -> None:
            if message.value == b"bad" and broken:
                attempts.append(message.attempt)
                seen.append(message.record.headers)
                raise RuntimeError("no luck")
            handled.append(message.value.decode())

        async with running(yard.consumer("m1"), handle):
            await yard.do("POST", RECORDS, {"records": [{"value": v, "key": "k", "id": v} for v in ("bad", "good")]})
            await yard.until(lambda: handled == ["good"])

            async def dead() -> list[Any]:
                found: list[Any] = await yard.get("/v1/groups/billing/dead", topic="orders")
                return found

            await yard.until(dead)
            assert attempts == [1, 2, 3]
            (letter,) = await dead()
            assert (letter["reason"], letter["attempts"]) == ("RuntimeError: no luck", 3)
            assert letter["record"]["value"] == "bad"
            assert letter["origin"].startswith("orders/")
            (sent,) = await yard.get("/v1/topics/orders/search", id=letter["record"]["id"])
            assert letter["published"] == sent["timestamp"] < letter["died_at"]
            assert not [name for headers in seen for name, _ in headers if name == PUBLISHED], "handlers do not see it"
            assert letter["record"]["partition"].startswith("billing.orders.dead/")

            redrive = "/v1/groups/billing/dead/redrive"
            told = await yard.ask("POST", redrive, {"topic": "orders", "ids": ["another", letter["record"]["id"]]})
            assert (told.status, told.code) == (400, "invalid_value")
            assert "ids is ['another']" in told.json["error"]["message"]
            assert await dead() == [letter]
            assert "dead letters re-driven" not in [row["action"] for row in await yard.get("/v1/audit")]
            broken = False
            assert await yard.do("POST", redrive, {"topic": "orders"}) == {"redriven": 1}
            await yard.until(lambda: handled == ["good", "bad"])
            assert await dead() == []
            await yard.until_done(topic="billing.orders.retry")

    tell(story, tmp_path if engine == "sqlite" else None)


def test_a_reset_takes_effect_while_consumers_run() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=2)
        records = [{"value": f"{i}", "timestamp": 1000 + i} for i in range(10)]
        await yard.do("POST", RECORDS, {"records": records}, partition=0)
        handled = Handled()
        reset = "/v1/groups/billing/reset"
        async with handled.at_work(yard.consumer("m1")):
            await yard.until_done()
            assert handled.values == [f"{i}" for i in range(10)]

            async def again(**to: Any) -> list[str]:
                handled.all.clear()
                await yard.do("POST", reset, {"topic": "orders", **to})
                await yard.publish("end", partition=0)
                await yard.until(lambda: "end" in handled.values)
                await yard.until_done()
                return [value for value in handled.values if value != "end"]

            assert await again(to="earliest") == [f"{i}" for i in range(10)]
            assert await again(to="offset", value=7, partitions=[0]) == ["7", "8", "9"]
            assert await again(to="time", value=1004) == [f"{i}" for i in range(4, 10)]
            assert await again(to="latest") == []

    tell(story)


def test_the_audit_has_all_of_it_and_no_secret() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=2)
        await yard.do("POST", "/v1/topics/orders/expand", {"partitions": 4})
        await yard.do("PATCH", "/v1/topics/orders", {"token": "open-sesame", "retention_ms": 1_000_000})
        await yard.do("PATCH", "/v1/topics/orders", {"token": None})
        await yard.set(paused=True, webhook="https://hooks.example/sesame")
        async with yard.consumer("m1"):
            await yard.do("POST", "/v1/groups/billing/reset", {"topic": "orders", "to": "latest"})
        await yard.do("POST", "/v1/groups/billing/dead/redrive", {"topic": "orders"})
        await yard.do("POST", "/v1/topics/orders/contract", {"partitions": 1})
        await yard.do("DELETE", "/v1/topics/orders")
        await yard.do("DELETE", "/v1/groups/billing")
        rows = await yard.get("/v1/audit")
        ours = [(row["action"], row["subject"]) for row in reversed(rows) if row["who"] == "ann@127.0.0.1"]
        for action, subject in (
            ("topic created", "orders"),
            ("topic expanded", "orders"),
            ("topic settings changed", "orders"),
            ("group settings changed", "billing"),
            ("positions reset", "billing"),
            ("dead letters re-driven", "billing"),
            ("topic contracted", "orders"),
            ("topic deleted", "orders"),
            ("group deleted", "billing"),
        ):
            assert (action, subject) in ours
        assert "sesame" not in str(rows)
        assert [row["number"] for row in rows] == sorted((row["number"] for row in rows), reverse=True)
        newest, second = rows[:2]
        (paged,) = await yard.get("/v1/audit", limit=1, before=newest["number"])
        assert paged == second

    tell(story)


def test_each_change_of_settings_is_audited_once_with_what_was_changed_to_what() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=1)
        for changes in (
            {"token": "open-sesame", "retention_ms": 1_000_000},
            {"token": None},
            {"records_per_second": 5, "retention_bytes": None},
            {"retention_bytes": 7_000},
        ):
            await yard.do("PATCH", "/v1/topics/orders", changes)
        told = await yard.ask("PATCH", "/v1/topics/orders", {"token": "short", "retention_ms": 5})
        assert told.code == "invalid_value"
        assert (await yard.get("/v1/topics/orders"))["retention_ms"] == 1_000_000, "what is refused changes nothing"
        await yard.set(assignor="even", max_active=2, webhook="https://hooks.example/sesame")
        await yard.set(webhook=None)
        await yard.do("DELETE", "/v1/groups/billing")
        rows = (await yard.get("/v1/audit"))[::-1]
        assert {row["who"] for row in rows} == {"ann@127.0.0.1"}
        topic, group = ("topic settings changed", "orders"), ("group settings changed", "billing")
        assert [(row["action"], row["subject"], row["detail"]) for row in rows] == [
            ("topic created", "orders", {"partitions": 1}),
            (*topic, {"token": "***", "retention_ms": 1_000_000}),
            (*topic, {"token": None}),
            (*topic, {"records_per_second": 5, "retention_bytes": None}),
            (*topic, {"retention_bytes": 7_000}),
            (*group, {"assignor": "even", "max_active": 2, "webhook": "***"}),
            (*group, {"webhook": None}),
            ("group deleted", "billing", None),
        ]

    tell(story)


def test_settings_reach_consumers_through_another_broker() -> None:
    async def story(yard: Yard) -> None:
        await yard.topic(partitions=1)
        async with yard.consumer("m1", session_timeout=1.0) as consumer:
            assert consumer.settings.concurrency == 16
            await yard.do("PATCH", "/v1/groups/billing", {"concurrency": 3, "paused": True}, broker=1)
            await yard.until(lambda: consumer.settings.concurrency == 3)
            await yard.until(lambda: Partition("orders", 0) in consumer.owned)

    tell(story, brokers=2)
