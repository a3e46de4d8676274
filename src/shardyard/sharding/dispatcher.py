"""Delivers the messages of a queue to its subscriptions."""

import asyncio
from collections.abc import Callable
from weakref import WeakSet

from shardyard.model import Record, ShardyardError
from shardyard.runtime.metrics import SHARDING_DELIVERED, SHARDING_REDELIVERED
from shardyard.sharding.ack_state import AckState
from shardyard.sharding.config import ShardingConfig
from shardyard.sharding.delivery import Deliveries, Receiver, Subscription
from shardyard.sharding.in_flight import InFlight
from shardyard.sharding.limits import LimitKeeper
from shardyard.sharding.read_ahead import ReadAhead
from shardyard.sharding.settling import Settling

TOUCH_SECONDS = 0.05
"""How often a node that is out of touch looks whether it may deliver again."""


class Dispatcher:
    """Delivers what is in memory as soon as subscriptions take it: to each in turn, an equal share."""

    def __init__(
        self,
        state: AckState,
        ahead: ReadAhead,
        in_flight: InFlight,
        limits: LimitKeeper,
        settling: Settling,
        config: ShardingConfig,
        is_in_touch: Callable[[], bool],
        doubtful: int,
    ) -> None:
        """`is_in_touch`: whether nobody else can own the queue yet. `doubtful`: what lies before this offset may have
        been delivered by an earlier owner."""
        self.may_deliver = False
        """It is stored that messages are delivered, so that the next owner knows if this process dies."""
        self.subscriptions: dict[Subscription, Receiver] = {}
        """The one whose turn it is comes first."""
        self.wanted = asyncio.Event()
        """There is room for messages and somebody who takes them, or limits to look after."""
        self._holders: WeakSet[Subscription] = WeakSet()
        """All that may have deliveries to settle, also those that take no more."""
        self._state = state
        self._ahead = ahead
        self._in_flight = in_flight
        self._limits = limits
        self._settling = settling
        self._config = config
        self._is_in_touch = is_in_touch
        self._doubtful = doubtful
        self._is_running = False
        self._scheduled: asyncio.Handle | None = None
        """The call of `dispatch`."""

    def start(self) -> None:
        """Deliver from now on."""
        self._is_running = True
        self.note_wanted()

    def stop(self) -> None:
        """Deliver nothing more."""
        self._is_running = False

    # Subscriptions

    def subscribe(self, subscription: Subscription, receiver: Receiver) -> None:
        self.subscriptions[subscription] = receiver
        self._holders.add(subscription)
        self.wanted.set()
        self.dispatch_soon()

    def hold(self, holder: Subscription) -> None:
        """It settles messages that are fetched."""
        self._holders.add(holder)

    def end_subscriptions(self, error: ShardyardError) -> None:
        """This node does not serve the queue any more."""
        holders = list(self._holders)
        self.subscriptions.clear()
        self._holders.clear()
        for subscription in holders:
            subscription.end(error)

    # Delivering

    def dispatch_soon(self) -> None:
        """Something may be deliverable, or wanted, that was not so before."""
        if not len(self._ahead.ready) and self.wanted.is_set():  # what is read next will be dispatched
            return
        if self._scheduled is None and self._is_running:
            self._scheduled = asyncio.get_running_loop().call_soon(self.dispatch)

    def dispatch(self) -> None:
        """Deliver as much as the subscriptions take."""
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        if not self._is_running:
            return
        if not self._is_in_touch():  # another node may serve it by now
            self.wanted.clear()
            self._scheduled = asyncio.get_running_loop().call_later(TOUCH_SECONDS, self.dispatch)
            return
        self._limits.drop_expired()
        if self.may_deliver:
            while len(self._ahead.ready) and (takers := self._takers()):
                share = min(max(1, len(self._ahead.ready) // len(takers)), self._config.batch_records)
                for subscription in takers:
                    most = subscription.credit(share if subscription.no_ack else min(share, self._in_flight.room))
                    if most > 0 and len(self._ahead.ready):
                        self._deliver(subscription, most)
        self.note_wanted()

    def hand_over(self, subscription: Subscription, offsets: list[int], records: list[Record]) -> Deliveries:
        """These messages, which were taken from those that are ready, as deliveries to a subscription."""
        state = self._state
        state.end = max(state.end, offsets[-1] + 1)
        counts, again = [0] * len(offsets), [False] * len(offsets)
        if state.counts or offsets[0] < self._doubtful:
            counts = [state.counts.get(offset, 0) for offset in offsets]
            again = [offset in state.counts or offset < self._doubtful for offset in offsets]
            SHARDING_REDELIVERED.add(sum(again))
        first = subscription.add(offsets)
        if subscription.no_ack:
            self._settling.settle(offsets)
        else:
            self._in_flight.add(offsets, records)
        SHARDING_DELIVERED.add(len(offsets))
        return Deliveries(first, offsets, records, counts, again)

    def note_wanted(self) -> None:
        """Set `wanted` to what is true now."""
        has_room = self._ahead.has_room and self._settling.unburied < self._config.in_flight_records
        if has_room and (self._limits.is_watching or self._takers()):
            self.wanted.set()
        else:
            self.wanted.clear()

    def _takers(self) -> list[Subscription]:
        """Who takes messages now, in the order of turns."""
        has_room = self._in_flight.room > 0
        return [each for each in self.subscriptions if (has_room or each.no_ack) and each.credit(1) > 0]

    def _deliver(self, subscription: Subscription, most: int) -> None:
        offsets, records = self._ahead.ready.take(most, self._config.batch_bytes)
        offsets, records = self._limits.without_expired(offsets, records)
        if not offsets:
            return
        receiver = self.subscriptions.pop(subscription)
        self.subscriptions[subscription] = receiver  # all others come first now
        receiver(self.hand_over(subscription, offsets, records))
