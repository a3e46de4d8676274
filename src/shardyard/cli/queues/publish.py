"""`shardyard publish`: records from arguments or standard input."""

import io
import os
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from shardyard.cli.output import Count, Json, print_json, print_table
from shardyard.cli.queues.options import Brokers, Session, Topic, ask, checked, say
from shardyard.model import TAG, TRACE, Headers, InvalidCall, InvalidValue, Record, ShardyardError, TooLarge

if TYPE_CHECKING:
    from shardyard.queues.wire import Posted

BATCH_RECORDS = 500
CHUNK_BYTES = 1024 * 1024
MOST_LINE_BYTES = 4 * 1024 * 1024
PATIENCE_SECONDS = 30.0
"""For which brokers may be out of reach meanwhile."""


def publish(
    topic: Topic,
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="[VALUE...]", help="One record each. Without any: standard input, one a line."),
    ] = None,
    key: Annotated[str | None, typer.Option("--key", "-k", help="Of all of them. Default: dealt in turn.")] = None,
    tag: Annotated[str | None, typer.Option("--tag", help="By which groups choose what they get.")] = None,
    trace: Annotated[str | None, typer.Option("--trace", help="A trace id, to search for.")] = None,
    headers: Annotated[
        list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="May be given several times.")
    ] = None,
    delay: Annotated[float | None, typer.Option("--delay", help="Seconds until they are delivered.")] = None,
    partition: Annotated[int | None, Count("--partition", help="The partition they go to, whatever their key.")] = None,
    json_lines: Annotated[
        bool, typer.Option("--json-lines", help="Lines are JSON, as `consume --json` prints them.")
    ] = False,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Publish records; done when they are durable. Says how many went where.

    A line of --json-lines has a value (or value_base64), and may have key, id, tag, trace, headers, and delay.

    Examples:

      shardyard publish orders 'first' 'second' --key customer-7

      seq 1000000 | shardyard publish orders

      shardyard publish orders 'remind me' --delay 3600 --tag reminder --header source=cli

      echo '{"value": "hello", "key": "alice", "delay": 5}' | shardyard publish orders --json-lines
    """
    checked(topic)
    alone = (values, key, tag, trace, headers, delay)
    if json_lines and any(option is not None for option in alone):
        raise InvalidCall("--json-lines takes all but --partition from standard input: expected no value, key or such")
    if delay is not None and not 0 <= delay < 2**40:
        raise InvalidValue("--delay", delay, "seconds, at least 0")
    if partition is not None and partition < 0:
        raise InvalidValue("--partition", partition, "a whole number of at least 0")
    marks = _headers(tag, trace, headers or [])
    ask(brokers, "GET", "/healthz")  # complain at once if nobody is there
    with Session(brokers, PATIENCE_SECONDS) as session:
        publishing = _Publishing(session, topic, partition)
        if values:
            batches: Iterable[list[Posted]] = _posted(_batches(map(os.fsencode, values)), key, marks, delay)
        else:
            batches = _parsed(_lines()) if json_lines else _posted(_lines(), key, marks, delay)
        publishing.all(batches)
    if json:
        print_json({"records": publishing.count, "delayed": publishing.delayed, "stored": publishing.rows()})
        return
    print_table(publishing.rows())
    if publishing.delayed:
        say(f"{publishing.delayed} are delivered later")


class _Publishing:
    """Publishes batch after batch, so that the order holds, and counts what went where."""

    def __init__(self, session: Session, topic: str, partition: int | None) -> None:
        from shardyard.client import Producer  # noqa: PLC0415 slow to import

        self.count = self.delayed = 0
        self._session = session
        self._producer = Producer(session.brokers)
        self._topic = topic
        self._partition = partition
        self._parts: dict[int, dict[str, int]] = {}

    def all(self, batches: Iterable[list["Posted"]]) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.completed:,.0f} records"), TimeElapsedColumn())
        try:
            with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
                task = bar.add_task("records", total=None)
                for batch in batches:
                    self._publish(batch)
                    bar.update(task, completed=self.count)
        except (ShardyardError, KeyboardInterrupt) as error:
            if not self.count:
                raise
            why = str(error) or "interrupted"
            raise ShardyardError(f"{why} (the first {self.count} records are published)") from None

    def _publish(self, batch: list["Posted"]) -> None:
        if at_once := [posted.record for posted in batch if posted.due is None]:
            work = self._producer.publish(self._topic, at_once, partition=self._partition)
            self._note(self._session.wait(work))
        if later := [posted for posted in batch if posted.due is not None]:
            self._note(self._delay(later))
        self.count += len(batch)

    def _delay(self, later: list["Posted"]) -> list[dict[str, Any]]:
        from shardyard.queues import wire  # noqa: PLC0415 slow to import

        packed = [
            wire.PackedRecord(r.value, r.key, r.id, list(r.headers), r.timestamp, posted.due)
            for posted in later
            for r in (posted.record,)
        ]
        body = wire.packed(wire.PackedRecords(packed))
        kind = {"Content-Type": wire.MSGPACK}
        path, query = f"/v1/topics/{self._topic}/records", {"partition": self._partition}
        told = self._session.wait(self._session.brokers.call("POST", path, body, kind, query=query)).json()
        self.delayed += told["delayed"]
        stored: list[dict[str, Any]] = told["stored"]
        return stored

    def _note(self, stored: list[dict[str, Any]]) -> None:
        for part in stored:
            index, first, last = part["partition"], part["offset"], part["offset"] + part["count"] - 1
            row = self._parts.setdefault(index, {"partition": index, "records": 0, "first": first, "last": last})
            row["records"] += part["count"]
            row["first"], row["last"] = min(row["first"], first), max(row["last"], last)

    def rows(self) -> list[dict[str, int]]:
        """How many went to each partition, and the first and last of their offsets."""
        return [self._parts[index] for index in sorted(self._parts)]


def _headers(tag: str | None, trace: str | None, told: list[str]) -> Headers:
    pairs = [(TAG, tag), (TRACE, trace)]
    for header in told:
        name, equals, value = header.partition("=")
        if not equals:
            raise InvalidValue("--header", header, "NAME=VALUE")
        pairs.append((name, value))
    return tuple((name, os.fsencode(value)) for name, value in pairs if value is not None)


def _batches(values: Iterable[bytes]) -> Iterator[list[bytes]]:
    rest = iter(values)
    while some := list(islice(rest, BATCH_RECORDS)):
        yield some


def _lines() -> Iterator[list[bytes]]:
    """The lines of standard input, as soon as they come, as many together as there are."""
    rest = b""
    stdin = cast(io.BufferedReader, sys.stdin.buffer)
    while chunk := stdin.read1(CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MOST_LINE_BYTES:
            raise TooLarge("line in bytes", len(rest), MOST_LINE_BYTES)
        yield from _batches(lines)
    if rest:
        yield [rest]


def _posted(
    batches: Iterable[list[bytes]], key: str | None, headers: Headers, delay: float | None
) -> Iterator[list["Posted"]]:
    from shardyard.log.batch import now_ms  # noqa: PLC0415 slow to import
    from shardyard.queues.wire import Posted  # noqa: PLC0415

    key_bytes = None if key is None else os.fsencode(key)
    for batch in batches:
        due = None if delay is None else now_ms() + round(delay * 1000)
        yield [Posted(Record.new(value, key_bytes, headers), due) for value in batch]


def _parsed(batches: Iterable[list[bytes]]) -> Iterator[list["Posted"]]:
    from shardyard.log.batch import now_ms  # noqa: PLC0415 slow to import
    from shardyard.queues import wire  # noqa: PLC0415

    number = 0
    for batch in batches:
        now, records = now_ms(), list[wire.Posted]()
        for line in batch:
            number += 1
            try:
                records += wire.posted_records(line, wire.JSON, now) if line.strip() else []
            except InvalidCall as error:
                raise InvalidCall(f"line {number}: {error}") from None
        yield records
