"""Random histories of one queue against a simple model: publish, deliver, acknowledge, requeue, cancel, restart."""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from shardyard.model import UnknownDeliveryTag
from shardyard.sharding.config import ShardingConfig
from tests.sharding.owner import Consumer, Owner, consume, owner, until

if TYPE_CHECKING:
    from shardyard.sharding.delivery import Deliveries

T = TypeVar("T")
CONFIG = ShardingConfig(
    store_seconds=3600.0, in_flight_records=6, read_ahead_records=4, batch_records=3, trim_records=3
)
"""Small bounds, so that they matter. States are stored only by the rule for it, and when a queue is closed."""


class QueueMachine(RuleBasedStateMachine):
    """The model knows which messages were published and which are settled, in memory and as stored last."""

    engine = "memory"
    consumers = Bundle[Consumer]("consumers")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.folder = Path(tempfile.mkdtemp())
        self.yard: Owner = self._run(self.stack.enter_async_context(owner(self.engine, self.folder, config=CONFIG)))
        self.queue = self._run(self.yard.open())
        self.active: list[Consumer] = []
        self.published = 0
        self.settled: set[int] = set()
        self.stored: set[int] = set()
        self.failures: dict[int, int] = {}
        self.unsettled: dict[int, dict[int, int]] = {}
        """By consumer, its tags with the messages."""
        self.journal: list[tuple[Consumer, Deliveries]] = []
        """What was delivered and not looked at."""
        self.delivered = self.stored_delivered = self.doubtful = 0
        """The number after the last message that was delivered; before which messages count as redelivered."""
        self.stored_failures: dict[int, int] = {}
        self.is_consumed = False
        """Since the last clean stop, somebody has consumed."""

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def teardown(self) -> None:
        self._run(self.stack.aclose())
        self.runner.close()
        shutil.rmtree(self.folder)

    def _settle_down(self) -> None:
        """Let everything that is under way happen, and look at what was delivered."""

        async def wait() -> None:
            await until(self._has_delivered_all)
            for _ in range(20):
                await asyncio.sleep(0)  # what comes too much

        self._run(wait())
        journal, self.journal[:] = list(self.journal), []
        for consumer, batch in journal:
            out = {number for tags in self.unsettled.values() for number in tags.values()}
            ready = [n for n in range(self.published) if n not in self.settled and n not in out]
            numbers = [int(record.value) for record in batch.records]
            assert numbers == ready[: len(numbers)], "the messages at the head are delivered, in order"
            assert batch.counts == [self.failures.get(number, 0) for number in numbers]
            assert batch.redelivered == [n < self.doubtful or n in self.failures for n in numbers]
            self.delivered = max(self.delivered, numbers[-1] + 1)
            tags = range(batch.first_tag, batch.first_tag + len(batch))
            self.unsettled.setdefault(id(consumer), {}).update(zip(tags, numbers, strict=True))

    def _has_delivered_all(self) -> bool:
        """Whether no message waits that a consumer would take."""
        unacked = self.queue.unacked
        has_takers = any(consumer.settling.credit(1) > 0 for consumer in self.active)
        return not has_takers or unacked == CONFIG.in_flight_records or unacked + len(self.settled) == self.published

    def _tags(self, consumer: Consumer) -> dict[int, int]:
        return self.unsettled.get(id(consumer), {})

    def _fail(self, numbers: list[int]) -> None:
        for number in numbers:
            self.failures[number] = self.failures.get(number, 0) + 1

    @rule(count=st.integers(1, 7))
    def publish(self, count: int) -> None:
        self._run(self.yard.publish(*(str(number) for number in range(self.published, self.published + count))))
        self.published += count
        self._settle_down()

    @rule(target=consumers, prefetch=st.integers(0, 5))
    def subscribe(self, prefetch: int) -> Consumer:
        async def work() -> Consumer:
            return consume(self.queue, prefetch=prefetch, journal=self.journal)

        consumer: Consumer = self._run(work())
        self.active.append(consumer)
        self.is_consumed = True
        self._settle_down()
        return consumer

    @rule(consumer=consumers, data=st.data(), multiple=st.booleans())
    def ack(self, consumer: Consumer, data: st.DataObject, multiple: bool) -> None:
        self._settle(consumer, data, multiple, "ack")

    @rule(consumer=consumers, data=st.data(), multiple=st.booleans())
    def nack(self, consumer: Consumer, data: st.DataObject, multiple: bool) -> None:
        self._settle(consumer, data, multiple, "nack")

    def _settle(self, consumer: Consumer, data: st.DataObject, multiple: bool, how: str) -> None:
        tags = self._tags(consumer)
        if consumer not in self.active or not tags:
            return
        tag = data.draw(st.sampled_from(sorted(tags)))
        done = [each for each in sorted(tags) if each == tag or (multiple and each < tag)]
        numbers = [tags.pop(each) for each in done]

        async def work() -> None:
            getattr(consumer.settling, how)(tag, multiple=multiple)
            with pytest.raises(UnknownDeliveryTag):
                consumer.settling.ack(tag)

        self._run(work())
        if how == "ack":
            self.settled.update(numbers)
        else:
            self._fail(numbers)
        self._settle_down()

    @rule(consumer=consumes(consumers))
    def cancel(self, consumer: Consumer) -> None:
        if consumer not in self.active:
            return

        async def work() -> None:
            consumer.settling.cancel()

        self._run(work())
        self.active.remove(consumer)
        self._fail(list(self.unsettled.pop(id(consumer), {}).values()))
        self._settle_down()

    @rule()
    def get(self) -> None:
        found = self._run(self.queue.get())
        self.is_consumed = True
        if found is not None:
            number = int(found.records[0].value)
            out = [each for tags in self.unsettled.values() for each in tags.values()]
            assert number == min(n for n in range(self.published) if n not in self.settled and n not in out)
            self.settled.add(number)
            self.delivered = max(self.delivered, number + 1)
        self._settle_down()

    @rule()
    def store(self) -> None:
        self._run(self.yard.stores[-1].store(self.queue))
        self._was_stored()

    def _was_stored(self) -> None:
        self.stored, self.stored_failures = set(self.settled), dict(self.failures)
        self.stored_delivered = self.delivered

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        self._run(self.queue.close(clean=clean))
        if clean:
            self._was_stored()
            self.is_consumed = False
        self.settled, self.failures = set(self.stored), dict(self.stored_failures)
        self.delivered = self.stored_delivered
        self.doubtful = self.published if self.is_consumed else self.delivered
        self.active.clear()
        self.unsettled.clear()
        self.queue = self._run(self.yard.open())
        self._settle_down()

    @invariant()
    def numbers_add_up(self) -> None:
        status = self._run(self.queue.status())
        out = sum(len(tags) for tags in self.unsettled.values())
        assert status.unacked == out <= CONFIG.in_flight_records
        if self.engine != "sparse":
            known = self.queue.state
            assert status.ready >= self.published - len(self.settled) - out
            if self.queue._ahead.position >= known.end:
                assert status.ready == self.published - len(self.settled) - out
        assert self._has_delivered_all()

    def drain(self) -> None:
        """Everything that is not settled comes, in order."""

        async def work() -> list[int]:
            got = []
            while (found := await self.queue.get()) is not None:
                got.append(int(found.records[0].value))
            return got

        self._run(self.queue.close(clean=True))
        self.queue = self._run(self.yard.open())
        assert self._run(work()) == [number for number in range(self.published) if number not in self.settled]


class Drained(QueueMachine):
    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            super().teardown()


@pytest.mark.parametrize(("engine", "examples"), [("memory", 150), ("sparse", 8), ("sqlite", 5)])
def test_a_queue_does_what_its_model_does(engine: str, examples: int) -> None:
    machine = type("Machine", (Drained,), {"engine": engine})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=min(examples, 2 * settings().max_examples),
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
