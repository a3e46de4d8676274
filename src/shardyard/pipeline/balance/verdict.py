"""One sentence about a topic, from its figures: what is wrong with it, and what would help."""

from shardyard.pipeline.balance.figures import (
    ACTUAL_NAME,
    HotKey,
    KeySpread,
    SchemeLoad,
    Spread,
    TopicBalance,
    shortened,
)

UNEVEN = 1.25
"""The fullest partition over the mean, from which on a topic counts as uneven."""
BAD_CHI2 = 1.5
"""A hash is reported as bad if three conditions hold. Chi-square per degree of freedom of its keys is above this."""
BAD_P_VALUE = 1e-4
"""It is less likely than this by chance: with few partitions, chance alone gives a value above 2 now and then."""
BAD_KEYS = 1.05
"""The fullest partition has more than this many times its share of the keys."""
FEW_KEYS = 200
"""With fewer keys per partition, and many partitions, chance alone makes partitions uneven by a quarter."""


def verdict(found: TopicBalance) -> str:
    """The most important finding about a topic: about its own partitions, or about the first scheme if unknown."""
    if not found.records:
        return "no records"
    if not found.schemes:
        return f"{found.records:,} records, but neither partitions nor a scheme to judge them by"
    load = found.schemes[0]
    return (
        _few_keys(found, load)
        or _hot_key(found, load)
        or _large_records(load)
        or _bad_hash(found, load)
        or _idle_members(found, load)
        or _uneven(found, load)
        or _even(load)
    )


def _few_keys(found: TopicBalance, load: SchemeLoad) -> str | None:
    keys, partitions = found.key_check.distinct, load.partitions
    if found.keyless or not found.key_check.exact or keys >= partitions:
        return None
    have = "1 key fills" if keys == 1 else f"{keys:,} keys fill"
    rest = partitions - keys
    stay = "1 stays" if rest == 1 else f"{rest} stay"
    return f"{have} at most {keys} of {partitions} partitions, at least {stay} empty: more partitions do not help"


def _hot_key(found: TopicBalance, load: SchemeLoad) -> str | None:
    """A key with more than the mean load of a partition, and with at least half of its own partition's load.

    More partitions can't help, because all records of a key stay on one partition.
    """
    unit, spread = _measure(load)
    if spread.over_mean < UNEVEN:
        return None
    mean = spread.total / len(spread.counts)
    heavy = [key for key in found.hot_keys.keys if _of(key, unit) > mean and key.records > 1]
    worst = max(_on(heavy, load.scheme, spread.fullest), key=lambda key: _of(key, unit), default=None)
    if worst is None or _of(worst, unit) * 2 < spread.counts[spread.fullest]:
        return None
    rest = list(spread.counts)
    for key in heavy:
        if (place := key.place(load.scheme)) is not None:
            rest[place] -= _of(key, unit)
    share = max(rest) / sum(rest) if sum(rest) else 0.0
    also = {0: "the key", 1: "the key and another one as hot"}.get(
        len(heavy) - 1, f"the key and {len(heavy) - 1} others as hot"
    )
    return (
        f"{_fullest(load, unit, spread)}, {_percent(_of(worst, unit) / spread.counts[spread.fullest])} of it "
        f"the key `{shortened(worst.key)}`: splitting {also} helps (without {'it' if len(heavy) == 1 else 'them'} the "
        f"fullest partition would carry {_percent(share)}), more partitions do not "
        f"(the key alone is {_percent(_of(worst, unit) / spread.total)})"
    )


def _large_records(load: SchemeLoad) -> str | None:
    spread = load.bytes
    if spread is None or spread.over_mean < UNEVEN or load.records.over_mean >= UNEVEN:
        return None
    records = load.records.counts[spread.fullest] / load.records.total
    return (
        f"{_fullest(load, 'bytes', spread)} but only {_percent(records)} of the records, which are "
        f"{_times(spread.fullest_share / records)} the mean size: smaller records help, "
        "more partitions or another hash do not"
    )


def _bad_hash(found: TopicBalance, load: SchemeLoad) -> str | None:
    here = next((check for check in found.key_check.schemes if check.scheme == load.scheme), None)
    if here is None or not _is_bad(here):
        return None
    others = [check for check in found.key_check.schemes if check is not here and not _is_bad(check)]
    best = min(others, key=lambda o: (o.partitions != here.partitions, o.keys.balance.chi2_per_df), default=None)
    hash_ = "the hash" if load.scheme == ACTUAL_NAME else f"`{load.scheme}`"
    helps = "no other scheme that was tried is better"
    if best:
        helps = f"`{best.scheme}` helps ({best.keys.balance.chi2_per_df:.1f})"
    return (
        f"{hash_} spreads the keys badly "
        f"(chi-square per degree of freedom {here.keys.balance.chi2_per_df:.1f} instead of 1; "
        f"partition {here.keys.fullest} has {_percent(here.keys.fullest_share)} of the keys): {helps}"
    )


def _is_bad(check: KeySpread) -> bool:
    found = check.keys.balance
    return found.chi2_per_df > BAD_CHI2 and found.p_value < BAD_P_VALUE and found.max_over_mean > BAD_KEYS


def _idle_members(found: TopicBalance, load: SchemeLoad) -> str | None:
    idle = [m for m in found.members if m.scheme == load.scheme and m.idle]
    if not idle:
        return None
    least = min(idle, key=lambda m: m.members)
    are = "1 member" if least.idle == 1 else f"{least.idle} members"
    return (
        f"{load.partitions} partitions for {least.members} members leave {are} idle: "
        f"at least {least.members} partitions help"
    )


def _uneven(found: TopicBalance, load: SchemeLoad) -> str | None:
    unit, spread = _measure(load)
    if spread.over_mean < UNEVEN:
        return None
    most = max(_on(found.hot_keys.keys, load.scheme, spread.fullest), key=lambda key: _of(key, unit), default=None)
    part = _of(most, unit) / spread.counts[spread.fullest] if most else 0.0
    without_keys = found.keyless / found.records
    best = min(found.schemes, key=lambda other: _measure(other)[1].over_mean)
    helps = "fewer partitions even it out"
    if (over := _measure(best)[1].over_mean) < 0.9 * spread.over_mean:
        helps = f"`{best.scheme}` has {_times(over)} the mean"
    if most and part >= 0.1:
        cause = f"{_percent(part)} of it the key `{shortened(most.key)}`, which is not too large for a partition"
    elif load.scheme == ACTUAL_NAME and without_keys > 0.5:
        cause = f"and {_percent(without_keys)} of the records have no key"
        helps = "requests of fewer than 100 records that name no partition even it out"
    elif found.key_check.distinct < FEW_KEYS * load.partitions:
        cause = f"by chance, since {found.key_check.distinct:,} keys are few for {load.partitions} partitions"
    else:
        cause = "and neither a single key nor the hash is the cause"
    return f"{_fullest(load, unit, spread)}, {_times(spread.over_mean)} the mean, {cause}: {helps}"


def _even(load: SchemeLoad) -> str:
    unit, spread = _measure(load)
    return (
        f"even: {_fullest(load, unit, spread)}, {spread.over_mean:.2f} times the mean of {load.partitions} partitions"
    )


def _measure(load: SchemeLoad) -> tuple[str, Spread]:
    """Bytes or records, whichever is spread less evenly."""
    if load.bytes is not None and load.bytes.over_mean >= load.records.over_mean:
        return "bytes", load.bytes
    return "records", load.records


def _of(key: HotKey, unit: str) -> int:
    return (key.bytes or 0) if unit == "bytes" else key.records


def _on(keys: tuple[HotKey, ...] | list[HotKey], scheme: str, partition: int) -> list[HotKey]:
    return [key for key in keys if key.place(scheme) == partition]


def _fullest(load: SchemeLoad, unit: str, spread: Spread) -> str:
    where = "" if load.scheme == ACTUAL_NAME else f"with `{load.scheme}`, "
    return f"{where}partition {spread.fullest} carries {_percent(spread.fullest_share)} of the {unit}"


def _percent(share: float) -> str:
    return f"{share:.0%}"[:-1] + " %" if share >= 0.1 else f"{share * 100:.2g} %"


def _times(ratio: float) -> str:
    return f"{ratio:.0f} times" if ratio >= 10 else f"{ratio:.1f} times"
