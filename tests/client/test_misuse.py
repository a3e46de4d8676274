"""Calls that are wrong, or not quite right: each works, or fails at once with an error that says what to do."""

import asyncio
import json
from collections.abc import AsyncIterable, Callable, Coroutine
from typing import Any, cast

import numpy as np
import pytest

from shardyard.client import BlockingConsumer, BlockingProducer, Consumer, MessagingClient, Producer
from shardyard.model import InvalidCall, InvalidValue, Record
from tests.queues.setup import Cluster, run

URL = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    "call",
    [
        lambda: BlockingProducer(URL).send("orders", "a"),
        lambda: BlockingProducer(URL).publish("orders", [Record.new(b"a")]),
    ],
)
def test_a_blocking_producer_outside_its_block_says_how_to_open_it(call: Callable[[], object]) -> None:
    with pytest.raises(InvalidCall, match=r"the BlockingProducer is not open: use it inside a block, `with Blocking"):
        call()


def test_a_blocking_consumer_outside_its_block_says_how_to_open_it() -> None:
    consumer = BlockingConsumer(URL, "billing", ["orders"])
    with pytest.raises(InvalidCall, match="the BlockingConsumer is not open"):
        consumer.run(print)
    with pytest.raises(InvalidCall, match="the BlockingConsumer is not open"):
        next(iter(consumer))


def test_a_blocking_producer_after_its_block_is_not_open() -> None:
    with BlockingProducer(URL) as producer:
        pass
    with pytest.raises(InvalidCall, match="is not open"):
        producer.send("orders", "a")


async def next_of(events: AsyncIterable[object]) -> object:
    return await anext(aiter(events))


MESSAGING: dict[str, Callable[[MessagingClient], Coroutine[Any, Any, object]]] = {
    "send": lambda client: client.send("bob", "hello"),
    "mark_seen": lambda client: client.mark_seen("bob", "5"),
    "mark_delivered": lambda client: client.mark_delivered("bob", "5"),
    "typing": lambda client: client.typing("bob"),
    "watch": lambda client: client.watch(["bob"]),
    "history": lambda client: client.history("bob"),
    "chats": lambda client: client.chats(),
    "join": lambda client: client.join("general"),
    "leave": lambda client: client.leave("general"),
    "post": lambda client: client.post("general", "hello"),
    "typing_in": lambda client: client.typing_in("general"),
    "posts": lambda client: client.posts("general"),
    "channels": lambda client: client.channels(),
    "next_event": lambda client: client.next_event(),
    "iterating": next_of,
    "events": lambda client: next_of(client.events()),
}


@pytest.mark.parametrize("call", MESSAGING.values(), ids=MESSAGING)
def test_a_messaging_client_that_was_not_entered_says_so_at_once(
    call: Callable[[MessagingClient], Coroutine[Any, Any, object]],
) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(10):
            await call(MessagingClient(URL, "alice"))

    with pytest.raises(InvalidCall, match=r"^the client is not open: enter it by `async with` first$"):
        asyncio.run(scenario())


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tag": 5}, "tag is 5: expected a string"),
    ({"trace": 5}, "trace is 5: expected a string"),
    ({"delay": "3"}, "delay is '3': expected a number of seconds"),
    ({"delay": True}, "delay is True: expected a number of seconds"),
    ({"deliver_at": "noon"}, "deliver_at is 'noon': expected a whole number"),
    ({"key": 5}, "key is 5: expected bytes, or a string"),
    ({"value": 5}, "value is 5: expected bytes, a string, or a dict or list"),
    ({"value": None}, "value is missing: expected bytes, a string"),
    ({"value": {"a": {1, 2}}}, "value is 'a dict': expected what JSON can express"),
    ({"value": "\ud800"}, "value is '\\ud800': expected a string without lone surrogates"),
    ({"headers": {"a": 5}}, "header 'a' is 5: expected bytes, or a string"),
    ({"headers": {5: b"a"}}, "header is (5, b'a'): expected a mapping, or pairs"),
    ({"headers": "a=b"}, "headers is 'a=b': expected a mapping, or pairs"),
    ({"headers": [("a",)]}, "header is ('a',): expected a mapping, or pairs"),
    ({"headers": 5}, "headers is 5: expected a mapping, or pairs"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_argument_of_send_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with BlockingProducer(URL, retry_seconds=60) as producer, pytest.raises(InvalidValue) as refused:
        producer.send("orders", **{"value": "a", **options})
    assert str(refused.value).startswith(message)


CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: Producer(cast(Any, None)), "broker is missing: expected an address such as http://127.0.0.1:7400"),
    (lambda: Producer(cast(Any, 8100)), "broker is 8100: expected an address"),
    (lambda: Producer([]), "brokers is []: expected at least one address"),
    (lambda: Producer(URL, retry_seconds=cast(Any, "3")), "retry_seconds is '3': expected a number of seconds"),
    (lambda: Producer(URL, retry_seconds=-1), "retry_seconds is -1: expected a number of seconds, at least 0"),
    (lambda: Producer(URL, token=cast(Any, 5)), "token is '***': expected a string in one line"),
    (lambda: Producer(URL, token="secret\n"), "token is '***': expected a string in one line"),
    (lambda: Consumer(URL, cast(Any, 5), ["orders"]), "group is 5: expected a string"),
    (lambda: BlockingConsumer(URL, cast(Any, 5), ["orders"]).__enter__(), "group is 5: expected a string"),
    (lambda: asyncio.run(Producer(URL).send(cast(Any, 5), "x")), "topic is 5: expected a string"),
    (lambda: asyncio.run(Producer(URL).send(cast(Any, ["a"]), "x", delay=1)), "topic is ['a']: expected a string"),
    (lambda: asyncio.run(Producer(URL).publish(cast(Any, 5), [Record.new("x")])), "topic is 5: expected a string"),
    (lambda: publish_on("3"), "partition is '3': expected a whole number of at least 0"),
    (lambda: publish_on(-1), "partition is -1: expected a whole number of at least 0"),
    (lambda: publish_on(True), "partition is True: expected a whole number of at least 0"),
    (lambda: publish_on(2**70), f"partition is {2**70}: expected at most 2**63 - 1"),
    (lambda: asyncio.run(consumer().run(cast(Any, None))), "handler is missing: expected a function"),
    (lambda: asyncio.run(consumer().run(print, concurrency=cast(Any, "3"))), "concurrency is '3': expected a whole"),
    (lambda: asyncio.run(consumer().run(print, concurrency=0)), "concurrency is 0: expected a whole number"),
]


def publish_on(partition: object) -> object:
    return asyncio.run(Producer(URL).publish("orders", [Record.new("x")], partition=cast(Any, partition)))


def consumer() -> Consumer:
    return Consumer(URL, "billing", ["orders"])


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_wrong_arguments_are_refused_before_a_broker_is_called(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        call()
    assert str(refused.value).startswith(message)


def test_what_can_only_mean_one_thing_is_stored() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        async with cluster.producer() as producer:
            headers: dict[str, bytes | str] = {"a": b"\xff", "b": "é"}
            await producer.send("orders", "é", key="k", headers=headers, tag="eu")
            await producer.send("orders", {"customer": "é", "items": [1, 2.5, None]})
            batch = [Record.new("text", "key", {"a": "b"}), Record.new([1])]
            await producer.publish("orders", batch, partition=cast(Any, np.int64(0)))
        first, second, third, fourth = (await cluster.records())[0]
        assert (first.value, first.key) == ("é".encode(), b"k")
        assert first.headers == (("tag", b"eu"), ("a", b"\xff"), ("b", "é".encode()))
        assert second.value == '{"customer":"é","items":[1,2.5,null]}'.encode()
        assert (third.value, third.key, third.headers) == (b"text", b"key", (("a", b"b"),))
        assert fourth.value == b"[1]"

    run(scenario)


def test_an_object_or_an_array_as_value_is_stored_as_json_and_other_values_are_refused() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.topic(partitions=1)
        path = "/v1/topics/orders/records"
        await cluster.do("POST", path, {"value": {"customer": "é", "items": [1, {"n": None}]}})
        await cluster.do("POST", path, {"records": [{"value": []}, {"value": "[]"}, {"value": {}}]})
        values = [record.value for record in (await cluster.records())[0]]
        assert json.loads(values[0]) == {"customer": "é", "items": [1, {"n": None}]}
        assert values[1:] == [b"[]", b"[]", b"{}"]
        for wrong in (5, True):
            refused = await cluster.request("POST", path, {"value": wrong})
            assert refused.status == 400
            assert "Expected `str | object | array | null`" in refused.json["error"]["message"]
        both = await cluster.request("POST", path, {"value": {}, "value_base64": "YQ=="})
        assert both.code == "invalid_value"

    run(scenario)


@pytest.mark.parametrize("wrong", [5, None, bytearray(b"a"), {"a": object()}])
def test_a_record_is_made_of_bytes_strings_or_json(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match=r"^value is "):
        Record.new(wrong)
