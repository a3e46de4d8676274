"""`shardyard coordinator` and `shardyard fanout-worker`: the processes between channels and inboxes."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import contextlib
import ipaddress
import logging
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardyard.cli.fanout.options import DEFAULT_LOG, LogUrl, RegistryUrl, registry_url
from shardyard.cli.logs import logs_on_stderr
from shardyard.cli.options import integer_option, value_option
from shardyard.cli.processes import run_processes, stop_with_parent
from shardyard.cli.serving import Sigterm, absolute_url, listening_socket, reduce_stalls, without_packages
from shardyard.model import InvalidValue
from shardyard.model.extras import require

if TYPE_CHECKING:
    from shardyard.fanout.modes import Role
    from shardyard.server.fanout.app import FanoutOptions

_log = logging.getLogger(__name__)

COORDINATOR_PORT = 7600
WORKER_PORT = 7700

Host = Annotated[str, typer.Option("--host", metavar="HOST", help="The address to listen on.")]
Port = Annotated[int, integer_option("--port", "-p", help="The port to listen on; 0 picks a free one.")]
Processes = Annotated[int, integer_option("--processes", help="How many to run, on this port and those after it.")]
Address = Annotated[
    str | None, value_option("--address", metavar="URL", help="Where others reach it, if not where it listens.")
]


def coordinator(
    log: LogUrl = DEFAULT_LOG,
    registry: RegistryUrl = None,
    host: Host = "127.0.0.1",
    port: Port = COORDINATOR_PORT,
    processes: Processes = 1,
    address: Address = None,
) -> None:
    """Run a coordinator, which passes events of channels on to the partitions of the fan-out workers.

    Any number of coordinators may run; each forwards a share of the events. They are needed in the mode `partitioned`,
    which is the default, and stand by in the mode `replicated`. When workers are too far behind, coordinators wait for
    them. With SHARDYARD_TOKEN set, metrics and status require that token.

    Examples:

      shardyard coordinator

      shardyard coordinator --log postgresql://yard@db/yard --port 0
    """
    _run("coordinator", log, registry, host, port, processes, address)


def fanout_worker(
    log: LogUrl = DEFAULT_LOG,
    registry: RegistryUrl = None,
    host: Host = "127.0.0.1",
    port: Port = WORKER_PORT,
    processes: Processes = 1,
    address: Address = None,
    snapshot: Annotated[
        Path | None,
        value_option(
            "--snapshot",
            metavar="FOLDER",
            help="Begin with the routing snapshot of `shardyard pipeline routing`. Default: from the topics alone.",
        ),
    ] = None,
    assignor: Annotated[
        str | None,
        value_option(
            "--assignor",
            metavar="NAME",
            help="How workers share partitions, if they have not begun yet: sticky or contiguous. Default: sticky.",
        ),
    ] = None,
) -> None:
    """Run a fan-out worker, which finds the online members of channels, and delivers events to their inboxes.

    In the mode `partitioned`, each worker holds the members of a share of the channels; in the mode `replicated`, each
    holds all. A worker that joins loads its share before it takes it over. With SHARDYARD_TOKEN set, metrics and status
    require that token.

    Examples:

      shardyard fanout-worker

      shardyard fanout-worker --processes 2 --snapshot data/routing
    """
    if assignor not in (None, "sticky", "contiguous"):
        raise InvalidValue("--assignor", assignor, "sticky or contiguous")
    _run("worker", log, registry, host, port, processes, address, snapshot, assignor)


def _run(
    role: "Role",
    log: str,
    registry: str | None,
    host: str,
    port: int,
    processes: int,
    address: str | None,
    snapshot: Path | None = None,
    assignor: str | None = None,
) -> None:
    _check(host, port, processes, address)
    registry = registry_url(log, registry)
    if processes > 1:
        if address is not None:
            raise InvalidValue("--processes", processes, "1 with --address: start each process by itself")
        run_processes(processes, host, port)
        return
    require("server", f"the {role}")
    import uvloop

    # Unlike a broker, these hash all that they read: numba is worth its memory.
    with without_packages("pandas"), Sigterm(signal.SIGINT) as sigterm, logs_on_stderr():
        from shardyard.fanout.config import DEFAULT_CONFIG
        from shardyard.server.fanout.app import FanoutOptions

        options = FanoutOptions(
            address=address or "",
            admin_token=os.environ.get("SHARDYARD_TOKEN") or None,
            snapshot=snapshot,
            config=replace(DEFAULT_CONFIG, assignor=assignor or DEFAULT_CONFIG.assignor),
        )
        uvloop.run(_serve(role, log, registry, host, port, options, sigterm))


def _check(host: str, port: int, processes: int, address: str | None) -> None:
    if not 0 <= port < 65536:
        raise InvalidValue("--port", port, "0 to 65535")
    if processes < 1:
        raise InvalidValue("--processes", processes, "at least 1")
    if address is not None and not re.fullmatch(r"https?://[^/\s]+", address):
        raise InvalidValue("--address", address, "a URL such as http://10.0.0.5:7700")
    if address is None and _is_unspecified(host):
        raise InvalidValue("--host", host, "--address with it, because others can't connect to this one")


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


async def _serve(
    role: "Role",
    log_url: str,
    registry_url_: str,
    host: str,
    port: int,
    options: "FanoutOptions",
    sigterm: Sigterm,
) -> None:
    from shardyard.log import open_log
    from shardyard.registry import open_registry
    from shardyard.server.app import BACKLOG
    from shardyard.server.fanout.app import serving_fanout

    reduce_stalls()
    stop_with_parent()
    with (
        contextlib.ExitStack() as stack,
        listening_socket(host, port, BACKLOG) as listener,
        open_registry(registry_url_) as registry,
    ):
        async with (
            open_log(log_url) as log,
            serving_fanout(log, registry, role, listener.getsockname(), options) as server,
        ):
            address, bound_port = listener.getsockname()[:2]
            sys.stdout.write(f"listening on http://{f'[{address}]' if ':' in address else address}:{bound_port}\n")
            sys.stdout.flush()
            _log.info("log %s, registry %s", absolute_url("log", log_url), absolute_url("registry", registry_url_))
            stack.callback(_log.info, "stopped")
            sigterm.stops(server)
            await server.serve([listener])
