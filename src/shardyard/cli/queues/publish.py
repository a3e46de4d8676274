"""`shardyard publish`: records from arguments or standard input."""

import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from shardyard.cli.output import Count, Json, print_json, print_table, say
from shardyard.cli.queues.options import TIME, Brokers, Session, Text, Topic, ask, checked, shown_time, time_ms
from shardyard.model import (
    TAG,
    TRACE,
    Appended,
    Conflict,
    Denied,
    Headers,
    InvalidCall,
    InvalidValue,
    Record,
    ShardyardError,
    TooLarge,
)

if TYPE_CHECKING:
    from shardyard.wire.records import Posted

BATCH_RECORDS = 500
CHUNK_BYTES = 1024 * 1024
MOST_LINE_BYTES = 4 * 1024 * 1024
PATIENCE_SECONDS = 30.0
"""For which brokers may be out of reach meanwhile."""
MOST_LATER = 1_000
"""Delayed records that are told one by one in --json; people are told of a few."""
FEW = 10


def publish(
    topic: Topic,
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[VALUE...]",
            help="One record each. Without any: standard input, one a line; empty lines are skipped.",
        ),
    ] = None,
    key: Annotated[
        str | None, Text("--key", "-k", metavar="KEY", help="Of all of them. Default: distributed in turn.")
    ] = None,
    record_id: Annotated[
        str | None, Text("--id", metavar="ID", help="Of the one record. Default: one is made up.")
    ] = None,
    tag: Annotated[str | None, Text("--tag", metavar="TAG", help="By which groups choose what they get.")] = None,
    trace: Annotated[str | None, Text("--trace", metavar="ID", help="A trace id, to search for.")] = None,
    headers: Annotated[
        list[str] | None, Text("--header", metavar="NAME=VALUE", help="May be given several times.")
    ] = None,
    delay: Annotated[
        float | None, Text("--delay", metavar="SECONDS", help="Until they are delivered, up to 90 days.")
    ] = None,
    deliver_at: Annotated[
        str | None, Text("--deliver-at", metavar="TIME", help=f"When they are delivered, such as {TIME}.")
    ] = None,
    partition: Annotated[int | None, Count("--partition", help="The partition they go to, whatever their key.")] = None,
    json_lines: Annotated[
        bool, typer.Option("--json-lines", help="Lines are JSON, as `consume --json` prints them.")
    ] = False,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Publish records; done when they are durable. Says how many went where, and which are delivered later.

    A line of --json-lines has a value (or value_base64), and may have key, id, tag, trace, headers, and delay (seconds)
    or deliver_at (ms since 1970).

    Examples:

      shardyard publish orders 'first' 'second' --key customer-7

      seq 1000000 | shardyard publish orders

      shardyard publish orders 'remind me' --delay 3600 --tag reminder --header source=cli

      shardyard publish orders 'happy new year' --id greeting-2027 --deliver-at 2027-01-01T00:00:00Z

      echo '{"value": "hello", "key": "alice", "delay": 5}' | shardyard publish orders --json-lines
    """
    checked(topic)
    alone = (values, key, record_id, tag, trace, headers, delay, deliver_at)
    if json_lines and any(option is not None for option in alone):
        raise InvalidCall("--json-lines takes all but --partition from standard input: expected no value, key or such")
    if record_id is not None and len(values or ()) != 1:
        raise InvalidCall(f"--id is that of one record: expected one value, got {len(values or ())}")
    due = _due(delay, deliver_at)
    if partition is not None and partition < 0:
        raise InvalidValue("--partition", partition, "a whole number of at least 0")
    marks = _headers(tag, trace, headers or [])
    ask(brokers, "GET", "/healthz")  # complain at once if nobody is there
    with Session(brokers, PATIENCE_SECONDS) as session:
        publishing = _Publishing(session, topic, partition)
        if values:
            batches: Iterable[list[Posted]] = _posted(_batches(map(os.fsencode, values)), key, marks, due, record_id)
        elif json_lines:
            batches = _parsed(_lines())
        else:
            filled = ([line for line in lines if line] for lines in _lines())
            batches = _posted(filled, key, marks, due)
        publishing.all(batches)
    if json:
        counts = {"records": publishing.count, "delayed": publishing.delayed}
        print_json(counts | {"stored": publishing.rows(), "later": publishing.later})
        return
    print_table(publishing.rows())
    for later in publishing.later[:FEW]:
        say(f"record {later['id']} is delivered at {shown_time(later['deliver_at'])}")
    if publishing.delayed > FEW:
        say(f"so are {publishing.delayed - FEW} more, each at its time")
    if not publishing.count:
        say("nothing to publish")


class _Publishing:
    """Publishes batch after batch, so that the order holds, and counts what went where."""

    def __init__(self, session: Session, topic: str, partition: int | None) -> None:
        from shardyard.client import Producer  # noqa: PLC0415 slow to import

        self.count = self.delayed = 0
        self.later: list[dict[str, Any]] = []
        """Ids and times of the first delayed ones."""
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

    def _delay(self, later: list["Posted"]) -> list[Appended]:
        from shardyard.wire.codec import encode  # noqa: PLC0415 slow to import
        from shardyard.wire.media import MSGPACK  # noqa: PLC0415
        from shardyard.wire.records import PackedRecord, PackedRecords  # noqa: PLC0415
        from shardyard.wire.responses import Published  # noqa: PLC0415

        packed = [
            PackedRecord(r.value, r.key, r.id, list(r.headers), r.timestamp, posted.due)
            for posted in later
            for r in (posted.record,)
        ]
        body = encode(PackedRecords(packed), MSGPACK)
        kind = {"Content-Type": MSGPACK}
        path, query = f"/v1/topics/{self._topic}/records", {"partition": self._partition}
        response = self._session.wait(self._session.brokers.call("POST", path, body, kind, query=query))
        published = response.decode(Published)
        self.delayed += published.delayed
        late = sorted(later, key=_time)[len(later) - published.delayed :]  # what is due already is stored
        room = MOST_LATER - len(self.later)
        self.later += [{"id": posted.record.id, "deliver_at": posted.due} for posted in late[:room]]
        return [part.appended() for part in published.stored]

    def _note(self, stored: list[Appended]) -> None:
        for part in stored:
            index, first, last = part.partition.index, part.first.offset, part.first.offset + part.count - 1
            row = self._parts.setdefault(index, {"partition": index, "records": 0, "first": first, "last": last})
            row["records"] += part.count
            row["first"], row["last"] = min(row["first"], first), max(row["last"], last)

    def rows(self) -> list[dict[str, int]]:
        """How many went to each partition, and the first and last of their offsets."""
        return [self._parts[index] for index in sorted(self._parts)]


def _due(delay: float | None, deliver_at: str | None) -> Callable[[], int | None]:
    """When what is published now is delivered, in ms since 1970; None: at once."""
    from shardyard.model.batch import now_ms  # noqa: PLC0415 slow to import
    from shardyard.queues.delays import MAX_DELAY_MS  # noqa: PLC0415

    most = MAX_DELAY_MS // 1000
    if delay is not None and deliver_at is not None:
        raise InvalidCall("expected either --delay or --deliver-at")
    if delay is not None:
        if not 0 <= delay <= most:
            raise InvalidValue("--delay", delay, f"seconds, 0 to {most} (90 days)")
        wait = round(delay * 1000)
        return lambda: now_ms() + wait
    at = time_ms("--deliver-at", deliver_at)
    if at is not None and at > now_ms() + MAX_DELAY_MS:
        raise InvalidValue("--deliver-at", deliver_at, "a time within the next 90 days")
    return lambda: at


def _time(posted: "Posted") -> int:
    return posted.due or 0


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
    batches: Iterable[list[bytes]],
    key: str | None,
    headers: Headers,
    due: Callable[[], int | None],
    record_id: str | None = None,
) -> Iterator[list["Posted"]]:
    from shardyard.wire.records import Posted  # noqa: PLC0415 slow to import

    key_bytes = None if key is None else os.fsencode(key)
    for batch in batches:
        at = due()
        records = [Record.new(value, key_bytes, headers) for value in batch]
        if record_id is not None:
            records = [replace(record, id=record_id) for record in records]
        yield [Posted(record, at) for record in records]


def _parsed(batches: Iterable[list[bytes]]) -> Iterator[list["Posted"]]:
    from shardyard.model.batch import now_ms  # noqa: PLC0415 slow to import
    from shardyard.wire.media import JSON  # noqa: PLC0415
    from shardyard.wire.records import Posted, decode_records  # noqa: PLC0415

    number = 0
    for batch in batches:
        now, records = now_ms(), list[Posted]()
        for line in batch:
            number += 1
            try:
                records += decode_records(line, JSON, now) if line.strip() else []
            except (InvalidCall, Conflict, Denied) as error:
                raise InvalidCall(f"line {number}: {error}") from None
        yield records
