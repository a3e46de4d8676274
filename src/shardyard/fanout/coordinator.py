"""`Coordinator`: forwards `events` to the partitions of `fanout` by channel."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardyard.fanout import topics
from shardyard.fanout.announcements import are_announcements
from shardyard.fanout.buffer import Buffer, BufferState
from shardyard.fanout.config import DEFAULT_CONFIG, EVENTS_GROUP, FanoutConfig
from shardyard.fanout.forwarding import Forwarded, Outlet, few_or_many, record_batch, source_ids, usable
from shardyard.fanout.hot_channels import HEADER, HotChannels, Splitter
from shardyard.fanout.member import ForwardingMember
from shardyard.fanout.source import InFlight, Source
from shardyard.fanout.trimming import TRIM_SECONDS, trim_processed
from shardyard.groups import Node
from shardyard.model import Fence, Span
from shardyard.model.batch import SCHEMA
from shardyard.model.limits import ANY_SIZE, Validated, validate
from shardyard.placement import partitioner_named
from shardyard.runtime.background import keep_running
from shardyard.runtime.metrics import FANOUT_FORWARDED, FANOUT_SKIPPED, FANOUT_SPLIT_EVENTS
from shardyard.wire.channels import EVENTS, FANOUT, FANOUT_PARTITIONS, HASH, PARTITIONER


class Coordinator(ForwardingMember):
    """A member of the group `fanout.events`, from entering the block to leaving it; any number of them share the
    partitions of `events`. It keeps no state of its own.

    While the workers are too far behind, it forwards nothing: `buffer` says so, and events wait in `events`.
    """

    def __init__(
        self,
        node: Node,
        *,
        config: FanoutConfig = DEFAULT_CONFIG,
        name: str | None = None,
        address: str | None = None,
        metadata: object = None,
    ) -> None:
        super().__init__(
            node,
            EVENTS_GROUP,
            EVENTS,
            config,
            name=name,
            address=address,
            metadata=metadata,
            max_records=config.read_records,
            max_bytes=config.read_bytes,
            prepares=False,
        )
        self._outlet = Outlet(node.log, node.clock)
        self._place = partitioner_named(PARTITIONER, FANOUT_PARTITIONS, HASH).place_array
        self._hot = HotChannels(node)
        self._buffer = Buffer(node, config)
        self._not_full = asyncio.Event()

    @property
    def target(self) -> str:
        return FANOUT

    @property
    def buffer(self) -> BufferState:
        """What waits in `fanout`, as last measured."""
        return self._buffer.state

    async def _open(self) -> None:
        await topics.open_all(self.node.log)
        await self._hot.read()
        await self._measure()
        self._spawn(keep_running("measuring the buffer", self._keep_measuring, self._clock), "measuring the buffer")
        self._spawn(keep_running("hot channels", self._hot.run, self._clock), "hot channels")
        self._spawn(keep_running("trimming", self._keep_trimming, self._clock), "trimming")

    async def _keep_measuring(self) -> None:
        while True:
            await self._clock.sleep(self.config.buffer_look_seconds)
            await self._measure()

    async def _keep_trimming(self) -> None:
        while True:
            await self._clock.sleep(TRIM_SECONDS)
            await trim_processed(self.node, self.config.keep_seconds)

    async def _measure(self) -> None:
        if (await self._buffer.measure()).full:
            self._not_full.clear()
        else:
            self._not_full.set()

    async def _may_step(self) -> None:
        await self._not_full.wait()

    async def _forward(self, step: Sequence[InFlight]) -> None:
        ways = self._hot.ways
        were_split = any(in_flight.forwarded is not None and in_flight.forwarded.splits for in_flight in step)
        ends: Mapping[int, Span] = await self.node.log.ends(FANOUT) if ways or were_split else {}
        placed = [self._place_batch(number, in_flight, ways, ends) for number, in_flight in enumerate(step)]
        records = pa.Table.from_batches([part[0] for part in placed]).combine_chunks()
        targets = np.concatenate([part[1] for part in placed])
        sources = np.concatenate([part[2] for part in placed])
        if len(targets):
            fences = [in_flight.source.fence for in_flight in step]
            await self._outlet.append(
                FANOUT, _by_target(records, targets, sources, fences, self._now_ms()), self.is_in_touch
            )
        FANOUT_FORWARDED.add(len(targets))
        for in_flight in step:
            _splitter(in_flight.source).stored()

    def _place_batch(
        self, number: int, in_flight: InFlight, ways: Mapping[bytes, int], ends: Mapping[int, Span]
    ) -> tuple[pa.RecordBatch, npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The records to append, the partition of each, and the number of its source in the step."""
        offsets = in_flight.batch.offset_array()
        in_flight.stop = _stop(in_flight, offsets)
        data = in_flight.batch.data.slice(in_flight.start, in_flight.stop - in_flight.start)
        keys, values = data["key"].combine_chunks(), data["value"].combine_chunks()
        offsets = offsets[in_flight.start : in_flight.stop]
        good = usable(keys, values)
        FANOUT_SKIPPED.add(int(len(good) - good.sum()))
        good &= ~are_announcements(data["headers"])
        if not good.all():
            rows = np.flatnonzero(good)
            keys, values, offsets = keys.take(pa.array(rows)), values.take(pa.array(rows)), offsets[rows]
        targets = np.asarray(self._place(keys))
        if in_flight.forwarded is not None and (ways or in_flight.forwarded.splits):
            rows, ways = _left_by_earlier_owner(in_flight.forwarded, ways, keys, targets, offsets)
            keys, values = keys.take(pa.array(rows)), values.take(pa.array(rows))
            targets, offsets = targets[rows], offsets[rows]
        ids = source_ids(in_flight.partition, in_flight.batch.epoch, offsets)
        headers = None
        splitter = _splitter(in_flight.source)
        if (hot := splitter.concerns(keys, ways)) is not None:
            rows, targets, headers = _split(splitter, hot, targets, ways, ends)
            picked = pa.array(rows)
            ids, keys, values, offsets = ids.take(picked), keys.take(picked), values.take(picked), offsets[rows]
        records = record_batch(ids, keys, values, headers)
        if in_flight.forwarded is not None:
            fresh = np.flatnonzero(_are_fresh(in_flight.forwarded, offsets, targets, headers))
            records, targets = records.take(pa.array(fresh)), targets[fresh]
        return records, targets, np.full(len(targets), number, np.int32)


def _splitter(source: Source) -> Splitter:
    """What has split the events of this source since it was assigned."""
    if source.extra is None:
        source.extra = Splitter()
    splitter: Splitter = source.extra
    return splitter


def _stop(in_flight: InFlight, offsets: npt.NDArray[np.int64]) -> int:
    """Where the rows of the next step end. What an earlier owner may have forwarded is completed in a step of its own,
    so that a channel that was split then, and is not now, is placed in one way only within a step."""
    if in_flight.forwarded is not None:
        stop = int(np.searchsorted(offsets, in_flight.forwarded.next_offsets.max()))
        if stop > in_flight.start:
            return stop
    return len(offsets)


def _left_by_earlier_owner(
    forwarded: Forwarded,
    ways: Mapping[bytes, int],
    keys: pa.Array,
    targets: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], Mapping[bytes, int]]:
    """The rows that still have to be forwarded, and in how many ways each channel is split in this step, after an
    earlier owner may have forwarded some of the rows.

    - A channel that it split is split in as many ways as its last event that was split, whatever holds now: the copies
      that are missing have to go where that owner would have put them.
    - An event that was split in another number of ways is done. An owner places a channel in one way within a step, and
      takes a step when the one before is stored. So all copies were stored before the channel was split differently.
    - An event that was not split, of a channel that is split in this step, is done if it is stored in the channel's own
      partition: that has records of this source up to `next_offsets`.
    """
    splits = np.array([forwarded.splits.get(offset, 0) for offset in offsets.tolist()])
    names = keys.to_pylist()
    forced = {names[row]: int(splits[row]) for row in np.flatnonzero(splits).tolist()}
    ways = {**ways, **forced}
    now = np.array([ways.get(name, 0) for name in names])
    done = (now > 0) & ((splits > 0) & (splits != now))
    done |= (now > 0) & (splits == 0) & (offsets < forwarded.next(FANOUT_PARTITIONS)[targets])
    return np.flatnonzero(~done), ways


def _are_fresh(
    forwarded: Forwarded,
    offsets: npt.NDArray[np.int64],
    targets: npt.NDArray[np.int32],
    headers: pa.Array | None,
) -> npt.NDArray[np.bool_]:
    """Which records an earlier owner has not appended."""
    fresh: npt.NDArray[np.bool_] = offsets >= forwarded.next(FANOUT_PARTITIONS)[targets]
    if headers is not None:
        for row in np.flatnonzero(np.asarray(headers.is_valid())).tolist():
            fresh[row] = (int(offsets[row]), int(targets[row])) not in forwarded.copies
    return fresh


def _split(
    splitter: Splitter,
    hot: pa.Array,
    targets: npt.NDArray[np.int32],
    ways: Mapping[bytes, int],
    ends: Mapping[int, Span],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], pa.Array]:
    """The rows with those of hot channels as often as they are appended, their partitions, and their headers."""
    channels = list(ways)
    numbers = np.asarray(hot.fill_null(-1))
    is_plain = numbers < 0
    copies = []
    for number in np.unique(numbers[~is_plain]):
        mine = np.flatnonzero(numbers == number)
        channel = channels[number]
        copy = splitter.split(mine, channel, int(targets[mine[0]]), ways[channel], ends)
        if copy is None:
            is_plain[mine] = True
        else:
            copies.append(copy)
            FANOUT_SPLIT_EVENTS.add(len(mine))
    plain = np.flatnonzero(is_plain)
    rows = np.concatenate([plain, *(copy.rows for copy in copies)])
    placed = np.concatenate([targets[plain], *(copy.targets for copy in copies)])
    headers: list[bytes | None] = [None] * len(plain)
    for copy in copies:
        headers += copy.headers
    order = np.argsort(rows, kind="stable")
    listed = [None if headers[i] is None else [(HEADER, headers[i])] for i in order]
    return rows[order], placed[order], pa.array(listed, SCHEMA.field("headers").type)


def _by_target(
    records: pa.Table,
    targets: npt.NDArray[np.int32],
    sources: npt.NDArray[np.int32],
    fences: Sequence[Fence],
    now: int,
) -> Iterator[tuple[int, Validated, Sequence[Fence]]]:
    """The records of each partition, in their order, with the fences of their sources. They are validated once, not
    for each partition."""
    order = np.argsort(targets.astype(np.int16), kind="stable")
    (batch,) = records.to_batches()
    whole = few_or_many(validate(batch.take(pa.array(order)), ANY_SIZE, now))
    bounds = np.searchsorted(targets[order], np.arange(FANOUT_PARTITIONS + 1))
    sources = sources[order]
    for target, (start, stop) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        if start < stop:
            part = whole.part(whole.rows[start:stop])
            yield target, part, [fences[i] for i in np.unique(sources[start:stop])]
