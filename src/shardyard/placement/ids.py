"""Generate ids like those of real systems, to test a hash with.

Dense ids alone prove little, because `id % P` spreads them perfectly. A good hash does well on every kind.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardyard.model import InvalidValue, whole_number
from shardyard.placement.names import ID_KINDS

CHUNK_IDS = 1_000_000
MAX_IDS = 10**12
_SNOWFLAKE_START_MS = 200_000_000_000
_SNOWFLAKE_GENERATORS = 8
_SNOWFLAKE_PER_MS = 4

Numbers = npt.NDArray[np.int64]


def _dense(n: Numbers) -> pa.Array:
    return pa.array(n)


def _strided(n: Numbers) -> pa.Array:
    """Every 1024th integer, as from a sequence that allocates blocks."""
    return pa.array(n * 1024)


def _sparse(n: Numbers) -> pa.Array:
    """64 random-looking bits without duplicates: the mixing steps of splitmix64."""
    z = n.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return pa.array((z ^ (z >> np.uint64(31))).view(np.int64))


def _snowflake(n: Numbers) -> pa.Array:
    """41 bits of milliseconds, 8 of generator, 14 of sequence; 8 generators, each with 4 ids per millisecond."""
    sequence = n % _SNOWFLAKE_PER_MS
    generator = n // _SNOWFLAKE_PER_MS % _SNOWFLAKE_GENERATORS
    ms = _SNOWFLAKE_START_MS + n // (_SNOWFLAKE_PER_MS * _SNOWFLAKE_GENERATORS)
    return pa.array(ms << 22 | generator << 14 | sequence)


def _text(n: Numbers) -> pa.Array:
    """user-1, user-2, ..."""
    return pc.binary_join_element_wise("user-", pa.array(n).cast(pa.string()), "")


_GENERATORS: dict[str, Callable[[Numbers], pa.Array]] = {
    "dense": _dense,
    "strided": _strided,
    "sparse": _sparse,
    "snowflake": _snowflake,
    "text": _text,
}


def generate_ids(kind: str, count: int, chunk: int = CHUNK_IDS) -> Iterator[pa.Array]:
    """Yield `count` distinct ids of a kind, made from the integers 1 to `count`, in arrays of at most `chunk` ids."""
    if kind not in _GENERATORS:
        raise InvalidValue("ids", kind, "one of " + ", ".join(ID_KINDS))
    if whole_number("keys", count, at_least=1) > MAX_IDS:
        raise InvalidValue("keys", count, f"at most {MAX_IDS}")
    return (
        _GENERATORS[kind](np.arange(start, min(start + chunk, count + 1), dtype=np.int64))
        for start in range(1, count + 1, chunk)
    )
