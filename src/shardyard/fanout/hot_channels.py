"""Hot channels: which they are, how their events are split over partitions of `fanout`, and in which order.

A worker that finds a channel hot says so in the registry. The coordinator then appends each event of the channel to
several partitions. The worker of part i of k serves the partitions q of `inbox` with q % k == i: all of them, since
such a channel has members nearly everywhere.

The events of a channel stay in order for each recipient. When a coordinator begins to place a channel differently than
before, the first events carry barriers: the ends of all partitions where earlier events may be. Their workers wait
until the group has committed these. Nobody waits in a circle, because the ends are looked up before the event is
appended.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shardyard.fanout.config import MAX_WAYS, WAYS, FanoutConfig
from shardyard.groups import Node
from shardyard.model import Span
from shardyard.registry import ChangeSignal, SettingRow, Transaction
from shardyard.runtime.metrics import FANOUT_HOT_CHANNELS
from shardyard.wire.channels import FANOUT_PARTITIONS

_log = logging.getLogger(__name__)

SCOPE = "fanout.hot"
"""Of the settings; the name of each is a channel."""
HEADER = "split"
READ_SECONDS = 30.0
"""Settings are read again after this time, should a signal get lost."""
SAMPLED_FROM = 512
SAMPLED = 16
"""Of a step with more than so many events, every 16th is noted."""
MAX_HOT = 1000
"""Channels that are hot at the same time; no more are added."""


class Split(msgspec.Struct, array_like=True, frozen=True):
    """The header of an event of a hot channel, in one of the partitions that it was appended to."""

    part: int
    ways: int
    """1: the channel is not hot any more, and routed by the table as usual."""
    barriers: dict[int, int] = {}
    """Partitions of `fanout` that are to be processed up to these offsets before this event."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Split)


def encode_split(split: Split) -> bytes:
    return _encoder.encode(split)


def decode_split(value: bytes) -> Split | None:
    """None if it is none; then the event is routed as usual."""
    try:
        split = _decoder.decode(value)
    except msgspec.DecodeError:
        return None
    return split if split.ways in WAYS and 0 <= split.part < split.ways else None


def split_targets(partition: int, ways: int) -> list[int]:
    """The partitions of `fanout` over which a channel of this partition is split. Those of fewer ways are among those
    of more."""
    return [(partition + i * (FANOUT_PARTITIONS // ways)) % FANOUT_PARTITIONS for i in range(ways)]


class HotChannels:
    """The hot channels as the registry has them, followed while `run` runs."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.ways: dict[bytes, int] = {}
        """Those that are hot, and those that were until lately, with 1."""
        self.changed_at: dict[bytes, float] = {}
        """When that was set, in seconds since 1970."""

    async def read(self) -> None:
        rows = await self._node.transactions.read(lambda tx: tx.settings(SCOPE))
        found = [(row.name.encode(), *_parse(row)) for row in rows]
        self.ways = {channel: ways for channel, ways, _ in found}
        self.changed_at = {channel: at for channel, _, at in found}
        FANOUT_HOT_CHANNELS.set(sum(ways > 1 for ways in self.ways.values()))

    async def run(self) -> None:
        """Follow changes until cancelled."""
        with ChangeSignal(self._node.registry, f"setting/{SCOPE}", self._node.clock) as changed:
            while True:
                await self.read()
                await changed.wait(READ_SECONDS)


def _parse(row: SettingRow) -> tuple[int, float]:
    value = row.value if isinstance(row.value, Mapping) else {}
    ways, at = value.get("ways"), value.get("at")
    return (ways if isinstance(ways, int) and ways in WAYS else 1), (at if isinstance(at, int | float) else 0.0)


@dataclass(frozen=True, slots=True)
class Copies:
    """Where the rows of a batch go: row i of these to partition `targets[i]` with `headers[i]`."""

    rows: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int32]
    headers: list[bytes | None]


class Splitter:
    """Splits the events of hot channels that one owner reads from one partition of `events`."""

    def __init__(self) -> None:
        self._placed: dict[bytes, int] = {}
        """In how many ways the channels that are or were hot were placed last by this owner."""
        self._next: dict[bytes, int] = {}

    def concerns(self, keys: pa.Array, hot: Mapping[bytes, int]) -> pa.Array | None:
        """Which of the rows belong to channels that are or were hot: indices into the list of these, null for others.
        None if there are none."""
        for channel in [channel for channel in self._placed if channel not in hot]:
            del self._placed[channel]
        if not hot:
            return None
        found = pc.index_in(keys, pa.array(list(hot), keys.type))
        return None if found.null_count == len(found) else found

    def split(
        self, rows: npt.NDArray[np.int64], channel: bytes, partition: int, ways: int, ends: Mapping[int, Span]
    ) -> Copies | None:
        """Where the rows of one channel go, whose own partition is `partition`; None if they go there as usual."""
        changes = self._placed.get(channel) != ways
        if ways == 1 and not changes:
            return None
        self._next[channel] = ways
        targets, copies, headers = split_targets(partition, ways), [], []
        related = split_targets(partition, MAX_WAYS) if changes else []
        for part, target in enumerate(targets):
            barriers = {p: ends[p].end for p in related if p != target and ends[p].end}
            headers += [encode_split(Split(part, ways, barriers))] * len(rows)
            copies.append(np.full(len(rows), target, np.int32))
        return Copies(np.tile(rows, ways), np.concatenate(copies), list(headers))

    def stored(self) -> None:
        """What was split is durable: from now on these channels are placed so."""
        self._placed |= self._next
        self._next = {}


class LoadMeter:
    """Measures the load of the channels that a worker serves, and declares channels hot or not."""

    def __init__(self, node: Node, config: FanoutConfig, hot: HotChannels) -> None:
        self._node = node
        self._config = config
        self._hot = hot
        self._noted: dict[bytes, int] = {}
        self._since = node.clock.monotonic()

    def note(self, channels: pa.Array | list[bytes]) -> None:
        """Events of these channels were routed."""
        weight = 1
        if not isinstance(channels, list):
            if len(channels) > SAMPLED_FROM:
                weight = SAMPLED
                channels = channels.take(pa.array(np.arange(0, len(channels), SAMPLED)))
            channels = channels.to_pylist()
        for channel in channels:
            self._noted[channel] = self._noted.get(channel, 0) + weight

    def evaluate(self, online: Callable[[bytes], int], mine: Callable[[bytes], bool]) -> dict[str, int]:
        """The channels to change, each with the number of ways; 0 to forget it. It begins a new measurement."""
        now = self._node.clock.monotonic()
        seconds, noted = max(now - self._since, 0.001), self._noted
        self._since, self._noted = now, {}
        changes: dict[str, int] = {}
        config, known = self._config, self._hot.ways
        least = config.hot_load * seconds / 10_000_000  # no channel has more members
        for channel, count in noted.items():
            if count < least or known.get(channel, 1) > 1 or len(known) + len(changes) >= MAX_HOT:
                continue
            members = online(channel)
            if members >= config.hot_members and members * count / seconds > config.hot_load:
                _change(changes, channel, config.hot_ways)
        wall = self._node.clock.now()
        for channel, ways in known.items():
            if not mine(channel):
                continue
            if ways > 1 and online(channel) * noted.get(channel, 0) / seconds < config.cool_load:
                _change(changes, channel, 1)
            is_old = wall - self._hot.changed_at.get(channel, 0.0) > config.forget_hot_seconds
            if ways == 1 and is_old and channel.decode() not in changes:
                _change(changes, channel, 0)
        return changes

    async def declare(self, changes: Mapping[str, int]) -> None:
        """Store the changes, and take account of them here."""
        at = self._node.clock.now()

        def work(tx: Transaction) -> None:
            for channel, ways in changes.items():
                if ways:
                    tx.put_setting(SCOPE, channel, {"ways": ways, "at": at})
                else:
                    tx.delete_setting(SCOPE, channel)

        await self._node.transactions.run(work)
        for channel, ways in changes.items():
            if ways:
                _log.info("channel %r is %s", channel, f"split in {ways} ways" if ways > 1 else "not split any more")
        await self._hot.read()


def _change(changes: dict[str, int], channel: bytes, ways: int) -> None:
    """Add a change, if the channel's name is one."""
    try:
        changes[channel.decode()] = ways
    except UnicodeDecodeError:
        return
