"""Posts alarms to the webhooks of their groups."""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import asdict

import aiohttp

from shardyard.queues.alarms import Alarm

_log = logging.getLogger(__name__)

POSTS_PER_HOST = 8
"""Concurrent posts to one host."""


async def post_all(posts: Iterable[tuple[str, Alarm]], seconds: float) -> None:
    """Post each alarm to its URL, once. A post that fails, or takes longer than `seconds`, is logged."""
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=POSTS_PER_HOST)
    timeout = aiohttp.ClientTimeout(total=seconds)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await asyncio.gather(*(_post(session, webhook, alarm) for webhook, alarm in posts))


async def _post(session: aiohttp.ClientSession, webhook: str, alarm: Alarm) -> None:
    """Neither the URL nor the text of an error is logged: each may contain a password or a secret path."""
    try:
        async with session.post(webhook, json=asdict(alarm), allow_redirects=False) as response:
            failure = None if response.status < 300 else f"it answered {response.status}"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        failure = type(error).__name__
    if failure is not None:
        _log.warning("the webhook of group %r did not accept the alarm on %r: %s", alarm.group, alarm.topic, failure)
