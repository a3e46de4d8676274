"""How messages of a queue are settled: they are done, are delivered again, or become dead letters."""

from collections.abc import Callable, Sequence

from shardyard.model import Record
from shardyard.model.sharding import Queue, QueueKind
from shardyard.runtime.clock import Clock
from shardyard.runtime.metrics import SHARDING_ACKNOWLEDGED, SHARDING_DROPPED
from shardyard.sharding.ack_state import AckState
from shardyard.sharding.dead_letters import Burial, DeadLetter, DeadLetterSink, Reason
from shardyard.sharding.in_flight import InFlight
from shardyard.sharding.ready import Ready


class Settling:
    """Settles messages in the acknowledgement state of their queue, and stores dead letters before that."""

    def __init__(
        self,
        queue: Queue,
        state: AckState,
        ready: Ready,
        in_flight: InFlight,
        dead_letters: DeadLetterSink,
        clock: Clock,
        *,
        changed: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`changed` is called after each change of the state, `failed` if dead letters can't be stored."""
        self.queue = queue
        """As it is in the topology now."""
        self._state = state
        self._ready = ready
        self._in_flight = in_flight
        self._changed = changed
        self._burial = Burial(
            queue.name, lambda letters: dead_letters.store(self.queue, letters), clock, self._buried, failed
        )

    @property
    def unburied(self) -> int:
        """How many dead letters are not stored yet."""
        return len(self._burial)

    async def close(self, seconds: float) -> None:
        """Wait for up to `seconds` until all dead letters are stored; then give up. They stay in their queue."""
        await self._burial.close(seconds)

    # Messages in flight

    def acknowledge(self, offsets: Sequence[int]) -> None:
        """They are done."""
        self._in_flight.remove(offsets)
        SHARDING_ACKNOWLEDGED.add(len(offsets))
        self.settle(offsets)

    def give_back(self, offsets: Sequence[int], *, failed: bool) -> None:
        """They are delivered again. `failed`: their delivery counts as failed, and the limit may make them dead
        letters."""
        limit, counts = self.queue.limits.delivery_limit, self._state.counts
        again = []
        for offset in offsets:
            count = counts.get(offset, 0) + failed
            if failed and limit is not None and count > limit:
                self._bury(offset, Reason.DELIVERY_LIMIT, count)
            else:
                counts[offset] = count  # also 0, which marks it as redelivered
                again.append(offset)
        self._ready.give_back(zip(again, self._in_flight.remove(again), strict=True))
        self._changed()

    def reject(self, offsets: Sequence[int]) -> None:
        """They are dead letters."""
        for offset in offsets:
            self._bury(offset, Reason.REJECTED, self._state.counts.get(offset, 0) + 1)

    # Messages that are not in flight

    def settle(self, offsets: Sequence[int]) -> None:
        """They need no delivery any more."""
        self._state.settle(offsets)
        self._changed()

    def drop(self, offsets: list[int], records: list[Record], reason: Reason) -> None:
        """They are not delivered any more. They become dead letters if there is an exchange for those."""
        self._state.end = max(self._state.end, offsets[-1] + 1)
        if self.queue.limits.dead_letter_exchange is None:
            SHARDING_DROPPED.series(reason).add(len(offsets))
            self.settle(offsets)
            return
        self._in_flight.add(offsets, records)
        for offset in offsets:
            self._bury(offset, reason, self._state.counts.get(offset, 0))

    def _bury(self, offset: int, reason: Reason, count: int) -> None:
        """Store a message that is in flight as a dead letter, then settle it."""
        if self.queue.kind is QueueKind.DEAD:  # what is rejected there is gone
            SHARDING_DROPPED.series(reason).add()
            self._buried([offset])
        else:
            self._burial.add(offset, DeadLetter(self._in_flight[offset], reason, count))

    def _buried(self, offsets: Sequence[int]) -> None:
        self._in_flight.remove(offsets)
        self.settle(offsets)
