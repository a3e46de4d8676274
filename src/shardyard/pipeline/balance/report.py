"""Measures how evenly load is spread over partitions and members, under several schemes, and says what would help."""

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame

from shardyard.model import InvalidValue, Member, Partition, whole_number
from shardyard.pipeline.balance.count_blocks import CellCounts, TopicCounts, Windows, collect_counts
from shardyard.pipeline.balance.counting import ACTUAL, TOTAL, Counting
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
from shardyard.pipeline.balance.hot_keys import Candidates, KeyLoad, find_candidates, hottest
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

    The frame is read once, and a second time if it has very many keys. So if the topic still grows, the frame must be
    limited to a fixed range of offsets. `window` is a length such as "1 hour"; windows start at multiples of it since
    1970, UTC. The partitions of each topic are assigned to members by each of `assignors` with each number of
    `members`. `hot` keys are listed by records, and as many by bytes. `partitions` is the number of partitions of each
    topic, which is needed if the last ones hold no records.
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

    loading = threading.Thread(target=_load_placement, args=(counting.schemes,), name="loading placement")
    loading.start()  # while the JVM counts
    try:
        counts = collect_counts(counting.counts(loads))
        candidates = find_candidates(loads, counts, hot)
    finally:
        loading.join()
    topics = []
    for topic in sorted(counts):
        figures = _Figures(counting, counts[topic], (partitions or {}).get(topic, 1))
        topics.append(figures.topic(topic, candidates[topic], hot, assignors, members))
    return BalanceReport(tuple(topics))


def _load_placement(schemes: Iterable[Scheme]) -> None:
    """Load the compiled functions that place keys: their first use takes half a second."""
    for scheme in schemes:
        partitioner = partitioner_named(scheme.partitioner, scheme.partitions, scheme.hash)
        partitioner.place_array(pa.array([b""]))
        partitioner.place(b"")


def window_us(length: str) -> int:
    """A length of time such as "15 minutes" in microseconds."""
    match = re.fullmatch(r"\s*(\d+)\s*(second|minute|hour|day)s?\s*", length)
    if match is None or not int(match[1]):
        raise InvalidValue("window", length, "a number of seconds, minutes, hours or days, such as '1 hour'")
    return int(match[1]) * _SECONDS[match[2]] * 1_000_000


class _Figures:
    """Computes the figures of one topic from its counts."""

    def __init__(self, counting: Counting, counts: TopicCounts, min_partitions: int) -> None:
        self._counting = counting
        self._counters = counters = counts.counters
        self._sample = counts.sample
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
        candidates: Candidates,
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
            hot_keys=self._hot_keys(candidates, hot, schemes),
            key_check=self._key_check(),
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

    def _key_check(self) -> KeyCheck:
        sample, spreads = self._sample, []
        for counter, (name, partitions) in self._reported.items():
            if counter == ACTUAL:
                places = sample.partitions[sample.partitions >= 0]
            else:
                places = self._partitioners[name].place_array(sample.keys).to_numpy()
            if len(sample):
                spreads.append(KeySpread(name, partitions, Spread.of(np.bincount(places, minlength=partitions))))
        return KeyCheck(len(sample), sample.one_in, len(sample) * sample.one_in, tuple(spreads))

    def _hot_keys(self, candidates: Candidates, hot: int, schemes: Sequence[SchemeLoad]) -> HotKeys:
        by_records = hottest(candidates.keys, "records", hot + 1, candidates.others_records)
        by_bytes = hottest(candidates.keys, "bytes", hot + 1, candidates.others_bytes)
        listed = {key.key: key for key in (*by_records[:hot], *by_bytes[:hot])}
        others_records = max([candidates.others_records, *(key.records for key in by_records[hot:])])
        others_bytes = max([candidates.others_bytes, *(key.bytes for key in by_bytes[hot:])])
        by_load = sorted(listed.values(), key=lambda key: (-key.records, key.key))
        found = tuple(self._hot_key(key, schemes) for key in by_load)
        return HotKeys(found, others_records, others_bytes if self._has_bytes else None)

    def _hot_key(self, load: KeyLoad, schemes: Sequence[SchemeLoad]) -> HotKey:
        total = self._totals[TOTAL]
        places = []
        for scheme in schemes:
            name = scheme.scheme
            at = load.partition if name == ACTUAL_NAME else self._partitioners[name].place(load.key)
            share = None if at is None else _share(load.records, scheme.records.counts[at])
            of_bytes = None if at is None or scheme.bytes is None else _share(load.bytes, scheme.bytes.counts[at])
            places.append(KeyPlace(name, at, share, of_bytes))
        of_topic = _share(load.bytes, int(total.bytes.sum())) if self._has_bytes else None
        share = _share(load.records, int(total.records.sum()))
        return HotKey(load.key, load.records, load.bytes if self._has_bytes else None, share, of_topic, tuple(places))


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
