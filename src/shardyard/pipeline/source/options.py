"""The options of the data source, parsed once. Errors name the option."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, TypeVar

from shardyard.log import absolute_url
from shardyard.model import InvalidValue, whole_number

T = TypeVar("T")
Explicit = Mapping[str, Mapping[int, int | str]]
RECORDS_PER_TASK = 1_000_000


@dataclass(frozen=True, slots=True)
class ReadBound:
    """Where a read starts or ends: a name, a timestamp in milliseconds, or explicit offsets for some partitions."""

    name: Literal["earliest", "latest"]
    """Also holds for the partitions that `explicit` does not name."""
    timestamp: int | None = None
    explicit: Explicit = field(default_factory=dict)
    option: str = ""
    """The option that `explicit` came from, for error messages."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of a read. `log` and `topics` are required; the others have defaults."""

    log: str
    topics: tuple[str, ...]
    start: ReadBound
    end: ReadBound
    records_per_task: int
    max_records_per_trigger: int | None
    fail_on_data_loss: bool


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of a write. `log` and `topic` are required; the topic's own partitioner is the default."""

    log: str
    topic: str
    partitioner: str | None
    hash: str | None
    by_column: bool
    """Whether the frame's column `partition` says where each record goes."""
    producer: str | None
    checkpoint: str | None
    staging: str | None
    """For a log without a folder of its own: one where tasks stage records, which all of them and the driver reach."""


_COMMON = ("log", "topics", "startingOffsets", "startingTimestamp", "recordsPerTask", "failOnDataLoss")
READ = (*_COMMON, "endingOffsets", "endingTimestamp")
STREAM = (*_COMMON, "maxRecordsPerTrigger")
WRITE = ("log", "topic", "partitioner", "hash", "producer", "staging")
STREAM_WRITE = (*WRITE, "checkpointLocation")


def read_options(options: Mapping[str, str], *, streaming: bool) -> ReadOptions:
    parser = _OptionParser(options, STREAM if streaming else READ)
    return ReadOptions(
        log=parser.log(),
        topics=parser.topics(),
        start=parser.bound("starting", "latest" if streaming else "earliest"),
        end=parser.bound("ending", "latest"),
        records_per_task=parser.number("recordsPerTask") or RECORDS_PER_TASK,
        max_records_per_trigger=parser.number("maxRecordsPerTrigger"),
        fail_on_data_loss=parser.flag("failOnDataLoss", default=True),
    )


def write_options(options: Mapping[str, str], *, streaming: bool) -> WriteOptions:
    parser = _OptionParser(options, STREAM_WRITE if streaming else WRITE)
    partitioner, hash_ = parser.text("partitioner"), parser.text("hash")
    by_column = partitioner == "column"
    if partitioner is not None and not by_column:
        from shardyard.placement import partitioner_named  # noqa: PLC0415 takes half a second, which a read need not spend

        partitioner_named(partitioner, 1, hash_)  # raises for unknown names
    return WriteOptions(
        log=parser.log(),
        topic=parser.required("topic", "the topic to write to"),
        partitioner=None if by_column else partitioner,
        hash=hash_,
        by_column=by_column,
        producer=parser.text("producer"),
        checkpoint=parser.text("checkpointLocation"),
        staging=parser.text("staging"),
    )


def absolute(url: str) -> str:
    """The log's URL with an absolute path, so that it works in any working directory, such as a worker's."""
    return absolute_url(url)


class _OptionParser:
    """Parses options. Spark passes their names in lower case."""

    def __init__(self, options: Mapping[str, str], known: tuple[str, ...]) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        names = {name.lower() for name in known}
        for name in self._options:
            if name not in names:
                raise InvalidValue("option", name, "one of " + ", ".join(known))

    def text(self, name: str) -> str | None:
        return self._options.get(name.lower())

    def required(self, name: str, expected: str) -> str:
        text = self.text(name)
        if not text:
            raise InvalidValue(f"option {name!r}", text, expected)
        return text

    def log(self) -> str:
        return absolute(self.required("log", "the URL of a log, such as sqlite:///data/log"))

    def topics(self) -> tuple[str, ...]:
        names = [name.strip() for name in self.required("topics", "topics, separated by commas").split(",")]
        if not all(names) or len(set(names)) < len(names):
            raise InvalidValue("option 'topics'", self.text("topics"), "names, separated by commas, each once")
        return tuple(sorted(names))

    def number(self, name: str) -> int | None:
        return self._parsed(name, int, "an integer", lambda n: whole_number(f"option {name!r}", n, at_least=1))

    def flag(self, name: str, *, default: bool) -> bool:
        text = self.text(name)
        if text is None:
            return default
        if text.lower() not in ("true", "false"):
            raise InvalidValue(f"option {name!r}", text, "true or false")
        return text.lower() == "true"

    def bound(self, prefix: str, default: Literal["earliest", "latest"]) -> ReadBound:
        by_offset, by_time = f"{prefix}Offsets", f"{prefix}Timestamp"
        text = self.text(by_offset)
        if self.text(by_time) is not None:
            if text is not None:
                raise InvalidValue(f"option {by_time!r}", self.text(by_time), f"no {by_offset!r} at the same time")
            return ReadBound("latest", timestamp=self._parsed(by_time, _milliseconds, _TIME), option=by_time)
        match text:
            case None:
                return ReadBound(default)
            case "earliest" | "latest":
                return ReadBound(text)
            case _:
                wanted = self._parsed(by_offset, _explicit, _OFFSETS)
                return ReadBound(default, explicit=wanted or {}, option=by_offset)

    def _parsed(
        self, name: str, parse: Callable[[str], T], expected: str, check: Callable[[T], T] | None = None
    ) -> T | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            value = parse(text)
        except (ValueError, TypeError, AttributeError):
            raise InvalidValue(f"option {name!r}", text, expected) from None
        return check(value) if check is not None else value


_TIME = "milliseconds since 1970, or a time such as 2026-01-31T12:00:00Z"
_OFFSETS = 'earliest, latest, or JSON such as {"orders": {"0": 17, "1": "latest"}}'


def _milliseconds(text: str) -> int:
    if text.isdigit():
        return int(text)
    when = datetime.fromisoformat(text)
    return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000)


def _explicit(text: str) -> Explicit:
    wanted: dict[str, dict[int, int | str]] = {}
    for topic, partitions in json.loads(text).items():
        wanted[topic] = {}
        for partition, offset in partitions.items():
            if offset not in ("earliest", "latest") and (isinstance(offset, bool) or not isinstance(offset, int)):
                raise ValueError
            wanted[topic][int(partition)] = offset
    return wanted
