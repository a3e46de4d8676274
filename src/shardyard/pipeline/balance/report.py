"""How evenly load is spread over partitions and members, under every scheme asked for, and what would help."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from pyspark.sql import DataFrame

from shardyard.model import InvalidValue, Member, Partition, whole_number
from shardyard.pipeline.balance.count_blocks import Counted, collected
from shardyard.pipeline.balance.counting import ACTUAL, BUCKETS, THINNED, TOTAL, Counting
from shardyard.pipeline.balance.figures import (
    ACTUAL_NAME,
    BalanceReport,
    HotKey,
    HotKeys,
    KeyCheck,
    KeyPlace,
    KeySpread,
    MemberLoad,
    SchemeLoad,
    Spread,
    TopicBalance,
    WindowLoad,
)
from shardyard.pipeline.balance.hot_keys import Wanted, as_loads, counted_keys, hottest
from shardyard.pipeline.balance.loads import LOADS, loads_of_table, loads_of_topic
from shardyard.pipeline.balance.scheme import MOST_PARTITIONS, Scheme, every_scheme
from shardyard.pipeline.balance.verdict import verdict
from shardyard.placement import assign, partitioner_named
from shardyard.placement.assignors import assignor_named

__all__ = [
    "LOADS",
    "BalanceReport",
    "Scheme",
    "balance_report",
    "every_scheme",
    "loads_of_table",
    "loads_of_topic",
    "verdict",
]

MOST_MEMBERS = 100_000
MOST_HOT_KEYS = 10_000
_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}

Windows = dict[int | None, Counted]
Row = Any
"""A row of `hot_keys.KEYS`."""


def balance_report(
    loads: DataFrame,
    schemes: Iterable[Scheme] = (),
    *,
    window: str | None = None,
    assignors: Sequence[str] = (),
    members: Sequence[int] = (),
    hot: int = 10,
    partitions: Mapping[str, int] | None = None,
) -> BalanceReport:
    """Read `loads` (the columns of `LOADS`) twice, and measure. Of a topic that grows meanwhile, read a fixed range.

    `window` is a length such as "1 hour"; windows begin at whole multiples of it since 1970, UTC. For each of
    `assignors` and numbers of `members` the partitions are shared out, topic by topic. `hot` keys are listed by records
    and as many by bytes. `partitions` says how many a topic has, where the last ones may hold no record.
    """
    if missing := [field.name for field in LOADS if field.name not in loads.columns]:
        raise InvalidValue("columns", ", ".join(loads.columns), f"those of loads; {', '.join(missing)} are missing")
    counting = Counting(tuple(dict.fromkeys(schemes)), None if window is None else window_us(window))
    whole_number("hot", hot, at_least=0)
    if hot > MOST_HOT_KEYS:
        raise InvalidValue("hot", hot, f"at most {MOST_HOT_KEYS}")
    for assignor in assignors:
        assignor_named(assignor)
    for count in members:
        if whole_number("members", count, at_least=1) > MOST_MEMBERS:
            raise InvalidValue("members", count, f"at most {MOST_MEMBERS}")

    for topic, count in (partitions or {}).items():
        if whole_number(f"partitions of {topic!r}", count, at_least=1) > MOST_PARTITIONS:
            raise InvalidValue(f"partitions of {topic!r}", count, f"at most {MOST_PARTITIONS}")

    found = collected(counting.counts(loads))
    wanted = {topic: _wanted(tallies) for topic, tallies in found.items()}
    keys = counted_keys(loads, wanted).persist()
    try:
        checked = collected(replace(counting, window_us=None, buckets=False).counts(as_loads(keys)))
        rows = hottest(keys, hot + 1).collect()
    finally:
        keys.unpersist()
    topics = []
    for topic in sorted(found):
        mine = [row for row in rows if row["topic"] == topic]
        figures = _Figures(counting, found[topic], checked.get(topic, {}), (partitions or {}).get(topic, 1))
        topics.append(figures.topic(topic, mine, wanted[topic], hot, assignors, members))
    return BalanceReport(tuple(topics))


def window_us(length: str) -> int:
    """The microseconds of a length such as "15 minutes"."""
    match = re.fullmatch(r"\s*(\d+)\s*(second|minute|hour|day)s?\s*", length)
    if match is None or not int(match[1]):
        raise InvalidValue("window", length, "a number of seconds, minutes, hours or days, such as '1 hour'")
    return int(match[1]) * _SECONDS[match[2]] * 1_000_000


def _wanted(tallies: Mapping[int, Windows]) -> Wanted:
    nothing = Counted(np.zeros(0, np.int64), np.zeros(0, np.int64))
    buckets, thinned = (tallies.get(tally, {}).get(None, nothing) for tally in (BUCKETS, THINNED))
    return Wanted.of(buckets, thinned.records)


class _Figures:
    """The figures of one topic, out of what was counted."""

    def __init__(
        self, counting: Counting, tallies: Mapping[int, Windows], keys: Mapping[int, Windows], least: int
    ) -> None:
        self._counting = counting
        self._tallies = tallies
        self._keys = keys
        self._whole = {tally: _over_all(windows) for tally, windows in tallies.items()}
        self._rules = {s.name: partitioner_named(s.partitioner, s.partitions, s.hash) for s in counting.schemes}
        self._cells = {i: (scheme.name, scheme.partitions) for i, scheme in enumerate(counting.schemes)}
        if ACTUAL in tallies:
            highest = max(len(counted.records) for counted in tallies[ACTUAL].values())
            self._cells = {ACTUAL: (ACTUAL_NAME, max(least, highest))} | self._cells
        self._sized = bool(self._whole[TOTAL].bytes.any())

    def topic(
        self, name: str, hot: Sequence[Row], wanted: Wanted, most: int, assignors: Sequence[str], members: Sequence[int]
    ) -> TopicBalance:
        total = self._whole[TOTAL].widened(2)
        schemes = self._schemes(self._whole)
        figures = TopicBalance(
            topic=name,
            records=int(total.records.sum()),
            bytes=int(total.bytes.sum()) if self._sized else None,
            keyless=int(total.records[0]),
            schemes=schemes,
            windows=self._windows(),
            hot_keys=self._hot_keys(hot, wanted, most, schemes),
            key_check=self._key_check(wanted.one_in),
            members=tuple(_shared_out(load, a, count) for a in assignors for count in members for load in schemes),
        )
        return replace(figures, sentence=verdict(figures))

    def _schemes(self, counted: Mapping[int, Counted]) -> tuple[SchemeLoad, ...]:
        loads = []
        for tally, (name, partitions) in self._cells.items():
            if tally in counted:
                records, sizes = counted[tally].widened(partitions)
                loads.append(
                    SchemeLoad(name, partitions, Spread.of(records), Spread.of(sizes) if self._sized else None)
                )
        return tuple(loads)

    def _windows(self) -> tuple[WindowLoad, ...]:
        length = self._counting.window_us
        if length is None:
            return ()
        numbers = sorted(self._tallies[TOTAL], key=lambda number: (number is not None, number))
        return tuple(
            WindowLoad(
                None if number is None else datetime.fromtimestamp(0, UTC) + timedelta(microseconds=number * length),
                self._schemes({tally: of[number] for tally, of in self._tallies.items() if number in of}),
            )
            for number in numbers
        )

    def _key_check(self, one_in: int) -> KeyCheck:
        counted = int(self._keys[TOTAL][None].records.sum()) if self._keys else 0
        spreads = tuple(
            KeySpread(name, partitions, Spread.of(self._keys[tally][None].widened(partitions).records))
            for tally, (name, partitions) in self._cells.items()
            if tally in self._keys
        )
        return KeyCheck(counted, one_in, counted * one_in, spreads)

    def _hot_keys(self, rows: Sequence[Row], wanted: Wanted, most: int, schemes: Sequence[SchemeLoad]) -> HotKeys:
        by_records = sorted(rows, key=lambda row: (-row["records"], bytes(row["key"])))
        by_bytes = sorted(rows, key=lambda row: (-row["bytes"], bytes(row["key"])))
        chosen = {bytes(row["key"]) for row in by_records[:most]}
        chosen |= {bytes(row["key"]) for row in by_bytes[:most] if row["bytes"]}
        listed = [row for row in by_records if bytes(row["key"]) in chosen]
        others_records = max(wanted.left_records, *(row["records"] for row in by_records[most : most + 1]), 0)
        others_bytes = max(wanted.left_bytes, *(row["bytes"] for row in by_bytes[most : most + 1]), 0)
        keys = tuple(self._hot_key(row, schemes) for row in listed)
        return HotKeys(keys, others_records, others_bytes if self._sized else None)

    def _hot_key(self, row: Row, schemes: Sequence[SchemeLoad]) -> HotKey:
        total = self._whole[TOTAL]
        key, records, size = bytes(row["key"]), int(row["records"]), int(row["bytes"])
        places = []
        for load in schemes:
            at = row["partition"] if load.scheme == ACTUAL_NAME else self._rules[load.scheme].place(key)
            share = None if at is None else _share(records, load.records.counts[at])
            of_bytes = None if at is None or load.bytes is None else _share(size, load.bytes.counts[at])
            places.append(KeyPlace(load.scheme, at, share, of_bytes))
        of_topic = _share(size, int(total.bytes.sum())) if self._sized else None
        share = _share(records, int(total.records.sum()))
        return HotKey(key, records, size if self._sized else None, share, of_topic, tuple(places))


def _over_all(windows: Windows) -> Counted:
    first, *others = windows.values()
    for other in others:
        first = first.plus(other)
    return first


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _shared_out(load: SchemeLoad, assignor: str, count: int) -> MemberLoad:
    """The load of each member when `count` of them share the partitions."""
    everyone = [Member(f"member-{i:0{len(str(count))}}") for i in range(count)]
    numbers = {member.name: i for i, member in enumerate(everyone)}
    owners = assign([Partition("topic", i) for i in range(load.partitions)], everyone, assignor=assignor)
    owner = np.empty(load.partitions, np.int64)
    for partition, name in owners.items():
        owner[partition.index] = numbers[name]

    def per_member(spread: Spread) -> Spread:
        sums = np.zeros(count, np.int64)
        np.add.at(sums, owner, np.asarray(spread.counts, np.int64))
        return Spread.of(sums)

    held = np.bincount(owner, minlength=count)
    sizes = None if load.bytes is None else per_member(load.bytes)
    return MemberLoad(assignor, count, load.scheme, int((held == 0).sum()), per_member(load.records), sizes)
