"""Calls that every log refuses, and how. The log has the topic `t` of two partitions: `t/0` holds ten records, trimmed
up to the fourth, the last by producer `p` with sequence 100; the fence `g` stands at 5; the limits are `LIMITS`."""

from collections.abc import Awaitable, Callable
from typing import Any

import pyarrow as pa

from shardyard.log import Log
from shardyard.model import (
    SEQUENCE_WINDOW,
    Fence,
    Fenced,
    InvalidValue,
    OffsetBeyondEnd,
    OffsetTrimmed,
    Outdated,
    Partition,
    PartitionOutOfRange,
    Record,
    Retention,
    SequenceTooOld,
    ShardyardError,
    Stamp,
    TooLarge,
    TopicExists,
    UnknownTopic,
    WrongEpoch,
)
from shardyard.model.batch import SCHEMA
from shardyard.model.limits import Limits
from tests.log.samples import HOLDER, T0, arrow, at, end, record, records

LIMITS = Limits(record_bytes=1000, batch_bytes=10_000, batch_records=50, topic_name=20)


def columns(**changed: Any) -> pa.RecordBatch:
    """A batch of one record with some columns replaced."""
    good = {name: arrow(records(1)).column(name) for name in SCHEMA.names}
    return pa.record_batch({**good, **changed})


def not_utf8() -> pa.Array:
    return pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))


def append(what: Any, **options: Any) -> Callable[[Log], Awaitable[Any]]:
    return lambda log: log.append(T0, what, **options)


def of(**fields: Any) -> Callable[[Log], Awaitable[Any]]:
    return append([record(1), Record(**{"id": "x", "key": b"k", "value": b"v", **fields})])


MAP = SCHEMA.field("headers").type
NEITHER: Any = None

REFUSED: dict[str, tuple[Callable[[Log], Awaitable[Any]], type[ShardyardError]]] = {
    "create: no name": (lambda log: log.create_topic("", 1), InvalidValue),
    "create: a space": (lambda log: log.create_topic("a b", 1), InvalidValue),
    "create: a slash": (lambda log: log.create_topic("a/b", 1), InvalidValue),
    "create: an umlaut": (lambda log: log.create_topic("ä", 1), InvalidValue),
    "create: a newline": (lambda log: log.create_topic("a\n", 1), InvalidValue),
    "create: no text": (lambda log: log.create_topic(NEITHER, 1), InvalidValue),
    "create: reserved": (lambda log: log.create_topic("__offsets", 1), InvalidValue),
    "create: long name": (lambda log: log.create_topic("x" * 21, 1), TooLarge),
    "create: there is one": (lambda log: log.create_topic("t", 1), TopicExists),
    "create: too many partitions": (lambda log: log.create_topic("u", 100_001), TooLarge),
    "expand: too many partitions": (lambda log: log.expand_topic("t", 10**9), TooLarge),
    "create: 0 partitions": (lambda log: log.create_topic("u", 0), InvalidValue),
    "create: half a partition": (lambda log: log.create_topic("u", 1.5), InvalidValue),  # type: ignore[arg-type]
    "create: kind": (lambda log: log.create_topic("u", 1, kind="odd"), InvalidValue),  # type: ignore[arg-type]
    "create: retention": (lambda log: log.create_topic("u", 1, retention=NEITHER), InvalidValue),
    "create: partitioner": (lambda log: log.create_topic("u", 1, partitioner="random"), InvalidValue),
    "create: no partitioner": (lambda log: log.create_topic("u", 1, partitioner=NEITHER), InvalidValue),
    "create: partitioner a list": (lambda log: log.create_topic("u", 1, partitioner=["jump"]), InvalidValue),  # type: ignore[arg-type]
    "create: hash": (lambda log: log.create_topic("u", 1, hash_="md5"), InvalidValue),
    "create: hash a list": (lambda log: log.create_topic("u", 1, hash_=["xxh64"]), InvalidValue),  # type: ignore[arg-type]
    "create: jump, hash": (
        lambda log: log.create_topic("u", 1, partitioner="jump", hash_="murmur2"),
        InvalidValue,
    ),
    "create: round-robin, hash": (
        lambda log: log.create_topic("u", 1, partitioner="round_robin", hash_="md5"),
        InvalidValue,
    ),
    "seal: unknown": (lambda log: log.seal_topic("u", HOLDER), UnknownTopic),
    "seal: no holder": (lambda log: log.seal_topic("t", ""), InvalidValue),
    "seal: holder None": (lambda log: log.seal_topic("t", NEITHER), InvalidValue),
    "seal: 0 seconds": (lambda log: log.seal_topic("t", HOLDER, seconds=0), InvalidValue),
    "seal: -1 seconds": (lambda log: log.seal_topic("t", HOLDER, seconds=-1), InvalidValue),
    "seal: not a number": (lambda log: log.seal_topic("t", HOLDER, seconds=float("nan")), InvalidValue),
    "seal: for ever": (lambda log: log.seal_topic("t", HOLDER, seconds=float("inf")), InvalidValue),
    "seal: text": (lambda log: log.seal_topic("t", HOLDER, seconds="1"), InvalidValue),  # type: ignore[arg-type]
    "unseal: unknown": (lambda log: log.unseal_topic("u", HOLDER), UnknownTopic),
    "unseal: no holder": (lambda log: log.unseal_topic("t", ""), InvalidValue),
    "move: unknown": (lambda log: log.move_topic("u", "t", holder=HOLDER, generation=1), UnknownTopic),
    "move: to unknown": (lambda log: log.move_topic("t", "u", holder=HOLDER, generation=1), UnknownTopic),
    "move: to itself": (lambda log: log.move_topic("t", "t", holder=HOLDER, generation=1), InvalidValue),
    "move: to nothing": (lambda log: log.move_topic("t", NEITHER, holder=HOLDER, generation=1), InvalidValue),
    "move: to no name": (lambda log: log.move_topic("t", "", holder=HOLDER, generation=1), InvalidValue),
    "move: no holder": (lambda log: log.move_topic("t", "u", holder="", generation=1), InvalidValue),
    "expand: fewer": (lambda log: log.expand_topic("t", 1), InvalidValue),
    "expand: none": (lambda log: log.expand_topic("t", 0), InvalidValue),
    "expand: unknown": (lambda log: log.expand_topic("u", 3), UnknownTopic),
    "contract: none": (lambda log: log.contract_topic("t", 0), InvalidValue),
    "contract: -1": (lambda log: log.contract_topic("t", -1), InvalidValue),
    "contract: more": (lambda log: log.contract_topic("t", 3), InvalidValue),
    "contract: 2**80": (lambda log: log.contract_topic("t", 2**80), InvalidValue),
    "contract: half a partition": (lambda log: log.contract_topic("t", 1.5), InvalidValue),  # type: ignore[arg-type]
    "contract: text": (lambda log: log.contract_topic("t", "1"), InvalidValue),  # type: ignore[arg-type]
    "contract: True": (lambda log: log.contract_topic("t", True), InvalidValue),
    "contract: unknown": (lambda log: log.contract_topic("u", 1), UnknownTopic),
    "drop: unknown": (lambda log: log.drop_partitions("u", 1), UnknownTopic),
    "retention: unknown": (lambda log: log.set_retention("u", Retention()), UnknownTopic),
    "retention: none": (lambda log: log.set_retention("t", NEITHER), InvalidValue),
    "delete: unknown": (lambda log: log.delete_topic("u"), UnknownTopic),
    "topic: unknown": (lambda log: log.topic("u"), UnknownTopic),
    "span: unknown topic": (lambda log: log.span(Partition("u", 0)), UnknownTopic),
    "span: partition 2 of 2": (lambda log: log.span(Partition("t", 2)), PartitionOutOfRange),
    "span: partition -1": (lambda log: log.span(Partition("t", -1)), PartitionOutOfRange),
    "span: partition 2**80": (lambda log: log.span(Partition("t", 2**80)), PartitionOutOfRange),
    "read: unknown topic": (lambda log: log.read(Partition("u", 0), 0), UnknownTopic),
    "read: partition": (lambda log: log.read(Partition("t", 2), 0), PartitionOutOfRange),
    "count: unknown topic": (lambda log: log.count(Partition("u", 0), 0, 1), UnknownTopic),
    "count: partition": (lambda log: log.count(Partition("t", 2), 0, 1), PartitionOutOfRange),
    "count: from -1": (lambda log: log.count(T0, -1, 1), InvalidValue),
    "count: to 1.5": (lambda log: log.count(T0, 0, 1.5), InvalidValue),  # type: ignore[arg-type]
    "read: offset -1": (lambda log: log.read(T0, -1), InvalidValue),
    "read: offset 1.5": (lambda log: log.read(T0, 1.5), InvalidValue),  # type: ignore[arg-type]
    "read: trimmed": (lambda log: log.read(T0, at(log, 3) - 1), OffsetTrimmed),
    "read: beyond": (lambda log: log.read(T0, end(log, 10) + 1), OffsetBeyondEnd),
    "read: epoch": (lambda log: log.read(T0, at(log, 5), epoch=1), WrongEpoch),
    "read: no records": (lambda log: log.read(T0, at(log, 5), max_records=0), InvalidValue),
    "read: no bytes": (lambda log: log.read(T0, at(log, 5), max_bytes=0), InvalidValue),
    "read: fenced": (lambda log: log.read(T0, at(log, 5), fence=Fence("g", 4)), Fenced),
    "offset_at: unknown topic": (lambda log: log.offset_at(Partition("u", 0), 0), UnknownTopic),
    "offset_at: partition": (lambda log: log.offset_at(Partition("t", 2), 0), PartitionOutOfRange),
    "offset_at: text": (lambda log: log.offset_at(T0, "now"), InvalidValue),  # type: ignore[arg-type]
    "offset_at: 2**80": (lambda log: log.offset_at(T0, 2**80), InvalidValue),
    "trim: unknown topic": (lambda log: log.trim(Partition("u", 0), 0), UnknownTopic),
    "trim: partition": (lambda log: log.trim(Partition("t", 2), 0), PartitionOutOfRange),
    "trim: beyond": (lambda log: log.trim(T0, end(log, 10) + 1), OffsetBeyondEnd),
    "trim: -1": (lambda log: log.trim(T0, -1), InvalidValue),
    "fence: lower": (lambda log: log.set_fence(Fence("g", 4)), Fenced),
    "fence: no name": (lambda log: log.set_fence(Fence("", 9)), InvalidValue),
    "fence: text": (lambda log: log.set_fence(Fence("g", "9")), InvalidValue),  # type: ignore[arg-type]
    "fence: 2**63": (lambda log: log.set_fence(Fence("g", 2**63)), InvalidValue),
    "append: unknown topic": (lambda log: log.append(Partition("u", 0), records(1)), UnknownTopic),
    "append: partition 2 of 2": (lambda log: log.append(Partition("t", 2), records(1)), PartitionOutOfRange),
    "append: partition 2**80": (lambda log: log.append(Partition("t", 2**80), records(1)), PartitionOutOfRange),
    "append: no partition": (lambda log: log.append(["t", 0], records(1)), InvalidValue),  # type: ignore[arg-type]
    "append: topic None": (lambda log: log.append(Partition(NEITHER, 0), records(1)), InvalidValue),
    "span: a text": (lambda log: log.span("t/0"), InvalidValue),  # type: ignore[arg-type]
    "append: generation a text": (append(records(1), generation="1"), InvalidValue),
    "append: generation of nothing": (append(records(1), generation=1), Outdated),
    "append: fenced": (append(records(1), fence=Fence("g", 4)), Fenced),
    "append: too old, higher fence": (append(records(1), stamp=Stamp("p", 1), fence=Fence("g", 6)), SequenceTooOld),
    "append: fenced, new stamp": (append(records(1), stamp=Stamp("p", 101), fence=Fence("g", 4)), Fenced),
    "append: too old": (append(records(1), stamp=Stamp("p", 100 - SEQUENCE_WINDOW)), SequenceTooOld),
    "append: no producer": (lambda log: log.append(T0, records(1), stamp=Stamp("", 1)), InvalidValue),
    "append: sequence -1": (lambda log: log.append(T0, records(1), stamp=Stamp("p", -1)), InvalidValue),
    "append: sequence 2**63": (lambda log: log.append(T0, records(1), stamp=Stamp("p", 2**63)), InvalidValue),
    "append: no records": (append([]), InvalidValue),
    "append: too many": (append([record(1)] * 51), TooLarge),
    "append: large record": (append([Record("x", b"k", b"v" * 1_000)]), TooLarge),
    "append: large headers": (append([Record("x", b"k", b"v", (("h", b"x" * 500), ("h", b"x" * 500)))]), TooLarge),
    "append: large batch": (append([Record("x", b"k", b"v" * 900)] * 12), TooLarge),
    "append: one record": (append(record(1)), InvalidValue),
    "append: nothing": (append(None), InvalidValue),
    "append: a table": (append(pa.Table.from_batches([arrow(records(1))])), InvalidValue),
    "append: no record": (append([record(1), "x"]), InvalidValue),
    "append: id None": (of(id=None), InvalidValue),
    "append: id bytes": (of(id=b"x"), InvalidValue),
    "append: id empty": (of(id=""), InvalidValue),
    "append: id no unicode": (of(id="\ud800"), InvalidValue),
    "append: key text": (of(key="k"), InvalidValue),
    "append: value text": (of(value="v"), InvalidValue),
    "append: value None": (of(value=None), InvalidValue),
    "append: timestamp float": (of(timestamp=1.5), InvalidValue),
    "append: timestamp -1": (of(timestamp=-1), InvalidValue),
    "append: timestamp 2**63": (of(timestamp=2**63), InvalidValue),
    "append: headers None": (of(headers=None), InvalidValue),
    "append: headers dict": (of(headers={"tag": b"x"}), InvalidValue),
    "append: header alone": (of(headers=("tag",)), InvalidValue),
    "append: header of three": (of(headers=(("tag", b"x", b"y"),)), InvalidValue),
    "append: header name bytes": (of(headers=((b"tag", b"x"),)), InvalidValue),
    "append: header name no unicode": (of(headers=(("\ud800", b"x"),)), InvalidValue),
    "append: header value None": (of(headers=(("tag", None),)), InvalidValue),
    "arrow: no rows": (append(SCHEMA.empty_table().combine_chunks().to_batches() or arrow([])), InvalidValue),
    "arrow: too many": (append(arrow([record(1)] * 51)), TooLarge),
    "arrow: large record": (append(arrow([Record("x", b"k", b"v" * 1_000)])), TooLarge),
    "arrow: large headers": (
        append(arrow([record(1), Record("x", b"k", b"v", (("h", b"x" * 999),))]).slice(1)),
        TooLarge,
    ),
    "arrow: large batch": (append(arrow([Record("x", b"k", b"v" * 900)] * 12)), TooLarge),
    "arrow: a column less": (append(arrow(records(1)).drop_columns(["headers"])), InvalidValue),
    "arrow: a column more": (append(columns(more=pa.array([1]))), InvalidValue),
    "arrow: other order": (
        append(arrow(records(1)).select(["key", "id", "value", "headers", "timestamp"])),
        InvalidValue,
    ),
    "arrow: id null": (append(columns(id=pa.array([None], pa.string()))), InvalidValue),
    "arrow: id empty": (append(columns(id=pa.array([""]))), InvalidValue),
    "arrow: id no unicode": (append(columns(id=not_utf8())), InvalidValue),
    "arrow: id of bytes, no unicode": (append(columns(id=pa.array([b"\xff"]))), InvalidValue),
    "arrow: value null": (append(columns(value=pa.array([None], pa.binary()))), InvalidValue),
    "arrow: value a number": (append(columns(value=pa.array([1]))), InvalidValue),
    "arrow: headers text": (append(columns(headers=pa.array(["tag"]))), InvalidValue),
    "arrow: header value null": (append(columns(headers=pa.array([[("tag", None)]], MAP))), InvalidValue),
    "arrow: timestamp null": (append(columns(timestamp=pa.array([None], pa.int64()))), InvalidValue),
    "arrow: timestamp text": (append(columns(timestamp=pa.array(["now"]))), InvalidValue),
    "arrow: timestamp float": (append(columns(timestamp=pa.array([1.5]))), InvalidValue),
    "arrow: timestamp -1": (append(columns(timestamp=pa.array([-1]))), InvalidValue),
}
