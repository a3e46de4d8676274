"""The client without the server: importing it loads no web framework, no engine, and nothing of the systems."""

import subprocess
import sys

FORBIDDEN = (
    "fastapi",
    "starlette",
    "uvicorn",
    "sqlalchemy",
    "sqlite3",
    "pyspark",
    "shardyard.server",
    "shardyard.queues",
    "shardyard.pipeline",
    "shardyard.log.sqlite",
    "shardyard.log.memory",
    "shardyard.registry.memory",
    "shardyard.registry.sql",
    "shardyard.registry.sqlite",
)


def test_importing_the_client_loads_neither_a_server_nor_an_engine() -> None:
    program = "import sys; import shardyard.client; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert "shardyard.client.remote" in loaded
    found = [name for name in loaded if any(name == module or name.startswith(f"{module}.") for module in FORBIDDEN)]
    assert found == []
