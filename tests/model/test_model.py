import asyncio
import dataclasses
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import Struct

from shardyard.model import (
    Appended,
    Conflict,
    Fence,
    InvalidValue,
    Member,
    Move,
    Moved,
    OffsetTrimmed,
    Partition,
    Position,
    Record,
    Retention,
    RetryLater,
    Sealed,
    SealLost,
    Span,
    Stamp,
    Topic,
)
from shardyard.model.url import beside
from shardyard.runtime.clock import ManualClock


@pytest.mark.parametrize("word", [Member("a"), Move(Partition("t", 0), "a", "b"), Retention(), Topic("t", 1)])
def test_the_words_are_frozen_and_slotted(word: object) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(word, next(iter(dataclasses.asdict(cast(Any, word)))), None)
    assert not hasattr(word, "__dict__")


@pytest.mark.parametrize(
    "word",
    [
        Appended(Partition("t", 0), Position(1, 2), 3),
        Fence("f", 1),
        Partition("t", 0),
        Position(1, 2),
        Record("1", None, b""),
        Span(1, 2, 3),
        Stamp("p", 1),
    ],
)
def test_the_words_that_every_record_needs_are_frozen_and_quick_to_make(word: Struct) -> None:
    with pytest.raises(AttributeError, match="immutable"):
        setattr(word, word.__struct_fields__[0], None)
    assert not hasattr(word, "__dict__")


def test_a_position_of_a_later_epoch_comes_after_every_offset_of_an_earlier_one() -> None:
    assert Position(1, 0) > Position(0, 10**9)


def test_a_partition_reads_as_topic_and_index() -> None:
    assert str(Partition("inbox", 7)) == "inbox/7"


def test_a_record_can_be_pickled_hashed_and_asked_for_a_header() -> None:
    record = Record("1", None, b"value", (("tag", b"red"), ("tag", b"blue")))
    assert pickle.loads(pickle.dumps(record)) == record
    assert hash(record) == hash(Record("1", None, b"value", record.headers))
    assert (record.header("tag"), record.header("trace")) == (b"blue", None)


def test_an_error_crosses_processes_with_its_fields() -> None:
    error = pickle.loads(pickle.dumps(OffsetTrimmed(Partition("t", 1), 3, 7)))
    assert (error.offset, error.first, str(error)) == (
        3,
        7,
        "offset 3 of t/1 was trimmed away: the first one there is 7",
    )


def test_a_topic_that_takes_no_records_says_whether_to_wait_or_where_to_go() -> None:
    assert issubclass(Sealed, RetryLater)
    assert issubclass(Moved, Conflict)
    sealed, moved = (pickle.loads(pickle.dumps(error)) for error in (Sealed("orders"), Moved("orders", "orders.2")))
    assert str(sealed) == "topic 'orders' takes no records while it is being moved: try again in a moment"
    assert str(moved) == "topic 'orders' continues as 'orders.2': append there"
    assert (sealed.topic, moved.topic, moved.successor) == ("orders", "orders", "orders.2")


def test_a_lost_seal_is_a_conflict_that_names_the_holder() -> None:
    assert issubclass(SealLost, Conflict)
    lost = pickle.loads(pickle.dumps(SealLost("orders", "reshard-1")))
    assert isinstance(lost, SealLost)
    assert (lost.topic, lost.holder) == ("orders", "reshard-1")
    assert str(lost).startswith("topic 'orders' is not sealed by 'reshard-1' any more")


@pytest.mark.parametrize("weight", [0, -1, 2.5, "1", True])
def test_a_weight_must_be_a_whole_number_of_at_least_1(weight: int) -> None:
    with pytest.raises(InvalidValue, match="weight of member 'a' is"):
        Member("a", weight)


def test_a_member_needs_a_name_and_a_topic_a_partition() -> None:
    with pytest.raises(InvalidValue, match="member name"):
        Member("")
    with pytest.raises(InvalidValue, match="partitions is 0: expected a whole number of at least 1"):
        Topic("t", 0)


def test_a_manual_clock_wakes_sleepers_in_the_order_of_their_deadlines() -> None:
    async def story() -> list[str]:
        clock, woken = ManualClock(), list[str]()

        async def sleeper(name: str, seconds: float) -> None:
            await clock.sleep(seconds)
            woken.append(name)

        tasks = [asyncio.create_task(sleeper(*s)) for s in (("late", 3.0), ("soon", 1.0), ("never", 9.0))]
        await asyncio.sleep(0)
        await clock.advance(5.0)
        tasks[2].cancel()
        return woken

    assert asyncio.run(story()) == ["soon", "late"]


def test_a_manual_clocks_wall_time_may_jump_but_its_monotonic_time_does_not() -> None:
    clock = ManualClock(now=1000.0)
    asyncio.run(clock.advance(1.0))
    clock.jump(-50.0)
    assert (clock.now(), clock.monotonic()) == (951.0, 1.0)
    with pytest.raises(InvalidValue, match="expected a number of seconds of at least 0"):
        asyncio.run(clock.advance(-1.0))


def test_a_task_that_sleeps_again_and_again_wakes_every_time() -> None:
    async def story() -> list[float]:
        clock, woken = ManualClock(), list[float]()

        async def ticker() -> None:
            while True:
                await clock.sleep(1.0)
                woken.append(clock.monotonic())

        task = asyncio.create_task(ticker())
        await asyncio.sleep(0)
        await clock.advance(3.5)
        task.cancel()
        return woken

    assert asyncio.run(story()) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("sqlite:///data/log", "sqlite:///data/registry.db"),
        ("sqlite:////srv/yard/log", "sqlite:////srv/yard/registry.db"),
        ("sqlite:///log", "sqlite:///registry.db"),
        ("sqlite:///data/log/", "sqlite:///data/registry.db"),
        ("postgresql://host/yard", "postgresql://host/yard"),
        ("memory://", "memory://"),
    ],
)
def test_a_store_is_beside_the_one_that_it_goes_with(url: str, expected: str) -> None:
    assert beside("log", url, "registry.db") == expected


@pytest.mark.parametrize(
    ("value", "shown"), [("a b", "'a b'"), (b"a", "b'a'"), (0, "0"), (None, "missing"), (Path("a/b"), "'a/b'")]
)
def test_a_wrong_value_is_shown_to_people(value: object, shown: str) -> None:
    assert str(InvalidValue("--file", value, "another one")) == f"--file is {shown}: expected another one"
