"""Run a program of Python with uvicorn, as one process or several beside one Redis."""

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.messengers.messenger import Server, Service, running
from bench.servers import find_redis
from tests.servers import free_port, run_server

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def serve_with_redis(app: str, path: str, folder: Path, count: int) -> Iterator[Service | None]:
    """Run the program in `count` processes, each on its own port, with uvicorn's defaults."""
    redis = find_redis()
    if redis is None:
        yield None
        return
    redis_port = free_port()
    options = ["--port", str(redis_port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    with run_server([str(redis), *options], redis_port, folder) as redis_pid:
        settings = {"REDIS_URL": f"redis://127.0.0.1:{redis_port}", "PYTHONPATH": str(ROOT)}
        ports = [free_port() for _ in range(count)]
        uvicorn = [sys.executable, "-m", "uvicorn", app, "--log-level", "warning", "--backlog", "4096"]
        servers = [Server([*uvicorn, "--port", str(port)], port, folder, settings) for port in ports]
        with running(servers):
            yield Service(servers, [f"ws://127.0.0.1:{port}{path}" for port in ports], [redis_pid], folder)


serve_starlette = partial(serve_with_redis, "bench.messengers.starlette_app:app", "/messaging")
serve_socketio = partial(serve_with_redis, "bench.messengers.socketio_app:app", "/socket.io/?EIO=4&transport=websocket")
