"""`shardyard broker`: serve topics, records, groups and sharded queues over HTTP and WebSocket."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import contextlib
import ipaddress
import logging
import os
import re
import socket
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from shardyard.cli.logs import logs_on_stderr
from shardyard.cli.options import integer_option, value_option
from shardyard.cli.serving import Sigterm, absolute_url, listening_socket, reduce_stalls, without_packages
from shardyard.cli.stores import default_store
from shardyard.model import InvalidValue
from shardyard.model.extras import require

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 5_000
"""As in `ServerLimits`, which is not imported for --help."""

LogUrl = Annotated[str, typer.Option("--log", help="Where records are stored.", metavar="URL")]
RegistryUrl = Annotated[
    str | None,
    value_option(
        "--registry",
        metavar="URL",
        help="Where groups and settings are stored. Default: registry.db beside the log, or in its database.",
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
            help="A proxy, or a network of proxies, whose X-Forwarded-For header is trusted for the caller's address; "
            "may be repeated.",
            metavar="ADDRESS",
        ),
    ] = None,
    max_connections: Annotated[
        int, integer_option("--max-connections", help="Connections that may be open at a time; others get status 503.")
    ] = MAX_CONNECTIONS,
    node_name: Annotated[
        str | None,
        value_option(
            "--node-name",
            metavar="NAME",
            help="The name of this broker as a node of sharded queues, by which its shards are named. Keep it when you "
            "restart the broker. Default: shardyard-PORT@HOSTNAME.",
        ),
    ] = None,
    address: Annotated[
        str | None,
        value_option(
            "--address",
            metavar="URL",
            help="Where clients of sharded queues and other nodes reach this broker. Default: where it listens; on "
            "0.0.0.0 and ::, by the name of this host.",
        ),
    ] = None,
) -> None:
    """Run a broker, which serves topics, records, groups and sharded queues over HTTP and WebSocket until it is
    interrupted.

    Several brokers may share one log and registry: sqlite:/// on one machine, postgresql:// on any number of them, with
    the password in the URL, in PGPASSWORD or in ~/.pgpass. With SHARDYARD_TOKEN set, callers must send that token. The
    API is documented at /docs.

    Examples:

      shardyard broker

      shardyard broker --log sqlite:///data/log --registry sqlite:///data/registry.db --port 7401

      shardyard broker --log postgresql://yard@db/yard --registry postgresql://yard@db/yard

      shardyard broker --trust-proxy 127.0.0.1

      shardyard broker --host 0.0.0.0 --node-name a --address http://10.0.0.5:7400
    """
    if not 0 <= port < 65536:
        raise InvalidValue("--port", port, "0 to 65535")
    if max_connections < 1:
        raise InvalidValue("--max-connections", max_connections, "at least 1")
    _check_proxies(trust_proxy or ())
    _check_node(node_name, address)
    if registry is None:
        registry = default_store("--registry", "log", log, "registry.db")
    for option, url in (("--log", log), ("--registry", registry)):
        if url == "memory://":
            expected = "storage that outlives the broker, such as sqlite:///data/log (memory:// is for programs)"
            raise InvalidValue(option, url, expected)
    require("server", "the broker")
    import uvloop  # only the broker needs it

    token = os.environ.get("SHARDYARD_TOKEN") or None
    # Where they are installed, `placement` loads numba, and PyArrow pandas. That would double the memory of a broker,
    # and make little difference to the speed: its batches are small.
    with without_packages("numba", "pandas"), Sigterm() as sigterm, logs_on_stderr():
        uvloop.run(
            _serve(log, registry, host, port, token, trust_proxy or (), max_connections, node_name, address, sigterm)
        )


def _check_proxies(addresses: Sequence[str]) -> None:
    for address in addresses:
        try:
            ipaddress.ip_network(address)
        except ValueError:
            expected = "an IP address or a network, such as 127.0.0.1 or 10.0.0.0/8"
            raise InvalidValue("--trust-proxy", address, expected) from None


def _check_node(name: str | None, address: str | None) -> None:
    if name is not None and (not name or any(character.isspace() or character == "/" for character in name)):
        raise InvalidValue("--node-name", name, "a name without spaces and '/', such as shardyard-7400@host")
    if address is not None and not re.fullmatch(r"https?://[^/\s]+/?", address):
        raise InvalidValue("--address", address, "a URL such as http://10.0.0.5:7400")


async def _serve(
    log_url: str,
    registry_url: str,
    host: str,
    port: int,
    token: str | None,
    trusted: Sequence[str],
    max_connections: int,
    node_name: str | None,
    address: str | None,
    sigterm: Sigterm,
) -> None:
    from shardyard.log import open_log
    from shardyard.registry import open_registry
    from shardyard.server.app import BACKLOG, serving
    from shardyard.server.limits import ServerLimits, raise_open_files
    from shardyard.server.sharding.host import NodeOptions

    reduce_stalls()
    limits = ServerLimits(connections=max_connections)
    raise_open_files(max_connections)
    with (
        contextlib.ExitStack() as stack,
        listening_socket(host, port, BACKLOG) as listener,
        open_registry(registry_url) as registry,
    ):
        listens_on, bound_port = listener.getsockname()[:2]
        node = NodeOptions.of(address or _reached_at(listens_on, bound_port), bound_port, node_name)
        async with (
            open_log(log_url) as log,
            serving(
                *(log, registry),
                host=host,
                port=port,
                token=token,
                trusted_proxies=trusted,
                limits=limits,
                node=node,
            ) as server,
        ):
            sys.stdout.write(f"listening on {_url(listens_on, bound_port)}\n")
            sys.stdout.flush()
            _log.info("log %s, registry %s", absolute_url("log", log_url), absolute_url("registry", registry_url))
            stack.callback(_log.info, "stopped")
            sigterm.stops(server)
            await server.serve([listener])


def _reached_at(host: str, port: int) -> str:
    """Where others reach a server that listens there."""
    return _url(socket.gethostname() if ipaddress.ip_address(host).is_unspecified else host, port)


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
