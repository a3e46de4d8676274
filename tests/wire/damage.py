"""Damages Arrow bodies at random and has them decoded and checked: `python -m tests.wire.damage SEED COUNT`.

In a process of its own: what these bytes reach is C++, and a flaw there ends the process.
"""

import random
import sys

import pyarrow as pa

from shardyard.model import Partition, Record, ShardyardError
from shardyard.model.arrow_limits import check_batch
from shardyard.model.batch import SCHEMA, from_records, to_records
from shardyard.model.limits import Limits
from shardyard.wire.arrow import encode_arrow
from shardyard.wire.media import ARROW
from shardyard.wire.records import decode_records, json_record

ODD_NUMBERS = (0, 1, 2, 7, 255, -1, 2**31 - 1, -(2**31), 65536)


def bodies() -> list[bytes]:
    """One batch, several, a slice, other offsets, one that does not begin with a schema."""
    headers = (("a", b"b"), ("tag", b"q"))
    records = [
        Record(f"id{i}", None if i % 3 else b"k%d" % i, b"v" * i, headers if i % 2 else (), i + 1) for i in range(6)
    ]
    rows = from_records(records, 1)
    large = rows.cast(
        pa.schema(
            [
                ("id", pa.large_string()),
                ("key", pa.large_binary()),
                ("value", pa.large_binary()),
                SCHEMA.field("headers"),
                ("timestamp", pa.int64()),
            ]
        )
    )
    whole = encode_arrow(rows)
    headless = whole[len(SCHEMA.serialize()) :]
    return [
        whole,
        encode_arrow([rows, rows]),
        encode_arrow(rows.slice(2)),
        encode_arrow([large] * 2),
        headless,
    ]


def damaged(body: bytes, chance: random.Random) -> bytes:
    data = bytearray(body)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(data))
        match chance.randrange(10):
            case 0 | 1 | 2 | 3:
                data[at] = chance.randrange(256)
            case 4 | 5:
                data[at] ^= 1 << chance.randrange(8)
            case 6 | 7:
                at = at // 4 * 4
                data[at : at + 4] = chance.choice(ODD_NUMBERS).to_bytes(4, "little", signed=True)
            case 8:
                del data[at : at + chance.randrange(1, 9)]
            case _:
                del data[max(at, 1) :]
        if not data:
            break
    return bytes(data)


def take(body: bytes) -> bool:
    """Whether it is taken; then it is sound."""
    try:
        posted = decode_records(body, ARROW, 0)
        assert isinstance(posted, pa.RecordBatch)
        rows, _ = check_batch(posted, Limits(), 1)
    except ShardyardError:
        return False
    stored = pa.ipc.read_record_batch(rows.serialize(), SCHEMA)
    stored.validate(full=True)
    for record in to_records(stored):
        assert record.id
        assert record.timestamp > 0
        json_record(record, Partition("t", 0), 0)
    return True


def main(seed: int, count: int) -> None:
    chance = random.Random(seed)
    whole = bodies()
    taken = sum(take(damaged(chance.choice(whole), chance)) for _ in range(count))
    print(f"{taken} of {count} taken")
    assert 0.02 * count < taken < 0.5 * count, "else it tests nothing"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
