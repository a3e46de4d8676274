"""Which queues a message goes to, with the cases of RabbitMQ's suites for the plugin and for consistent hashing."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from shardyard.model import InvalidValue, UnknownExchange
from shardyard.model.sharding import (
    Binding,
    Exchange,
    ExchangeType,
    OutgoingMessage,
    Overflow,
    Policy,
    Queue,
    QueueLimits,
    shard_name,
)
from shardyard.sharding import routing
from shardyard.sharding.routing import FEW, distribute, route, router_of
from shardyard.sharding.runs import runs_of
from shardyard.sharding.shards import with_shards
from shardyard.sharding.slots import with_queues
from shardyard.sharding.topology import Topology

VECTORS = json.loads((Path(__file__).parents[1] / "placement" / "phash2.json").read_text())["vectors"]
HASHING = [ExchangeType.MODULUS_HASH, ExchangeType.CONSISTENT_HASH]


def sharded(kind: ExchangeType, shards: int, *, nodes: tuple[str, ...] = ("a",), routing_key: str = "") -> Topology:
    """The exchange `x` with so many shards on each node."""
    policy = Policy("p", "^x$", shards, routing_key)
    exchange = Exchange("x", kind)
    return with_shards(Topology(1, {"x": exchange}, {"p": policy}, nodes=frozenset(nodes)))


def bound(kind: ExchangeType, bindings: list[tuple[str, str]], **arguments: str) -> Topology:
    """The exchange `x` with queues that are bound by these keys."""
    queues = [Queue(name, -1, -1) for name in dict.fromkeys(name for name, _ in bindings)]
    topology = with_queues(Topology(1, {"x": Exchange("x", kind, **arguments)}), queues)
    return replace(topology, declared_bindings=frozenset(Binding("x", name, key) for name, key in bindings))


def message(key: str, **fields: Any) -> OutgoingMessage:
    return structs.replace(OutgoingMessage(b"", key), **fields)


def names(topology: Topology, *messages: OutgoingMessage) -> list[list[str]]:
    return [[queue.name for queue in queues] for queues in route(topology, "x", messages)]


def counts(topology: Topology, keys: list[str]) -> list[int]:
    """How many of the messages each queue gets, in the order of their names."""
    found = Counter(name for [name] in names(topology, *map(message, keys)))
    return [found[queue.name] for queue in router_of(topology, "x").queues]


# x-modulus-hash


@pytest.mark.parametrize(("shards", "keys", "expected"), [(4, "key", [24, 27, 20, 29]), (3, "k", [203, 190, 207])])
def test_keys_are_distributed_as_a_real_rabbitmq_distributes_them(shards: int, keys: str, expected: list[int]) -> None:
    topology = sharded(ExchangeType.MODULUS_HASH, shards)
    assert counts(topology, [f"{keys}{n}" for n in range(sum(expected))]) == expected


@pytest.mark.parametrize("shards", [2, 3, 4, 5, 6, 8, 10])
def test_each_vector_of_erlang_goes_to_the_shard_that_rabbitmq_chooses(shards: int) -> None:
    topology = sharded(ExchangeType.MODULUS_HASH, shards)
    queues = sorted(shard_name("x", "a", index) for index in range(shards))
    checked = 0
    for vector in VECTORS:
        keys = [bytes.fromhex(key["hex"]) for key in vector["keys"]]
        if vector["kind"].startswith("list") and all(_is_text(key) for key in keys) and keys:
            first, *others = [key.decode() for key in keys]
            half = len(others) // 2
            sent = message(first, cc=tuple(others[:half]), bcc=tuple(others[half:]))
            expected = [queues[vector["rem"][str(shards)]]]
            assert names(topology, sent) == [expected]
            assert distribute(topology, "x", [sent] * (FEW + 1)).by_queue == {expected[0]: list(range(FEW + 1))}
            checked += 1
    assert checked >= 12


def _is_text(key: bytes) -> bool:
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_shards_are_sorted_bytewise_so_that_10_comes_before_2() -> None:
    topology = sharded(ExchangeType.MODULUS_HASH, 12)
    indexes = [queue.index for queue in router_of(topology, "x").queues]
    assert indexes == [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_queue_that_is_bound_three_times_gets_three_times_as_much() -> None:
    once = bound(ExchangeType.MODULUS_HASH, [("q", ""), ("r", "")])
    thrice = bound(ExchangeType.MODULUS_HASH, [("q", "1"), ("q", "2"), ("q", "3"), ("r", "")])
    keys = [f"key{n}" for n in range(2000)]
    assert abs(counts(once, keys)[0] - 1000) < 100
    assert abs(counts(thrice, keys)[0] - 1500) < 100


# RabbitMQ's cases of routing


@pytest.mark.parametrize("kind", ExchangeType)
def test_routed_to_zero_queues_without_bindings(kind: ExchangeType) -> None:
    topology = Topology(1, {"x": Exchange("x", kind)})
    assert names(topology, message("a"), message("b")) == [[], []]
    assert distribute(topology, "x", [message("a")] * 20).counts == [0] * 20


@pytest.mark.parametrize("kind", HASHING)
def test_routed_to_one_queue(kind: ExchangeType) -> None:
    topology = sharded(kind, 1)
    assert names(topology, *(message(f"key{n}") for n in range(20))) == [[shard_name("x", "a", 0)]] * 20


@pytest.mark.parametrize("kind", HASHING)
def test_routed_to_many_queues_each_message_to_one_of_them(kind: ExchangeType) -> None:
    topology = sharded(kind, 5, nodes=("a", "b"))
    found = counts(topology, [f"key{n}" for n in range(1000)])
    assert len(found) == 10
    assert sum(found) == 1000
    assert min(found) > 50


@pytest.mark.parametrize("kind", HASHING)
def test_stable_routing_across_restarts_with_40_queues_and_500_keys(kind: ExchangeType) -> None:
    bindings = [(f"queue-{n}", "1") for n in range(40)]
    keys = [message(f"key-{n}") for n in range(500)]
    first = names(bound(kind, bindings), *keys)
    for order in (bindings[::-1], bindings[20:] + bindings[:20]):
        assert names(bound(kind, order), *keys) == first


def test_weights_1_to_2_to_3() -> None:
    topology = bound(ExchangeType.CONSISTENT_HASH, [("q1", "1"), ("q2", "2"), ("q3", "3")])
    found = counts(topology, [f"key{n}" for n in range(6000)])
    for weight, count in zip((1, 2, 3), found, strict=True):
        assert abs(count - 1000 * weight) < 150


def test_the_number_of_keys_that_move_when_a_shard_is_added_is_its_share() -> None:
    keys = [message(f"key{n}") for n in range(1000)]
    before = names(sharded(ExchangeType.CONSISTENT_HASH, 4), *keys)
    after = names(sharded(ExchangeType.CONSISTENT_HASH, 5), *keys)
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert {name for [name] in moved} == {shard_name("x", "a", 4)}
    assert abs(len(moved) - 200) < 60


# Headers and properties


@pytest.mark.parametrize("kind", HASHING)
def test_a_header_is_hashed_instead_of_the_routing_key(kind: ExchangeType) -> None:
    queues = [(f"q{n}", "1") for n in range(4)]
    topology, by_key = bound(kind, queues, hash_header="user"), bound(kind, queues)
    sent = [message(f"{n}", headers=(("user", b"user-%d" % (n % 7)),), cc=("x",)) for n in range(100)]
    expected = names(by_key, *(message(f"user-{n % 7}") for n in range(100)))
    assert names(topology, *sent) == expected
    distribution = distribute(topology, "x", sent)
    assert all(expected[index] == [name] for name, indexes in distribution.by_queue.items() for index in indexes)


@pytest.mark.parametrize("kind", HASHING)
def test_a_property_is_hashed_and_messages_without_it_go_to_one_queue(kind: ExchangeType) -> None:
    queues = [(f"q{n}", "1") for n in range(4)]
    topology, by_key = bound(kind, queues, hash_property="message_id"), bound(kind, queues)
    with_it = message("a", properties=(("content_type", "x"), ("message_id", "m7")))
    assert names(topology, with_it, message("b")) == names(by_key, message("m7"), message(""))
    assert names(topology, *(message(f"{n}") for n in range(20))) == names(by_key, message("")) * 20


# direct and fanout


def test_a_direct_exchange_copies_to_every_queue_that_is_bound_with_one_of_the_keys() -> None:
    topology = bound(ExchangeType.DIRECT, [("q1", "a"), ("q2", "a"), ("q2", "b"), ("q3", "c")])
    assert names(topology, message("a"), message("b"), message("x")) == [["q1", "q2"], ["q2"], []]
    assert names(topology, message("a", cc=("b", "c")), message("x", bcc=("c", "c"))) == [["q1", "q2", "q3"], ["q3"]]


def test_the_shards_of_a_direct_exchange_get_what_has_the_routing_key_of_the_policy() -> None:
    topology = sharded(ExchangeType.DIRECT, 2, routing_key="1234")
    all_shards = [shard_name("x", "a", 0), shard_name("x", "a", 1)]
    assert names(topology, message("1234"), message("")) == [all_shards, []]


def test_a_fanout_exchange_copies_to_every_queue_once() -> None:
    topology = bound(ExchangeType.FANOUT, [("q1", "a"), ("q1", "b"), ("q2", "")])
    assert names(topology, message("a"), message("z")) == [["q1", "q2"]] * 2
    assert distribute(topology, "x", [message("a")] * 3).by_queue == {"q1": [0, 1, 2], "q2": [0, 1, 2]}


# Batches

messages = st.builds(
    OutgoingMessage,
    body=st.just(b""),
    routing_key=st.text(max_size=15),
    cc=st.just(()) | st.lists(st.sampled_from(["a", "b"]), max_size=2).map(tuple),
    bcc=st.just(()) | st.lists(st.sampled_from(["a", "c"]), max_size=2).map(tuple),
)


@pytest.mark.parametrize("kind", ExchangeType)
@given(batch=st.lists(messages, max_size=40))
def test_a_batch_is_routed_like_its_messages(kind: ExchangeType, batch: list[OutgoingMessage]) -> None:
    topology = bound(kind, [("q1", "1"), ("q2", "2"), ("q2", "3"), ("q3", "1")])
    for batches in (1, 1, 10):  # the second time the keys are known; ten of them may be more than are looked up
        distribution = distribute(topology, "x", batch * batches)
        expected = names(topology, *batch) * batches
        assert distribution.counts == [len(found) for found in expected]
        for index, found in enumerate(expected):
            assert [name for name, indexes in sorted(distribution.by_queue.items()) if index in indexes] == found
        assert all(indexes == sorted(indexes) for indexes in distribution.by_queue.values())


def test_an_exchange_keeps_a_limited_number_of_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MOST_KEPT", 100)
    topology = sharded(ExchangeType.MODULUS_HASH, 4)
    for first in range(0, 1000, 50):
        batch = [message(f"key {number}") for number in range(first, first + 50)]
        found = distribute(topology, "x", batch)
        assert [name for at in range(50) for name, part in found.by_queue.items() if at in part] == [
            queue for (queue,) in names(topology, *batch)
        ]
    router = routing.router_of(topology, "x")
    assert isinstance(router, routing.HashRouter)
    assert len(router._kept) <= 100


@pytest.mark.parametrize("kind", HASHING)
@pytest.mark.parametrize("count", [1, 20])
def test_a_key_that_can_not_be_encoded_is_refused(kind: ExchangeType, count: int) -> None:
    with pytest.raises(InvalidValue, match="key"):
        distribute(sharded(kind, 2), "x", [message("\ud800")] * count)


def test_an_unknown_exchange_is_named() -> None:
    with pytest.raises(UnknownExchange):
        route(Topology(), "x", [message("a")])


# Runs


FULL = QueueLimits(max_length=1, overflow=Overflow.REJECT_PUBLISH)


def limited(topology: Topology, *queues: str) -> Topology:
    """The same, with queues that may refuse messages."""
    changed = {name: replace(topology.queues[name], limits=FULL) for name in queues}
    return replace(topology, queues={**topology.queues, **changed})


def runs(topology: Topology, keys: str) -> list[str]:
    return ["".join(keys[place] for place in run) for run in runs_of(topology, "x", [message(key) for key in keys])]


def test_a_batch_falls_into_runs_where_a_queue_may_take_only_some_of_its_part() -> None:
    direct = bound(ExchangeType.DIRECT, [("q", "k"), ("r", "l"), ("all", "k"), ("all", "l"), ("all", "f")])
    assert runs(limited(direct, "q"), "kkffkl") == ["kk", "ff", "k", "l"]
    assert runs(limited(direct, "q", "r"), "klff") == ["k", "l", "ff"]
    assert runs(limited(direct, "q"), "kkk") == ["kkk"]
    assert runs(direct, "kkffkl") == ["kkffkl"], "no queue refuses anything"
    assert runs(limited(direct, "all"), "kkffkl") == ["kkffkl"], "the queue takes everything or nothing"
    apart = bound(ExchangeType.DIRECT, [("q", "k"), ("other", "f")])
    assert runs(limited(apart, "q"), "kfk") == ["kfk"], "no queue gets both"


@pytest.mark.parametrize("kind", [*HASHING, ExchangeType.FANOUT])
def test_other_exchanges_store_or_refuse_the_part_of_a_queue_as_a_whole(kind: ExchangeType) -> None:
    topology = bound(kind, [("q", "1"), ("r", "1")])
    assert runs(limited(topology, "q"), "abcdef") == ["abcdef"]
    assert runs_of(topology, "nothing", [message("k")]) == [range(1)]
