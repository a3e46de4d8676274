"""`shardyard fanout`: the state of the fan-out, which mode suits it, and migrations."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.status import Status

from shardyard.cli.fanout.options import DEFAULT_LOG, LogUrl, RegistryUrl, existing_stores, user
from shardyard.cli.options import Json, integer_option
from shardyard.cli.output import print_json, print_message, print_tables
from shardyard.model import InvalidValue, ShardyardError, WrongToken
from shardyard.model.extras import require

if TYPE_CHECKING:
    from shardyard.fanout.advice import Advice, Thresholds
    from shardyard.fanout.migration import Progress
    from shardyard.fanout.modes import Mode, ModeState
    from shardyard.fanout.status import FanoutStatus
    from shardyard.groups import Node
    from shardyard.wire.fanout import TableFigures

app = typer.Typer(name="fanout", help="Show, advise on and migrate the fan-out of channels.", no_args_is_help=True)

ANSWER_SECONDS = 5.0
"""How long a worker may take to say how large its table is."""
MAX_ONLINE = 500_000
MAX_GIGABYTES = 10.0
"""As in `fanout.advice`, which is not imported for --help."""
DEFAULT_WAIT_SECONDS = 300.0


@contextlib.asynccontextmanager
async def _opened(log_url: str, registry_url: str) -> "AsyncIterator[Node]":
    """A node that takes no part in anything."""
    from shardyard.groups import Node
    from shardyard.log import open_log
    from shardyard.registry import open_registry

    with open_registry(registry_url) as registry:
        async with open_log(log_url) as log:
            node = Node(log, registry, name=f"{user()} (command line)")
            try:
                yield node
            finally:
                await asyncio.to_thread(node.transactions.close)


@app.command("status")
def status(log: LogUrl = DEFAULT_LOG, registry: RegistryUrl = None, json: Json = False) -> None:
    """Show the mode, the coordinators and workers that run, what waits for them, and hot channels.

    Examples:

      shardyard fanout status

      shardyard fanout status --log postgresql://yard@db/yard --json
    """
    stores = existing_stores(log, registry)
    require("server", "fanout status")
    found = asyncio.run(_status(*stores))
    if json:
        print_json(msgspec.to_builtins(found))
        return
    mode = {"mode": found.mode, "phase": found.phase, "to": found.to, "version": found.version}
    print_tables(
        {
            "mode": [mode],
            "processes": [msgspec.to_builtins(each) for each in found.processes],
            "topics": [msgspec.to_builtins(each) for each in found.topics],
            "hot channels": [{"channel": name, "ways": ways} for name, ways in found.hot_channels.items()],
        }
    )
    if found.waits_for:
        print_message(f"the migration to {found.to} is {found.phase}, and waits for {found.waits_for}")
    if found.buffer_full:
        print_message(found.buffer)
    for role in ("coordinator", "worker"):
        if not any(each.role == role for each in found.processes) and (role, found.mode) != (
            "coordinator",
            "replicated",
        ):
            print_message(f"no {role} is running: nothing is delivered to channels")


async def _status(log_url: str, registry_url: str) -> "FanoutStatus":
    from shardyard.fanout.status import fanout_status

    async with _opened(log_url, registry_url) as node:
        return await fanout_status(node)


@app.command("advise")
def advise(
    log: LogUrl = DEFAULT_LOG,
    registry: RegistryUrl = None,
    max_online: Annotated[
        int, integer_option("--max-online", help="Users online up to which `replicated` suits.")
    ] = MAX_ONLINE,
    max_gigabytes: Annotated[
        float, typer.Option("--max-gigabytes", metavar="NUMBER", help="Size of the table up to which it suits.")
    ] = MAX_GIGABYTES,
    json: Json = False,
) -> None:
    """Recommend a mode, by the size of the workers' routing tables and the users that are online.

    All workers that run are asked, so SHARDYARD_TOKEN has to be theirs.

    Examples:

      shardyard fanout advise

      shardyard fanout advise --max-online 200000 --max-gigabytes 4 --json
    """
    from shardyard.fanout.advice import GIGABYTE, Thresholds

    if max_online < 1:
        raise InvalidValue("--max-online", max_online, "at least 1")
    if not max_gigabytes > 0:
        raise InvalidValue("--max-gigabytes", max_gigabytes, "more than 0")
    stores = existing_stores(log, registry)
    require("server", "fanout advise")
    advice = asyncio.run(_advise(*stores, Thresholds(max_online, max(int(max_gigabytes * GIGABYTE), 1))))
    if json:
        print_json(msgspec.to_builtins(advice))
        return
    measured = {name: getattr(advice, name) for name in ("workers", "online", "channels", "memberships", "table_bytes")}
    sizes = {"replicated": advice.replicated_bytes, "partitioned": advice.partitioned_bytes}
    print_tables(
        {
            "measured": [measured],
            "bytes per worker": [sizes],
            "advice": [{"mode": advice.mode, "advised": advice.advised, "reason": advice.reason}],
        }
    )
    if advice.changes:
        print_message(f"to change it: shardyard fanout migrate --to {advice.advised}")


async def _advise(log_url: str, registry_url: str, thresholds: "Thresholds") -> "Advice":
    from shardyard.fanout.advice import advise as advice_for
    from shardyard.fanout.modes import read_state
    from shardyard.fanout.status import worker_addresses

    async with _opened(log_url, registry_url) as node:
        state, addresses = await node.transactions.read(lambda tx: (read_state(tx), worker_addresses(tx)))
    if not addresses:
        raise ShardyardError("no fan-out worker is running: start one with `shardyard fanout-worker`, then ask again")
    tables = [table for address in addresses if (table := await _table_of(address)) is not None]
    if not tables:
        raise ShardyardError(
            f"none of {', '.join(addresses)} says how large its routing table is: see the messages above"
        )
    return advice_for(state.mode, tables, thresholds)


async def _table_of(address: str) -> "TableFigures | None":
    """The table of a worker; None if it does not answer, or has none yet."""
    import aiohttp

    from shardyard.client.carrier import response_body
    from shardyard.client.http import reason
    from shardyard.wire.codec import decode
    from shardyard.wire.fanout import ProcessStatus

    token = os.environ.get("SHARDYARD_TOKEN")
    headers = {} if not token else {"Authorization": f"Bearer {token}"}
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
        try:
            async with http.get(f"{address}/v1/status") as response:
                body = response_body(response.status, await response.read(), response.content_type)
                return decode(body, ProcessStatus).table
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            print_message(f"{address} can't be reached, and does not count: {reason(error)}")
        except WrongToken as error:
            print_message(f"{address} does not count: {error}: set SHARDYARD_TOKEN to that of the worker")
        except ShardyardError as error:
            print_message(f"{address} does not count: {error}")
    return None


@app.command("migrate")
def migrate(
    to: Annotated[
        str, typer.Option("--to", metavar="MODE", help="The mode: partitioned or replicated.", show_default=False)
    ],
    log: LogUrl = DEFAULT_LOG,
    registry: RegistryUrl = None,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", help="Fail if it takes longer. The migration goes on.")
    ] = DEFAULT_WAIT_SECONDS,
    force: Annotated[
        bool, typer.Option("--force", help="Also if no coordinator or worker runs that the mode needs.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a sentence.")] = False,
) -> None:
    """Migrate the fan-out to another mode while it works, and return when that is done.

    Events that arrive meanwhile wait, and none is lost or delivered twice. If the command is interrupted or fails, the
    coordinators and workers go on by themselves; run it again to follow them. Migrating back to the mode that it began
    with cancels a migration that is under way.

    Examples:

      shardyard fanout migrate --to partitioned

      shardyard fanout migrate --to replicated --wait 60 --log postgresql://yard@db/yard
    """
    from shardyard.fanout.modes import check_mode

    mode = check_mode(to)
    if not wait > 0:
        raise InvalidValue("--wait", wait, "more than 0 seconds")
    stores = existing_stores(log, registry)
    require("server", "fanout migrate")
    try:
        before, after = asyncio.run(_migrate(*stores, mode, wait, force))
    except KeyboardInterrupt:
        print_message("interrupted: the migration goes on by itself; see `shardyard fanout status`")
        raise
    changed = before.version != after.version
    if json:
        print_json({"mode": after.mode, "version": after.version, "changed": changed})
    else:
        print_message(f"the mode is {after.mode}" if changed else f"the mode is {after.mode} already")


async def _migrate(
    log_url: str, registry_url: str, to: "Mode", seconds: float, force: bool
) -> "tuple[ModeState, ModeState]":
    """The states before and after."""
    from shardyard.fanout.migration import Migration

    console = Console(stderr=True)
    with console.status("migrating") if console.is_terminal else contextlib.nullcontext() as line:
        async with _opened(log_url, registry_url) as node:
            migration = Migration(node.log, node.registry, node.transactions, node.clock, user())
            before = await migration.state()
            report = _Report(line)
            return before, await migration.migrate(to, seconds=seconds, progress=report.show, force=force)


class _Report:
    """Shows how far a migration is: on a terminal in a line that changes, in a pipe a line for each phase."""

    def __init__(self, line: Status | None) -> None:
        self._line = line
        self._phase: Any = None

    def show(self, progress: "Progress") -> None:
        state = progress.state
        if not state.is_migrating:
            return
        if self._line is not None:
            self._line.update(f"{state.phase}: waiting for {progress.waits_for}")
        elif state.phase != self._phase:
            print_message(f"{state.phase}: waiting for {progress.waits_for}")
        self._phase = state.phase
