"""The records of `members` and `presence` at ADR-009's scale, as Parquet files with the columns that the job `routing`
reads: filling a log with 100 M records would take longer than the job itself.

A channel is large (1 % of them, with half of all memberships), medium (10 %, with 40 %) or small (89 %). One record in
a hundred is a leave. Every user is online, one in ten with two clients.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shardyard.placement import partitioner_named
from shardyard.wire.channels import FANOUT_PARTITIONS, HASH, PARTITIONER

CHANNELS_PER_USER = 200
CHANNELS = 5_000_000
USERS = 2_000_000
"""At the extreme scale of ADR-009."""
CHANNEL_MIX = ((0.01, 0.5), (0.10, 0.4), (0.89, 0.1))
"""Which share of the channels has which share of the memberships."""
LEAVES = 0.01
INBOX_PARTITIONS = 256
FILE_ROWS = 2_000_000
SCHEMA = pa.schema([("partition", pa.int32()), ("offset", pa.int64()), ("key", pa.binary()), ("value", pa.binary())])


@dataclass(frozen=True, slots=True)
class Scale:
    """Some part of the extreme scale."""

    fraction: float

    @property
    def channels(self) -> int:
        return round(CHANNELS * self.fraction)

    @property
    def users(self) -> int:
        return round(USERS * self.fraction)

    @property
    def memberships(self) -> int:
        return self.users * CHANNELS_PER_USER


def write_input(folder: Path, scale: Scale) -> None:
    """Write `members/` and `presence/` into a folder."""
    channels, users = names("ch_", scale.channels), names("user-", scale.users)
    rng = np.random.default_rng(9)
    placed = _Placed(channels, partitioner_named(PARTITIONER, FANOUT_PARTITIONS, HASH).place_array(channels))
    for number, first in enumerate(range(0, scale.memberships, FILE_ROWS)):
        count = min(FILE_ROWS, scale.memberships - first)
        joined = _draw_channels(rng, scale.channels, count)
        who = rng.integers(0, scale.users, count)
        sign = np.where(rng.random(count) < LEAVES, "-", "+")
        values = pc.binary_join_element_wise(pa.array(sign), users.take(pa.array(who)), "")
        _write(folder / "members", number, placed.records(joined, values))
    inbox = partitioner_named("modulus", INBOX_PARTITIONS, "fnv1a32").place_array(users)
    placed = _Placed(users, inbox)
    everyone = np.arange(scale.users)
    for number, (online, device) in enumerate(((everyone, "+phone"), (everyone[::10], "+desk"))):
        _write(folder / "presence", number, placed.records(online, pa.repeat(device, len(online))))


def names(prefix: str, count: int) -> pa.Array:
    return pc.binary_join_element_wise(prefix, pa.array(np.arange(count)).cast(pa.string()), "")


class _Placed:
    """Keys with the partitions of a topic, and where each of these ends so far."""

    def __init__(self, keys: pa.Array, partitions: pa.Array) -> None:
        self._keys = keys
        self._partitions = partitions.to_numpy()
        self._ends = np.zeros(int(self._partitions.max()) + 1, np.int64)

    def records(self, rows: npt.NDArray[np.int64], values: pa.Array) -> pa.RecordBatch:
        """The next records, by partition and offset, with these rows of the keys."""
        partitions = self._partitions[rows]
        order = np.argsort(partitions, kind="stable")
        partitions = partitions[order]
        counts = np.bincount(partitions, minlength=len(self._ends))
        rank = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets = self._ends[partitions] + rank
        self._ends += counts
        keys = self._keys.take(pa.array(rows[order])).cast(pa.binary())
        columns = [pa.array(partitions), pa.array(offsets), keys, values.take(pa.array(order)).cast(pa.binary())]
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _draw_channels(rng: np.random.Generator, channels: int, count: int) -> npt.NDArray[np.int64]:
    kind = rng.choice(len(CHANNEL_MIX), count, p=[share for _, share in CHANNEL_MIX])
    edges = np.cumsum([0.0, *(part for part, _ in CHANNEL_MIX)])
    first, last = (edges[:-1] * channels)[kind], (edges[1:] * channels)[kind]
    drawn: npt.NDArray[np.int64] = (first + rng.random(count) * (last - first)).astype(np.int64)
    return np.minimum(drawn, channels - 1)


def _write(folder: Path, number: int, records: pa.RecordBatch) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_batches([records]), folder / f"{number:05}.parquet", compression="zstd")
