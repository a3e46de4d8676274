"""`shardyard pipeline ingest`: copy topics into a lake."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shardyard.cli.options import Json, integer_option, value_option
from shardyard.cli.output import print_json, print_message, print_table
from shardyard.cli.pipeline.options import LogUrl, Master, Memory, partition_counts, spark_session, successors
from shardyard.cli.serving import listening_socket
from shardyard.model import InvalidCall, InvalidValue, whole_number

if TYPE_CHECKING:
    from shardyard.pipeline.lake.progress import Progress as IngestProgress
    from shardyard.pipeline.lake.restarts import Restart

EVERY_SECONDS = 5.0


def ingest(
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC...", help="The topics to ingest.")],
    log: LogUrl,
    lake: Annotated[
        Path, typer.Option("--lake", metavar="FOLDER", help="The lake's folder; created if it does not exist.")
    ],
    format: Annotated[  # noqa: A002 the option's name
        str | None,
        value_option(
            "--format",
            metavar="FORMAT",
            help="delta or parquet. Default: that of the lake; for a new one delta, if `install-delta` was run. "
            "With delta, a lake of plain Parquet files is converted.",
        ),
    ] = None,
    continuous: Annotated[
        bool, typer.Option("--continuous", help="Run until stopped (Ctrl-C, SIGTERM), not just until caught up.")
    ] = False,
    every: Annotated[
        float | None,
        value_option(
            "--every", metavar="SECONDS", help="With --continuous: how long to wait after catching up. Default: 5."
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        integer_option(
            "--max-restarts",
            help="With --continuous: give up after so many restarts without a batch in between.",
        ),
    ] = 10,
    port: Annotated[
        int | None,
        integer_option("--port", "-p", help="Serve /metrics and /healthz on this port; 0 picks a free one."),
    ] = None,
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="With --port: the address to listen on.")] = (
        "127.0.0.1"
    ),
    records_per_batch: Annotated[
        int, integer_option("--records-per-batch", help="The maximum number of records in a batch.")
    ] = 2_000_000,
    fail_on_data_loss: Annotated[
        bool,
        typer.Option(
            "--fail-on-data-loss/--allow-data-loss",
            help="Fail, which is the default, or continue if records were trimmed before they were ingested.",
        ),
    ] = True,
    master: Master = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Copy topics into a lake, each record exactly once.

    Run it again to continue where it stopped; topics that are in the lake already are brought up to date, too.
    FOLDER/records is a Delta table, or a folder of Parquet files, by topic and day. With --continuous, a query that
    fails is started again. With SHARDYARD_TOKEN set, metrics require that token.

    Examples:

      shardyard pipeline ingest orders --log sqlite:///data/log --lake data/lake

      shardyard pipeline ingest orders returns --log sqlite:///data/log --lake data/lake --continuous --every 30

      shardyard pipeline ingest orders --log sqlite:///data/log --lake data/lake --continuous --port 9090
    """
    whole_number("--records-per-batch", records_per_batch, at_least=1)
    if every is not None and not every >= 0:
        raise InvalidValue("--every", every, "seconds, at least 0")
    if every is not None and not continuous:
        raise InvalidCall("expected --every only with --continuous")
    whole_number("--max-restarts", max_restarts, at_least=0)
    if port is not None and not 0 <= port < 65536:
        raise InvalidValue("--port", port, "0 to 65535")
    partition_counts(log, topics)
    from shardyard.pipeline.lake.formats import check_format
    from shardyard.pipeline.lake.ingest import ingest as run
    from shardyard.pipeline.lake.lake import Lake

    Lake(lake).check()
    check_format(Lake(lake), format)
    Lake(lake).check_writable()
    stop = threading.Event()
    with _metrics(host, port), spark_session("ingest", master, memory, own_progress=True) as spark:
        if continuous:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: stop.set())
        with _ProgressBar() as bar:
            done = run(
                spark,
                log,
                topics,
                lake,
                format=format,
                continuous=continuous,
                every=EVERY_SECONDS if every is None else every,
                max_restarts=max_restarts,
                records_per_batch=records_per_batch,
                fail_on_data_loss=fail_on_data_loss,
                on_progress=bar.show,
                on_restart=_print_restart,
                stopped=stop.is_set,
            )
    for name, successor in successors(log, done.topics).items():
        print_message(f"{name!r} continues as {successor!r}, which has its records too: ingest that into another lake")
    if json:
        print_json(asdict(done))
    else:
        print_table([{**asdict(done), "topics": ",".join(done.topics)}])


@contextlib.contextmanager
def _metrics(host: str, port: int | None) -> Iterator[None]:
    """Serve metrics within the block, if there is a port to serve them on."""
    if port is None:
        yield
        return
    from shardyard.server.monitoring import CONNECTIONS, serving_metrics

    with listening_socket(host, port, CONNECTIONS) as listener:
        address, bound_port = listener.getsockname()[:2]
        print_message(f"metrics on http://{f'[{address}]' if ':' in address else address}:{bound_port}/metrics")
        with serving_metrics(listener, os.environ.get("SHARDYARD_TOKEN") or None):
            yield


def _print_restart(restart: "Restart") -> None:
    number = f"restart {restart.number} of at most {restart.limit}"
    print_message(f"the query failed, {number} in {restart.after:.1f} s: {restart.reason}")


class _ProgressBar:
    """A progress bar for the ingest, on a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("records", total=None)

    def __enter__(self) -> "_ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, progress: "IngestProgress") -> None:
        total = progress.records + progress.left
        self._progress.update(self._task, completed=progress.records, total=total or None)
