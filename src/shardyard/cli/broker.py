"""`shardyard broker`: serve topics, records and groups over HTTP."""

import errno
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from shardyard.cli.output import Count
from shardyard.log import open_log
from shardyard.model import InvalidValue, ShardyardError
from shardyard.registry import open_registry

LogUrl = Annotated[str, typer.Option("--log", help="Where records are.", metavar="URL")]
RegistryUrl = Annotated[str, typer.Option("--registry", help="Where groups and settings are.", metavar="URL")]


def broker(
    log: LogUrl = "sqlite:///data/log",
    registry: RegistryUrl = "sqlite:///data/registry.db",
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Count("--port", "-p", help="The port to listen on; 0 takes a free one.")] = 7400,
    trust_proxy: Annotated[
        list[str] | None,
        typer.Option("--trust-proxy", help="A proxy that says where callers are; may be repeated.", metavar="ADDRESS"),
    ] = None,
) -> None:
    """Serve topics, records and groups over HTTP, until interrupted. Several brokers may share a log and registry.

    With SHARDYARD_TOKEN set, callers must show that token. The API is described at /docs.

    Examples:

      shardyard broker

      shardyard broker --log sqlite:///data/log --registry sqlite:///data/registry.db --port 7401

      shardyard broker --trust-proxy 127.0.0.1
    """
    if not 0 <= port < 65536:
        raise InvalidValue("--port", port, "0 to 65535")
    if "memory://" in (log, registry):
        raise InvalidValue("--log and --registry", "memory://", "a place that lasts")
    uvloop.run(_serve(log, registry, host, port, os.environ.get("SHARDYARD_TOKEN") or None, trust_proxy or ()))


async def _serve(
    log_url: str, registry_url: str, host: str, port: int, token: str | None, trusted: Sequence[str]
) -> None:
    from shardyard.server.app import BACKLOG, serving  # noqa: PLC0415 a web server, which other commands do not need

    with _listening(host, port, BACKLOG) as listening, open_registry(registry_url) as registry:
        async with (
            open_log(log_url) as log,
            serving(log, registry, host=host, port=port, token=token, trusted_proxies=trusted) as server,
        ):
            at, taken = listening.getsockname()[:2]
            sys.stdout.write(f"listening on http://{f'[{at}]' if ':' in at else at}:{taken}\n")
            sys.stderr.write(f"log {_absolute(log_url)}, registry {_absolute(registry_url)}\n")
            sys.stdout.flush()
            await server.serve([listening])


def _listening(host: str, port: int, backlog: int) -> socket.socket:
    """Before anything else is opened. Who connects before the broker is up waits for it."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=backlog)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ShardyardError(
                f"{host}:{port} is in use: choose another port by --port (0 takes a free one)"
            ) from None
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ShardyardError(
            f"{host}:{port} can't be listened on ({why}): choose another by --host and --port"
        ) from None


def _absolute(url: str) -> str:
    """Brokers in two folders, with the same words, serve two logs: say which."""
    scheme, slashes, path = url.partition(":///")
    return f"{scheme}{slashes}{Path(path).absolute()}" if slashes else scheme
