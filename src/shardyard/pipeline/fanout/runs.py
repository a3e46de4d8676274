"""Runs of the job `fanout`: what one is to send, and how far it got. It is kept beside the records that are staged for
the log, so that the same command continues a run that was killed."""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from shardyard.messaging.snowflakes import LEASE_SECONDS, LeasedSnowflakes
from shardyard.model import InvalidValue, TooLarge
from shardyard.model.checks import check_text, encoded_size
from shardyard.pipeline.atomic_files import exclusive_lock, write_json
from shardyard.pipeline.source.offsets import TopicOffsets
from shardyard.registry import TransactionBatcher, open_registry
from shardyard.runtime.clock import SystemClock, now_ms
from shardyard.wire.inbox import MAX_TEXT_BYTES, MAX_USER_LENGTH

SENDER = "system"
MAX_NAME_LENGTH = 100
"""Of a run, in characters."""
IDS_PER_MS = 2**14
"""That one generator makes."""
MAX_RECIPIENTS = int(LEASE_SECONDS) * 1000 * IDS_PER_MS // 2
"""Their ids run ahead of the clock by half the time for which the generator's number is ours."""

Audience = Literal["channels", "users"]


@dataclass(frozen=True, slots=True)
class Announcement:
    """What is sent, and to whom."""

    run: str
    """The id of the run."""
    text: str
    audience: Audience
    sender: str = SENDER

    def __post_init__(self) -> None:
        check_text("run", self.run)
        check_text("sender", self.sender)
        check_text("text", self.text)
        for what, value, most in (("run", self.run, MAX_NAME_LENGTH), ("sender", self.sender, MAX_USER_LENGTH)):
            if len(value) > most:
                raise TooLarge(f"{what} in characters", len(value), most)
        if (size := encoded_size("text", self.text)) > MAX_TEXT_BYTES:
            raise TooLarge("text in bytes", size, MAX_TEXT_BYTES)


@dataclass(frozen=True, slots=True)
class Run:
    """A run, as it is stored."""

    run: str
    text: str
    audience: Audience
    sender: str
    first_id: int
    """Of the message or the event. Those of direct messages ascend from it."""
    at: int
    """In milliseconds since 1970."""
    events: TopicOffsets | None
    """Where `events` ended before the run; None for direct messages."""
    recipients: int | None = None
    """Set when the run is finished."""
    records: int | None = None
    """That it stored in `inbox`. Set when the run is finished."""

    @property
    def finished(self) -> bool:
        return self.records is not None


class RunFile:
    """The file of a run."""

    def __init__(self, staging: Path, run: str) -> None:
        self._path = staging / "fanout" / f"{hashlib.sha256(run.encode()).hexdigest()[:32]}.json"
        self._run = run

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock of the run; `Busy` if another process does."""
        with exclusive_lock(self._path.with_suffix(".lock"), f"the run {self._run!r} (it is in progress)"):
            yield

    def load(self, announcement: Announcement) -> Run | None:
        """The run, if it was started before. Raises `InvalidValue` if it was to send something else."""
        try:
            run = msgspec.json.decode(self._path.read_bytes(), type=Run)
        except FileNotFoundError:
            return None
        for name, value in asdict(announcement).items():
            if getattr(run, name) != value:
                raise InvalidValue(name, value, f"{getattr(run, name)!r}, as the run {self._run!r} was started with")
        return run

    def save(self, run: Run) -> None:
        """Store the run, durably."""
        write_json(self._path, msgspec.to_builtins(run))

    def finish(self, run: Run, recipients: int, records: int) -> Run:
        done = replace(run, recipients=recipients, records=records)
        self.save(done)
        return done


async def first_id(registry_url: str, holder: str) -> int:
    """The first of many ids that no messaging server makes. The number of their generator stays leased for a while, in
    which the clock gets past them."""
    clock = SystemClock()
    with open_registry(registry_url) as registry:
        ids = LeasedSnowflakes(TransactionBatcher(registry), f"pipeline fanout {holder}", clock)
        await ids.acquire()
        return ids.next()


def id_of(first: int, number: int) -> int:
    """The id with a number, counted from the first one: those of a generator have its number in the middle."""
    sequence = first % IDS_PER_MS + number
    return first - first % IDS_PER_MS + (sequence // IDS_PER_MS << 22) + sequence % IDS_PER_MS


def new_run(announcement: Announcement, id_: int, events: TopicOffsets | None) -> Run:
    fields = (announcement.run, announcement.text, announcement.audience, announcement.sender)
    return Run(*fields, first_id=id_, at=now_ms(), events=events)


def default_run(text: str, sender: str, audience: Audience, recipients: str) -> str:
    """The id of a run that has none of its own: the same announcement to the same recipients has the same."""
    return hashlib.sha256(repr((text, sender, audience, recipients)).encode()).hexdigest()[:16]
