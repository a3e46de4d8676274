"""Measures how evenly load is spread over partitions and members, under several schemes, and says what would help."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from pyspark.sql import DataFrame

from shardyard.model import InvalidValue, Member, Partition, whole_number
from shardyard.pipeline.balance.count_blocks import CellCounts, collect_counts
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
from shardyard.pipeline.balance.hot_keys import KeySelection, as_loads, count_keys, hottest_keys
from shardyard.pipeline.balance.loads import LOADS, loads_of_table, loads_of_topic
from shardyard.pipeline.balance.scheme import MAX_PARTITIONS, Scheme, every_scheme
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

MAX_MEMBERS = 100_000
MAX_HOT_KEYS = 10_000
_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}

Windows = dict[int | None, CellCounts]
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
    """Measure `loads`, a frame with the columns of `LOADS`.

    The frame is read twice, so if the topic still grows, it must be limited to a fixed range of offsets. `window` is a
    length such as "1 hour"; windows start at multiples of it since 1970, UTC. The partitions of each topic are assigned
    to members by each of `assignors` with each number of `members`. `hot` keys are listed by records, and as many by
    bytes. `partitions` is the number of partitions of each topic, which is needed if the last ones hold no records.
    """
    if missing := [field.name for field in LOADS if field.name not in loads.columns]:
        raise InvalidValue("columns", ", ".join(loads.columns), f"those of loads; {', '.join(missing)} are missing")
    counting = Counting(tuple(dict.fromkeys(schemes)), None if window is None else window_us(window))
    whole_number("hot", hot, at_least=0)
    if hot > MAX_HOT_KEYS:
        raise InvalidValue("hot", hot, f"at most {MAX_HOT_KEYS}")
    for assignor in assignors:
        assignor_named(assignor)
    for count in members:
        if whole_number("members", count, at_least=1) > MAX_MEMBERS:
            raise InvalidValue("members", count, f"at most {MAX_MEMBERS}")

    for topic, count in (partitions or {}).items():
        if whole_number(f"partitions of {topic!r}", count, at_least=1) > MAX_PARTITIONS:
            raise InvalidValue(f"partitions of {topic!r}", count, f"at most {MAX_PARTITIONS}")

    counts = collect_counts(counting.counts(loads))
    selections = {topic: _select_keys(counters) for topic, counters in counts.items()}
    keys = count_keys(loads, selections).persist()
    try:
        key_counts = collect_counts(replace(counting, window_us=None, buckets=False).counts(as_loads(keys)))
        rows = hottest_keys(keys, hot + 1).collect()
    finally:
        keys.unpersist()
    topics = []
    for topic in sorted(counts):
        hottest = [row for row in rows if row["topic"] == topic]
        figures = _Figures(counting, counts[topic], key_counts.get(topic, {}), (partitions or {}).get(topic, 1))
        topics.append(figures.topic(topic, hottest, selections[topic], hot, assignors, members))
    return BalanceReport(tuple(topics))


def window_us(length: str) -> int:
    """A length of time such as "15 minutes" in microseconds."""
    match = re.fullmatch(r"\s*(\d+)\s*(second|minute|hour|day)s?\s*", length)
    if match is None or not int(match[1]):
        raise InvalidValue("window", length, "a number of seconds, minutes, hours or days, such as '1 hour'")
    return int(match[1]) * _SECONDS[match[2]] * 1_000_000


def _select_keys(counters: Mapping[int, Windows]) -> KeySelection:
    nothing = CellCounts(np.zeros(0, np.int64), np.zeros(0, np.int64))
    buckets, thinned = (counters.get(counter, {}).get(None, nothing) for counter in (BUCKETS, THINNED))
    return KeySelection.of(buckets, thinned.records)


class _Figures:
    """Computes the figures of one topic from its counts."""

    def __init__(
        self,
        counting: Counting,
        counters: Mapping[int, Windows],
        key_counters: Mapping[int, Windows],
        min_partitions: int,
    ) -> None:
        self._counting = counting
        self._counters = counters
        self._key_counters = key_counters
        self._totals = {counter: _sum_windows(windows) for counter, windows in counters.items()}
        self._partitioners = {s.name: partitioner_named(s.partitioner, s.partitions, s.hash) for s in counting.schemes}
        self._reported = {i: (scheme.name, scheme.partitions) for i, scheme in enumerate(counting.schemes)}
        if ACTUAL in counters:
            highest = max(len(counts.records) for counts in counters[ACTUAL].values())
            self._reported = {ACTUAL: (ACTUAL_NAME, max(min_partitions, highest))} | self._reported
        self._has_bytes = bool(self._totals[TOTAL].bytes.any())

    def topic(
        self,
        name: str,
        hottest: Sequence[Row],
        selection: KeySelection,
        hot: int,
        assignors: Sequence[str],
        members: Sequence[int],
    ) -> TopicBalance:
        total = self._totals[TOTAL].padded(2)
        schemes = self._schemes(self._totals)
        figures = TopicBalance(
            topic=name,
            records=int(total.records.sum()),
            bytes=int(total.bytes.sum()) if self._has_bytes else None,
            keyless=int(total.records[0]),
            schemes=schemes,
            windows=self._windows(),
            hot_keys=self._hot_keys(hottest, selection, hot, schemes),
            key_check=self._key_check(selection.one_in),
            members=tuple(_member_load(load, a, count) for a in assignors for count in members for load in schemes),
        )
        return replace(figures, sentence=verdict(figures))

    def _schemes(self, counts: Mapping[int, CellCounts]) -> tuple[SchemeLoad, ...]:
        loads = []
        for counter, (name, partitions) in self._reported.items():
            if counter in counts:
                records, sizes = counts[counter].padded(partitions)
                loads.append(
                    SchemeLoad(name, partitions, Spread.of(records), Spread.of(sizes) if self._has_bytes else None)
                )
        return tuple(loads)

    def _windows(self) -> tuple[WindowLoad, ...]:
        length = self._counting.window_us
        if length is None:
            return ()
        numbers = sorted(self._counters[TOTAL], key=lambda number: (number is not None, number))
        return tuple(
            WindowLoad(
                None if number is None else datetime.fromtimestamp(0, UTC) + timedelta(microseconds=number * length),
                self._schemes({counter: w[number] for counter, w in self._counters.items() if number in w}),
            )
            for number in numbers
        )

    def _key_check(self, one_in: int) -> KeyCheck:
        counted = int(self._key_counters[TOTAL][None].records.sum()) if self._key_counters else 0
        spreads = tuple(
            KeySpread(name, partitions, Spread.of(self._key_counters[counter][None].padded(partitions).records))
            for counter, (name, partitions) in self._reported.items()
            if counter in self._key_counters
        )
        return KeyCheck(counted, one_in, counted * one_in, spreads)

    def _hot_keys(
        self, rows: Sequence[Row], selection: KeySelection, hot: int, schemes: Sequence[SchemeLoad]
    ) -> HotKeys:
        by_records = sorted(rows, key=lambda row: (-row["records"], bytes(row["key"])))
        by_bytes = sorted(rows, key=lambda row: (-row["bytes"], bytes(row["key"])))
        hottest = {bytes(row["key"]) for row in by_records[:hot]}
        hottest |= {bytes(row["key"]) for row in by_bytes[:hot] if row["bytes"]}
        listed = [row for row in by_records if bytes(row["key"]) in hottest]
        others_records = max(selection.others_records, *(row["records"] for row in by_records[hot : hot + 1]), 0)
        others_bytes = max(selection.others_bytes, *(row["bytes"] for row in by_bytes[hot : hot + 1]), 0)
        keys = tuple(self._hot_key(row, schemes) for row in listed)
        return HotKeys(keys, others_records, others_bytes if self._has_bytes else None)

    def _hot_key(self, row: Row, schemes: Sequence[SchemeLoad]) -> HotKey:
        total = self._totals[TOTAL]
        key, records, size = bytes(row["key"]), int(row["records"]), int(row["bytes"])
        places = []
        for load in schemes:
            at = row["partition"] if load.scheme == ACTUAL_NAME else self._partitioners[load.scheme].place(key)
            share = None if at is None else _share(records, load.records.counts[at])
            of_bytes = None if at is None or load.bytes is None else _share(size, load.bytes.counts[at])
            places.append(KeyPlace(load.scheme, at, share, of_bytes))
        of_topic = _share(size, int(total.bytes.sum())) if self._has_bytes else None
        share = _share(records, int(total.records.sum()))
        return HotKey(key, records, size if self._has_bytes else None, share, of_topic, tuple(places))


def _sum_windows(windows: Windows) -> CellCounts:
    first, *others = windows.values()
    for other in others:
        first = first.plus(other)
    return first


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _member_load(load: SchemeLoad, assignor: str, count: int) -> MemberLoad:
    """The load of each member when the partitions are assigned to `count` members."""
    members = [Member(f"member-{i:0{len(str(count))}}") for i in range(count)]
    numbers = {member.name: i for i, member in enumerate(members)}
    owners = assign([Partition("topic", i) for i in range(load.partitions)], members, assignor=assignor)
    owner = np.empty(load.partitions, np.int64)
    for partition, name in owners.items():
        owner[partition.index] = numbers[name]

    def per_member(spread: Spread) -> Spread:
        sums = np.zeros(count, np.int64)
        np.add.at(sums, owner, np.asarray(spread.counts, np.int64))
        return Spread.of(sums)

    owned = np.bincount(owner, minlength=count)
    sizes = None if load.bytes is None else per_member(load.bytes)
    return MemberLoad(assignor, count, load.scheme, int((owned == 0).sum()), per_member(load.records), sizes)
