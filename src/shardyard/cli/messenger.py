"""`shardyard messenger`: serve users' clients over WebSocket. `shardyard drain`: send a server's clients elsewhere."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import asyncio
import contextlib
import ipaddress
import logging
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import structs

from shardyard.cli.broker import LogUrl, RegistryUrl
from shardyard.cli.history_worker import HistoryWorker, Stores
from shardyard.cli.logs import logs_on_stderr
from shardyard.cli.options import integer_option, value_option
from shardyard.cli.output import print_json
from shardyard.cli.processes import run_processes, stop_with_parent
from shardyard.cli.serving import Sigterm, absolute_url, listening_socket, reduce_stalls, without_packages
from shardyard.cli.stores import default_store
from shardyard.model import Conflict, InvalidCall, InvalidValue, ShardyardError
from shardyard.model.extras import require

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from shardyard.log import Log
    from shardyard.messaging.history import History
    from shardyard.server.messaging.app import MessengerOptions

_log = logging.getLogger(__name__)

DEFAULT_PORT = 7500
DEFAULT_PARTITIONS = 16
MAX_CLIENTS = 50_000
MIN_SECRET_BYTES = 32
"""As in `messaging.tokens`, which is not imported for --help."""


def messenger(
    log: LogUrl = "sqlite:///data/log",
    registry: RegistryUrl = None,
    history: Annotated[
        str | None,
        value_option(
            "--history",
            metavar="URL",
            help="Where conversations are stored. Default: history.db beside the registry, or in its database.",
        ),
    ] = None,
    tables: Annotated[
        Path | None,
        value_option(
            "--history-tables",
            metavar="FOLDER",
            help="Tables of `shardyard pipeline history`, for messages that the history does not have any more.",
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, integer_option("--port", "-p", help="The port to listen on; 0 picks a free one.")
    ] = DEFAULT_PORT,
    processes: Annotated[
        int, integer_option("--processes", help="How many servers to run, on this port and the ones after it.")
    ] = 1,
    mirror: Annotated[
        str,
        typer.Option(
            "--mirror",
            metavar="HOW",
            help="How the sender's other clients get a copy: log (through the log) or local (by the server).",
        ),
    ] = "log",
    address: Annotated[
        str | None,
        value_option("--address", metavar="URL", help="Where clients reach this server, if not where it listens."),
    ] = None,
    origin: Annotated[
        list[str] | None,
        typer.Option(
            "--origin",
            metavar="ORIGIN",
            help="Pages of this origin may connect, such as https://chat.example.com; may be repeated, * for all.",
        ),
    ] = None,
    partitions: Annotated[
        str | None,
        value_option("--own", metavar="LIST", help="Own these partitions, such as 0-15,20. Default: a fair share."),
    ] = None,
    topic_partitions: Annotated[
        int | None,
        integer_option(
            "--partitions",
            help=f"Partitions of the topic inbox, if it does not exist yet. Default: {DEFAULT_PARTITIONS}.",
        ),
    ] = None,
    max_clients: Annotated[
        int, integer_option("--max-clients", help="Clients that may be connected at a time.")
    ] = MAX_CLIENTS,
    rate: Annotated[
        float, typer.Option("--rate", metavar="NUMBER", help="Frames per second that a client may send.")
    ] = 50.0,
    certificate: Annotated[
        Path | None, value_option("--tls-certificate", metavar="FILE", help="Serve TLS with this certificate (PEM).")
    ] = None,
    key: Annotated[
        Path | None, value_option("--tls-key", metavar="FILE", help="The private key of the certificate (PEM).")
    ] = None,
) -> None:
    """Run a messaging server, which serves users' clients over WebSocket until it is interrupted.

    Several servers may share one log and registry: each owns a share of the partitions, and serves the users that
    belong to them. Clients find their server by themselves. With SHARDYARD_SECRET set (32 characters or more), a
    session takes that secret, or a token signed with it; without it, anyone who reaches the server may sign in as
    anyone, so it must listen on this machine only. With SHARDYARD_TOKEN set, metrics and draining require that token.
    Open http://127.0.0.1:7500 in a browser to chat.

    Examples:

      shardyard messenger

      shardyard messenger --processes 2 --mirror local

      shardyard messenger --log postgresql://yard@db/yard --host 0.0.0.0 --address wss://chat.example.com/v1/messaging
    """
    new_partitions = DEFAULT_PARTITIONS if topic_partitions is None else topic_partitions
    _check(port, processes, new_partitions, max_clients, rate, mirror)
    _check_reached(host, address, origin or [])
    if (certificate is None) != (key is None):
        raise InvalidValue("--tls-key", key, "a key and a certificate together")
    own = None if partitions is None else _parse_partitions(partitions)
    secret = _secret(host)
    stores = _stores(log, registry, history)
    if processes > 1:
        if own is not None or address is not None:
            raise InvalidValue("--processes", processes, "1 with --own or --address: start each server by itself")
        run_processes(processes, host, port)
        return
    require("server", "the messaging server")
    import uvloop

    with without_packages("numba", "pandas"), Sigterm(signal.SIGINT) as sigterm, logs_on_stderr():  # as in `broker`
        from shardyard.messaging.config import MessagingConfig
        from shardyard.server.messaging.app import MessengerOptions

        burst = max(200, int(4 * rate))
        options = MessengerOptions(
            stores_history=False,  # a process of its own does
            address=address or "",
            secret=secret,
            admin_token=os.environ.get("SHARDYARD_TOKEN") or None,
            origins=tuple(origin or ()),
            partitions=own,
            topic_partitions=new_partitions,
            clients=max_clients,
            tls_certificate=None if certificate is None else str(certificate),
            tls_key=None if key is None else str(key),
            config=MessagingConfig(mirror="local" if mirror == "local" else "log", rate=rate, burst=burst),
        )
        uvloop.run(_serve(stores, tables, host, port, options, topic_partitions, sigterm))


def _check(port: int, processes: int, partitions: int, clients: int, rate: float, mirror: str) -> None:
    if not 0 <= port < 65536:
        raise InvalidValue("--port", port, "0 to 65535")
    for name, value in (("--processes", processes), ("--partitions", partitions), ("--max-clients", clients)):
        if value < 1:
            raise InvalidValue(name, value, "at least 1")
    if not rate > 0:
        raise InvalidValue("--rate", rate, "more than 0")
    if mirror not in ("log", "local"):
        raise InvalidValue("--mirror", mirror, "log or local")


def _check_reached(host: str, address: str | None, origins: list[str]) -> None:
    """Clients are told this address: one that they can't reach would cut them off."""
    if address is not None and not re.fullmatch(r"wss?://[^/\s]+/v1/messaging", address):
        raise InvalidValue("--address", address, "a URL such as wss://chat.example.com/v1/messaging")
    is_unspecified = False
    with contextlib.suppress(ValueError):  # a name
        is_unspecified = ipaddress.ip_address(host).is_unspecified
    if address is None and is_unspecified:
        raise InvalidValue("--host", host, "--address with it, because clients can't connect to this one")
    for each in origins:
        if each != "*" and not re.fullmatch(r"https?://[^/\s]+", each):
            raise InvalidValue("--origin", each, "an origin such as https://chat.example.com, or *")


def _stores(log: str, registry: str | None, history: str | None) -> Stores:
    """The given ones, and for those that are not given the same database, if the others are in one."""
    if registry is None:
        registry = default_store("--registry", "log", log, "registry.db")
    if history is None:
        history = default_store("--history", "registry", registry, "history.db")
    stores = Stores(log, registry, history)
    for name, url in structs.asdict(stores).items():
        if url == "memory://":
            raise InvalidValue(f"--{name}", url, f"storage that outlives the server, such as sqlite:///data/{name}")
    return stores


def _secret(host: str) -> str | None:
    secret = os.environ.get("SHARDYARD_SECRET") or None
    if secret is not None:
        if len(secret.encode()) < MIN_SECRET_BYTES:
            raise InvalidCall(
                f"SHARDYARD_SECRET is too short: use {MIN_SECRET_BYTES} characters or more (`openssl rand -hex 32`)"
            )
        return secret
    is_local = host == "localhost"
    with contextlib.suppress(ValueError):
        is_local = is_local or ipaddress.ip_address(host).is_loopback
    if not is_local:
        raise InvalidCall(
            f"without SHARDYARD_SECRET anyone could sign in as anyone at {host}: set it, or listen on 127.0.0.1"
        )
    return None


def _parse_partitions(text: str) -> list[int]:
    """The partitions of a list such as `0-15,20`."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise InvalidValue("--own", text, "indexes and ranges of partitions, such as 0-15,20")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(found)


async def _serve(
    stores: Stores,
    tables: Path | None,
    host: str,
    port: int,
    options: "MessengerOptions",
    requested_partitions: int | None,
    sigterm: Sigterm,
) -> None:
    from shardyard.log import open_log
    from shardyard.registry import open_registry
    from shardyard.server.app import BACKLOG
    from shardyard.server.limits import raise_open_files
    from shardyard.server.messaging.app import serving_messenger

    reduce_stalls()
    stop_with_parent()
    raise_open_files(options.clients)
    with (
        contextlib.ExitStack() as stack,
        listening_socket(host, port, BACKLOG) as listener,
        open_registry(stores.registry) as registry,
    ):
        if options.secret is None:
            _log.warning("SHARDYARD_SECRET is not set: anyone on this machine may sign in as anyone")
        async with (
            open_log(stores.log) as log,
            _open_history(stores.history, tables) as history,
            HistoryWorker(stores),
            serving_messenger(log, registry, history, listener.getsockname(), options) as server,
        ):
            address, bound_port = listener.getsockname()[:2]
            scheme = "http" if options.tls_certificate is None else "https"
            sys.stdout.write(f"listening on {scheme}://{f'[{address}]' if ':' in address else address}:{bound_port}\n")
            sys.stdout.flush()
            _log.info(
                "log %s, registry %s, history %s",
                *(absolute_url(name, url) for name, url in structs.asdict(stores).items()),
            )
            if requested_partitions is not None:
                await _warn_of_other_partitions(log, requested_partitions)
            stack.callback(_log.info, "stopped")
            sigterm.stops(server)
            await server.serve([listener])


async def _warn_of_other_partitions(log: "Log", requested: int) -> None:
    """The topic may have been created with another number of partitions."""
    from shardyard.log.router import current_topic
    from shardyard.wire.inbox import TOPIC

    topic = await current_topic(log, TOPIC)
    if topic.receiving != requested:
        _log.warning(
            "--partitions %d has no effect: the topic %s exists with %d (`shardyard pipeline reshard` changes that)",
            requested,
            topic.name,
            topic.receiving,
        )


@contextlib.asynccontextmanager
async def _open_history(url: str, tables: Path | None) -> "AsyncIterator[History]":
    from shardyard.messaging.history import open_history

    async with open_history(url) as database:
        if tables is None:
            yield database
            return
        from shardyard.messaging.history.layered import LayeredHistory
        from shardyard.messaging.history.tables import HistoryTables

        yield LayeredHistory(database, HistoryTables(tables))


def drain(
    server: Annotated[
        str, typer.Argument(metavar="SERVER", help="The address of the server, such as http://127.0.0.1:7500.")
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Also if there is no other server, so that nobody serves its users.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a sentence.")] = False,
) -> None:
    """Send all clients of a messaging server to the other servers, before it is stopped or upgraded.

    It owns no partitions any more when the command returns, and can be stopped. Stopping it by SIGTERM does the same.
    The last server is drained only with --force: its users are not served until another one is started.

    Examples:

      shardyard drain http://127.0.0.1:7501

      shardyard drain http://127.0.0.1:7500 --force --json
    """
    from shardyard.client.brokers import server_address

    url = server_address(server, "server", DEFAULT_PORT)
    others = asyncio.run(_drain(url, os.environ.get("SHARDYARD_TOKEN"), force=force))
    if json:
        print_json({"server": url, "others": others})
    else:
        sys.stdout.write(f"{server} is drained\n")
    if not others and not force:  # the others have gone meanwhile
        sys.stderr.write("there is no other server: its users are not served until one is started\n")


async def _drain(server: str, token: str | None, *, force: bool) -> int:
    """Returns how many other servers there are."""
    import aiohttp

    from shardyard.client.carrier import response_body
    from shardyard.client.http import reason
    from shardyard.wire.codec import decode
    from shardyard.wire.messaging import Drained

    headers = {} if not token else {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        try:
            async with http.post(f"{server}/v1/drain", params={} if force else {"unless_last": "true"}) as response:
                body = response_body(response.status, await response.read(), response.content_type)
                return decode(body, Drained).others
        except Conflict as error:
            raise ShardyardError(f"{error}: start another one, or drain it with --force") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ShardyardError(f"{server} can't be reached: {reason(error)}") from None
