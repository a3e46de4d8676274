"""Lag alarms, with a real web server as the webhook."""

import asyncio
import base64
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from shardyard.groups import reset
from shardyard.log.memory import MemoryLog
from shardyard.model import Busy, Fenced, InvalidValue, Partition, Position, Record
from shardyard.queues import alarms as module
from shardyard.queues.alarms import Alarms
from shardyard.queues.settings import change_group
from shardyard.registry import Registry
from shardyard.registry.memory import MemoryRegistry
from shardyard.registry.sql import SqlRegistry
from shardyard.registry.sqlite import SqliteStore
from shardyard.runtime.clock import ManualClock

GROUP, TOPIC = "billing", "orders"
PATIENCE_SECONDS = 20.0
SECRET = "hunter2"

Story = Callable[["Yard"], Coroutine[Any, Any, None]]
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Yard:
    """A log, a registry and a webhook, for the length of a story."""

    def __init__(self, log: MemoryLog, registry: Registry, clock: ManualClock, url: str) -> None:
        self.log, self.registry, self.clock, self.url = log, registry, clock, url
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
        return Alarms(self.log, self.registry, holder=holder, every=every, clock=self.clock)

    def set(self, group: str = GROUP, **settings: Any) -> None:
        with self.registry.transaction() as tx:
            change_group(tx, group, "ann", settings)

    async def lag(self, *lags: int, group: str = GROUP, topic: str = TOPIC) -> None:
        """Let the group lag that much on each partition."""
        for index, lag in enumerate(lags):
            partition = Partition(topic, index)
            span = await self.log.span(partition)
            if span.end < lag:
                await self.log.append(partition, [Record("r", None, b"")] * (lag - span.end))
            position = Position(span.epoch, max(span.end, lag) - lag)
            with self.registry.transaction() as tx:
                reset(tx, group, {partition: position}, "ann")

    def said(self) -> list[tuple[str, int]]:
        return [(post["state"], post["lag"]) for post in self.posted]

    def raised(self) -> list[str]:
        with self.registry.snapshot() as tx:
            return [row.name for row in tx.settings(module.SCOPE)]

    async def passing(self, condition: Callable[[], bool]) -> None:
        """Let time pass until something shows; a look works in threads, so no single event tells of its end."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                await self.clock.advance(1.0)
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def a_yard(kind: str, folder: Path) -> AsyncIterator[Yard]:
    clock = ManualClock()
    registry: Registry = (
        MemoryRegistry(clock) if kind == "memory" else SqlRegistry(SqliteStore(str(folder / "r.db"), clock))
    )
    app = web.Application()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    with registry:
        async with MemoryLog() as log:
            yard = Yard(log, registry, clock, "")
            app.router.add_route("*", "/{path:.*}", yard.take)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yard.url = f"http://127.0.0.1:{runner.addresses[0][1]}/alarms"
            try:
                await log.create_topic(TOPIC, 2)
                yield yard
            finally:
                await runner.cleanup()


@pytest.fixture(params=["memory", "sqlite"])
def tell(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Story], None]:
    """Tell a story on a registry."""

    def told(story: Story) -> None:
        async def whole() -> None:
            async with a_yard(request.param, tmp_path) as yard:
                await story(yard)

        asyncio.run(whole())

    return told


def test_an_alarm_is_raised_once_and_cleared_once(
    tell: Callable[[Story], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def story(yard: Yard) -> None:
        caplog.set_level(logging.INFO, "shardyard")
        yard.set(lag_alarm=10, webhook=yard.url)
        alarms = yard.alarms()
        for first, second in ((0, 0), (5, 4), (6, 4), (20, 30), (4, 5), (4, 4), (10, 0), (4, 3), (0, 0), (0, 11)):
            await yard.lag(first, second)
            await alarms.check_once()
        assert yard.said() == [("raised", 10), ("cleared", 7), ("raised", 11)]
        names = {"group": GROUP, "topic": TOPIC, "threshold": 10, "at": yard.clock.now()}
        assert yard.posted[:2] == [
            {**names, "lag": 10, "state": "raised"},
            {**names, "lag": 7, "state": "cleared"},
        ]
        assert [(r.levelname, r.getMessage()) for r in caplog.records if r.name == module.__name__] == [
            ("WARNING", "group 'billing' is 10 records behind on topic 'orders': its alarm is set to 10"),
            (
                "INFO",
                "group 'billing' has caught up to 7 records behind on topic 'orders': its alarm, set to 10, is over",
            ),
            ("WARNING", "group 'billing' is 11 records behind on topic 'orders': its alarm is set to 10"),
        ]

    tell(story)


def test_each_topic_and_each_group_counts_for_itself(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        await yard.log.create_topic("mail", 1)
        yard.set(lag_alarm=10, webhook=yard.url)
        yard.set("audit", lag_alarm=6, webhook=yard.url)
        yard.set("quiet", webhook=yard.url)
        await yard.lag(50, 50, group="quiet")
        await yard.lag(3, 3, group="audit")
        await yard.lag(6, 0)
        await yard.lag(9, topic="mail")
        alarms = yard.alarms()
        await alarms.check_once()
        assert [(post["group"], post["topic"]) for post in yard.posted] == [("audit", TOPIC)]
        await yard.lag(10, topic="mail")
        await alarms.check_once()
        assert (yard.posted[1]["group"], yard.posted[1]["topic"]) == (GROUP, "mail")
        assert yard.raised() == ["audit/orders", "billing/mail"]
        await yard.log.delete_topic("mail")
        await alarms.check_once()
        assert [(p["group"], p["topic"], p["state"], p["lag"]) for p in yard.posted[2:]] == [
            (GROUP, "mail", "cleared", 0)
        ]

    tell(story)


def test_a_change_of_the_setting_counts_at_the_next_look(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        alarms = yard.alarms()
        yard.set(lag_alarm=10)
        await yard.lag(10, 0)
        await alarms.check_once()
        assert yard.posted == [], "no webhook"
        assert yard.raised() == ["billing/orders"]
        yard.set(lag_alarm=100, webhook=yard.url)
        await alarms.check_once()
        assert yard.said() == [("cleared", 10)]
        yard.set(lag_alarm=5)
        await alarms.check_once()
        assert yard.said()[1:] == [("raised", 10)]
        yard.set(lag_alarm=None)
        await alarms.check_once()
        assert (len(yard.posted), yard.raised()) == (2, []), "forgotten without a word"
        yard.set(lag_alarm=5)
        await alarms.check_once()
        assert yard.said()[2:] == [("raised", 10)]
        with yard.registry.transaction() as tx:
            tx.delete_group(GROUP)
        await alarms.check_once()
        assert (len(yard.posted), yard.raised()) == (3, [])

    tell(story)


async def _server_error(_: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text=SECRET)


async def _redirect(_: web.Request) -> web.StreamResponse:
    return web.Response(status=307, headers={"Location": f"/elsewhere?{SECRET}"})


async def _hang(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(PATIENCE_SECONDS)
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
def test_a_webhook_that_fails_is_only_logged_and_harms_no_other(
    tell: Callable[[Story], None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    answer: Answer | None,
    webhook: str,
    said: str,
) -> None:
    async def story(yard: Yard) -> None:
        caplog.set_level(logging.INFO)
        monkeypatch.setattr(module, "POST_SECONDS", 0.3 if answer is _hang else 5.0)
        yard.answer = answer
        fails = yard.url.replace("//", f"//ann:{SECRET}@").replace("/alarms", f"/fails?{SECRET}")
        yard.set("a", lag_alarm=1, webhook=webhook.format(fails=fails))
        yard.set("b", lag_alarm=1, webhook=yard.url)
        for group in "ab":
            await yard.lag(1, 0, group=group)
        alarms = yard.alarms()
        await alarms.check_once()
        assert [post["group"] for post in yard.posted] == ["b"]
        await alarms.check_once()
        warned = [r.getMessage() for r in caplog.records if "did not take" in r.getMessage()]
        assert len(warned) == 1, "it is not posted again"
        assert warned[0].startswith(f"the webhook of group 'a' did not take the alarm on 'orders': {said}")
        assert "group 'a' is 1 records behind" in caplog.text
        assert SECRET not in caplog.text
        assert yard.raised() == ["a/orders", "b/orders"]

    tell(story)


def test_credentials_in_the_url_are_shown_to_the_webhook_alone(
    tell: Callable[[Story], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def story(yard: Yard) -> None:
        caplog.set_level(logging.INFO)
        yard.set(lag_alarm=1, webhook=yard.url.replace("//", f"//ann:{SECRET}@"))
        await yard.lag(1, 0)
        await yard.alarms().check_once()
        assert yard.authorised == ["Basic " + base64.b64encode(f"ann:{SECRET}".encode()).decode()]
        assert SECRET not in caplog.text
        with yard.registry.snapshot() as tx:
            rows = [row for row in tx.audit_log() if row.who == "alarms"]
            assert [(row.action, row.subject, row.detail) for row in rows] == [
                ("alarm raised", "billing", {"topic": "orders", "lag": 1, "threshold": 1})
            ]
            assert SECRET not in repr([*tx.audit_log(), *tx.settings(module.SCOPE)])

    tell(story)


def test_one_broker_looks_at_a_time_and_the_next_one_does_not_raise_again(tell: Callable[[Story], None]) -> None:
    async def story(yard: Yard) -> None:
        yard.set(lag_alarm=10, webhook=yard.url)
        await yard.lag(10, 0)
        first, second = yard.alarms("b1"), yard.alarms("b2")
        await first.check_once()
        await yard.lag(0, 0)
        await second.check_once()
        assert yard.said() == [("raised", 10)], "the first one has the lease"
        await yard.lag(12, 0)
        yard.clock.jump(19)
        await second.check_once()
        assert yard.said() == [("raised", 10)]
        yard.clock.jump(2)  # the first one is gone
        await second.check_once()
        assert yard.said() == [("raised", 10)], "raised before"
        await yard.lag(0, 0)
        await first.check_once()
        assert yard.said() == [("raised", 10)], "the second one has it now"
        await second.check_once()
        assert yard.said() == [("raised", 10), ("cleared", 0)]

    tell(story)


def test_one_that_lost_the_lease_while_it_looked_tells_nothing(
    tell: Callable[[Story], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(yard: Yard) -> None:
        yard.set(lag_alarm=10, webhook=yard.url)
        await yard.lag(10, 0)
        slow, quick = yard.alarms("b1"), yard.alarms("b2")
        real = slow._lags

        async def stalled(group: str) -> Any:
            yard.clock.jump(60)
            await quick.check_once()
            return await real(group)

        monkeypatch.setattr(slow, "_lags", stalled)
        with pytest.raises(Fenced, match="b2 has it now"):
            await slow.check_once()
        assert yard.said() == [("raised", 10)]

    tell(story)


def test_it_looks_until_it_is_cancelled_and_then_lets_another_one_look_at_once(
    tell: Callable[[Story], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(yard: Yard) -> None:
        yard.set(lag_alarm=10, webhook=yard.url)
        await yard.lag(10, 0)
        first = yard.alarms("b1", every=1.0)
        real, failures = first.check_once, iter([Busy("registry", 10.0), RuntimeError("a bug")])

        async def sometimes() -> None:
            if (failure := next(failures, None)) is not None:
                raise failure
            await real()

        monkeypatch.setattr(first, "check_once", sometimes)
        running = asyncio.create_task(first.run())
        await yard.passing(lambda: yard.said() == [("raised", 10)])
        assert "looking for alarms put off: registry was busy" in caplog.text
        assert "looking for alarms failed" in caplog.text
        await yard.lag(0, 0)
        await yard.passing(lambda: yard.said()[1:] == [("cleared", 0)])
        await yard.lag(15, 0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(yard.posted) == 2
        with yard.registry.snapshot() as tx:
            held = tx.lease(module.LEASE)
            assert held is not None
            assert (held.holder, held.expires_at <= tx.now) == ("b1", True)
        await yard.alarms("b2").check_once()
        assert yard.said()[2:] == [("raised", 15)]

    tell(story)


@pytest.mark.parametrize("every", [0, -1.0, float("inf"), float("nan"), "5"])
def test_a_wait_that_makes_no_sense_is_refused(every: Any) -> None:
    with pytest.raises(InvalidValue, match="every is"):
        Alarms(MemoryLog(), MemoryRegistry(), holder="b1", every=every)
