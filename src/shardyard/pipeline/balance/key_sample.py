"""Distinct keys with all of their records and bytes: all keys as long as they fit, else one in 2, 4, 8 and so on.

`KeySample.java` is the same for the JVM. Whether a key is in a sample depends only on its hash and on the level of the
sample, and the level only on which keys there are: neither the order of the records nor that of merging makes a
difference, and no record of a key in the sample was missed.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

SAMPLE_KEYS = 2**17
"""At most this many keys: the number of all keys is estimated to within about a percent."""
SAMPLE_BYTES = 2**24
"""At most this many bytes of keys."""
UNKNOWN, SEVERAL = -1, -2
"""Instead of the partition of a key: it is not known, or not the same for all records."""
MAX_LEVEL = 40

Packed = tuple[bytes, bytes]
"""The content of a block: its columns `records` and `bytes`."""
Buffer = bytes
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class KeySample:
    """One entry per key, in no particular order."""

    level: int
    """One key in 2**level is sampled."""
    skipped_bits: int
    """The bits of a hash that say nothing about the sample, because they are those of the bucket."""
    hashes: Longs
    records: Longs
    bytes: Longs
    partitions: npt.NDArray[np.int32]
    keys: pa.BinaryArray

    @classmethod
    def empty(cls, skipped_bits: int) -> Self:
        none = np.zeros(0, np.int64)
        return cls(0, skipped_bits, none, none, none, np.zeros(0, np.int32), pa.array([], pa.binary()))

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def one_in(self) -> int:
        return int(2**self.level)

    def is_sampled(self, hashes: Longs) -> npt.NDArray[np.bool_]:
        """Which of these hashes are sampled at the present level."""
        mask = np.uint64(2**self.level - 1)
        sampled: npt.NDArray[np.bool_] = (hashes.view(np.uint64) >> np.uint64(self.skipped_bits)) & mask == 0
        return sampled

    def plus(self, other: "KeySample") -> "KeySample":
        """Both samples together: the keys of the one with the higher level, or of a higher one if they do not fit."""
        parts = [part._raised(max(self.level, other.level)) for part in (self, other)]
        hashes, records, sizes, partitions = (
            pa.array(np.concatenate([getattr(part, name) for part in parts]))
            for name in ("hashes", "records", "bytes", "partitions")
        )
        keys = pa.concat_arrays([part.keys for part in parts])
        table = pa.table([keys, hashes, records, sizes, partitions], names=["key", "hash", "records", "bytes", "at"])
        found = table.group_by("key", use_threads=False).aggregate(
            [("hash", "min"), ("records", "sum"), ("bytes", "sum"), ("at", "min"), ("at", "max")]
        )
        lowest, highest = found["at_min"].to_numpy(), found["at_max"].to_numpy()
        merged = KeySample(
            parts[0].level,
            self.skipped_bits,
            found["hash_min"].to_numpy(),
            found["records_sum"].to_numpy(),
            found["bytes_sum"].to_numpy(),
            np.where(lowest == highest, lowest, SEVERAL).astype(np.int32),
            found["key"].combine_chunks(),
        )
        while (len(merged) > SAMPLE_KEYS or _size(merged.keys) > SAMPLE_BYTES) and merged.level < MAX_LEVEL:
            if len(merged) == 1:
                break
            merged = merged._raised(merged.level + 1)
        return merged

    def _raised(self, level: int) -> "KeySample":
        if level == self.level:
            return self
        raised = replace(self, level=level)
        at = np.flatnonzero(raised.is_sampled(self.hashes))
        return replace(
            raised,
            hashes=self.hashes[at],
            records=self.records[at],
            bytes=self.bytes[at],
            partitions=self.partitions[at],
            keys=self.keys.take(pa.array(at)),
        )

    @property
    def packed(self) -> Packed:
        """Level and number of keys; then hashes, records, bytes, partitions and lengths of all keys; then the keys."""
        head = np.array([self.level, len(self)], np.int64)
        lengths = pc.binary_length(self.keys).to_numpy().astype(np.int32)
        parts = [head, self.hashes, self.records, self.bytes, self.partitions, lengths]
        return b"".join([*(part.tobytes() for part in parts), *self.keys.to_pylist()]), b""

    @classmethod
    def unpack(cls, packed: Buffer, skipped_bits: int) -> Self:
        level, count = (int(number) for number in np.frombuffer(packed, np.int64, 2))
        hashes, records, sizes = np.frombuffer(packed, np.int64, 3 * count, 16).reshape(3, count)
        partitions, lengths = np.frombuffer(packed, np.int32, 2 * count, 16 + 24 * count).reshape(2, count)
        offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
        values = pa.py_buffer(packed).slice(16 + 32 * count)
        keys = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), values])
        return cls(level, skipped_bits, hashes, records, sizes, partitions, keys)


def _size(keys: pa.BinaryArray) -> int:
    return int(pc.sum(pc.binary_length(keys)).as_py() or 0)
