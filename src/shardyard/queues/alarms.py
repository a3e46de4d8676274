"""Alarms when a group falls behind: logged, and posted to the group's webhook."""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from shardyard.groups import status
from shardyard.groups.broadcast import is_departed, parent_group
from shardyard.log import Log
from shardyard.model import InvalidValue, UnknownGroup
from shardyard.queues.settings import group_scope, group_settings
from shardyard.registry import Registry, Snapshot, Transaction, lease
from shardyard.registry.batcher import TransactionBatcher
from shardyard.registry.lease import RegistryLease
from shardyard.runtime.clock import Clock, SystemClock
from shardyard.runtime.leader import LeaderLoop

_log = logging.getLogger(__name__)

LEASE = "alarms"
SCOPE = "alarms"
"""The scope of the settings that store the raised alarms, for the broker that checks next."""
CLEARED_BELOW = 0.8
"""The fraction of the threshold below which an alarm is cleared, so that a lag around the threshold raises one alarm,
not many."""
POST_SECONDS = 5.0
"""How long posting an alarm may take."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """The lag of a group on a topic has reached its threshold, or is well below it again. This is what is posted."""

    group: str
    topic: str
    lag: int
    threshold: int
    state: Literal["raised", "cleared"]
    at: float
    """Seconds since 1970."""

    @property
    def name(self) -> str:
        return f"{self.group}/{self.topic}"


class _AlarmSettings(NamedTuple):
    """The alarm settings of a group."""

    threshold: int
    webhook: str | None


class Alarms:
    """Checks the lag of every group that has an alarm set, on one broker at a time.

    An alarm is raised once when the lag reaches the threshold, and cleared once when it falls below 80 % of it. The
    change is stored before it is announced, so it is announced at most once: a post that fails is not repeated. Alarms
    of a group whose setting was removed, and of a member that left a broadcast group, are removed silently.
    """

    def __init__(
        self,
        log: Log,
        registry: Registry,
        transactions: TransactionBatcher,
        *,
        holder: str,
        every: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        """`transactions`: of the same registry. `holder`: the name of this broker, different from that of any other.
        `every`: seconds between two checks."""
        if not isinstance(every, int | float) or not 0 < every < float("inf"):
            raise InvalidValue("every", every, "a number of seconds of more than 0")
        self._log = log
        self._registry = registry
        self._transactions = transactions
        self._clock = clock or SystemClock()
        seconds = 2 * (every + POST_SECONDS)  # so that it outlasts a check and the wait for the next one
        self._leader = LeaderLoop(
            "checking lag alarms",
            RegistryLease(transactions, LEASE, holder, seconds),
            self._check,
            every=every,
            clock=self._clock,
        )

    async def run(self) -> None:
        """Until cancelled."""
        await self._leader.run()

    async def check_once(self) -> None:
        """Check all groups once, and return when all alarms that are due were announced. Does nothing while another
        broker holds the lease."""
        await self._leader.run_once()

    async def _check(self, token: int) -> None:
        settings, raised = await self._transactions.read(_load)
        due: list[Alarm] = []
        for group, alarm_settings in settings.items():
            with contextlib.suppress(UnknownGroup):  # it was deleted in the meantime
                due += self._due(group, alarm_settings.threshold, await self._lags(group), raised)
        removed = [alarm for alarm in raised if alarm.group not in settings]
        if due or removed:
            await self._transactions.run(lambda tx: _store(tx, token, due, removed))
        await _announce(due, settings)

    async def _lags(self, group: str) -> Counter[str]:
        """The lag on each topic."""
        lags: Counter[str] = Counter()
        for row in await status(self._log, self._registry, group):
            lags[row.partition.topic] += row.lag
        return lags

    def _due(self, group: str, threshold: int, lags: Counter[str], raised: Iterable[Alarm]) -> list[Alarm]:
        """The alarms to raise and to clear. A topic that was deleted has no lag."""
        now = self._clock.now()
        active = {alarm.topic for alarm in raised if alarm.group == group}
        over = [topic for topic in lags if topic not in active and lags[topic] >= threshold]
        under = [topic for topic in active if lags[topic] < threshold * CLEARED_BELOW]
        return [
            *(Alarm(group, topic, lags[topic], threshold, "raised", now) for topic in sorted(over)),
            *(Alarm(group, topic, lags[topic], threshold, "cleared", now) for topic in sorted(under)),
        ]


def _load(tx: Snapshot) -> tuple[dict[str, _AlarmSettings], list[Alarm]]:
    """The settings of the groups with an alarm, and the alarms that are raised."""
    found = {}
    scopes = set(tx.scopes())  # one statement for all groups: most have no settings of their own
    for row in tx.groups():
        if group_scope(parent_group(row.name)) not in scopes:
            continue  # it has the default settings, and so no alarm
        settings = group_settings(tx, row.name)
        if settings.lag_alarm is not None and not is_departed(tx, row.name):
            found[row.name] = _AlarmSettings(settings.lag_alarm, settings.webhook)
    return found, [msgspec.convert(row.value, Alarm) for row in tx.settings(SCOPE)]


def _store(tx: Transaction, token: int, due: Iterable[Alarm], removed: Iterable[Alarm]) -> None:
    lease.check(tx, LEASE, token)
    for alarm in due:
        if alarm.state == "raised":
            tx.put_setting(SCOPE, alarm.name, msgspec.to_builtins(alarm))
        else:
            tx.delete_setting(SCOPE, alarm.name)
        detail = {"topic": alarm.topic, "lag": alarm.lag, "threshold": alarm.threshold}
        tx.audit("alarms", f"alarm {alarm.state}", alarm.group, detail)
    for alarm in removed:
        tx.delete_setting(SCOPE, alarm.name)


async def _announce(alarms: Iterable[Alarm], settings: Mapping[str, _AlarmSettings]) -> None:
    """Log the alarms, and post them to the webhooks of their groups."""
    posts = []
    for alarm in alarms:
        if alarm.state == "raised":
            text = "group %r is %d records behind on topic %r: its alarm is set to %d"
            _log.warning(text, alarm.group, alarm.lag, alarm.topic, alarm.threshold)
        else:
            text = "group %r has caught up to %d records behind on topic %r: its alarm, set to %d, is cleared"
            _log.info(text, alarm.group, alarm.lag, alarm.topic, alarm.threshold)
        if (webhook := settings[alarm.group].webhook) is not None:
            posts.append((webhook, alarm))
    if posts:
        from shardyard.queues.webhooks import post_all  # noqa: PLC0415 loads aiohttp, and few groups have a webhook

        await post_all(posts, POST_SECONDS)
