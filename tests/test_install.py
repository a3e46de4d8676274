"""`pip install shardyard` into fresh virtual environments of all supported versions of Python that are on the machine:
it is small, and the client and the commands for brokers work."""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client import round_trip
from tests.client.test_imports import LARGE
from tests.queues.setup import Cluster, run

ROOT = Path(__file__).parent.parent
VERSIONS = ("3.11", "3.12", "3.13")
MAX_MEGABYTES = 55
"""Of the base with all that it depends on. (Celery takes 24 MB, FastStream with Kafka 30.)"""

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600), pytest.mark.xdist_group("install")]


def interpreter(version: str) -> str | None:
    """A Python of this version: on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for path in (shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))):
        if path is not None and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return None


def pip(*arguments: str | Path) -> None:
    """Run pip. Without a connection to the package index the test is skipped, except in CI."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    constraints = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    run = subprocess.run(command, env=os.environ | constraints, capture_output=True, text=True, check=False)
    if run.returncode and "CI" not in os.environ and "No matching distribution found" in run.stderr:
        pytest.skip("pip reaches no package index, which a fresh installation needs")
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", folder, ROOT)
    return next(folder.glob("*.whl"))


@pytest.fixture(params=VERSIONS)
def environment(request: pytest.FixtureRequest, wheel: Path, tmp_path: Path) -> Path:
    """The `bin` folder of a virtual environment with nothing but the base."""
    python = interpreter(request.param)
    if python is None:
        pytest.skip(f"there is no Python {request.param} on this machine")
    subprocess.run([python, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    programs = tmp_path / "venv" / "bin"
    pip("--python", programs / "python", "install", wheel)
    return programs


def megabytes(folder: Path) -> float:
    """What the files in a folder take on disk."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*")) / 2**20


async def call(*command: str | Path, broker: str, expected: int = 0) -> tuple[str, str]:
    """What a program prints on standard output and standard error."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.defpath, "SHARDYARD_BROKER": broker},
    )
    out, err = await process.communicate()
    assert process.returncode == expected, err.decode()
    return out.decode(), err.decode()


def test_the_base_is_small_and_publishes_and_consumes_through_a_broker(environment: Path) -> None:
    (packages,) = environment.parent.glob("lib/python*/site-packages")
    assert megabytes(packages) < MAX_MEGABYTES
    assert [name for name in LARGE if (packages / name).exists()] == []
    shardyard = environment / "shardyard"

    async def scenario(cluster: Cluster) -> None:
        broker = cluster.urls[0]
        out, _ = await call(shardyard, "--help", broker=broker)
        assert "Usage: shardyard" in out
        await cluster.topic("round-trip", partitions=4)
        out, _ = await call(environment / "python", round_trip.__file__, broker, "round-trip", broker=broker)
        assert len(out.splitlines()) == sum(round_trip.SIZES) + 20

        await call(shardyard, "topics", "create", "orders", broker=broker)
        out, _ = await call(shardyard, "topics", "list", broker=broker)
        assert "orders" in out
        await call(shardyard, "publish", "orders", "one", "two", "--key", "k", broker=broker)
        await call(shardyard, "publish", "orders", "later", "--delay", "3600", broker=broker)
        out, _ = await call(shardyard, "consume", "billing", "orders", "--count", "2", broker=broker)
        assert [line.split("\t")[-1] for line in out.splitlines()] == ["one", "two"]
        out, _ = await call(shardyard, "groups", "show", "billing", broker=broker)
        assert "orders" in out
        out, _ = await call(shardyard, "nginx-config", "--brokers", "127.0.0.1:7400", broker=broker)
        assert "127.0.0.1:7400" in out

        _, err = await call(shardyard, "broker", broker=broker, expected=2)
        assert err == "error: the broker needs the server packages: pip install 'shardyard[server]'\n"

    run(scenario)
