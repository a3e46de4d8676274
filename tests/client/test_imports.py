"""The client without the server: importing it loads no web framework, no engine, nothing of the systems, and no package
that is large or slow to load; and it works where those are not installed."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client import round_trip
from tests.queues.setup import Cluster, run

pytestmark = pytest.mark.processes

LARGE = (
    "fastapi",
    "matplotlib",
    "numba",
    "numpy",
    "pandas",
    "psycopg",
    "pyarrow",
    "pyspark",
    "scipy",
    "sqlalchemy",
    "starlette",
    "uvicorn",
    "uvloop",
    "xxhash",
)
"""What only the extras install."""
ENGINES = (
    "sqlite3",
    "shardyard.server",
    "shardyard.queues",
    "shardyard.pipeline",
    "shardyard.log.sqlite",
    "shardyard.log.memory",
    "shardyard.registry.memory",
    "shardyard.registry.sql",
    "shardyard.registry.sqlite",
)


def loaded_by(program: str) -> list[str]:
    """The modules that a fresh interpreter has loaded after this program."""
    program = f"import sys\n{program}\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return run.stdout.splitlines()[-1].split()


def within(modules: tuple[str, ...], loaded: list[str]) -> list[str]:
    return [name for name in loaded if any(name == module or name.startswith(f"{module}.") for module in modules)]


def test_importing_the_client_loads_neither_a_server_nor_an_engine_nor_a_large_package() -> None:
    loaded = loaded_by("import shardyard.client")
    assert "shardyard.client.remote" in loaded
    assert within((*LARGE, *ENGINES, "aiohttp"), loaded) == []


def test_what_a_broker_loads_at_its_start_leaves_out_arrows_functions() -> None:
    """They take 9 MB, and only search, tags and a few others need them."""
    modules = "shardyard.server.app, shardyard.log.sqlite.engine, shardyard.registry.sqlite"
    hiding = "from shardyard.cli.serving import without_packages\nwith without_packages('numba', 'pandas'):"
    loaded = loaded_by(f"{hiding} import {modules}")
    assert within(("pyarrow.compute", "numba", "pandas"), loaded) == []


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "publish --help",
        "consume --help",
        "topics list --help",
        "broker --help",
        "place --help",
        "chat --help",
        "where --help",
    ],
)
def test_the_help_of_a_command_loads_no_large_package(arguments: str) -> None:
    loaded = loaded_by(
        f"from shardyard.cli import main\nsys.argv = ['shardyard', *{arguments.split()!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    )
    assert "shardyard.cli" in loaded
    assert within((*LARGE, *ENGINES, "pydantic", "aiohttp"), loaded) == []


def test_records_are_published_and_consumed_alike_with_and_without_the_large_packages() -> None:
    async def scenario(cluster: Cluster) -> None:
        printed = []
        for topic, blocked in (("with", ()), ("without", LARGE)):
            await cluster.topic(topic, partitions=4)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, Path(round_trip.__file__), cluster.urls[0], topic, *blocked),
                stdout=asyncio.subprocess.PIPE,
            )
            output, _ = await process.communicate()
            assert process.returncode == 0
            printed.append(output.decode())
        assert len(printed[0].splitlines()) == sum(round_trip.SIZES) + 20
        assert printed[0] == printed[1]

    run(scenario)
