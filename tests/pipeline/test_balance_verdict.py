"""The verdict: one sentence for each case, with what is wrong and what would help."""

from collections.abc import Sequence

import pytest

from shardyard.pipeline.balance.figures import (
    HotKey,
    HotKeys,
    KeyCheck,
    KeyPlace,
    KeySpread,
    MemberLoad,
    SchemeLoad,
    Spread,
    TopicBalance,
    shown,
)
from shardyard.pipeline.balance.verdict import verdict


def load(records: Sequence[int], sizes: Sequence[int] | None = None, scheme: str = "actual") -> SchemeLoad:
    return SchemeLoad(scheme, len(records), Spread.of(records), None if sizes is None else Spread.of(sizes))


def key(name: bytes, partition: int, records: int, size: int | None = None, scheme: str = "actual") -> HotKey:
    return HotKey(name, records, size, 0.0, None, (KeyPlace(scheme, partition, None, None),))


def keys(counts: Sequence[int], scheme: str = "actual") -> KeySpread:
    return KeySpread(scheme, len(counts), Spread.of(counts))


def topic(
    *schemes: SchemeLoad,
    hot: Sequence[HotKey] = (),
    check: Sequence[KeySpread] = (),
    distinct: int = 100_000,
    one_in: int = 1,
    members: Sequence[MemberLoad] = (),
    keyless: int = 0,
) -> TopicBalance:
    return TopicBalance(
        topic="orders",
        records=schemes[0].records.total if schemes else 7,
        bytes=None,
        keyless=keyless,
        schemes=schemes,
        windows=(),
        hot_keys=HotKeys(tuple(hot), 0, None),
        key_check=KeyCheck(distinct // one_in, one_in, distinct, tuple(check)),
        members=tuple(members),
    )


def member_load(count: int, idle: int, scheme: str = "actual") -> MemberLoad:
    return MemberLoad("sticky", count, scheme, idle, Spread.of([1]), None)


EVEN = load([100, 102, 98, 100])
SKEWED = load([100, 200, 100, 100])  # the fullest has 1.6 times the mean
CASES = {
    "even": (topic(EVEN), "even: partition 1 carries 26 % of the records, 1.02 times the mean of 4 partitions"),
    "even under a scheme": (
        topic(load([10, 10], [7, 5], "xxh64 jump 2")),
        "even: with `xxh64 jump 2`, partition 0 carries 58 % of the bytes, 1.17 times the mean of 2 partitions",
    ),
    "no records": (topic(load([0, 0])), "no records"),
    "nothing to judge by": (topic(), "7 records, but neither partitions nor a scheme to judge them by"),
    "one hot key": (
        topic(load([10, 70, 10, 10], [100, 700, 100, 100]), hot=[key(b"room-1", 1, 60, 600)]),
        (
            "partition 1 carries 70 % of the bytes, 86 % of it the key `room-1`: splitting the key helps (without it "
            "the fullest partition would carry 25 %), more partitions do not (the key alone is 60 %)"
        ),
    ),
    "two hot keys": (
        topic(load([40, 50, 5, 5]), hot=[key(b"a", 1, 45), key(b"b", 0, 35)]),
        (
            "partition 1 carries 50 % of the records, 90 % of it the key `a`: splitting the key and another one as hot "
            "helps (without them the fullest partition would carry 25 %), more partitions do not (the key alone is "
            "45 %)"
        ),
    ),
    "three hot keys, one of them binary": (
        topic(load([28, 40, 28, 1, 1, 2]), hot=[key(b"\xff\x01", 1, 39), key(b"b", 0, 27), key(b"c", 2, 27)]),
        (
            "partition 1 carries 40 % of the records, 98 % of it the key `0xff01`: splitting the key and 2 others as "
            "hot helps (without them the fullest partition would carry 29 %), more partitions do not (the key alone is "
            "39 %)"
        ),
    ),
    "records without keys": (
        topic(load([300, 0, 0], [3000, 0, 0]), distinct=0, keyless=300),
        (
            "partition 0 carries 100 % of the bytes, 3.0 times the mean, and 100 % of the records have no key: "
            "requests of fewer than 100 records that name no partition even it out"
        ),
    ),
    "one record that is large": (
        topic(load([25, 25, 25, 25], [25, 925, 25, 25]), hot=[key(b"a", 1, 1, 900)]),
        (
            "partition 1 carries 92 % of the bytes but only 25 % of the records, which are 3.7 times the mean size: "
            "smaller records help, more partitions or another hash do not"
        ),
    ),
    "large records of many keys": (
        topic(load([25, 25, 25, 25], [100, 400, 100, 100])),
        (
            "partition 1 carries 57 % of the bytes but only 25 % of the records, which are 2.3 times the mean size: "
            "smaller records help, more partitions or another hash do not"
        ),
    ),
    "a hash that spreads badly, and a better one": (
        topic(
            load([100, 200, 100, 100], scheme="fnv1a32 modulus 4"),
            check=[
                keys([1000, 2000, 1000, 1000], "fnv1a32 modulus 4"),
                keys([625] * 8, "xxh64 modulus 8"),
                keys([1250, 1260, 1240, 1250], "xxh64 modulus 4"),
            ],
        ),
        (
            "`fnv1a32 modulus 4` spreads the keys badly (chi-square per degree of freedom 200.0 instead of 1; "
            "partition 1 has 40 % of the keys): `xxh64 modulus 4` helps (0.1)"
        ),
    ),
    "a hash that spreads badly, and none better": (
        topic(SKEWED, check=[keys([1000, 2000, 1000, 1000])]),
        (
            "the hash spreads the keys badly (chi-square per degree of freedom 200.0 instead of 1; partition 1 has "
            "40 % of the keys): no other scheme that was tried is better"
        ),
    ),
    "keys that chance explains": (
        topic(EVEN, check=[keys([10, 14, 8, 8])]),
        "even: partition 1 carries 26 % of the records, 1.02 times the mean of 4 partitions",
    ),
    "idle members": (
        topic(EVEN, members=[member_load(9, 5), member_load(4, 0), member_load(5, 1), member_load(3, 9, "other")]),
        "4 partitions for 5 members leave 1 member idle: at least 5 partitions help",
    ),
    "few keys": (
        topic(load([5, 0, 3, 0]), distinct=2, hot=[key(b"a", 0, 5)]),
        "2 keys fill at most 2 of 4 partitions, at least 2 stay empty: more partitions do not help",
    ),
    "one key": (
        topic(load([5, 0]), distinct=1),
        "1 key fills at most 1 of 2 partitions, at least 1 stays empty: more partitions do not help",
    ),
    "few keys, but records without one fill the rest": (
        topic(EVEN, distinct=2, keyless=300),
        "even: partition 1 carries 26 % of the records, 1.02 times the mean of 4 partitions",
    ),
    "uneven by chance": (
        topic(SKEWED, distinct=50),
        (
            "partition 1 carries 40 % of the records, 1.6 times the mean, by chance, since 50 keys are few for 4 "
            "partitions: fewer partitions even it out"
        ),
    ),
    "uneven for no one reason, and a better scheme": (
        topic(SKEWED, load([250, 250], scheme="xxh64 jump 2")),
        (
            "partition 1 carries 40 % of the records, 1.6 times the mean, and neither a single key nor the hash is "
            "the cause: `xxh64 jump 2` has 1.0 times the mean"
        ),
    ),
    "a warm key": (
        topic(SKEWED, hot=[key(b"a", 1, 40), key(b"b", 0, 60)]),
        (
            "partition 1 carries 40 % of the records, 1.6 times the mean, 20 % of it the key `a`, which is not too "
            "large for a partition: fewer partitions even it out"
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_sentence_says_what_is_wrong_and_what_helps(case: str) -> None:
    found, sentence = CASES[case]
    assert verdict(found) == sentence


def test_a_key_above_the_mean_but_less_than_half_of_its_partition_is_not_called_the_cause() -> None:
    found = topic(load([10, 290, 100, 100]), hot=[key(b"a", 1, 130)])  # the mean is 125
    assert "splitting" not in verdict(found)
    found = topic(load([10, 290, 100, 100]), hot=[key(b"a", 1, 150)])
    assert "splitting the key helps" in verdict(found)


def test_a_long_key_is_truncated_in_the_sentence_only() -> None:
    found = verdict(topic(load([10, 70, 10, 10]), hot=[key(b"x" * 200, 1, 60)]))
    assert f"`{'x' * 59}…`" in found
    assert shown(b"x" * 200) == "x" * 200


@pytest.mark.parametrize(
    ("given", "expected"),
    [(b"room-1", "room-1"), ("ключ".encode(), "ключ"), (b"a\n", "0x610a"), (b"\xff", "0xff"), (b"", "")],
)
def test_a_key_is_shown_as_a_string_if_it_is_printable(given: bytes, expected: str) -> None:
    assert shown(given) == expected
