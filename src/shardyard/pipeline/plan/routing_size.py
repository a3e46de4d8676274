"""The memory that a routing table takes in each fan-out worker: as ADR-009 states it, by the formula behind that, and
measured on tables of flat arrays.

The formula counts every membership of every online user. Our table holds what fan-out needs: in which inbox partitions
a channel has online members, and how many. It holds neither the members themselves nor the channels of a user. While it
is rebuilt after changes, the old and the new arrays are both in memory.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardyard.model import InvalidValue, whole_number
from shardyard.placement import Key, Modulus, generate_ids, hash_named

GB = 10**9
"""Bytes."""
CHANNELS_PER_USER = 200
MEMBERSHIP_BYTES = 100
"""Bytes of one membership of one user: with this value the formula gives the first and last row of ADR-009's table."""
INBOXES = 256
"""Inbox partitions; a user's is fnv1a32(user) % 256."""
WORKERS = (1, 4, 16, 64)
ACTIVATE_USERS = 500_000
"""ADR-009 switches from replicated to partitioned tables above this number of online users."""
ACTIVATE_BYTES = 10 * GB
"""It also does so above this size of the table in bytes."""
MEASURED_USERS = 10_000
"""Users in the table that is measured. Channels are scaled down too, so that a channel keeps its number of members."""
MAX_CHANNELS = 200_000
"""In a table that is measured: building it takes half a gigabyte."""
_SEED = 9


@dataclass(frozen=True, slots=True)
class Scale:
    """A row of ADR-009's table."""

    name: str
    channels: int
    users: int
    stated_bytes: int


ADR_009 = (
    Scale("normal", 500_000, 100_000, 2 * GB),
    Scale("large", 2_000_000, 500_000, 8 * GB),
    Scale("extreme", 5_000_000, 2_000_000, 40 * GB),
)
STATED_IN_TEXT = {"large": 10 * GB}
"""For 500 000 users, ADR-009's text says about 10 GB, and its table about 8 GB."""


@dataclass(frozen=True, slots=True)
class StatedShare:
    """The memory of one worker with a partitioned table, as ADR-009 states it."""

    scale: str
    workers: int
    stated_bytes: int


STATED_SHARE = StatedShare("extreme", 16, 2_500_000_000)


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTable:
    """Channel -> inbox partitions with online members, as compressed sparse rows."""

    hashes: npt.NDArray[np.uint64]
    """The xxh64 of each channel, ascending."""
    starts: npt.NDArray[Any]
    """Where the entries of each channel start, and where the last ones end."""
    inboxes: npt.NDArray[Any]
    counts: npt.NDArray[Any]
    """How many online members the channel has in that inbox partition."""

    def members(self, channel: Key) -> dict[int, int]:
        """The number of online members of a channel in each inbox partition that has any."""
        hash_ = np.uint64(hash_named("xxh64")(channel))
        row = int(np.searchsorted(self.hashes, hash_))
        if row == len(self.hashes) or self.hashes[row] != hash_:
            return {}
        span = slice(int(self.starts[row]), int(self.starts[row + 1]))
        return dict(zip(self.inboxes[span].tolist(), self.counts[span].tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class TableSize:
    """The size of the whole table at one scale. Ours is extrapolated from a table with fewer channels and users."""

    scale: str
    channels: int
    users: int
    stated_bytes: int
    stated_in_text_bytes: int
    formula_bytes: int
    formula_deviation: float
    """How far the formula is above the stated size: 0.25 is 25 %."""
    bytes_per_channel: float
    bytes_per_entry: float
    entries_per_channel: float
    entries_per_channel_at_half: float
    """The same with half the channels and users. It must be about equal, otherwise extrapolating would be wrong."""
    measured_bytes: int
    partitioned_by_formula: bool
    """Whether ADR-009's thresholds call for partitioned tables, by online users or by the formula's bytes."""
    partitioned_by_measured_bytes: bool
    """Whether they call for them by the measured bytes."""


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """The memory of one worker: the whole table if replicated, one of `workers` parts if partitioned."""

    scale: str
    mode: str
    workers: int
    formula_bytes: int
    measured_bytes: int


def formula_bytes(users: int) -> int:
    return users * CHANNELS_PER_USER * MEMBERSHIP_BYTES


def member_ids(users: int) -> pa.Array:
    return pa.concat_arrays(list(generate_ids("text", users)))


def channel_ids(channels: int) -> pa.Array:
    return pa.array(np.char.add("ch_", np.arange(channels).astype("U")))


def memberships(channels: int, users: int, seed: int = _SEED) -> npt.NDArray[np.int64]:
    """Random channels for each user: one row per user, ascending; a channel that occurs twice in a row counts once.

    The n-th channel has about 1/sqrt(n) times the members of the first one, which has 180 000 at the extreme scale.
    """
    if whole_number("channels", channels, at_least=1) > MAX_CHANNELS:
        raise InvalidValue("channels", channels, f"at most {MAX_CHANNELS} to build a table of")
    drawn = np.random.default_rng(seed).random((whole_number("users", users, at_least=1), CHANNELS_PER_USER))
    joined: npt.NDArray[np.int64] = (drawn**2 * channels).astype(np.int64)
    joined.sort(axis=1)
    return joined


def build_table(joined: npt.NDArray[np.int64], channels: int, *, full_users: int = 0) -> RoutingTable:
    """The routing table of these memberships. Its integers are wide enough for a table of `full_users` too."""
    users = len(joined)
    inbox = Modulus("fnv1a32", INBOXES).place_array(member_ids(users)).to_numpy()
    hashes = hash_named("xxh64").array(channel_ids(channels))
    order = np.argsort(hashes)
    row = np.empty(channels, np.int64)
    row[order] = np.arange(channels)
    new = np.ones(joined.shape, bool)
    new[:, 1:] = joined[:, 1:] != joined[:, :-1]
    members = np.bincount((row[joined] * INBOXES + inbox[:, None])[new], minlength=channels * INBOXES)
    entries = np.flatnonzero(members)
    counts = members[entries]
    starts = np.searchsorted(entries, np.arange(channels + 1) * INBOXES)
    # Counts in the full table are estimated: no inbox partition has more than twice the mean by chance.
    highest = max(int(counts.max()), 2 * full_users // INBOXES)
    return RoutingTable(
        hashes=hashes[order],
        starts=starts.astype(np.min_scalar_type(max(full_users * CHANNELS_PER_USER, len(entries)))),
        inboxes=(entries % INBOXES).astype(np.min_scalar_type(INBOXES - 1)),
        counts=counts.astype(np.min_scalar_type(highest)),
    )


@cache
def table_size(scale: Scale) -> TableSize:
    """The size at one scale: stated, by formula and measured."""
    measurements = [_measure(scale, users) for users in (MEASURED_USERS, MEASURED_USERS // 2)]
    (per_channel, per_entry, entries), (_, _, entries_at_half) = measurements
    formula = formula_bytes(scale.users)
    measured = round(scale.channels * (per_channel + entries * per_entry))
    return TableSize(
        scale=scale.name,
        channels=scale.channels,
        users=scale.users,
        stated_bytes=scale.stated_bytes,
        stated_in_text_bytes=STATED_IN_TEXT.get(scale.name, scale.stated_bytes),
        formula_bytes=formula,
        formula_deviation=formula / scale.stated_bytes - 1,
        bytes_per_channel=per_channel,
        bytes_per_entry=per_entry,
        entries_per_channel=entries,
        entries_per_channel_at_half=entries_at_half,
        measured_bytes=measured,
        partitioned_by_formula=scale.users > ACTIVATE_USERS or formula > ACTIVATE_BYTES,
        partitioned_by_measured_bytes=measured > ACTIVATE_BYTES,
    )


def _measure(scale: Scale, users: int) -> tuple[float, float, float]:
    """Bytes per channel, bytes per entry and entries per channel of a table with this number of users."""
    channels = scale.channels * users // scale.users
    table = build_table(memberships(channels, users), channels, full_users=scale.users)
    entries = len(table.inboxes)
    index_bytes = table.hashes.nbytes + table.starts.nbytes
    return index_bytes / channels, (table.inboxes.nbytes + table.counts.nbytes) / entries, entries / channels


def worker_memory(size: TableSize) -> list[WorkerMemory]:
    """The memory with replicated and with partitioned tables, for each of `WORKERS`."""
    return [
        WorkerMemory(size.scale, mode, n, round(size.formula_bytes / parts), round(size.measured_bytes / parts))
        for mode in ("replicated", "partitioned")
        for n in WORKERS
        for parts in [n if mode == "partitioned" else 1]
    ]
