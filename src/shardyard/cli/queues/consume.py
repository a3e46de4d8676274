"""`shardyard consume`: print records as they arrive, or run a command for each."""

# ruff: noqa: PLC0415 commands start quickly: what is slow to import is imported by those that need it

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from shardyard.cli.options import integer_option, value_option
from shardyard.cli.output import escape, escape_json, print_message, printable
from shardyard.cli.queues.options import Brokers, Group, check_group, check_name
from shardyard.cli.queues.session import addresses, explain_errors, request, token
from shardyard.model import Fenced, InvalidCall, InvalidValue, Partition, Record, Unreachable, whole_number

if TYPE_CHECKING:
    from shardyard.client import Consumer, Message

T = TypeVar("T")

BATCH_RECORDS = 500
REASON_BYTES = 500
"""How much of a failed command's standard error is kept as the reason."""
TERMINATE_SECONDS = 5.0
"""How long a command may take to exit after SIGTERM before it is killed."""


def consume(
    group: Group,
    topics: Annotated[
        list[str], typer.Argument(metavar="TOPIC...", help="The topics to subscribe to.", show_default=False)
    ],
    count: Annotated[int | None, integer_option("--count", "-n", help="Stop after this many records.")] = None,
    seconds: Annotated[
        float | None, value_option("--seconds", metavar="SECONDS", help="Stop after this many seconds.")
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(
            "--exec", metavar="CMD", help="Run this command for each record, with its value on standard input."
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        integer_option("--concurrency", help="With --exec: commands to run at once. Default: the group's setting."),
    ] = None,
    latest: Annotated[
        bool, typer.Option("--latest", help="If the group is new, skip the records that are already stored.")
    ] = False,
    name: Annotated[
        str | None, value_option("--name", metavar="NAME", help="The member's name. Default: a generated one.")
    ] = None,
    brokers: Brokers = None,
    json: Annotated[bool, typer.Option("--json", help="Print each record as one line of JSON.")] = False,
) -> None:
    """Join a group and print its records as they arrive. Printed records are committed. Ctrl-C leaves the group; before
    --count records it exits with 130.

    Prints partition, offset, key and value, separated by tabs, and finally, on standard error, the number of records.
    On a terminal, control characters are escaped; a pipe gets keys and values as they are, except tabs and newlines.

    With --exec, a record is done when the command exits with 0. If the command fails, the record is retried after the
    group's backoff, and becomes a dead letter after the last attempt. The command's environment has SHARDYARD_TOPIC,
    SHARDYARD_PARTITION, SHARDYARD_OFFSET, SHARDYARD_ID, SHARDYARD_ATTEMPT and, if the key is text, SHARDYARD_KEY.

    Examples:

      shardyard consume billing orders

      shardyard consume billing orders returns --json --count 100

      shardyard consume mailer reminders --exec 'sendmail ops@example.org' --concurrency 4
    """
    check_group(group)
    for topic in topics:
        check_name(topic)
    if count is not None:
        whole_number("--count", count, at_least=1)
    if concurrency is not None:
        whole_number("--concurrency", concurrency, at_least=1)
    if seconds is not None and not 0 < seconds < 2**40:
        raise InvalidValue("--seconds", seconds, "a number of more than 0")
    if command is not None and json:
        raise InvalidCall("expected --exec or --json, not both")
    request(brokers, "GET", "/healthz")  # fail at once if no broker can be reached
    options: dict[str, Any] = {"name": name, "start": "latest" if latest else "earliest"}
    stop = _Stop(count, seconds)
    urls = addresses(brokers)
    try:
        with explain_errors(), print_warnings(single_broker=len(urls) == 1):
            joined = asyncio.run(_consume(urls, group, topics, options, stop, command, concurrency, json=json))
    except BrokenPipeError:  # the reader of our output has exited, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    if not joined:
        print_message(f"stopped before it had joined group {group!r}")
    if not joined or (stop.signal is not None and stop.left):
        raise typer.Exit(1 if stop.signal is None else 128 + stop.signal)


@contextlib.contextmanager
def print_warnings(*, single_broker: bool) -> Iterator[None]:
    """Print the consumer's warnings to standard error while the block runs."""
    logger, handler = logging.getLogger("shardyard"), _WarningPrinter(single_broker=single_broker)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class _WarningPrinter(logging.Handler):
    """Prints warnings. If a single broker becomes unreachable, also explains, once, that there is no failover."""

    def __init__(self, *, single_broker: bool) -> None:
        super().__init__(logging.WARNING)
        self._explain = single_broker

    def emit(self, record: logging.LogRecord) -> None:
        print_message(record.getMessage())
        if self._explain and isinstance(record.args, tuple) and any(isinstance(a, Unreachable) for a in record.args):
            self._explain = False
            print_message("waiting for this broker: there is no other to fail over to (--broker may be repeated)")


class _Stop:
    """When to stop: after a number of records, after a number of seconds, or on SIGINT or SIGTERM."""

    def __init__(self, count: int | None, seconds: float | None) -> None:
        self.left = count
        self._seconds = seconds
        self.signal: int | None = None
        """The number of the signal that has come."""

    def start(self) -> None:
        """Start the timer, and handle signals from now on."""
        loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt, number)
        if self._seconds is not None:
            loop.call_later(self._seconds, self._stopped.set)

    def now(self) -> None:
        self._stopped.set()

    def _interrupt(self, number: int) -> None:
        self.signal = number
        self.now()

    async def run(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return what `work` returns. If it is time to stop before that, cancel the work and return None."""
        tasks: tuple[asyncio.Task[T], asyncio.Task[Any]]
        tasks = asyncio.create_task(work), asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _consume(
    urls: list[str],
    group: str,
    topics: Sequence[str],
    options: dict[str, Any],
    stop: _Stop,
    command: str | None,
    concurrency: int | None,
    *,
    json: bool,
) -> bool:
    """Returns whether it has joined the group."""
    from shardyard.client import Consumer

    stop.start()
    max_records = min(BATCH_RECORDS, stop.left or BATCH_RECORDS)
    consumer = Consumer(urls, group, topics, token=token(), max_records=max_records, **options)
    if await stop.run(consumer.__aenter__()) is None:  # joining may have to wait, for a broker or to be allowed
        return False
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_exit(consumer)
        if sys.stderr.isatty():
            print_message(f"joined group {group!r} as {consumer.member.name!r}; waiting for records")
        if command is None:
            printed = await _print_records(consumer, stop, json=json)
            print_message(f"{printed} printed")
        else:
            runner = _CommandRunner(command, stop)
            await stop.run(consumer.run(runner.handle, concurrency=concurrency))
            print_message(f"{runner.done} done, {runner.failed} failed")
            if stop.left is not None:
                stop.left -= runner.done + runner.failed
    return True


async def _print_records(consumer: "Consumer", stop: _Stop, *, json: bool) -> int:
    """Print and commit records until it is time to stop; returns how many were printed."""
    from shardyard.client.consumer import next_of

    format_record = _format_json if json else _format_tabs
    is_terminal = sys.stdout.isatty()
    batches = consumer.__aiter__()
    printed = 0
    while stop.left != 0 and (batch := await stop.run(next_of(batches))) is not None:
        rows = list(zip(batch.offsets(), batch.records(), strict=True))[: stop.left]
        records = [format_record(record, batch.partition, offset) for offset, record in rows]
        lines = b"".join(_escaped(line, json=json) + b"\n" if is_terminal else line + b"\n" for line in records)
        await asyncio.to_thread(_write, lines)
        is_whole_batch = len(rows) == len(batch)
        with contextlib.suppress(Fenced):  # the partition has another owner, which prints these records again
            await batch.commit(None if is_whole_batch else rows[-1][0] + 1)
        printed += len(rows)
        if stop.left is not None:
            stop.left -= len(rows)
    return printed


def _write(lines: bytes) -> None:
    """Runs in a thread, so that a slow reader of our output does not delay the member's heartbeats."""
    sys.stdout.buffer.write(lines)
    sys.stdout.buffer.flush()


def _format_tabs(record: Record, partition: Partition, offset: int) -> bytes:
    cells = (str(partition).encode(), b"%d" % offset, record.key or b"", record.value)
    return b"\t".join(cell.replace(b"\t", b"\\t").replace(b"\n", b"\\n") for cell in cells)


def _format_json(record: Record, partition: Partition, offset: int) -> bytes:
    from shardyard.wire.records import json_record

    return msgspec.json.encode(json_record(record, partition, offset))


def _escaped(line: bytes, *, json: bool) -> bytes:
    """The line for a terminal: what it would obey, or can't show, is escaped, all but the tabs between columns."""
    cells = line.decode(errors="backslashreplace").split("\t")
    return "\t".join(printable(cell, escape_json if json else escape) for cell in cells).encode()


class CommandFailed(Exception):
    """Raised when a command exits with another code than 0; has the end of its standard error."""


class _CommandRunner:
    """Runs a command for each record, up to the number of records after which to stop."""

    def __init__(self, command: str, stop: _Stop) -> None:
        self.done = self.failed = 0
        self._command = command
        self._stop = stop
        self._limit, self._started = stop.left, 0

    async def handle(self, message: "Message") -> None:
        if self._started == self._limit:
            await asyncio.Event().wait()  # never handled: it is cancelled when the commands that run are done
        self._started += 1
        try:
            await self._run(message)
            self.done += 1
        except CommandFailed:
            self.failed += 1
            raise
        finally:
            if self.done + self.failed == self._limit:
                self._stop.now()

    async def _run(self, message: "Message") -> None:
        """Run the command in a session of its own: Ctrl-C stops us, and must not make the command fail."""
        process = await asyncio.create_subprocess_shell(
            self._command,
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(message),
            start_new_session=True,
        )
        assert process.stdin is not None  # noqa: S101 mypy
        assert process.stderr is not None  # noqa: S101
        try:
            _, reason, code = await asyncio.gather(
                _write_stdin(process.stdin, message.value), _forward_stderr(process.stderr), process.wait()
            )
        finally:
            if process.returncode is None:
                await _terminate(process)
        if code:
            raise CommandFailed(f"exit code {code}" + (f": {reason}" if reason else ""))


def _environment(message: "Message") -> dict[str, str]:
    topic, partition, offset = message.origin.rsplit("/", 2)
    variables = {
        "TOPIC": topic,
        "PARTITION": partition,
        "OFFSET": offset,
        "ID": message.record.id,
        "ATTEMPT": str(message.attempt),
    }
    with contextlib.suppress(UnicodeDecodeError):
        key = (message.key or b"\0").decode()
        variables |= {} if "\0" in key else {"KEY": key}
    inherited = {name: text for name, text in os.environ.items() if name != "SHARDYARD_TOKEN"}
    return inherited | {f"SHARDYARD_{name}": text for name, text in variables.items()}


async def _write_stdin(stdin: asyncio.StreamWriter, value: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the command need not read it
        stdin.write(value)
        await stdin.drain()
    stdin.close()


async def _forward_stderr(stderr: asyncio.StreamReader) -> str:
    """Copy the command's standard error to ours; returns the end of it."""
    last = b""
    while chunk := await stderr.read(65536):
        sys.stderr.write(chunk.decode(errors="replace"))
        last = (last + chunk)[-REASON_BYTES:]
    return last.decode(errors="replace").strip()


async def _terminate(process: asyncio.subprocess.Process) -> None:
    """End the command and all processes that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), TERMINATE_SECONDS)
            return
