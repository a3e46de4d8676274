"""Runs: the parts of a batch that queues take or refuse as a whole."""

from collections.abc import Sequence
from itertools import groupby

from shardyard.model.sharding import OutgoingMessage, Overflow
from shardyard.sharding.routing import distribute, router_of
from shardyard.sharding.topology import Topology


def runs_of(topology: Topology, exchange: str, messages: Sequence[OutgoingMessage]) -> list[range]:
    """The places of messages that follow each other and are refused together, when a queue is full.

    A message that goes to several queues is refused by all of them if one is full. What another queue then takes of the
    batch is less than before, so it must not be stored under the stamp of the whole: each run has a stamp of its own.
    Where every queue takes its part of the batch or refuses it, as on hashing exchanges, the batch is one run.
    """
    whole = [range(len(messages))]
    limited = topology.derived(("limited", exchange), lambda: _limited(topology, exchange))
    if not limited:
        return whole
    by_queue = distribute(topology, exchange, messages).by_queue
    full: list[tuple[str, ...]] = [()] * len(messages)
    """By which queues each message may be refused."""
    for name in sorted(limited & by_queue.keys()):
        for place in by_queue[name]:
            full[place] += (name,)
    if all(len({full[place] for place in part}) == 1 for part in by_queue.values()):
        return whole
    runs = [list(run) for _, run in groupby(range(len(messages)), lambda place: full[place])]
    return [range(run[0], run[-1] + 1) for run in runs]


def _limited(topology: Topology, exchange: str) -> frozenset[str]:
    """The queues that may refuse messages of which others have copies."""
    found = topology.exchanges.get(exchange)
    if found is None or found.type.is_hashing:
        return frozenset()
    return frozenset(
        queue.name
        for queue in router_of(topology, exchange).queues
        if queue.limits.max_length is not None and queue.limits.overflow is Overflow.REJECT_PUBLISH
    )
