"""Settings of topics and groups take effect while consumers run."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from shardyard.client import Message
from shardyard.groups import GroupConfig, configure, protocol
from shardyard.groups.broadcast import groups_of
from shardyard.groups.config import config_of
from shardyard.model import Headers, InvalidValue, Partition
from shardyard.queues.settings import (
    NAME,
    TopicSettings,
    change_group,
    change_topic,
    group_settings,
    topic_settings,
)
from shardyard.registry import Registry
from shardyard.registry.memory import MemoryRegistry
from shardyard.wire import errors
from shardyard.wire.headers import PUBLISHED
from shardyard.wire.settings import GroupSettings
from tests.queues.engines import BROKERS
from tests.queues.setup import Cluster, Handled, run, running
from tests.queues.stored import offsets

RECORDS = "/v1/topics/orders/records"
MEMBERS = "/v1/groups/billing/members"


def set_group(registry: Registry, **changes: Any) -> GroupSettings:
    return registry.run(lambda tx: change_group(tx, "g", "ann", changes))


def set_topic(registry: Registry, **changes: Any) -> TopicSettings:
    return registry.run(lambda tx: change_topic(tx, "orders", "ann", changes))


def settings_of(registry: Registry, group: str = "g") -> GroupSettings:
    return registry.read(lambda tx: group_settings(tx, group))


def config(registry: Registry, group: str = "g") -> GroupConfig | None:
    row = registry.read(lambda tx: tx.group(group))
    return None if row is None else config_of(row)


def test_a_change_leaves_other_settings_and_an_invalid_one_changes_nothing() -> None:
    with MemoryRegistry() as registry:
        assert settings_of(registry) == GroupSettings()
        set_group(registry, tags=["red"], max_active=2)
        changed = set_group(registry, concurrency=3)
        assert (changed.tags, changed.max_active, changed.concurrency) == (("red",), 2, 3)
        wrongs: list[dict[str, Any]] = [{"colour": 1}, {"max_active": 0}, {"max_active": 2**31}, {"lag_alarm": 10**30}]
        wrongs += [{"tags": "red"}, {"assignor": "unfair"}, {"backoff": [0]}]
        for wrong in wrongs:
            with pytest.raises(InvalidValue):
                set_group(registry, **wrong)
        assert settings_of(registry) == changed
        assert config(registry) == GroupConfig(max_active=2, release_after=60.0)


def test_what_the_rebalancer_needs_is_stored_with_the_group_only() -> None:
    with MemoryRegistry() as registry:
        changed = set_group(registry, assignor="even", max_active=2, release_after=None, broadcast=True, tags=["red"])
        assert config(registry) == GroupConfig("even", 2, None, broadcast=True)
        row = registry.read(lambda tx: tx.setting("group/g", NAME))
        assert row is not None
        assert isinstance(row.value, dict)
        names = {"assignor", "max_active", "release_after", "broadcast"}
        assert row.value.keys() == set(GroupSettings.__struct_fields__) - names
        assert settings_of(registry) == settings_of(registry, "g~m1") == changed
        registry.run(lambda tx: configure(tx, "g", GroupConfig("sticky", 5, 7.0, broadcast=True), who="bob"))
        assert settings_of(registry) == structs.replace(changed, assignor="sticky", max_active=5, release_after=7.0)


def test_settings_that_were_stored_before_the_group_had_its_configuration_are_read() -> None:
    with MemoryRegistry() as registry:
        stored = {"concurrency": 3, "assignor": "even", "max_active": 2, "release_after": 1.0, "broadcast": True}
        registry.run(lambda tx: tx.put_setting("group/g", NAME, stored))
        assert settings_of(registry) == GroupSettings(concurrency=3)


def test_a_group_that_the_library_created_shows_its_own_configuration() -> None:
    with MemoryRegistry() as registry:
        registry.run(lambda tx: protocol.join(tx, "g", "m1", topics=["orders"]))
        assert settings_of(registry) == GroupSettings(release_after=None)
        assert set_group(registry, concurrency=3) == GroupSettings(release_after=None, concurrency=3)
        assert config(registry) == GroupConfig()


def test_only_the_hash_of_a_token_is_stored() -> None:
    with MemoryRegistry() as registry:
        changed = set_topic(registry, token="open-sesame")
        assert changed.admits("open-sesame")
        assert not changed.admits("open-sesam")
        assert not changed.admits(None)
        assert registry.read(lambda tx: topic_settings(tx, "orders")) == changed
        assert "sesame" not in registry.read(lambda tx: repr((tx.settings("topic/orders"), tx.audit_log(100))))
        assert set_topic(registry, token=None).admits(None)


@pytest.mark.parametrize("token", ["", "short", "open sesame", "öffne-dich", "open-sesame\n", "open\tsesame", 12345678])
def test_a_token_that_not_every_publisher_could_send_is_refused(token: object) -> None:
    with MemoryRegistry() as registry:
        with pytest.raises(
            InvalidValue, match=r"token is '\*\*\*': expected at least 8 ASCII characters without spaces"
        ):
            set_topic(registry, token=token)
        assert registry.read(lambda tx: topic_settings(tx, "orders")).admits(None)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"concurrency": 0}, "concurrency is 0"),
        ({"webhook": "gopher://ann:sesame@hooks.example"}, "webhook is '***'"),
        ({"webhooks": "https://ann:sesame@hooks.example"}, "setting is 'webhooks'"),
    ],
)
def test_a_refusal_does_not_reveal_the_webhook(wrong: dict[str, Any], says: str) -> None:
    with MemoryRegistry() as registry:
        with pytest.raises(InvalidValue, match=f"^{re.escape(says)}: expected ") as refused:
            set_group(registry, **{"webhook": "https://ann:sesame@hooks.example", **wrong})
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
def test_a_refusal_names_the_setting_its_value_and_what_is_expected(name: str, value: Any, expected: str) -> None:
    with MemoryRegistry() as registry, pytest.raises(InvalidValue) as refused:
        set_group(registry, **{"tags": ["red"], name: value})
    assert str(refused.value) == str(InvalidValue(name, value, expected))
    assert (refused.value.name, refused.value.value, refused.value.expected) == (name, value, expected)


@pytest.mark.parametrize(
    ("name", "near"),
    [("concurency", "concurrency"), ("MAX_RECORDS", "max_records"), ("max-active", "max_active"), ("colour", None)],
)
def test_an_unknown_setting_is_refused_with_all_names_and_the_likely_one(name: str, near: str | None) -> None:
    with MemoryRegistry() as registry, pytest.raises(InvalidValue) as refused:
        set_group(registry, **{name: 1})
    hint = "" if near is None else f" (did you mean {near}?)"
    every = ", ".join(GroupSettings.__struct_fields__)
    assert str(refused.value) == f"setting is {name!r}: expected one of {every}{hint}"


def test_a_group_with_settings_is_not_joined_until_it_had_a_member() -> None:
    async def joined(cluster: Cluster, group: str = "billing") -> Any:
        return (await cluster.get(f"/v1/groups/{group}"))["joined"]

    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.set(concurrency=2)
        assert await joined(cluster) is False
        await cluster.do("POST", "/v1/groups/billing/reset", {"topic": "orders", "to": "earliest"})
        assert await joined(cluster) is False, "a reset is no member"
        async with cluster.consumer("m1"):
            assert await joined(cluster) is True
            await cluster.until_shared(1)
        assert await joined(cluster) is True, "it has left"
        await cluster.do("PATCH", "/v1/groups/all", {"broadcast": True})
        assert await joined(cluster, "all") is False
        async with cluster.consumer("m1", group="all"):
            assert await joined(cluster, "all") is True
        async with cluster.consumer("m1", group="unset"):
            pass
        assert await joined(cluster, "unset") is True

    run(scenario)


def test_lists_match_the_member_or_the_host_and_deny_wins() -> None:
    lists = GroupSettings(allow=("web-*", "10.0.0.*"), deny=("web-13",))
    assert lists.admits("web-1", "192.168.0.1")
    assert lists.admits("other", "10.0.0.7")
    assert not lists.admits("other", "10.0.1.7")
    assert not lists.admits("web-13", "10.0.0.7")
    assert GroupSettings(deny=("x",)).admits("y", "h")


@pytest.mark.parametrize("engine", BROKERS)
def test_a_group_or_one_partition_pauses_and_resumes(engine: str, tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        handled = Handled()
        async with handled.at_work(cluster.consumer("m1")):
            await cluster.until_shared(2)
            await cluster.set(paused_partitions=["orders/1"])
            await cluster.publish("a1", partition=1)
            await cluster.publish("a0", partition=0)
            await cluster.until(lambda: handled.values == ["a0"])
            await cluster.set(paused=True)
            others = Handled()
            async with others.at_work(cluster.consumer("m2", group="not-paused")):
                await cluster.publish("b0", partition=0)
                await cluster.until(lambda: "b0" in others.values)
            assert handled.values == ["a0"]
            await cluster.set(paused=False)
            await cluster.until(lambda: handled.values == ["a0", "b0"])
            await cluster.set(paused_partitions=[])
            await cluster.until(lambda: handled.values == ["a0", "b0", "a1"])
            await cluster.until_done()

    run(scenario, tmp_path, engine=engine)


def test_only_records_with_the_tags_of_the_group_are_delivered_and_commits_skip_the_others() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.set(tags=["red", "blue"])
        tags = ["green", "red", None, "green", "blue", "green", "green"]
        records = [{"value": f"{i}{tag}", **({} if tag is None else {"tag": tag})} for i, tag in enumerate(tags)]
        await cluster.do("POST", RECORDS, {"records": records})
        handled = Handled()
        async with handled.at_work(cluster.consumer("m1")):
            await cluster.until_done()
            assert handled.values == ["1red", "4blue"]
            assert (await cluster.rows())[0]["committed"] == (await cluster.log.span(Partition("orders", 0))).end
            await cluster.do("POST", RECORDS, {"value": "alone", "tag": "green"})
            await cluster.until_done()
            await cluster.set(tags=[])
            await cluster.do("POST", RECORDS, {"value": "any"})
            await cluster.until(lambda: handled.values == ["1red", "4blue", "any"])

    run(scenario)


def test_lists_refuse_members_and_evict_those_that_have_joined() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        async with cluster.consumer("good"), cluster.consumer("bad", session_timeout=1.0) as bad:
            await cluster.until_shared(1, 1)
            await cluster.set(deny=["bad*"])
            assert set((await cluster.until_shared(2)).values()) == {"good"}
            assert bad.owned == set()
            assert (
                await cluster.request("POST", MEMBERS, {"topics": ["orders"], "name": "bad-2"})
            ).code == "not_allowed"
        await cluster.set(deny=[], allow=["127.0.0.*"])
        async with cluster.consumer("anybody"):
            pass
        await cluster.set(allow=["10.*", "web-?"])
        assert (await cluster.request("POST", MEMBERS, {"topics": ["orders"], "name": "m1"})).code == "not_allowed"
        async with cluster.consumer("web-1"):
            await cluster.until_shared(2)

    run(scenario)


def test_a_worker_that_is_not_allowed_waits_says_so_and_works_again_when_it_is_allowed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        handled = Handled()
        async with handled.at_work(cluster.consumer("running", session_timeout=1.0)):
            await cluster.until_shared(2)
            await cluster.set(allow=["nobody"])
            await cluster.until(lambda: caplog.text.count("'running' is not allowed in group 'billing'") == 1)
            starting = asyncio.create_task(cluster.consumer("starting").__aenter__())
            await cluster.until(lambda: "'starting' is not allowed in group 'billing'" in caplog.text)
            await cluster.publish("1", "2")
            assert handled.values == []
            await cluster.set(allow=None)
            await cluster.until_shared(1, 1)
            await (await starting).__aexit__(None, None, None)
            await cluster.until_done()
        assert sorted(handled.values) == ["1", "2"]
        waits = [record.getMessage() for record in caplog.records if "waiting" in record.getMessage()]
        assert len(waits) == 2, "each says it once"
        assert caplog.text.count("'running' is not allowed") == 1

    run(scenario)


def test_null_takes_a_list_away_as_it_does_any_other_setting() -> None:
    async def scenario(cluster: Cluster) -> None:
        names = ("tags", "allow", "deny", "paused_partitions", "backoff", "lag_alarm", "max_active", "release_after")
        await cluster.set(tags=["eu"], allow=["a"], deny=["b"], paused_partitions=["orders/0"], lag_alarm=5)
        settings = await cluster.do("PATCH", "/v1/groups/billing", dict.fromkeys(names))
        assert {name: settings[name] for name in names} == {
            **{name: [] for name in names[:5]},
            **dict.fromkeys(names[5:]),
        }
        refused = await cluster.request("PATCH", "/v1/groups/billing", {"concurrency": None})
        assert refused.json["error"]["message"].startswith("concurrency is missing: expected an integer")

    run(scenario)


def test_standby_members_get_nothing_until_an_active_one_leaves() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=4)
        await cluster.set(max_active=1)
        async with cluster.consumer("m2"):
            async with cluster.consumer("m1"):
                active = set((await cluster.until_shared(4)).values())
                members = (await cluster.get("/v1/groups/billing"))["members"]
                standby = {member["member"] for member in members if member["standby"]}
                assert active | standby == {"m1", "m2"}
                assert len(standby) == 1
                await cluster.set(max_active=2)
                await cluster.until_shared(2, 2)
                await cluster.set(max_active=1)
                await cluster.until_shared(4)
            assert set((await cluster.until_shared(4)).values()) == {"m2"}

    run(scenario)


def test_each_member_of_a_broadcast_group_gets_every_record_and_continues_under_its_name() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        await cluster.set(broadcast=True)
        await cluster.publish("a", "b")
        handled = Handled()
        async with handled.at_work(cluster.consumer("m1")), handled.at_work(cluster.consumer("m2")):
            await cluster.until(lambda: sorted(handled.values) == ["a", "a", "b", "b"])
            assert sorted(handled.by("m1")) == ["a", "b"]

            async def committed() -> bool:
                rows = (await cluster.get("/v1/groups/billing"))["partitions"]
                return len(rows) == 4 and all(row["lag"] == 0 for row in rows)

            await cluster.until(committed)
            refused = await cluster.request("PATCH", "/v1/groups/billing", {"broadcast": False})
            assert (refused.status, refused.code) == (400, "invalid_value")
            await cluster.set(release_after=30.0)
            rows = cluster.registry.read(lambda tx: [tx.group(name) for name in groups_of(tx, "billing")])
            assert [(row.name, row.release_after) for row in rows if row is not None] == [
                ("billing", 30.0),
                ("billing~m1", 30.0),
                ("billing~m2", 30.0),
            ]
        await cluster.publish("c")
        async with handled.at_work(cluster.consumer("m1")):
            await cluster.until(lambda: "c" in handled.values)
            assert sorted(handled.by("m1")) == ["a", "b", "c"]
            assert sorted(handled.by("m2")) == ["a", "b"]
            (listed,) = [g for g in await cluster.get("/v1/groups") if g["group"] == "billing"]
            assert listed["members"] == 1
            handled.all.clear()
            await cluster.do("POST", "/v1/groups/billing/reset", {"topic": "orders", "to": "earliest"})
            await cluster.until(lambda: sorted(handled.by("m1")) == ["a", "b", "c"])
        await cluster.do("DELETE", "/v1/groups/billing")
        await cluster.topic("other")
        await cluster.set(broadcast=False)

    run(scenario)


def test_a_record_that_fails_in_a_broadcast_group_is_a_dead_letter_of_the_group() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.set(broadcast=True)
        await cluster.publish("a")

        async def handle(_: Message) -> None:
            raise ValueError("no")

        async with running(cluster.consumer("m1"), handle):

            async def dead() -> list[dict[str, Any]]:
                letters: list[dict[str, Any]] = await cluster.get("/v1/groups/billing/dead?topic=orders")
                return letters

            await cluster.until(dead)
            assert [letter["reason"] for letter in await dead()] == ["ValueError: no"]

    run(scenario)


def test_concurrency_and_the_handler_timeout_are_changed_while_handlers_run() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.set(concurrency=2, backoff=[])
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

        await cluster.publish(*[f"{i}" for i in range(12)])
        async with running(cluster.consumer("m1", session_timeout=1.0), handle) as consumer:
            await cluster.until(lambda: at_once == 2)
            await cluster.set(concurrency=5)
            await cluster.until(lambda: at_once == 5)
            assert most == 5
            await cluster.set(concurrency=1, handler_seconds=0.3)
            may_end.set()
            await cluster.until_done()
            await cluster.until(lambda: consumer.settings.handler_seconds == 0.3)
            may_end.clear()
            most = 0
            await cluster.publish("slow", "slow too")

            async def dead() -> bool:
                return len(await cluster.get("/v1/groups/billing/dead", topic="orders")) == 2

            await cluster.until(dead)
            assert most == 1
            letters = await cluster.get("/v1/groups/billing/dead", topic="orders")
            assert {letter["reason"] for letter in letters} == {"not done after 0.3 s"}

    run(scenario)


def test_records_of_a_handler_that_hangs_go_to_another_member() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        await cluster.set(release_after=1.0)
        handled = Handled()
        hung: list[str] = []

        async def hang(message: Message) -> None:
            hung.append(message.value.decode())
            await asyncio.Event().wait()

        consumer = cluster.consumer("stuck", session_timeout=1.0)
        async with running(consumer, hang):
            await cluster.until_shared(2)
            await cluster.publish("x", partition=0)
            await cluster.until(lambda: hung == ["x"])
            async with handled.at_work(cluster.consumer("fine", session_timeout=1.0)):
                await cluster.until(lambda: "x" in handled.values)
                audit = await cluster.get("/v1/audit")
                assert any(row["action"] == "member evicted" and row["subject"] == "billing" for row in audit)

    run(scenario)


@pytest.mark.parametrize("engine", BROKERS)
def test_failed_records_are_retried_die_and_are_redriven(engine: str, tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        await cluster.set(backoff=[0.1, 0.2])
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

        async with running(cluster.consumer("m1"), handle):
            await cluster.do("POST", RECORDS, {"records": [{"value": v, "key": "k", "id": v} for v in ("bad", "good")]})
            await cluster.until(lambda: handled == ["good"])

            async def dead() -> list[Any]:
                found: list[Any] = await cluster.get("/v1/groups/billing/dead", topic="orders")
                return found

            await cluster.until(dead)
            assert attempts == [1, 2, 3]
            (letter,) = await dead()
            assert (letter["reason"], letter["attempts"]) == ("RuntimeError: no luck", 3)
            assert letter["record"]["value"] == "bad"
            assert letter["origin"].startswith("orders/")
            (sent,) = await cluster.get("/v1/topics/orders/search", id=letter["record"]["id"])
            assert letter["published"] == sent["timestamp"] < letter["died_at"]
            assert not [name for headers in seen for name, _ in headers if name == PUBLISHED], "handlers do not see it"
            assert letter["record"]["partition"].startswith("billing.orders.dead/")

            redrive = "/v1/groups/billing/dead/redrive"
            some = {"topic": "orders", "ids": ["another", letter["record"]["id"]]}
            refused = await cluster.request("POST", redrive, some)
            assert (refused.status, refused.code) == (400, "invalid_value")
            assert "ids is ['another']" in refused.json["error"]["message"]
            assert await dead() == [letter]
            assert "dead letters re-driven" not in [row["action"] for row in await cluster.get("/v1/audit")]
            broken = False
            assert await cluster.do("POST", redrive, {"topic": "orders"}) == {"redriven": 1}
            await cluster.until(lambda: handled == ["good", "bad"])
            assert await dead() == []
            await cluster.until_done(topic="billing.orders.retry")

    run(scenario, tmp_path, engine=engine)


def test_a_reset_takes_effect_while_consumers_run() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        records = [{"value": f"{i}", "timestamp": 1000 + i} for i in range(10)]
        await cluster.do("POST", RECORDS, {"records": records}, partition=0)
        handled = Handled()
        reset = "/v1/groups/billing/reset"
        async with handled.at_work(cluster.consumer("m1")):
            await cluster.until_done()
            assert handled.values == [f"{i}" for i in range(10)]

            async def again(**to: Any) -> list[str]:
                handled.all.clear()
                await cluster.do("POST", reset, {"topic": "orders", **to})
                await cluster.publish("end", partition=0)
                await cluster.until(lambda: "end" in handled.values)
                await cluster.until_done()
                return [value for value in handled.values if value != "end"]

            assert await again(to="earliest") == [f"{i}" for i in range(10)]
            seventh = (await offsets(cluster.log, Partition("orders", 0)))[7]
            assert await again(to="offset", value=seventh, partitions=[0]) == ["7", "8", "9"]
            assert await again(to="time", value=1004) == [f"{i}" for i in range(4, 10)]
            assert await again(to="latest") == []

    run(scenario)


@pytest.mark.parametrize("is_repeated", [True, False])
def test_settings_that_an_interrupted_deletion_left_do_not_apply_to_a_new_topic(is_repeated: bool) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await cluster.do("PATCH", "/v1/topics/orders", {"token": "open-sesame", "records_per_second": 5})
        await cluster.log.delete_topic("orders")  # a broker died before it deleted the settings, too
        if is_repeated:
            assert (await cluster.do("DELETE", "/v1/topics/orders"))["topic"] == "orders"
            assert (await cluster.request("DELETE", "/v1/topics/orders")).code == "unknown_topic"
        await cluster.topic()
        described = await cluster.get("/v1/topics/orders")
        assert (described["token"], described["records_per_second"]) == (False, None)
        await cluster.publish("a")
        audited = [(row["action"], row["subject"]) for row in await cluster.get("/v1/audit")]
        assert ("topic deleted", "orders") in audited

    run(scenario)


def test_creating_a_topic_that_exists_leaves_its_settings() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic()
        await cluster.do("PATCH", "/v1/topics/orders", {"records_per_second": 5})
        assert (await cluster.request("POST", "/v1/topics", {"name": "orders", "partitions": 1})).code == "topic_exists"
        assert (await cluster.get("/v1/topics/orders"))["records_per_second"] == 5

    run(scenario)


def test_the_audit_log_has_every_change_and_no_secret() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        await cluster.do("POST", "/v1/topics/orders/expand", {"partitions": 4})
        await cluster.do("PATCH", "/v1/topics/orders", {"token": "open-sesame", "retention_ms": 1_000_000})
        await cluster.do("PATCH", "/v1/topics/orders", {"token": None}, token="open-sesame")
        await cluster.set(paused=True, webhook="https://hooks.example/sesame")
        async with cluster.consumer("m1"):
            await cluster.do("POST", "/v1/groups/billing/reset", {"topic": "orders", "to": "latest"})
        await cluster.do("POST", "/v1/groups/billing/dead/redrive", {"topic": "orders"})
        await cluster.do("POST", "/v1/topics/orders/contract", {"partitions": 1})
        await cluster.do("DELETE", "/v1/topics/orders")
        await cluster.do("DELETE", "/v1/groups/billing")
        rows = await cluster.get("/v1/audit")
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
        (paged,) = await cluster.get("/v1/audit", limit=1, before=newest["number"])
        assert paged == second

    run(scenario)


def test_each_change_of_settings_is_audited_once_with_the_new_values() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        for changes in (
            {"token": "open-sesame", "retention_ms": 1_000_000},
            {"token": None},
            {"records_per_second": 5, "retention_bytes": None},
            {"retention_bytes": 7_000},
        ):
            await cluster.do("PATCH", "/v1/topics/orders", changes, token="open-sesame")
        refused = await cluster.request("PATCH", "/v1/topics/orders", {"token": "short", "retention_ms": 5})
        assert refused.code == "invalid_value"
        assert (await cluster.get("/v1/topics/orders"))["retention_ms"] == 1_000_000, "a refused call changes nothing"
        await cluster.set(assignor="even", max_active=2, webhook="https://hooks.example/sesame")
        await cluster.set(webhook=None)
        await cluster.do("DELETE", "/v1/groups/billing")
        rows = (await cluster.get("/v1/audit"))[::-1]
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

    run(scenario)


def test_settings_reach_consumers_through_another_broker() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        async with cluster.consumer("m1", session_timeout=1.0) as consumer:
            assert consumer.settings.concurrency == 16
            await cluster.do("PATCH", "/v1/groups/billing", {"concurrency": 3, "paused": True}, broker=1)
            await cluster.until(lambda: consumer.settings.concurrency == 3)
            await cluster.until(lambda: Partition("orders", 0) in consumer.owned)

    run(scenario, brokers=2)
