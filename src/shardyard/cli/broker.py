"""`shardyard broker`: serve topics, records and groups over HTTP and WebSocket."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, Self

import typer

from shardyard.cli.logs import logs_on_stderr
from shardyard.cli.options import integer_option, value_option
from shardyard.model import InvalidValue, ShardyardError
from shardyard.model.extras import require
from shardyard.model.url import parse_url

if TYPE_CHECKING:
    import uvicorn

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 5_000
"""As in `ServerLimits`, which is not imported for --help."""

LogUrl = Annotated[str, typer.Option("--log", help="Where records are stored.", metavar="URL")]
RegistryUrl = Annotated[
    str | None,
    value_option(
        "--registry",
        metavar="URL",
        help="Where groups and settings are stored. Default: sqlite:///data/registry.db, or the database of the log.",
    ),
]


def broker(
    log: LogUrl = "sqlite:///data/log",
    registry: RegistryUrl = None,
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, integer_option("--port", "-p", help="The port to listen on; 0 picks a free one.")] = 7400,
    trust_proxy: Annotated[
        list[str] | None,
        typer.Option(
            "--trust-proxy",
            help="A proxy whose X-Forwarded-For header is trusted for the caller's address; may be repeated.",
            metavar="ADDRESS",
        ),
    ] = None,
    max_connections: Annotated[
        int, integer_option("--max-connections", help="Connections that may be open at a time; others get status 503.")
    ] = MAX_CONNECTIONS,
) -> None:
    """Run a broker, which serves topics, records and groups over HTTP and WebSocket until it is interrupted.

    Several brokers may share one log and registry: sqlite:/// on one machine, postgresql:// on any number of them, with
    the password in the URL, in PGPASSWORD or in ~/.pgpass. With SHARDYARD_TOKEN set, callers must send that token. The
    API is documented at /docs.

    Examples:

      shardyard broker

      shardyard broker --log sqlite:///data/log --registry sqlite:///data/registry.db --port 7401

      shardyard broker --log postgresql://yard@db/yard --registry postgresql://yard@db/yard

      shardyard broker --trust-proxy 127.0.0.1
    """
    if not 0 <= port < 65536:
        raise InvalidValue("--port", port, "0 to 65535")
    if max_connections < 1:
        raise InvalidValue("--max-connections", max_connections, "at least 1")
    if registry is None:
        registry = log if parse_url("log", log).engine == "postgresql" else "sqlite:///data/registry.db"
    for option, url in (("--log", log), ("--registry", registry)):
        if url == "memory://":
            expected = "storage that outlives the broker, such as sqlite:///data/log (memory:// is for programs)"
            raise InvalidValue(option, url, expected)
    require("server", "the broker")
    import uvloop  # only the broker needs it

    token = os.environ.get("SHARDYARD_TOKEN") or None
    # Where they are installed, `placement` loads numba, and PyArrow pandas. That would double the memory of a broker,
    # and make little difference to the speed: its batches are small.
    with _without("numba", "pandas"), _Sigterm() as sigterm, logs_on_stderr():
        uvloop.run(_serve(log, registry, host, port, token, trust_proxy or (), max_connections, sigterm))


class _Hidden(MetaPathFinder):
    """Packages that count as not installed. (None in `sys.modules` would do for Python code, but not for PyArrow's.)"""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname in self._packages:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


@contextlib.contextmanager
def _without(*packages: str) -> Iterator[None]:
    """Within the block, these packages count as not installed, unless they are loaded already."""
    hidden = _Hidden(packages)
    sys.meta_path.insert(0, hidden)
    try:
        yield
    finally:
        sys.meta_path.remove(hidden)


class _Sigterm:
    """What SIGTERM does within the block: it stops the server, also if it comes before that has started. Uvicorn raises
    the signal again after it has stopped; then it does nothing, so that what was opened is closed, and members leave
    their groups."""

    def __init__(self) -> None:
        self._server: uvicorn.Server | None = None
        self._received = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def stops(self, server: "uvicorn.Server") -> None:
        """From now on it stops this server; at once if it has come already."""
        self._server = server
        if self._received:
            server.handle_exit(signal.SIGTERM, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = True
        if self._server is not None and not self._server.should_exit:
            self._server.handle_exit(number, frame)


def _collect_garbage_less_often() -> None:
    """With thousands of connections, the garbage collector would take more time than everything else that a broker does
    while nothing happens. It finds next to nothing: only reference cycles need it."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


async def _serve(
    log_url: str,
    registry_url: str,
    host: str,
    port: int,
    token: str | None,
    trusted: Sequence[str],
    max_connections: int,
    sigterm: _Sigterm,
) -> None:
    from shardyard.log import open_log
    from shardyard.registry import open_registry
    from shardyard.server.app import BACKLOG, serving
    from shardyard.server.limits import ServerLimits, raise_open_files

    _collect_garbage_less_often()
    limits = ServerLimits(connections=max_connections)
    raise_open_files(max_connections)
    with (
        contextlib.ExitStack() as stack,
        _listening_socket(host, port, BACKLOG) as listener,
        open_registry(registry_url) as registry,
    ):
        async with (
            open_log(log_url) as log,
            serving(log, registry, host=host, port=port, token=token, trusted_proxies=trusted, limits=limits) as server,
        ):
            address, bound_port = listener.getsockname()[:2]
            sys.stdout.write(f"listening on http://{f'[{address}]' if ':' in address else address}:{bound_port}\n")
            sys.stdout.flush()
            _log.info("log %s, registry %s", _absolute_url("log", log_url), _absolute_url("registry", registry_url))
            stack.callback(_log.info, "stopped")
            sigterm.stops(server)
            await server.serve([listener])


def _listening_socket(host: str, port: int, backlog: int) -> socket.socket:
    """Listen before anything else is opened: a wrong address fails without side effects, and early clients wait."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ShardyardError(
                f"{host}:{port} is in use: choose another port with --port (0 picks a free one)"
            ) from None
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ShardyardError(
            f"cannot listen on {host}:{port} ({reason}): choose another address with --host and --port"
        ) from None


def _absolute_url(what: str, url: str) -> str:
    """The URL without a password and with an absolute path, since the same relative one is another log in another
    working directory."""
    engine = parse_url(what, url)
    return str(replace(engine, path=str(Path(engine.path).absolute())) if engine.engine == "sqlite" else engine)
