"""Lag alarms, with a real web server as the webhook."""

import asyncio
import base64
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from shardyard.groups import GroupConfig, configure, reset
from shardyard.log.memory import MemoryLog
from shardyard.model import Busy, Fenced, InvalidValue, Partition, Position, Record
from shardyard.queues import alarms as module
from shardyard.queues.alarms import Alarms
from shardyard.queues.settings import change_group, group_settings
from shardyard.registry import Registry, Snapshot
from shardyard.registry.batcher import TransactionBatcher
from shardyard.registry.memory import MemoryRegistry
from shardyard.runtime.clock import ManualClock
from shardyard.wire.settings import GroupSettings
from tests.queues.engines import ENGINES, REGISTRIES

GROUP, TOPIC = "billing", "orders"
TIMEOUT_SECONDS = 60.0
SECRET = "hunter2"

Scenario = Callable[["Environment"], Coroutine[Any, Any, None]]
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Environment:
    """A log, a registry and a webhook."""

    def __init__(
        self, log: MemoryLog, registry: Registry, transactions: TransactionBatcher, clock: ManualClock
    ) -> None:
        self.log, self.registry, self.clock = log, registry, clock
        self.transactions = transactions
        self.url = ""
        self.posted: list[dict[str, Any]] = []
        self.authorised: list[str | None] = []
        self.answer: Answer | None = None

    async def take(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/fails" and self.answer is not None:
            return await self.answer(request)
        self.posted.append(json.loads(await request.read()))
        self.authorised.append(request.headers.get("Authorization"))
        return web.Response()

    def alarms(self, holder: str = "b1", every: float = 5.0) -> Alarms:
        return Alarms(self.log, self.registry, self.transactions, holder=holder, every=every, clock=self.clock)

    def set(self, group: str = GROUP, **settings: Any) -> None:
        self.registry.run(lambda tx: change_group(tx, group, "ann", settings))

    async def lag(self, *lags: int, group: str = GROUP, topic: str = TOPIC) -> None:
        """Let the group lag that much on each partition."""
        for index, lag in enumerate(lags):
            partition = Partition(topic, index)
            span = await self.log.span(partition)
            if span.end < lag:
                await self.log.append(partition, [Record("r", None, b"")] * (lag - span.end))
            positions = {partition: Position(span.epoch, max(span.end, lag) - lag)}
            self.registry.run(partial(reset, group=group, positions=positions, who="ann"))

    def announced(self) -> list[tuple[str, int]]:
        return [(post["state"], post["lag"]) for post in self.posted]

    def raised(self) -> list[str]:
        return self.registry.read(lambda tx: [row.name for row in tx.settings(module.SCOPE)])

    async def advance_until(self, condition: Callable[[], bool]) -> None:
        """Let time pass until the condition holds. A check runs in threads, so no single event tells of its end."""
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not condition():
                await self.clock.advance(1.0)
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def open_environment(engine: str, folder: Path) -> AsyncIterator[Environment]:
    clock = ManualClock()
    registry = ENGINES[engine].open_registry(folder, clock)
    transactions = TransactionBatcher(registry)
    app = web.Application()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    with registry:
        async with MemoryLog() as log:
            env = Environment(log, registry, transactions, clock)
            app.router.add_route("*", "/{path:.*}", env.take)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            env.url = f"http://127.0.0.1:{runner.addresses[0][1]}/alarms"
            try:
                await log.create_topic(TOPIC, 2)
                yield env
            finally:
                await runner.cleanup()
                transactions.close()


@pytest.fixture(params=REGISTRIES)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], None]:
    """Runs a scenario on a registry."""

    def run_scenario(scenario: Scenario) -> None:
        async def with_environment() -> None:
            async with open_environment(request.param, tmp_path) as env:
                await scenario(env)

        asyncio.run(with_environment())

    return run_scenario


def test_an_alarm_is_raised_once_and_cleared_once(
    run: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(env: Environment) -> None:
        caplog.set_level(logging.INFO, "shardyard")
        env.set(lag_alarm=10, webhook=env.url)
        alarms = env.alarms()
        for first, second in ((0, 0), (5, 4), (6, 4), (20, 30), (4, 5), (4, 4), (10, 0), (4, 3), (0, 0), (0, 11)):
            await env.lag(first, second)
            await alarms.check_once()
        assert env.announced() == [("raised", 10), ("cleared", 7), ("raised", 11)]
        names = {"group": GROUP, "topic": TOPIC, "threshold": 10, "at": env.clock.now()}
        assert env.posted[:2] == [
            {**names, "lag": 10, "state": "raised"},
            {**names, "lag": 7, "state": "cleared"},
        ]
        assert [(r.levelname, r.getMessage()) for r in caplog.records if r.name == module.__name__] == [
            ("WARNING", "group 'billing' is 10 records behind on topic 'orders': its alarm is set to 10"),
            (
                "INFO",
                "group 'billing' has caught up to 7 records behind on topic 'orders': its alarm, set to 10, is cleared",
            ),
            ("WARNING", "group 'billing' is 11 records behind on topic 'orders': its alarm is set to 10"),
        ]

    run(scenario)


def test_each_topic_and_each_group_counts_for_itself(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        await env.log.create_topic("mail", 1)
        env.set(lag_alarm=10, webhook=env.url)
        env.set("audit", lag_alarm=6, webhook=env.url)
        env.set("quiet", webhook=env.url)
        await env.lag(50, 50, group="quiet")
        await env.lag(3, 3, group="audit")
        await env.lag(6, 0)
        await env.lag(9, topic="mail")
        alarms = env.alarms()
        await alarms.check_once()
        assert [(post["group"], post["topic"]) for post in env.posted] == [("audit", TOPIC)]
        await env.lag(10, topic="mail")
        await alarms.check_once()
        assert (env.posted[1]["group"], env.posted[1]["topic"]) == (GROUP, "mail")
        assert env.raised() == ["audit/orders", "billing/mail"]
        await env.log.delete_topic("mail")
        await alarms.check_once()
        assert [(p["group"], p["topic"], p["state"], p["lag"]) for p in env.posted[2:]] == [
            (GROUP, "mail", "cleared", 0)
        ]

    run(scenario)


def test_groups_without_settings_are_not_looked_up_one_by_one(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[str] = []

    def note(tx: Snapshot, group: str) -> GroupSettings:
        looked_up.append(group)
        return group_settings(tx, group)

    monkeypatch.setattr(module, "group_settings", note)

    async def scenario(env: Environment) -> None:
        env.registry.run(lambda tx: configure(tx, "shipping", GroupConfig(), who="ann"))
        await env.lag(7, group="shipping")
        env.set(lag_alarm=5, webhook=env.url)
        await env.lag(6)
        await env.alarms().check_once()
        assert looked_up == [GROUP]
        assert env.announced() == [("raised", 6)]

    run(scenario)


def test_a_change_of_the_setting_takes_effect_at_the_next_check(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        alarms = env.alarms()
        env.set(lag_alarm=10)
        await env.lag(10, 0)
        await alarms.check_once()
        assert env.posted == [], "no webhook"
        assert env.raised() == ["billing/orders"]
        env.set(lag_alarm=100, webhook=env.url)
        await alarms.check_once()
        assert env.announced() == [("cleared", 10)]
        env.set(lag_alarm=5)
        await alarms.check_once()
        assert env.announced()[1:] == [("raised", 10)]
        env.set(lag_alarm=None)
        await alarms.check_once()
        assert (len(env.posted), env.raised()) == (2, []), "removed silently"
        env.set(lag_alarm=5)
        await alarms.check_once()
        assert env.announced()[2:] == [("raised", 10)]
        env.registry.run(lambda tx: tx.delete_group(GROUP))
        await alarms.check_once()
        assert (len(env.posted), env.raised()) == (3, [])

    run(scenario)


async def _server_error(_: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text=SECRET)


async def _redirect(_: web.Request) -> web.StreamResponse:
    return web.Response(status=307, headers={"Location": f"/elsewhere?{SECRET}"})


async def _hang(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


async def _hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize(
    ("answer", "webhook", "said"),
    [
        (_server_error, "{fails}", "it answered 500"),
        (_redirect, "{fails}", "it answered 307"),
        (_hang, "{fails}", "TimeoutError"),
        (_hang_up, "{fails}", "ServerDisconnectedError"),
        (None, f"http://ann:{SECRET}@127.0.0.1:1/{SECRET}", "ClientConnectorError"),
        (None, f"http://ann:{SECRET}@/{SECRET}", "InvalidUrlClientError"),
        (None, f"http://[{SECRET}", "InvalidUrlClientError"),
        (None, f"http://{'a' * 70}.invalid/{SECRET}", ""),
    ],
)
def test_a_webhook_that_fails_is_only_logged_and_affects_no_other(
    run: Callable[[Scenario], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    answer: Answer | None,
    webhook: str,
    said: str,
) -> None:
    async def scenario(env: Environment) -> None:
        caplog.set_level(logging.INFO)
        monkeypatch.setattr(module, "POST_SECONDS", 0.3 if answer is _hang else 5.0)
        env.answer = answer
        fails = env.url.replace("//", f"//ann:{SECRET}@").replace("/alarms", f"/fails?{SECRET}")
        env.set("a", lag_alarm=1, webhook=webhook.format(fails=fails))
        env.set("b", lag_alarm=1, webhook=env.url)
        for group in "ab":
            await env.lag(1, 0, group=group)
        alarms = env.alarms()
        await alarms.check_once()
        assert [post["group"] for post in env.posted] == ["b"]
        await alarms.check_once()
        warned = [r.getMessage() for r in caplog.records if "did not accept" in r.getMessage()]
        assert len(warned) == 1, "it is not posted again"
        assert warned[0].startswith(f"the webhook of group 'a' did not accept the alarm on 'orders': {said}")
        assert "group 'a' is 1 records behind" in caplog.text
        assert SECRET not in caplog.text
        assert env.raised() == ["a/orders", "b/orders"]

    run(scenario)


def test_credentials_in_the_url_are_sent_to_the_webhook_only(
    run: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(env: Environment) -> None:
        caplog.set_level(logging.INFO)
        env.set(lag_alarm=1, webhook=env.url.replace("//", f"//ann:{SECRET}@"))
        await env.lag(1, 0)
        await env.alarms().check_once()
        assert env.authorised == ["Basic " + base64.b64encode(f"ann:{SECRET}".encode()).decode()]
        assert SECRET not in caplog.text
        rows = [row for row in env.registry.read(lambda tx: tx.audit_log()) if row.who == "alarms"]
        assert [(row.action, row.subject, row.detail) for row in rows] == [
            ("alarm raised", "billing", {"topic": "orders", "lag": 1, "threshold": 1})
        ]
        assert SECRET not in env.registry.read(lambda tx: repr([*tx.audit_log(), *tx.settings(module.SCOPE)]))

    run(scenario)


def test_one_broker_checks_at_a_time_and_the_next_one_does_not_raise_again(run: Callable[[Scenario], None]) -> None:
    async def scenario(env: Environment) -> None:
        env.set(lag_alarm=10, webhook=env.url)
        await env.lag(10, 0)
        first, second = env.alarms("b1"), env.alarms("b2")
        await first.check_once()
        await env.lag(0, 0)
        await second.check_once()
        assert env.announced() == [("raised", 10)], "the first one has the lease"
        await env.lag(12, 0)
        env.clock.jump(19)
        await second.check_once()
        assert env.announced() == [("raised", 10)]
        env.clock.jump(2)  # the first one is gone
        await second.check_once()
        assert env.announced() == [("raised", 10)], "raised before"
        await env.lag(0, 0)
        await first.check_once()
        assert env.announced() == [("raised", 10)], "the second one has it now"
        await second.check_once()
        assert env.announced() == [("raised", 10), ("cleared", 0)]

    run(scenario)


def test_a_broker_that_lost_the_lease_during_a_check_announces_nothing(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(env: Environment) -> None:
        env.set(lag_alarm=10, webhook=env.url)
        await env.lag(10, 0)
        slow, quick = env.alarms("b1"), env.alarms("b2")
        real = slow._lags

        async def stalled(group: str) -> Any:
            env.clock.jump(60)
            await quick.check_once()
            return await real(group)

        monkeypatch.setattr(slow, "_lags", stalled)
        with pytest.raises(Fenced, match="b2 has it now"):
            await slow.check_once()
        assert env.announced() == [("raised", 10)]

    run(scenario)


def test_checks_go_on_until_cancelled_and_then_another_broker_can_check_at_once(
    run: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(env: Environment) -> None:
        env.set(lag_alarm=10, webhook=env.url)
        await env.lag(10, 0)
        first = env.alarms("b1", every=1.0)
        real, failures = first._lags, iter([Busy("registry", 10.0), RuntimeError("a bug")])

        async def failing_twice(group: str) -> Any:
            if (failure := next(failures, None)) is not None:
                raise failure
            return await real(group)

        monkeypatch.setattr(first, "_lags", failing_twice)
        running = asyncio.create_task(first.run())
        await env.advance_until(lambda: env.announced() == [("raised", 10)])
        assert "checking lag alarms will be retried: registry was busy" in caplog.text
        assert "checking lag alarms failed" in caplog.text
        await env.lag(0, 0)
        await env.advance_until(lambda: env.announced()[1:] == [("cleared", 0)])
        await env.lag(15, 0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(env.posted) == 2
        lease, now = env.registry.read(lambda tx: (tx.lease(module.LEASE), tx.now))
        assert lease is not None
        assert (lease.holder, lease.expires_at <= now) == ("b1", True)
        await env.alarms("b2").check_once()
        assert env.announced()[2:] == [("raised", 15)]

    run(scenario)


@pytest.mark.parametrize("every", [0, -1.0, float("inf"), float("nan"), "5"])
def test_an_impossible_interval_is_refused(every: Any, batcher: Callable[[Registry], TransactionBatcher]) -> None:
    registry = MemoryRegistry()
    with pytest.raises(InvalidValue, match="every is"):
        Alarms(MemoryLog(), registry, batcher(registry), holder="b1", every=every)
