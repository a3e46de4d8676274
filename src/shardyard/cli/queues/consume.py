"""`shardyard consume`: print records as they come, or run a command for each."""

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

from shardyard.cli.output import Count, say
from shardyard.cli.queues.options import Brokers, Group, Text, addresses, ask, checked, token, told_plainly
from shardyard.model import Fenced, InvalidCall, InvalidValue, Partition, Record, Unreachable, whole_number

if TYPE_CHECKING:
    from shardyard.client import Consumer, Message

T = TypeVar("T")

BATCH_RECORDS = 500
REASON_BYTES = 500
"""Of what a command that failed wrote to standard error, to be kept as the reason."""
ENDING_SECONDS = 5.0
"""For which a command that is ended may go on."""


def consume(
    group: Group,
    topics: Annotated[
        list[str], typer.Argument(metavar="TOPIC...", help="What the member subscribes to.", show_default=False)
    ],
    count: Annotated[int | None, Count("--count", "-n", help="Stop after so many records.")] = None,
    seconds: Annotated[float | None, Text("--seconds", metavar="SECONDS", help="Stop after so long.")] = None,
    command: Annotated[
        str | None,
        typer.Option("--exec", metavar="CMD", help="Run this for each record, with its value on standard input."),
    ] = None,
    concurrency: Annotated[
        int | None, Count("--concurrency", help="With --exec: records at once. Default: as the group has it.")
    ] = None,
    latest: Annotated[
        bool, typer.Option("--latest", help="A new group begins with what comes from now on, not with what is there.")
    ] = False,
    name: Annotated[str | None, Text("--name", metavar="NAME", help="Of this member. Default: one is made up.")] = None,
    brokers: Brokers = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line.")] = False,
) -> None:
    """Join a group and print its records as they come; what is printed is committed. Ctrl-C leaves the group.

    Prints partition, offset, key and value, separated by tabs; in the end, on standard error, how many.

    With --exec a record is done when the command exits with 0; otherwise it is tried again later, as the group has it
    set, and is a dead letter in the end. The command finds SHARDYARD_TOPIC, _PARTITION, _OFFSET, _ID, _ATTEMPT and, if
    it is text, _KEY in its environment.

    Examples:

      shardyard consume billing orders

      shardyard consume billing orders returns --json --count 100

      shardyard consume mailer reminders --exec 'sendmail ops@example.org' --concurrency 4
    """
    for each in (group, *topics):
        checked(each)
    if count is not None:
        whole_number("--count", count, at_least=1)
    if concurrency is not None:
        whole_number("--concurrency", concurrency, at_least=1)
    if seconds is not None and not 0 < seconds < 2**40:
        raise InvalidValue("--seconds", seconds, "more than 0")
    if command is not None and json:
        raise InvalidCall("expected either --exec or --json")
    ask(brokers, "GET", "/healthz")  # complain at once if nobody is there
    options: dict[str, Any] = {"name": name, "start": "latest" if latest else "earliest"}
    stop = _Stop(count, seconds)
    urls = addresses(brokers)
    try:
        with told_plainly(), remarks(alone=len(urls) == 1):
            asyncio.run(_consume(urls, group, topics, options, stop, command, concurrency, json=json))
    except BrokenPipeError:  # who read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def remarks(*, alone: bool) -> Iterator[None]:
    """What the consumer warns of meanwhile is said. `alone`: there is but one broker."""
    log, remarks = logging.getLogger("shardyard"), _Remarks(alone=alone)
    log.addHandler(remarks)
    try:
        yield
    finally:
        log.removeHandler(remarks)


class _Remarks(logging.Handler):
    """Warnings, for people; once also what it means to have but one broker."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__(logging.WARNING)
        self._alone = alone

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())
        if self._alone and isinstance(record.args, tuple) and any(isinstance(arg, Unreachable) for arg in record.args):
            self._alone = False
            say("no other broker is named (--broker may be repeated): it goes on when this one is back")


class _Stop:
    """When to stop: after so many records, so many seconds, or an interrupt."""

    def __init__(self, count: int | None, seconds: float | None) -> None:
        self.left = count
        self._seconds = seconds

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._told = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._told.set)
        if self._seconds is not None:
            loop.call_later(self._seconds, self._told.set)

    def now(self) -> None:
        self._told.set()

    async def or_(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What `work` returns, or None if it is time to stop before; then the work is cancelled."""
        tasks: tuple[asyncio.Task[T], asyncio.Task[Any]]
        tasks = asyncio.create_task(work), asyncio.create_task(self._told.wait())
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
) -> None:
    from shardyard.client import Consumer  # noqa: PLC0415 slow to import

    stop.listen()
    most = min(BATCH_RECORDS, stop.left or BATCH_RECORDS)
    async with Consumer(urls, group, topics, token=token(), max_records=most, **options) as consumer:
        if sys.stderr.isatty():
            say(f"joined group {group!r} as {consumer.member.name!r}; records follow as they come")
        if command is None:
            printed = await _print(consumer, stop, json=json)
            say(f"{printed} printed")
        else:
            commands = _Commands(command, stop)
            await stop.or_(consumer.run(commands.handle, concurrency=concurrency))
            say(f"{commands.done} done, {commands.failed} failed")


async def _print(consumer: "Consumer", stop: _Stop, *, json: bool) -> int:
    """How many."""
    from shardyard.client.consumer import next_of  # noqa: PLC0415 slow to import

    line = _json_line if json else _line
    batches = consumer.__aiter__()
    printed = 0
    while stop.left != 0 and (batch := await stop.or_(next_of(batches))) is not None:
        rows = list(zip(batch.offsets(), batch.records(), strict=True))[: stop.left]
        await asyncio.to_thread(_write, b"".join(line(record, batch.partition, offset) for offset, record in rows))
        whole = len(rows) == len(batch)
        with contextlib.suppress(Fenced):  # it has gone to another member, who prints it again
            await batch.commit(None if whole else rows[-1][0] + 1)
        printed += len(rows)
        if stop.left is not None:
            stop.left -= len(rows)
    return printed


def _write(lines: bytes) -> None:
    """In a thread: a slow reader must not keep the member from its heartbeats."""
    sys.stdout.buffer.write(lines)
    sys.stdout.buffer.flush()


def _line(record: Record, partition: Partition, offset: int) -> bytes:
    cells = (str(partition).encode(), b"%d" % offset, record.key or b"", record.value)
    return b"\t".join(cell.replace(b"\t", b"\\t").replace(b"\n", b"\\n") for cell in cells) + b"\n"


def _json_line(record: Record, partition: Partition, offset: int) -> bytes:
    from shardyard.wire.records import json_record  # noqa: PLC0415 slow to import

    return msgspec.json.encode(json_record(record, partition, offset)) + b"\n"


class CommandFailed(Exception):
    """What a command that failed said last."""


class _Commands:
    """Runs a command for each record."""

    def __init__(self, command: str, stop: _Stop) -> None:
        self.done = self.failed = 0
        self._command = command
        self._stop = stop
        self._most, self._begun = stop.left, 0

    async def handle(self, message: "Message") -> None:
        if self._begun == self._most:
            await asyncio.Event().wait()  # no further one is begun; it is cancelled when the others are done
        self._begun += 1
        try:
            await self._run(message)
            self.done += 1
        except CommandFailed as error:
            self.failed += 1
            say(f"{message.origin}, attempt {message.attempt}: {error}")
            raise
        finally:
            if self.done + self.failed == self._most:
                self._stop.now()

    async def _run(self, message: "Message") -> None:
        """In a session of its own: an interrupt is for us, and is no failure of the command."""
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
            _, said, code = await asyncio.gather(
                _feed(process.stdin, message.value), _pass_on(process.stderr), process.wait()
            )
        finally:
            if process.returncode is None:
                await _end(process)
        if code:
            raise CommandFailed(f"exit code {code}" + (f": {said}" if said else ""))


def _environment(message: "Message") -> dict[str, str]:
    topic, partition, offset = message.origin.rsplit("/", 2)
    told = {
        "TOPIC": topic,
        "PARTITION": partition,
        "OFFSET": offset,
        "ID": message.record.id,
        "ATTEMPT": str(message.attempt),
    }
    with contextlib.suppress(UnicodeDecodeError):
        key = (message.key or b"\0").decode()
        told |= {} if "\0" in key else {"KEY": key}
    inherited = {name: text for name, text in os.environ.items() if name != "SHARDYARD_TOKEN"}
    return inherited | {f"SHARDYARD_{name}": text for name, text in told.items()}


async def _feed(stdin: asyncio.StreamWriter, value: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read it
        stdin.write(value)
        await stdin.drain()
    stdin.close()


async def _pass_on(stderr: asyncio.StreamReader) -> str:
    """Standard error, on to ours; returns the end of it."""
    last = b""
    while chunk := await stderr.read(65536):
        sys.stderr.write(chunk.decode(errors="replace"))
        last = (last + chunk)[-REASON_BYTES:]
    return last.decode(errors="replace").strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    """With all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), ENDING_SECONDS)
            return
