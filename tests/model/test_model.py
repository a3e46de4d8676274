import asyncio
import dataclasses

import pytest

from shardyard import model
from shardyard.model import InvalidValue, ManualClock, Member, Partition, Position, Record, Topic


def test_the_words_are_frozen_and_slotted() -> None:
    words = [getattr(model, name) for name in model.__all__ if dataclasses.is_dataclass(getattr(model, name))]
    assert len(words) == 8
    for word in words:
        assert word.__dataclass_params__.frozen, word
        assert "__slots__" in vars(word), word


def test_a_position_of_a_later_epoch_comes_after_every_offset_of_an_earlier_one() -> None:
    assert Position(1, 0) > Position(0, 10**9)


def test_a_partition_reads_as_topic_and_index() -> None:
    assert str(Partition("inbox", 7)) == "inbox/7"


def test_records_do_not_share_headers_that_can_change() -> None:
    with pytest.raises(TypeError):
        Record("1", None, b"").headers["a"] = b"b"  # type: ignore[index]


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
        clock.advance(5.0)
        await asyncio.gather(*tasks[:2])
        tasks[2].cancel()
        return woken

    assert asyncio.run(story()) == ["soon", "late"]


def test_a_manual_clocks_wall_time_may_jump_but_its_monotonic_time_does_not() -> None:
    clock = ManualClock(now=1000.0)
    clock.advance(1.0)
    clock.jump(-50.0)
    assert (clock.now(), clock.monotonic()) == (951.0, 1.0)
