"""How much memory a routing table takes in each fan-out worker: as ADR-009 states it, by the formula behind that, and
as flat arrays that are built and measured.

The formula keeps every membership of every user online. Ours keeps what fan-out asks for: in which inbox partitions a
channel has members online, and how many. It does not know the members themselves, nor the channels of a user; and while
it is built anew after changes, the old and the new arrays are there at once.
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
"""Of one membership of one user: what makes ADR-009's first and last row come out."""
INBOXES = 256
"""Inbox partitions; a user's is fnv1a32(user) % 256."""
WORKERS = (1, 4, 16, 64)
ACTIVATE_USERS = 500_000
"""ADR-009 goes from replicated to partitioned tables above so many users online,"""
ACTIVATE_BYTES = 10 * GB
"""or above this size of the table."""
MEASURED_USERS = 10_000
"""Users in the table that is built: channels shrink with them, so that a channel keeps its number of members."""
MOST_CHANNELS = 200_000
"""In a table that is built: half a gigabyte while counting."""
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
"""ADR-009's prose gives 500 000 users about 10 GB, its table about 8 GB."""


@dataclass(frozen=True, slots=True)
class StatedShare:
    """What ADR-009 says one worker holds of a partitioned table."""

    scale: str
    workers: int
    stated_bytes: int


STATED_SHARE = StatedShare("extreme", 16, 2_500_000_000)


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTable:
    """Channel -> inbox partitions with members online, in the form of compressed rows."""

    hashes: npt.NDArray[np.uint64]
    """xxh64 of each channel, ascending."""
    starts: npt.NDArray[Any]
    """Where the entries of each channel start; one more than there are channels."""
    inboxes: npt.NDArray[Any]
    counts: npt.NDArray[Any]
    """Members online of the channel in that inbox partition."""

    def members(self, channel: Key) -> dict[int, int]:
        """How many members a channel has online in each inbox partition where it has any."""
        hash_ = np.uint64(hash_named("xxh64")(channel))
        row = int(np.searchsorted(self.hashes, hash_))
        if row == len(self.hashes) or self.hashes[row] != hash_:
            return {}
        span = slice(int(self.starts[row]), int(self.starts[row + 1]))
        return dict(zip(self.inboxes[span].tolist(), self.counts[span].tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class TableSize:
    """The whole table at one scale. Ours is scaled up from a table that was built with fewer channels and users."""

    scale: str
    channels: int
    users: int
    stated_bytes: int
    stated_in_text_bytes: int
    formula_bytes: int
    formula_deviation: float
    """The formula against the table's figure: 0.25 is 25 % above it."""
    bytes_per_channel: float
    bytes_per_entry: float
    entries_per_channel: float
    entries_per_channel_at_half: float
    """Likewise with half the channels and users: near the former, else scaling up would be wrong."""
    measured_bytes: int
    partitioned_by_formula: bool
    """Whether ADR-009's thresholds call for partitioned tables, by users online or by the formula's bytes."""
    partitioned_by_measured_bytes: bool
    """Whether the size of ours does."""


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """The table's share in one worker: all of it when replicated, one of `workers` parts when partitioned."""

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
    """The channels of each user, one row a user, ascending; one that comes twice counts once.

    The n-th channel is joined about 1/sqrt(n) times as often as the first: at the extreme scale, 180 000 times.
    """
    if whole_number("channels", channels, at_least=1) > MOST_CHANNELS:
        raise InvalidValue("channels", channels, f"at most {MOST_CHANNELS} to build a table of")
    drawn = np.random.default_rng(seed).random((whole_number("users", users, at_least=1), CHANNELS_PER_USER))
    joined: npt.NDArray[np.int64] = (drawn**2 * channels).astype(np.int64)
    joined.sort(axis=1)
    return joined


def build_table(joined: npt.NDArray[np.int64], channels: int, *, full_users: int = 0) -> RoutingTable:
    """The routing table of such memberships, in numbers wide enough for it, and for a table of `full_users`."""
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
    # An inbox partition of twice the mean is beyond chance; a count beyond even that still gets its width.
    most = max(int(counts.max()), 2 * full_users // INBOXES)
    return RoutingTable(
        hashes=hashes[order],
        starts=starts.astype(np.min_scalar_type(max(full_users * CHANNELS_PER_USER, len(entries)))),
        inboxes=(entries % INBOXES).astype(np.min_scalar_type(INBOXES - 1)),
        counts=counts.astype(np.min_scalar_type(most)),
    )


@cache
def table_size(scale: Scale) -> TableSize:
    """Stated, by formula and measured."""
    shrunk = [_measure(scale, users) for users in (MEASURED_USERS, MEASURED_USERS // 2)]
    (per_channel, per_entry, entries), (_, _, entries_at_half) = shrunk
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
    """Bytes per channel, bytes per entry and entries per channel of a table with so many users."""
    channels = scale.channels * users // scale.users
    table = build_table(memberships(channels, users), channels, full_users=scale.users)
    entries = len(table.inboxes)
    heads = table.hashes.nbytes + table.starts.nbytes
    return heads / channels, (table.inboxes.nbytes + table.counts.nbytes) / entries, entries / channels


def worker_memory(size: TableSize) -> list[WorkerMemory]:
    """Replicated and partitioned, for each of `WORKERS`."""
    return [
        WorkerMemory(size.scale, mode, n, round(size.formula_bytes / parts), round(size.measured_bytes / parts))
        for mode in ("replicated", "partitioned")
        for n in WORKERS
        for parts in [n if mode == "partitioned" else 1]
    ]
