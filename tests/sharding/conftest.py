"""Tests of this folder may be coroutines: each runs in an event loop of its own."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from tests.queues.engines import databases
from tests.sharding.yard import ShardingYard, sharding_yard


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


OpenYard = Callable[[], AbstractAsyncContextManager[ShardingYard]]


@pytest.fixture
def engine() -> str:
    """Parametrised by suites that run on more engines."""
    return "memory"


@pytest.fixture
def opened(request: pytest.FixtureRequest, engine: str, tmp_path: Path) -> Iterator[OpenYard]:
    """Opens a yard on the engine of the test."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[ShardingYard]:
        async with sharding_yard(engine, tmp_path) as yard:
            yield yard

    if engine == "postgresql":
        with databases(request.getfixturevalue("postgresql")):
            yield opened
    else:
        yield opened


@pytest.fixture
def folder(request: pytest.FixtureRequest, engine: str, tmp_path: Path) -> Iterator[Path]:
    """Where the engine of the test keeps its data."""
    if engine == "postgresql":
        with databases(request.getfixturevalue("postgresql")):
            yield tmp_path
    else:
        yield tmp_path
