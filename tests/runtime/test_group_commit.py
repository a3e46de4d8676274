import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from shardyard.model import Closed, InvalidCall
from shardyard.runtime import group_commit
from shardyard.runtime.group_commit import CommitTimes, GroupCommit, Outcome


class Gate:
    """Carries out numbers by doubling them, and holds the first group until it is released."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        self.groups: list[list[int]] = []

    def carry_out(self, group: list[int]) -> list[Outcome]:
        self.groups.append(group)
        self.begun.set()
        assert self.open.wait(10)
        if 13 in group:
            raise ZeroDivisionError
        return [InvalidCall("odd") if number % 2 else number * 2 for number in group]


def tell(story: Callable[[Gate, "GroupCommit[int]"], Coroutine[Any, Any, None]], **limits: float) -> Gate:
    gate = Gate()
    together = GroupCommit("test", gate.carry_out, **{"most": 100, **limits})  # type: ignore[arg-type]
    try:
        asyncio.run(story(gate, together))
    finally:
        gate.open.set()
        together.close()
    return gate


async def hold(gate: Gate, together: "GroupCommit[int]") -> "asyncio.Task[Any]":
    """A first piece that is under way, so that what follows waits together."""
    task = asyncio.create_task(together.do(0))
    await asyncio.to_thread(gate.begun.wait, 10)
    return task


def test_what_waits_together_is_one_group_and_each_gets_its_own_outcome() -> None:
    async def story(gate: Gate, together: GroupCommit[int]) -> None:
        first = await hold(gate, together)
        rest = [asyncio.create_task(together.do(n)) for n in (2, 3, 4)]
        await asyncio.sleep(0)
        gate.open.set()
        assert await first == 0
        outcomes = await asyncio.gather(*rest, return_exceptions=True)
        assert (outcomes[0], outcomes[2]) == (4, 8)
        assert isinstance(outcomes[1], InvalidCall)

    assert tell(story).groups == [[0], [2, 3, 4]]


def test_a_bad_piece_harms_only_itself() -> None:
    async def story(gate: Gate, together: GroupCommit[int]) -> None:
        await hold(gate, together)
        rest = [asyncio.create_task(together.do(n)) for n in (2, 13, 4)]
        await asyncio.sleep(0)
        gate.open.set()
        outcomes = await asyncio.gather(*rest, return_exceptions=True)
        assert (outcomes[0], outcomes[2]) == (4, 8)
        assert isinstance(outcomes[1], ZeroDivisionError)

    tell(story)


def test_work_whose_asker_is_gone_is_not_begun_and_counts_until_then() -> None:
    async def story(gate: Gate, together: GroupCommit[int]) -> None:
        await hold(gate, together)
        rest = [asyncio.create_task(together.do(n, size=100)) for n in (2, 4)]
        await asyncio.sleep(0)
        rest[0].cancel()
        await asyncio.sleep(0)
        assert together.waiting_bytes == 200
        gate.open.set()
        assert await rest[1] == 8
        assert together.waiting_bytes == 0

    assert tell(story).groups == [[0], [4]]


@pytest.mark.parametrize("limits", [{"most": 2}, {"most_bytes": 20}])
def test_a_group_keeps_its_limits(limits: dict[str, int]) -> None:
    async def story(gate: Gate, together: GroupCommit[int]) -> None:
        await hold(gate, together)
        rest = [asyncio.create_task(together.do(n, size=10)) for n in (2, 4, 6)]
        await asyncio.sleep(0)
        gate.open.set()
        assert await asyncio.gather(*rest) == [4, 8, 12]

    assert tell(story, **limits).groups == [[0], [2, 4], [6]]


def test_after_closing_nothing_is_taken() -> None:
    async def story(gate: Gate, together: GroupCommit[int]) -> None:
        gate.open.set()
        await asyncio.to_thread(together.close)
        with pytest.raises(Closed):
            await together.do(2)

    tell(story)


class Stopwatch:
    """Stands in for `time` in `group_commit`: each group takes `seconds`, and nothing else takes any time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def carry_out(self, gate: Gate) -> Callable[[list[int]], list[Outcome]]:
        def timed(group: list[int]) -> list[Outcome]:
            self.now += self.seconds
            return gate.carry_out(group)

        return timed


def tell_timed(
    seconds: float, story: Callable[[Gate, "GroupCommit[int]"], Coroutine[Any, Any, None]], patch: pytest.MonkeyPatch
) -> Gate:
    """The story of groups that take `seconds` each and linger for up to a minute."""
    stopwatch = Stopwatch(seconds)
    patch.setattr(group_commit, "time", stopwatch)
    gate = Gate()
    together = GroupCommit("test", stopwatch.carry_out(gate), most=100, linger=60.0)
    try:
        asyncio.run(asyncio.wait_for(story(gate, together), 10))
    finally:
        gate.open.set()
        together.close()
    return gate


def test_callers_that_submit_again_at_once_stay_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(gate: Gate, together: GroupCommit[int]) -> None:
        async def again(since: "asyncio.Future[Any]", numbers: tuple[int, ...]) -> None:
            await since
            for number in numbers:
                await together.do(number)

        first = await hold(gate, together)
        rest = [asyncio.create_task(together.do(0)) for _ in range(3)]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(again(first, (2, 4, 6)), *(again(task, (2, 4)) for task in rest))

    groups = tell_timed(60.0, story, monkeypatch).groups
    assert [sorted(group) for group in groups] == [[0], [0, 0, 0, 2], [2, 2, 2, 4], [4, 4, 4, 6]]


def test_it_waits_for_callers_no_longer_than_the_last_group_took(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(gate: Gate, together: GroupCommit[int]) -> None:
        first = await hold(gate, together)
        rest = [asyncio.create_task(together.do(n)) for n in (2, 4)]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(first, *rest)
        assert await together.do(6) == 12

    assert tell_timed(0.0, story, monkeypatch).groups == [[0], [2, 4], [6]]


def test_it_does_not_wait_for_callers_when_much_is_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(gate: Gate, together: GroupCommit[int]) -> None:
        first = await hold(gate, together)
        rest = [asyncio.create_task(together.do(n)) for n in (2, 4)]
        await asyncio.sleep(0)
        gate.open.set()
        await first
        await asyncio.gather(together.do(6), *rest)
        assert await together.do(8, size=2**20) == 16

    assert tell_timed(60.0, story, monkeypatch).groups == [[0], [2, 4, 6], [8]]


def test_it_waits_ever_more_seldom_for_callers_that_do_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch = Stopwatch(1.0)
    waits: list[int] = []
    groups = 0
    idle = threading.Event()

    class VainCondition(threading.Condition):
        """Nobody comes while it waits for a limited time, which passes at once."""

        def wait(self, timeout: float | None = None) -> bool:
            if timeout is None:
                idle.set()
                return super().wait()
            stopwatch.now += timeout
            waits.append(groups)
            return False

    def carry_out(group: list[int]) -> list[Outcome]:
        nonlocal groups
        groups += 1
        stopwatch.now += stopwatch.seconds
        return group

    monkeypatch.setattr(group_commit, "time", stopwatch)
    monkeypatch.setattr(group_commit, "threading", SimpleNamespace(Condition=VainCondition, Thread=threading.Thread))
    together = GroupCommit("test", carry_out, most=100, linger=60.0)

    async def story() -> None:
        for _ in range(20):
            assert await asyncio.to_thread(idle.wait, 10)
            idle.clear()
            with together._wake:  # so that both are in one group
                pair = [asyncio.create_task(together.do(n)) for n in (2, 4)]
                await asyncio.sleep(0)
            await asyncio.gather(*pair)

    try:
        asyncio.run(story())
    finally:
        together.close()
    assert groups == 20
    assert waits == [1, 3, 7, 15]


@pytest.mark.parametrize(("every", "are_short"), [(1000, True), (200, False), (8, False)])
def test_commits_stay_short_with_a_rare_stall_but_not_with_one_after_the_other(every: int, are_short: bool) -> None:
    times = CommitTimes()
    found = set()
    for number in range(1, 2001):
        times.took(1.0 if number % every == 0 else 0.0003)
        found.add(times.are_short)
    assert found == ({True} if are_short else {True, False})
