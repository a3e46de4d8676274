"""The topology in memory follows the registry, whoever changes it."""

import asyncio

import pytest

from shardyard.groups import Node
from shardyard.sharding.administration import Administration
from shardyard.sharding.topology_cache import TopologyCache
from tests.queues.engines import REGISTRIES
from tests.sharding.conftest import OpenYard
from tests.sharding.yard import WHO


@pytest.mark.parametrize("engine", REGISTRIES)
async def test_a_change_by_another_node_is_seen(opened: OpenYard) -> None:
    async with (
        opened() as yard,
        Node(yard.log, yard.registry, name="other") as other,
        TopologyCache(yard.node) as cache,
    ):
        assert not cache.current.queues
        changed = asyncio.ensure_future(cache.changed())
        await Administration(other).declare_queue("q", WHO)
        async with asyncio.timeout(60):
            await changed
        assert list(cache.current.queues) == ["q"]
        assert cache.current == await yard.topology()


async def test_a_refresh_sees_what_was_committed_before_it_and_many_share_a_read(opened: OpenYard) -> None:
    async with opened() as yard:
        cache = TopologyCache(yard.node)
        await cache.refresh()
        await yard.administration.declare_queue("q", WHO)
        found = await asyncio.gather(*(cache.refresh() for _ in range(50)))
        assert all("q" in topology.queues for topology in found)
        before = cache.current
        assert await cache.refresh() is before, "nothing has changed"
