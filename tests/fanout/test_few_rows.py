"""A small step, whose rows are Python objects, is the same as one in Arrow."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from shardyard.fanout import few_rows
from shardyard.fanout.few_rows import FewRows, rows_of
from shardyard.fanout.forwarding import MAX_KEY_BYTES, MAX_VALUE_BYTES
from shardyard.fanout.source import InFlight, Source
from shardyard.fanout.step import StepRows
from shardyard.groups.protocol import Grant
from shardyard.model import Partition, Record
from shardyard.model.batch import Batch, to_records
from shardyard.wire.channels import FANOUT

NOW = 1_700_000_000_000


def in_flight(index: int, records: Sequence[Record], start: int, stop: int, places: Any = None) -> InFlight:
    source = Source.assigned("workers", Partition(FANOUT, index), Grant(epoch=3, committed=None, revoked=False))
    batch = Batch(source.partition, 2, 100 * index, records, places)
    return InFlight(source, batch, None, start, stop)


def steps(seed: int) -> list[InFlight]:
    rng = random.Random(seed)
    keys = [b"tea", b"coffee", b"\xc3\xa9", b"", None, b"k" * MAX_KEY_BYTES, b"k" * (MAX_KEY_BYTES + 1)]
    found = []
    for index in range(4):
        records = [
            Record(f"{index}.{n}", rng.choice(keys), rng.randbytes(rng.randrange(20)), (), 1 + rng.randrange(NOW))
            for n in range(rng.randrange(1, 9))
        ]
        start = rng.randrange(len(records))
        places = np.cumsum([rng.randrange(1, 4) for _ in records]) + 7 if index == 2 else None
        found.append(in_flight(index, records, start, rng.randrange(start, len(records)) + 1, places))
    return found


def rows(posts: Any) -> list[Record]:
    return to_records(posts.rows) if isinstance(posts.rows, pa.RecordBatch) else list(posts.rows)


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_the_same_as_in_arrow(seed: int) -> None:
    step = steps(seed)
    few, many = FewRows.of(step), StepRows.of(step)
    assert len(few) == len(many)
    assert few.keys == many.keys.to_pylist()
    assert (few.offsets.tolist(), few.good.tolist()) == (many.offsets.tolist(), many.good.tolist())
    assert few.oldest == many.oldest
    assert few.sources().tolist() == many.sources().tolist()
    assert list(few.batches()) == list(many.batches())
    assert few.good_channels() == many.good_channels().to_pylist()
    for _, span in few.batches():
        assert few.channels(span) == many.channels(span).to_pylist()
    chosen = np.flatnonzero(few.good)
    assert few.channels(chosen) == many.channels(chosen).to_pylist() == [few.channel(row) for row in chosen.tolist()]
    members = np.arange(len(few)) * 10
    if len(chosen):
        posts = rows(few.posts(chosen, members, NOW))
        assert posts == rows(many.posts(chosen, members, NOW))
        assert {post.timestamp for post in posts} == {NOW}


def test_values_that_are_too_large_are_no_events() -> None:
    records = [Record("1", b"tea", bytes(MAX_VALUE_BYTES)), Record("2", b"tea", bytes(MAX_VALUE_BYTES + 1))]
    step = [in_flight(1, records, 0, 2)]
    assert FewRows.of(step).good.tolist() == StepRows.of(step).good.tolist() == [True, False]


def test_large_steps_and_such_that_are_in_arrow_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(rows_of(steps(1)), FewRows)
    arrow = steps(1)
    assert len(arrow[0].batch.data)  # converts it
    assert isinstance(rows_of(arrow), StepRows)
    monkeypatch.setattr(few_rows, "FEW_ROWS", 3)
    assert isinstance(rows_of(steps(1)), StepRows)
