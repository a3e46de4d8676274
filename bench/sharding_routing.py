"""Routing alone: batches of messages to 4 shards, on one core. `python -m bench.sharding_routing`."""

import time
from collections.abc import Callable

from bench.figures import pin_to_cores, rate, table

from shardyard.model.sharding import Exchange, ExchangeType, OutgoingMessage, Policy
from shardyard.sharding.routing import router_of
from shardyard.sharding.shards import with_shards
from shardyard.sharding.topology import Topology

MESSAGES = 200_000
SHARDS = 4
BATCHES = (1, 64, 500, MESSAGES)
SECONDS = 1.0
"""At least so long each figure is measured."""


def topology(kind: ExchangeType) -> Topology:
    policy = Policy("p", "^images$", SHARDS)
    exchanges = {"images": Exchange("images", kind)}
    return with_shards(Topology(1, exchanges, {"p": policy}, nodes=frozenset({"shardyard-7400@host"})))


def per_second(work: Callable[[], object], messages: int) -> float:
    work()
    best, until = 0.0, time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        started = time.perf_counter()
        work()
        best = max(best, messages / (time.perf_counter() - started))
    return best


def measure() -> None:
    print(f"routing to {SHARDS} shards, {pin_to_cores()}")
    messages = [OutgoingMessage(b"", f"picture-{n}.png") for n in range(MESSAGES)]
    rows = []
    for kind in (ExchangeType.MODULUS_HASH, ExchangeType.CONSISTENT_HASH):
        router = router_of(topology(kind), "images")
        rates = []
        for size in BATCHES:
            parts = [messages[first : first + size] for first in range(0, min(MESSAGES, 1000 * size), size)]

            def work(parts: list[list[OutgoingMessage]] = parts) -> None:
                for part in parts:
                    router.distribute(part)  # noqa: B023 called before it changes

            rates.append(f"{rate(per_second(work, sum(map(len, parts))))}/s")
        rows.append([kind.value, *rates])
    table(["", *(f"batches of {size}" for size in BATCHES)], rows)


if __name__ == "__main__":
    measure()
