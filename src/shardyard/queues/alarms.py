"""Alarms when a group falls behind: logged, and posted to its webhook."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

import aiohttp
import msgspec

from shardyard.groups import status
from shardyard.groups.broadcast import is_departed
from shardyard.log import Log
from shardyard.model import InvalidValue, ShardyardError, UnknownGroup
from shardyard.queues.settings import group_settings
from shardyard.registry import Registry, lease
from shardyard.runtime.clock import Clock, SystemClock

_log = logging.getLogger(__name__)

LEASE = "alarms"
SCOPE = "alarms"
"""Of the settings that say which alarms are raised, for whichever broker looks next."""
CLEARED_BELOW = 0.8
"""Of the threshold: a lag that wavers around it raises one alarm, not many."""
POST_SECONDS = 5.0
POSTS_PER_HOST = 8
"""At once; a slow webhook holds up no other."""


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


class _Watch(NamedTuple):
    """What a group has set."""

    threshold: int
    webhook: str | None


class Alarms:
    """Looks at the lag of every group with an alarm, on one broker at a time.

    An alarm is raised once when the lag reaches its threshold, and cleared once when it falls below 80 % of it. It is
    noted first and told then, so it is told at most once: what a webhook does not take is not posted again. Alarms of a
    group whose setting was taken away, and of a member of a broadcast group who is gone, are forgotten without a word.
    """

    def __init__(
        self, log: Log, registry: Registry, *, holder: str, every: float = 5.0, clock: Clock | None = None
    ) -> None:
        """`holder`: this broker's name among the others. `every`: seconds between two looks."""
        if not isinstance(every, int | float) or not 0 < every < float("inf"):
            raise InvalidValue("every", every, "a number of seconds, more than 0")
        self._log = log
        self._registry = registry
        self._holder = holder
        self._every = every
        self._lease_seconds = 2 * (every + POST_SECONDS)  # so that it outlasts a look and the wait for the next one
        self._clock = clock or SystemClock()
        self._token: int | None = None

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                try:
                    await self.check_once()
                except ShardyardError as error:
                    _log.warning("looking for alarms put off: %s", error)
                except Exception:  # noqa: BLE001 one bad look must not be the last one
                    _log.exception("looking for alarms failed")
                await self._clock.sleep(self._every)
        finally:
            await self._give_up()

    async def check_once(self) -> None:
        """Look at all groups, raise and clear what is due, and return when it is told; while another broker has the
        lease, do nothing."""
        self._token = await asyncio.to_thread(self._acquire)
        if self._token is None:
            return
        watched, raised = await asyncio.to_thread(self._watched)
        due: list[Alarm] = []
        for group, watch in watched.items():
            with contextlib.suppress(UnknownGroup):  # it was deleted meanwhile
                due += self._due(group, watch.threshold, await self._lags(group), raised)
        forgotten = [alarm for alarm in raised if alarm.group not in watched]
        if due or forgotten:
            await asyncio.to_thread(self._note, self._token, due, forgotten)
        await _tell(due, watched)

    def _acquire(self) -> int | None:
        with self._registry.transaction() as tx:
            return lease.acquire(tx, LEASE, self._holder, self._lease_seconds)

    def _watched(self) -> tuple[dict[str, _Watch], list[Alarm]]:
        """The groups with an alarm, and the alarms that are raised."""
        watched = {}
        with self._registry.snapshot() as tx:
            for row in tx.groups():
                settings = group_settings(tx, row.name)
                if settings.lag_alarm is not None and not is_departed(tx, row.name):
                    watched[row.name] = _Watch(settings.lag_alarm, settings.webhook)
            return watched, [msgspec.convert(row.value, Alarm) for row in tx.settings(SCOPE)]

    async def _lags(self, group: str) -> Counter[str]:
        """The lag on each topic."""
        lags: Counter[str] = Counter()
        for row in await status(self._log, self._registry, group):
            lags[row.partition.topic] += row.lag
        return lags

    def _due(self, group: str, threshold: int, lags: Counter[str], raised: Iterable[Alarm]) -> list[Alarm]:
        """What is to be raised or cleared; a topic that is gone has no lag."""
        now = self._clock.now()
        loud = {alarm.topic for alarm in raised if alarm.group == group}
        over = [topic for topic in lags if topic not in loud and lags[topic] >= threshold]
        under = [topic for topic in loud if lags[topic] < threshold * CLEARED_BELOW]
        return [
            *(Alarm(group, topic, lags[topic], threshold, "raised", now) for topic in sorted(over)),
            *(Alarm(group, topic, lags[topic], threshold, "cleared", now) for topic in sorted(under)),
        ]

    def _note(self, token: int, due: Iterable[Alarm], forgotten: Iterable[Alarm]) -> None:
        with self._registry.transaction() as tx:
            lease.check(tx, LEASE, token)
            for alarm in due:
                if alarm.state == "raised":
                    tx.put_setting(SCOPE, alarm.name, msgspec.to_builtins(alarm))
                else:
                    tx.delete_setting(SCOPE, alarm.name)
                detail = {"topic": alarm.topic, "lag": alarm.lag, "threshold": alarm.threshold}
                tx.audit("alarms", f"alarm {alarm.state}", alarm.group, detail)
            for alarm in forgotten:
                tx.delete_setting(SCOPE, alarm.name)

    async def _give_up(self) -> None:
        token, self._token = self._token, None
        if token is not None:
            with contextlib.suppress(ShardyardError):
                await asyncio.to_thread(self._hand_back, token)

    def _hand_back(self, token: int) -> None:
        with self._registry.transaction() as tx:
            lease.release(tx, LEASE, token)


async def _tell(alarms: Iterable[Alarm], watched: Mapping[str, _Watch]) -> None:
    """Log the alarms, and post them to the webhooks of their groups."""
    posts = []
    for alarm in alarms:
        if alarm.state == "raised":
            text = "group %r is %d records behind on topic %r: its alarm is set to %d"
            _log.warning(text, alarm.group, alarm.lag, alarm.topic, alarm.threshold)
        else:
            text = "group %r has caught up to %d records behind on topic %r: its alarm, set to %d, is over"
            _log.info(text, alarm.group, alarm.lag, alarm.topic, alarm.threshold)
        if (webhook := watched[alarm.group].webhook) is not None:
            posts.append((webhook, alarm))
    if posts:
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=POSTS_PER_HOST)
        timeout = aiohttp.ClientTimeout(total=POST_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            await asyncio.gather(*(_post(session, webhook, alarm) for webhook, alarm in posts))


async def _post(session: aiohttp.ClientSession, webhook: str, alarm: Alarm) -> None:
    """Neither the URL nor an error's text is logged: either may have a password or a secret path in it."""
    try:
        async with session.post(webhook, json=asdict(alarm), allow_redirects=False) as response:
            failure = None if response.status < 300 else f"it answered {response.status}"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        failure = type(error).__name__
    if failure is not None:
        _log.warning("the webhook of group %r did not take the alarm on %r: %s", alarm.group, alarm.topic, failure)
