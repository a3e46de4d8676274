from collections.abc import Callable, Iterator

import pytest

from shardyard.registry import Registry
from shardyard.registry.batcher import TransactionBatcher
from tests.queues import engines


@pytest.fixture(autouse=True)
def databases(request: pytest.FixtureRequest) -> Iterator[None]:
    """Gives a test on PostgreSQL its databases."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    if "postgresql" not in parameters.values():
        yield
        return
    with engines.databases(request.getfixturevalue("postgresql")):
        yield


@pytest.fixture
def batcher() -> Iterator[Callable[[Registry], TransactionBatcher]]:
    """Opens transaction batchers, which are closed after the test."""
    opened: list[TransactionBatcher] = []

    def open_batcher(registry: Registry) -> TransactionBatcher:
        opened.append(TransactionBatcher(registry))
        return opened[-1]

    yield open_batcher
    for one in opened:
        one.close()
