"""Stored batches are joined to one with the same records, whatever form they have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardyard.log.stored_batches import StoredBatch, decode, encode, encode_few, join
from shardyard.model import Damaged, Record
from shardyard.model.batch import from_records, to_records

PARTITION = 7
WHERE = "partition 7"

record = st.builds(
    Record,
    st.text(min_size=1, max_size=4),
    st.none() | st.binary(max_size=4),
    st.binary(max_size=4),
    st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=3)), max_size=2).map(tuple),
    st.integers(1, 2**40),
)
batches = st.lists(st.tuples(st.booleans(), st.lists(record, min_size=1, max_size=4)), min_size=1, max_size=5)


def stored(parts: list[tuple[bool, list[Record]]], first: int = 0) -> list[StoredBatch]:
    """Each part as a stored batch: in Arrow, or as a few records."""
    found = []
    for is_arrow, records in parts:
        few = encode_few(PARTITION, first, records, 0)
        found.append(encode(PARTITION, first, from_records(records, 0)) if is_arrow else few)
        first += len(records)
    return found


def rows(found: list[StoredBatch]) -> list[tuple[int, int, int, bytes]]:
    return [(batch.first, batch.count, batch.checksum, bytes(batch.data)) for batch in found]


@given(batches, st.integers(0, 100))
def test_joined_batches_have_the_same_records(parts: list[tuple[bool, list[Record]]], first: int) -> None:
    joined = join(rows(stored(parts, first)), PARTITION, WHERE)
    assert to_records(joined) == [record for _, records in parts for record in records]


@given(batches)
def test_a_batch_is_read_as_it_was_stored(parts: list[tuple[bool, list[Record]]]) -> None:
    for (_, records), (first, count, checksum, data) in zip(parts, rows(stored(parts)), strict=True):
        content = decode(data, checksum, PARTITION, first, count, WHERE).content
        assert (list(content) if isinstance(content, list) else to_records(content)) == records


def test_batches_with_a_gap_between_them_are_not_joined() -> None:
    parts = [(False, [Record.new("a")]), (False, [Record.new("b")]), (True, [Record.new("c")])]
    first, _, third = rows(stored(parts))
    with pytest.raises(Damaged, match="offsets 1 to 1 are missing"):
        join([first, third], PARTITION, WHERE)


def test_a_batch_that_is_not_what_was_stored_is_not_joined() -> None:
    (first, count, checksum, data), _ = rows(stored([(False, [Record.new("a")]), (False, [Record.new("b")])]))
    for damaged in (
        (first, count, checksum, data[:-1] + b"?"),
        (first, count + 1, checksum, data),
        (first + 1, count, checksum, data),
    ):
        with pytest.raises(Damaged):
            join([damaged], PARTITION, WHERE)
