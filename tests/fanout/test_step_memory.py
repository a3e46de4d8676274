"""However much waits in however many partitions, a step takes a limited amount of memory."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from shardyard.fanout import forwarding
from shardyard.fanout.forwarding import Outlet
from shardyard.fanout.source import InFlight
from shardyard.log import Log
from shardyard.log.memory import MemoryLog
from shardyard.log.requests import AppendRequest
from shardyard.model import Appended, Fence, Partition, Record
from shardyard.model.limits import ANY_SIZE, Validated, validate
from shardyard.runtime.clock import ManualClock
from shardyard.wire.channels import FANOUT
from tests.fanout.flow import CONFIG, flow, until
from tests.log.samples import awaited

KB = 1000
PARTITIONS = 40


@awaited
async def test_partitions_take_turns_if_they_hold_more_than_a_step_reads() -> None:
    config = replace(CONFIG, worker_bytes=2 * KB, step_bytes=10 * KB)
    async with flow("memory") as f:
        for index in range(PARTITIONS):
            for number in range(4):
                record = Record(f"{number}", b"tea", bytes(KB))
                await f.log.append(Partition(FANOUT, index), [record])
        steps: list[list[InFlight]] = []
        worker = f.worker("w", config)
        forward = worker._forward

        async def noting(step: Sequence[InFlight]) -> None:
            steps.append(list(step))
            await forward(step)

        worker._forward = noting  # type: ignore[method-assign]
        async with worker:
            await until(lambda: [at.offset for at in worker.done.values()] == [4] * PARTITIONS, "all is forwarded")
        assert max(sum(in_flight.batch.size for in_flight in step) for step in steps) <= 12 * KB
        in_flight = [in_flight.partition for step in steps for in_flight in step]
        assert set(in_flight[:PARTITIONS]) == set(in_flight), "nobody is read twice before all others were read once"


class NotingLog(MemoryLog):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[tuple[int, list[str]]]] = []

    async def append_many(self, requests: Sequence[AppendRequest]) -> list[Appended | Any]:
        appended = [(each.partition.index, [r.id for r in cast(Validated, each.records).rows]) for each in requests]
        self.calls.append(appended)
        return list(await super().append_many(requests))


@awaited
async def test_a_large_step_is_appended_in_several_calls_and_never_whole_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwarding, "APPEND_BYTES", 2 * KB + 500)
    monkeypatch.setattr(forwarding, "CALL_BYTES", 7 * KB)
    made: list[int] = []
    ahead: list[int] = []

    def parts() -> Iterator[tuple[int, Validated, Sequence[Fence]]]:
        for index, count in enumerate([1, 1, 4, 1, 1, 1, 1, 1, 1]):
            made.append(index)
            ahead.append(len(made) - sum(len(call) for call in log.calls))
            yield index, validate([Record(f"{index}.{n}", b"tea", bytes(KB)) for n in range(count)], ANY_SIZE, 1), ()

    async with NotingLog() as log:
        await log.create_topic("t", 9)
        await Outlet(cast(Log, log), ManualClock()).append("t", parts(), lambda: True)
        assert log.calls == [
            [(0, ["0.0"]), (1, ["1.0"]), (2, ["2.0", "2.1"])],
            [(2, ["2.2", "2.3"]), (3, ["3.0"]), (4, ["4.0"]), (5, ["5.0"]), (6, ["6.0"])],
            [(7, ["7.0"]), (8, ["8.0"])],
        ]
        assert max(ahead) <= 6
