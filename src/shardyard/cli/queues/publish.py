"""`shardyard publish`: publish records from arguments or standard input."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from msgspec import structs
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from shardyard.cli.options import Json, integer_option, value_option
from shardyard.cli.output import print_json, print_message, print_table
from shardyard.cli.queues.options import TIME, Brokers, Topic, check_name, format_time, parse_time
from shardyard.cli.queues.session import Session, request
from shardyard.model import (
    TAG,
    TRACE,
    Appended,
    Headers,
    InvalidCall,
    InvalidValue,
    Record,
    ShardyardError,
    TooLarge,
    UnknownTopic,
)
from shardyard.runtime.clock import now_ms
from shardyard.wire.codec import encode
from shardyard.wire.media import JSON, MAX_DELAY_MS, MSGPACK

if TYPE_CHECKING:
    from shardyard.wire.records import Posted

BATCH_RECORDS = 500
CHUNK_BYTES = 1024 * 1024
MAX_LINE_BYTES = 4 * 1024 * 1024
RETRY_SECONDS = 30.0
"""How long a request is retried while no broker can be reached."""
MAX_DELAYED_JSON = 1_000
"""How many delayed records --json lists one by one."""
MAX_DELAYED_PRINTED = 10
"""How many delayed records are listed one by one without --json."""


def publish(
    topic: Topic,
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[VALUE...]",
            help="The records' values. Without any, each non-empty line of standard input is a record.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        value_option(
            "--key",
            "-k",
            metavar="KEY",
            help="The records' key. Default: none; then 100 or more that are sent together go to one partition, and "
            "others are distributed round-robin.",
        ),
    ] = None,
    record_id: Annotated[
        str | None, value_option("--id", metavar="ID", help="The id of a single record. Default: a generated one.")
    ] = None,
    tag: Annotated[
        str | None, value_option("--tag", metavar="TAG", help="The records' tag, by which groups can filter.")
    ] = None,
    trace: Annotated[
        str | None, value_option("--trace", metavar="ID", help="The records' trace id, for `search`.")
    ] = None,
    headers: Annotated[
        list[str] | None,
        value_option("--header", metavar="NAME=VALUE", help="A header of the records; may be repeated."),
    ] = None,
    delay: Annotated[
        float | None,
        value_option("--delay", metavar="SECONDS", help="Deliver the records after this time, at most 90 days."),
    ] = None,
    deliver_at: Annotated[
        str | None,
        value_option("--deliver-at", metavar="TIME", help=f"Deliver the records at this time, such as {TIME}."),
    ] = None,
    partition: Annotated[
        int | None, integer_option("--partition", help="Publish to this partition, whatever the key.")
    ] = None,
    json_lines: Annotated[
        bool, typer.Option("--json-lines", help="Read lines of JSON, as `consume --json` prints them.")
    ] = False,
    brokers: Brokers = None,
    json: Json = False,
) -> None:
    """Publish records, and return when they are durable.

    Prints how many records each partition got, and when delayed records will be delivered.

    With --json-lines, each line of standard input has a value (or value_base64), and may have key, id, tag, trace,
    headers, and delay (seconds) or deliver_at (ms since 1970).

    Examples:

      shardyard publish orders 'first' 'second' --key customer-7

      seq 1000000 | shardyard publish orders

      shardyard publish orders 'remind me' --delay 3600 --tag reminder --header source=cli

      shardyard publish orders 'happy new year' --id greeting-2027 --deliver-at 2027-01-01T00:00:00Z

      echo '{"value": "hello", "key": "alice", "delay": 5}' | shardyard publish orders --json-lines
    """
    check_name(topic)
    record_options = (values, key, record_id, tag, trace, headers, delay, deliver_at)
    if json_lines and any(given is not None for given in record_options):
        raise InvalidCall(
            "--json-lines takes everything about a record from its line: expected no values, and none of --key, --id, "
            "--tag, --trace, --header, --delay and --deliver-at"
        )
    if record_id is not None and len(values or ()) != 1:
        raise InvalidCall(f"--id is for a single record: expected one value, got {len(values or ())}")
    due = _due_time(delay, deliver_at)
    if partition is not None and partition < 0:
        raise InvalidValue("--partition", partition, "an integer of at least 0")
    all_headers = _headers(tag, trace, headers or [])
    request(brokers, "GET", "/healthz")  # fail at once if no broker can be reached
    with Session(brokers, RETRY_SECONDS, "auto") as session:
        publisher = _Publisher(session, topic, partition)
        if values:
            in_batches = _in_batches(map(os.fsencode, values))
            batches: Iterable[list[Posted]] = _to_records(in_batches, key, all_headers, due, record_id)
        elif json_lines:
            batches = _parse_json(_read_lines())
        else:
            non_empty = ([line for line in lines if line] for lines in _read_lines())
            batches = _to_records(non_empty, key, all_headers, due)
        publisher.publish(batches)
    if json:
        counts = {"records": publisher.count, "delayed": publisher.delayed_count}
        print_json(counts | {"stored": publisher.rows(), "later": publisher.delayed})
        return
    print_table(publisher.rows())
    for delayed in publisher.delayed[:MAX_DELAYED_PRINTED]:
        print_message(f"record {delayed['id']} will be delivered at {format_time(delayed['deliver_at'])}")
    if publisher.delayed_count > MAX_DELAYED_PRINTED:
        print_message(f"{publisher.delayed_count - MAX_DELAYED_PRINTED} more records will be delivered later")
    if not publisher.count:
        print_message("nothing to publish")


class _Publisher:
    """Publishes batches one after the other, which keeps their order, and counts the records on each partition."""

    def __init__(self, session: Session, topic: str, partition: int | None) -> None:
        from shardyard.client import Producer

        self.count = self.delayed_count = 0
        self.delayed: list[dict[str, Any]] = []
        """Ids and delivery times of the first delayed records."""
        self._session = session
        self._producer = Producer(session.brokers)
        self._topic = topic
        self._partition = partition
        self._rows: dict[int, dict[str, int]] = {}

    def publish(self, batches: Iterable[list["Posted"]]) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.completed:,.0f} records"), TimeElapsedColumn())
        try:
            with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
                task = bar.add_task("records", total=None)
                for batch in batches:
                    self._publish_batch(batch)
                    bar.update(task, completed=self.count)
        except (ShardyardError, KeyboardInterrupt) as error:
            if not self.count:
                if isinstance(error, UnknownTopic):
                    raise InvalidCall(f"{error}: `shardyard topics create {self._topic}` creates it") from None
                raise
            reason = str(error) or "interrupted"
            raise ShardyardError(f"{reason} (the first {self.count} records were published)") from None

    def _publish_batch(self, batch: list["Posted"]) -> None:
        if immediate := [posted.record for posted in batch if posted.due is None]:
            work = self._producer.publish(self._topic, immediate, partition=self._partition)
            self._add_stored(self._session.run(work))
        if delayed := [posted for posted in batch if posted.due is not None]:
            self._add_stored(self._publish_delayed(delayed))
        self.count += len(batch)

    def _publish_delayed(self, delayed: list["Posted"]) -> list[Appended]:
        """Returns where records were stored that turned out to be due already."""
        from shardyard.wire.records import PackedRecord, PackedRecords
        from shardyard.wire.responses import Published

        packed = [
            PackedRecord(r.value, r.key, r.id, list(r.headers), r.timestamp, posted.due)
            for posted in delayed
            for r in (posted.record,)
        ]
        body = encode(PackedRecords(packed), MSGPACK)
        headers = {"Content-Type": MSGPACK}
        path, query = f"/v1/topics/{self._topic}/records", {"partition": self._partition}
        response = self._session.run(self._session.brokers.call("POST", path, body, headers, query=query))
        published = response.decode(Published)
        self.delayed_count += published.delayed
        not_due = sorted(delayed, key=_due_or_zero)[len(delayed) - published.delayed :]  # the others were stored
        space = MAX_DELAYED_JSON - len(self.delayed)
        self.delayed += [{"id": posted.record.id, "deliver_at": posted.due} for posted in not_due[:space]]
        return [part.appended() for part in published.stored]

    def _add_stored(self, stored: list[Appended]) -> None:
        for part in stored:
            index, first = part.partition.index, part.first.offset
            row = self._rows.setdefault(index, {"partition": index, "records": 0, "first": first})
            row["records"] += part.count
            row["first"] = min(row["first"], first)

    def rows(self) -> list[dict[str, int]]:
        """The number of records that each partition got, with the offset of the first one."""
        return [self._rows[index] for index in sorted(self._rows)]


def _due_time(delay: float | None, deliver_at: str | None) -> Callable[[], int | None]:
    """A function that returns when a record published now is due, in ms since 1970, or None for at once."""
    max_seconds = MAX_DELAY_MS // 1000
    if delay is not None and deliver_at is not None:
        raise InvalidCall("expected --delay or --deliver-at, not both")
    if delay is not None:
        if not 0 <= delay <= max_seconds:
            raise InvalidValue("--delay", delay, f"seconds, 0 to {max_seconds} (90 days)")
        delay_ms = round(delay * 1000)
        return lambda: now_ms() + delay_ms
    due = parse_time("--deliver-at", deliver_at)
    if due is not None and due > now_ms() + MAX_DELAY_MS:
        raise InvalidValue("--deliver-at", deliver_at, "a time within the next 90 days")
    return lambda: due


def _due_or_zero(posted: "Posted") -> int:
    return posted.due or 0


def _headers(tag: str | None, trace: str | None, given: list[str]) -> Headers:
    pairs = [(TAG, tag), (TRACE, trace)]
    for header in given:
        name, equals, value = header.partition("=")
        if not equals:
            raise InvalidValue("--header", header, "NAME=VALUE")
        pairs.append((name, value))
    return tuple((name, os.fsencode(value)) for name, value in pairs if value is not None)


def _in_batches(values: Iterable[bytes]) -> Iterator[list[bytes]]:
    remaining = iter(values)
    while batch := list(islice(remaining, BATCH_RECORDS)):
        yield batch


def _read_lines() -> Iterator[list[bytes]]:
    """Read standard input as it arrives, and yield the complete lines of each chunk in batches."""
    rest = b""
    stdin = cast(io.BufferedReader, sys.stdin.buffer)
    while chunk := stdin.read1(CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise TooLarge("line in bytes", len(rest), MAX_LINE_BYTES)
        yield from _in_batches(lines)
    if rest:
        yield [rest]


def _to_records(
    batches: Iterable[list[bytes]],
    key: str | None,
    headers: Headers,
    due: Callable[[], int | None],
    record_id: str | None = None,
) -> Iterator[list["Posted"]]:
    from shardyard.wire.records import Posted

    key_bytes = None if key is None else os.fsencode(key)
    for batch in batches:
        due_ms = due()
        records = [Record.new(value, key_bytes, headers) for value in batch]
        if record_id is not None:
            records = [structs.replace(record, id=record_id) for record in records]
        yield [Posted(record, due_ms) for record in records]


def _parse_json(batches: Iterable[list[bytes]]) -> Iterator[list["Posted"]]:
    from shardyard.wire.records import Posted, decode_records

    line_number = 0
    for batch in batches:
        now, records = now_ms(), list[Posted]()
        for line in batch:
            line_number += 1
            try:
                records += decode_records(line, JSON, now) if line.strip() else []
            except InvalidCall as error:
                raise InvalidCall(f"line {line_number}: {error}") from None
        yield records
