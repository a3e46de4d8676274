"""Routing: the queues that each message goes to.

    x-modulus-hash      element phash2([RoutingKey | CC ++ BCC], 2^27) rem N of the sorted list of N bindings, just as
                        RabbitMQ: a queue that is bound k times is in it k times, and the bindings' keys do not matter
    x-consistent-hash   by rendezvous hashing of the routing key. A binding's key is the weight of its queue, and a
                        shard's weight is 1. When a queue comes or goes, only its own keys move.
    direct              every queue that is bound with the routing key, or one of CC and BCC
    fanout              every queue that is bound

The two hashing types may hash a header or a property instead. A message without it is hashed as the empty key.
"""

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shardyard.model import InvalidValue
from shardyard.model.sharding import Exchange, ExchangeType, OutgoingMessage, Queue, QueueKind
from shardyard.placement.hashes import HASHES, phash2
from shardyard.placement.rendezvous import Rendezvous
from shardyard.sharding.checks import weight_of
from shardyard.sharding.topology import Topology

FEW = 16
"""Up to so many keys are hashed one by one, which is faster then."""
SOME = 256
"""Up to so many messages, the keys that were hashed before are looked up."""
MOST_KEPT = 50_000
"""Keys whose places an exchange keeps. One more, and it begins anew."""
KEPT_LENGTH = 256
"""Places of longer keys are not kept."""

_phash2 = HASHES["phash2"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Where the messages of a batch go."""

    by_queue: dict[str, list[int]]
    """The name of each queue that gets some of them, with their indexes in the batch in ascending order."""
    counts: list[int]
    """For each message, how many queues it goes to."""


class Router(ABC):
    """Chooses the queues of the messages to one exchange, under one topology."""

    queues: tuple[Queue, ...]
    """The queues that the exchange has bindings to, in the order of their names."""

    @abstractmethod
    def route(self, message: OutgoingMessage) -> tuple[Queue, ...]:
        """The queues that a message goes to, in the order of their names."""

    def distribute(self, messages: Sequence[OutgoingMessage]) -> Distribution:
        """Route a batch of messages."""
        by_queue: defaultdict[str, list[int]] = defaultdict(list)
        counts = []
        for index, message in enumerate(messages):
            queues = self.route(message)
            counts.append(len(queues))
            for queue in queues:
                by_queue[queue.name].append(index)
        return Distribution(dict(by_queue), counts)


def router_of(topology: Topology, exchange: str) -> Router:
    """The router of an exchange; `UnknownExchange` if there is none. It is built once for each topology."""
    return topology.derived(("router", exchange), lambda: _router(topology, topology.exchange(exchange)))


def route(topology: Topology, exchange: str, messages: Sequence[OutgoingMessage]) -> list[tuple[Queue, ...]]:
    """The queues of each message."""
    router = router_of(topology, exchange)
    return [router.route(message) for message in messages]


def distribute(topology: Topology, exchange: str, messages: Sequence[OutgoingMessage]) -> Distribution:
    """The messages of each queue. Large batches are routed all at once."""
    return router_of(topology, exchange).distribute(messages)


def _router(topology: Topology, exchange: Exchange) -> Router:
    bindings = [(topology.queues[binding.queue], binding) for binding in topology.bindings(exchange.name)]
    match exchange.type:
        case ExchangeType.MODULUS_HASH:
            return ModulusRouter(exchange, [queue for queue, _ in bindings])
        case ExchangeType.CONSISTENT_HASH:
            weights: Counter[Queue] = Counter()
            for queue, binding in bindings:
                weights[queue] += 1 if queue.kind is QueueKind.SHARD else weight_of(binding)
            return ConsistentRouter(exchange, weights)
        case ExchangeType.DIRECT:
            return DirectRouter([(queue, binding.routing_key) for queue, binding in bindings])
        case ExchangeType.FANOUT:
            return FanoutRouter([queue for queue, _ in bindings])


class HashRouter(Router):
    """One queue for each message, by a hash; none if there are no queues."""

    def __init__(self, exchange: Exchange, queues: Sequence[Queue]) -> None:
        self.queues = tuple(sorted(set(queues), key=lambda queue: queue.name))
        self._header = exchange.hash_header
        self._property = exchange.hash_property
        self._by_routing_key = self._header is None and self._property is None
        self._kept: dict[bytes | str, int] = {}
        """The places of keys that were hashed before."""

    def route(self, message: OutgoingMessage) -> tuple[Queue, ...]:
        return (self.queues[self.place(message)],) if self.queues else ()

    def distribute(self, messages: Sequence[OutgoingMessage]) -> Distribution:
        if not self.queues:
            return Distribution({}, [0] * len(messages))
        if len(messages) <= SOME:
            by_queue: defaultdict[str, list[int]] = defaultdict(list)
            for index, place in enumerate(self._places_of_some(messages)):
                by_queue[self.queues[place].name].append(index)
            return Distribution(dict(by_queue), [1] * len(messages))
        places = self.places(messages)
        order = np.argsort(places, kind="stable")
        ends = np.cumsum(np.bincount(places, minlength=len(self.queues)))
        found = zip(self.queues, np.split(order, ends[:-1]), strict=True)
        return Distribution({queue.name: part.tolist() for queue, part in found if len(part)}, [1] * len(messages))

    @abstractmethod
    def place(self, message: OutgoingMessage) -> int:
        """The index in `queues` of the queue of a message."""

    @abstractmethod
    def places(self, messages: Sequence[OutgoingMessage]) -> npt.NDArray[np.int32]:
        """The index in `queues` of the queue of each message."""

    def _places_of_some(self, messages: Sequence[OutgoingMessage]) -> list[int]:
        """The same, with the places of keys that were hashed before. Those with CC and BCC are hashed each time."""
        keys = [None if message.cc or message.bcc else self._key(message) for message in messages]
        found = [None if key is None else self._kept.get(key) for key in keys]
        new = [index for index, place in enumerate(found) if place is None]
        if len(new) > FEW:
            places = self.places([messages[index] for index in new]).tolist()
        else:
            places = [self.place(messages[index]) for index in new]
        if len(self._kept) + len(new) > MOST_KEPT:
            self._kept.clear()
        for index, place in zip(new, places, strict=True):
            found[index] = place
            if (key := keys[index]) is not None and len(key) <= KEPT_LENGTH:
                self._kept[key] = place
        return cast(list[int], found)

    def _key(self, message: OutgoingMessage) -> bytes | str:
        """What is hashed of a message."""
        if self._header is not None:
            return next((value for name, value in reversed(message.headers) if name == self._header), b"")
        if self._property is not None:
            return next((value for name, value in reversed(message.properties) if name == self._property), "")
        return message.routing_key

    def _keys(self, messages: Sequence[OutgoingMessage]) -> pa.Array:
        try:
            if self._by_routing_key:
                return pa.array([message.routing_key for message in messages], pa.string())
            return pa.array([self._key(message) for message in messages], pa.binary())
        except UnicodeEncodeError as error:
            raise InvalidValue("routing key", error.object, "text that UTF-8 can hold") from None


class ModulusRouter(HashRouter):
    """RabbitMQ's x-modulus-hash."""

    def __init__(self, exchange: Exchange, bound: Sequence[Queue]) -> None:
        """`bound`: the queues in the order of the bindings, each as often as it is bound."""
        super().__init__(exchange, bound)
        indexes = {queue: index for index, queue in enumerate(self.queues)}
        self._bound = np.array([indexes[queue] for queue in bound], np.int32)

    def place(self, message: OutgoingMessage) -> int:
        return int(self._bound[self._hash(message) % len(self._bound)])

    def places(self, messages: Sequence[OutgoingMessage]) -> npt.NDArray[np.int32]:
        hashes = _phash2.array(self._keys(messages))
        if self._by_routing_key:
            for index, message in enumerate(messages):
                if message.cc or message.bcc:
                    hashes[index] = self._hash(message)
        return self._bound.take(hashes % np.uint32(len(self._bound)))

    def _hash(self, message: OutgoingMessage) -> int:
        if self._by_routing_key and (message.cc or message.bcc):
            return phash2((message.routing_key, *message.cc, *message.bcc))
        return _phash2(self._key(message))


class ConsistentRouter(HashRouter):
    """Rendezvous hashing."""

    def __init__(self, exchange: Exchange, weights: Counter[Queue]) -> None:
        super().__init__(exchange, list(weights))
        self._rendezvous = Rendezvous({queue.name: weights[queue] for queue in weights}) if weights else None

    def place(self, message: OutgoingMessage) -> int:
        assert self._rendezvous is not None  # noqa: S101 there are queues
        return self._rendezvous.place(self._key(message))

    def places(self, messages: Sequence[OutgoingMessage]) -> npt.NDArray[np.int32]:
        assert self._rendezvous is not None  # noqa: S101 likewise
        return self._rendezvous.place_array(self._keys(messages))


class DirectRouter(Router):
    """All queues that are bound with one of the message's keys."""

    def __init__(self, bound: Sequence[tuple[Queue, str]]) -> None:
        self.queues = tuple(dict.fromkeys(queue for queue, _ in bound))
        by_key: defaultdict[str, list[Queue]] = defaultdict(list)
        for queue, key in bound:
            by_key[key].append(queue)
        self._by_key = {key: tuple(queues) for key, queues in by_key.items()}

    def route(self, message: OutgoingMessage) -> tuple[Queue, ...]:
        found = self._by_key.get(message.routing_key, ())
        if not message.cc and not message.bcc:
            return found
        others = (queue for key in (*message.cc, *message.bcc) for queue in self._by_key.get(key, ()))
        return tuple(sorted({*found, *others}, key=lambda queue: queue.name))


class FanoutRouter(Router):
    """All queues."""

    def __init__(self, bound: Sequence[Queue]) -> None:
        self.queues = tuple(dict.fromkeys(bound))

    def route(self, _message: OutgoingMessage) -> tuple[Queue, ...]:
        return self.queues
