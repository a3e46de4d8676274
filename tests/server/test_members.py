"""Joining a group over HTTP."""

from typing import Any

import pytest

from shardyard.groups import assignment
from tests.queues.setup import Cluster, run


@pytest.mark.parametrize("settings", [{}, {"assignor": "even", "max_active": 1}, {"broadcast": True}])
def test_a_first_join_rebalances_once(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The retry topics exist and the group is configured before the member joins, or with it."""
    rebalanced: list[str] = []
    rebalance = assignment.rebalance

    def record(tx: Any, group: str, topics: Any) -> Any:
        decision = rebalance(tx, group, topics)
        if decision is not None:
            rebalanced.append(group)
        return decision

    monkeypatch.setattr(assignment, "rebalance", record)

    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=2)
        if settings:
            await cluster.set(**settings)
            await cluster.until(lambda: "billing" in rebalanced)  # which changes nothing, without a member
            rebalanced.clear()
        async with cluster.consumer("m1", session_timeout=60.0) as first:
            await cluster.until(lambda: len(first.owned) == (2 if settings.get("broadcast") else 4))
            async with cluster.consumer("m1", "other", session_timeout=60.0) as other:
                await cluster.until(lambda: len(other.owned) == 4)  # the rebalancer has looked at all groups again
            group = first.member.identity.group
            assert rebalanced.count(group) == 1
            configured = cluster.registry.read(lambda tx: tx.group(group))
            assert configured is not None
            assert (configured.assignor, configured.max_active, configured.release_after) == (
                settings.get("assignor", "sticky"),
                settings.get("max_active"),
                60.0,
            )

    run(scenario)


def test_a_join_that_is_refused_creates_no_topics() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        await cluster.set(deny=["m1"])
        for body in (
            {"topics": ["orders"], "name": "m1"},
            {"topics": ["orders", "nope"]},
            {"topics": ["orders"], "session_timeout": 0.01},
            {"topics": ["orders"], "partitions": ["orders/9"]},
        ):
            assert (await cluster.request("POST", "/v1/groups/billing/members", body)).status >= 400
        assert "billing.orders.retry" not in [topic.name for topic in await cluster.log.topics()]

    run(scenario)
