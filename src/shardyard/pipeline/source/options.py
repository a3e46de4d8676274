"""The options of the data source: parsed once, with errors that name the option."""

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
class Where:
    """A place to begin or end: a name, a time (ms), or an offset for some partitions."""

    name: Literal["earliest", "latest"]
    """Also for the partitions that `explicit` does not have."""
    timestamp: int | None = None
    explicit: Explicit = field(default_factory=dict)
    option: str = ""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """`log` and `topics` must be given; the others have defaults."""

    log: str
    topics: tuple[str, ...]
    start: Where
    end: Where
    records_per_task: int
    max_records_per_trigger: int | None
    fail_on_data_loss: bool


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """`log` and `topic` must be given; keys are placed as the topic says, if no partitioner is named."""

    log: str
    topic: str
    partitioner: str | None
    hash: str | None
    by_column: bool
    producer: str | None
    checkpoint: str | None


_COMMON = ("log", "topics", "startingOffsets", "startingTimestamp", "recordsPerTask", "failOnDataLoss")
READ = (*_COMMON, "endingOffsets", "endingTimestamp")
STREAM = (*_COMMON, "maxRecordsPerTrigger")
WRITE = ("log", "topic", "partitioner", "hash", "producer")
STREAM_WRITE = (*WRITE, "checkpointLocation")


def read_options(options: Mapping[str, str], *, streaming: bool) -> ReadOptions:
    given = _Given(options, STREAM if streaming else READ)
    return ReadOptions(
        log=given.log(),
        topics=given.topics(),
        start=given.where("starting", "latest" if streaming else "earliest"),
        end=given.where("ending", "latest"),
        records_per_task=given.number("recordsPerTask") or RECORDS_PER_TASK,
        max_records_per_trigger=given.number("maxRecordsPerTrigger"),
        fail_on_data_loss=given.flag("failOnDataLoss", default=True),
    )


def write_options(options: Mapping[str, str], *, streaming: bool) -> WriteOptions:
    given = _Given(options, STREAM_WRITE if streaming else WRITE)
    partitioner, hash_ = given.text("partitioner"), given.text("hash")
    by_column = partitioner == "column"
    if partitioner is not None and not by_column:
        from shardyard.placement import partitioner_named  # noqa: PLC0415 half a second, which readers need not spend

        partitioner_named(partitioner, 1, hash_)  # complains of names that there are not
    return WriteOptions(
        log=given.log(),
        topic=given.required("topic", "the topic to write to"),
        partitioner=None if by_column else partitioner,
        hash=hash_,
        by_column=by_column,
        producer=given.text("producer"),
        checkpoint=given.text("checkpointLocation"),
    )


def absolute(url: str) -> str:
    """The URL of an embedded log as seen from any working folder, such as that of a worker."""
    return absolute_url(url)


class _Given:
    """What a user gave, whose keys Spark has made lower case."""

    def __init__(self, options: Mapping[str, str], known: tuple[str, ...]) -> None:
        self._options = {name.lower(): text for name, text in options.items()}
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
        return self._parsed(name, int, "a whole number", lambda n: whole_number(f"option {name!r}", n, at_least=1))

    def flag(self, name: str, *, default: bool) -> bool:
        text = self.text(name)
        if text is None:
            return default
        if text.lower() not in ("true", "false"):
            raise InvalidValue(f"option {name!r}", text, "true or false")
        return text.lower() == "true"

    def where(self, prefix: str, default: Literal["earliest", "latest"]) -> Where:
        by_offset, by_time = f"{prefix}Offsets", f"{prefix}Timestamp"
        text = self.text(by_offset)
        if self.text(by_time) is not None:
            if text is not None:
                raise InvalidValue(f"option {by_time!r}", self.text(by_time), f"no {by_offset!r} beside it")
            return Where("latest", timestamp=self._parsed(by_time, _milliseconds, _TIME), option=by_time)
        match text:
            case None:
                return Where(default)
            case "earliest" | "latest":
                return Where(text)
            case _:
                wanted = self._parsed(by_offset, _explicit, _OFFSETS)
                return Where(default, explicit=wanted or {}, option=by_offset)

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
