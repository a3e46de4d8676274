"""`shardyard broker`: serve topics, records and groups over HTTP."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from shardyard.cli.output import Count
from shardyard.log import open_log
from shardyard.model import InvalidCall, InvalidValue
from shardyard.registry import open_registry

LogUrl = Annotated[str, typer.Option("--log", help="The log.", metavar="URL")]
RegistryUrl = Annotated[str, typer.Option("--registry", help="The registry.", metavar="URL")]


def broker(
    log: LogUrl = "sqlite:///data/log",
    registry: RegistryUrl = "sqlite:///data/registry.db",
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
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
    from shardyard.queues.broker.app import BACKLOG, serving  # noqa: PLC0415 a web server, which other commands do not need

    with open_registry(registry_url) as registry:
        async with (
            open_log(log_url) as log,
            serving(log, registry, host=host, port=port, token=token, trusted_proxies=trusted) as server,
        ):
            try:
                listening = server.config.bind_socket()
            except SystemExit:
                raise InvalidCall(f"{host}:{port} can't be listened on: see above") from None
            listening.listen(BACKLOG)
            address = listening.getsockname()
            sys.stdout.write(f"listening on http://{address[0]}:{address[1]}\n")
            sys.stderr.write(f"log {_absolute(log_url)}, registry {_absolute(registry_url)}\n")
            sys.stdout.flush()
            await server.serve([listening])


def _absolute(url: str) -> str:
    """Brokers in two folders, with the same words, serve two logs: say which."""
    scheme, slashes, path = url.partition(":///")
    return f"{scheme}{slashes}{Path(path).absolute()}" if slashes else scheme
